"""What a policy is evaluated on (data sets, requests, the judge of the answers), and how a rank answers its share."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tlt_hpc.common.records import FinishReason, Prompt, Request, Rollout, SampleKey, SamplingParams, Stream
from tlt_hpc.config import Config, ConfigError, UserError
from tlt_hpc.data.evaluation_sets import EvaluationSet, longest_response_tokens
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.judge import judge
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.run.session import Session, decode_response_text
from tlt_hpc.storage.folder import wait_for_listed_files
from tlt_hpc.storage.rollout_log import JudgedResponse


@dataclass(frozen=True)
class Wanted:
    """One prompt and the requests for it: sample 0 is the greedy answer, those by sampling count from 1."""

    of_set: EvaluationSet
    prompt: Prompt
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Exam:
    """The data sets, requests and judge of an evaluation, the same on all ranks and at each evaluation of a run."""

    sets: tuple[EvaluationSet, ...]
    wanted: list[Wanted]
    judge: Judge

    def missing_requests(self, done: Container[SampleKey]) -> list[tuple[Prompt, Request]]:
        """The requests that have no response yet, by prompt."""
        return [(each.prompt, r) for each in self.wanted for r in each.requests if r.key not in done]


def make_exam_all_ranks(config: Config, sets: tuple[EvaluationSet, ...], judge: Judge, world: World) -> Exam:
    """The exam of these data sets; collective.

    Raises:
        ConfigError: on all ranks, where the data sets are not the same on all nodes.
    """
    seen = world.allgather((world.hostname, {each.name: each.prompts_digest() for each in sets}))
    for rank, (hostname, marks) in enumerate(seen):
        for name, mark in marks.items():
            if mark != seen[0][1].get(name):
                raise ConfigError(
                    f"evaluation.sources: rank {rank} on {hostname} reads another {name!r} than rank 0 on "
                    f"{seen[0][0]}; give all nodes the same files"
                )
    return Exam(sets, requests_by_prompt(config, sets), judge)


def requests_by_prompt(config: Config, sets: Sequence[EvaluationSet]) -> list[Wanted]:
    """All requests, by prompt, in the order of the sets and their rows.

    Their keys do not depend on the policy's step: every step is judged on the same noise.
    """
    sampled = sampling_params(config)
    params = [replace(sampled, temperature=0.0, top_p=1.0), *[sampled] * config.evaluation.samples]

    def key(each: EvaluationSet, row: int, sample: int) -> SampleKey:
        return SampleKey(config.evaluation.seed, Stream.EVALUATION, each.name_hash, row, sample)

    return [
        Wanted(each, prompt, tuple(Request(key(each, row, i), prompt.tokens, own) for i, own in enumerate(params)))
        for each in sets
        for row, prompt in zip(each.rows, each.prompts, strict=True)
    ]


def sampling_params(config: Config) -> SamplingParams:
    """The parameters of answers by sampling: the evaluation's temperature and nucleus, the rollout's ends."""
    return SamplingParams(
        max_tokens=longest_response_tokens(config),
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        stop_strings=config.rollout.stop_strings,
    )


# -- one rank's share of the responses: generated, judged, and written in pieces that survive a kill -------------------

T = TypeVar("T")

PIECE_RESPONSES = 64
PIECE_SECONDS = 60.0
"""A piece is written when it has so many responses, or after so long."""
_UNITS = 8
"""Parts of the work that a rank gets at least, as far as there are responses: their lengths differ."""


def generate_answers_all_ranks(
    session: Session,
    engine: RolloutEngine,
    exam: Exam,
    folder: EvaluationFolder,
    done: Container[SampleKey],
    shown: Callable[[Roster], None],
    epoch: int = 0,
) -> bool:
    """Make the responses that ``done`` lacks; False if a stop vote came first. Collective.

    Args:
        done: the keys of those that are there, the same on every rank.
        shown: called on rank 0 with all ranks' progress.
        epoch: the pulse's; any number that all ranks give.

    Raises:
        UserError: as ``wait_for_files_all_ranks``.
    """
    own = replica_share_of_requests(exam.missing_requests(done), session.replica.number, session.replica.count)
    answers = _Answers(session, engine, exam, folder, {request.key: prompt for prompt, request in own})

    def on_idle(roster: Roster) -> bool:
        answers.judge_and_write_ready()
        return False  # nothing else is done while other ranks generate

    roster = session.generate(
        engine,
        [request for _, request in own],
        on_round=answers.judge_and_write_ready,
        on_idle=on_idle,
        shown=shown if session.world.rank == 0 else None,
        epoch=epoch,
    )
    answers.write_and_abort_rest(is_whole=not roster.has_stop_vote)
    wait_for_files_all_ranks(folder, answers.written, session.world)
    return not roster.has_stop_vote


def replica_share_of_requests(missing: Sequence[T], rank: int, num_ranks: int) -> list[T]:
    """A replica's share, in runs of neighbours, which have prompts in common."""
    size = max(1, len(missing) // (_UNITS * num_ranks))
    starts = range(rank * size, len(missing), num_ranks * size)
    return [each for start in starts for each in missing[start : start + size]]


def wait_for_files_all_ranks(folder: EvaluationFolder, written: Sequence[str], world: World) -> None:
    """Return once rank 0 sees the files that all ranks have ``written``, for it reads them; collective.

    Raises:
        UserError: on all ranks, if it does not: not all nodes write to the same folder.
    """
    files = world.allgather((world.hostname, tuple(written)))
    writers = {name: f"rank {rank} on {hostname}" for rank, (hostname, own) in enumerate(files) for name in own}
    for name in world.run_first_and_broadcast(lambda: wait_for_listed_files(folder.responses, writers.keys())):
        raise UserError(
            f"{folder.responses}: rank 0 on {files[0][0]} does not see {name}, which {writers[name]} wrote; "
            "use a folder that all nodes share (run.folder, or --output)"
        )


class _Answers:
    """The responses of one rank on their way from the engine to the judge, and to files."""

    def __init__(
        self,
        session: Session,
        engine: RolloutEngine,
        exam: Exam,
        folder: EvaluationFolder,
        prompts: dict[SampleKey, Prompt],
    ) -> None:
        self._session, self._engine, self._judge, self._prompts = session, engine, exam.judge, prompts
        self._folder = folder
        self._number = agree_first_file_number(folder, session.world)
        self._judged: list[JudgedResponse] = []
        self._written_at = time.monotonic()
        self._at_server: dict[int, Rollout] = {}
        self.written: list[str] = []
        """The files so far."""
        if self._judge.client is not None:
            self._judge.client.drop_all_answers()  # what an evaluation that was cut short has left

    def judge_and_write_ready(self) -> None:
        """Judge what has ended, take the server's verdicts without waiting, and write a piece that is due."""
        if self._engine.finished_rollouts:
            for rollout in self._engine.take_finished_rollouts():
                self._judge_or_submit(rollout)
        if self._judge.client is not None:
            for number, verdict in self._judge.client.take_ready_verdicts().items():
                self._add_judged_response(self._at_server.pop(number), verdict)
        is_long_ago = time.monotonic() - self._written_at >= PIECE_SECONDS
        if len(self._judged) >= PIECE_RESPONSES or (self._judged and is_long_ago):
            with self._session.pulse.progressing():
                self._write()

    def write_and_abort_rest(self, is_whole: bool) -> None:
        """Write what is judged: all if the evaluation ``is_whole``, else what is there; and drop the rest."""
        client = self._judge.client
        if is_whole and client is not None:
            for number, verdict in client.wait_for_verdicts(list(self._at_server)).items():
                self._add_judged_response(self._at_server.pop(number), verdict)
        if self._judged:
            self._write()
        self._engine.abort()
        self._engine.take_finished_rollouts()
        if client is not None:
            client.drop_all_answers()

    def _judge_or_submit(self, rollout: Rollout) -> None:
        prompt = self._prompts[rollout.key]
        text = decode_response_text(self._session.tokenizer, rollout.response_tokens)
        asked = self._judge.make_answer(prompt, text, rollout.finish_reason is not FinishReason.LENGTH)
        if self._judge.client is not None and self._judge.needs_worker(prompt):
            self._at_server[self._judge.client.submit(asked)] = rollout
        else:
            self._add_judged_response(rollout, judge(asked, self._judge.settings))

    def _add_judged_response(self, rollout: Rollout, verdict: Verdict) -> None:
        self._judged.append(
            JudgedResponse(
                key=rollout.key,
                tokens=rollout.response_tokens,
                finish_reason=rollout.finish_reason,
                num_target_passes=rollout.num_target_passes,
                reward=verdict.reward,
                failure=verdict.failure.value if verdict.failure else "",
            )
        )

    def _write(self) -> None:
        self.written.append(self._folder.write_response_file(self._number, self._judged))
        self._number, self._judged, self._written_at = self._number + self._session.world.size, [], time.monotonic()


def agree_first_file_number(folder: EvaluationFolder, world: World) -> int:
    """The number of this rank's first file, which no file has that any rank sees; collective.

    An NFS client may not yet list what another one's last start has written.
    """
    return max(world.allgather(folder.next_number())) + world.rank
