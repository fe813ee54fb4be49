"""Runs another program with a time limit and returns its output."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tlt_hpc.config import UserError


@dataclass(frozen=True)
class ProgramOutput:
    """What a program printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything that it printed."""
        return f"{self.out}\n{self.err}"

    @property
    def last_line(self) -> str:
        """The last line of stderr, else of stdout: usually the error."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else f"status {self.status} and no output"


class NoAnswer(UserError):  # noqa: N818
    """A program did not end in time and was killed, or could not be started."""


def run_program(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> ProgramOutput:
    """Run a program and return its output.

    Raises:
        NoAnswer: it could not be started, or took longer than ``seconds``; it and what it started have been killed.
    """
    # files instead of pipes: a process that outlives the program must not keep us waiting for the end of its output
    # what it prints need not be valid text
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except OSError as error:
            raise NoAnswer(f"{command[0]} cannot be started: {error.strerror}; make sure that it is on PATH") from None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"{command[0]} gave no answer in {seconds:g} s; try by hand: {' '.join(command)}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0), err.seek(0)
        return ProgramOutput(status, out.read(), err.read())
