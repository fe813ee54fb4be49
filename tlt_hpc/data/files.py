"""Finds the files of a data source (files, lists, patterns, folders) and opens their rows."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.config import (
    EMBEDDED_MODEL,
    EMBEDDED_TASK,
    Config,
    ConfigError,
    DataSection,
    apply_override,
    parse_config,
)
from tlt_hpc.data.rows import ArrowRows, JoinedRows, JsonlRows, Rows

_JSONL = (".jsonl", ".ndjson", ".json")
_IN_FOLDERS = (".jsonl", ".ndjson", ".parquet", ".arrow")
_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""Usual names of splits: if a file of a folder has one, the file names of the folder name their splits."""
TRAINED, EVALUATED, ARGUMENT = "data.source", "evaluation.sources", "FILE"
"""The key of the configuration, or argument of a command, that names files."""


def _source_remedy(key: str) -> str:
    task = "" if key == ARGUMENT else f", or '{EMBEDDED_TASK}' (docs/data.md)"
    return f"give a .jsonl, .parquet or .arrow file, a folder or pattern of them{task}"


def open_rows(data: DataSection, wanted: frozenset[str], key: str = TRAINED) -> Rows:
    """The rows that a configuration names, with those top-level columns of ``wanted`` that there are.

    Args:
        key: names the source in errors.

    Raises:
        ConfigError: no such file, a file that cannot be read, no rows.
    """
    files = data_files(data, key)
    rows = JoinedRows(
        [JsonlRows(path, key) if path.suffix in _JSONL else ArrowRows(path, wanted, key) for path in files]
    )
    if not len(rows):
        raise ConfigError(f"{key} = {data.source_name!r} has no rows", "give a file that has some")
    return rows


def data_files(data: DataSection, key: str = TRAINED) -> list[Path]:
    """The files that a configuration names; none if it names a task. ``key`` names the source in errors.

    Raises:
        ConfigError: no such file, or one of an unknown kind.
    """
    sources = (data.source,) if isinstance(data.source, str) else data.source
    if data.source == EMBEDDED_TASK:
        return []
    files = [path for source in sources for path in _find_source_files(source, key)]
    for path in files:
        if path.suffix not in (*_JSONL, *_IN_FOLDERS):
            raise ConfigError(f"{key}: {path} is of an unknown kind", _source_remedy(key))
    return files


def _find_source_files(source: str, key: str) -> list[Path]:
    path = Path(os.path.expandvars(source)).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _find_split_files(path, key)
    if set("*?[") & set(str(path)):
        matches = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        if files := sorted(match for match in matches if match.is_file()):
            return files
        raise ConfigError(f"{key} = {source!r}: no file is named like that", "fix the pattern")
    known = known_by_output(path)
    script = Path("jobs") / f"{path.stem.removesuffix('_test')}.py"
    there = {each.stem: each for each in _data_files(path.parent)}
    near = difflib.get_close_matches(path.stem, there, n=1, cutoff=0.8)
    by_script = f"did you mean {there[near[0]]}?" if near else _source_remedy(key)
    by_script = f"write it: python {script}" if script.is_file() else by_script
    remedy = f"on the login node: {known.prepare_commands(source)}" if known else by_script
    raise ConfigError(f"{key} = {source!r} does not exist", remedy)


def _find_split_files(folder: Path, key: str) -> list[Path]:
    """The files of the split for training or for evaluation: shards as on the hub or from ``save_to_disk``, or files
    whose names tell no split.
    """
    split = "test" if key == EVALUATED else "train"
    found = _data_files(folder)
    splits = _splits(found)
    if not found or splits:
        found += _data_files(folder / "data")
        splits = _splits(found)
    chosen = [path for path in found if _split_name(path) == split] if splits else found
    chosen = chosen or _data_files(folder / split)
    if not chosen:
        splits = splits or sorted(path.name for path in folder.iterdir() if path.is_dir() and _data_files(path))
        if not splits:
            raise ConfigError(f"{key} = {str(folder)!r} has no data file", _source_remedy(key))
        remedy = (
            f"give a pattern such as FOLDER/**/*validation* for the files of one of {', '.join(splits)}, "
            "or give one of its folders"
        )
        raise ConfigError(f"{key} = {str(folder)!r} has no split {split!r}", remedy)
    return chosen


def _data_files(folder: Path) -> list[Path]:
    """Data files of a folder; ``datasets`` and the hub keep notes in .json files, and results in cache-*.arrow."""
    found = (path for path in folder.glob("*") if path.suffix in _IN_FOLDERS and not path.name.startswith("cache-"))
    return sorted(path for path in found if path.is_file())


def _split_name(path: Path) -> str:
    """``train`` of ``train-00000-of-00002.parquet``, ``train.parquet`` and ``gsm8k-train.arrow``."""
    words = re.split(r"[-_.]", path.stem)
    return next((word for word in words if word in _SPLITS), words[0])


def _splits(files: list[Path]) -> list[str]:
    """The splits that file names tell; none if they tell none."""
    found = sorted({_split_name(path) for path in files})
    return found if _SPLITS & set(found) else []


def config_for_data(source: str | Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """A configuration of which only the data matters.

    Raises:
        ConfigError: an invalid source or override.
    """
    tree: dict[str, Any] = {
        "run": {"name": "data", "num_steps": 1},
        "model": {"path": EMBEDDED_MODEL},
        "data": {"source": source},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_new_tokens": 1},
    }
    for override in overrides:
        apply_override(tree, override if "." in override.partition("=")[0] else f"data.{override}")
    return parse_config(tree)


@dataclass(frozen=True)
class KnownSet:
    """A data set of the hub."""

    name: str
    repository: str
    folder: str
    """Where the pages download it to."""
    files: str
    """Those to train on, or the only ones; a pattern within the repository."""
    source: str
    """``data_source`` of its rows: verl's name, which reward functions look at."""
    question: str
    """Its column."""
    answer: str
    """Its column; a dot selects a field within one."""

    @property
    def output(self) -> Path:
        """The file that it is written to by default; the shipped jobs read it there."""
        return Path("data") / f"{self.name.replace('-', '_')}.jsonl"

    @property
    def download_command(self) -> str:
        """The command that downloads it."""
        return f"hf download {self.repository} --repo-type dataset --local-dir {self.folder}"

    def prepare_commands(self, output: str) -> str:
        """The commands that download it and write the file ``output``."""
        prepare = f"tlt data prepare {self.name} {self.folder}/{self.files} --output {shlex.quote(output)}"
        return f"{self.download_command} && {prepare}"


_DAPO = ("prompt", "reward_model.ground_truth")
KNOWN = {
    known.name: known
    for known in (
        KnownSet("dapo-math", "BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo", "data/*.parquet", "math_dapo", *_DAPO),
        KnownSet("gsm8k", "openai/gsm8k", "data/gsm8k", "main/train-*.parquet", "openai/gsm8k", "question", "answer"),
        KnownSet(
            "math", "EleutherAI/hendrycks_math", "data/math", "*/train-*.parquet", "DigitalLearningGmbH/MATH-lighteval",
            "problem", "solution",
        ),
        KnownSet(
            "math-500", "HuggingFaceH4/MATH-500", "data/math500", "test.jsonl", "HuggingFaceH4/MATH-500", "problem",
            "answer",
        ),
        KnownSet("aime-2024", "BytedTsinghua-SIA/AIME-2024", "data/aime", "data/*.parquet", "aime2024", *_DAPO),
    )
}  # fmt: skip
"""By the name that ``tlt data prepare`` takes; it knows how their cells are read."""


def known_by_output(path: Path) -> KnownSet | None:
    """The data set whose prepared file has this name; None if none has."""
    return next((known for known in KNOWN.values() if known.output.name == path.name), None)
