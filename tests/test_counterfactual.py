"""What a run would have taken plainly: logs whose plain costs are known, and what an estimate says of its grounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_cost_profile import KEY

from tlt_hpc.common.records import EngineSpans, FinishReason, Rollout, RolloutTiming, SampleKey
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.plan.simulate.counterfactual import estimate, estimate_plain
from tlt_hpc.plan.simulate.measured import chances_of, costs_by_strategy, fit_line
from tlt_hpc.plan.simulate.run_log import read_run
from tlt_hpc.resume.saving import save_cost_profile
from tlt_hpc.rollout.cost_profile import CostGrid, CostProfile, read_profile, write_profile
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, read_spans, read_step, write_step

TINY = str(Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml")
NAMES = ("off", "drafter-4")
ACCEPT = 2
STOP_SECONDS, OTHER_SECONDS = 0.25, 5.0
Seconds = Callable[[int], float]
Chooser = Callable[[int, int], bool]
"""Whether the next tokens of all come plainly, by how often that was asked in the rollout, and live sequences."""


def line(batch: int) -> float:
    return 2.0 + 0.5 * batch


PROFILE = CostProfile(
    KEY, CostGrid(tuple((b, ((1, s), (5, 2 * s))) for b, s in ((1, 1.0), (2, 1.1), (4, 1.6), (8, 4.0)))), {}, 1.0
)
"""No line."""


def write_run(folder: Path, plainly: Chooser, plain: Seconds, mode: str = "full", num_ranks: int = 2) -> Path:
    """Eight steps whose plain rounds take ``plain`` seconds, two for two tokens, all others a second more for both."""
    run = RunFolder(folder)
    run.create()
    given = ["rollout.prompts_per_step=8", "rollout.group_size=2", "rollout.max_live=8", f"speculation.mode={mode}"]
    run.config.write_text(to_toml(load_config(TINY, given)))
    rng, lines = np.random.default_rng(0), []
    for step in range(8):
        shards = [(12 * rng.integers(1, 6, 8)).tolist() for _ in range(num_ranks)]
        spans = [_spans(shard, plainly, plain) for shard in shards]
        took = max(float(one.seconds.sum()) for one in spans)
        for rank, (shard, own) in enumerate(zip(shards, spans, strict=True)):
            write_step(run.rollout_log(step, rank), _record(step, rank, num_ranks, shard, own, took))
        line = {"training/global_step": step, "rollout/seconds": took + STOP_SECONDS}
        line |= {"timing_s/step": took + STOP_SECONDS + OTHER_SECONDS, "rollout/stop_latency_seconds": STOP_SECONDS}
        lines.append(line | {"rollout/idle_rank_seconds": 0.0, "rollout/harvested_rank_seconds": 0.0})
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def _spans(shard: Sequence[int], plainly: Chooser, plain: Seconds) -> EngineSpans:
    left, number = np.array(shard), 0
    index, live, tokens, seconds = list[int](), list[int](), list[int](), list[float]()
    while (num_live := int((left > 0).sum())) > 0:
        is_plain = plainly(number, num_live)
        for _ in range(ACCEPT if is_plain else 1):
            index.append(0 if is_plain else 1)
            live.append(num_live)
            tokens.append(num_live * (1 if is_plain else ACCEPT))
            seconds.append(plain(num_live) + (0 if is_plain else 1))
        left, number = np.maximum(left - ACCEPT, 0), number + 1
    taken = np.array(seconds, np.float32)
    starts = 1000.0 + np.cumsum(taken) - taken
    return EngineSpans(
        np.array(index, np.int16), np.array(live, np.int32), np.array(tokens, np.int32), starts.astype(float), taken
    )


def _record(step: int, rank: int, num_ranks: int, shard: Sequence[int], spans: EngineSpans, took: float) -> StepRecord:
    rollouts = tuple(
        Rollout(
            SampleKey(0, 0, step, rank + num_ranks * (i // 2), i % 2), np.zeros(2, np.int32),
            np.zeros(length, np.int32), np.zeros(length, np.float32), FinishReason.EOS, step, length, 1000.0,
        )
        for i, length in enumerate(shard)
    )  # fmt: skip
    rounds = np.bincount(spans.strategy_index, minlength=len(NAMES)).astype(np.int64)
    return StepRecord(
        step=step,
        rank=rank,
        num_ranks=num_ranks,
        rollouts=rollouts,
        rewards=np.zeros(len(shard), np.float32),
        advantages=np.zeros(len(shard), np.float32),
        timing=RolloutTiming(1000.0, 1000.0 + float(spans.seconds.sum()), 1000.0 + took + STOP_SECONDS),
        micro_steps=(),
        harvested_seconds=0.0,
        strategy_names=NAMES,
        strategy_rounds=rounds,
        strategy_tokens=rounds,
        decisions=np.zeros((0, 2), np.int32),
        guarded_near_ties=0,
        metrics={},
        spans=spans,
    )


def plain_seconds_of(lengths: NDArray[np.int64], plain: Seconds) -> list[float]:
    """Token by token, of each step [T, R, N]: the slowest rank's."""
    return [
        max(sum(plain(int((shard > done).sum())) for done in range(int(shard.max()))) for shard in step)
        for step in lengths
    ]


def seldom(number: int, live: int) -> bool:
    """At the first batch and at few others."""
    return number % 9 == 0


def check_exact(folder: Path, plain: Seconds) -> None:
    found, log = estimate_plain(folder), read_run(folder)
    truth = np.array(plain_seconds_of(log.lengths, plain)) + STOP_SECONDS
    assert found.plain_rollout_seconds.tolist() == pytest.approx(truth.tolist(), rel=1e-5)
    assert found.plain_step_seconds.tolist() == pytest.approx((truth + OTHER_SECONDS).tolist(), rel=1e-5)
    assert found.rollout_gain == pytest.approx(truth.sum() / log.rollout_seconds.sum(), rel=1e-5)
    assert 1 < found.step_gain < found.rollout_gain and found.steps == tuple(range(8))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plain_seconds_on_a_line_come_out(tmp_path: Path, num_ranks: int) -> None:
    check_exact(write_run(tmp_path / "run", seldom, line, num_ranks=num_ranks), line)


def test_plain_seconds_in_the_profile_s_shape_come_out(tmp_path: Path) -> None:
    """Plain rounds at full batches alone, three times as slow as the profile has them."""

    def plain(batch: int) -> float:
        return 3 * PROFILE.seconds(OFF, batch)

    folder = write_run(tmp_path / "run", lambda number, live: live == 8 and number % 4 == 0, plain)
    with pytest.raises(AssertionError):  # from one batch alone nobody knows how seconds fall
        check_exact(folder, plain)
    write_profile(RunFolder(folder).cost_profile, PROFILE)
    check_exact(folder, plain)


def test_single_slow_rounds_count_for_little(tmp_path: Path) -> None:
    """One plain round of each step takes ten times as long."""

    def plainly(number: int, live: int) -> bool:
        return number % 3 == 0

    slow = write_run(tmp_path / "slow", plainly, line, num_ranks=1)
    log = read_run(slow)
    for step, (own,) in zip(log.steps, log.ranks, strict=True):
        path = RunFolder(slow).rollout_log(step, 0)
        spans = read_spans(path)
        spans.seconds[0] *= 10
        lengths, took = own.response_lengths.tolist(), float(spans.seconds.sum())
        write_step(path, _record(step, 0, 1, lengths, spans, took))
    found = estimate_plain(slow)
    truth = sum(plain_seconds_of(log.lengths, line)) + 8 * STOP_SECONDS
    assert found.plain_rollout_seconds.sum() == pytest.approx(truth, rel=0.02)


def test_plain_seconds_do_not_stay_flat_where_no_plain_round_ran(tmp_path: Path) -> None:
    """Plain rounds at 5 to 8 live alone: one sequence is cheaper than they are, and speculation gains less there."""
    folder = write_run(tmp_path / "run", lambda number, live: live > 4 and number % 2 == 0, line)
    costs = costs_by_strategy(read_run(folder), 16)
    assert costs.plain.token_seconds[0].tolist() == pytest.approx([line(batch) for batch in range(1, 17)], rel=1e-5)


def test_strategies_follow_their_shape_too(tmp_path: Path) -> None:
    costs = costs_by_strategy(read_run(write_run(tmp_path / "run", seldom, line)), 16)
    truth = [(line(batch) + 1) / ACCEPT for batch in range(1, 17)]
    assert costs.names == NAMES and costs.token_seconds[1].tolist() == pytest.approx(truth, rel=1e-5)
    assert costs.allowed is not None and costs.allowed[1].tolist() == [True] * 15 + [False]  # 8 to 15: where 8 ran


def test_an_estimate_tells_what_it_rests_on(tmp_path: Path) -> None:
    few = estimate_plain(write_run(tmp_path / "few", lambda number, live: number == 0, line))
    assert not few.is_trusted and few.measured_share < 0.5 and few.num_plain_rounds == 32
    assert few.basis.startswith("32 plain rounds of the run itself: ") and "on a line" in few.basis
    many = estimate_plain(write_run(tmp_path / "many", lambda number, live: number % 2 == 0, line))
    assert many.is_trusted and many.measured_share == 1 and "the rest" not in many.basis
    write_profile(RunFolder(tmp_path / "few").cost_profile, PROFILE)
    assert "cost profile" in estimate_plain(tmp_path / "few").basis


def test_the_share_is_of_seconds(tmp_path: Path) -> None:
    """Many plain rounds at batches of 8 alone."""
    found = estimate_plain(folder := write_run(tmp_path / "run", lambda number, live: live == 8, line))
    own = rest = 0.0
    for shard in read_run(folder).lengths.reshape(-1, 8):
        for done in range(int(shard.max())):
            live = int((shard > done).sum())
            own, rest = own + line(8) * (live == 8), rest + line(8) * (live < 8)
    assert found.measured_share == pytest.approx(own / (own + rest), rel=1e-5)


def test_runs_that_cannot_tell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="decoded plainly itself"):
        estimate_plain(write_run(tmp_path / "plain", seldom, line, mode="plain"))
    with pytest.raises(ValueError, match="no plain round"):
        estimate(read_run(write_run(tmp_path / "never", lambda number, live: False, line)))
    with pytest.raises(ValueError, match="does not exist"):
        estimate_plain(tmp_path / "nowhere")
    folder = write_run(tmp_path / "damaged", seldom, line)
    RunFolder(folder).cost_profile.write_text("{}")
    with pytest.raises(ValueError, match=r"cost_profile\.json holds no cost profile"):
        estimate_plain(folder)


def test_lines_are_never_negative() -> None:
    at, ones = np.array([1.0, 2.0, 4.0]), np.ones(3)
    assert fit_line(at, 1 + 2 * at, ones) == pytest.approx((1.0, 2.0))
    assert fit_line(at, 5 - at, ones) == pytest.approx((float(np.mean(5 - at)), 0.0))
    fixed, each = fit_line(at, at - 0.5, ones)
    assert fixed == 0 and each == pytest.approx(float((at * (at - 0.5)).sum() / (at * at).sum()))
    assert fit_line(np.array([3.0]), np.array([7.0]), np.ones(1)) == (7.0, 0.0)
    weighted = fit_line(at, np.array([3.0, 5.0, 100.0]), np.array([1.0, 1.0, 1e-9]))
    assert weighted == pytest.approx((1.0, 2.0), rel=1e-4)


def test_chances_of_a_run(tmp_path: Path) -> None:
    """Two tokens a round of depth 4: 1 + p + p^2 + p^3 + p^4 = 2."""
    chance = chances_of(read_run(write_run(tmp_path / "run", seldom, line)))
    assert list(chance) == ["drafter"] and sum(chance["drafter"] ** i for i in range(5)) == pytest.approx(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_keeps_its_cost_profile(tmp_path: Path, rank: int) -> None:
    job: Any = SimpleNamespace(
        world=SimpleNamespace(rank=rank), engine=SimpleNamespace(costs=PROFILE), folder=RunFolder(tmp_path)
    )
    save_cost_profile(job)
    file = RunFolder(tmp_path).cost_profile
    assert file.exists() == (rank == 0)
    if rank == 0:
        assert read_profile(file) == PROFILE and file.stat().st_mode & 0o444 == 0o444
        file.unlink()
        job.engine.costs = None
        save_cost_profile(job)
        assert not file.exists()


@pytest.mark.parametrize("change", ("kept", "refill", "a rank short"))
def test_a_step_of_which_rounds_are_missing_is_left_out(tmp_path: Path, change: str) -> None:
    run = RunFolder(write_run(tmp_path / "run", seldom, line))
    record = read_step(run.rollout_log(3, 1))
    changes: dict[str, dict[str, Any]] = {
        "kept": {"metrics": {"rollout/kept_tokens": 3.0}},
        "refill": {"refills": (record.timing,)},
        "a rank short": {"num_ranks": 3},
    }
    write_step(run.rollout_log(3, 1), replace(record, **changes[change]))
    other = read_step(run.rollout_log(3, 0))
    write_step(run.rollout_log(3, 0), replace(other, num_ranks=3 if change == "a rank short" else 2))
    assert read_run(run.path).steps == (0, 1, 2, 4, 5, 6, 7)
    write_step(run.rollout_log(3, 1), replace(record, metrics={"rollout/kept_tokens": 0.0}))
    write_step(run.rollout_log(3, 0), other)
    assert read_run(run.path).steps == tuple(range(8))
