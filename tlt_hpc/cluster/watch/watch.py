"""Owns a rank's watch: a thread that tells what the main thread is at, and ends a job that has come to a standstill.

It does no MPI. It counts its own looks, a second apart, and asks only whether counters moved between them: clocks may
jump, and a process that was stopped for a minute has missed its looks, not seen sixty. It never touches a file itself:
the scribe does, so a folder that hangs stops neither the looks nor the verdict.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from tlt_hpc.cluster.watch.beat import BEAT, Beat, Member, Phase
from tlt_hpc.cluster.watch.gauge import Gauge
from tlt_hpc.cluster.watch.inquiry import Inquiry, is_due
from tlt_hpc.cluster.watch.record import FINISHED, HEARTBEAT_SECONDS, Record, claim_verdict, stacks_file, write_record
from tlt_hpc.cluster.watch.scribe import Scribe
from tlt_hpc.cluster.watch.tie import Tie, address_of
from tlt_hpc.cluster.watch.verdict import judge_alone
from tlt_hpc.cluster.watch.witness import Ranks, Witness, may_be_first

STALLED = 71
"""Exit status of a job that stood still."""
LOOK_SECONDS = 1.0
HEARTBEAT_LOOKS = round(HEARTBEAT_SECONDS / LOOK_SECONDS)
"""After so many looks a rank writes its record though only counters have changed."""
SCRIBE_LOOKS = 30
"""How long the run's folder may take to answer once this rank stands still."""
LAST_WORD_SECONDS = 10.0
"""How long it may take at the very end, when nothing but the record of that is left to write."""
ABORT_SECONDS = 5.0
"""How long MPI may take to end the job."""
STATUS_ENDINGS = {0: FINISHED, 75: "stopped early"}


class Watch:
    """The watch of this process; a context manager round all that it does.

    ``factor`` stretches the limits of all phases; 0: nothing is ended for standing still. ``rank`` is what the launcher
    says, None without one. The rest is for tests.
    """

    def __init__(
        self,
        factor: float,
        rank: int | None,
        beat: Beat = BEAT,
        look_seconds: float = LOOK_SECONDS,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._beat, self._exit, self._look_seconds = beat, end, look_seconds
        self._gauge = Gauge(beat, factor, look_seconds)
        self._nobody = Member(rank or 0, 1, socket.gethostname(), "", {})
        self._witness = Witness() if rank is not None and may_be_first(os.environ) else None
        self._tie = Tie()
        self._scribe = Scribe()
        self._closing = threading.Event()
        # Daemon: a rank that raises must reach MPI_Abort at exit.
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._told: tuple[Member | None, Path | None] = (None, None)
        self._written: Record | None = None
        self._is_warned = False
        self._late_looks = 0
        self._inquiry: Inquiry | None = None

    def __enter__(self) -> Watch:
        self._beat.phase, self._beat.step, self._beat.waiting = Phase.STARTING, None, None
        self._beat.is_asking = self._beat.in_pulse = False
        self._beat.ending, self._beat.on_leaving = "", self._say_goodbye
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        if error is not None:
            self._beat.ending = f"failed: {type(error).__name__}: {error}"
        self._say_goodbye()
        self._scribe.close()
        self._beat.member = self._beat.folder = self._beat.abort = self._beat.on_leaving = None
        if self._witness is not None:
            self._witness.close()

    def ended(self, status: int) -> int:
        """Take note of the exit status with which this process is about to end; returns it."""
        self._beat.ending = STATUS_ENDINGS.get(status, f"ended with status {status}")
        return status

    def look(self) -> None:
        """What the thread does every second."""
        self._gauge.look()
        member, folder = self._beat.member or self._nobody, self._beat.folder
        self._follow(member, folder)
        if member.neighbours:
            self._tie.fasten(address_of(member.start, member.host, member.neighbours[min(member.neighbours)]))
        record = self._gauge.record(member)
        self._late_looks = 0 if self._scribe.is_idle else self._late_looks + 1
        if not record.stalled:
            self._inquiry = None
        elif folder is None or self._late_looks >= SCRIBE_LOOKS:
            self._speak_alone(record, folder)
        else:
            self._inquire(record, folder, member)
        if folder is not None and self._scribe.is_idle:
            self._scribe.give(partial(self._write_and_read, folder, record, self._inquiry))

    def _watch(self) -> None:
        while not self._closing.wait(self._look_seconds):
            self.look()

    def _follow(self, member: Member, folder: Path | None) -> None:
        """Tell the witness of ranks and folder; leave a word where the run had another folder before."""
        if (member, folder) == self._told:
            return
        _, before = self._told
        if before is not None and before != folder:
            if not self._scribe.is_idle:
                return  # at the next look
            self._scribe.give(partial(self._write, before, self._gauge.record(member, FINISHED)))
        self._told = (member, folder)
        if self._witness is not None and member.neighbours:
            where = None if folder is None else str(folder.absolute())
            self._witness.tell(Ranks(member.start, member.host, member.size, member.neighbours, where))

    def _inquire(self, record: Record, folder: Path, member: Member) -> None:
        if self._inquiry is None:
            self._inquiry = Inquiry(folder, member)
            self._written = None  # so that the others see at once that this rank stands still
        line = self._inquiry.look(record.limit)
        if line is not None:
            self._speak(line, record, folder)

    # -- what the scribe does -----------------------------------------------------------------------------------

    def _write_and_read(self, folder: Path, record: Record, inquiry: Inquiry | None) -> None:
        if record.stalled and not (self._written and self._written.stalled):
            self._dump(folder, record.rank)
        if is_due(record, self._written, HEARTBEAT_LOOKS):
            self._write(folder, record)
        if inquiry is not None:
            inquiry.read(record)

    def _write(self, folder: Path, record: Record) -> None:
        try:
            write_record(folder, record)
            self._is_warned = False
        except OSError as error:
            self._warn(f"{record.name} cannot write its status to {folder}: {error.strerror or error}")
        self._written = record

    def _dump(self, folder: Path, rank: int) -> None:
        try:
            with stacks_file(folder, rank).open("wb") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            self._warn(f"rank {rank} cannot leave its stacks in {folder}: {error.strerror or error}")

    def _warn(self, line: str) -> None:
        """Say once what is wrong with the folder; the watch goes on with what it has."""
        if not self._is_warned and self._is_first_of_host():
            say(f"{line}; the run goes on, and is watched as far as can be")
        self._is_warned = True

    def _is_first_of_host(self) -> bool:
        member = self._beat.member
        return member is None or member.rank == min(member.neighbours)

    # -- the end ------------------------------------------------------------------------------------------------

    def _speak_alone(self, record: Record, folder: Path | None) -> None:
        """End this rank where nothing can be learned of the others."""
        why = "the run's folder is not claimed yet" if folder is None else f"{folder} does not answer"
        faulthandler.dump_traceback(2, all_threads=True)
        self._tell(judge_alone(record, why))
        self._end()

    def _speak(self, line: str, record: Record, folder: Path) -> None:
        """End this rank with the one line, unless another has said it."""
        first = list[bool]()

        def leave() -> None:
            self._write(folder, self._gauge.record(self._beat.member or self._nobody, f"stalled: {line}"))
            try:
                first.append(claim_verdict(folder, record.start, line))
            except OSError:
                first.append(True)  # it stands nowhere but here

        if self._scribe.wait(LAST_WORD_SECONDS):
            self._scribe.give(leave)
            self._scribe.wait(LAST_WORD_SECONDS)
        if first != [False]:
            self._tell(f"{line}; stacks are in {stacks_file(folder, record.rank).with_name('rank-*.stacks')}")
        self._end()

    def _tell(self, line: str) -> None:
        say(f"the job stands still: {line}; the same command goes on from the last committed step")

    def _end(self) -> None:
        """End the job through MPI, which knows of all nodes; where MPI is what hangs, this process."""
        self._closing.set()
        self._tie.say("stalled")
        if self._beat.abort is not None:
            ending = threading.Thread(target=self._beat.abort, args=(STALLED,), name="abort", daemon=True)
            ending.start()
            ending.join(ABORT_SECONDS)
        self._exit(STALLED)

    def _say_goodbye(self) -> None:
        """Leave the last record; returns once it is on the disk, or the folder does not answer."""
        folder, ending = self._beat.folder, self._beat.ending or FINISHED
        self._tie.say(ending)
        if folder is not None:
            record = self._gauge.record(self._beat.member or self._nobody, ending)
            if self._scribe.wait(LAST_WORD_SECONDS):
                self._scribe.give(partial(self._write, folder, record))
            if not self._scribe.wait(LAST_WORD_SECONDS):
                say(f"{record.name} could not leave word of its end: {folder} does not answer")


def say(line: str) -> None:
    """One line on standard error, past all buffers, for what waits there may hang."""
    with suppress(OSError):  # whoever read it has gone, and what is to be done is done all the same
        os.write(2, f"tlt: {line}\n".encode())
