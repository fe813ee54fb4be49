"""One rank's share of an evaluation's responses: generated, judged and written in pieces, so that a kill costs little.

Knows neither the data sets nor what the responses come to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from tlt_hpc.common.records import Prompt, Request, Rollout, SampleKey
from tlt_hpc.config import UserError
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.evaluate.requests import Wanted
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.replica import Replica
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.judge import judge
from tlt_hpc.rewards.scorer import Bench
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.session import generate, hidden_files
from tlt_hpc.storage.evaluation_log import JudgedResponse

PIECE_RESPONSES = 64
PIECE_SECONDS = 60.0
"""A piece is written when it has so many responses, or its first has waited for so long."""
_UNITS = 8
"""Parts of the work that a rank gets at least, as far as there are responses: their lengths differ."""


@dataclass(frozen=True)
class Means:
    """What a rank answers and judges with."""

    engine: RolloutEngine
    bench: Bench
    tokenizer: Tokenizer
    pulse: Pulse
    world: World
    replica: Replica


def answer(
    means: Means,
    wanted: Sequence[Wanted],
    folder: EvaluationFolder,
    done: Container[SampleKey],
    epoch: int,
    shown: Callable[[Roster], None],
) -> bool:
    """Make what ``done`` lacks of the wanted responses; False where a stop vote came first. Collective.

    Args:
        done: the names of those that are there, the same on every rank.
        epoch: the pulse's; any number that all ranks give.
        shown: called on rank 0 with what all ranks are at.
    """
    world = means.world
    own = share_of(wanted, done, means.replica.number, means.replica.count)
    pieces = _Pieces(folder, means)
    share = _Share(means, own, pieces)
    roster = generate(means.pulse, share, epoch, shown if world.rank == 0 else lambda roster: None)
    share.end(is_whole=not roster.stopping)
    see_all(folder, pieces.written, world)
    return not roster.stopping


def see_all(folder: EvaluationFolder, written: Sequence[str], world: World) -> None:
    """Return once rank 0 sees the files that all ranks have ``written``, for it reads them; collective.

    Raises:
        UserError: on all ranks, where it does not: not all nodes write to the same folder.
    """
    files = world.allgather((world.hostname, tuple(written)))
    names = {name for _, own in files for name in own}
    hidden = world.once(lambda: hidden_files(folder.responses, names))
    for rank, (hostname, own) in enumerate(files):
        for name in own:
            if name in hidden:
                raise UserError(
                    f"{folder.responses}: rank 0 on {files[0][0]} does not see {name}, which rank {rank} on {hostname} "
                    "has written; use a folder that all nodes share (run.folder, or --out)"
                )


Asked = tuple[Prompt, tuple[Request, ...]]


def share_of(wanted: Sequence[Wanted], done: Container[SampleKey], rank: int, num_ranks: int) -> list[Asked]:
    """A replica's share of what is missing: whole prompts, or parts of them where there are few prompts to one."""
    missing = [(each.prompt, tuple(r for r in each.requests if r.key not in done)) for each in wanted]
    count = sum(len(requests) for _, requests in missing)
    size = max(1, count // (_UNITS * num_ranks))
    units = [
        (prompt, requests[start : start + size])
        for prompt, requests in missing
        for start in range(0, len(requests), size)
    ]
    return units[rank::num_ranks]


class _Pieces:
    """Judged responses on their way to files."""

    def __init__(self, folder: EvaluationFolder, means: Means) -> None:
        self._folder, self._step = folder, means.world.size
        self.written: list[str] = []
        """The files so far."""
        # of what any rank sees: an NFS client may not yet list what another one's last start has written
        first = max(means.world.allgather(folder.next_number()))
        self._number = first + means.world.rank
        self._responses: list[JudgedResponse] = []
        self._since = time.monotonic()

    def add(self, response: JudgedResponse) -> None:
        if not self._responses:
            self._since = time.monotonic()
        self._responses.append(response)

    def write_due(self) -> None:
        """Write what has become a piece."""
        waited = time.monotonic() - self._since
        if len(self._responses) >= PIECE_RESPONSES or (self._responses and waited >= PIECE_SECONDS):
            self.write()

    def write(self) -> None:
        """Write what there is."""
        if self._responses:
            self.written.append(self._folder.write(self._number, self._responses))
            self._number, self._responses = self._number + self._step, []


class _Share:
    """The responses of one rank."""

    def __init__(self, means: Means, asked: Sequence[Asked], pieces: _Pieces) -> None:
        self._means, self._pieces = means, pieces
        self._prompts = {request.key: prompt for prompt, requests in asked for request in requests}
        self._at_server: dict[int, Rollout] = {}
        if means.bench.client is not None:
            means.bench.client.forget()  # what an evaluation that was cut short has left
        means.engine.submit(request for _, requests in asked for request in requests)

    @property
    def has_work(self) -> bool:
        """Whether there is something left to decode."""
        return self._means.engine.has_work

    def status(self) -> Status:
        """What this rank tells the others."""
        engine = self._means.engine
        left = engine.num_unfinished + len(self._at_server)
        state = State.BUSY if self.has_work else State.IDLE
        return Status(state, left, engine.num_tokens, 0, self._means.world.stop_requested)

    def step(self) -> None:
        """One round of decoding; what has ended is judged, what is judged is written."""
        with self._means.pulse.progressing():
            self._means.engine.step()
            if self._means.engine.finished:
                for rollout in self._means.engine.collect():
                    self._judge(rollout)
            self.take_verdicts()

    def on_idle(self, roster: Roster) -> bool:
        """Take the server's verdicts; there is nothing else to do while other ranks generate."""
        self.take_verdicts()
        return False

    def take_verdicts(self) -> None:
        """Take what the server has judged; never waits."""
        if self._means.bench.client is not None:
            for number, verdict in self._means.bench.client.take_ready().items():
                self._settle(self._at_server.pop(number), verdict)
        self._pieces.write_due()

    def end(self, is_whole: bool) -> None:
        """Write what is judged: all, where the evaluation ``is_whole``, else what is there; and drop the rest."""
        client = self._means.bench.client
        if is_whole and client is not None:
            for number, verdict in client.wait(list(self._at_server)).items():
                self._settle(self._at_server.pop(number), verdict)
        self._pieces.write()
        self._means.engine.abort()
        self._means.engine.collect()
        if self._means.bench.client is not None:
            self._means.bench.client.forget()

    def _judge(self, rollout: Rollout) -> None:
        bench, prompt = self._means.bench, self._prompts[rollout.key]
        text = self._means.tokenizer.decode(rollout.response_tokens.tolist(), skip_special_tokens=True)
        asked = bench.answer(prompt, text)
        if bench.client is not None and bench.needs_worker(prompt):
            self._at_server[bench.client.submit(asked)] = rollout
        else:
            self._settle(rollout, judge(asked, bench.settings))

    def _settle(self, rollout: Rollout, verdict: Verdict) -> None:
        self._pieces.add(
            JudgedResponse(
                key=rollout.key,
                tokens=rollout.response_tokens,
                finish_reason=rollout.finish_reason,
                num_target_passes=rollout.num_target_passes,
                reward=verdict.reward,
                failure=verdict.failure.value if verdict.failure else "",
            )
        )
