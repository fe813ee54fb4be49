"""Owns how a rank that cannot go on ends the job without a word of the MPI library's own."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import MAX_PAUSE_SECONDS


def is_alone() -> bool:
    """Whether there is no other rank that this one must not leave waiting."""
    return not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1


def all_come_here(seconds: float) -> bool:
    """Whether every rank has come to this call, within so many seconds of this one; without MPI none is heard of."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        time.sleep(seconds)
        return False
    arrived, end = MPI.COMM_WORLD.Ibarrier(), time.monotonic() + seconds
    while not arrived.Test():
        if time.monotonic() >= end:
            return False
        time.sleep(MAX_PAUSE_SECONDS)
    return True


def end_within(seconds: float, status: int) -> None:
    """See to it that this process has ended after so many seconds, whatever its libraries wait for as it ends."""
    timer = threading.Timer(seconds, lambda: exit_now(status))
    timer.daemon = True
    timer.start()


def exit_now(status: int) -> NoReturn:
    """End this process; the launcher ends the others, if any are left.

    Neither MPI_Abort nor MPI_Finalize: the one prints lines of its own, the other waits for what is still under way.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
