"""Owns a process that has imported the large libraries once and forks a rank for each connection.

``python rank_forks.py LISTENER``, the number of a listening socket; a connection, from ``forked_rank.py``, stands for
one rank, and a kill of any of them ends it. A fork has its client's files, environment and working folder, starts
MPI itself, and takes with it whatever it leaves behind. Before a fork neither MPI nor a thread may be started. Ends
with its standard input.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import marshal
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = set(os.environ)

# What a rank of a test imports: third parties' libraries, and the package.
import h5py  # noqa: E402, F401
import mpi4py.run  # noqa: E402
import pytest  # noqa: E402, F401
import torch  # noqa: E402

# What these two import on their own only once they are used takes three times as long as all else.
import torch._inductor.compile_fx  # noqa: E402
import torch.distributed.tensor  # noqa: E402
import transformers.models.qwen2.modeling_qwen2  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import tlt_hpc.evaluate.evaluate  # noqa: E402
import tlt_hpc.studies.warmup.warm_up  # noqa: E402
import tlt_hpc.train  # noqa: E402, F401
from tlt_hpc.mpi.library import MPI  # noqa: E402  (which does not start it)
from tlt_hpc.rl.distributed import load_deepspeed  # noqa: E402

if torch.version.cuda is None:  # elsewhere DeepSpeed looks, as it is imported, which device a rank has chosen
    load_deepspeed()
    import deepspeed

    # What each rank would find out for itself: what DeepSpeed can compile, and how transformers renames tensors.
    deepspeed.ops.__compatible_ops__  # noqa: B018
get_checkpoint_conversion_mapping("")

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
LIFELINE = 0
"""The standard input, which ends with whoever started this process."""
_FREE = 512
"""A rank's files have lower numbers."""


@dataclass(frozen=True)
class Job:
    """What a rank is to be."""

    numbers: list[int]
    """Of its files."""
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]
    """The same files here."""

    @classmethod
    def receive(cls, client: socket.socket) -> Job | None:
        """From ``forked_rank.py``; None where that was killed before it had said all."""
        head, files, _, _ = socket.recv_fds(client, 8, 253)
        length = int.from_bytes(head, "little")
        with client.makefile("rb") as stream:
            payload = stream.read(length)
        return cls(*marshal.loads(payload), files) if payload and len(payload) == length else None

    def become(self) -> None:
        """Be ``python -m mpi4py ARGUMENTS``, started by the client."""
        os.setsid()
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, _FREE) for file in self.files]
        for file in self.files:
            os.close(file)
        for number, file in zip(self.numbers, high, strict=True):
            os.dup2(file, number)
            os.close(file)
        imported = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        os.environ.clear()
        os.environ.update(imported | self.environment)
        os.chdir(self.folder)
        sys.path[0] = self.folder
        sys.argv = ["mpi4py", *self.arguments]
        sys.orig_argv = [sys.executable, "-m", *sys.argv]
        LIBC.on_exit(LIBC._exit, None)  # after what MPI does at the end: nothing of the large libraries is torn down
        try:
            mpi4py.run.main()
        except SystemExit as end:
            if end.code:
                raise
        end_well()


def end_well() -> None:
    """End this process with status 0 as Python does, but for the second that it takes to forget what was imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    LIBC.exit(0)


def serve(listener: socket.socket) -> Job:
    """Fork for each connection a process that attends to its rank; returns in a rank alone, what it is to be."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these
    while True:
        if LIFELINE in select.select([listener, LIFELINE], [], [])[0]:
            os._exit(0)
        client = listener.accept()[0]
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            listener.close()
            return attend(client)
        client.close()


def attend(client: socket.socket) -> Job:
    """Fork the rank that a client stands for, and tell the client how it ended; returns in the rank alone."""
    if (job := Job.receive(client)) is None:
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        client.close()
        return job
    for file in job.files:
        os.close(file)
    process = os.pidfd_open(pid)
    if process not in select.select([client, process], [], [])[0]:  # the client was killed
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(BrokenPipeError):
        client.sendall(status.to_bytes(4, "little"))
    os._exit(0)


if __name__ == "__main__":
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import has started a thread, which no fork would have"
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    serve(socket.socket(fileno=int(sys.argv[1]))).become()
