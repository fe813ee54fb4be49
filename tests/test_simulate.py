"""The simulator: laws reckoned by hand, a token-by-token reference, recorded runs, the paper, the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import PREFILL, EngineSpans, FinishReason, Rollout, RolloutTiming, SampleKey
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.plan.simulate.alternatives import deal_by, pays_up_to, search, shared_tail, what_ifs
from tlt_hpc.plan.simulate.costs import TokenCosts, chance_of, expected, with_speed_ups
from tlt_hpc.plan.simulate.lengths import Logged, LogNormal, deal, read_lengths
from tlt_hpc.plan.simulate.measured import RecordedRounds, curve
from tlt_hpc.plan.simulate.predict import default_at
from tlt_hpc.plan.simulate.profile import read_costs
from tlt_hpc.plan.simulate.run_log import read_run
from tlt_hpc.plan.simulate.step import Setting, StepPhases, simulate, walk
from tlt_hpc.plan.simulate.validate import paced, validate
from tlt_hpc.plan.simulate.workload import SimulatedJob, Watts, kilowatt_hours, read_watts
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, read_step, write_step

ROOT = Path(__file__).resolve().parent.parent
TINY, QWEN = str(ROOT / "jobs" / "tiny.toml"), str(ROOT / "jobs" / "qwen7b.toml")
ALONE = Setting(max_live=4, micro_step_seconds=1.0)
NOTHING = StepPhases()


def costs_of(by_batch: Sequence[float], position: float = 0.0, prompt: float = 0.0) -> TokenCosts:
    token = np.array([by_batch], float)
    return TokenCosts(("off",), token, np.full(token.shape, position), prompt)


EVEN = costs_of([1.0, 1.0, 1.0, 1.0])


def lengths_of(*rows: Sequence[int]) -> Any:
    """One step: a row a replica."""
    number = max(map(len, rows))
    return np.array([[list(row) + [0] * (number - len(row)) for row in rows]], np.int64)


# --- by hand ---


def test_one_rank_one_sequence() -> None:
    steps = simulate(lengths_of([7]), costs_of([2.0]), Setting(max_live=1), StepPhases(0.5, 3.0))
    assert steps.rollout_seconds[0] == 14.0 and steps.step_seconds[0] == 14.0 + 3.0 + 7 * 0.5
    assert steps.idle_rank_seconds[0] == 0.0 == steps.harvested_share and steps.tokens[0] == 7


def test_idle_seconds_of_two_ranks_exactly() -> None:
    """3 and 10 tokens at a second each: 7 idle seconds, in micro-steps of 2 six of them harvested."""
    setting = Setting(max_live=1, micro_step_seconds=2.0)
    steps = simulate(lengths_of([3], [10]), costs_of([1.0]), setting, NOTHING)
    assert (steps.rollout_seconds[0], steps.idle_rank_seconds[0], steps.harvested_rank_seconds[0]) == (10.0, 7.0, 6.0)
    late = simulate(lengths_of([3], [10]), costs_of([1.0]), replace(setting, stop_seconds=1.0), NOTHING)
    assert (late.rollout_seconds[0], late.idle_rank_seconds[0]) == (11.0, 9.0)


def test_min_idle_waits_for_company() -> None:
    """Ends at 1, 4 and 9: with two to be idle the first trains from 4 on."""
    lengths, micro = lengths_of([1], [4], [9]), replace(ALONE, max_live=1)
    harvested = [
        simulate(lengths, costs_of([1.0]), replace(micro, min_idle=n), NOTHING).harvested_rank_seconds[0]
        for n in (1, 2, 3, 4)
    ]
    assert harvested == [8 + 5, 5 + 5, 0, 0]
    off = simulate(lengths, costs_of([1.0]), replace(micro, trains=False), NOTHING)
    assert off.harvested_rank_seconds[0] == 0 and off.idle_rank_seconds[0] == 13


def test_a_step_of_two_batches_by_hand() -> None:
    """Two sequences of 2 and 5: two tokens at 3 seconds, three at 1; positions cost their sum half-way."""
    done = walk(np.array([[2, 5]]), costs_of([1.0, 3.0]), 2)
    assert done.ends.tolist() == [[6.0, 9.0]]
    held = walk(np.array([[2, 5]]), costs_of([0.0, 0.0], position=1.0), 2, prompt_tokens=10.0)
    assert held.ends.tolist() == [[2 * (20 + 2), 2 * 22 + 3 * (10 + 3.5)]]


def test_a_place_that_becomes_free_is_taken_at_once() -> None:
    """Places 2, lengths 3, 1, 4, 2: the third starts at 1, the fourth at 3, and both end at 5."""
    assert walk(np.array([[3, 1, 4, 2]]), EVEN, 2).ends.tolist() == [[3.0, 1.0, 5.0, 5.0]]


def test_replicas_wait_and_train_with_all_their_ranks() -> None:
    steps = simulate(lengths_of([3], [10]), costs_of([1.0]), Setting(4, 1, micro_step_seconds=1.0), NOTHING)
    assert steps.num_ranks == 8 and steps.idle_rank_seconds[0] == steps.harvested_rank_seconds[0] == 28.0


def test_saves_are_shared_out() -> None:
    assert StepPhases(save_seconds=5.0, save_every=10).seconds(np.array([0.0]), 1).tolist() == [0.5]


def test_energy_by_phase() -> None:
    """Of 20 rank-seconds 7 idle, 6 of them in micro-steps; 2 seconds of update on 2 ranks."""
    setting = Setting(max_live=1, micro_step_seconds=2.0)
    steps = simulate(lengths_of([3], [10]), costs_of([1.0]), setting, StepPhases(fixed_seconds=2.0))
    found = kilowatt_hours(steps, Watts(decode=1.0, train=10.0, wait=100.0, update=1000.0)) * 3.6e6
    assert found == pytest.approx(13 * 1 + 6 * 10 + 1 * 100 + 4 * 1000)


# --- laws ---

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 5))
def test_harvested_is_of_the_idle_and_tokens_are_conserved(rows: list[list[int]], live: int, least: int) -> None:
    setting = Setting(max_live=live, min_idle=least, micro_step_seconds=1.5)
    steps = simulate(lengths_of(*rows), costs_of([1.0, 1.5, 2.0, 2.5, 3.0]), setting, StepPhases(1e-3, 1.0))
    assert 0 <= steps.harvested_rank_seconds[0] <= steps.idle_rank_seconds[0] + 1e-9
    assert steps.tokens[0] == sum(map(sum, rows))
    assert 0 <= steps.idle_share < 1 and steps.speculated_tokens[0] == 0


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.lists(st.floats(0.3, 3.0), min_size=5, max_size=5), st.integers(1, 5))
def test_speculation_never_loses_where_the_chooser_is_right(
    rows: list[list[int]], gains: list[float], live: int
) -> None:
    plain = costs_of([1.0, 1.2, 1.4, 1.6, 1.8], position=1e-3)
    fast = with_speed_ups(plain, {"drafter-4": gains})
    setting, lengths = Setting(max_live=live), lengths_of(*rows)
    seconds = [simulate(lengths, costs, setting, NOTHING).rollout_seconds[0] for costs in (plain, fast)]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)
    narrow = simulate(lengths, fast.below(2), setting, NOTHING).rollout_seconds[0]
    assert seconds[1] <= narrow * (1 + 1e-12)
    assert simulate(lengths, fast.below(0), setting, NOTHING).rollout_seconds[0] == seconds[0]


def test_a_gain_of_one_where_speculation_gives_nothing() -> None:
    work = workload(costs=with_speed_ups(EVEN, {"drafter-4": [1.0, 1.0, 1.0, 1.0]}), lengths=Logged(np.array([[5]])))
    steps, plain = work.run(4), work.run(4, speculates=False)
    assert steps.step_seconds.tolist() == plain.step_seconds.tolist() and steps.idle_rank_seconds.sum() == 0
    assert pays_up_to(work) == 0


def test_more_nodes_never_lengthen_a_step_of_fixed_work() -> None:
    """Without overheads: shards become prefixes of each other's, so batches and sums only fall."""
    work = workload(
        costs=costs_of(np.linspace(1, 2, 16).tolist()), lengths=LogNormal(50, 400), setting=Setting(max_live=16)
    )
    seconds = [work.run(ranks).step_seconds.mean() for ranks in (1, 2, 4, 8, 16, 32)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(seconds))
    assert seconds[0] / seconds[-1] > 2


def test_the_same_seed_gives_the_same_steps() -> None:
    work = workload(lengths=LogNormal(50, 400))
    first, again, other = work.run(4), work.run(4), replace(work, seed=1).run(4)
    assert first.step_seconds.tolist() == again.step_seconds.tolist() != other.step_seconds.tolist()


# --- token by token ---


def reference(lengths: Sequence[int], costs: TokenCosts, max_live: int, prompt: float) -> list[float]:
    """Round by round, a token for each live sequence: the plainest program there is."""
    waiting, live, clock, ends = list(enumerate(lengths)), dict[int, int](), 0.0, [0.0] * len(lengths)
    while waiting or live:
        while waiting and len(live) < max_live:
            index, _ = waiting.pop(0)
            live[index] = 0
            clock += prompt * costs.prompt_token_seconds
        positions = sum(done + 0.5 + prompt for done in live.values())
        column = len(live) - 1
        seconds = costs.token_seconds[:, column] + costs.position_seconds[:, column] * positions
        allowed = np.ones(len(seconds), bool) if costs.allowed is None else costs.allowed[:, column].copy()
        allowed[0] = True
        clock += float(seconds[allowed].min())
        for index in list(live):
            live[index] += 1
            if live[index] == lengths[index]:
                del live[index]
                ends[index] = clock
    return ends


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=14),
    st.integers(1, 6),
    st.lists(st.floats(0.2, 3.0), min_size=6, max_size=6),
    st.integers(0, 6),
    st.floats(0, 1e-2),
    st.floats(0, 5),
)
def test_the_walk_is_the_token_by_token_simulation(
    lengths: list[int], live: int, gains: list[float], threshold: int, position: float, prompt: float
) -> None:
    """Positions count alike for all strategies here: where they do not, the choice is made once a span."""
    plain = costs_of([1.0, 1.1, 1.3, 1.6, 2.0, 2.5], position, prompt=0.3)
    fast = with_speed_ups(plain, {"a": gains, "b": gains[::-1]})
    found = walk(np.array([lengths]), fast.below(threshold), live, prompt)
    assert found.ends[0].tolist() == pytest.approx(reference(lengths, fast.below(threshold), live, prompt))
    assert found.seconds[0] == pytest.approx(max(found.ends[0]))


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 50, rng.integers(1, 12)).tolist() for _ in range(20)]
    together = walk(lengths_of(*rows)[0], EVEN, 3).seconds
    assert together.tolist() == [float(walk(np.array([row]), EVEN, 3).seconds[0]) for row in rows]
    empty = walk(np.array([[0, 0], [2, 0]]), EVEN, 1)
    assert empty.seconds.tolist() == [0.0, 2.0]


def test_512_ranks_and_100_steps_are_quick() -> None:
    work = workload(
        prompts=512, group=16, lengths=LogNormal(5000, 30720), setting=Setting(max_live=8), simulated_steps=100
    )
    begun = time.process_time()
    assert len(work.run(512).step_seconds) == 100
    assert time.process_time() - begun < 20


# --- lengths and shards ---


def test_units_are_dealt_in_turn_as_a_run_deals_them() -> None:
    lengths = np.arange(1, 11).reshape(1, 5, 2)
    assert deal(lengths, 2, "group").tolist() == [[[1, 2, 5, 6, 9, 10], [3, 4, 7, 8, 0, 0]]]
    assert deal(lengths, 4, "sample").tolist() == [[[1, 5, 9], [2, 6, 10], [3, 7, 0], [4, 8, 0]]]
    assert deal(lengths, 8, "group").sum() == 55


def test_the_log_normal_law_has_its_median_spread_and_cap() -> None:
    drawn = LogNormal(1000, 4000, 0.9, 0.5).draw(100, 50, 20, np.random.default_rng(0))
    assert np.median(drawn) == pytest.approx(1000, rel=0.03) and drawn.max() == 4000 and drawn.min() >= 1
    logs = np.log(LogNormal(1000, 10**9, 0.9, 0.5).draw(100, 50, 20, np.random.default_rng(0)))
    assert logs.std() == pytest.approx(0.9, rel=0.03)
    assert logs.mean(2).std() == pytest.approx(0.9 * np.sqrt(0.5 + 0.5 / 20), rel=0.05)


def test_logged_groups_are_drawn_whole() -> None:
    known = Logged(np.array([[1, 2], [30, 40]]))
    drawn = known.draw(50, 4, 2, np.random.default_rng(0)).reshape(-1, 2).tolist()
    assert {tuple(group) for group in drawn} == {(1, 2), (30, 40)}
    larger = known.draw(50, 4, 3, np.random.default_rng(0)).reshape(-1, 3)
    assert all(set(group) <= {1, 2} or set(group) <= {30, 40} for group in larger.tolist())


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    for text in ("3 5\n900", "3,5,900", "[3, 5, 900]"):
        file.write_text(text)
        assert read_lengths(file, 512).groups[:, 0].tolist() == [3, 5, 512]
    for text in ("", "[]", "three", "0 1", "[[1, 2]]", "nan", '["a"]'):
        file.write_text(text)
        with pytest.raises(ValueError, match="lengths"):
            read_lengths(file, 512)


# --- settings and what-ifs ---


def workload(**changes: Any) -> SimulatedJob:
    base = SimulatedJob(
        prompts=16,
        group=4,
        shard="group",
        num_steps=10,
        setting=ALONE,
        costs=EVEN,
        phases=NOTHING,
        lengths=LogNormal(40, 300),
        origin=(),
        simulated_steps=5,
    )
    return replace(base, **changes)


def test_more_places_are_worth_having_where_rounds_are_bound_by_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """One node has 256 responses a rank: places for 32 take little over half the rounds of 16, each hardly longer."""
    overrides = "speculation.mode=plain", "rollout.max_live=16"
    _, out, _ = said(capsys, QWEN, "--nodes", "1", "--steps", "2", "--json", *overrides, "--median", "500")
    seconds = {one["value"]: one["step_seconds"] for one in json.loads(out)["search"] if "max_live" in one["setting"]}
    assert seconds[32] < 0.8 * seconds[16] < 0.8 * 0.8 * seconds[8]


def test_settings_are_tried_where_all_ranks_have_work() -> None:
    work = workload()
    assert [default_at(work, nodes, 2) for nodes in ([1, 8], [1, 8, 9, 64], [64])] == [8, 8, 64]
    assert default_at(replace(work, shard="sample"), [1, 8, 32, 64], 2) == 32


def test_the_search_finds_where_speculation_pays() -> None:
    fast = with_speed_ups(EVEN, {"a": [3.0, 2.0, 0.5, 0.4]})
    work = workload(costs=fast)
    found = search(work, 4)
    assert pays_up_to(work) == 2
    (best,) = (one for one in found if one.setting == "SD threshold" and one.is_best)
    assert best.value == 2 and best.is_own
    for setting in {one.setting for one in found}:
        assert sum(one.is_best for one in found if one.setting == setting) == 1


def test_moving_sequences_helps_where_one_rank_has_all_the_long_ones() -> None:
    """8, 8 on one rank, 1, 1 on the other, and a batch of two costs twice: 16 seconds become 9."""
    lengths, costs = lengths_of([8, 8], [1, 1]), costs_of([1.0, 2.0])
    setting = Setting(max_live=2)
    ended, seconds, moves = shared_tail(lengths, costs, setting)
    assert ended.tolist() == [[9.0, 9.0]] and moves == 1.0 and seconds == 7.0
    _, nothing, none = shared_tail(lengths_of([8], [1]), costs, setting)
    assert (nothing, none) == (0.0, 0.0)


def test_dealing_by_known_lengths_evens_out_the_shards() -> None:
    drawn = np.array([[[9], [1], [9], [1], [9], [1], [9], [1]]])
    even = deal_by(drawn, drawn.astype(float), 2, False, True)
    assert even.sum(2).tolist() == [[20, 20]] and (np.diff(even, axis=2) <= 0).all()
    own = deal_by(drawn, drawn.astype(float), 2, False, False)
    assert own.sum(2).tolist() == [[36, 4]]
    falling = np.array([[[4], [3], [2], [1]]])
    assert deal_by(falling, falling.astype(float), 2, False, True).tolist() == [[[4, 1], [3, 2]]]
    odd = deal_by(np.array([[[5], [1], [3]]]), np.array([[[5.0], [1.0], [3.0]]]), 2, False, True)
    assert sorted(odd.reshape(-1).tolist()) == [0, 1, 3, 5] and odd[0, 0, 0] == 5


def test_what_ifs_keep_the_tokens_and_begin_with_the_job() -> None:
    found = what_ifs(workload(), 4)
    assert found[0].gain == 1.0 and not found[0].pays
    known = {one.name: one for one in found}
    assert not known["the same, lengths known"].pays
    assert known["sequences moved freely"].gain >= 0.999
    assert known["more ranks than prompts"].rollout_seconds <= found[0].rollout_seconds


# --- a run's own log ---


def write_run(folder: Path, num_ranks: int = 2, num_steps: int = 6, slow: float = 1.0, accept: int = 1) -> Path:
    """A run whose rounds take a second for each of ``accept`` tokens at any batch, and steps 2 and a tenth a token.

    ``slow`` is what the machine's seconds are multiplied with in the second half.
    """
    run = RunFolder(folder)
    run.create()
    config = load_config(TINY, ["run.name=known", "rollout.prompts_per_step=4", "rollout.group_size=2"])
    run.config.write_text(to_toml(config))
    rng, lines = np.random.default_rng(0), []
    for step in range(num_steps):
        pace = slow if step >= num_steps // 2 else 1.0
        shards = [(accept * rng.integers(3, 30 // accept, 8 // num_ranks)).tolist() for _ in range(num_ranks)]
        release = 1000.0 + pace * max(map(max, shards))
        for rank, shard in enumerate(shards):
            write_step(run.rollout_log(step, rank), _record(step, rank, num_ranks, shard, pace, release, accept))
        other = 2.0 + 0.1 * sum(map(sum, shards))
        lines.append(
            {
                "training/global_step": step,
                "rollout/seconds": release - 1000.0,
                "timing_s/step": release - 1000.0 + other,
                "rollout/stop_latency_seconds": 0.0,
                "rollout/idle_rank_seconds": sum(release - 1000.0 - pace * max(shard) for shard in shards),
                "rollout/harvested_rank_seconds": 0.0,
            }
        )
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def _record(
    step: int, rank: int, num_ranks: int, shard: list[int], pace: float, release: float, accept: int
) -> StepRecord:
    rollouts = tuple(
        Rollout(
            SampleKey(0, 0, step, rank + num_ranks * (i // 2), i % 2),
            np.zeros(2, np.int32),
            np.zeros(length, np.int32),
            np.zeros(length, np.float32),
            FinishReason.EOS,
            step,
            length,
            1000.0 + length * pace,
        )
        for i, length in enumerate(shard)
    )
    count = max(shard) // accept
    live = np.array([0, *(sum(length > done * accept for length in shard) for done in range(count))], np.int32)
    seconds = np.array([0.0, *[pace * accept] * count], np.float32)
    spans = EngineSpans(
        np.array([PREFILL, *[0] * count], np.int16), live, live * accept, 1000.0 + np.cumsum(seconds) - seconds, seconds
    )
    return StepRecord(
        step=step,
        rank=rank,
        num_ranks=num_ranks,
        rollouts=rollouts,
        rewards=np.zeros(len(shard), np.float32),
        advantages=np.zeros(len(shard), np.float32),
        timing=RolloutTiming(1000.0, 1000.0 + pace * max(shard), release),
        micro_steps=(),
        harvested_seconds=0.0,
        strategy_names=("off", "drafter-4"),
        strategy_rounds=np.array([max(shard), 0]),
        strategy_tokens=np.array([sum(shard), 0]),
        decisions=np.zeros((0, 2), np.int32),
        guarded_near_ties=0,
        metrics={},
        spans=spans,
    )


@pytest.mark.parametrize(("num_ranks", "accept"), [(1, 1), (2, 1), (2, 3)])
def test_a_run_that_follows_the_model_is_predicted_exactly(tmp_path: Path, num_ranks: int, accept: int) -> None:
    checks = validate(read_run(write_run(tmp_path / "run", num_ranks, accept=accept)))
    assert [one.split for one in checks] == ["half", "odd"]
    for one in checks:
        assert one.rollout_error == pytest.approx(0, abs=1e-6) and one.step_error == pytest.approx(0, abs=1e-6)
        assert one.idle_predicted == pytest.approx(one.idle_measured, abs=1e-4) and one.holds
        assert one.machine_drift == pytest.approx(1, abs=1e-6) and one.model_error == pytest.approx(0, abs=1e-6)


def rounds_of(*each: tuple[str, float, float, float]) -> RecordedRounds:
    each_name, live, tokens, seconds = zip(*each, strict=True)
    names = tuple(dict.fromkeys(each_name))
    index = np.array([names.index(name) for name in each_name], np.int16)
    return RecordedRounds(names, index, np.array(live, np.int32), np.array(tokens, np.int32), np.array(seconds, float))


def test_seconds_a_token_by_powers_of_two_of_the_batch() -> None:
    """Of one sequence 4 seconds for 3 tokens in two rounds, of four 6 for 2: between them by the logarithm."""
    rounds = rounds_of(("off", 1, 1, 1.0), ("off", 1, 2, 3.0), ("off", 4, 8, 6.0), ("a", 4, 8, 9.0))
    seconds, seen = curve(rounds, rounds.are("off"), 16, 1)
    assert seconds[[0, 1, 3, 15]].tolist() == pytest.approx([4 / 3, (4 / 3 + 3) / 2, 3.0, 3.0])
    assert np.flatnonzero(seen).tolist() == [0, 3, 4, 5, 6]
    assert not curve(rounds, rounds.are("off"), 16, 3)[1].any()  # too few rounds to believe


def test_the_pace_of_a_round_is_that_of_its_like() -> None:
    few = [("off", 1, 1, 1.0), ("a", 1, 3, 3.0), ("off", 4, 4, 9.0), ("off", 5, 5, 11.0)]
    before = rounds_of(*4 * few, ("b", 1, 1, 200.0))
    asked = rounds_of(*[(name, live, 1, 0.0) for name, live in (("off", 1), ("a", 1), ("a", 6), ("a", 64), ("b", 1))])
    like, every = (4 * 4 + 200) / 9, (4 * 24 + 200) / 17
    assert paced(before, asked).tolist() == pytest.approx([1.0, 3.0, 10.0, every, like])


def test_a_machine_that_slows_down_is_told_from_a_model_that_errs(tmp_path: Path) -> None:
    first, _ = validate(read_run(write_run(tmp_path / "run", slow=1.5)))
    assert first.machine_drift == pytest.approx(1.5) and not first.holds
    assert (1 + first.rollout_error) * first.machine_drift == pytest.approx(1)
    assert first.model_error == pytest.approx(0, abs=1e-6)


def test_a_run_that_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.toml, or no rollouts/"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="1 finished steps"):
        read_run(write_run(tmp_path / "short", num_steps=1))
    with pytest.raises(ValueError, match="needs 4 or more"):
        validate(read_run(write_run(tmp_path / "three", num_steps=3)))


# --- the command ---


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table_fits_in_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = said(capsys, QWEN, "--nodes", "1,8", "--steps", "3")
    assert status == 0 and "assumed" in out and "rank-h" in out and "harvested" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_json_has_all_of_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "sim.svg"
    status, out, _ = said(capsys, QWEN, "--nodes", "2,1", "--steps", "3", "--json", "--plot", str(picture))
    tree = json.loads(out)
    assert status == 0 and [row["nodes"] for row in tree["rows"]] == [1, 2]
    assert tree["rows"][0]["ranks"] == 8 and tree["rows"][0]["gain"] > 1
    assert tree["rows"][1]["rollout_seconds"] < tree["rows"][0]["rollout_seconds"]
    assert tree["rows"][0]["gpu_hours"] == pytest.approx(tree["rows"][0]["step_seconds"] * 8 * 200 / 3600)
    assert {"search", "what_if", "origin", "watts"} <= set(tree) and picture.read_text().startswith("<?xml")


def test_overrides_count_and_plain_gains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--nodes", "1", "--steps", "2", "--json")
    _, out, _ = said(capsys, QWEN, *arguments, "speculation.mode=plain")
    tree = json.loads(out)
    assert tree["rows"][0]["gain"] == 1.0 and tree["rows"][0]["speculated_share"] == 0.0


def test_from_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(write_run(tmp_path / "known"))
    status, out, _ = said(capsys, "--from", folder, "--nodes", "1", "--json", "--steps", "200")
    row = json.loads(out)["rows"][0]
    assert status == 0 and row["ranks"] == 2  # as many a node as the run had
    assert row["kilowatt_hours"] is None  # of no known card
    assert row["gain"] == 1.0 and row["step_seconds"] - row["rollout_seconds"] == pytest.approx(2 + 0.1 * 131, rel=0.2)


def test_overrides_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(write_run(tmp_path / "known"))
    status, out, _ = said(capsys, "--from", folder, "run.num_steps=7", "run.name=other", "--nodes", "1", "--steps", "2")
    assert status == 0 and out.startswith("other: 4 x 2 responses a step, 7 steps")


def write_cost_profile(file: Path) -> Path:
    """Batches of 1 and 64; the widest pass reads 320 tokens in 90 ms."""
    words = dict.fromkeys(("processor", "device", "torch_version", "model", "dtype"), "x")
    key = {**words, "num_cores": 1, "num_threads": 1}
    verify = [[1, [[1, 0.010], [5, 0.012]]], [64, [[1, 0.020], [5, 0.090]]]]
    drafts = {"drafter": [[1, [[4, 0.002]]], [64, [[4, 0.004]]]], "ngram": [[1, [[4, 1e-9]]], [64, [[4, 1e-9]]]]}
    file.write_text(json.dumps({"schema": 1, "key": key, "verify": verify, "drafts": drafts, "measured_seconds": 1.0}))
    return file


def test_from_a_cost_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write_cost_profile(tmp_path / "profile.json")
    status, out, _ = said(
        capsys, TINY, "--profile", str(file), "--chance", "0.5", "--nodes", "1", "--steps", "2", "--json",
        'speculation.strategies=["drafter-4"]', "rollout.max_live=1",
    )  # fmt: skip
    assert status == 0 and json.loads(out)["rows"][0]["gain"] == pytest.approx(0.010 * 1.9375 / 0.014, rel=1e-3)


def test_n_grams_have_a_chance_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of one sequence a round with n-grams takes 12 ms, a plain one 10."""
    file = write_cost_profile(tmp_path / "profile.json")
    arguments = (TINY, "--profile", str(file), "--nodes", "1", "--steps", "2", "--json", "rollout.max_live=1")
    gains = []
    for more in (("--ngram-chance", "0.2"), ("--ngram-chance", "0.45", "--chance", "0.99"), ()):
        status, out, _ = said(capsys, *arguments, "speculation.mode=ngram", *more)
        tree = json.loads(out)
        assert status == 0
        gains.append(tree["rows"][0]["gain"])
    assert gains == pytest.approx([0.010 * expected(chance, 4) / 0.012 for chance in (0.2, 0.45, 0.5)], rel=1e-3)
    assert "chance: ngram 0.50 (assumed)" in " ".join(tree["origin"])


def test_chances_of_a_run_with_another_machine_s_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for path in (path for step in range(6) for path in RunFolder(folder).rollout_logs(step)):
        step = read_step(path)
        drafted = np.where(step.spans.strategy_index == 0, np.int16(1), step.spans.strategy_index)
        write_step(path, replace(step, spans=replace(step.spans, strategy_index=drafted)))  # drafts that never stood
    file = write_cost_profile(tmp_path / "profile.json")
    arguments = ("--from", str(folder), 'speculation.strategies=["drafter-4"]')
    arguments += ("--profile", str(file), "--nodes", "1", "--steps", "2", "--json", "rollout.max_live=1")
    status, out, _ = said(capsys, *arguments)
    tree = json.loads(out)
    said_origin = " ".join(tree["origin"])
    assert status == 0 and tree["rows"][0]["gain"] == 1.0
    assert "chance: drafter 0.00 (measured)" in said_origin
    assert "the run's own" in said_origin and tree["rows"][0]["step_seconds"] == tree["rows"][0]["rollout_seconds"]
    _, out, _ = said(capsys, *arguments, 'speculation.strategies=["ngram-4","hybrid-4x2v8"]')
    assert "chance: ngram 0.50 (assumed), hybrid 0.00 (measured)" in " ".join(json.loads(out)["origin"])
    _, out, _ = said(capsys, *arguments, "--chance", "0.5")
    assert json.loads(out)["rows"][0]["gain"] > 1.2


def test_prompts_are_read_at_the_widest_pass_of_a_profile(tmp_path: Path) -> None:
    file = write_cost_profile(tmp_path / "profile.json")
    costs = read_costs(file, (), 128, {}, 4096)
    assert costs.names == ("off",) and costs.prompt_token_seconds == pytest.approx(0.090 / 320)
    assert read_costs(file, (), 1, {}, 100).prompt_token_seconds == pytest.approx(0.020 / 64)  # a chunk of 100 tokens
    assert read_costs(file, (), 1, {}, 1).prompt_token_seconds == pytest.approx(0.010)
    assert costs.token_seconds[0][[0, 63, 127]].tolist() == pytest.approx([0.010, 0.020, 0.020 + 0.010 * 64 / 63])
    done = [walk(np.array([[5, 5]]), costs, 2, prompt, 0.5).seconds[0] for prompt in (0.0, 100.0)]
    assert done[1] - done[0] == pytest.approx(2 * 0.5 * 100 * 0.090 / 320)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 0.99), st.integers(1, 12))
def test_the_chance_behind_an_accept_length(chance: float, depth: int) -> None:
    assert chance_of(expected(chance, depth), depth) == pytest.approx(chance, abs=1e-6)


def test_validate_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad", slow=2.0)
    status, out, _ = said(capsys, "--validate", str(good))
    assert status == 0 and "drift" in out and "+0%" in out.replace("-0%", "+0%")
    status, out, _ = said(capsys, "--validate", str(good), str(bad), "--json")
    assert status == 1 and [one["holds"] for one in json.loads(out)][2] is False


def test_the_paper_is_predicted_within_a_tenth() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "simulate_paper.py")]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    head, *changed = done.stdout.splitlines()[2:]
    assert done.returncode == 0, done.stderr
    predicted = [float(word) for word in head.split()[1:7]]
    assert predicted == pytest.approx([1.21, 1.45, 1.62, 1.76, 1.83, 2.12], rel=0.10)
    assert any(line.endswith("*") for line in changed) and len(changed) == 21  # it also shows where it fails


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to simulate"),
        (["/"], "/ is a folder; for a run give --from /"),
        ([QWEN, "--nodes", "0"], "--nodes 0"),
        ([QWEN, "--nodes", "two"], "--nodes two"),
        ([QWEN, "--gpus", "0"], "--gpus 0"),
        ([QWEN, "--at", "0"], "--at 0"),
        ([QWEN, "--steps", "0"], "--steps 0"),
        ([QWEN, "--spread", "-1"], "--spread -1"),
        ([QWEN, "--chance", "1"], "--chance 1"),
        ([QWEN, "--ngram-chance", "1"], "--ngram-chance 1"),
        ([QWEN, "--ngram-chance", "-0.1"], "--ngram-chance -0.1"),
        ([QWEN, "--prompt-share", "1.5"], "--prompt-share 1.5"),
        ([QWEN, "--prediction-error", "nan"], "--prediction-error nan"),
        ([QWEN, "--seed", "-1"], "--seed -1"),
        ([QWEN, "--watts", "cook=3"], "cook"),
        ([QWEN, "--watts", "decode=hot"], "decode"),
        ([QWEN, "--plot", "sim.pdf"], ".png or .svg"),
        ([QWEN, "--plot", "/nowhere/sim.png"], "folder does not exist"),
        ([QWEN, "--lengths", "/nowhere"], "--lengths /nowhere"),
        ([QWEN, "--profile", "/nowhere"], "--profile /nowhere"),
        ([QWEN, "--from", "/nowhere"], "/nowhere does not exist"),
        ([QWEN, "--validate", "/nowhere"], "/nowhere does not exist"),
        ([QWEN, "speculation.mode=ngram"], "--from RUN"),
        ([QWEN, "rollout.max_liv=3"], "max_live"),
        ([QWEN, "rollout.tensor_parallel=3"], "tensor_parallel"),
        (["/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_mistakes_end_as_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    status, out, err = said(capsys, *arguments)
    assert status == 2 and not out and words in err and err.startswith("tlt: ") and err.count("\n") == 1


def test_watts_are_read() -> None:
    assert read_watts("decode=300, wait=0") == Watts(decode=300.0, wait=0.0) and read_watts("") == Watts()
