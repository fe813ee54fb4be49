"""What ends the ranks of a rehearsed run: a thread that strikes its process in the middle of a rollout.

``TLT_REHEARSAL`` says how. The run itself is not changed: the thread only reads where the main thread is.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.launcher import launched_rank
from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase

VARIABLE = "TLT_REHEARSAL"
"""In the ranks' environment: ``FAULT:RANK:FOLDER``, the folder for marks."""
BEGUN, STRUCK = "begun", "struck"
"""Marks: files that the rank makes when its first rollout generates, and when it strikes."""
DISK_BYTES = 65536
"""Bytes that a file may have on the full disk: enough for lines and status, not for a checkpoint or features."""
_POLL_SECONDS = 5e-3


def kill_process() -> None:
    """End this process as the system does for lack of memory, or a lost node."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang_process() -> None:
    """Stop all threads, as in a call of a driver that does not return: what is called holds the interpreter."""
    ctypes.PyDLL(None).pause()


def limit_file_size() -> None:
    """Have the system refuse whatever makes a file large: a quota that needs no administrator."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def send_limit_signal() -> None:
    """Send this process the signal that Slurm sends before the end of an allocation."""
    os.kill(os.getpid(), signal.SIGUSR2)


FAULTS: Mapping[str, Callable[[], None]] = {
    "kill": kill_process,
    "hang": hang_process,
    "disk": limit_file_size,
    "limit": send_limit_signal,
}


@dataclass(frozen=True)
class Order:
    """The fault that a rank inflicts on itself; without one it only marks when it generates."""

    fault: str
    rank: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.fault}:{self.rank}:{self.folder}"

    @classmethod
    def parse(cls, text: str) -> Order:
        """The inverse of ``str``."""
        fault, rank, folder = text.split(":", 2)
        return cls(fault, int(rank), Path(folder))


def inject_fault_or_exit(order: Order) -> None:
    """Mark the first round of the first rollout; strike in the middle of the next step's rollout.

    An error here ends the process: without the fault the run would not end.
    """
    try:
        _inject_fault(order)
    except (OSError, ValueError):
        traceback.print_exc()
        os._exit(1)


def _inject_fault(order: Order) -> None:
    first = wait_for_rollout(None)
    (order.folder / BEGUN).touch()
    if order.fault in FAULTS:
        wait_for_rollout(first)
        (order.folder / STRUCK).touch()
        FAULTS[order.fault]()


def wait_for_rollout(after: int | None) -> int:
    """Wait until a rollout is under way, of a later step than ``after``; returns its step."""
    while True:
        step = BEAT.step
        if BEAT.phase is Phase.ROLLOUT and BEAT.sequences_left is not None and step is not None and step != after:
            return step
        time.sleep(_POLL_SECONDS)


def inject_if_ordered(environment: Mapping[str, str]) -> None:
    """Have this process, if it is the rank that is meant, strike itself while it trains."""
    given = Order.parse(environment[VARIABLE])
    # the signal reaches all ranks; another fault one of them
    if launched_rank(environment) == given.rank or given.fault == "limit":
        threading.Thread(target=inject_fault_or_exit, args=(given,), daemon=True).start()
