"""Stands for the processes of a cluster in one process: fibers under a seeded scheduler, with clocks and threads.

Each thread of each simulated process is a greenlet. It gives up control where it sleeps, waits, or writes to a disk,
and in a share of the schedules between any two lines of the pulse. Time is that of the scheduler alone.
"""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from tlt_hpc.cluster.watch.rank_progress import BEAT, Beat

if TYPE_CHECKING:
    from simulated_mpi import Comm, Request

TRACED = ("mpi/pulse.py", "mpi/progress.py", "mpi/replica.py")
"""Files of the package between whose lines a thread may be interrupted."""


class ScheduleError(AssertionError):
    """A property that does not hold in a schedule."""


class Exit(BaseException):
    """The end of a simulated process with a status."""

    def __init__(self, status: int) -> None:
        self.status = status


class Process:
    """One rank of one start of a job: its threads, its clocks, and what it has of MPI."""

    def __init__(self, cluster: Cluster, host: str, environment: dict[str, str]) -> None:
        self.cluster, self.host, self.environ = cluster, host, environment
        self.pid = next(cluster.pids)
        cluster.processes[self.pid] = self
        self.boot, self.wall = cluster.random.uniform(0, 1e6), 1.8e9 + cluster.random.uniform(-2, 2)
        self.stopped_until = 0.0
        self.status: int | None = None
        """Exit status; -9 if it was killed; None while it runs."""
        self.interrupted = False
        self.on_signal: Callable[[int, Any], None] | None = None
        self.signalled: list[int] = []
        self.pending: list[Request] = []
        self.comm: Comm | None = None
        self.finalized = False
        self.beat = Beat().__dict__
        self.main: Fiber | None = None
        self.ended: Callable[[Process], None] = lambda process: None

    def start(self, work: Callable[[], int]) -> None:
        def run() -> None:
            try:
                status = work()
            except Exit as leaving:
                status = leaving.status
            self.end(status)

        self.main = Fiber(self, run)
        self.cluster.wake(self.main)

    def spawn(self, work: Callable[[], None]) -> None:
        """A further thread."""
        self.cluster.wake(Fiber(self, work))

    def end(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self.ended(self)

    def signal(self, number: int) -> None:
        """Run the handler, as between two bytecodes of the main thread; later where the process is stopped."""
        if self.status is not None or self.on_signal is None:
            return
        if self.stopped_until > self.cluster.now:
            self.cluster.call_at(self.stopped_until, lambda: self.signal(number))
            return
        with self.cluster.being(self):
            try:
                self.signalled.append(number)
                self.on_signal(number, None)
            except KeyboardInterrupt:
                self.interrupted = True
            except Exit as leaving:
                self.cluster.injected["signal before the ranks answer"] += 1
                self.end(leaving.status)


class Fiber(greenlet):
    """One thread of a process."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        super().__init__(self._run_work, process.cluster.hub)
        self.process, self._work, self.token = process, work, 0
        process.cluster.fibers.append(self)

    def _run_work(self) -> None:
        if self.process.cluster.lines:
            sys.settrace(self.process.cluster.trace)
        try:
            self._work()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001  (the schedule's verdict)
            self.process.cluster.failure = self.process.cluster.failure or error
        finally:
            sys.settrace(None)


class Cluster:
    """The scheduler: runs what is next in its own time, which its random numbers decide."""

    def __init__(self, seed: str, lines: bool = False, weak: bool = False, jitter: float = 2e-5) -> None:
        self.random = Random(seed)
        self.lines, self.weak, self.jitter = lines, weak, jitter
        self.late = self.random.choice((0.0, 0.02, 0.2))
        """Share of messages and wake-ups that are late."""
        self.hub = getcurrent()
        self.now, self.steps = 0.0, 0
        self.failure: BaseException | None = None
        self.closed = False
        self.fibers: list[Fiber] = []
        self.at_steps: list[tuple[int, Callable[[], None]]] = []
        """Faults, the next one last, by the number of scheduler steps before them."""
        self.pids = itertools.count(1000)
        self.processes: dict[int, Process] = {}
        self.seen: dict[Any, Any] = {}
        """What the harness has noted, for all ranks."""
        self.injected: Counter[str] = Counter()
        self.folder = Path()
        self.slurm: Callable[..., str] = lambda *asked: ""
        self._ties = itertools.count()
        self._heap: list[tuple[float, float, int, int, Any]] = []
        self.process: Process = Process(self, "nowhere", {})
        """That which runs."""

    # -- for the harness --

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        heappush(self._heap, (when, self.random.random(), next(self._ties), -1, action))

    def wake(self, fiber: Fiber) -> None:
        self._push(self.now + self.random.random() * self.jitter, fiber)

    def run(self, most_steps: int) -> None:
        """Until nothing is left to run; raises what a thread raised, or that a schedule does not end."""
        heap = self._heap
        while heap:
            when, _, _, token, fiber = heappop(heap)
            if token < 0:
                self.now = max(self.now, when)
                fiber()
                continue
            process = fiber.process
            if token != fiber.token or process.status is not None or fiber.dead:
                continue
            if process.stopped_until > when:
                self._push(process.stopped_until + self.random.random() * self.jitter, fiber)
                continue
            self.now = max(self.now, when)
            self.steps += 1
            if self.steps > most_steps:
                raise ScheduleError(f"no end after {most_steps} scheduler steps: {self.describe()}")
            while self.at_steps and self.at_steps[-1][0] <= self.steps:
                self.at_steps.pop()[1]()
            if process.status is None:
                self.process, BEAT.__dict__ = process, process.beat
                fiber.switch()
                if self.failure is not None:
                    raise self.failure

    def describe(self) -> str:
        """Where the main threads are that have not ended."""
        mains = [fiber for fiber in self.fibers if fiber.process.status is None and fiber is fiber.process.main]
        stacks = [traceback.extract_stack(fiber.gr_frame, 8) for fiber in mains[:6] if fiber.gr_frame]
        places = [" < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(stack)) for stack in stacks]
        return "; ".join([f"of {len(mains)} ranks", *places])

    def close(self) -> None:
        """Unwind all threads that are left."""
        self.closed = True
        for fiber in self.fibers:
            while not fiber.dead:
                with suppress(BaseException):
                    fiber.throw(GreenletExit)

    @contextmanager
    def being(self, process: Process) -> Iterator[None]:
        """What runs inside is that process's."""
        before, beat = self.process, BEAT.__dict__
        self.process, BEAT.__dict__ = process, process.beat
        yield
        self.process, BEAT.__dict__ = before, beat

    def state_of(self, pid: int) -> str:
        """As ``process_state`` has it."""
        process = self.processes.get(pid)
        return "" if process is None or process.status is not None else "S"

    # -- for the simulated threads --

    def sleep(self, seconds: float) -> None:
        drawn = self.random.random()
        delay = seconds + drawn * self.jitter
        if drawn < self.late:
            delay += self.random.random() ** 8 * 0.3
        self.park(delay)

    def park(self, seconds: float | None) -> None:
        """Give up control for so long, or until ``wake``."""
        fiber = getcurrent()
        if self.closed or not isinstance(fiber, Fiber):
            raise GreenletExit
        fiber.token += 1
        if seconds is not None:
            self._push(self.now + seconds, fiber, False)
        self.hub.switch()
        if self.closed:
            raise GreenletExit
        process = fiber.process
        if process.interrupted and fiber is process.main:
            process.interrupted = False
            raise KeyboardInterrupt

    def _push(self, when: float, fiber: Fiber, is_new: bool = True) -> None:
        fiber.token += is_new
        heappush(self._heap, (when, self.random.random(), next(self._ties), fiber.token, fiber))

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line" and not self.closed and self.random.random() < 0.25:
            self.sleep(0.0)
        return self.trace


RUNNING: list[Cluster] = []
"""The cluster of the schedule that runs, for what is patched into modules."""


class Clock:
    """Stands for the module ``time``."""

    def sleep(self, seconds: float) -> None:
        RUNNING[-1].sleep(seconds)

    def monotonic(self) -> float:
        return RUNNING[-1].now + RUNNING[-1].process.boot

    perf_counter = monotonic

    def time(self) -> float:
        return RUNNING[-1].now + RUNNING[-1].process.wall

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Lock:
    """Those of the module ``threading``."""

    def __init__(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        RUNNING[-1].sleep(0.0)
        while self._is_held:
            RUNNING[-1].sleep(1e-4)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Fiber] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for fiber in self._waiting:
            RUNNING[-1].wake(fiber)
        self._waiting = []

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            fiber: Any = getcurrent()
            self._waiting.append(fiber)
            RUNNING[-1].park(timeout)
            self._waiting = [other for other in self._waiting if other is not fiber]
        return self._is_set


class Thread:
    ident: int | None = None

    def __init__(self, target: Callable[[], None] = lambda: None, name: str = "", daemon: bool = True) -> None:
        self.run = target  # type: ignore[method-assign]
        self._is_over = Event()

    def run(self) -> None: ...

    def start(self) -> None:
        cluster = RUNNING[-1]
        self.ident = 1

        def work() -> None:
            self.run()
            self._is_over.set()

        cluster.wake(Fiber(cluster.process, work))

    def is_alive(self) -> bool:
        return self.ident is not None and not self._is_over.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._is_over.wait(timeout)


class Timer(Thread):
    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self._cancelled = Event()
        super().__init__(lambda: None if self._cancelled.wait(interval) else function())

    def cancel(self) -> None:
        self._cancelled.set()
