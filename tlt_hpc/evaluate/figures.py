"""What judged responses come to: greedy, mean@N, pass@k, maj@N with their standard errors. Pure; knows no file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RIGHT = 0
"""The vote of a right response; those of wrong ones count from 1 by what they answer."""


@dataclass(frozen=True)
class Judged:
    """One response as it counts."""

    is_right: bool
    """Its reward is 1 or more."""
    reward: float
    num_tokens: int
    is_cut: bool
    """It reached the cap."""
    vote: int | None = None
    """Which answer it gives, the same for equal ones; None: none."""


@dataclass(frozen=True)
class PromptAnswers:
    """All responses to one prompt; those by sampling in the order of their index."""

    source: str
    """The row's ``data_source``."""
    votes: bool
    """Whether its kind of reward tells which answers are equal: then there is a majority."""
    greedy: Judged | None
    samples: tuple[Judged, ...]

    @property
    def responses(self) -> tuple[Judged, ...]:
        return self.samples if self.greedy is None else (self.greedy, *self.samples)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error; None for a single prompt."""

    value: float
    error: float | None


@dataclass(frozen=True)
class SetFigures:
    """What a policy does on a data set, or on one source within it; None where that was not asked or has no sense."""

    num_prompts: int
    num_samples: int
    greedy: Estimate | None
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


def figures_of(prompts: Sequence[PromptAnswers], ks: Sequence[int]) -> SetFigures:
    """The figures of one or more prompts that all have as many responses."""
    num_samples = len(prompts[0].samples)
    responses = [response for prompt in prompts for response in prompt.responses]
    have_votes = all(prompt.votes for prompt in prompts)
    greedy = [float(prompt.greedy.is_right) for prompt in prompts if prompt.greedy is not None]
    return SetFigures(
        num_prompts=len(prompts),
        num_samples=num_samples,
        greedy=estimate(greedy) if greedy else None,
        mean=estimate([num_right(prompt) / num_samples for prompt in prompts]) if num_samples else None,
        pass_at={k: estimate([pass_at_k(num_samples, num_right(prompt), k) for prompt in prompts]) for k in ks},
        majority=estimate([majority(p.samples) for p in prompts]) if num_samples and have_votes else None,
        reward=estimate([sum(r.reward for r in p.responses) / len(p.responses) for p in prompts]),
        mean_length=sum(response.num_tokens for response in responses) / len(responses),
        cut_share=sum(response.is_cut for response in responses) / len(responses),
        unanswered_share=sum(r.vote is None for r in responses) / len(responses) if have_votes else None,
    )


def num_right(prompt: PromptAnswers) -> int:
    """Right samples."""
    return sum(sample.is_right for sample in prompt.samples)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, and the standard error of it: the deviation of the sample over the root of its size."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, c of them right, hold a right one: 1 - C(n - c, k) / C(n, k), unbiased.

    As the product over i of 1 - k / i, i from n - c + 1 to n, since the coefficients overflow.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    assert 0 <= c <= n and 1 <= k <= n, f"n = {n}, c = {c}, k = {k}"
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(samples: Sequence[Judged]) -> float:
    """1 where the answer that most samples give is right, 0 where it is not; of n answers that tie, 1/n for the right.

    That is the mean over ties broken at random. Samples without an answer do not vote; without any vote it is 0.
    """
    votes = Counter(sample.vote for sample in samples if sample.vote is not None)
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
    found = {name: value for name, value in accuracies.items() if value is not None}
    core = {f"val-core/{name}/acc/{what}": value.value for what, value in found.items()}
    errors = {f"val-aux/{name}/acc/{what}/stderr": v.error for what, v in found.items() if v.error is not None}
    rest = {
        "reward/mean": figures.reward.value,
        "response_length/mean": figures.mean_length,
        "response_length/clip_ratio": figures.cut_share,
    }
    if figures.unanswered_share is not None:
        rest["unanswered"] = figures.unanswered_share
    return {**core, **errors, **{f"val-aux/{name}/{what}": value for what, value in rest.items()}}


def to_json(figures: SetFigures) -> dict[str, Any]:
    """Plain types; estimates as ``{"value", "standard_error"}``."""
    tree: dict[str, Any] = {}
    for name, value in vars(figures).items():
        if isinstance(value, Mapping):
            tree[name] = {str(k): _estimate(each) for k, each in value.items()}
        else:
            tree[name] = _estimate(value) if isinstance(value, Estimate) else value
    return tree


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "standard_error": estimate.error}
