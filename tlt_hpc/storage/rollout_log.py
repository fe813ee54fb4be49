"""The permanent record of a step on one rank: all that a policy update consumes, and where the time went.

Plain HDF5 with gzip: any h5py reads it. Ragged columns are flat with end offsets. The commit counter is written last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.records import FinishReason, MicroStepRecord, Rollout, RolloutTiming, SampleKey
from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.storage.hdf5 import COMMITTED, SCHEMA, DamagedFile, h5py, read_all

ROLLOUT_SCHEMA = 1
_KEY_FIELDS = ("seed", "stream", "step", "draw", "sample")
_TIMES = ("start_seconds", "last_token_seconds", "release_seconds")


@dataclass(frozen=True)
class StepRecord:
    """What one rank writes for one step; rollouts in the order of their keys."""

    step: int
    rank: int
    num_ranks: int
    rollouts: tuple[Rollout, ...]
    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]
    timing: RolloutTiming
    micro_steps: tuple[MicroStepRecord, ...]
    harvested_seconds: float
    strategy_names: tuple[str, ...]
    strategy_rounds: NDArray[np.int64]
    strategy_tokens: NDArray[np.int64]
    guarded_near_ties: int
    metrics: dict[str, float]


def write_step(path: Path, record: StepRecord) -> None:
    """Write a step's record under its name, whole or not at all."""
    with writing_beside(path) as part, h5py.File(part, "w") as file:
        _write(file, record)


def read_step(path: Path) -> StepRecord:
    """The record as it was written.

    Raises:
        DamagedFile: the file is missing, incomplete or of another schema.
    """
    record: StepRecord = read_all(path, ROLLOUT_SCHEMA, lambda file: _read(file, path))
    return record


def is_committed(path: Path) -> bool:
    """Whether the file is there and whole."""
    try:
        read_step(path)
    except DamagedFile:
        return False
    return True


def _write(file: h5py.File, record: StepRecord) -> None:
    file.attrs[SCHEMA] = ROLLOUT_SCHEMA
    for name in ("step", "rank", "num_ranks", "harvested_seconds", "guarded_near_ties"):
        file.attrs[name] = vars(record)[name]
    for name in _TIMES:
        file.attrs[name] = vars(record.timing)[name]
    for name, value in record.metrics.items():
        file.attrs[f"metrics/{name}"] = value
    rollouts = record.rollouts
    _column(file, "prompt_tokens", _flat([r.prompt_tokens for r in rollouts], np.int32))
    _column(file, "prompt_ends", _ends([r.prompt_tokens for r in rollouts]))
    _column(file, "response_tokens", _flat([r.response_tokens for r in rollouts], np.int32))
    _column(file, "log_probs", _flat([r.log_probs for r in rollouts], np.float32))
    _column(file, "response_ends", _ends([r.response_tokens for r in rollouts]))
    for name in _KEY_FIELDS:
        _column(file, f"key/{name}", np.array([vars(r.key)[name] for r in rollouts], np.int64))
    _column(file, "finish_reason", np.array([r.finish_reason for r in rollouts], np.int8))
    _column(file, "weight_version", np.array([r.weight_version for r in rollouts], np.int64))
    _column(file, "num_target_passes", np.array([r.num_target_passes for r in rollouts], np.int64))
    _column(file, "finished_seconds", np.array([r.finished_seconds for r in rollouts], np.float64))
    _column(file, "reward", record.rewards)
    _column(file, "advantage", record.advantages)
    steps = record.micro_steps
    for name, kind in (("start_seconds", "f8"), ("end_seconds", "f8"), ("num_tokens", "i8"), ("loss", "f8")):
        _column(file, f"micro_step/{name}", np.array([vars(m)[name] for m in steps], kind))
    file.create_dataset("strategy/name", data=list(record.strategy_names), dtype=h5py.string_dtype())
    _column(file, "strategy/rounds", record.strategy_rounds)
    _column(file, "strategy/tokens", record.strategy_tokens)
    file.flush()
    file.attrs[COMMITTED] = len(rollouts)


def _read(file: h5py.File, path: Path) -> StepRecord:
    columns = {name: file[name][()] for name in _names(file)}
    count = int(file.attrs.get(COMMITTED, -1))
    ends = columns["response_ends"]
    whole = len(ends) == count and int(ends[-1] if count else 0) == len(columns["response_tokens"])
    if not whole:
        raise DamagedFile(f"{path}: commit counter {count}, but {len(ends)} rollouts; delete it and repeat the step")
    prompts = np.split(columns["prompt_tokens"], columns["prompt_ends"][:-1]) if count else []
    responses = np.split(columns["response_tokens"], ends[:-1]) if count else []
    log_probs = np.split(columns["log_probs"], ends[:-1]) if count else []
    rollouts = tuple(
        Rollout(
            key=SampleKey(*(int(columns[f"key/{name}"][i]) for name in _KEY_FIELDS)),
            prompt_tokens=prompts[i],
            response_tokens=responses[i],
            log_probs=log_probs[i],
            finish_reason=FinishReason(int(columns["finish_reason"][i])),
            weight_version=int(columns["weight_version"][i]),
            num_target_passes=int(columns["num_target_passes"][i]),
            finished_seconds=float(columns["finished_seconds"][i]),
        )
        for i in range(count)
    )
    micro = [columns[f"micro_step/{name}"].tolist() for name in ("start_seconds", "end_seconds", "num_tokens", "loss")]
    return StepRecord(
        step=int(file.attrs["step"]),
        rank=int(file.attrs["rank"]),
        num_ranks=int(file.attrs["num_ranks"]),
        rollouts=rollouts,
        rewards=columns["reward"],
        advantages=columns["advantage"],
        timing=RolloutTiming(*(float(file.attrs[name]) for name in _TIMES)),
        micro_steps=tuple(MicroStepRecord(*row) for row in zip(*micro, strict=True)),
        harvested_seconds=float(file.attrs["harvested_seconds"]),
        strategy_names=tuple(name.decode() for name in columns["strategy/name"]),
        strategy_rounds=columns["strategy/rounds"],
        strategy_tokens=columns["strategy/tokens"],
        guarded_near_ties=int(file.attrs["guarded_near_ties"]),
        metrics={k.removeprefix("metrics/"): float(v) for k, v in file.attrs.items() if k.startswith("metrics/")},
    )


def _names(file: h5py.File) -> list[str]:
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _column(file: h5py.File, name: str, values: NDArray[np.generic]) -> None:
    # the checksum makes a flipped bit an error instead of a wrong token
    chunked = {"compression": "gzip", "compression_opts": 1, "fletcher32": True} if len(values) else {}
    file.create_dataset(name, data=values, **chunked)


def _flat(arrays: list[NDArray[np.generic]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def _ends(arrays: list[NDArray[np.int32]]) -> NDArray[np.int64]:
    return np.cumsum([len(a) for a in arrays], dtype=np.int64)
