"""Writes an export to disk, completely or not at all, and replaces nothing but an earlier export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from tlt_hpc.config import UserError
from tlt_hpc.export.formats import Files
from tlt_hpc.storage.folder import PART_SUFFIX, make_folder, share, sync

FILES = WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


def check_output(folder: Path, mark: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse a place that holds something other than an earlier export.

    Args:
        folder: where to write.
        mark: the line of the card that identifies such an export.
        is_ours: whether an export has a file of this name.

    Raises:
        UserError: what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; give a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    strange = [name for name in names if not is_ours(name)]
    is_marked = (folder / CARD).is_file() and mark in (folder / CARD).read_text(errors="replace")
    if names and (strange or not is_marked):
        name = (strange or names)[0]
        raise UserError(f"--output {folder} has {name!r} in it and is no earlier export; give a new or empty folder")


def write(folder: Path, files: Files, card: str) -> None:
    """Write the three files beside ``folder`` and rename them into place; an earlier export is replaced.

    Raises:
        UserError: the disk refused; what was there before is still there.
    """

    def fill(part: Path) -> Iterator[Path]:
        save_file(files.tensors, part / WEIGHTS, metadata={"format": "pt"})
        (part / CONFIG).write_text(json.dumps(files.config, indent=2) + "\n", encoding="utf-8")
        (part / CARD).write_text(card, encoding="utf-8")
        yield from (part / name for name in FILES)

    write_folder(folder, fill)


def write_folder(folder: Path, fill: Callable[[Path], Iterable[Path]]) -> None:
    """Let ``fill`` write files into a folder beside ``folder``, sync what it yields, and rename it.

    Raises:
        UserError: the disk refused; what was there before is still there.
    """
    final = folder.resolve()
    part = final.with_name(final.name + PART_SUFFIX)
    try:
        make_folder(final.parent)
        shutil.rmtree(part, ignore_errors=True)  # a killed export's
        part.mkdir()
        for path in fill(part):
            share(path)
            sync(path)
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error}; make room there or choose another --output") from None
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
