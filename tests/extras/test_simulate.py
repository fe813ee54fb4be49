"""The simulator: laws computed by hand, a token-by-token reference, recorded runs, the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import make_rollout, step_record

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import EngineSpans, RolloutTiming, SampleKey
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.simulate.costs import TokenCosts, with_speed_ups
from tlt_hpc.extras.simulate.lengths import log_normal, resample_lengths, shard_lengths
from tlt_hpc.extras.simulate.recorded import costs_by_strategy, phases_of, read_run
from tlt_hpc.extras.simulate.step import Setting, StepPhases, setting_from, simulate, simulate_rollouts
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, read_step, write_step
from tlt_hpc.storage.step_lines import add_line, read_lines, replace_line

ROOT = Path(__file__).resolve().parents[2]
TINY, QWEN = str(ROOT / "jobs" / "tiny.toml"), str(ROOT / "jobs" / "qwen7b.toml")
NOTHING = StepPhases()


def costs_of(by_batch: Sequence[float], position: float = 0.0, prompt: float = 0.0) -> TokenCosts:
    token = np.array([by_batch], float)
    return TokenCosts(token, np.full(token.shape, position), prompt)


def lengths_of(*rows: Sequence[int]) -> Any:
    """The lengths of one step; one row for each replica."""
    number = max(map(len, rows))
    return np.array([[list(row) + [0] * (number - len(row)) for row in rows]], np.int64)


# --- by hand ---


def test_idle_and_harvested_seconds_of_ranks_that_end_at_1_4_and_9() -> None:
    """At a second a token 8 and 5 seconds are idle, of which micro-steps of 2 harvest 8 and 4."""
    setting, lengths = Setting(max_live=1, micro_step_seconds=2.0), lengths_of([1], [4], [9])
    steps = simulate(lengths, costs_of([1.0]), setting, NOTHING)
    assert (steps.rollout_seconds[0], steps.idle_rank_seconds[0], steps.harvested_rank_seconds[0]) == (9, 13, 12)
    without = simulate(lengths, costs_of([1.0]), replace(setting, trains=False), NOTHING)
    assert (without.harvested_rank_seconds[0], without.idle_rank_seconds[0]) == (0, 13)
    late = simulate(lengths, costs_of([1.0]), replace(setting, stop_seconds=1.0), NOTHING)
    assert (late.rollout_seconds[0], late.idle_rank_seconds[0]) == (10, 16)
    assert simulate(lengths_of([7]), costs_of([2.0]), setting, StepPhases(0.5, 3.0)).step_seconds[0] == 14 + 3 + 7 * 0.5


# --- token by token ---


def reference(lengths: Sequence[int], costs: TokenCosts, max_live: int, prompt: float) -> list[float]:
    """Round by round, one token for each live sequence."""
    waiting, live, clock, ends = list(enumerate(lengths)), dict[int, int](), 0.0, [0.0] * len(lengths)
    while waiting or live:
        while waiting and len(live) < max_live:
            index, _ = waiting.pop(0)
            live[index] = 0
            clock += prompt * costs.prompt_token_seconds
        positions = sum(done + 0.5 + prompt for done in live.values())
        column = len(live) - 1
        seconds = costs.token_seconds[:, column] + costs.position_seconds[:, column] * positions
        clock += float(seconds.min())
        for index in list(live):
            live[index] += 1
            if live[index] == lengths[index]:
                del live[index]
                ends[index] = clock
    return ends


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 6),
    st.lists(st.floats(0.2, 3.0), min_size=6, max_size=6), st.floats(0, 1e-2), st.floats(0, 5),
)  # fmt: skip
def test_the_walk_is_the_token_by_token_simulation(
    lengths: list[int], live: int, gains: list[float], position: float, prompt: float
) -> None:
    """Positions cost the same with all strategies here; otherwise the choice is made once a span."""
    plain = costs_of([1.0, 1.1, 1.3, 1.6, 2.0, 2.5], position, prompt=0.3)
    fast = with_speed_ups(plain, [gains, gains[::-1]])
    ends = simulate_rollouts(np.array([lengths]), fast, live, prompt)
    assert ends[0].tolist() == pytest.approx(reference(lengths, fast, live, prompt))
    steps = simulate(lengths_of(lengths, [1]), fast, Setting(max_live=live, micro_step_seconds=1.5), NOTHING)
    assert steps.tokens[0] == sum(lengths) + 1
    assert 0 <= steps.harvested_rank_seconds[0] <= steps.idle_rank_seconds[0] + 1e-9 and 0 <= steps.idle_share < 1


# --- lengths and shards ---


def test_units_are_distributed_as_in_a_run() -> None:
    lengths = np.arange(1, 11).reshape(1, 5, 2)
    assert shard_lengths(lengths, 2, "group").tolist() == [[[1, 2, 5, 6, 9, 10], [3, 4, 7, 8, 0, 0]]]
    assert shard_lengths(lengths, 4, "sample").tolist() == [[[1, 5, 9], [2, 6, 10], [3, 7, 0], [4, 8, 0]]]
    assert shard_lengths(lengths, 8, "group").sum() == 55


def test_lengths_follow_their_law_and_recorded_groups_are_drawn_whole() -> None:
    drawn = resample_lengths(np.array([[1, 2], [30, 40]]), (50, 4, 2)).reshape(-1, 2).tolist()
    assert {tuple(group) for group in drawn} == {(1, 2), (30, 40)}
    lengths = log_normal((50, 40, 8), 40, 300)
    assert np.median(lengths) == pytest.approx(40, rel=0.05) and lengths.min() >= 1 and lengths.max() == 300
    logs = np.log(lengths)
    assert logs.std() == pytest.approx(0.9, rel=0.05)
    assert logs.mean(2).var() / logs.var() == pytest.approx(0.5 + 0.5 / 8, rel=0.1)  # between prompts


# --- the log of a run ---

NAMES, ACCEPT = ("off", "drafter-4"), 2
STOP_SECONDS = 0.25
Seconds = Callable[[int], float]
Chooser = Callable[[int, int], bool]
"""Whether the next tokens are decoded plainly, by the number of the round in the rollout and live sequences."""


def on_a_line(batch: int) -> float:
    return 2.0 + 0.5 * batch


def write_run(
    folder: Path, plainly: Chooser = lambda number, live: True, plain: Seconds = lambda batch: 1.0,
    num_ranks: int = 2, num_steps: int = 6,
) -> Path:  # fmt: skip
    """A run whose plain rounds take ``plain`` seconds, all others a second more for two tokens; steps take 2 seconds
    and a tenth of a second for each token more than rollouts."""
    run, rng = RunFolder(folder), np.random.default_rng(0)
    run.make_missing_folders()
    given = ["run.name=known", "rollout.prompts_per_step=8", "rollout.group_size=2", "rollout.max_live=8"]
    run.config.write_text(to_toml(load_config(TINY, given)))
    for step in range(num_steps):
        shards = [(12 * rng.integers(1, 6, 16 // num_ranks)).tolist() for _ in range(num_ranks)]
        all_spans = [_spans(shard, plainly, plain) for shard in shards]
        for rank, (shard, spans) in enumerate(zip(shards, all_spans, strict=True)):
            write_step(run.rollout_log(step, rank), _record(step, rank, num_ranks, shard, spans))
        seconds = max(float(spans.seconds.sum()) for spans in all_spans) + STOP_SECONDS
        line = {"rollout/seconds": seconds, "rollout/stop_latency_seconds": STOP_SECONDS}
        line["timing_s/step"] = seconds + 2.0 + 0.1 * sum(map(sum, shards))
        add_line(run.metrics, {"training/global_step": step + 1, **line})
    return folder


def _spans(shard: Sequence[int], plainly: Chooser, plain: Seconds) -> EngineSpans:
    left, queue = np.array(shard[:8]), list(shard[8:])
    rounds = list[tuple[int, int, int, float]]()
    while (live := int((left > 0).sum())) > 0:
        is_plain = plainly(len(rounds), live)
        for _ in range(ACCEPT if is_plain else 1):
            rounds.append((0, live, live, plain(live)) if is_plain else (1, live, live * ACCEPT, plain(live) + 1))
        left = np.maximum(left - ACCEPT, 0)
        for place in np.flatnonzero(left == 0)[: len(queue)]:
            left[place] = queue.pop(0)
    index, num_live, tokens, seconds = map(np.array, zip(*rounds, strict=True))
    starts = 1000.0 + np.cumsum(seconds) - seconds
    whole = (each.astype(np.int32) for each in (num_live, tokens))
    return EngineSpans(index.astype(np.int16), *whole, starts, seconds.astype(np.float32))


def _record(step: int, rank: int, num_ranks: int, shard: Sequence[int], spans: EngineSpans) -> StepRecord:
    keys = (SampleKey(0, 0, step, rank + num_ranks * (i // 2), i % 2) for i in range(len(shard)))
    rollouts = [make_rollout(key, (0, 0), [0] * length) for key, length in zip(keys, shard, strict=True)]
    rounds = np.bincount(spans.strategy_index, minlength=len(NAMES)).astype(np.int64)
    end = 1000.0 + float(spans.seconds.sum())
    record = step_record(
        step, rollouts, np.zeros(len(shard)), timing=RolloutTiming(1000.0, end, end + STOP_SECONDS),
        strategy_names=NAMES, strategy_rounds=rounds, strategy_tokens=rounds, spans=spans,
    )  # fmt: skip
    return replace(record, rank=rank, num_ranks=num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_follows_the_model_is_predicted_exactly(tmp_path: Path, num_ranks: int) -> None:
    run = read_run(write_run(tmp_path / "run", num_ranks=num_ranks))
    setting = replace(setting_from(run.config), prompt_tokens=1.0, read_share=1.0, stop_seconds=STOP_SECONDS)
    steps = simulate(run.lengths, costs_by_strategy(run), setting, phases_of(run))
    assert steps.rollout_seconds == pytest.approx(run.rollout_seconds, abs=1e-4)
    assert steps.step_seconds == pytest.approx(run.step_seconds, abs=1e-4)
    assert run.stop_seconds.tolist() == [STOP_SECONDS] * 6


def test_costs_of_each_strategy_where_it_ran(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lambda number, live: live > 4 and number % 3 == 0, on_a_line)
    costs = costs_by_strategy(read_run(folder)).token_seconds
    assert costs[0, 7] == pytest.approx(on_a_line(8), rel=1e-5)
    assert costs[1].tolist() == pytest.approx([(on_a_line(batch) + 1) / ACCEPT for batch in range(1, 9)], rel=0.05)
    seldom = costs_by_strategy(read_run(write_run(tmp_path / "two", lambda number, live: live > 2, on_a_line)))
    assert np.isfinite(seldom.token_seconds[0]).all() and np.isinf(seldom.token_seconds[1, 3:]).all()


def test_steps_with_missing_rounds_are_omitted(tmp_path: Path) -> None:
    """One step resumed with kept tokens, one has the log of fewer ranks than took part."""
    run = RunFolder(write_run(tmp_path / "run"))
    whole = read_run(run.path)
    replace_line(run.metrics, {**read_lines(run.metrics)[3], "rollout/kept_tokens": 3.0})
    write_step(run.rollout_log(1, 0), replace(read_step(run.rollout_log(1, 0)), num_ranks=3))
    assert len(whole.lengths) == 6
    assert read_run(run.path).lengths.tolist() == np.delete(whole.lengths, [1, 3], 0).tolist()
    with pytest.raises(ValueError, match="1 finished steps"):
        read_run(write_run(tmp_path / "short", num_steps=1))
    with pytest.raises(ValueError, match="no plain round"):
        costs_by_strategy(read_run(write_run(tmp_path / "never", lambda number, live: False)))


# --- the command ---


def test_the_command_prints_a_table_and_writes_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows_of(*arguments: str) -> list[Any]:
        assert main(["simulate", *arguments, "--json", f"{tmp_path}/figures.json"]) == 0
        rows: list[Any] = json.loads((tmp_path / "figures.json").read_text())["rows"]
        return rows

    monkeypatch.setenv("COLUMNS", "80")
    one, eight = rows_of(QWEN, "--nodes", "8,1", "--steps", "3")
    out = capsys.readouterr().out
    assert "GPU-h" in out and max(map(len, out.splitlines())) <= 80
    assert "above 32 responses at a time they are extrapolated" in " ".join(out.split())
    assert (one["nodes"], eight["nodes"], one["ranks"]) == (1, 8, 8) and one["gain"] > 1
    assert eight["rollout_seconds"] < one["rollout_seconds"]
    assert one["gpu_hours"] == pytest.approx(one["step_seconds"] * 8 * 200 / 3600)
    rows_of(QWEN, "--nodes", "1", "--steps", "1", "speculation.mode=plain")
    assert "speed-ups" not in capsys.readouterr().out
    folder = write_run(tmp_path / "known")
    (row,) = rows_of("--from", str(folder), "--nodes", "1", "--steps", "200")
    assert row["ranks"] == 2 and row["gain"] == 1.0, "as many a node as the run had"
    tokens = read_run(folder).lengths.sum((1, 2)).mean()
    assert row["step_seconds"] - row["rollout_seconds"] == pytest.approx(2 + 0.1 * tokens, rel=0.2)
    (large,) = rows_of(QWEN, "--lengths", str(folder), "--nodes", "1")
    assert large["rollout_seconds"] < 2, "of 60 tokens at most"
