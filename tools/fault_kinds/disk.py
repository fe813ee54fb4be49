"""What a power failure can leave of files whose changes were recorded: the model of ``power_loss.py``.

A file and a folder are lists of changes of which an ``fsync`` makes the first ones safe. A crash keeps these, and of
the others none, all, the first few or any; bytes that are lost may be zeros. A rename is one change of its folder,
which may be kept although the file's bytes are lost.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fault_kinds.interception import Change


@dataclass(eq=False)
class File:
    """Changes: an offset and bytes that were written there, or a size and None."""

    changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    num_safe: int = 0

    @property
    def size(self) -> int:
        return len(content((self, tuple(range(len(self.changes))), False)))


@dataclass(eq=False)
class Folder:
    """Changes: names with what they stand for from then on, None for nothing."""

    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)
    num_safe: int = 0

    def names(self, kept: Iterator[int] | range | None = None) -> dict[str, File | Folder]:
        """What is in it after the changes of these numbers, by default all."""
        found: dict[str, File | Folder | None] = {}
        for number in range(len(self.changes)) if kept is None else kept:
            found |= self.changes[number]
        return {name: node for name, node in found.items() if node is not None}


Part = tuple[File, tuple[int, ...], bool]
"""What is kept of a file: the numbers of its changes, and whether the bytes of the others are zeros."""
State = dict[str, Part | None]
"""Path -> what is kept of a file; None for a folder."""
Choice = Callable[[File | Folder], tuple[tuple[int, ...], bool]]
"""Of a file or folder the numbers of the changes that are kept, and whether zeros stand for lost bytes."""


class Disk:
    """The files below a folder as programs see them, and as a crash may leave them."""

    def __init__(self, root: Path) -> None:
        self.root, self._root = str(root), Folder()

    def find(self, path: str) -> File | Folder | None:
        """What is at a path."""
        node: File | Folder | None = self._root
        for name in PurePosixPath(path).relative_to(self.root).parts:
            node = node.names().get(name) if isinstance(node, Folder) else None
        return node

    def apply(self, change: Change) -> bool:
        """Make a recorded change; returns whether it has changed anything."""
        path, node = PurePosixPath(change.path), self.find(change.path)
        folder = self.find(str(path.parent)) if change.path != self.root else None
        if change.kind == "fsync" and node is not None:
            before, node.num_safe = node.num_safe, len(node.changes)
            return before != node.num_safe
        if change.kind in ("write", "truncate") and isinstance(node, File):
            offset = node.size if change.offset is None else change.offset
            node.changes.append((offset, None if change.kind == "truncate" else change.data))
            return True
        if change.kind == "openat" and isinstance(node, File) and change.flags & os.O_TRUNC and node.changes:
            node.changes.append((0, None))
            return True
        names = self._changed_names(change, node) if isinstance(folder, Folder) else {}
        if names and isinstance(folder, Folder):
            folder.changes.append(names)
        return bool(names)

    def _changed_names(self, change: Change, node: File | Folder | None) -> dict[str, File | Folder | None]:
        """What a call changes in the folder of its path; nothing where it fails."""
        name = PurePosixPath(change.path).name
        if node is None:
            if change.kind == "mkdir":
                return {name: Folder()}
            return {name: File()} if change.kind == "openat" and change.flags & os.O_CREAT else {}
        if change.kind == "unlink" and not (isinstance(node, Folder) and node.names()):
            return {name: None}
        if change.kind == "rename":
            target = PurePosixPath(change.target)
            assert target.parent == PurePosixPath(change.path).parent, "no file of a run changes its folder"
            return {name: None, target.name: node}
        return {}

    def state(self, choice: Choice) -> State:
        """The files that a crash leaves."""
        return dict(self._walk("", self._root, choice))

    def _walk(self, path: str, node: File | Folder, choice: Choice) -> Iterator[tuple[str, Part | None]]:
        kept, is_zeros = choice(node)
        if isinstance(node, File):
            yield path, (node, kept, is_zeros and len(kept) < len(node.changes))
            return
        yield path, None
        for name, inner in node.names(iter(kept)).items():
            yield from self._walk(f"{path}/{name}", inner, choice)


def keeping(names: bool = False, data: bool = False, zeros: bool = False) -> Choice:
    """Of folders all changes of names, of files all bytes, or what is safe of them; zeros may stand for lost bytes."""

    def choose(node: File | Folder) -> tuple[tuple[int, ...], bool]:
        is_file = isinstance(node, File)
        is_all = data if is_file else names
        return tuple(range(len(node.changes) if is_all else node.num_safe)), zeros and is_file

    return choose


everything, nothing = keeping(names=True, data=True), keeping()
CHOICES: dict[str, Choice] = {
    "everything": everything, "nothing unsynced": nothing, "names alone": keeping(names=True),
    "names, zeros as bytes": keeping(names=True, zeros=True), "bytes alone": keeping(data=True),
}  # fmt: skip


def by_chance(seed: str, any_order: bool = False) -> Choice:
    """Of each file all, what is safe, the first few changes or any of them; of a folder the first few, or any."""
    chance = random.Random(seed)

    def choose(node: File | Folder) -> tuple[tuple[int, ...], bool]:
        new = range(node.num_safe, len(node.changes))
        first = tuple(range(node.num_safe + chance.randint(0, len(new))))
        some = (*range(node.num_safe), *(number for number in new if chance.random() < 0.5))
        if isinstance(node, Folder):
            return (some if any_order else first), False
        kept = chance.choice([everything(node)[0], nothing(node)[0], first, some])
        return kept, chance.random() < 0.5

    return choose


def content(part: Part) -> bytes:
    """The bytes of a file of which some changes are kept."""
    file, kept, is_zeros = part
    data, chosen = bytearray(), set(kept)
    for number, (offset, written) in enumerate(file.changes):
        if number not in chosen and not is_zeros:
            continue
        size = offset if written is None else offset + len(written)
        if size > len(data):
            data.extend(bytes(size - len(data)))
        if written is None:
            del data[offset:]
        elif number in chosen:
            data[offset:size] = written
    return bytes(data)
