"""Reads checkpoints, and writes an export to disk completely or not at all; replaces nothing but an earlier export."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError

from tlt_hpc.checkpoint.manifest import Checkpoint, CheckpointError
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import UserError
from tlt_hpc.storage.folder import (
    GIVE_OUTPUT,
    PART_SUFFIX,
    RunFolder,
    WriteError,
    apply_umask,
    check_writable,
    make_folder,
    sync,
)

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
MARK = "<!-- written by tlt export"
"""The beginning of the line of a card that identifies an earlier export, which may be replaced."""


def checkpoint_at(run: RunFolder, step: int | None) -> Checkpoint | None:
    """The checkpoint of a step, or the newest; None if there is none.

    Raises:
        UserError: no such checkpoint.
    """
    store = CheckpointStore(run.checkpoints, keep=1)
    if step is None:
        return store.open_newest()
    try:
        return store.open_step(step)
    except CheckpointError as error:
        raise UserError(f"--step {step}: {error}") from None


def check_output(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Refuse a place that holds something other than an earlier export.

    Args:
        is_ours: whether an export has a file of this name.

    Raises:
        UserError: what is there.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; give a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    check_writable(folder, GIVE_OUTPUT)
    strange = [name for name in names if not is_ours(name)]
    is_marked = (folder / CARD).is_file() and MARK in (folder / CARD).read_text(errors="replace")
    if names and (strange or not is_marked):
        name = (strange or names)[0]
        raise UserError(f"--output {folder} has {name!r} in it and is no earlier export; give a new or empty folder")


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
            apply_umask(path)
            sync(path)
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        said = error.fact if isinstance(error, WriteError) else f"cannot write {folder}: {error}"
        raise UserError(f"{said}; make room there or choose another --output") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
