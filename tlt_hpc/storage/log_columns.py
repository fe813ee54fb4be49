"""Single columns of the rollout log, for a look at very many files: nothing is read but what is asked for.

The names are those of ``rollout_log``'s schema: ``rollouts/response_ends``, ``timing/start_seconds``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.hdf5 import CommittedFile
from tlt_hpc.storage.rollout_columns import check_counts
from tlt_hpc.storage.rollout_log import KIND

_LATER = ("spans", "phases", "timing/refills", "rollouts/pass_lengths", "rollouts/pass_ends")
"""What files of earlier versions have not: they tell of none."""
_FLAT = {f"rollouts/{name}" for name in ("prompt_tokens", "response_tokens", "log_probs", "pass_lengths")}


@dataclass(frozen=True)
class Columns:
    """What was asked for of one rank's step: arrays and attributes by name; an array that came later may be empty."""

    step: int
    rank: int
    num_ranks: int
    num_rollouts: int
    arrays: dict[str, NDArray[Any]]
    attributes: dict[str, float]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def texts(self, name: str) -> tuple[str, ...]:
        """An array of names."""
        return tuple(bytes(text).decode() for text in self.arrays[name])


def read_columns(path: Path, arrays: Sequence[str] = (), attributes: Sequence[str] = ()) -> Columns:
    """Read ``GROUP/NAME`` arrays and attributes; an attribute of the file itself has no group.

    A metric that the rank did not tell (``metrics/NAME``) is NaN.

    Raises:
        DamagedFile: as ``rollout_log.read_step``, as far as it was read.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        missing = {group for group in _LATER if not file.has(group)}
        return Columns(
            step=int(file.number("step")),
            rank=int(file.number("rank")),
            num_ranks=int(file.number("num_ranks")),
            num_rollouts=file.committed,
            arrays={name: _array(file, name, missing) for name in arrays},
            attributes={
                name: file.number(name, math.nan if name.startswith("metrics/") else None) for name in attributes
            },
        )


def check_whole(path: Path) -> int:
    """Read every array of a file, its checksums held against it; returns the bytes that it holds, unpacked.

    Raises:
        DamagedFile, FileNotFoundError: as ``read_columns``.
    """
    num_bytes = 0
    with CommittedFile(path, KIND) as file, file.naming_damage():
        for place in file.names():
            for each in file.names(place):
                num_bytes += file.array(f"{place}/{each}").nbytes
            file.numbers(place)
        check_counts(file)
    return num_bytes


def _array(file: CommittedFile, name: str, missing: set[str]) -> NDArray[Any]:
    if name in missing or name.partition("/")[0] in missing:
        return np.empty(0)
    array = file.array(name)
    if name.startswith("rollouts/") and name not in _FLAT and len(array) != file.committed:
        raise ValueError(f"{len(array)} entries of {name}, but {file.committed} rollouts were committed")
    return array
