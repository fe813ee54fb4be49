"""Which files a data source names, and their rows: files, lists, patterns, folders, tasks. Knows no prompt."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from tlt_hpc.config import EMBEDDED_TASK, TASK_PREFIX, ConfigError, DataSection
from tlt_hpc.data.rows import JoinedRows, Rows

_PATTERN = frozenset("*?[")
_ALIKE = 0.75
"""Of two words, from which on one may be meant for the other."""
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""What splits are usually called; where a file is named so, names tell of splits."""
_CHOICE = f"a .jsonl, .parquet or .arrow file, a folder or pattern of them, '{TASK_PREFIX}NAME' or '{EMBEDDED_TASK}'"


def open_rows(data: DataSection, seed: int, wanted: frozenset[str]) -> Rows:
    """The rows that a configuration names, with those top-level columns of ``wanted`` that there are.

    A file that stays as it is is opened once in a process, whoever asks.

    Raises:
        ConfigError: no such file, a file that cannot be read, no rows.
    """
    if isinstance(data.source, str) and data.source.startswith(TASK_PREFIX):
        from tlt_hpc.data.tasks import TaskRows

        arguments = {name: value for name, value in data.task_args.items() if name != "size"}
        return TaskRows(data.source.removeprefix(TASK_PREFIX), data.task_size, seed, arguments)
    parts = [_open(path, *stamp_of(path), wanted) for path in find_files(data)]
    rows = parts[0] if len(parts) == 1 else JoinedRows([part for part in parts if len(part)] or parts)
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
            raise ConfigError(f"data.source = {data.source_name!r}: {source!r} cannot stand in a list; give it alone")
    found = [path for source in sources for path in _files_of(source, data.split)]
    if doubles := sorted({str(path) for path in found if found.count(path) > 1}):
        raise ConfigError(f"data.source = {data.source_name!r} names {doubles[0]} twice; name it once")
    for path in found:
        if path.suffix not in _KINDS:
            raise ConfigError(f"data.source: {path} is of no kind that is known; give {_CHOICE}")
    return found


def stamp_of(path: Path) -> tuple[int, int]:
    """What changes when a file does: when it was written (nanoseconds), and its bytes."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4096)
def _open(path: Path, changed: int, size: int, wanted: frozenset[str]) -> Rows:
    from tlt_hpc.data.arrow import open_arrow, open_parquet
    from tlt_hpc.data.jsonl import JsonlRows

    readers: dict[str, Callable[[], Rows]] = {
        "jsonl": lambda: JsonlRows(path),
        "parquet": lambda: open_parquet(path, wanted),
        "arrow": lambda: open_arrow(path, wanted),
    }
    return readers[_KINDS[path.suffix]]()


def _files_of(source: str, split: str) -> list[Path]:
    path = Path(os.path.expandvars(source)).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_in(path, split)
    if _PATTERN & set(str(path)):
        if files := sorted(match for match in _matches(path) if match.is_file()):
            return files
        raise ConfigError(f"data.source = {source!r}: no file is named like that; mend the pattern")
    raise ConfigError(f"data.source = {source!r} does not exist; {_meant(source)}give {_CHOICE}")


def _meant(source: str) -> str:
    """A task of another spelling."""
    kind, colon, name = source.partition(":")
    for known in (TASK_PREFIX + name, EMBEDDED_TASK) if colon else ():
        if difflib.SequenceMatcher(None, kind, known.partition(":")[0]).ratio() > _ALIKE:
            return f"did you mean {known!r}? or "
    return ""


def _matches(pattern: Path) -> Iterable[Path]:
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def _files_in(folder: Path, split: str) -> list[Path]:
    """The files of a folder: saved by ``datasets``, or shards by split as on the hub, or just files."""
    if (folder / "dataset_dict.json").is_file():
        return _saved_files(folder / split, folder, split)
    if (folder / "state.json").is_file():
        return _saved_files(folder, folder, split)
    own = _data_files(folder)
    candidates = own if own and not _splits(own) else [*own, *_data_files(folder / "data")]
    splits = _splits(candidates)
    chosen = [path for path in candidates if _split_of(path) == split] if splits else candidates
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
    return sorted(path for path in folder.glob("*") if path.suffix in _KINDS and path.is_file() and not _is_note(path))


def _is_note(path: Path) -> bool:
    """Files of ``datasets`` and the hub beside the data."""
    return path.suffix == ".json"


def _split_of(path: Path) -> str:
    """``train`` of ``train-00000-of-00002.parquet``, ``train.parquet`` and ``gsm8k-train.arrow``."""
    words = re.split(r"[-_.]", path.stem)
    return next((word for word in words if word in _SPLITS), words[0])


def _splits(files: list[Path]) -> list[str]:
    """The splits that file names tell of; none where they tell of none."""
    found = sorted({_split_of(path) for path in files})
    return found if _SPLITS & set(found) else []


def _what_is_there(folder: Path, split: str, splits: list[str]) -> str:
    if splits:
        return f"has no split {split!r}; set data.split to one of {', '.join(splits)}"
    inside = sorted({path.parent for path in folder.glob("*/*") if path.suffix in _KINDS and not _is_note(path)})
    if inside:
        return f"holds several data sets; give one of {', '.join(map(str, inside[:5]))}"
    return f"has no data file; give {_CHOICE}"
