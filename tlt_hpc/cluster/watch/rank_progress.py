"""What the main thread does: its phase, position, what it waits for, and counters that only grow.

Plain attributes, written by the main thread and read by the watch's thread: no lock, well under a microsecond per call.
There is one beat per process, ``BEAT``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Phase(Enum):
    """Activity of a rank, as a verdict names it."""

    STARTING = "starting"
    LOADING = "loading"
    CONNECTING = "connecting"
    ROLLOUT = "rollout"
    REWARD = "reward"
    UPDATE = "update"
    REFRESH = "refresh"
    COMMIT = "commit"
    SAVING = "saving"
    EVALUATION = "evaluation"


LIMIT_SECONDS = dict.fromkeys(Phase, 1800.0) | {
    Phase.LOADING: 3600.0,
    Phase.CONNECTING: 600.0,  # transfers almost nothing: if it takes longer, the network does not connect
    Phase.ROLLOUT: 300.0,  # of one round or prefill, not of the rollout
    Phase.SAVING: 3600.0,  # of a tensor, or of what a disk still has to take at a file's end
}
"""How long a counter may not move in a phase before the watch looks for the cause; times ``run.stall_factor``."""


@dataclass(frozen=True)
class Member:
    """Rank, host and start of the job of this process."""

    rank: int
    size: int
    host: str
    start: str
    """The same on all ranks of a start, and no other's."""
    neighbours: dict[int, int]
    """rank -> process id, of all ranks on this host, this one among them."""
    monitor: str = ""
    """Address of the exit monitor of this host, from its first rank, also where Slurm has several nodes on it."""

    @classmethod
    def from_ranks(cls, rank: int, told: Sequence[tuple[str, int, str]]) -> Member:
        """From every rank's (host, process id, random word), of which rank 0's word names the start."""
        host = told[rank][0]
        on_host = {other: pid for other, (name, pid, _) in enumerate(told) if name == host}
        return cls(rank, len(told), host, told[0][2], on_host, told[min(on_host)][2])


class Beat:
    """Position of the main thread; ``progress`` grows whenever it advances in work of its own."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.step: int | None = None
        self.part = ""
        """Where in the phase, for example ``micro-batch 3 of 8``."""
        self.part_number = 0
        """How far in the phase: of ranks that are stuck in it, the one least far blocks the others."""
        self.sequences_left: int | None = None
        self.waiting: tuple[str, int] | None = None
        """The collective that this rank waits in, and its running number; None while it does work of its own."""
        self.progress = 0
        self.rounds = 0
        """Rounds of the pulse that this rank has seen complete; all ranks take part in each."""
        self.in_pulse = False
        self.written = 0
        """Tensors that the saving thread has written: progress only for a rank that waits for its own save."""
        self.is_asking = False
        """Whether the ranks ask each other repeatedly how far a save is, which is no progress."""
        self.member: Member | None = None
        self.monitor = ""
        """Address of the exit monitor that this rank has forked; empty if it has not."""
        self.abort: Callable[[int], None] | None = None
        self.began = time.time()
        """When the command was given, in seconds since the epoch; only for display."""
        self.ends_at: float | None = None
        """When the allocation ends, in seconds since the epoch, if known; only for display."""
        self.folder: Path | None = None
        """Of the status files, once the run's folder is claimed."""
        self.ending = ""
        """How this rank is about to end, once that is decided."""
        self.on_leaving: Callable[[], None] | None = None
        self.on_joining: Callable[[], None] | None = None
        self.on_signal: Callable[[str], None] | None = None
        """Called in the handler of a signal that ends this process at once."""
        self._counts: dict[str, int] = {}

    def set_member(self, member: Member, abort: Callable[[int], None]) -> None:
        """Set who this process is, once the ranks have met; ``abort`` ends all of them with a status."""
        self.member, self.abort, self.phase = member, abort, Phase.LOADING
        self.progress += 1
        if self.on_joining is not None:
            self.on_joining()

    def record_ending(self, ending: str) -> None:
        """Record how this rank ends, before the launcher may kill it; returns once that is on the disk."""
        self.ending = ending
        if self.on_leaving is not None:
            self.on_leaving()

    @property
    def start_name(self) -> str:
        """The name of this start of the job; empty before the ranks have met."""
        return "" if self.member is None else self.member.start

    def tick(self) -> None:
        """Something was done."""
        self.progress += 1

    def enter_step(self, step: int) -> None:
        """A step of the run begins."""
        self.phase, self.step = Phase.COMMIT, step
        self.progress += 1

    def enter_part(self, name: str, number: int, total: int) -> None:
        """Part ``number``, from 1, of ``total`` in this phase begins."""
        self.part, self.part_number = f"{name} {number} of {total}", number
        self.progress += 1

    def mark_waiting_in(self, name: str, scope: str) -> None:
        """This rank starts to wait for a collective, numbered within its ``scope``, whose ranks all take part."""
        number = self._counts[scope] = self._counts.get(scope, 0) + 1
        self.waiting = (name, number)

    def mark_working(self) -> None:
        """Work of this rank's own begins, or resumes after a wait."""
        self.waiting = None
        self.progress += not self.is_asking

    def begin_pulse(self) -> None:
        """Rounds of the pulse begin."""
        self.in_pulse, self.waiting = True, None
        self.progress += 1

    def record_pulse_poll(self, rounds: int, sequences_left: int, over: bool) -> None:
        """A poll of the pulse returned: progress for a rank at work; for one that waits only a new round is."""
        if self.waiting is None or rounds != self.rounds:
            self.waiting = None
            self.progress += 1
        self.rounds, self.sequences_left, self.in_pulse = rounds, sequences_left, not over

    def mark_waiting_for_pulse(self) -> None:
        """This rank has nothing to do until another round of the pulse has ended."""
        self.waiting = ("pulse", self.rounds + 1)

    @contextmanager
    def in_save_polling(self) -> Iterator[None]:
        """Inside, the ranks ask each other repeatedly whether a save is over; only what is written is progress."""
        self.is_asking = True
        yield
        self.is_asking = False

    @contextmanager
    def in_phase(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """Be in a phase, of ``step`` or the current one, then in the one before; also a decorator.

        An exception leaves the phase as it is, which is where the rank failed.
        """
        before = (self.phase, self.step)
        self._enter(phase, self.step if step is None else step)
        yield
        self._enter(*before)

    def _enter(self, phase: Phase, step: int | None) -> None:
        self.phase, self.step, self.part, self.part_number, self.sequences_left = phase, step, "", 0, None
        self.progress += 1


BEAT = Beat()
"""This process's."""
