"""The simulator: laws computed by hand, a token-by-token reference, recorded runs, the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import step_record

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import EngineSpans, FinishReason, Rollout, RolloutTiming, SampleKey
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.simulate.ahead import Ahead, PassCosts, ahead_seconds
from tlt_hpc.extras.simulate.costs import TokenCosts, with_speed_ups
from tlt_hpc.extras.simulate.lengths import log_normal, resampled, shard_lengths
from tlt_hpc.extras.simulate.recorded import costs_by_strategy, passes_of, phases_of, read_run
from tlt_hpc.extras.simulate.step import Setting, StepPhases, setting_from, simulate, walk
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, read_step, write_step
from tlt_hpc.storage.step_lines import read_lines

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


def test_idle_seconds_of_two_ranks_exactly() -> None:
    """3 and 10 tokens at a second each: 7 idle seconds, in micro-steps of 2 six of them harvested."""
    setting = Setting(max_live=1, micro_step_seconds=2.0)
    steps = simulate(lengths_of([3], [10]), costs_of([1.0]), setting, NOTHING)
    assert (steps.rollout_seconds[0], steps.idle_rank_seconds[0], steps.harvested_rank_seconds[0]) == (10.0, 7.0, 6.0)
    late = simulate(lengths_of([3], [10]), costs_of([1.0]), replace(setting, stop_seconds=1.0), NOTHING)
    assert (late.rollout_seconds[0], late.idle_rank_seconds[0]) == (11.0, 9.0)
    assert simulate(lengths_of([7]), costs_of([2.0]), setting, StepPhases(0.5, 3.0)).step_seconds[0] == 14 + 3 + 7 * 0.5


@pytest.mark.parametrize(("trains", "harvested"), [(True, 8 + 5), (False, 0)])
def test_a_rank_trains_from_its_last_token_on(trains: bool, harvested: float) -> None:
    """Ranks end at 1, 4 and 9."""
    setting = Setting(max_live=1, micro_step_seconds=1.0, trains=trains)
    steps = simulate(lengths_of([1], [4], [9]), costs_of([1.0]), setting, NOTHING)
    assert (steps.harvested_rank_seconds[0], steps.idle_rank_seconds[0]) == (harvested, 13)


def test_ends_by_hand() -> None:
    """Two tokens at 3 seconds, three at 1; positions cost their sum half-way; a free place is used at once."""
    assert walk(np.array([[2, 5]]), costs_of([1.0, 3.0]), 2).tolist() == [[6.0, 9.0]]
    held = walk(np.array([[2, 5]]), costs_of([0.0, 0.0], position=1.0), 2, prompt_tokens=10.0)
    assert held.tolist() == [[2 * (20 + 2), 2 * 22 + 3 * (10 + 3.5)]]
    assert walk(np.array([[3, 1, 4, 2]]), costs_of([1.0, 1.0]), 2).tolist() == [[3.0, 1.0, 5.0, 5.0]]


# --- laws ---

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_harvested_time_is_idle_time_and_tokens_are_conserved(rows: list[list[int]], live: int) -> None:
    setting = Setting(max_live=live, micro_step_seconds=1.5)
    steps = simulate(lengths_of(*rows), costs_of([1.0, 1.5, 2.0, 2.5, 3.0]), setting, StepPhases(1e-3, 1.0))
    assert 0 <= steps.harvested_rank_seconds[0] <= steps.idle_rank_seconds[0] + 1e-9
    assert steps.tokens[0] == sum(map(sum, rows))
    assert 0 <= steps.idle_share < 1


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.lists(st.floats(0.3, 3.0), min_size=5, max_size=5), st.integers(1, 5))
def test_chosen_speculation_never_loses(rows: list[list[int]], gains: list[float], live: int) -> None:
    plain = costs_of([1.0, 1.2, 1.4, 1.6, 1.8], position=1e-3)
    fast = with_speed_ups(plain, [gains])
    setting, lengths = Setting(max_live=live), lengths_of(*rows)
    seconds = [simulate(lengths, costs, setting, NOTHING).rollout_seconds[0] for costs in (plain, fast)]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


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
    ends = walk(np.array([lengths]), fast, live, prompt)
    assert ends[0].tolist() == pytest.approx(reference(lengths, fast, live, prompt))


# --- draft-ahead ---


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.lists(st.floats(0.3, 3.0), min_size=5, max_size=5), st.integers(1, 5), st.floats(0, 1e-2))
def test_without_stored_texts_draft_ahead_changes_nothing(
    rows: list[list[int]], gains: list[float], live: int, position: float
) -> None:
    """A single rank is never idle; free places, positions and prompts count as ever."""
    fast = with_speed_ups(costs_of([1.0, 1.2, 1.4, 1.6, 1.8], position, prompt=0.3), [gains])
    ahead = Ahead(PassCosts(np.array([1.0, 2.5]), np.array([1, 5]), 0.8, 0.2), chance=0.97)
    lengths = np.concatenate([lengths_of(*rows), lengths_of(*rows)[:, ::-1]])[:, :1]
    setting = Setting(max_live=live, prompt_tokens=2)
    expected = simulate(lengths, fast, setting, NOTHING).rollout_seconds
    assert ahead_seconds(lengths, fast, ahead, setting) == pytest.approx(expected)


def test_stored_texts_are_verified_33_tokens_a_pass() -> None:
    """Rank 1 stores step 1 while rank 0 is busy: ceil(67 / 33) passes; then one token of step 0."""
    passes = PassCosts(np.ones(1), np.ones(1), 1.0, 0.0)
    lengths = np.concatenate([lengths_of([1000], [5]), lengths_of([67], [34])])
    seconds = ahead_seconds(lengths, costs_of([1.0, 1.0]), Ahead(passes, chance=1.0), Setting(max_live=2))
    assert seconds.tolist() == [999, 3]
    late = ahead_seconds(lengths, costs_of([1.0, 1.0]), Ahead(passes, chance=0.9), Setting(max_live=2))
    assert late[1] == np.ceil(67 / sum(0.9**i for i in range(33)))


@settings(max_examples=30, deadline=None)
@given(st.lists(LENGTHS, min_size=2, max_size=4), st.floats(0.8, 1.0))
def test_a_rollout_saves_at_most_what_the_one_before_took(steps: list[list[list[int]]], chance: float) -> None:
    """Passes that cost the same whatever they verify: never slower, and saves no more seconds than those."""
    lengths = np.concatenate([lengths_of(*(rows + [[1]] * 4)[:4], [1] * 9) for rows in steps])
    costs, setting = costs_of([1.0] * 9), Setting(max_live=9)
    full = simulate(lengths, costs, setting, NOTHING).rollout_seconds
    seconds = ahead_seconds(lengths, costs, Ahead(PassCosts(np.ones(1), np.ones(1), 1.0, 0.0), chance), setting)
    assert (seconds <= full + 1e-6).all() and (seconds[1:] >= (full[1:] - seconds[:-1]) - 1e-6).all()


# --- lengths and shards ---


def test_units_are_distributed_as_in_a_run() -> None:
    lengths = np.arange(1, 11).reshape(1, 5, 2)
    assert shard_lengths(lengths, 2, "group").tolist() == [[[1, 2, 5, 6, 9, 10], [3, 4, 7, 8, 0, 0]]]
    assert shard_lengths(lengths, 4, "sample").tolist() == [[[1, 5, 9], [2, 6, 10], [3, 7, 0], [4, 8, 0]]]
    assert shard_lengths(lengths, 8, "group").sum() == 55


def test_lengths_follow_their_law_and_recorded_groups_are_drawn_whole() -> None:
    drawn = resampled(np.array([[1, 2], [30, 40]]), (50, 4, 2)).reshape(-1, 2).tolist()
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
    folder: Path,
    plainly: Chooser = lambda number, live: True,
    plain: Seconds = lambda batch: 1.0,
    num_ranks: int = 2,
    num_steps: int = 6,
) -> Path:
    """A run whose plain rounds take ``plain`` seconds, all others a second more for two tokens; steps take 2 seconds
    and a tenth of a second for each token more than rollouts."""
    run = RunFolder(folder)
    run.create()
    given = ["run.name=known", "rollout.prompts_per_step=8", "rollout.group_size=2", "rollout.max_live=8"]
    run.config.write_text(to_toml(load_config(TINY, given)))
    rng, lines = np.random.default_rng(0), []
    for step in range(num_steps):
        shards = [(12 * rng.integers(1, 6, 16 // num_ranks)).tolist() for _ in range(num_ranks)]
        all_spans = [_spans(shard, plainly, plain) for shard in shards]
        took = [float(spans.seconds.sum()) for spans in all_spans]
        for rank, (shard, spans) in enumerate(zip(shards, all_spans, strict=True)):
            write_step(run.rollout_log(step, rank), _record(step, rank, num_ranks, shard, spans))
        seconds = max(took) + STOP_SECONDS
        line = {
            "training/global_step": step + 1,
            "rollout/seconds": seconds,
            "rollout/stop_latency_seconds": STOP_SECONDS,
        }
        lines.append({**line, "timing_s/step": seconds + 2.0 + 0.1 * sum(map(sum, shards))})
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
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
    index, num_live, tokens, seconds = zip(*rounds, strict=True)
    taken = np.array(seconds, np.float32)
    return EngineSpans(
        np.array(index, np.int16), np.array(num_live, np.int32), np.array(tokens, np.int32),
        1000.0 + np.cumsum(taken, dtype=float) - taken, taken,
    )  # fmt: skip


def _record(step: int, rank: int, num_ranks: int, shard: Sequence[int], spans: EngineSpans) -> StepRecord:
    rollouts = tuple(
        Rollout(
            SampleKey(0, 0, step, rank + num_ranks * (i // 2), i % 2), np.zeros(2, np.int32),
            np.zeros(length, np.int32), np.zeros(length, np.float32), FinishReason.EOS, step, length, 1000.0,
        )
        for i, length in enumerate(shard)
    )  # fmt: skip
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
    passes = passes_of(read_run(folder))
    assert passes.accept.tolist() == [1, ACCEPT] and passes.seconds(4, np.array(99.0)) == pytest.approx(on_a_line(4))
    seldom = costs_by_strategy(read_run(write_run(tmp_path / "two", lambda number, live: live > 2, on_a_line)))
    assert np.isfinite(seldom.token_seconds[0]).all() and np.isinf(seldom.token_seconds[1, 3:]).all()


def test_steps_with_missing_rounds_are_omitted(tmp_path: Path) -> None:
    """One step resumed with kept tokens, one has the log of fewer ranks than took part."""
    run = RunFolder(write_run(tmp_path / "run"))
    whole = read_run(run.path)
    lines = {step: dict(line) for step, line in read_lines(run.metrics).items()}
    lines[3]["rollout/kept_tokens"] = 3.0
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines.values()))
    write_step(run.rollout_log(1, 0), replace(read_step(run.rollout_log(1, 0)), num_ranks=3))
    assert len(whole.lengths) == 6
    assert read_run(run.path).lengths.tolist() == np.delete(whole.lengths, [1, 3], 0).tolist()


def test_a_run_that_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 finished steps"):
        read_run(write_run(tmp_path / "short", num_steps=1))
    with pytest.raises(ValueError, match="no plain round"):
        costs_by_strategy(read_run(write_run(tmp_path / "never", lambda number, live: False)))


# --- the command ---


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON that the command writes."""
    with TemporaryDirectory() as place:
        assert main(["simulate", *arguments, "--json", f"{place}/figures.json"]) == 0
        capsys.readouterr()
        return json.loads(Path(place, "figures.json").read_text())


def test_the_table_and_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", QWEN, "--nodes", "1,8", "--steps", "3", "--ahead", "0.97"]) == 0
    out = capsys.readouterr().out
    assert "GPU-h" in out and "ahead" in out and max(map(len, out.splitlines())) <= 80
    assert "above 32 responses at a time they are extrapolated" in " ".join(out.split())
    assert main(["simulate", QWEN, "--nodes", "1", "--steps", "1", "speculation.mode=plain"]) == 0
    assert "speed-ups" not in capsys.readouterr().out
    assert main(["simulate", QWEN, "--nodes", "1", "--steps", "1", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("; make room there or give another --json\n")
    one, two = simulated(capsys, QWEN, "--nodes", "2,1", "--steps", "3")["rows"]
    assert (one["nodes"], two["nodes"], one["ranks"]) == (1, 2, 8) and one["gain"] > 1
    assert two["rollout_seconds"] < one["rollout_seconds"] and one["ahead_rollout_seconds"] is None
    assert one["gpu_hours"] == pytest.approx(one["step_seconds"] * 8 * 200 / 3600)


def test_from_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(write_run(tmp_path / "known"))
    (row,) = simulated(capsys, "--from", folder, "--nodes", "1", "--steps", "200")["rows"]
    assert row["ranks"] == 2  # as many a node as the run had
    lengths = [QWEN, "--lengths", folder, "--nodes", "8", "--ahead", "0.97"]
    (row_ahead,) = simulated(capsys, *lengths)["rows"]
    assert row_ahead["ahead_rollout_seconds"] < 1.1 * row_ahead["rollout_seconds"], (
        "few tokens: wide passes save little"
    )
    tokens = read_run(Path(folder)).lengths.sum((1, 2)).mean()
    other = row["step_seconds"] - row["rollout_seconds"]
    assert row["gain"] == 1.0 and other == pytest.approx(2 + 0.1 * tokens, rel=0.2)


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "nothing to simulate"),
    ([QWEN, "--from", "/nowhere"], "/nowhere does not exist"),
    ([QWEN, "rollout.tensor_parallel=3"], "tensor_parallel"),
])  # fmt: skip
def test_mistakes_end_as_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    status = main(["simulate", *arguments])
    out, err = capsys.readouterr()
    assert status == 2 and not out and words in err and err.startswith("tlt: ") and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--from=a", "--shape=Qwen2.5-7B"], [QWEN, "--median=100", "--lengths=a"]])
def test_of_two_options_of_which_one_would_count_none_is_ignored(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *arguments])
    assert "not allowed with argument --" in capsys.readouterr().err
