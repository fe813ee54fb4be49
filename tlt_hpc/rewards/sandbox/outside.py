"""Owns a sandbox as seen from the judge: start it, have programs run in it, end it. Knows no test."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tlt_hpc.rewards.answer import JudgeError
from tlt_hpc.rewards.frames import read_frame, write_frame
from tlt_hpc.rewards.sandbox.program import MEMORY_STATUS

_PROJECT = str(Path(__file__).resolve().parents[3])
_START = (
    "import sys; project = sys.argv.pop(); sys.path.append(project); "
    "from tlt_hpc.rewards.sandbox.inside import main; main(project)"
)


class SandboxError(JudgeError):
    """This machine has no sandbox; one line with the remedy."""


@dataclass(frozen=True)
class Limits:
    """Of one program."""

    cpu_seconds: float
    memory_bytes: int
    output_bytes: int
    asleep_seconds: float = 10.0
    """Of the clock, with less than a hundredth of them on a core: such a program waits, however loaded the machine."""


@dataclass(frozen=True)
class Outcome:
    """What came of a program; ``failure`` is the limit that it met."""

    output: str
    status: int
    """Exit status, or minus the signal that killed it."""
    cpu_seconds: float
    failure: str | None

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it ended because it got no more memory; a program can pretend so, and gains nothing by it."""
        return self.status == MEMORY_STATUS


class Sandbox:
    """A place for programs of one answer, gone with all that runs in it at the end of a ``with`` block.

    Raises:
        SandboxError: the system does not allow one.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-s", "-S", "-P", "-B", "-c", _START, _PROJECT]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/nowhere", "HOME": "/tmp", "TMPDIR": "/tmp"},
        )
        trouble = self._next().get("trouble")
        if trouble:
            self.close()
            raise SandboxError(
                f"reward kind 'code' runs programs that a model wrote, in a sandbox, and this machine allows none: "
                f"{trouble}; have user namespaces allowed (sysctl user.max_user_namespaces above 0, "
                "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container "
                "--security-opt seccomp=unconfined), or use another kind: without a sandbox nothing is run"
            )

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs inside, and wait until it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # process 1 ends at the end of its requests
        self._process.stdout.close()
        self._process.wait()

    def run(self, code: str, stdin: str, limits: Limits) -> Outcome:
        """Run a program as a script."""
        return self._attempt({"do": "run", "code": code, "stdin": stdin}, limits)

    def call(self, code: str, name: str, arguments: str, limits: Limits) -> Outcome:
        """Call a function of the program with arguments (a list, of ``values.encode``); the output is its value."""
        return self._attempt({"do": "call", "code": code, "name": name, "arguments": arguments}, limits)

    def check(self, code: str, assertions: list[str], limits: Limits) -> Outcome:
        """Run assertions against the program's functions; the output is "passed" where all hold.

        They are sent when the program's process has been forked, so it has never seen them. Once in a sandbox.
        """
        self._ask({"do": "serve", "code": code}, limits)
        return self._attempt({"do": "check", "assertions": assertions}, limits)

    def _attempt(self, request: dict[str, Any], limits: Limits) -> Outcome:
        return Outcome(**self._ask(request, limits))

    def _ask(self, request: dict[str, Any], limits: Limits) -> dict[str, Any]:
        assert self._process.stdin is not None
        write_frame(self._process.stdin, {**request, **vars(limits)})
        return self._next()

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        frame = read_frame(self._process.stdout)
        if frame is None:
            raise RuntimeError(f"the sandbox ended by itself, with status {self._process.wait()}")
        return frame  # type: ignore[no-any-return]


def try_sandbox() -> None:
    """Run an honest program, so that a machine without a sandbox is known before anything depends on it.

    Raises:
        SandboxError: the system does not allow one.
    """
    with Sandbox() as sandbox:
        outcome = sandbox.run("print(input())", "ready", Limits(30.0, 2**28, 1000))
    if outcome.output != "ready\n":
        raise SandboxError(
            f"reward kind 'code': the sandbox stands but an honest program fails in it, with {outcome}; "
            "use another kind, and report this with the kernel's version"
        )
