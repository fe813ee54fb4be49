"""The core of ``hostile.py``: damage to a file, chosen by a seed, and what a command may make of it.

A command that meets damaged input may end with status 0, or with status 1 or 2 and a short error. Anything else is a
fault: a traceback, a hang, a death by signal, more than ``MEMORY_BYTES``, a long message, success where none is
possible.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 90.0
"""Time limit of a command; ``watch --once`` looks for eight seconds at a run that does not move."""
MEMORY_BYTES = 6 * 2**30
"""Address space that a command may add to what it starts with."""
MAX_LINES, MAX_CHARACTERS = 5, 2000
"""Of the error output."""
_CAPABILITIES_VERSION_3 = 0x20080522

Damage = Callable[[Path, random.Random], object]
"""Damages a file or folder in place; text that it returns says what exactly was done."""
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


# -- running a command ----------------------------------------------------------------------------------------------


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


def commands_on(job: Path, overrides: tuple[str, ...], folder: Path) -> dict[str, Command]:
    """The commands that read a job file and the folder of a run."""
    import inspect_run

    from tlt_hpc.cli.main import main

    def tlt(*words: str | Path) -> Command:
        return lambda out: main([*map(str, words)])

    return {
        "train": tlt("train", job, *overrides, "--dry-run"),
        "watch": tlt("watch", folder, "--once"),
        "report": lambda out: main(["report", str(folder), "--output", str(out / "report.html")]),
        "evaluate": tlt("evaluate", folder, job, *overrides, "--dry-run"),
        "inspect": lambda out: inspect_run.main([str(folder)]),
        "check": lambda out: inspect_run.main([str(folder), "--check"]),
    }


# -- another kind of file -------------------------------------------------------------------------------------------


def clear(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def instead(make: Callable[[Path], object]) -> Damage:
    """Damage that removes what is there and makes something else of the same name."""

    def apply(path: Path, source: random.Random) -> None:
        clear(path)
        make(path)

    return apply


def _far_loop(path: Path) -> None:
    path.symlink_to(f"{path.name}.a")
    path.with_name(f"{path.name}.a").symlink_to(path.name)


def _sparse(path: Path) -> None:
    with path.open("wb") as output:
        output.truncate(2**41)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:  # its path may have 108 characters
        server.bind(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}/{path.name}")


SPECIAL: dict[str, Damage] = {
    "a FIFO": instead(os.mkfifo),
    "a link to /dev/zero": instead(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": instead(lambda path: path.symlink_to(path.name)),
    "a loop of links": instead(_far_loop),
    "a dangling link": instead(lambda path: path.symlink_to("/nowhere/at/all")),
    "a socket": instead(_socket),
    "forbidden": lambda path, source: path.chmod(0),
}
"""What may be in place of a file or a folder."""
FOR_A_FILE: dict[str, Damage] = {
    **SPECIAL,
    "a folder": instead(lambda path: (path / "inside").mkdir(parents=True)),
    "2 TiB of zeros": instead(_sparse),
}
FOR_A_FOLDER: dict[str, Damage] = {**SPECIAL, "a file": instead(lambda path: path.write_bytes(b"no folder"))}

# -- other bytes ----------------------------------------------------------------------------------------------------


class _Canary:
    """Makes a folder when it is unpickled: no reader may ever do so."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def of_bytes(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    """Damage that replaces a file's bytes."""

    def apply(path: Path, source: random.Random) -> None:
        path.write_bytes(change(path.read_bytes(), source))

    return apply


def _flip(data: bytes, source: random.Random, end: int) -> bytes:
    place = source.randrange(min(len(data), end) or 1)
    return data[:place] + bytes(byte ^ 1 << source.randrange(8) for byte in data[place : place + 1]) + data[place + 1 :]


def _zeros(data: bytes, source: random.Random) -> bytes:
    start, length = source.randrange(len(data) or 1), source.randint(1, 4096)
    end = min(start + length, len(data))
    return data[:start] + bytes(end - start) + data[end:]


def _insert(data: bytes, source: random.Random) -> bytes:
    place, wrong = source.randrange(len(data) or 1), (b"\xff\xfe", b"\xc3", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf")
    return data[:place] + source.choice(wrong) + data[place:]


def _deep(data: bytes, source: random.Random) -> bytes:
    return source.choice((b"[", b'{"a":')) * source.choice((1000, 100_000))


def _torch_archive(path: Path, source: random.Random) -> None:
    import torch

    torch.save({"policy": _Canary(path.parent / "canary")}, path)


def _pickle(path: Path, source: random.Random) -> None:
    path.write_bytes(pickle.dumps({"policy": _Canary(path.parent / "canary")}, protocol=source.choice((0, 2, 5))))


def _other_value(path: Path, source: random.Random) -> None:
    """Replace one value of JSON or TOML by one of another type, or far too large."""
    text = path.read_text(encoding="utf-8")
    if spots := [place for place, letter in enumerate(text) if letter.isdigit() or letter == '"']:
        place = source.choice(spots)
        value = source.choice(("null", "[]", "{}", "-1", "1e999", "NaN", "9" * 400, '"x"', "true", "0.5", '"\\ud800"'))
        path.write_text(text[:place] + value + text[place + 1 :], encoding="utf-8")


def _other_hdf5(path: Path, source: random.Random) -> str:
    """Replace one dataset or attribute by something that a careless reader follows, or that exhausts its memory."""
    import h5py
    import numpy as np

    layout = h5py.VirtualLayout((4,), "i4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "a", (4,))
    kinds: dict[str, Callable[[Any, str], object]] = {
        "external link": lambda file, name: file.__setitem__(name, h5py.ExternalLink("/etc/passwd", "/a")),
        "soft link": lambda file, name: file.__setitem__(name, h5py.SoftLink("/nowhere")),
        "loop": lambda file, name: file.__setitem__(name, h5py.SoftLink(f"/{name}")),
        "raw": lambda file, name: file.create_dataset(name, (3,), "i4", external=[("/etc/passwd", 0, 12)]),
        "huge": lambda file, name: file.create_dataset(name, (2**50,), "i8", chunks=(2**16,)),
        "virtual": lambda file, name: file.create_virtual_dataset(name, layout),
        "text": lambda file, name: file.create_dataset(name, data=["x"] * 3, dtype=h5py.string_dtype()),
        "references": lambda file, name: file.create_dataset(name, data=np.full(3, file.ref), dtype=h5py.ref_dtype),
    }
    kind = source.choice((*kinds, "attribute"))
    with h5py.File(path, "r+") as file:
        if kind == "attribute":
            values = (-1, 2**60, "text", [1, 2], float("nan"))
            file.attrs[source.choice(sorted(file.attrs))] = source.choice(values)
            return kind
        found: list[str] = []
        file.visititems(lambda name, node: found.append(name) if isinstance(node, h5py.Dataset) else None)
        name = source.choice(sorted(found))
        del file[name]
        kinds[kind](file, name)
    return kind


BINARY: dict[str, Damage] = {
    "a bit flipped": of_bytes(lambda data, source: _flip(data, source, len(data))),
    "an early bit flipped": of_bytes(lambda data, source: _flip(data, source, 512)),
    "cut short": of_bytes(lambda data, source: data[: source.randrange(len(data) or 1)]),
    "noise at the end": of_bytes(lambda data, source: data + source.randbytes(source.randint(1, 4096))),
    "a block of zeros": of_bytes(_zeros),
    "empty": of_bytes(lambda data, source: b""),
    "noise": of_bytes(lambda data, source: source.randbytes(source.randint(1, 20_000))),
    "a folder": instead(Path.mkdir),
    "missing": lambda path, source: path.unlink(),
    "a pickle": _pickle,
    "a torch archive": _torch_archive,
}
TEXT: dict[str, Damage] = {
    **BINARY, "another value": _other_value, "deeply nested": of_bytes(_deep), "invalid UTF-8": of_bytes(_insert)
}  # fmt: skip


def damages_of(name: str) -> dict[str, Damage]:
    """What may happen to the bytes of a file, by its kind."""
    if name.endswith(".h5"):
        return {**BINARY, "another object in HDF5": _other_hdf5}
    return TEXT if name.endswith((".json", ".jsonl", ".toml")) else BINARY
