"""How responses lie in an HDF5 group: columns of the key's parts, flat tokens with the places where each one ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.storage.hdf5 import Group, put_array

KEY_COLUMNS = ("seed", "stream", "step", "draw", "sample")


def rollout_columns(rollouts: Sequence[Rollout]) -> dict[str, NDArray[Any]]:
    """The columns of a file's rollouts, by name."""
    keys = {name: np.array([vars(r.key)[name] for r in rollouts], np.int64) for name in KEY_COLUMNS}
    return keys | {
        "finish_reason": np.array([r.finish_reason for r in rollouts], np.int8),
        "weight_version": np.array([r.weight_version for r in rollouts], np.int64),
        "num_target_passes": np.array([r.num_target_passes for r in rollouts], np.int64),
        "finished_seconds": np.array([r.finished_seconds for r in rollouts], np.float64),
        "prompt_tokens": _flat([r.prompt_tokens for r in rollouts], np.int32),
        "response_tokens": _flat([r.response_tokens for r in rollouts], np.int32),
        "log_probs": _flat([r.log_probs for r in rollouts], np.float32),
        "prompt_ends": np.cumsum([len(r.prompt_tokens) for r in rollouts], dtype=np.int64),
        "response_ends": np.cumsum([len(r.response_tokens) for r in rollouts], dtype=np.int64),
        "pass_lengths": _flat([r.pass_lengths for r in rollouts], np.uint8),
        "pass_ends": np.cumsum([len(r.pass_lengths) for r in rollouts], dtype=np.int64),
    }


def get_rollouts(group: Group) -> tuple[Rollout, ...]:
    """What ``rollout_columns`` was given, from a group that has its columns."""
    column = {name: group[name][:] for name in group}
    prompts = np.split(column["prompt_tokens"], column["prompt_ends"])
    responses = np.split(column["response_tokens"], column["response_ends"])
    log_probs = np.split(column["log_probs"], column["response_ends"])
    passes = [np.empty(0, np.uint8)] * len(prompts)
    if "pass_ends" in column:
        passes = np.split(column["pass_lengths"], column["pass_ends"])
    keys = np.stack([column[name] for name in KEY_COLUMNS], axis=1).tolist()
    return tuple(
        Rollout(
            key=SampleKey(*key),
            prompt_tokens=prompts[i],
            response_tokens=responses[i],
            log_probs=log_probs[i],
            finish_reason=FinishReason(column["finish_reason"][i]),
            weight_version=int(column["weight_version"][i]),
            num_target_passes=int(column["num_target_passes"][i]),
            finished_seconds=float(column["finished_seconds"][i]),
            pass_lengths=passes[i],
        )
        for i, key in enumerate(keys)
    )


def check_counts(group: Group, committed: int, further: Sequence[str] = ()) -> None:
    """Hold the lengths of the columns, and of ``further`` ones, against the number of rollouts that was committed.

    Raises:
        ValueError: with both numbers.
    """
    for name in (*KEY_COLUMNS, "prompt_ends", "response_ends", *further):
        if len(group[name]) != committed:
            raise ValueError(f"{len(group[name])} entries of {name}, but {committed} rollouts were committed")
    pairs = [("prompt_tokens", "prompt_ends"), ("response_tokens", "response_ends")]
    if "pass_ends" in group:  # a file of an earlier version has none
        pairs.append(("pass_lengths", "pass_ends"))
    for tokens, ends in pairs:
        num_tokens = int(group[ends][-1]) if committed else 0
        if len(group[ends]) != committed:
            raise ValueError(f"{len(group[ends])} entries of {ends}, but {committed} rollouts were committed")
        if len(group[tokens]) != num_tokens:
            raise ValueError(f"{len(group[tokens])} {tokens}, but {num_tokens} were committed")


def put_arrays(group: Group, arrays: dict[str, NDArray[Any]]) -> None:
    """Write each as a dataset of the group."""
    for name, array in arrays.items():
        put_array(group, name, array)


def _flat(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="equiv")
