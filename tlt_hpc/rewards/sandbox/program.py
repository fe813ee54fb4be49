"""What a process does once it is to run a model's program: the last limits, then the program. Hostile from there.

Three ways: to run it as a script, to call one of its functions, or to serve calls of its functions to a checker, which
runs a data set's assertions in another process.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import resource
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from tlt_hpc.rewards.sandbox import seccomp
from tlt_hpc.rewards.sandbox.assertions import run_assertions
from tlt_hpc.rewards.sandbox.values import decode, encode

MEMORY_STATUS = 77
_RESULT_FD, _CALLS_FD = 3, 4
_FILE_BYTES = 64 * 2**20
_NUM_FILES = 64
_NAME = "solution.py"
_REPLACED: list[object] = []
"""Streams of the process that this one was forked from: if they went, they would close the program's descriptors."""


@dataclass(frozen=True)
class Descriptors:
    """Of a process that is about to run a program: what becomes its 0, 1, 2, 3 and 4."""

    stdin: int
    output: int
    nothing: int
    """/dev/null, which the sandbox has no path to."""
    calls: int | None = None


def confine(request: dict[str, Any], descriptors: Descriptors, base_bytes: int) -> None:
    """Close everything else, lower all limits, and go behind the filter of system calls."""
    _keep(request["do"], descriptors)
    seconds = math.ceil(request["cpu_seconds"]) + 1  # process 1 looks more closely, and this sees to it that it can
    memory = base_bytes + request["memory_bytes"]
    for limit, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _, allowed = resource.getrlimit(limit)
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(limit, (most, most))
    seccomp.install()
    _replace_streams()
    random.seed(0)  # a program that draws without a seed gets the same verdict every time
    sys.argv[:] = [_NAME]


def _replace_streams() -> None:
    """Text streams on descriptors 0 to 2, as an interpreter starts with."""
    _REPLACED.extend([sys.__stdin__, sys.__stdout__, sys.__stderr__])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115


def body_of(request: dict[str, Any]) -> Callable[[], object]:
    """What the process does then."""
    match request["do"]:
        case "run":
            return lambda: _run(request["code"], "__main__")
        case "call":
            return lambda: _call(request)
        case "serve":
            return lambda: _serve(request["code"])
    assert request["do"] == "check"
    return lambda: _check(request["assertions"])


def run_to_the_end(body: Callable[[], object]) -> NoReturn:
    """Run it, end the process as an interpreter would, and take no longer about it.

    Taking a whole interpreter down costs six times what a short program does.
    """
    written, status = sys.stdout, 1
    try:
        body()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except MemoryError:
        status = MEMORY_STATUS
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
            atexit._run_exitfuncs()
            sys.stdout.flush()
            written.flush()
        finally:
            os._exit(status & 0xFF)


def _keep(way: str, descriptors: Descriptors) -> None:
    """Descriptors 0 to 2 as a script has them; where it is not one, 3 is for results and 4 for calls."""
    is_script = way == "run"
    given = [
        descriptors.stdin,
        descriptors.output if is_script else descriptors.nothing,
        descriptors.nothing,
        *([] if is_script else [descriptors.output]),
        *([] if descriptors.calls is None else [descriptors.calls]),
    ]
    moved = [os.dup(fd) for fd in given]
    assert min(moved) > _CALLS_FD, "0 to 4 are open already, so no copy can be one of them"
    for number, fd in enumerate(moved):
        os.dup2(fd, number)
    os.closerange(len(given), os.sysconf("SC_OPEN_MAX"))


def _run(code: str, name: str) -> types.ModuleType:
    """Run a program as a module of this name."""
    module = types.ModuleType(name)
    module.__file__ = _NAME
    sys.modules[name] = module
    exec(compile(code, _NAME, "exec"), vars(module))
    return module


def _call(request: dict[str, Any]) -> None:
    function = _find(_run(request["code"], "solution"), request["name"])
    result = encode(function(*decode(request["arguments"])))
    with open(_RESULT_FD, "w", encoding="utf-8") as stream:
        stream.write(result)


def _find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """A function of the program, or a method of its class ``Solution``, as judges of programs have it."""
    names = vars(module)
    if "Solution" in names and name not in names:
        return getattr(names["Solution"](), name)  # type: ignore[no-any-return]
    return names[name]  # type: ignore[no-any-return]


def _serve(code: str) -> None:
    """Answer calls, one line each, until the checker has no more."""
    module = _run(code, "solution")
    with open(_CALLS_FD, "rb") as calls, open(_CALLS_FD, "wb", closefd=False) as replies:
        for line in calls:
            name, arguments, named = decode(line.decode())
            result = encode(_find(module, name)(*arguments, **named))
            replies.write(result.encode() + b"\n")
            replies.flush()


def _check(assertions: list[str]) -> None:
    """Run a data set's assertions against the program in the other process; one word tells that all held."""
    with open(_CALLS_FD, "rb") as replies, open(_CALLS_FD, "wb", closefd=False) as calls:
        run_assertions(assertions, replies, calls)
    with open(_RESULT_FD, "w", encoding="utf-8") as stream:
        stream.write("passed")
