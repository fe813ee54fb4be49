"""How a run is stopped, and queued again by Slurm.

1. Signal. ``StopFlag`` records the request of a signal, or of the timer that knows the time limit:

       Ctrl-C                    ``Stop.ASKED``: a user waits; save, and end
       SIGUSR2, or the timer     ``Stop.TIME``: the allocation ends soon; save, end, and be queued again
       SIGTERM                   ``Stop.KILL``: killed within seconds; nothing that takes long

   The most urgent request wins: a run that is saving because of ``Stop.TIME`` gives that up if SIGTERM follows.
2. Vote. Ranks are not signalled at the same moment, so they agree: inside a rollout by the pulse
   (``Roster.has_stop_vote`` in mpi/roster.py), between steps by ``World.allgather_with_stop_vote`` and
   ``World.agree_to_stop`` (mpi/world.py).
3. Save. ``agree_to_continue`` (run/saving.py) ends the loop of train.py; a rollout that was cut short has its finished
   responses written (``Keeper.write_new_responses`` in run/kept_responses.py), and ``save_at_end`` writes a checkpoint
   as far as ``StopFlag.is_late`` leaves time.
4. Requeue. ``requeue_job_if_progress``, called by ``requeue_stopped_job`` of cli/rank_commands.py on rank 0, has Slurm
   queue the job again.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from tlt_hpc.cluster.launcher import launched_rank
from tlt_hpc.cluster.slurm import Allocation, SlurmError, allocation
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_json, read_bytes
from tlt_hpc.storage.records import add_json_line

T = TypeVar("T")

logger = logging.getLogger(__name__)

STOPPED_EARLY = 75
"""Exit status of a command that a signal stopped: the same command resumes from there."""
SAME_KEYSTROKE_SECONDS = 1.0
"""Within this time two SIGINT count as one Ctrl-C: the terminal sends one and the launcher forwards one."""
KILL_SECONDS = 10.0
"""Time that SIGTERM leaves; Slurm sends SIGKILL after KillWait, 30 s unless the site has changed it."""
ASKED_AHEAD_SECONDS = 120.0
"""How long before a time limit of eight minutes or more a run stops; the batch scripts ask for SIGUSR2 then."""
SHORT_SECONDS = 300.0
"""What a start and a step may take; a shorter allocation is warned of."""
RAISED_SECONDS = 60.0
"""An end that is this much later than expected was postponed by an operator; Slurm is exact to a minute."""
END_SECONDS = 15.0
"""Time reserved at the end of an allocation for leaving and queueing again; saving must be done before it."""
HISTORY = "requeues.jsonl"
TRIES, TRY_AGAIN_SECONDS = 3, 2.0
PREEMPTION_POLL_SECONDS = 5.0
AGAIN = "TLT_SUBMIT_AGAIN"
"""The command that resumes a job that is not queued again; unset if it is the one that submitted it."""
_INTERRUPTED = b"tlt: Ctrl-C: the run saves and ends as soon as it can; another one ends it without saving\n"
MAX_IDLE_STARTS = 3
"""So many starts in a row without progress end a job that would otherwise be queued again forever."""


def seconds_before_limit(limit: float) -> float:
    """Return how many seconds before the end of ``limit`` a run is asked to stop: two minutes, or the last quarter."""
    return min(ASKED_AHEAD_SECONDS, limit / 4)


class Stop(IntEnum):
    """Urgency of a request to stop; the largest wins."""

    NONE = 0
    ASKED = 1
    TIME = 2
    KILL = 3


class StopFlag:
    """Requests to stop this process, with their reasons and the time that is left.

    Before ``is_answered`` is set, Ctrl-C and SIGTERM end the process at once, since nothing has begun. Under Slurm only
    Ctrl-C does: a preempted job that leaves by itself is not queued again.
    """

    def __init__(self) -> None:
        self.is_answered = False
        self.is_left = False
        """Whether everything that a stop asks for has been done, except the end of the process."""
        self._asked: list[tuple[Stop, str, float]] = []
        """Urgency, reason and deadline of each request; only appended to, which is atomic."""
        self._ends_at: float | None = None
        self._interrupted_at: float | None = None
        self.timers: list[threading.Timer] = []
        self._leaving = threading.Lock()

    @property
    def kind(self) -> Stop:
        """The most urgent request."""
        return self._most_urgent[0]

    @property
    def reason(self) -> str:
        """Reason of the most urgent request, of equal ones the first; empty without a request."""
        return self._most_urgent[1]

    @property
    def is_late(self) -> bool:
        """True if the time for an orderly stop has run out; never without a deadline."""
        return time.monotonic() >= self._most_urgent[2]

    @property
    def seconds_left(self) -> float:
        """Seconds until this process is killed, as far as known; infinite without a deadline."""
        kind, _, until = self._most_urgent
        return until - time.monotonic() + (END_SECONDS if kind is Stop.TIME else 0.0)

    @property
    def _most_urgent(self) -> tuple[Stop, str, float]:
        return max(self._asked, key=lambda asked: asked[0], default=(Stop.NONE, "", math.inf))

    def request(self, kind: Stop, reason: str) -> None:
        """Ask to stop. Safe in a signal handler and from any thread."""
        now, until = time.monotonic(), math.inf
        if kind is Stop.KILL:
            until = now + KILL_SECONDS
        elif kind is Stop.TIME:
            until = (now + ASKED_AHEAD_SECONDS if self._ends_at is None else self._ends_at) - END_SECONDS
        self._asked.append((kind, reason, until))

    def set_time_limit(
        self, seconds: float, at_last: Callable[[], None], ask_again: Callable[[float], float] = lambda within: 0.0
    ) -> None:
        """The allocation ends in ``seconds``: request a stop two minutes before, or after three quarters of them.

        Measured with a monotonic clock, so a change of the wall clock has no effect.

        Args:
            at_last: called on a thread shortly before the end if ``is_left`` is not set by then, because the main
                thread is in work that does not look at the flag.
            ask_again: called on a thread before the stop is requested, with the seconds that it may take; returns the
                seconds left, which are more if an operator has raised the limit. Infinity: no limit any more.
        """
        self._ends_at = time.monotonic() + seconds
        ahead = seconds_before_limit(seconds)

        def stop_or_extend_limit() -> None:
            left = ask_again(ahead / 8)
            if left < ahead + RAISED_SECONDS:
                self.request(Stop.TIME, f"the time limit, in {ahead:.0f} s")
                return
            last.cancel()
            self._ends_at = None
            if left < math.inf:
                self.set_time_limit(left, at_last, ask_again)

        last = self._start_timer(seconds - min(END_SECONDS, ahead) / 2, lambda: self.call_once_at_end(at_last))
        self._start_timer(seconds - ahead, stop_or_extend_limit)

    def _start_timer(self, seconds: float, action: Callable[[], None]) -> threading.Timer:
        self.timers.append(threading.Timer(min(seconds, threading.TIMEOUT_MAX), action))
        self.timers[-1].daemon = True
        self.timers[-1].start()
        return self.timers[-1]

    def call_once_at_end(self, at_last: Callable[[], None]) -> None:
        """Set ``is_left`` and call ``at_last``, unless that was done before.

        At the time limit the timer and the main thread may both come here: the second waits until the first is done.
        """
        with self._leaving:
            is_first, self.is_left = not self.is_left, True
            if is_first:
                at_last()

    def ignore_time_limit_signal(self) -> None:
        """All is done: from here on a signal of the time limit, which Python would no longer answer, ends nothing."""
        self.is_left = True
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def install_signal_handlers(self) -> None:
        """Have SIGTERM, SIGINT and SIGUSR2 request a stop; a second Ctrl-C, at least a second later, interrupts.

        Raises (later, in the main thread):
            KeyboardInterrupt: on that second Ctrl-C.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        ends = number == signal.SIGINT or (number == signal.SIGTERM and "SLURM_JOB_ID" not in os.environ)
        if ends and not self.is_answered:
            sys.stderr.flush()
            if BEAT.on_signal is not None:
                BEAT.on_signal(f"ended by {name}")
            os._exit(128 + number)
        kinds = {signal.SIGTERM: Stop.KILL, signal.SIGINT: Stop.ASKED, signal.SIGUSR2: Stop.TIME}
        self.request(kinds[signal.Signals(number)], name)
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            if not launched_rank(os.environ):  # it may take a while until the run can end
                with suppress(OSError):  # nobody reads any more
                    os.write(2, _INTERRUPTED)
        elif now - self._interrupted_at >= SAME_KEYSTROKE_SECONDS:
            raise KeyboardInterrupt


# --- under Slurm, on rank 0 ---


def start_time_limit_timers(
    flag: StopFlag, environment: Mapping[str, str], rank: int, folder: Path, progress: Callable[[], str] | None
) -> None:
    """Set when the allocation ends in rank 0's stop flag, which votes for all ranks.

    Where the ranks are in an update that lasts beyond the end, the job is queued again all the same: what was finished
    is on disk by then.

    Args:
        progress: how far the work in ``folder`` has come; None for work that is not queued again.
    """
    job = allocation(environment)
    if job is None or rank:
        return
    try:
        left = job.ask_seconds_left()
    except SlurmError as error:
        logger.warning("the time limit is not known, only its signal will tell: %s", error)
        return
    if left == math.inf:
        return
    BEAT.ends_at = time.time() + left
    if left - seconds_before_limit(left) < SHORT_SECONDS:
        logger.warning(
            "the allocation ends in %.0f s, and the run stops %.0f s before that, or at an earlier --signal: if a "
            "start and a step do not fit, nothing is trained; give more --time", left, seconds_before_limit(left)
        )  # fmt: skip

    def at_last() -> None:
        if progress is None:
            return
        # it will be killed, and the next start is not to take that for a fault; a disk that hangs delays nothing
        leaving = threading.Thread(target=partial(BEAT.record_ending, "stopped early"), name="leave", daemon=True)
        leaving.start()
        leaving.join(KILL_SECONDS / 5)
        try:
            done = progress()
        except (ValueError, OSError) as error:  # which the next start meets, and reports
            logger.warning("how far the work has come is not known: %s", error)
            done = f"unknown at {time.time():.0f}"
        print(f"tlt: {requeue_job_if_progress(environment, folder, done)}", flush=True)

    def ask_again(within: float) -> float:
        try:
            return job.ask_seconds_left(within)
        except SlurmError as error:
            logger.warning("whether the time limit was raised is not known, so the run stops: %s", error)
            return 0.0

    flag.set_time_limit(left, at_last, ask_again)


def requeue_job_if_progress(environment: Mapping[str, str], folder: Path, progress: str) -> str:
    """Have Slurm queue this job again, once it has saved all that it will. Returns the line for the user.

    ``progress`` is how far the work in ``folder`` has come: a job that starts again and again without progress is not
    queued once more.
    """
    job = allocation(environment)
    if job is None:
        return "not in a Slurm job, so nothing was queued: the same command resumes"
    history = read_requeue_history(folder / HISTORY)
    idle = [entry for entry in history if entry["job"] == job.job_id][1 - MAX_IDLE_STARTS :]
    if len(idle) == MAX_IDLE_STARTS - 1 and all(entry["progress"] == progress for entry in idle):
        return (
            f"job {job.job_id} is not queued again: {MAX_IDLE_STARTS} starts in a row came no further than "
            f"{progress}; give it more time (sbatch --time), or make a step shorter"
        )
    try:
        add_json_line(folder / HISTORY, {"job": job.job_id, "restarts": job.restarts, "progress": progress})
        _requeue(job)
    except (SlurmError, OSError) as error:
        return f"job {job.job_id} is not queued again ({error}): {how_to_resume(environment)}"
    return f"job {job.job_id} is queued again and will resume"


def _requeue(job: Allocation) -> None:
    try:
        _retry_slurm_request(job.requeue)
    except SlurmError:
        with suppress(SlurmError):
            if job.ask_if_requeued():  # only the answer was lost
                return
        raise


def _retry_slurm_request(ask: Callable[[], T]) -> T:
    """What Slurm answers, asked a few times: the controller is busy where many jobs end at once.

    Raises:
        SlurmError: of the last time.
    """
    for _ in range(TRIES - 1):
        try:
            return ask()
        except SlurmError as error:
            logger.info("asking again: %s", error)
            time.sleep(TRY_AGAIN_SECONDS)
    return ask()


def how_to_resume(environment: Mapping[str, str]) -> str:
    """Return the words that say how the work of a job that is not queued again is resumed."""
    return f"`{environment[AGAIN]}` resumes" if AGAIN in environment else "submit the same script, which resumes"


def stopped_early_message(reason: str, how_far: str, folder: Path) -> str:
    """The line for the user of work in ``folder`` that was stopped, with how it is resumed."""
    again = os.environ.get(AGAIN)
    resume = f"if Slurm does not queue it again, `{again}` resumes" if again else "the same command resumes"
    return f"stopped early ({reason}){how_far}; {resume} from {folder}"


def await_preemption(environment: Mapping[str, str]) -> None:
    """Ask Slurm, and wait to be killed if this job is being preempted; else return at once.

    Slurm queues a job again that it had to end, and takes one that left by itself within its grace time for finished.
    """
    job = allocation(environment)
    try:
        if job is None or not _retry_slurm_request(job.ask_if_preempted):
            return
    except SlurmError as error:
        resume = how_to_resume(environment)
        logger.warning("whether this job is preempted is not known, so it ends: %s; if not queued, %s", error, resume)
        return
    print(
        f"tlt: job {job.job_id} is preempted: it waits for Slurm to end it and to queue it again; where "
        f"PreemptMode is not REQUEUE, {how_to_resume(environment)}",
        flush=True,
    )
    ask_if_preempted = True
    while ask_if_preempted:
        time.sleep(PREEMPTION_POLL_SECONDS)
        with suppress(SlurmError):  # to leave would lose the place in the queue
            ask_if_preempted = job.ask_if_preempted()


def read_requeue_history(path: Path) -> list[dict[str, object]]:
    """The starts of a folder's jobs that ended at their time limit; none if the file cannot be read.

    A line that is damaged, such as one that was cut off on a full disk, is left out.
    """
    try:
        lines = read_bytes(path, LINES_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s counts for nothing: %s", path, error)
        return []
    entries = list[dict[str, object]]()
    for line in lines:
        try:
            entries.append(parse_json(line, dict[str, object]))
        except DamagedText as error:
            logger.warning("%s has a damaged line, which counts for nothing: %s", path, error)
    return [entry for entry in entries if {"job", "progress"} <= set(entry)]
