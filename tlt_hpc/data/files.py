"""Which files a data source names: files, lists, patterns, folders; and the rows of these, or of a task."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tlt_hpc.config import EMBEDDED_TASK, TASK_PREFIX, ConfigError, DataSection
from tlt_hpc.data.rows import ArrowRows, JoinedRows, JsonlRows, Rows

_JSONL = (".jsonl", ".ndjson", ".json")
_IN_FOLDERS = (".jsonl", ".ndjson", ".parquet", ".arrow")
_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""What splits are usually called; if a file of a folder is named so, its names tell the splits."""
_CHOICE = f"a .jsonl, .parquet or .arrow file, a folder or pattern of them, '{TASK_PREFIX}NAME' or '{EMBEDDED_TASK}'"


def open_rows(data: DataSection, seed: int, wanted: frozenset[str]) -> Rows:
    """The rows that a configuration names, with those top-level columns of ``wanted`` that there are.

    Raises:
        ConfigError: no such file, a file that cannot be read, no rows.
    """
    if isinstance(data.source, str) and data.source.startswith(TASK_PREFIX):
        from tlt_hpc.data.tasks import TaskRows

        arguments = {name: value for name, value in data.task_args.items() if name != "size"}
        return TaskRows(data.source.removeprefix(TASK_PREFIX), data.task_size, seed, arguments)
    files = find_files(data)
    rows = JoinedRows([JsonlRows(path) if path.suffix in _JSONL else ArrowRows(path, wanted) for path in files])
    if not len(rows):
        raise ConfigError(f"data.source = {data.source_name!r} has no rows; give a file with prompts and answers")
    return rows


def find_files(data: DataSection) -> list[Path]:
    """The files of a source, in the order in which their rows count.

    Raises:
        ConfigError: there is no such file, or none that can be read.
    """
    sources = (data.source,) if isinstance(data.source, str) else data.source
    for source in sources:
        if source == EMBEDDED_TASK or source.startswith(TASK_PREFIX):
            raise ConfigError(f"data.source = {data.source_name!r}: {source!r} cannot be in a list; give it alone")
    found = [path for source in sources for path in _files_of(source, data.split)]
    if doubles := sorted({str(path) for path in found if found.count(path) > 1}):
        raise ConfigError(f"data.source = {data.source_name!r} names {doubles[0]} twice; name it once")
    for path in found:
        if path.suffix not in (*_JSONL, *_IN_FOLDERS):
            raise ConfigError(f"data.source: {path} is of an unknown kind; give {_CHOICE}")
    return found


def _files_of(source: str, split: str) -> list[Path]:
    path = Path(os.path.expandvars(source)).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_in(path, split)
    if set("*?[") & set(str(path)):
        matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        if files := sorted(match for match in matches if match.is_file()):
            return files
        raise ConfigError(f"data.source = {source!r}: no file is named like that; fix the pattern")
    raise ConfigError(f"data.source = {source!r} does not exist; give {_CHOICE}")


def _files_in(folder: Path, split: str) -> list[Path]:
    """The files of a folder: saved by ``datasets``, or shards by split as on the hub, or just files."""
    if (folder / "dataset_dict.json").is_file():
        return _saved_files(folder / split, folder, split)
    if (folder / "state.json").is_file():
        return _saved_files(folder, folder, split)
    found = _data_files(folder)
    if not found or _splits(found):
        found += _data_files(folder / "data")
    splits = _splits(found)
    chosen = [path for path in found if _split_of(path) == split] if splits else found
    chosen = chosen or _data_files(folder / split)
    if not chosen:
        raise ConfigError(f"data.source = {str(folder)!r} {_what_is_there(folder, split, splits)}")
    return chosen


def _saved_files(folder: Path, source: Path, split: str) -> list[Path]:
    """The Arrow files that ``save_to_disk`` lists in a split's state.json."""
    state = folder / "state.json"
    if not state.is_file():
        there = sorted(path.parent.name for path in source.glob("*/state.json"))
        raise ConfigError(
            f"data.source = {str(source)!r} has no split {split!r}; set data.split to one of {', '.join(there)}"
        )
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"data.source: {state} does not list data files; save the data set again") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(f"data.source: {folder} lacks {missing[0]}, which its state.json names; copy it there too")
    return [folder / name for name in names]


def _data_files(folder: Path) -> list[Path]:
    """Data files of a folder; a .json file there is a note of ``datasets`` or the hub."""
    return sorted(path for path in folder.glob("*") if path.suffix in _IN_FOLDERS and path.is_file())


def _split_of(path: Path) -> str:
    """``train`` of ``train-00000-of-00002.parquet``, ``train.parquet`` and ``gsm8k-train.arrow``."""
    words = re.split(r"[-_.]", path.stem)
    return next((word for word in words if word in _SPLITS), words[0])


def _splits(files: list[Path]) -> list[str]:
    """The splits that file names tell; none if they tell none."""
    found = sorted({_split_of(path) for path in files})
    return found if _SPLITS & set(found) else []


def _what_is_there(folder: Path, split: str, splits: list[str]) -> str:
    if splits:
        return f"has no split {split!r}; set data.split to one of {', '.join(splits)}"
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and _data_files(path)]
    if inside:
        return f"holds several data sets; give one of {', '.join(map(str, inside[:5]))}"
    return f"has no data file; give {_CHOICE}"
