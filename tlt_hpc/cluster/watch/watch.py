"""A rank's watch: a thread that records what the main thread does, and ends a job that hangs.

It counts its own looks, a second apart, and asks only whether counters moved between them: clocks may jump, and a
process that was stopped for a minute has missed its looks, not seen sixty. It never touches a file itself but leaves
that to the status writer, so a file system that hangs stops neither the looks nor the verdict.
"""

from __future__ import annotations

import faulthandler
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from tlt_hpc.cluster.watch.diagnosis import Diagnosis, describe_lone_stalled_rank
from tlt_hpc.cluster.watch.exit_monitor import ExitMonitor
from tlt_hpc.cluster.watch.rank_progress import BEAT, LIMIT_SECONDS, Beat, Member, Phase
from tlt_hpc.cluster.watch.record import (
    FINISHED,
    HEARTBEAT_SECONDS,
    Record,
    stacks_file,
    write_record,
    write_verdict_if_first,
)
from tlt_hpc.common.formatting import FIRST_STEP

STALLED = 71
"""Exit status of a job that hung."""
LOOK_SECONDS = 1.0
HEARTBEAT_LOOKS = round(HEARTBEAT_SECONDS / LOOK_SECONDS)
"""After so many looks a rank writes its record even if only counters have changed."""
WRITER_LOOKS = 30
"""Looks within which the run's folder has to answer once this rank has stalled."""
LAST_WORD_SECONDS = 10.0
"""How long it may take at the very end, when only the last record is left to write."""
ABORT_SECONDS = 5.0
"""How long MPI may take to end the job."""
STATUS_ENDINGS = {0: FINISHED, 75: "stopped early"}


class Watch:
    """The watch of this process; a context manager around all that it does.

    Args:
        factor: stretches the limits of all phases; 0: a job that hangs is not ended.
        rank: this process's by its launcher's variables, None without a launcher.
        monitor: of the node's exits; None: there is none.

    The other arguments are for tests.
    """

    def __init__(
        self,
        factor: float,
        rank: int | None,
        monitor: ExitMonitor | None = None,
        beat: Beat = BEAT,
        look_seconds: float = LOOK_SECONDS,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._beat, self._exit, self._look_seconds, self._monitor = beat, end, look_seconds, monitor
        self._counter = ProgressCounter(beat, factor, look_seconds)
        self._nobody = Member(rank or 0, 1, socket.gethostname(), "", {})
        self._writer = StatusWriter()
        self._closing = threading.Event()
        # Daemon: a rank that raises must reach MPI_Abort at exit.
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._folder: Path | None = None
        self._written: Record | None = None
        self._has_warned = False
        self._looks_unwritten = 0
        self._diagnosis: Diagnosis | None = None

    def __enter__(self) -> Watch:
        self._beat.phase, self._beat.step, self._beat.waiting = Phase.STARTING, None, None
        self._beat.is_asking = self._beat.in_pulse = False
        self._beat.ending, self._beat.on_leaving, self._beat.on_joining = (
            "",
            self._write_last_record,
            self._join_monitor,
        )
        self._beat.on_signal = None if self._monitor is None else self._monitor.send_ending
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        if error is not None:
            self._beat.ending = f"failed: {type(error).__name__}: {error}"
        self._write_last_record()
        self._beat.member = self._beat.folder = self._beat.abort = None
        self._beat.monitor = ""
        self._beat.on_leaving = self._beat.on_joining = self._beat.on_signal = None

    def record_exit_status(self, status: int) -> int:
        """Record the exit status with which this process is about to end; returns it."""
        self._beat.ending = STATUS_ENDINGS.get(status, f"ended with status {status}")
        return status

    @property
    def _member(self) -> Member:
        return self._beat.member or self._nobody

    def check_progress_once(self) -> None:
        """Take one look, as the thread does every second."""
        self._counter.update_counters()
        member, folder = self._member, self._beat.folder
        self._write_end_to_old_folder(folder)
        record = self._counter.make_status_record(member)
        self._looks_unwritten = 0 if self._writer.is_idle else self._looks_unwritten + 1
        if not record.stalled:
            self._diagnosis = None
        elif folder is None or self._looks_unwritten >= WRITER_LOOKS:
            self._end_job_without_verdict(record, folder)
        else:
            self._check_stalled_and_end_job(record, folder)
        self._send_folder()
        if folder is not None:
            self._writer.run_if_idle(partial(self._write_status_and_diagnose, folder, record, self._diagnosis))

    def _send_folder(self) -> None:
        if self._monitor is not None and self._member.start:
            self._monitor.send_folder(self._member, self._beat.folder)

    def _join_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.connect_rank(self._member)

    def _watch(self) -> None:
        while not self._closing.wait(self._look_seconds):
            self.check_progress_once()

    def _write_end_to_old_folder(self, folder: Path | None) -> None:
        """Write the last record into the folder that this process had before."""
        if self._folder is not None and folder != self._folder:
            last = self._counter.make_status_record(self._member, FINISHED)
            if not self._writer.run_if_idle(partial(self._write, self._folder, last)):
                return  # at the next look
        self._folder = folder

    def _check_stalled_and_end_job(self, record: Record, folder: Path) -> None:
        if self._diagnosis is None:
            self._diagnosis = Diagnosis(folder, self._member)
            self._written = None  # so that the others see at once that this rank has stalled
        line = self._diagnosis.count_and_get_verdict(record.limit)
        if line is not None:
            self._end_job_with_verdict(line, record, folder)

    # -- what the status writer's thread does -------------------------------------------------------------------

    def _write_status_and_diagnose(self, folder: Path, record: Record, diagnosis: Diagnosis | None) -> None:
        if record.stalled and not (self._written and self._written.stalled):
            self._dump_stacks(folder, record.rank)
        if is_record_due(record, self._written, HEARTBEAT_LOOKS):
            self._write(folder, record)
        if diagnosis is not None:
            diagnosis.read_and_judge_others(record)

    def _write(self, folder: Path, record: Record) -> None:
        try:
            write_record(folder, record)
            self._has_warned = False
        except OSError as error:
            self._warn(f"{record.name} cannot write its status to {folder}: {error.strerror or error}")
        self._written = record

    def _dump_stacks(self, folder: Path, rank: int) -> None:
        try:
            with stacks_file(folder, rank).open("wb") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            self._warn(f"rank {rank} cannot write its stacks to {folder}: {error.strerror or error}")

    def _warn(self, line: str) -> None:
        """Say once per host what is wrong with the folder; the watch continues without it."""
        member = self._beat.member
        if not self._has_warned and (member is None or member.rank == min(member.neighbours)):
            say(f"{line}; the run continues, and is watched as far as can be")
        self._has_warned = True

    # -- the end ------------------------------------------------------------------------------------------------

    def _end_job_without_verdict(self, record: Record, folder: Path | None) -> None:
        """End this rank when nothing can be learned about the others."""
        why = "the run's folder is not claimed yet" if folder is None else f"{folder} does not answer"
        faulthandler.dump_traceback(2, all_threads=True)
        self._say_why(describe_lone_stalled_rank(record, why))
        self._end_job()

    def _end_job_with_verdict(self, line: str, record: Record, folder: Path) -> None:
        """End the job with this line, unless another rank has said it."""
        is_first = list[bool]()

        def leave() -> None:
            self._write(folder, self._counter.make_status_record(self._member, f"stalled: {line}"))
            try:
                is_first.append(write_verdict_if_first(folder, record.start, line))
            except OSError:
                is_first.append(True)  # standard error is the only place for it

        self._writer.run_within(LAST_WORD_SECONDS, leave)
        if is_first != [False]:
            self._say_why(f"{line}; stacks are in {stacks_file(folder, record.rank).with_name('rank-*.stacks')}")
        self._end_job()

    def _say_why(self, line: str) -> None:
        say(f"the job hangs: {line}; the same command resumes from the last committed step")

    def _end_job(self) -> None:
        """End the job through MPI, which reaches all nodes; if MPI itself hangs, end this process."""
        self._closing.set()
        if self._beat.abort is not None:
            abort = threading.Thread(target=self._beat.abort, args=(STALLED,), name="abort", daemon=True)
            abort.start()
            abort.join(ABORT_SECONDS)
        self._exit(STALLED)

    def _write_last_record(self) -> None:
        """Write the last record; returns once it is on the disk, or the folder does not answer."""
        member, folder, ending = self._member, self._beat.folder, self._beat.ending or FINISHED
        if self._monitor is not None:
            self._monitor.send_ending(ending)
        if folder is not None:
            record = self._counter.make_status_record(member, ending)
            if not self._writer.run_within(LAST_WORD_SECONDS, partial(self._write, folder, record)):
                say(f"{record.name} could not leave word of its end: {folder} does not answer")


def is_record_due(record: Record, written: Record | None, heartbeat_looks: int) -> bool:
    """Return True if a record is to be written: its phase or state is new, or it is time for a heartbeat."""
    if written is None or record.heartbeat - written.heartbeat >= heartbeat_looks:
        return True
    return _reported_state(record) != _reported_state(written)


def _reported_state(record: Record) -> tuple[object, ...]:
    waits = record.stalled and record.waiting
    return (record.start, record.phase, record.step, record.stalled, waits, record.ending)


class StatusWriter:
    """Runs what touches the run's folder, one task at a time, in a thread: a file system that hangs stops only that.

    The watch's thread and, at the end, the main thread may call it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """True if the last task is done."""
        return self._thread is None or not self._thread.is_alive()

    def run_if_idle(self, task: Callable[[], None]) -> bool:
        """Run ``task``, which must not raise, unless the last one is still running; returns whether it will run."""
        return self._start(task)[0]

    def run_within(self, seconds: float, task: Callable[[], None]) -> bool:
        """Run ``task`` after the last one and wait for its end; False if either does not end within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            is_started, thread = self._start(task)
            thread.join(max(0.0, end - time.monotonic()))
            if is_started or thread.is_alive():
                return not thread.is_alive()

    def _start(self, task: Callable[[], None]) -> tuple[bool, threading.Thread]:
        """Whether ``task`` was started, and the thread of the task that runs now."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return False, self._thread
            # Daemon: a folder that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=task, name="watch-files", daemon=True)
            self._thread.start()
            return True, self._thread


def say(line: str) -> None:
    """Write one line to standard error, past all buffers, since whatever holds them may hang."""
    with suppress(OSError):  # nobody reads any more
        os.write(2, f"tlt: {line}\n".encode())


class ProgressCounter:
    """Looks at a beat, ``look_seconds`` apart while this process runs.

    ``factor`` stretches the limits of all phases; 0: there are none.
    """

    def __init__(self, beat: Beat, factor: float, look_seconds: float) -> None:
        self._beat, self._factor, self._look_seconds = beat, factor, look_seconds
        self._progress = self._rounds = -1
        self._looks = self._still = self._without_round = 0

    def update_counters(self) -> None:
        """One more look."""
        beat = self._beat
        progress, rounds = beat.progress + beat.written * beat.is_asking, beat.rounds
        self._looks += 1
        self._still = self._still + 1 if progress == self._progress else 0
        # a rank that trains in the tail makes progress for as long as another hangs
        self._without_round = self._without_round + 1 if beat.in_pulse and rounds == self._rounds else 0
        self._progress, self._rounds = progress, rounds

    def make_status_record(self, member: Member, ending: str = "") -> Record:
        """The record of this rank now."""
        beat, limit = self._beat, self._stall_limit_looks()
        waiting, still = beat.waiting, self._still
        if 0 < limit <= self._without_round and self._still < self._without_round // 2:  # only the pulse hangs
            waiting, still = ("pulse", beat.rounds + 1), self._without_round
        left = beat.sequences_left
        record = Record(
            start=member.start,
            rank=member.rank,
            host=member.host,
            pid=os.getpid(),
            heartbeat=self._looks,
            phase=beat.phase.value,
            step=None if beat.step is None else beat.step + FIRST_STEP,
            part=beat.part or ("" if left is None else f"{left} sequences left"),
            part_number=beat.part_number,
            waiting=waiting[0] if waiting else "",
            number=waiting[1] if waiting else 0,
            progress=self._progress,
            still=still,
            limit=limit,
            seconds=round(still * self._look_seconds, 3),
            sequences_left=-1 if left is None else left,
            ending=ending or beat.ending,
        )
        return replace(record, where=main_thread_place()) if record.stalled else record

    def _stall_limit_looks(self) -> int:
        """In looks; at least two, since the first of a phase may come right before its first tick."""
        if not self._factor:
            return 0
        return max(2, math.ceil(LIMIT_SECONDS[self._beat.phase] * self._factor / self._look_seconds))


def main_thread_place() -> str:
    """Function, file and line that the main thread executes."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"
