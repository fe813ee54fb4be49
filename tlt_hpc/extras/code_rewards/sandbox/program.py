"""The process of a model's program: the last limits, then the program as a script, or a call of its function.

Assertions are run by two such processes, each in a sandbox of its own: one answers calls of the program's functions,
the other runs the assertions.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import random
import resource
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from tlt_hpc.extras.code_rewards.sandbox import seccomp
from tlt_hpc.extras.code_rewards.sandbox.assertions import run_tests
from tlt_hpc.extras.code_rewards.sandbox.prelude import install_prelude_names
from tlt_hpc.extras.code_rewards.sandbox.serving import find_object, serve
from tlt_hpc.extras.code_rewards.sandbox.values import numpy_to_python

MEMORY_STATUS = 77
RESULT_FD = 3
_FILE_BYTES = 64 * 2**20
_NUM_FILES = 64
_NAME = "solution.py"
_REPLACED: list[object] = []
"""Streams of the process that this one was forked from: if they went, they would close the program's descriptors."""


def confine(request: dict[str, Any], stdin: int, output: int, nothing: int, base_bytes: int) -> None:
    """Close all other descriptors, lower all limits, and install the filter of system calls.

    A script's output is its descriptor 1; other results are written to descriptor 3. ``nothing`` is /dev/null, which
    the sandbox has no path to.
    """
    given = [stdin, output, nothing] if request["do"] == "run" else [stdin, nothing, nothing, output]
    moved = [os.dup(fd) for fd in given]
    assert min(moved) > RESULT_FD, "0 to 3 are open already, so no copy can be one of them"
    for number, fd in enumerate(moved):
        os.dup2(fd, number)
    os.closerange(len(given), os.sysconf("SC_OPEN_MAX"))
    seconds = math.ceil(request["cpu_seconds"]) + 1  # the supervisor looks more closely, and this lets it
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
    """Open text streams on descriptors 0 to 2, as an interpreter does when it starts."""
    _REPLACED.extend([sys.__stdin__, sys.__stdout__, sys.__stderr__])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115


def action_of_request(request: dict[str, Any]) -> Callable[[], object]:
    """The function that does what the request asks of the process."""
    match request["do"]:
        case "run":
            return lambda: _run_program(request["code"], "__main__")
        case "call":
            return lambda: _call_function(request)
        case "serve":
            return lambda: _serve(request["code"])
    return lambda: _run_tests(request["tests"], request["entry"])


def run_to_the_end(body: Callable[[], object]) -> NoReturn:
    """Run the program and end the process as an interpreter would, but faster.

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


def _run_program(code: str, name: str) -> types.ModuleType:
    """Run a program as a module of this name."""
    install_prelude_names()
    module = types.ModuleType(name)
    module.__file__ = _NAME
    sys.modules[name] = module
    exec(compile(code, _NAME, "exec", dont_inherit=True), vars(module))
    return module


def _call_function(request: dict[str, Any]) -> None:
    function = find_object(_run_program(request["code"], "solution"), request["name"])
    _write_result(json.dumps(function(*request["arguments"]), default=numpy_to_python))


def _serve(code: str) -> None:
    calls, replies = _open_partner_streams()
    serve(_run_program(code, "solution"), calls, replies)


def _run_tests(texts: list[str], entry: str) -> None:
    _write_result(json.dumps(run_tests(texts, entry, *_open_partner_streams())))


def _open_partner_streams() -> tuple[TextIO, TextIO]:
    """Streams from and to the process in the other sandbox, which came as standard input; that is empty from now on."""
    fd = os.dup(0)
    os.dup2(2, 0)
    return os.fdopen(fd, encoding="utf-8"), os.fdopen(fd, "w", encoding="utf-8", closefd=False)


def _write_result(result: str) -> None:
    with open(RESULT_FD, "w", encoding="utf-8") as stream:
        stream.write(result)
