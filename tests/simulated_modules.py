"""Puts a simulated cluster in the place of what the package's modules use: clocks, threads, signals, MPI, Slurm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from simulated_mpi import Library
from simulated_processes import RUNNING, Clock, Event, Exit, Lock, Thread, Timer

from tlt_hpc.checkpoint import manifest, save
from tlt_hpc.cli import main, rank_commands
from tlt_hpc.cluster import slurm, stopping
from tlt_hpc.mpi import ending, owner, progress, pulse, world
from tlt_hpc.rl import ahead_generation
from tlt_hpc.run import rollout_loop, saving
from tlt_hpc.storage import folder, step_lines

THREADS = SimpleNamespace(Lock=Lock, Event=Event, Thread=Thread, Timer=Timer, TIMEOUT_MAX=threading.TIMEOUT_MAX)
CLOCK, LIBRARY = Clock(), Library()


class System:
    """Stands for the module ``os``, of the process that runs."""

    @property
    def environ(self) -> dict[str, str]:
        return RUNNING[-1].process.environ

    def getpid(self) -> int:
        return RUNNING[-1].process.pid

    def fsync(self, descriptor: int) -> None:
        RUNNING[-1].sleep(1e-3)

    def write(self, descriptor: int, data: bytes) -> int:
        return len(data) if descriptor == 2 else os.write(descriptor, data)

    def _exit(self, status: int) -> None:
        raise Exit(status)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class Signals:
    """Stands for the module ``signal``."""

    SIGTERM, SIGINT, SIGUSR2, Signals = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.Signals
    SIG_IGN = signal.SIG_IGN

    def signal(self, number: int, handler: Any) -> None:
        if handler is not signal.SIG_IGN:  # set for one of the signals as the process leaves
            RUNNING[-1].process.on_signal = handler


def host() -> str:
    return RUNNING[-1].process.host


def state_of(pid: int) -> str:
    return RUNNING[-1].state_of(pid)


def ask_slurm(*asked: str, within: float = 0.0) -> str:
    return RUNNING[-1].slurm(*asked)


def sync(path: Any) -> None:
    """A write that reaches the disk: others run meanwhile, and the process may be killed before or after."""
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    RUNNING[-1].sleep(1e-3)


def _threads_of_saves(stack: ExitStack) -> None:
    """``Save`` is a thread by inheritance: its start, end and join are those of a simulated one."""

    def start(self: Any) -> None:
        self.simulated = Thread(self.run)
        self.simulated.start()

    stack.enter_context(patch.object(save.Save, "start", start))
    stack.enter_context(patch.object(save.Save, "is_alive", lambda self: self.simulated.is_alive()))
    stack.enter_context(patch.object(save.Save, "join", lambda self, timeout=None: self.simulated.join(timeout)))


@contextmanager
def simulated() -> Iterator[None]:
    """Inside, the package's modules run on ``RUNNING[-1]``."""
    system, sockets = System(), SimpleNamespace(gethostname=host)
    with ExitStack() as stack:
        silence = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(redirect_stdout(silence))
        stack.enter_context(redirect_stderr(silence))
        for module in (pulse, progress, owner, stopping, saving, rollout_loop, ahead_generation, ending):
            stack.enter_context(patch.object(module, "time", CLOCK))
        for module in (progress, stopping, save, ending):
            stack.enter_context(patch.object(module, "threading", THREADS))
        for module in (world, owner, stopping, ending, main, rank_commands, save):
            stack.enter_context(patch.object(module, "os", system))
        for module in (world, ending):
            stack.enter_context(patch.object(module, "MPI", LIBRARY))
        for module in (folder, save, manifest, owner, step_lines):
            stack.enter_context(patch.object(module, "sync", sync))
        for module, name, value in (
            (stopping, "signal", Signals()), (owner, "socket", sockets), (world, "socket", sockets),
            (world, "remove_shared_memory_names", lambda: None),
            (owner, "_LOOK_SECONDS", 1.0), (owner, "process_state", state_of), (slurm, "ask_slurm", ask_slurm),
            (progress, "YIELDS", 1), (progress, "MAX_PAUSE_SECONDS", progress.MAX_PAUSE_SECONDS),
            (ending, "MAX_PAUSE_SECONDS", 0.2),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, value))
        _threads_of_saves(stack)
        yield
