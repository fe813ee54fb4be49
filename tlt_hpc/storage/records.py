"""Records of a run that are JSON: a drafter's facts, a line for each start, and that the run has finished."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, Count, DamagedText, os_error_text, parse_json, read_bytes, read_json
from tlt_hpc.storage.folder import WriteError, writing_atomically

T = TypeVar("T")


def write_json(path: Path, tree: Any) -> None:
    """Write a document, whole or not at all.

    Raises:
        WriteError: no room or no permission; the file is unchanged.
    """
    with writing_atomically(path) as part:
        part.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def read_record(path: Path, kind: type[T], remedy: str) -> T | None:
    """A dataclass that was written as JSON; None if there is no file.

    Raises:
        UserError: it is damaged (with ``remedy``), or cannot be read.
    """
    try:
        return read_json(path, kind)
    except FileNotFoundError:
        return None
    except DamagedText as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None
    except OSError as error:
        raise UserError(os_error_text(error)) from None


FACTS_FILE = "facts.json"


@dataclass(frozen=True)
class CurvePoint:
    """One validation of a warm-up; ``loss`` is the mean since the one before, None where nothing was learned yet."""

    updates: int
    tokens: int
    """Response tokens trained on so far, repeats counted."""
    seconds: float
    """Wall-clock seconds of training so far, validations included."""
    loss: float | None
    accept_length: float


@dataclass(frozen=True)
class DrafterFacts:
    """A warm-up's drafter: what it learned from, for how long, and how well it drafts."""

    target: str
    data: str
    num_responses: int
    num_tokens: int
    """Response tokens of the data, repeats not counted."""
    num_updates: int
    """Behind the weights that were kept."""
    accept_length: float
    strategy: str
    """The drafting strategy of the validations."""
    temperature: float
    num_validation_prompts: int
    curve: tuple[CurvePoint, ...]


def read_facts(folder: Path) -> DrafterFacts | None:
    """The facts of a drafter's folder; None if there are none.

    Raises:
        UserError: the file is broken.
    """
    return read_record(folder / FACTS_FILE, DrafterFacts, "remove it")


@dataclass(frozen=True)
class FinishedRecord:
    """The number of steps of a run that has finished, and the digest of its last policy."""

    num_steps: Count
    policy_sha256: str


def record_finished(path: Path, num_steps: int, policy_sha256: str) -> None:
    """Record that a run has finished; for rank 0.

    Raises:
        WriteError: no room or no permission.
    """
    write_json(path, asdict(FinishedRecord(num_steps, policy_sha256)))


def read_finished(path: Path) -> FinishedRecord | None:
    """The record; None if the run has not finished.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    return read_record(path, FinishedRecord, "remove it, and the run looks for itself")


@dataclass(frozen=True)
class Host:
    """A node, or the part of it that the job has."""

    name: str
    num_ranks: Count
    processor: str
    num_cores: Count
    """Cores that the ranks may run on."""
    memory_bytes: Count
    """Memory of the whole node."""
    gpus: Mapping[str, Count]
    """Name -> number, of those that ranks use."""


@dataclass(frozen=True)
class Environment:
    """The nodes and software of one start of a run; versions are those of rank 0."""

    time: str
    """ISO 8601, UTC."""
    version: str
    commit: str
    """Commit that is checked out where the package is a clone; else empty."""
    source: str
    """Digest of the package's files as they are, which a commit does not tell."""
    python: str
    packages: Mapping[str, str]
    """Package -> version, of the installed ones that make a difference."""
    cuda: str
    """Version that torch is built for; empty for CPUs alone."""
    mpi: str
    """Name and version, as the library states them."""
    hosts: tuple[Host, ...]
    """In the order of their first ranks."""
    threads: str
    """OMP_NUM_THREADS, as a rank finds it."""
    slurm: Mapping[str, str]
    """Empty outside of a Slurm job."""
    command: tuple[str, ...]
    """Rank 0's, as the system has it."""
    placement: tuple[str, ...] = ()
    """Tables of ranks, GPUs, cores and network cards, one for each kind of node, and the warnings."""
    never_sampled: str = ""
    """Token ids that no response has, as "0, 20-23"."""


def add_json_line(path: Path, tree: Any) -> None:
    """Add a line in one write, durably; a last line that was cut off is left as it is, on a line of its own.

    Raises:
        WriteError: no room or no permission; what was written of the line is taken back.
    """
    line = json.dumps(tree).encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else b"\n" + line
            written = 0
            try:
                if (written := file.write(line) or 0) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # the first error is told; readers leave out a part of a line
                    if file.seek(0, os.SEEK_END) == end + written:  # nobody else has added one
                        file.truncate(end)
                raise
    except OSError as error:
        raise WriteError(path, error) from error


def add_environment(path: Path, environment: Environment) -> None:
    """Add a start of the run, as ``add_json_line``."""
    add_json_line(path, asdict(environment))


def read_environments(path: Path) -> tuple[list[Environment], list[str]]:
    """The starts, oldest first, and a line for each thing that cannot be read; both empty where there is no file."""
    try:
        lines = read_bytes(path, LINES_BYTES).split(b"\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [os_error_text(error)]
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(parse_json(line, Environment))
        except DamagedText as error:
            problems.append(f"{path}:{number} is cut off or no line that a run writes ({error}), and is left out")
    return found, problems
