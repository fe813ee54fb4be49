"""What commands and readers may make of damaged input: the ends of ``inputs.py`` and ``folders.py``.

A command that meets damaged input may end with status 0, or with status 1 or 2 and a short error. Anything else is
wrong: a traceback, a hang, a death by signal, more than ``MEMORY_BYTES``, a long message, success where none is
possible.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fault_kinds.results import Result, Results
from fault_kinds.runs import ROOT, Job

SECONDS = 90.0
"""Time limit of a command; ``watch --once`` looks for eight seconds at a run that does not move."""
MEMORY_BYTES = 6 * 2**30
"""Address space that a command may add to what it starts with."""
MAX_LINES, MAX_CHARACTERS = 5, 2000
"""Of the error output."""
BASE = Job(1, ("jobs/tiny.toml", "run.num_steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4"))
"""The run that is damaged."""
_CAPABILITIES_VERSION_3 = 0x20080522
_IMPORTED_ONCE = (
    "tlt_hpc.cli.main", "tlt_hpc.look.live.watch_run", "tlt_hpc.extras.report.write_report",
    "tlt_hpc.extras.report.figures.style", "tlt_hpc.evaluate.evaluate", "tlt_hpc.plan.memory.summary",
    "tlt_hpc.plan.inputs", "tlt_hpc.look.tracking", "tlt_hpc.models.drafter_file", "tlt_hpc.storage.feature_file",
)  # fmt: skip
"""Before the first process is forked."""

Command = Callable[[Path], int]
"""Gets an empty folder for its files and returns an exit status."""


@dataclass(frozen=True)
class Case:
    """Damaged input and the commands that run on it."""

    kind: str
    """What is wrong, e.g. "metrics.jsonl: a FIFO"."""
    commands: Mapping[str, Command]
    must_fail: frozenset[str] = frozenset()
    """Names of commands that may not end with status 0."""
    names: str = ""
    """A pattern that the error of status 2 must contain."""
    constant: Path | None = None
    """A folder in which no command may change anything."""


def strike(options: Namespace, results: Results) -> None:
    """Run every command on each case of a kind."""
    make: Callable[[int, Path, Path, random.Random], Case] = importlib.import_module(f"fault_kinds.{options.kind}").make
    os.chdir(ROOT)
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    base = options.run and options.run.absolute()
    if not base:
        base = results.folder / "run"
        BASE.succeed(results.folder, results.folder / "logs" / "base")
    for number in range(options.count):
        seed = 1_000_003 * options.seed + number
        folder = results.folder / f"case-{number:05d}"
        folder.mkdir()
        case = make(number, folder, base, random.Random(seed))
        for name in case.commands:
            wrong, said = run(case, name, results.folder / "said")
            details = {"kind": case.kind, "seed": seed, "said": said}
            results.add(Result(f"{seed} {name}", name, "answered", [wrong] if wrong else [], details))
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a case, whatever it did to permissions."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


def run(case: Case, name: str, out: Path) -> tuple[str, str]:
    """Run a command of the case in a process of its own; returns its fault and what it said, "" if there is none."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    before = contents(case.constant)
    child = multiprocessing.get_context("fork").Process(target=_run_limited, args=(case.commands[name], out))
    child.start()
    child.join(SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
        return "hang", f"no answer after {SECONDS:.0f} s"
    shown, errors = ((out / each).read_text(errors="replace") for each in ("stdout", "stderr"))
    fault = fault_in(child.exitcode, shown, errors, case, name)
    if contents(case.constant) != before:
        fault = "changed files"
    return fault, " | ".join((errors or shown).splitlines()[-4:])[-700:] if fault else ""


def fault_in(status: int, shown: str, errors: str, case: Case, name: str) -> str:
    """What is wrong with a command's answer; "" if nothing is."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if "Traceback (most recent call last)" in shown + errors:
        return "traceback"
    if status > 2:
        return f"status {status}"
    if status == 2 and not errors.strip():
        return "no message"
    if len(errors.splitlines()) > MAX_LINES or len(errors) > MAX_CHARACTERS:
        return "long message"
    if status == 2 and not re.search(case.names, errors):
        return "error that names no file"
    return "false success" if status == 0 and name in case.must_fail else ""


def _run_limited(command: Command, out: Path) -> None:
    """In the child: its output goes to files; multiprocessing prints a traceback there if an exception is raised."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    _drop_capabilities()
    sys.exit(command(out))


def _drop_capabilities() -> None:
    """Let file permissions apply to root as to any user; root stays the owner of its files."""
    if os.getuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, none):
            raise OSError(ctypes.get_errno(), "capset")


def contents(folder: Path | None) -> dict[Path, str]:
    """All that is below a folder, files with their digests."""
    paths = [] if folder is None else sorted(folder.rglob("*"))
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in paths}
