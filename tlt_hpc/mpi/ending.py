"""How a rank that cannot continue ends the job without messages of the MPI library."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

from tlt_hpc.cluster.caches import remove_node_cache
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import MAX_PAUSE_SECONDS


def is_alone() -> bool:
    """True if no other rank waits for this one."""
    return not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1


def all_ranks_arrive(seconds: float) -> bool:
    """Collective. Return True if every rank calls this, before it ends, within ``seconds``; False without MPI."""
    remove_node_cache()  # once another rank has ended, the launcher kills this one
    if not MPI.Is_initialized() or MPI.Is_finalized():
        time.sleep(seconds)
        return False
    arrived, end = MPI.COMM_WORLD.Ibarrier(), time.monotonic() + seconds
    while not arrived.Test():
        if time.monotonic() >= end:
            return False
        time.sleep(MAX_PAUSE_SECONDS)
    return True


def end_process_within(seconds: float, status: int) -> None:
    """End this process after ``seconds``, whatever its libraries wait for at exit."""
    timer = threading.Timer(seconds, lambda: exit_now(status))
    timer.daemon = True
    timer.start()


def exit_now(status: int) -> NoReturn:
    """End this process; the launcher ends the others.

    Calls neither MPI_Abort, which prints lines of its own, nor MPI_Finalize, which waits for pending operations.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
