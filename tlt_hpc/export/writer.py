"""Puts an export on disk, whole or not at all, and never over anything but an earlier one. Knows no layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from tlt_hpc.config import UserError
from tlt_hpc.export.card import MARK
from tlt_hpc.export.formats import Files
from tlt_hpc.storage.folder import PART_SUFFIX, make_folder, share, sync

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


def check_output(folder: Path) -> None:
    """Refuse a place that holds something other than an earlier export.

    Raises:
        UserError: what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; give a folder")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not _is_export(folder, names):
        raise UserError(
            f"--output {folder} has {sorted(names)[0]!r} in it and is no earlier export; give a new or empty folder"
        )


def write(folder: Path, files: Files, card: str) -> None:
    """Write the three files beside ``folder`` and rename it; an earlier export gives way.

    Raises:
        UserError: the disk refused; what was there before is still there.
    """

    def fill(part: Path) -> Iterator[Path]:
        save_file(files.tensors, part / WEIGHTS, metadata={"format": "pt"})
        (part / CONFIG).write_text(json.dumps(files.config, indent=2) + "\n", encoding="utf-8")
        (part / CARD).write_text(card, encoding="utf-8")
        yield from (part / name for name in (WEIGHTS, CONFIG, CARD))

    write_folder(folder, fill)


def write_folder(folder: Path, fill: Callable[[Path], Iterable[Path]]) -> None:
    """Have ``fill`` write files into a folder beside, sync what it gives back, and rename; an earlier one gives way.

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


def is_marked(folder: Path, mark: str) -> bool:
    """Whether a folder's card says that it is an export."""
    return (folder / CARD).is_file() and mark in (folder / CARD).read_text(errors="replace")


def _is_export(folder: Path, names: set[str]) -> bool:
    return names <= {WEIGHTS, CONFIG, CARD} and is_marked(folder, MARK)
