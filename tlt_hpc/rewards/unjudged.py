"""Counts the responses whose reward of 0 is no judgement, and says why in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tlt_hpc.rewards.answer import MAX_CHARACTERS, Failure, Verdict

_OF_PROGRAMS = frozenset({Failure.CPU, Failure.MEMORY, Failure.ASLEEP, Failure.OUTPUT, Failure.CRASH})
"""How a program that a model wrote may end: a wrong answer, which reward 0 judges."""
_CAUSES = {
    Failure.CPU: "judging them took more CPU time than reward.cpu_seconds; make reward.function faster or raise it",
    Failure.MEMORY: "judging them took more memory than reward.memory_mb; have reward.function use less or raise it",
    Failure.WALL: "judging them took 60 times reward.cpu_seconds; see what reward.function waits for or raise it",
    Failure.SIZE: f"they are longer than {MAX_CHARACTERS} characters; lower rollout.max_new_tokens",
    Failure.CRASH: "the process that judged them ended; see whether reward.function crashes or calls os._exit",
    Failure.ERROR: "reward.function failed; fix it",
    Failure.UNREADABLE: "their data's answers cannot be read; fix the data",
    Failure.SERVER: "the server of rewards ended on them; see what it printed",
    Failure.ASLEEP: "judging them stopped using the CPU; start again",
    Failure.OUTPUT: "judging them wrote too much; start again",
}
"""Each with its remedy."""


@dataclass(frozen=True)
class Unjudged:
    """Of a number of responses, how many were not judged by reason, with an example of each reason."""

    num_responses: int
    counts: Mapping[Failure, int]
    examples: Mapping[Failure, str]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def explain(self) -> str:
        """The reasons with their remedies, the commonest first; empty where all were judged."""
        common = Counter(self.counts).most_common()
        parts = [f"{_CAUSES[failure]}; for one, {self.examples[failure] or failure}" for failure, _ in common]
        if len(parts) == 1:
            return parts[0]
        return "; ".join(f"({count}) {part}" for (_, count), part in zip(common, parts, strict=True))


def count_unjudged(judged: Iterable[tuple[str, Verdict]]) -> Unjudged:
    """Those among responses, each with its kind, that were not judged."""
    counts, examples, num_responses = Counter[Failure](), dict[Failure, str](), 0
    for kind, verdict in judged:
        num_responses += 1
        if verdict.failure is not None and not (kind == "code" and verdict.failure in _OF_PROGRAMS):
            counts[verdict.failure] += 1
            examples.setdefault(verdict.failure, verdict.detail)
    return Unjudged(num_responses, counts, examples)


def joined(parts: Sequence[Unjudged]) -> Unjudged:
    """Several ranks' counts as one."""
    counts = sum((Counter(part.counts) for part in parts), Counter[Failure]())
    examples = {failure: words for part in reversed(parts) for failure, words in part.examples.items()}
    return Unjudged(sum(part.num_responses for part in parts), counts, examples)
