"""One rank's share of an evaluation's responses: generated, judged, and written in pieces that a kill leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from tlt_hpc.common.records import Prompt, Request, Rollout, SampleKey
from tlt_hpc.config import UserError
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.evaluate.requests import Wanted
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.judge import judge
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.session import Session, hidden_files, text_of
from tlt_hpc.storage.evaluation_log import JudgedResponse

PIECE_RESPONSES = 64
PIECE_SECONDS = 60.0
"""A piece is written when it has so many responses, or its first has waited for so long."""
_UNITS = 8
"""Parts of the work that a rank gets at least, as far as there are responses: their lengths differ."""


def answer(
    session: Session,
    engine: RolloutEngine,
    bench: Judge,
    wanted: Sequence[Wanted],
    folder: EvaluationFolder,
    done: Container[SampleKey],
    shown: Callable[[Roster], None],
    epoch: int = 0,
) -> bool:
    """Make what ``done`` lacks of the wanted responses; False if a stop vote came first. Collective.

    Args:
        done: the names of those that are there, the same on every rank.
        shown: called on rank 0 with all ranks' progress.
        epoch: the pulse's; any number that all ranks give.
    """
    world, replica = session.world, session.replica
    own = share_of(wanted, done, replica.number, replica.count)
    prompts = {request.key: prompt for prompt, requests in own for request in requests}
    judging = _Judging(session, engine, bench, prompts, PieceWriter(folder, world))
    roster = session.generate(
        engine,
        [request for _, requests in own for request in requests],
        on_round=judging.take,
        on_idle=lambda roster: judging.take_verdicts(),
        shown=shown if world.rank == 0 else None,
        epoch=epoch,
    )
    judging.end(is_whole=not roster.stopping)
    see_all(folder, judging.pieces.written, world)
    return not roster.stopping


def see_all(folder: EvaluationFolder, written: Sequence[str], world: World) -> None:
    """Return once rank 0 sees the files that all ranks have ``written``, for it reads them; collective.

    Raises:
        UserError: on all ranks, if it does not: not all nodes write to the same folder.
    """
    files = world.allgather((world.hostname, tuple(written)))
    names = {name for _, own in files for name in own}
    hidden = world.once(lambda: hidden_files(folder.responses, names))
    for rank, (hostname, own) in enumerate(files):
        for name in own:
            if name in hidden:
                raise UserError(
                    f"{folder.responses}: rank 0 on {files[0][0]} does not see {name}, which rank {rank} on {hostname} "
                    "has written; use a folder that all nodes share (run.folder, or --output)"
                )


def share_of(
    wanted: Sequence[Wanted], done: Container[SampleKey], rank: int, num_ranks: int
) -> list[tuple[Prompt, tuple[Request, ...]]]:
    """A replica's share of what is missing: whole prompts, or parts of them if there are few prompts to one."""
    missing = [(each.prompt, tuple(r for r in each.requests if r.key not in done)) for each in wanted]
    size = max(1, sum(len(requests) for _, requests in missing) // (_UNITS * num_ranks))
    units = [
        (prompt, requests[start : start + size])
        for prompt, requests in missing
        for start in range(0, len(requests), size)
    ]
    return units[rank::num_ranks]


class PieceWriter:
    """Judged responses on their way to files."""

    def __init__(self, folder: EvaluationFolder, world: World) -> None:
        self._folder, self._step = folder, world.size
        self.written: list[str] = []
        """The files so far."""
        # of what any rank sees: an NFS client may not yet list what another one's last start has written
        self.number = max(world.allgather(folder.next_number())) + world.rank
        self._responses: list[JudgedResponse] = []
        self._since = time.monotonic()

    def add(self, response: JudgedResponse) -> None:
        if not self._responses:
            self._since = time.monotonic()
        self._responses.append(response)

    def write(self, only_due: bool = False) -> None:
        """Write what there is; ``only_due``: if it has become a piece."""
        is_due = len(self._responses) >= PIECE_RESPONSES or time.monotonic() - self._since >= PIECE_SECONDS
        if self._responses and (is_due or not only_due):
            self.written.append(self._folder.write(self.number, self._responses))
            self.number, self._responses = self.number + self._step, []


class _Judging:
    """The responses of one rank, from the engine to the files."""

    def __init__(
        self,
        session: Session,
        engine: RolloutEngine,
        bench: Judge,
        prompts: dict[SampleKey, Prompt],
        pieces: PieceWriter,
    ) -> None:
        self._session, self._engine, self._bench, self._prompts = session, engine, bench, prompts
        self.pieces = pieces
        self._at_server: dict[int, Rollout] = {}
        if bench.client is not None:
            bench.client.forget()  # what an evaluation that was cut short has left

    def take(self) -> None:
        """Judge what has ended, and write what is judged."""
        if self._engine.finished:
            for rollout in self._engine.collect():
                self._judge(rollout)
        self.take_verdicts()

    def take_verdicts(self) -> bool:
        """Take what the server has judged, without waiting; False: nothing else is done while other ranks generate."""
        if self._bench.client is not None:
            for number, verdict in self._bench.client.take_ready().items():
                self._settle(self._at_server.pop(number), verdict)
        self.pieces.write(only_due=True)
        return False

    def end(self, is_whole: bool) -> None:
        """Write what is judged: all if the evaluation ``is_whole``, else what is there; and drop the rest."""
        client = self._bench.client
        if is_whole and client is not None:
            for number, verdict in client.wait(list(self._at_server)).items():
                self._settle(self._at_server.pop(number), verdict)
        self.pieces.write()
        self._engine.abort()
        self._engine.collect()
        if client is not None:
            client.forget()

    def _judge(self, rollout: Rollout) -> None:
        bench, prompt = self._bench, self._prompts[rollout.key]
        asked = bench.answer(prompt, text_of(self._session.tokenizer, rollout.response_tokens))
        if bench.client is not None and bench.needs_worker(prompt):
            self._at_server[bench.client.submit(asked)] = rollout
        else:
            self._settle(rollout, judge(asked, bench.settings))

    def _settle(self, rollout: Rollout, verdict: Verdict) -> None:
        self.pieces.add(
            JudgedResponse(
                key=rollout.key,
                tokens=rollout.response_tokens,
                finish_reason=rollout.finish_reason,
                num_target_passes=rollout.num_target_passes,
                reward=verdict.reward,
                failure=verdict.failure.value if verdict.failure else "",
            )
        )
