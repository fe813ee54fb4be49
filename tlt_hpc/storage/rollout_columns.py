"""Responses as columns of an HDF5 group: the key's parts, and flat tokens with the places where each response ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.storage.hdf5 import CommittedFile, Group, put_array

KEY_COLUMNS = ("seed", "stream", "step", "draw", "sample")
_SCALARS = {"finish_reason": "i1", "weight_version": "i8", "num_target_passes": "i8", "finished_seconds": "f8"}
_FLAT: dict[str, tuple[str, type[np.generic]]] = {
    "prompt_tokens": ("prompt_ends", np.int32),
    "response_tokens": ("response_ends", np.int32),
    "log_probs": ("response_ends", np.float32),
    "pass_lengths": ("pass_ends", np.uint8),
}
"""Column -> the column with the places where each response's part ends, and the type."""


def key_columns(keys: Sequence[SampleKey]) -> dict[str, NDArray[Any]]:
    """The parts of keys, each [N] int64."""
    return {name: np.array([vars(key)[name] for key in keys], np.int64) for name in KEY_COLUMNS}


def flat(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Arrays one after another, and where each one ends [N]."""
    joined = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="equiv")
    return joined, np.cumsum([len(array) for array in arrays], dtype=np.int64)


def rollout_columns(rollouts: Sequence[Rollout]) -> dict[str, NDArray[Any]]:
    """The columns of a file's rollouts, by name."""
    columns = key_columns([rollout.key for rollout in rollouts])
    columns |= {name: np.array([vars(r)[name] for r in rollouts], kind) for name, kind in _SCALARS.items()}
    for name, (ends, kind) in _FLAT.items():
        columns[name], columns[ends] = flat([vars(rollout)[name] for rollout in rollouts], kind)
    return columns


def read_keys(file: CommittedFile, place: str) -> list[SampleKey]:
    """The keys of a group with ``key_columns``."""
    parts = [file.array(f"{place}/{name}").tolist() for name in KEY_COLUMNS]
    return [SampleKey(*key) for key in zip(*parts, strict=True)]


def read_rollouts(file: CommittedFile) -> tuple[Rollout, ...]:
    """What ``rollout_columns`` was given, from the group ``rollouts``."""
    keys = read_keys(file, "rollouts")
    parts: dict[str, Any] = {
        name: np.split(file.array(f"rollouts/{name}"), file.array(f"rollouts/{ends}"))
        if file.has(f"rollouts/{ends}")
        else [np.empty(0, kind)] * len(keys)
        for name, (ends, kind) in _FLAT.items()
    }
    scalars: dict[str, list[Any]] = {name: file.array(f"rollouts/{name}").tolist() for name in _SCALARS}
    reasons = [FinishReason(reason) for reason in scalars.pop("finish_reason")]
    return tuple(
        Rollout(
            key=key,
            finish_reason=reasons[i],
            **{name: values[i] for name, values in scalars.items()},
            **{name: arrays[i] for name, arrays in parts.items()},
        )
        for i, key in enumerate(keys)
    )


def check_counts(file: CommittedFile, *further: str) -> None:
    """Compare the lengths of the columns, and of ``further`` ones, with the number of rollouts that was committed.

    Raises:
        ValueError: with both numbers.
    """
    # a file of an earlier version has no pass_ends
    tables = {name: ends for name, (ends, _) in _FLAT.items() if file.has(f"rollouts/{ends}")}
    for name in (*KEY_COLUMNS, *_SCALARS, *further, *tables.values()):
        if (count := file.size(f"rollouts/{name}")) != file.committed:
            raise ValueError(f"{count} entries of {name}, but {file.committed} rollouts were committed")
    for name, ends in tables.items():
        due = int(file.array(f"rollouts/{ends}")[-1]) if file.committed else 0
        if (count := file.size(f"rollouts/{name}")) != due:
            raise ValueError(f"{count} {name}, but {due} were committed")


def put_arrays(group: Group, arrays: dict[str, NDArray[Any]]) -> None:
    """Write each as a dataset of the group."""
    for name, array in arrays.items():
        put_array(group, name, array)
