"""The rollout log gives back exactly what was written, or says what is wrong with the file."""

from dataclasses import fields, is_dataclass
from typing import Any

import h5py
import numpy as np
import pytest
from damaged import assert_damage_is_noticed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlt_hpc.common.records import (
    EngineSpans,
    FinishReason,
    MicroStepRecord,
    PhaseSpan,
    Rollout,
    RolloutTiming,
    SampleKey,
)
from tlt_hpc.storage.folder import part_path
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import StepRecord, read_step, read_summary, write_step


def make_rollout(rng: np.random.Generator, key: SampleKey) -> Rollout:
    prompt_length, response_length = rng.integers(0, 20), rng.integers(0, 60)
    return Rollout(
        key=key,
        prompt_tokens=rng.integers(0, 2**31 - 1, prompt_length, dtype=np.int32),
        response_tokens=rng.integers(0, 2**31 - 1, response_length, dtype=np.int32),
        # any bit pattern: NaN and infinity must come back too
        log_probs=rng.integers(0, 2**32, response_length, dtype=np.uint32).view(np.float32),
        finish_reason=FinishReason(int(rng.integers(0, 2))),
        weight_version=int(rng.integers(0, 1000)),
        num_target_passes=int(rng.integers(1, 1000)),
        finished_seconds=float(rng.uniform(1.7e9, 1.9e9)),
        pass_lengths=rng.integers(1, 33, rng.integers(0, 9), dtype=np.uint8),
    )


def make_spans(rng: np.random.Generator, count: int) -> EngineSpans:
    return EngineSpans(
        rng.integers(-1, 3, count, dtype=np.int16),
        rng.integers(1, 64, count, dtype=np.int32),
        rng.integers(1, 999, count, dtype=np.int32),
        np.sort(rng.uniform(1.7e9, 1.9e9, count)),
        rng.random(count, dtype=np.float32),
    )


def make_record(seed: int, step: int = 3, rank: int = 1, num_rollouts: int = 8, **changes: Any) -> StepRecord:
    rng = np.random.default_rng([seed, step, rank])
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "num_ranks": 4,
        "rollouts": tuple(make_rollout(rng, SampleKey(2**63 - 1, 0, step, i // 4, i % 4)) for i in range(num_rollouts)),
        "rewards": rng.random(num_rollouts, dtype=np.float32),
        "advantages": rng.standard_normal(num_rollouts, dtype=np.float32),
        "timing": RolloutTiming(*np.sort(rng.uniform(1.7e9, 1.9e9, 3)).tolist()),
        "micro_steps": tuple(MicroStepRecord(float(i), i + 0.5, i * 7, 1 / (i + 1)) for i in range(seed % 4)),
        "harvested_seconds": float(rng.random()),
        "strategy_names": ("off", "ngram-4", "entwurf-ü"),
        "strategy_rounds": rng.integers(0, 1000, 3),
        "strategy_tokens": rng.integers(0, 2**40, 3),
        "decisions": rng.integers(0, 64, (seed % 50, 2), dtype=np.int32),
        "guarded_near_ties": int(rng.integers(0, 9)),
        "spans": make_spans(rng, seed % 40),
        "phases": tuple(PhaseSpan(f"ph\u00e4se {i}", 1.7e9 + i, 1.7e9 + i + 0.5) for i in range(seed % 3)),
        "metrics": {"mismatch_kl": float(rng.random()), "grad norm/before clipping": float("inf")},
    }
    return StepRecord(**(values | changes))


def same(left: Any, right: Any) -> bool:
    """Equality to the bit and the dtype, through dataclasses, tuples and dicts."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


finite = st.floats(allow_nan=False)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    num_rollouts=st.sampled_from([0, 1, 2, 17, 200]),
    strategy_names=st.lists(names, max_size=5).map(tuple),
    metrics=st.dictionaries(names, finite, max_size=20),
    micro_steps=st.lists(st.builds(MicroStepRecord, finite, finite, st.integers(0, 2**62), finite)).map(tuple),
)
def test_round_trip(tmp_path, seed, num_rollouts, strategy_names, **changes):
    counts = np.arange(len(strategy_names))
    record = make_record(
        seed,
        num_rollouts=num_rollouts,
        strategy_names=strategy_names,
        strategy_rounds=counts,
        strategy_tokens=counts**2,
        **changes,
    )
    path = tmp_path / "a.h5"
    write_step(path, record)
    assert same(read_step(path), record)
    assert not part_path(path).exists()


def test_a_summary_has_what_the_record_has(tmp_path):
    path = tmp_path / "log.h5"
    record = make_record(39)
    write_step(path, record)
    summary = read_summary(path)
    assert same(summary.spans, record.spans) and len(record.spans) == 39
    assert summary.response_lengths.tolist() == [len(r.response_tokens) for r in record.rollouts]
    assert summary.num_target_passes.tolist() == [r.num_target_passes for r in record.rollouts]
    assert all(same(value, getattr(record, name)) for name, value in vars(summary).items() if name in vars(record))


@pytest.mark.parametrize("count", [0, 7, 9])
def test_another_commit_counter_is_refused(tmp_path, count):
    write_step(tmp_path / "a.h5", make_record(1))
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.attrs["committed"] = count
    with pytest.raises(DamagedFile, match=f"{count} rollouts were committed"):
        read_step(tmp_path / "a.h5")


def test_damage_is_noticed(tmp_path):
    path, record = tmp_path / "a.h5", make_record(3)
    write_step(path, record)

    def check() -> None:
        assert same(read_step(path), record)

    assert_damage_is_noticed(path, check, r"a\.h5: damaged rollout log: .* delete it and resume")
