"""From judged responses to figures: every data set's, and those of the sources within it. Reads no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from tlt_hpc.common.records import SampleKey
from tlt_hpc.evaluate.figures import PromptAnswers, SetFigures, figures_of, is_right, metrics_of
from tlt_hpc.evaluate.requests import Wanted
from tlt_hpc.evaluate.votes import VOTING_KINDS, Ballot, Pair, count_votes
from tlt_hpc.rewards.answer import Answer
from tlt_hpc.rewards.judge import SAME_MATH
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.storage.evaluation_log import JudgedResponse


@dataclass(frozen=True)
class Results:
    """What an evaluation came to."""

    figures: dict[str, SetFigures]
    """By data set; where a set has several sources, by ``set/source`` as well."""
    num_responses: int
    num_tokens: int
    accept_length: float
    failures: dict[str, int]
    """Responses that were not judged, by reason; they count as wrong."""

    @property
    def metrics(self) -> dict[str, float]:
        """Under verl's names."""
        found: dict[str, float] = {}
        for name, figures in self.figures.items():
            found |= metrics_of(name, figures)
        return found


def tally(
    wanted: Sequence[Wanted],
    responses: Mapping[SampleKey, JudgedResponse],
    bench: Judge,
    tokenizer: Tokenizer,
    ks: Sequence[int],
) -> Results:
    """The figures of the wanted responses, all of which are there.

    Raises:
        UserError: the server of rewards cannot be started again.
    """
    own = [[responses[request.key] for request in each.requests] for each in wanted]
    votes = votes_of(wanted, own, bench, tokenizer)
    groups: dict[str, list[PromptAnswers]] = {}
    for each, judged, vote in zip(wanted, own, votes, strict=True):
        name, answers = each.of_set.name, PromptAnswers(judged, vote)
        groups.setdefault(name, []).append(answers)
        if len({prompt.source for prompt in each.of_set.prompts}) > 1:
            groups.setdefault(f"{name}/{each.prompt.source}", []).append(answers)
    everything = [response for each in own for response in each]
    num_tokens = sum(len(response.tokens) for response in everything)
    return Results(
        figures={name: figures_of(prompts, ks) for name, prompts in groups.items()},
        num_responses=len(everything),
        num_tokens=num_tokens,
        accept_length=num_tokens / max(1, sum(response.num_target_passes for response in everything)),
        failures=dict(Counter(response.failure for response in everything if response.failure)),
    )


def votes_of(
    wanted: Sequence[Wanted], responses: Sequence[Sequence[JudgedResponse]], bench: Judge, tokenizer: Tokenizer
) -> list[list[int | None] | None]:
    """Which responses to each prompt answer alike; None where its kind of reward cannot tell."""
    ballots: list[Ballot | None] = []
    for each, own in zip(wanted, responses, strict=True):
        kind = bench.kind_of(each.prompt)
        texts = [tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True) for response in own]
        rights = list(map(is_right, own))
        ballots.append(Ballot(kind, texts, rights, bench.settings) if kind in VOTING_KINDS else None)
    count_votes([ballot for ballot in ballots if ballot is not None], lambda pairs: same_math(bench, pairs))
    return [None if ballot is None else ballot.votes for ballot in ballots]


def same_math(bench: Judge, pairs: Sequence[Pair]) -> list[bool | None]:
    """Whether both of each pair answer alike, by the server of rewards; None where the first gives no answer."""
    assert bench.client is not None, "answers of mathematics have a server"
    numbers = [bench.client.submit(Answer(SAME_MATH, "", text, other)) for text, other in pairs]
    verdicts = bench.client.wait(numbers)
    return [None if verdicts[n].failure else verdicts[n].reward >= 1.0 for n in numbers]
