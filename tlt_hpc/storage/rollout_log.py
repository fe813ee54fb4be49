"""The permanent record of a run: one HDF5 file per step and rank with all that a policy update consumes.

Knows nothing of how rollouts are made or used. Schema 2 (any HDF5 reader opens it; N rollouts ordered by key):

    /            attributes kind, schema, step, rank, num_ranks, harvested_seconds, guarded_near_ties, committed
    /rollouts/   seed, stream, step, draw, sample [N] int64: the key; finish_reason [N] int8 (0 EOS, 1 LENGTH);
                 weight_version, num_target_passes [N] int64; finished_seconds [N] float64;
                 rewards, advantages [N] float32; prompt_tokens [sum P] int32; response_tokens [sum R] int32;
                 log_probs [sum R] float32; prompt_ends, response_ends [N] int64: where each one ends;
                 pass_lengths [sum of passes] uint8: tokens that each decoding pass emitted, pass_ends [N] int64
    /micro_steps/  start_seconds, end_seconds, loss [M] float64; num_tokens [M] int64
    /strategy/   names [S] UTF-8 bytes; rounds, tokens [S] int64; decisions [D, 2] int32: live sequences and index into
                 names of every round, in order
    /spans/      strategy_index [K] int16 (-1: prefill), num_live, num_tokens [K] int32, start_seconds [K] float64,
                 seconds [K] float32: each round and prefill pass, in the order of their ends
    /phases/     names [P] UTF-8 bytes; start_seconds, end_seconds [P] float64: what the rank did in turn
    /timing      attributes start_seconds, last_token_seconds, release_seconds (since the epoch) of the step's own
                 rollout; refills [K, 3] float64: the same of each refill (a file without it has none)
    /metrics     one float attribute per metric

A file without ``spans``, ``phases`` or ``pass_lengths`` is of an earlier version, and tells of none.
``committed`` is the number of rollouts and is written last; a file without it, or with another count, is not data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import NO_SPANS, EngineSpans, MicroStepRecord, PhaseSpan, Rollout, RolloutTiming
from tlt_hpc.storage.hdf5 import CommittedFile, DamagedFile, FileKind, Group, put_array, put_attributes, replacing
from tlt_hpc.storage.rollout_columns import check_counts, get_rollouts, put_arrays, rollout_columns

KIND = FileKind("rollout log", schema=2, remedy="delete it and resume the run from a checkpoint of an earlier step")

_JUDGED = ("rewards", "advantages")
_MICRO_STEP_COLUMNS = {"start_seconds": "f8", "end_seconds": "f8", "num_tokens": "i8", "loss": "f8"}
_SPAN_COLUMNS = ("strategy_index", "num_live", "num_tokens", "start_seconds", "seconds")
_TIMING = ("start_seconds", "last_token_seconds", "release_seconds")


@dataclass(frozen=True)
class StepRecord:
    """What one rank writes for one step.

    ``rollouts`` [N] are this rank's shard, ordered by key; ``rewards`` and ``advantages`` [N] float32 belong to them;
    an advantage is NaN where dynamic sampling left the response out of the update.
    ``strategy_names`` [S] with ``strategy_rounds`` and ``strategy_tokens`` [S] int64 say how often each speculation
    strategy ran and how many tokens it emitted; ``decisions`` [D, 2] int32 are the rounds in order, live sequences and
    index of the strategy, from which the rank's rollout can be played again.
    """

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
    decisions: NDArray[np.int32]
    guarded_near_ties: int
    metrics: dict[str, float]
    refills: tuple[RolloutTiming, ...] = ()
    """As ``timing``, of each refill."""
    spans: EngineSpans = NO_SPANS
    phases: tuple[PhaseSpan, ...] = ()


@dataclass(frozen=True)
class StepSummary:
    """A step's file without its tokens, log-probs and decisions: what an analysis over many files needs.

    ``response_lengths`` and ``num_target_passes`` [N] int64; the other fields as in ``StepRecord``.
    """

    step: int
    rank: int
    num_ranks: int
    response_lengths: NDArray[np.int64]
    num_target_passes: NDArray[np.int64]
    rewards: NDArray[np.float32]
    timing: RolloutTiming
    micro_steps: tuple[MicroStepRecord, ...]
    harvested_seconds: float
    strategy_names: tuple[str, ...]
    strategy_rounds: NDArray[np.int64]
    strategy_tokens: NDArray[np.int64]
    guarded_near_ties: int
    metrics: dict[str, float]
    refills: tuple[RolloutTiming, ...] = ()
    phases: tuple[PhaseSpan, ...] = ()


def write_step(path: Path, record: StepRecord) -> None:
    """Write one rank's step: beside, closed, renamed; replaces an earlier file of the step.

    Raises:
        WriteError: the disk refused; ``path`` is as before.
    """
    _assert_consistent(record)
    with replacing(path, KIND, len(record.rollouts)) as root:
        _put_record(root, record)


def read_step(path: Path) -> StepRecord:
    """Read back exactly what ``write_step`` was given.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        summary = _get_summary(file)
        rollouts = get_rollouts(file.root["rollouts"])
        return StepRecord(
            step=summary.step,
            rank=summary.rank,
            num_ranks=summary.num_ranks,
            rollouts=rollouts,
            rewards=summary.rewards,
            advantages=file.root["rollouts/advantages"][:],
            timing=summary.timing,
            micro_steps=summary.micro_steps,
            harvested_seconds=summary.harvested_seconds,
            strategy_names=summary.strategy_names,
            strategy_rounds=summary.strategy_rounds,
            strategy_tokens=summary.strategy_tokens,
            decisions=file.root["strategy/decisions"][:],
            guarded_near_ties=summary.guarded_near_ties,
            metrics=summary.metrics,
            refills=summary.refills,
            spans=_get_spans(file.root),
            phases=summary.phases,
        )


def read_spans(path: Path) -> EngineSpans:
    """Read what a rank's engine did when, of one step; none where the file is of an earlier version.

    Raises:
        DamagedFile, FileNotFoundError: as ``read_step``.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        return _get_spans(file.root)


def read_summary(path: Path) -> StepSummary:
    """Read a step's counts, lengths, rewards and timings without its tokens.

    Raises:
        DamagedFile, FileNotFoundError: as ``read_step``.
    """
    with CommittedFile(path, KIND) as file, file.naming_damage():
        return _get_summary(file)


def is_committed(path: Path) -> bool:
    """Whether a whole step lies there, by its commit counter; payload checksums are left to ``read_step``."""
    try:
        with CommittedFile(path, KIND) as file, file.naming_damage():
            check_counts(file.root["rollouts"], file.committed, _JUDGED)
    except (DamagedFile, FileNotFoundError):
        return False
    return True


def _assert_consistent(record: StepRecord) -> None:
    count = len(record.rollouts)
    keys = [rollout.key for rollout in record.rollouts]
    assert keys == sorted(keys), "rollouts are ordered by key"
    assert record.rewards.shape == record.advantages.shape == (count,), "one reward and one advantage per rollout"
    assert record.rewards.dtype == record.advantages.dtype == np.float32
    assert all(len(r.response_tokens) == len(r.log_probs) for r in record.rollouts), "one log-prob per response token"
    assert len(record.strategy_names) == len(record.strategy_rounds) == len(record.strategy_tokens)
    assert record.decisions.ndim == 2 and record.decisions.dtype == np.int32, "two columns of int32"


def _put_record(root: Group, record: StepRecord) -> None:
    put_attributes(root, {"step": record.step, "rank": record.rank, "num_ranks": record.num_ranks})
    put_attributes(root, {"harvested_seconds": record.harvested_seconds})
    put_attributes(root, {"guarded_near_ties": record.guarded_near_ties})
    put_arrays(root.create_group("rollouts"), _rollout_columns(record))
    put_arrays(root.create_group("micro_steps"), _micro_step_columns(record.micro_steps))
    put_arrays(root.create_group("strategy"), _strategy_columns(record))
    timing = root.create_group("timing")
    put_attributes(timing, {name: float(value) for name, value in vars(record.timing).items()})
    rows = [[vars(refill)[name] for name in _TIMING] for refill in record.refills]
    put_array(timing, "refills", np.array(rows, np.float64).reshape(-1, len(_TIMING)))
    put_arrays(root.create_group("spans"), {name: vars(record.spans)[name] for name in _SPAN_COLUMNS})
    put_arrays(root.create_group("phases"), _phase_columns(record.phases))
    put_attributes(root.create_group("metrics"), {name: float(value) for name, value in record.metrics.items()})


def _rollout_columns(record: StepRecord) -> dict[str, NDArray[Any]]:
    return rollout_columns(record.rollouts) | {name: vars(record)[name] for name in _JUDGED}


def _micro_step_columns(micro_steps: tuple[MicroStepRecord, ...]) -> dict[str, NDArray[Any]]:
    return {name: np.array([vars(m)[name] for m in micro_steps], kind) for name, kind in _MICRO_STEP_COLUMNS.items()}


def _strategy_columns(record: StepRecord) -> dict[str, NDArray[Any]]:
    # Fixed-length bytes: HDF5 keeps text of variable length in a heap that has no checksum.
    names = np.array([name.encode() for name in record.strategy_names] or [], dtype=np.bytes_)
    return {
        "names": names,
        "rounds": record.strategy_rounds,
        "tokens": record.strategy_tokens,
        "decisions": record.decisions,
    }


def _phase_columns(phases: tuple[PhaseSpan, ...]) -> dict[str, NDArray[Any]]:
    return {
        "names": np.array([phase.name.encode() for phase in phases] or [], dtype=np.bytes_),
        "start_seconds": np.array([phase.start_seconds for phase in phases], np.float64),
        "end_seconds": np.array([phase.end_seconds for phase in phases], np.float64),
    }


def _get_spans(root: Group) -> EngineSpans:
    if "spans" not in root:
        return NO_SPANS
    return EngineSpans(**{name: root["spans"][name][:] for name in _SPAN_COLUMNS})


def _get_phases(root: Group) -> tuple[PhaseSpan, ...]:
    if "phases" not in root:
        return ()
    group = root["phases"]
    rows = zip(group["names"][:], group["start_seconds"][:].tolist(), group["end_seconds"][:].tolist(), strict=True)
    return tuple(PhaseSpan(bytes(name).decode(), start, end) for name, start, end in rows)


def _get_summary(file: CommittedFile) -> StepSummary:
    root, rollouts, strategy = file.root, file.root["rollouts"], file.root["strategy"]
    check_counts(rollouts, file.committed, _JUDGED)
    return StepSummary(
        step=int(root.attrs["step"]),
        rank=int(root.attrs["rank"]),
        num_ranks=int(root.attrs["num_ranks"]),
        response_lengths=np.diff(rollouts["response_ends"][:], prepend=0),
        num_target_passes=rollouts["num_target_passes"][:],
        rewards=rollouts["rewards"][:],
        timing=RolloutTiming(**{name: float(root["timing"].attrs[name]) for name in _TIMING}),
        micro_steps=_get_micro_steps(root["micro_steps"]),
        harvested_seconds=float(root.attrs["harvested_seconds"]),
        strategy_names=tuple(bytes(name).decode() for name in strategy["names"][:]),
        strategy_rounds=strategy["rounds"][:],
        strategy_tokens=strategy["tokens"][:],
        guarded_near_ties=int(root.attrs["guarded_near_ties"]),
        metrics={name: float(value) for name, value in root["metrics"].attrs.items()},
        refills=tuple(RolloutTiming(*row) for row in root["timing/refills"][:].tolist())
        if "refills" in root["timing"]
        else (),
        phases=_get_phases(root),
    )


def _get_micro_steps(group: Group) -> tuple[MicroStepRecord, ...]:
    columns = [group[name][:].tolist() for name in _MICRO_STEP_COLUMNS]
    return tuple(MicroStepRecord(*row) for row in zip(*columns, strict=True))
