"""A sandbox as used by the judge: start it, run programs in it, end it."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from tlt_hpc.extras.code_rewards.sandbox.inside import NUMPY
from tlt_hpc.extras.code_rewards.sandbox.isolation import KINDS
from tlt_hpc.extras.code_rewards.sandbox.program import MEMORY_STATUS
from tlt_hpc.rewards.answer import JudgeError, read_frame, write_frame

_PROJECT = str(Path(__file__).resolve().parents[4])
_START = (
    "import sys; _, project, channel, kind, packages = sys.argv; sys.path.append(project); "
    "from tlt_hpc.extras.code_rewards.sandbox.inside import main; main(project, int(channel), kind, packages)"
)
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/nowhere", "HOME": "/tmp", "TMPDIR": "/tmp",
                "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
_CLOCK_SHARE = 4
"""Seconds of the clock in which tests get a second on a core, on a loaded machine."""


class SandboxError(JudgeError):
    """This machine has no sandbox; one line with the remedy."""


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program: seconds of CPU time, bytes of memory and of output, seconds without CPU time."""

    cpu_seconds: float
    memory_bytes: int
    output_bytes: int
    asleep_seconds: float = 10.0
    """Of the clock, with less than a hundredth of them on a core: such a program waits, however loaded the machine."""


@dataclass(frozen=True)
class Outcome:
    """The result of a program; ``failure`` is the limit that it exceeded."""

    output: str
    status: int
    """Exit status, or minus the signal that killed it."""
    cpu_seconds: float
    failure: str | None

    @property
    def is_out_of_memory(self) -> bool:
        """True if it ended because it got no more memory; a program can pretend so, and gains nothing by it."""
        return self.status == MEMORY_STATUS


class Template:
    """The process that sandboxes are forked from; it was started by exec, so it knows nothing that its owner does.

    Those who judge share it by being forked from its owner. ``kind`` is one of ``KINDS``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numpy = importlib.util.find_spec("numpy")
        packages = str(Path(numpy.origin).parents[1]) if numpy and numpy.origin else ""
        arguments = [_PROJECT, str(theirs.fileno()), kind, packages]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_ENVIRONMENT,
            )

    @property
    def is_alive(self) -> bool:
        """True if it still runs; for its owner to ask."""
        return self._process.poll() is None

    def start_sandbox(self, *partner: int, has_numpy: bool = False) -> tuple[BinaryIO, BinaryIO]:
        """Start a sandbox, with a socket to another one if given; returns the streams of requests and of outcomes."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        socket.send_fds(self._socket, [NUMPY if has_numpy else b"."], [theirs_in, theirs_out, *partner])
        os.close(theirs_in)
        os.close(theirs_out)
        return os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def close(self) -> None:
        """End it; sandboxes that are open end with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Sandbox:
    """A sandbox for the programs of one answer; it ends with all its processes at the end of a ``with`` block.

    Args:
        partner: a socket to another one.
        has_numpy: whether its programs can import numpy.

    Raises:
        SandboxError: the system does not allow one.
    """

    def __init__(self, template: Template, *partner: int, has_numpy: bool = False) -> None:
        self._template = template  # it must not go while this is open
        self._requests, self._outcomes = template.start_sandbox(*partner, has_numpy=has_numpy)
        trouble = self._receive_frame().get("trouble")
        if trouble:
            self.close()
            raise SandboxError(f"no sandbox by {template.kind}: {trouble}")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs inside, and wait until it has ended."""
        with contextlib.suppress(BrokenPipeError):  # the supervisor has gone before
            self._requests.close()  # the supervisor ends with its requests
        self._outcomes.read()
        self._outcomes.close()

    def run(self, code: str, stdin: str, limits: ProgramLimits) -> Outcome:
        """Run a program as a script."""
        return self._run_request({"do": "run", "code": code, "stdin": stdin}, limits)

    def call(self, code: str, name: str, arguments: list[Any], limits: ProgramLimits) -> Outcome:
        """Call a function of the program; the output is its value as JSON."""
        return self._run_request({"do": "call", "code": code, "name": name, "arguments": arguments}, limits)

    def _run_request(self, request: dict[str, Any], limits: ProgramLimits) -> Outcome:
        self._send(request, limits)
        return self._receive_outcome()

    def _send(self, request: dict[str, Any], limits: ProgramLimits) -> None:
        write_frame(self._requests, {**request, **vars(limits)})

    def _receive_outcome(self) -> Outcome:
        return Outcome(**self._receive_frame())

    def _receive_frame(self) -> dict[str, Any]:
        frame = read_frame(self._outcomes)
        if frame is None:
            raise RuntimeError("the sandbox ended by itself")
        return frame  # type: ignore[no-any-return]


def run_python_tests(
    template: Template, code: str, tests: Sequence[str], limits: ProgramLimits, entry: str = "", has_numpy: bool = False
) -> tuple[Outcome, Outcome]:
    """Run Python tests against a program's functions, each in a sandbox of its own.

    Args:
        entry: the function that a test is called with; empty: the one that no other function calls.
        has_numpy: whether both can import numpy.

    Returns:
        The outcomes of the program and of the tests; the output of these is a report (``assertions.py``) as JSON.

    Raises:
        SandboxError: the system does not allow one.
    """
    ours, theirs = socket.socketpair()
    with ours, Sandbox(template, ours.fileno(), has_numpy=has_numpy) as program:
        ours.close()
        # it waits while the tests compute, which their limit of CPU time ends
        waiting = replace(limits, asleep_seconds=limits.asleep_seconds + _CLOCK_SHARE * limits.cpu_seconds)
        program._send({"do": "serve", "code": code}, waiting)
        with theirs, Sandbox(template, theirs.fileno(), has_numpy=has_numpy) as checker:
            theirs.close()
            # it waits while the program computes; a program that hangs is ended by its own limits
            patient = replace(limits, asleep_seconds=math.inf)
            checked = checker._run_request({"do": "check", "tests": list(tests), "entry": entry}, patient)
        return program._receive_outcome(), checked  # without calls to come the program ends


def start_working_template() -> Template:
    """A template of the first kind whose sandboxes run an honest program; before anything depends on it.

    Raises:
        SandboxError: the system allows none.
    """
    troubles = list[str]()
    for kind in KINDS:
        template = Template(kind)
        try:
            _try_out(template)
        except (SandboxError, RuntimeError) as error:  # refused, or ended by itself
            template.close()
            troubles.append(str(error))
        else:
            return template
    raise SandboxError(
        "reward kind 'code' runs programs that a model wrote, in a sandbox, and this machine allows none "
        f"({'; '.join(troubles)}); ask your site for a container (Apptainer) or nodes that allow user namespaces or "
        "Landlock, or use another kind of reward: without a sandbox nothing is run"
    )


def _try_out(template: Template) -> None:
    with Sandbox(template) as sandbox:
        outcome = sandbox.run("print(input())", "ready", ProgramLimits(30.0, 2**28, 1000))
    if outcome.output != "ready\n":
        raise SandboxError(f"an honest program fails in the sandbox by {template.kind}, with {outcome}")
