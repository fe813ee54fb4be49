"""The permanent record of a run: one HDF5 file per step and rank with all that a policy update consumes.

Schema 3 (any HDF5 reader opens it; N rollouts ordered by key):

    /            attributes kind, schema, step, rank, num_ranks, harvested_seconds, guarded_near_ties, committed
    /rollouts/   seed, stream, step, draw, sample [N] int64: the key; finish_reason [N] int8 (0 EOS, 1 LENGTH, 2 STOP);
                 weight_version, num_target_passes [N] int64; finished_seconds [N] float64;
                 rewards, advantages [N] float32; prompt_tokens [sum P] int32; response_tokens [sum R] int32;
                 log_probs [sum R] float32; prompt_ends, response_ends [N] int64: where each one ends;
                 pass_lengths [sum of passes] uint8: tokens that each decoding pass emitted, pass_ends [N] int64
    /micro_steps/  start_seconds, end_seconds, loss [M] float64; num_tokens [M] int64: each update of the drafter that
                 counted, the loss that it saw and the tokens that the loss counted, which are its weight in the merge
    /strategy/   names [S] UTF-8 bytes; rounds, tokens [S] int64: of each, and tokens that they emitted; decisions
                 [D, 2] int32: live sequences and index into names of every round, in order
    /spans/      strategy_index [K] int16 (-1: prefill), num_live, num_tokens [K] int32 (sequences, and tokens that they
                 were given), start_seconds [K] float64, seconds [K] float32: each round and prefill pass, in the order
                 of their ends
    /phases/     names [P] UTF-8 bytes; start_seconds, end_seconds [P] float64: what the rank did in turn (gen, drafter,
                 reward, update_actor, refresh, save_checkpoint, testing; ahead: in the tail); those between two steps
                 belong to the later one
    /timing      attributes start_seconds, last_token_seconds (idle from here), release_seconds of the step's own
                 rollout; refills [K, 3] float64: the same of each refill
    /metrics     one float attribute per metric

``committed`` is the number of rollouts and is written last; a file without it, or with another count, is not data.
Times are seconds since the epoch by the clock of the rank's node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.formatting import FIRST_STEP
from tlt_hpc.common.records import (
    NO_SPANS,
    EngineSpans,
    FinishReason,
    MicroStepRecord,
    PhaseSpan,
    Rollout,
    RolloutTiming,
    SampleKey,
)
from tlt_hpc.storage.hdf5 import CommittedFile, FileKind, Group, put_array, put_attributes, replacing_file

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


def flatten_arrays(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Arrays one after another, and where each one ends [N]."""
    joined = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="equiv")
    return joined, np.cumsum([len(array) for array in arrays], dtype=np.int64)


def rollout_columns(rollouts: Sequence[Rollout]) -> dict[str, NDArray[Any]]:
    """The columns of a file's rollouts, by name."""
    columns = key_columns([rollout.key for rollout in rollouts])
    columns["step"] += FIRST_STEP
    columns |= {name: np.array([vars(r)[name] for r in rollouts], kind) for name, kind in _SCALARS.items()}
    for name, (ends, kind) in _FLAT.items():
        columns[name], columns[ends] = flatten_arrays([vars(rollout)[name] for rollout in rollouts], kind)
    return columns


def read_keys(file: CommittedFile, place: str) -> list[SampleKey]:
    """The keys of a group with ``key_columns``."""
    parts = [file.read_array(f"{place}/{name}").tolist() for name in KEY_COLUMNS]
    return [SampleKey(*key) for key in zip(*parts, strict=True)]


def read_rollouts(file: CommittedFile) -> tuple[Rollout, ...]:
    """Read back from the group ``rollouts`` what ``rollout_columns`` was given."""
    keys = [replace(key, step=key.step - FIRST_STEP) for key in read_keys(file, "rollouts")]
    parts: dict[str, Any] = {
        name: np.split(file.read_array(f"rollouts/{name}"), file.read_array(f"rollouts/{ends}"))
        for name, (ends, _) in _FLAT.items()
    }
    scalars: dict[str, list[Any]] = {name: file.read_array(f"rollouts/{name}").tolist() for name in _SCALARS}
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
    for name in (*KEY_COLUMNS, *_SCALARS, *further, *(ends for ends, _ in _FLAT.values())):
        if (count := file.size(f"rollouts/{name}")) != file.committed:
            raise ValueError(f"{count} entries of {name}, but {file.committed} rollouts were committed")
    for name, (ends, _) in _FLAT.items():
        due = int(file.read_array(f"rollouts/{ends}")[-1]) if file.committed else 0
        if (count := file.size(f"rollouts/{name}")) != due:
            raise ValueError(f"{count} {name}, but {due} were committed")


def put_arrays(group: Group, arrays: dict[str, NDArray[Any]]) -> None:
    """Write each array as a dataset of the group."""
    for name, array in arrays.items():
        put_array(group, name, array)


KIND = FileKind(
    "rollout log",
    schema=3,
    remedy="if another version wrote it, open it with that commit (environment.jsonl); else delete it and resume the "
    "run from a checkpoint of an earlier step",
)

_JUDGED = ("rewards", "advantages")
_MICRO_STEP_COLUMNS = {"start_seconds": "f8", "end_seconds": "f8", "num_tokens": "i8", "loss": "f8"}
_SPAN_COLUMNS = ("strategy_index", "num_live", "num_tokens", "start_seconds", "seconds")
_TIMING = ("start_seconds", "last_token_seconds", "release_seconds")


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The fields that a record and a summary share. ``strategy_tokens`` [S] int64 belong to ``strategy_names`` [S]."""

    step: int
    rank: int
    num_ranks: int
    timing: RolloutTiming
    micro_steps: tuple[MicroStepRecord, ...]
    harvested_seconds: float
    strategy_names: tuple[str, ...]
    strategy_tokens: NDArray[np.int64]
    refills: tuple[RolloutTiming, ...] = ()
    """The same as ``timing`` of each refill."""
    phases: tuple[PhaseSpan, ...] = ()
    spans: EngineSpans = NO_SPANS


@dataclass(frozen=True, kw_only=True)
class StepRecord(_Step):
    """The record that one rank writes for one step.

    ``rollouts`` [N] are this rank's shard, ordered by key; ``rewards`` and ``advantages`` [N] float32 belong to them;
    an advantage is that of the first token, or NaN if dynamic sampling left the response out of the update.
    ``strategy_rounds`` [S] int64 say how often each speculation strategy ran. ``decisions`` [D, 2] int32 are the rounds
    in order: live sequences and index of the strategy (``spans`` has more of each).
    """

    rollouts: tuple[Rollout, ...]
    rewards: NDArray[np.float32]
    advantages: NDArray[np.float32]
    strategy_rounds: NDArray[np.int64]
    decisions: NDArray[np.int32]
    guarded_near_ties: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class StepSummary(_Step):
    """A step's file without its tokens, which are most of it: what an analysis over many files needs.

    ``response_lengths`` and ``num_target_passes`` [N] int64, ``finish_reasons`` [N] int8.
    """

    response_lengths: NDArray[np.int64]
    num_target_passes: NDArray[np.int64]
    finish_reasons: NDArray[np.int8]


def write_step(path: Path, record: StepRecord) -> None:
    """Write one rank's step beside ``path``, sync it and rename it; replaces an earlier file of the step.

    Raises:
        WriteError: the disk refused; ``path`` is unchanged.
    """
    _assert_consistent(record)
    with replacing_file(path, KIND, len(record.rollouts), durable=True) as root:  # the step's line is, too
        _put_record(root, record)


def read_step(path: Path) -> StepRecord:
    """Read back exactly what ``write_step`` was given.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KIND) as file, file.raising_damaged_file():
        return StepRecord(
            **_read_shared(file),
            rollouts=read_rollouts(file),
            rewards=file.read_array("rollouts/rewards"),
            advantages=file.read_array("rollouts/advantages"),
            strategy_rounds=file.read_array("strategy/rounds"),
            decisions=file.read_array("strategy/decisions"),
            guarded_near_ties=int(file.read_number("guarded_near_ties")),
            metrics=file.read_numbers("metrics"),
        )


def read_summary(path: Path) -> StepSummary:
    """Read a step's lengths, times and rounds without its tokens.

    Raises:
        DamagedFile, FileNotFoundError: as ``read_step``.
    """
    with CommittedFile(path, KIND) as file, file.raising_damaged_file():
        return StepSummary(
            **_read_shared(file),
            response_lengths=np.diff(file.read_array("rollouts/response_ends"), prepend=0),
            num_target_passes=file.read_array("rollouts/num_target_passes"),
            finish_reasons=file.read_array("rollouts/finish_reason"),
        )


def _read_shared(file: CommittedFile) -> dict[str, Any]:
    check_counts(file, *_JUDGED)
    micro_steps = [file.read_array(f"micro_steps/{name}").tolist() for name in _MICRO_STEP_COLUMNS]
    times = [file.read_array(f"phases/{name}").tolist() for name in ("start_seconds", "end_seconds")]
    return {
        "step": int(file.read_number("step")) - FIRST_STEP,
        **{name: int(file.read_number(name)) for name in ("rank", "num_ranks")},
        "harvested_seconds": file.read_number("harvested_seconds"),
        "timing": RolloutTiming(*(file.read_number(f"timing/{name}") for name in _TIMING)),
        "refills": tuple(RolloutTiming(*row) for row in file.read_array("timing/refills").tolist()),
        "micro_steps": tuple(MicroStepRecord(*row) for row in zip(*micro_steps, strict=True)),
        "strategy_names": file.read_texts("strategy/names"),
        "strategy_tokens": file.read_array("strategy/tokens"),
        "phases": tuple(map(PhaseSpan, file.read_texts("phases/names"), *times)),
        "spans": EngineSpans(**{name: file.read_array(f"spans/{name}") for name in _SPAN_COLUMNS}),
    }


def _assert_consistent(record: StepRecord) -> None:
    count = len(record.rollouts)
    keys = [rollout.key for rollout in record.rollouts]
    assert keys == sorted(keys), "rollouts are ordered by key"
    assert record.rewards.shape == record.advantages.shape == (count,), "one reward and one advantage per rollout"
    assert all(len(r.response_tokens) == len(r.log_probs) for r in record.rollouts), "one log-prob per response token"
    assert record.decisions.ndim == 2 and record.decisions.dtype == np.int32, "two columns of int32"


def _put_record(root: Group, record: StepRecord) -> None:
    own = ("rank", "num_ranks", "harvested_seconds", "guarded_near_ties")
    put_attributes(root, {"step": record.step + FIRST_STEP} | {name: vars(record)[name] for name in own})
    put_arrays(root.create_group("rollouts"), rollout_columns(record.rollouts) | {n: vars(record)[n] for n in _JUDGED})
    micro_steps = {
        n: np.array([vars(m)[n] for m in record.micro_steps], kind) for n, kind in _MICRO_STEP_COLUMNS.items()
    }
    put_arrays(root.create_group("micro_steps"), micro_steps)
    strategy = {name: vars(record)[f"strategy_{name}"] for name in ("rounds", "tokens")}
    names = _as_bytes(record.strategy_names)
    put_arrays(root.create_group("strategy"), strategy | {"names": names, "decisions": record.decisions})
    timing = root.create_group("timing")
    put_attributes(timing, {name: float(value) for name, value in vars(record.timing).items()})
    rows = [[vars(refill)[name] for name in _TIMING] for refill in record.refills]
    put_array(timing, "refills", np.array(rows, np.float64).reshape(-1, len(_TIMING)))
    put_arrays(root.create_group("spans"), {name: vars(record.spans)[name] for name in _SPAN_COLUMNS})
    times = {n: np.array([vars(p)[n] for p in record.phases], np.float64) for n in ("start_seconds", "end_seconds")}
    put_arrays(root.create_group("phases"), times | {"names": _as_bytes([phase.name for phase in record.phases])})
    put_attributes(root.create_group("metrics"), {name: float(value) for name, value in record.metrics.items()})


def _as_bytes(names: Sequence[str]) -> NDArray[np.bytes_]:
    """Names at fixed length: HDF5 keeps text of variable length in a heap that has no checksum."""
    return np.array([name.encode() for name in names], dtype=np.bytes_)


# -- responses of a step that is not committed yet ---------------------------------------------------------------------
#
# One file for each time that a rank wrote what it had finished. Schema 2: attributes kind, schema, origin, committed;
# /rollouts/ has the columns of the rollout log, without rewards and advantages. ``origin`` names the weights that the
# responses are of.

KEPT_KIND = FileKind("kept responses", schema=2, remedy="they are generated again")


def write_kept_responses(path: Path, origin: str, rollouts: Sequence[Rollout], durable: bool) -> None:
    """Write finished responses: beside, closed, renamed; ``durable``: so that they outlive the machine as well.

    Raises:
        WriteError: the disk refused; ``path`` is unchanged.
    """
    with replacing_file(path, KEPT_KIND, len(rollouts), durable) as root:
        put_attributes(root, {"origin": origin})
        put_arrays(root.create_group("rollouts"), rollout_columns(rollouts))


def read_kept_responses(path: Path) -> tuple[str, tuple[Rollout, ...]]:
    """Origin and responses, as ``write_kept_responses`` was given them.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, KEPT_KIND) as file, file.raising_damaged_file():
        check_counts(file)
        return file.read_text("origin"), read_rollouts(file)


# -- judged responses of an evaluation ---------------------------------------------------------------------------------
#
# Files of some responses each, written as they come. Schema 1 (N responses ordered by key):
#
#   /responses/  seed, stream, step, draw, sample [N] int64: the key; finish_reason [N] int8 (0 EOS, 1 LENGTH, 2 STOP);
#                num_target_passes [N] int64; rewards [N] float32; failures [N] UTF-8 bytes, empty where it was judged;
#                response_tokens [sum R] int32; response_ends [N] int64: where each one ends
#
# ``committed`` is the number of responses, as in the rollout log.

EVALUATION_KIND = FileKind("evaluation log", schema=1, remedy="delete it, and its responses are generated again")
_EVALUATED = ("finish_reason", "num_target_passes", "rewards", "failures")


@dataclass(frozen=True)
class JudgedResponse:
    """A response with its verdict: ``tokens`` [R] int32; ``failure`` says why it was not judged, empty where it was."""

    key: SampleKey
    tokens: NDArray[np.int32]
    finish_reason: FinishReason
    num_target_passes: int
    reward: float
    failure: str = ""


def write_responses(path: Path, responses: Sequence[JudgedResponse]) -> None:
    """Write a file of responses: beside, closed, renamed.

    Raises:
        WriteError: the disk refused; ``path`` is unchanged.
    """
    ordered = sorted(responses, key=lambda response: response.key)
    with replacing_file(path, EVALUATION_KIND, len(ordered)) as root:
        put_arrays(root.create_group("responses"), _judged_columns(ordered))


def read_responses(path: Path) -> list[JudgedResponse]:
    """Read back what ``write_responses`` was given, ordered by key.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """
    with CommittedFile(path, EVALUATION_KIND) as file, file.raising_damaged_file():
        for name in (*KEY_COLUMNS, *_EVALUATED, "response_ends"):
            if (count := file.size(f"responses/{name}")) != file.committed:
                raise ValueError(f"{count} entries of {name}, but {file.committed} were committed")
        column = {name: file.read_array(f"responses/{name}").tolist() for name in _EVALUATED}
        tokens = np.split(file.read_array("responses/response_tokens"), file.read_array("responses/response_ends"))
        return [
            JudgedResponse(
                key=key,
                tokens=tokens[i],
                finish_reason=FinishReason(column["finish_reason"][i]),
                num_target_passes=column["num_target_passes"][i],
                reward=column["rewards"][i],
                failure=column["failures"][i].decode(),
            )
            for i, key in enumerate(read_keys(file, "responses"))
        ]


def _judged_columns(responses: Sequence[JudgedResponse]) -> dict[str, NDArray[Any]]:
    tokens, ends = flatten_arrays([response.tokens for response in responses], np.int32)
    return key_columns([response.key for response in responses]) | {
        "finish_reason": np.array([r.finish_reason for r in responses], np.int8),
        "num_target_passes": np.array([r.num_target_passes for r in responses], np.int64),
        "rewards": np.array([r.reward for r in responses], np.float32),
        "failures": np.array([r.failure.encode() for r in responses], np.bytes_),
        "response_tokens": tokens,
        "response_ends": ends,
    }
