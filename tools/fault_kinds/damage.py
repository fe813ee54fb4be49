"""Damage to a file or folder, chosen by a seed: another kind of file in its place, or other bytes."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], object]
"""Damages a file or folder in place; text that it returns says what exactly was done."""

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


def _replace_one(pattern: str, values: Sequence[str]) -> Damage:
    """Damage that replaces one place of a text that matches."""

    def change(data: bytes, source: random.Random) -> bytes:
        spots = [*re.finditer(pattern.encode(), data, re.MULTILINE)]
        start, end = source.choice(spots).span("it") if spots else (0, 0)
        return data[:start] + source.choice(values).encode() + data[end:]

    return of_bytes(change)


def of_record(damage: Damage) -> Damage:
    """The same of a rank's status record, which gets the checksum that belongs to it."""

    def apply(path: Path, source: random.Random) -> None:
        path.write_bytes(path.read_bytes()[9:].rstrip())
        damage(path, source)
        data = path.read_bytes()
        path.write_bytes((f"{zlib.crc32(data):08x} ".encode() + data).ljust(2047)[:2047] + b"\n")

    return apply


def _torch_archive(path: Path, source: random.Random) -> None:
    import torch

    torch.save({"policy": _Canary(path.parent / "canary")}, path)


def _pickle(path: Path, source: random.Random) -> None:
    path.write_bytes(pickle.dumps({"policy": _Canary(path.parent / "canary")}, protocol=source.choice((0, 2, 5))))


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
        nodes: dict[str, Any] = {"/": file}
        file.visititems(nodes.__setitem__)
        if kind == "attribute":
            place, name = source.choice([(place, name) for place, node in nodes.items() for name in node.attrs])
            value = source.choice((-1, 0.0, 2**62, "text", [1, 2], float("nan"), float("inf"), 1e300, -1e300))
            del nodes[place].attrs[name]
            nodes[place].attrs[name] = value
            return f"{place} {name} = {value}"
        name = source.choice(sorted(name for name, node in nodes.items() if isinstance(node, h5py.Dataset)))
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
VALUES = (
    "1e300", "-1e300", "1e999", "NaN", "-Infinity", "-1", "9" * 400, "9" * 6000, str(2**63), "true", "null", "0.5",
    '"text"', '"\\ud800"', '"[bold red]x[/nope]"', '"\\u001b[31m"', "[]", "{}", "[" * 100_000, '{"a":' * 2000, "",
    "1979-05-27",
)  # fmt: skip
"""In place of a value of JSON or TOML."""
_DOCUMENTS = ('{"hello": "world"}', "[]", "3", '"text"', "null", "{}", "[[[]]]", "{}\n{}", "\ufeff{}", "[" * 100_000)
DOCUMENT: dict[str, Damage] = {
    "another value": _replace_one(r'(?:":\s*|^\w+ = )(?P<it>[^,}\n]+)', VALUES),
    "without a key": _replace_one(r'(?P<it>"[^"]+":\s*[^][{},\n]+,\s*|^\w+ = .*\n)', ("",)),
    "another document": of_bytes(lambda data, source: source.choice(_DOCUMENTS).encode()),
}
"""Of JSON or TOML."""


def damages_of(path: Path) -> dict[str, Damage]:
    """What may happen to the bytes of a file, by its kind."""
    if path.suffix == ".h5":
        return {**BINARY, "another object in HDF5": _other_hdf5}
    if path.match("status/rank-*"):
        return BINARY | {name: of_record(damage) for name, damage in DOCUMENT.items()}
    if path.suffix in (".json", ".jsonl", ".toml") or path.name == "owner":
        return {**BINARY, **DOCUMENT, "invalid UTF-8": of_bytes(_insert)}
    return BINARY
