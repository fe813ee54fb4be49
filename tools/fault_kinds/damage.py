"""Damage to a file or folder, chosen by a seed: another kind of file in its place, or other bytes."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
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
