"""``environment.jsonl``: one line of JSON for each start of a run, of what it ran on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_hpc.common.files import LINES_BYTES, Count, DamagedText, parse_json, read_bytes, told
from tlt_hpc.storage.folder import WriteError


@dataclass(frozen=True)
class Host:
    """A node, as far as the job has it."""

    name: str
    num_ranks: Count
    processor: str
    num_cores: Count
    """That the ranks may run on."""
    memory_bytes: Count
    """Of the whole node."""
    gpus: Mapping[str, Count]
    """Name -> number, of those that ranks use."""


@dataclass(frozen=True)
class Environment:
    """What one start of a run ran on; versions are those of rank 0."""

    time: str
    """ISO 8601, UTC."""
    version: str
    commit: str
    """That is checked out where the package is a clone; else empty."""
    source: str
    """Digest of the package's files as they are, which a commit does not tell."""
    python: str
    packages: Mapping[str, str]
    """Those that are installed, of the ones that make a difference."""
    cuda: str
    """That torch is built for; empty for CPUs alone."""
    mpi: str
    """What the library says of itself."""
    hosts: tuple[Host, ...]
    """In the order of their first ranks."""
    threads: str
    """OMP_NUM_THREADS, as a rank finds it."""
    slurm: Mapping[str, str]
    """Empty outside of a Slurm job."""
    launcher: str
    command: tuple[str, ...]
    """Rank 0's, as the system has it."""
    energy: Mapping[str, str]
    """Kind of energy counter -> empty where all nodes let theirs be read, else why not."""


def add_environment(path: Path, environment: Environment) -> None:
    """Add a line in one write, durably; a last line that was cut off is left as it is, on a line of its own.

    Raises:
        WriteError: no room or no permission.
    """
    line = json.dumps(asdict(environment)).encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else b"\n" + line
            if (file.write(line) or 0) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteError(path, error) from error


def read_environments(path: Path) -> tuple[list[Environment], list[str]]:
    """The starts, oldest first, and a line for each thing that cannot be read; both empty where there is no file."""
    try:
        lines = read_bytes(path, LINES_BYTES).split(b"\n")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [told(error)]
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(parse_json(line, Environment))
        except DamagedText as error:
            problems.append(f"{path}:{number} is cut off or no line that a run writes ({error}), and is left out")
    return found, problems
