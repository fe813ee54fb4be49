"""What judged responses come to: greedy, mean@N, pass@k, maj@N with their standard errors. Pure; reads no file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tlt_hpc.common.records import FinishReason
from tlt_hpc.storage.rollout_log import JudgedResponse

RIGHT = 0
"""The vote of a right response; those of wrong ones count from 1 by what they answer."""


@dataclass(frozen=True)
class PromptAnswers:
    """All responses to one prompt: first the greedy one, then the samples."""

    responses: Sequence[JudgedResponse]
    votes: Sequence[int | None] | None
    """Which answer each response gives, the same for equal ones, None: none. None as a whole: it is undecidable."""

    @property
    def num_right(self) -> int:
        """Correct samples."""
        return sum(map(is_right, self.responses[1:]))


def is_right(response: JudgedResponse) -> bool:
    """True if the reward is whole: 1 or more."""
    return response.reward >= 1.0


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error; None for a single prompt."""

    value: float
    standard_error: float | None


@dataclass(frozen=True)
class SetFigures:
    """The figures of a policy on a data set, or on one source within it; None where undecidable or without samples."""

    num_prompts: int
    num_samples: int
    greedy: Estimate
    mean: Estimate | None
    """mean@N: the share of right samples."""
    pass_at: dict[int, Estimate]
    majority: Estimate | None
    reward: Estimate
    """Mean of all responses' rewards, which is more than right or wrong where a reward has parts."""
    mean_length: float
    """Tokens, over all responses."""
    cut_share: float
    unanswered_share: float | None


def data_set_figures(prompts: Sequence[PromptAnswers], ks: Sequence[int]) -> SetFigures:
    """The figures of one or more prompts that all have as many responses."""
    num_samples = len(prompts[0].responses) - 1
    responses = [response for prompt in prompts for response in prompt.responses]
    votes = [vote for prompt in prompts for vote in prompt.votes or ()]
    have_votes = all(prompt.votes is not None for prompt in prompts)
    return SetFigures(
        num_prompts=len(prompts),
        num_samples=num_samples,
        greedy=mean_and_standard_error([float(is_right(prompt.responses[0])) for prompt in prompts]),
        mean=mean_and_standard_error([prompt.num_right / num_samples for prompt in prompts]) if num_samples else None,
        pass_at={
            k: mean_and_standard_error([pass_at_k(num_samples, prompt.num_right, k) for prompt in prompts]) for k in ks
        },
        majority=mean_and_standard_error([majority_vote_accuracy((p.votes or ())[1:]) for p in prompts])
        if num_samples and have_votes
        else None,
        reward=mean_and_standard_error([sum(r.reward for r in p.responses) / len(p.responses) for p in prompts]),
        mean_length=sum(len(response.tokens) for response in responses) / len(responses),
        cut_share=sum(response.finish_reason == FinishReason.LENGTH for response in responses) / len(responses),
        unanswered_share=sum(vote is None for vote in votes) / len(votes) if have_votes else None,
    )


def mean_and_standard_error(values: Sequence[float]) -> Estimate:
    """The mean, and the standard error of it: the deviation of the sample over the root of its size."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n samples, c of them right, hold a right one: 1 - C(n - c, k) / C(n, k), unbiased.

    As the product over i of 1 - k / i, i from n - c + 1 to n, since the coefficients overflow.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    assert 0 <= c <= n and 1 <= k <= n, f"n = {n}, c = {c}, k = {k}"
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority_vote_accuracy(sample_votes: Sequence[int | None]) -> float:
    """1 where the answer that most samples give is right, 0 where it is not; of n answers that tie, 1/n for the right.

    That is the mean over ties broken at random. Samples without an answer do not vote; without any vote it is 0.
    """
    votes = Counter(vote for vote in sample_votes if vote is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [vote for vote, count in votes.items() if count == most]
    return float(RIGHT in winners) / len(winners)


def metrics_of(name: str, figures: SetFigures) -> dict[str, float]:
    """One data set's lines: accuracies under ``val-core/NAME/acc``, the rest under ``val-aux/NAME``.

    ``mean@N`` and ``maj@N/mean`` are verl's; ``pass@k`` is unbiased where verl's ``best@k`` draws with replacement.
    """
    n = figures.num_samples
    accuracies = {
        "greedy": figures.greedy,
        f"mean@{n}": figures.mean,
        **{f"pass@{k}": value for k, value in figures.pass_at.items()},
        f"maj@{n}/mean": figures.majority,
    }
    found = {what: value for what, value in accuracies.items() if value is not None}
    errors = {f"acc/{what}/stderr": value.standard_error for what, value in found.items()}
    rest = {
        **errors,
        "reward/mean": figures.reward.value,
        "response_length/mean": figures.mean_length,
        "response_length/clip_ratio": figures.cut_share,
        "unanswered": figures.unanswered_share,
    }
    core = {f"val-core/{name}/acc/{what}": value.value for what, value in found.items()}
    return core | {f"val-aux/{name}/{what}": value for what, value in rest.items() if value is not None}
