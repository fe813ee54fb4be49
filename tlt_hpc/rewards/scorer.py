"""Judges the responses of a step, and reports which could not be judged."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import FinishReason, Prompt, Rollout, SampleKey
from tlt_hpc.config import RewardSection
from tlt_hpc.config.data_sections import is_function, part_name
from tlt_hpc.rewards import judge as kinds
from tlt_hpc.rewards.answer import MAX_CHARACTERS, MEMORY_BYTES, PART, WITH_PARTS, Answer, Failure, Verdict
from tlt_hpc.rewards.client import RewardClient

_CAUSES = {
    Failure.CPU: "judging them took more CPU time than reward.cpu_seconds; make the reward function faster or raise it",
    Failure.MEMORY: f"judging them took more than {MEMORY_BYTES >> 20} MiB of memory; let the reward function use less",
    Failure.WALL: "judging them took 60 times reward.cpu_seconds; see what the reward function waits for or raise it",
    Failure.SIZE: f"they are longer than {MAX_CHARACTERS} characters; lower rollout.max_new_tokens",
    Failure.CRASH: "the process that judged them ended; see whether the reward function crashes or calls os._exit",
    Failure.ERROR: "a reward function failed; fix it",
    Failure.UNREADABLE: "their data's answers cannot be read; fix the data",
    Failure.SERVER: "the server of rewards ended on them; see what it printed",
    Failure.ASLEEP: "judging them stopped using the CPU; start again",
    Failure.OUTPUT: "judging them wrote too much; start again",
}
"""The reason for each failure, with its remedy."""


@dataclass(frozen=True)
class Unjudged:
    """The failures, each with its detail, of those among a number of responses that were not judged."""

    num_responses: int
    failures: tuple[tuple[Failure, str], ...]

    @property
    def total(self) -> int:
        """The number of responses that were not judged."""
        return len(self.failures)

    def explain(self) -> str:
        """The reasons, each with an example and a remedy, the commonest first."""
        counts, example = Counter(failure for failure, _ in self.failures), dict(reversed(self.failures))
        parts = []
        for failure, count in counts.most_common():
            reason, _, remedy = _CAUSES[failure].partition("; ")
            parts.append((count, f"{reason} (for example: {example[failure] or failure}); {remedy}"))
        return parts[0][1] if len(parts) == 1 else "; ".join(f"({count}) {part}" for count, part in parts)


def join_unjudged(parts: Sequence[Unjudged]) -> Unjudged:
    """The failures of several ranks' responses together."""
    return Unjudged(sum(part.num_responses for part in parts), sum((part.failures for part in parts), ()))


@dataclass(frozen=True)
class Judge:
    """The rules of a rank, and its server if a kind needs one. Lives as long as the job."""

    settings: RewardSection
    client: RewardClient | None

    def kind_of(self, prompt: Prompt) -> str:
        """The kind that judges responses to the prompt."""
        return kinds.kind_for(prompt.source, self.settings.default, self.settings.by_source)

    def needs_worker(self, prompt: Prompt) -> bool:
        """True if responses to the prompt are sent to the server."""
        kind = self.kind_of(prompt)
        return bool(self.settings.added_functions) or kind in kinds.WORKER_KINDS or is_function(kind)

    def leaves_unjudged(self, prompt: Prompt, failure: str) -> bool:
        """True if a failure leaves a response to the prompt unjudged; a program that fails is judged by that."""
        return not kinds.failure_is_judgement(self.kind_of(prompt), failure)

    def make_answer(self, prompt: Prompt, text: str, is_finished: bool = True) -> Answer:
        """A response to the prompt as it is judged; ``is_finished``: it ended by itself."""
        tags = self.settings.format_tags
        first = f"<{tags[0]}>" if tags else ""
        opening = first if prompt.text.rstrip().endswith(first) else ""
        return Answer(self.kind_of(prompt), prompt.source, text, prompt.answer, prompt.extra, opening, is_finished)


class Scorer:
    """The rewards of one step's responses.

    Those that need a worker are handed over as soon as they end, and judged while this rank decodes, waits or trains;
    the others are judged here, some while the rank waits, the rest when all are asked for. A reward is a function of
    the response alone, so when it is found makes no difference.
    """

    def __init__(self, judge: Judge, prompt_of: Callable[[Rollout], Prompt], text_of: Callable[[Rollout], str]) -> None:
        self._judge, self._prompt_of, self._text_of = judge, prompt_of, text_of
        self._verdicts: dict[SampleKey, Verdict] = {}
        self._numbers: dict[SampleKey, int] = {}
        """At the server, by their number there."""
        self._num_seen = 0
        self.num_ahead = 0
        """Responses judged while the rank did other things."""
        self.seconds_before_limit = 0.0
        self.seconds_waited = 0.0
        """Spent in ``judge_and_wait_for_rewards`` on verdicts that were not there yet."""
        if judge.client:
            judge.client.drop_all_answers()  # what a rollout that was cut short has left

    def submit_and_poll(self, finished: Sequence[Rollout]) -> None:
        """Submit responses that ended since the last call and need a worker, and receive verdicts; never waits."""
        if self._judge.client is not None:
            self._submit_to_server(self._judge.client, finished[self._num_seen :])
            self._num_seen = len(finished)
            self._judge.client.send_and_receive()

    def has_unscored(self, finished: Sequence[Rollout]) -> bool:
        """True if some of the responses are to be judged here and were not yet."""
        self.submit_and_poll(finished)
        return len(self._verdicts.keys() | self._numbers.keys()) < len(finished)

    def score_while_waiting(self, finished: Sequence[Rollout], is_over: Callable[[], bool]) -> None:
        """Judge responses here until all are, or ``is_over``, which is asked between any two, says so."""
        start, before = time.perf_counter(), len(self._verdicts)
        for rollout in finished:
            if is_over():
                break
            if rollout.key not in self._numbers:
                self._judge_here(rollout)
        self.num_ahead += len(self._verdicts) - before
        self.seconds_before_limit += time.perf_counter() - start

    def judge_and_wait_for_rewards(self, rollouts: Sequence[Rollout]) -> NDArray[np.float32]:
        """The rewards [N] of some, judging those that are left and waiting for the server's.

        Raises:
            UserError: the server cannot be started again.
        """
        if self._judge.client is not None:
            self.num_ahead += self._judge.client.num_judged
            self._submit_to_server(self._judge.client, rollouts)
        for rollout in rollouts:
            if rollout.key not in self._numbers:
                self._judge_here(rollout)
        if self._judge.client is not None:
            start = time.perf_counter()
            pending = {key: number for key, number in self._numbers.items() if key not in self._verdicts}
            verdicts = self._judge.client.wait_for_verdicts(pending.values())
            self._verdicts |= {key: verdicts[number] for key, number in pending.items()}
            self.seconds_waited += time.perf_counter() - start
        return np.array([self._verdicts[rollout.key].reward for rollout in rollouts], dtype=np.float32)

    def metrics(self) -> dict[str, float]:
        """Counts of the step's verdicts; the same names on every rank."""
        figures = {
            "rollout/rewards_in_tail": float(self.num_ahead),
            "rollout/rewards_in_tail_seconds": self.seconds_before_limit,
            **self._means_of_parts(),
        }
        if self._judge.client is None:
            return figures
        counted = Counter(verdict.failure for verdict in self._verdicts.values())
        failed = {f"reward/failed/{failure}": float(counted[failure]) for failure in Failure}
        disputed = sum(verdict.is_disputed for verdict in self._verdicts.values())
        waited = {"reward/disputed": float(disputed), "reward/waited_seconds": self.seconds_waited}
        return {**figures, **failed, **waited}

    def _means_of_parts(self) -> dict[str, float]:
        """The means of the parts of verdicts, and how many verdicts have parts; empty without ``reward.weights``."""
        if not self._judge.settings.weights:
            return {}
        parts = [verdict.parts for verdict in self._verdicts.values() if verdict.parts]
        names = map(part_name, self._judge.settings.terms)
        means = {f"{PART}{name}/mean": sum(each[name] for each in parts) / max(len(parts), 1) for name in names}
        return {**means, WITH_PARTS: float(len(parts))}

    def find_unjudged(self, rollouts: Sequence[Rollout]) -> Unjudged:
        """The failures of these responses, all of which have their rewards, that were not judged."""
        failures = [
            (verdict.failure, verdict.detail)
            for rollout in rollouts
            if (verdict := self._verdicts[rollout.key]).failure is not None
            and self._judge.leaves_unjudged(self._prompt_of(rollout), verdict.failure)
        ]
        return Unjudged(len(rollouts), tuple(failures))

    def _submit_to_server(self, client: RewardClient, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            if rollout.key not in self._numbers and self._judge.needs_worker(self._prompt_of(rollout)):
                self._numbers[rollout.key] = client.submit(self._make_answer(rollout))

    def _judge_here(self, rollout: Rollout) -> None:
        if rollout.key not in self._verdicts:
            self._verdicts[rollout.key] = kinds.judge(self._make_answer(rollout), self._judge.settings)

    def _make_answer(self, rollout: Rollout) -> Answer:
        is_finished = rollout.finish_reason is not FinishReason.LENGTH
        return self._judge.make_answer(self._prompt_of(rollout), self._text_of(rollout), is_finished)


def without_reward_parts(section: RewardSection) -> RewardSection:
    """The same rules with the answer as the only part: an evaluation measures whether it is right."""
    return section.model_copy(update={"weights": {}})


def open_process_judge(section: RewardSection) -> Judge:
    """The judge of this process; the first call starts its server if a kind needs one, later calls return the same.

    The first call belongs before MPI starts: a process that MPI has initialised should start no other.
    """
    client = _start_client_once(section.model_dump_json()) if kinds.needs_server(section) else None
    return Judge(section, client)


@functools.cache
def _start_client_once(settings: str) -> RewardClient:
    return RewardClient(RewardSection.model_validate_json(settings))
