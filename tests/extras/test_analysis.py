"""Analyses of logs made by hand, some of them damaged, and their figures: no text is cut off or over other text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from small_run import NAMES, START, set_lines, small_record, small_run

from tlt_hpc.common.records import NO_SPANS, PhaseSpan, RolloutTiming
from tlt_hpc.extras.report.analysis.acceptance import ACCEPTANCE
from tlt_hpc.extras.report.analysis.comparison import analyse_comparison
from tlt_hpc.extras.report.analysis.learning import analyse_learning, moving_mean
from tlt_hpc.extras.report.analysis.lengths import LENGTHS
from tlt_hpc.extras.report.analysis.survey import run_survey
from tlt_hpc.extras.report.analysis.throughput import THROUGHPUT
from tlt_hpc.extras.report.analysis.time_kinds import KINDS, Kind, Pieces
from tlt_hpc.extras.report.analysis.timeline import analyse_timeline
from tlt_hpc.extras.report.figures import steps
from tlt_hpc.extras.report.figures.style import themed
from tlt_hpc.extras.report.figures.timeline import draw_timeline
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import speed_of
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

ANALYSES: dict[str, tuple[Callable[[RunLog], Any], Callable[[Any], Figure]]] = {
    "timeline": (analyse_timeline, draw_timeline),
    "lengths": (partial(run_survey, survey=LENGTHS), steps.draw_lengths),
    "acceptance": (partial(run_survey, survey=ACCEPTANCE), steps.draw_acceptance),
    "throughput": (partial(run_survey, survey=THROUGHPUT), steps.draw_throughput),
    "learning": (analyse_learning, steps.draw_learning),
    "comparison": (lambda run: analyse_comparison([run, run]), steps.draw_comparison),
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(tmp_path / "run")


def run_with_refill(path: Path, **changes: Any) -> RunFolder:
    """A step whose refill begins 4 s after the release of its rollout."""
    folder = RunFolder(path)
    for rank, lasts in ((0, (1.0, 9.0)), (1, (3.0, 8.5))):
        first = RolloutTiming(START, START + lasts[0], START + 4)
        refill = RolloutTiming(START + 8, START + lasts[1], START + 10)
        given = {"timing": first, "refills": (refill,), "micro_steps": (), "harvested_seconds": 0.0, **changes}
        write_step(folder.rollout_log(0, rank), small_record(0, rank, **given))
    return folder


def rows_of(found: Pieces) -> list[tuple[Kind, float, float]]:
    times = zip(found.kinds, np.round(found.starts, 4).tolist(), np.round(found.ends, 4).tolist(), strict=True)
    return [(KINDS[kind], start, end) for kind, start, end in times]


# --- timeline ---


def test_the_timeline_of_two_ranks(folder: RunFolder) -> None:
    found = analyse_timeline(RunLog(folder.path))
    assert found.step == 3 and found.num_ranks == 2 and found.rollout_seconds == pytest.approx(6.5)
    assert rows_of(found.lanes[0].pieces) == [
        (Kind.SAVE, -1.0, -0.5),
        (Kind.PREFILL, 0.0, 0.5),
        (Kind.DECODE, 0.5, 1.0),
        (Kind.SPECULATE, 1.0, 2.0),
        (Kind.TRAIN, 2.0, 2.9),
        (Kind.IDLE, 2.9, 3.0),
        (Kind.TRAIN, 3.0, 3.9),
        (Kind.IDLE, 3.9, 6.5),
        (Kind.REWARD, 6.6, 7.0),
        (Kind.UPDATE, 7.0, 9.0),
        (Kind.REFRESH, 9.0, 9.5),
    ]
    assert [round(lane.idle_seconds, 6) for lane in found.lanes] == [4.5, 0.5] and found.harvested_seconds == 1.8
    assert np.allclose(found.tails, [(2.0, 6.5)])
    assert "tail lasted 4.50 s: rank 0" in found.verdict and "5.00 s together, 38 %" in found.verdict
    live = {second: int(found.live[np.searchsorted(found.live_seconds, second)]) for second in (1.5, 3.0, 5.0, 6.2)}
    assert live == {1.5: 4, 3.0: 2, 5.0: 1, 6.2: 0}


def test_a_refill_has_its_own_tail(tmp_path: Path) -> None:
    found = analyse_timeline(RunLog(run_with_refill(tmp_path / "run", spans=NO_SPANS).path))
    assert np.allclose(found.tails, [(1.0, 4.0), (8.5, 10.0)]) and found.rollout_seconds == pytest.approx(6.0)
    assert found.lanes[0].idle_seconds == pytest.approx(3 + 1)


# --- lengths, acceptance, throughput, learning ---


def test_lengths(folder: RunFolder) -> None:
    found = run_survey(RunLog(folder.path), LENGTHS)
    assert found.steps.tolist() == [1, 2, 3] and found.cap == 8
    assert found.p50.tolist() == [4.5] * 3 and found.longest.tolist() == [8] * 3 and found.mean.tolist() == [5.25] * 3
    assert found.num_cut.tolist() == [1] * 3 and found.num_responses.tolist() == [4] * 3
    assert "no long tail" in found.verdict and "3 responses (25 %) ended at the cap of 8 tokens" in found.verdict
    assert "The tail is long" in replace(found, longest=found.longest * 100).verdict


def test_acceptance(folder: RunFolder) -> None:
    found = run_survey(RunLog(folder.path), ACCEPTANCE)
    assert found.strategies == NAMES and found.bucket_names == ["1", "2"]
    assert found.accept_length == pytest.approx([21 / 11] * 3)
    off, drafter = found.by_bucket
    assert np.isnan(off[0]) and off[1] == 1.0 and drafter.tolist() == [5.0, 14 / 4]
    assert found.row_passes.tolist() == [[0, 6], [3, 12]] and found.tokens.tolist() == [[0, 6], [15, 42]]
    assert found.step_tokens.tolist() == [[2, 19]] * 3
    assert found.own_accept_length == pytest.approx([2.0, 2.1, 2.2])
    assert "90 % of the tokens" in found.verdict and "5.00 with 1 live and 3.50 with 2" in found.verdict
    set_lines(folder, *[{"drafter/own_accept_length": 1.0, "drafter/own_sequences": 0.0}] * 3)
    assert np.isnan(run_survey(RunLog(folder.path), ACCEPTANCE).own_accept_length).all(), "the drafter was not used"
    spans = replace(small_record(0, 0).spans, num_live=np.full(3, 3, np.int32))
    write_step(folder.rollout_log(0, 0), small_record(0, 0, spans=spans))
    assert run_survey(RunLog(folder.path), ACCEPTANCE).bucket_names == ["1", "2", "3\u20134"]


def test_throughput(folder: RunFolder) -> None:
    found = run_survey(RunLog(folder.path), THROUGHPUT)
    expected = {
        Kind.PREFILL: 0.75, Kind.DECODE: 0.25, Kind.SPECULATE: 3.0, Kind.TRAIN: 0.9, Kind.IDLE: 1.6,
        Kind.REWARD: 0.4, Kind.UPDATE: 2.0, Kind.REFRESH: 0.5, Kind.SAVE: 0.5,
    }  # fmt: skip
    assert dict(zip(found.kinds, found.seconds[1].tolist(), strict=True)) == pytest.approx(expected)
    assert (found.total_idle_seconds, found.total_harvested_seconds, found.total_rollout_seconds) == pytest.approx(
        (15.0, 5.4, 39.0)
    )
    assert found.tokens_per_second == pytest.approx(21 / 6.5)
    assert "Ranks waited for 38 % of their time" in found.verdict
    set_lines(folder, *[{"rollout/kept_tokens": 14.0}] * 3)
    found = run_survey(RunLog(folder.path), THROUGHPUT)
    assert found.tokens_per_second == pytest.approx(7 / 6.5), "without the tokens of an earlier start"


def test_learning_separates_a_trend_from_chance(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", num_steps=1)
    rng = np.random.default_rng(0)

    def verdict(slope: float) -> str:
        scores = 0.3 + slope * np.arange(40) + 0.02 * rng.standard_normal(40)
        evaluated = {"val-core/gsm8k/acc/greedy": 0.75}
        set_lines(folder, *({"critic/score/mean": s} | (evaluated if i == 39 else {}) for i, s in enumerate(scores)))
        return analyse_learning(RunLog(folder.path)).verdict

    assert "clearly up" in verdict(0.01) and "clearly down" in verdict(-0.005)
    flat = verdict(0.0)
    assert moving_mean(np.array([1.0, np.nan, 3.0, 5.0]), 3).tolist() == [1.0, 2.0, 4.0, 4.0]
    assert "within what steps vary by" in flat and "gsm8k greedy: 0.750 at step 40" in flat
    set_lines(folder, {}, {"actor/grad_norm": float("nan")}, {})
    assert "NOT FINITE: grad_norm from step 2 on" in analyse_learning(RunLog(folder.path)).verdict


# --- several runs ---


def test_the_same_tokens_on_another_number_of_ranks(tmp_path: Path) -> None:
    a, b = small_run(tmp_path / "a"), RunFolder(tmp_path / "b")
    for step in range(3):
        rollouts = small_record(step, 0).rollouts + small_record(step, 1).rollouts
        ones = np.ones(4, np.float32)
        changes = {"rollouts": rollouts, "rewards": ones, "advantages": ones}
        write_step(b.rollout_log(step, 0), small_record(step, 0, 1, **changes))
    set_lines(b, *[{"rollout/seconds": 13.0}] * 3)
    found = analyse_comparison([RunLog(b.path), RunLog(a.path)])
    assert found.first_difference == {"a": None} and found.compared_steps.tolist() == [1, 2, 3]
    speed = speed_of(*found.runs)
    assert speed is not None and speed.rollout == 2.0 and speed.step == pytest.approx((13 + 3.1) / 9.6)
    assert "its rollouts are 2.00 times as fast on 2 ranks instead of 1." in found.verdict


def test_the_first_step_with_another_token_is_named(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / name) for name in "abc"]
    record = small_record(1, 1)
    record.rollouts[0].response_tokens[3] += 1
    write_step(runs[2].rollout_log(1, 1), record)
    found = analyse_comparison([RunLog(run.path) for run in runs])
    assert found.first_difference == {"b": None, "c": 2}
    assert "b has the same tokens and c differs from step 2 on" in found.tokens_in_words
    runs[1].rollout_log(2, 1).unlink()
    assert analyse_comparison([RunLog(run.path) for run in runs[:2]]).compared_steps.tolist() == [1, 2]


# --- damaged, missing ---


def test_damage_is_named_and_left_out(folder: RunFolder) -> None:
    path = folder.rollout_log(2, 1)
    path.write_bytes(path.read_bytes()[:-200])
    folder.rollout_log(1, 0).unlink()
    with folder.metrics.open("a") as file:
        file.write('{"training/global_step": 4.0, "critic/sc')
    folder.config.write_text("[rollout")
    run = RunLog(folder.path)
    found = {name: analyse(run) for name, (analyse, _) in ANALYSES.items() if name != "comparison"}
    assert found["timeline"].step == 1, "the last step with the logs of all its ranks"
    assert all(each.steps.tolist() == [1, 2, 3] for name, each in found.items() if name != "timeline")
    assert "1 of 2 ranks" in analyse_timeline(run, step=3).verdict
    for each in found.values():
        json.dumps(each.to_json(), allow_nan=False)
    problems = " ".join(run.problems)
    for words in ("metrics.jsonl:4 is cut off", str(path), "step 2: no log of rank 0 (1 of 2 ranks)", "config.toml"):
        assert words in problems


def test_logs_of_uncommitted_steps_are_left_out(folder: RunFolder) -> None:
    folder.metrics.write_text(folder.metrics.read_text().splitlines(keepends=True)[0])
    run = RunLog(folder.path)
    assert run.steps == (0,) and run.logged_steps == (0, 1, 2)
    assert all(run_survey(run, survey).steps.tolist() == [1] for survey in (LENGTHS, THROUGHPUT))  # type: ignore[attr-defined]
    assert analyse_timeline(run).step == 1 and "left out: the logs of step 2, 3" in " ".join(run.problems)
    assert analyse_timeline(run, step=3).step == 3, "unless it is asked for"


def test_rounds_of_a_replica_count_once(folder: RunFolder) -> None:
    both = run_survey(RunLog(folder.path), ACCEPTANCE)
    folder.config.write_text("[rollout]\nmax_new_tokens = 8\ntensor_parallel = 2\n")
    run = RunLog(folder.path)
    found = run_survey(run, ACCEPTANCE)
    assert found.tokens.sum() == 3 * 8 < both.tokens.sum(), "rank 0's rounds alone"
    assert np.array_equal(found.accept_length, both.accept_length)
    assert analyse_timeline(run).live.max() == 2


# --- figures ---


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunLog]:
    """The runs that the figures are tried on, each made once."""
    place = tmp_path_factory.mktemp("runs")
    RunFolder(place / "begun").make_missing_folders()
    small_run(place / "ranks", num_steps=1, num_ranks=40)
    run_with_refill(place / "refill", phases=(PhaseSpan("testing", START - 400, START - 1),))
    for name, num_steps, num_ranks in (("few", 3, 2), ("long", 60, 1)):
        folder = small_run(place / name, num_steps, num_ranks)
        set_lines(folder, *[{"val-core/gsm8k/acc/mean@8": 0.1 * step} for step in range(num_steps)])
    return {path.name: RunLog(path) for path in place.iterdir()}


def texts_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """All visible text outside of legends, with its place; drawn before."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    hidden = set[int]()
    for axes in figure.axes:
        if not axes.get_visible():
            hidden |= {id(text) for text in axes.findobj(mpl.text.Text)}
        for axis in (axes.xaxis, axes.yaxis):  # ticks beyond the limits exist, but are not drawn
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high or not tick.label1.get_visible():
                    hidden |= {id(tick.label1), id(tick.label2)}
    texts = [t for t in figure.findobj(mpl.text.Text) if t.get_visible() and t.get_text().strip()]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if id(t) not in hidden]


def overlap(a: Bbox, b: Bbox) -> float:
    """Of two boxes, in square pixels."""
    return max(0.0, min(a.x1, b.x1) - max(a.x0, b.x0)) * max(0.0, min(a.y1, b.y1) - max(a.y0, b.y0))


@pytest.mark.parametrize("case", ["few", "begun", "ranks", "refill", "long"])
@pytest.mark.parametrize("name", ANALYSES)
def test_nothing_is_cut_off_or_written_over(runs: dict[str, RunLog], name: str, case: str) -> None:
    if case == "begun" and name == "timeline":
        pytest.skip("there is no step to show")
    with themed("light"):
        analyse, draw = ANALYSES[name]
        figure = draw(analyse(runs[case]))
        figure.canvas.draw()
        shown, whole = texts_of(figure), figure.bbox
    for text, box in shown:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
        assert inside, f"{text!r} leaves the figure: {box} of {whole}"
    for (a, first), (b, second) in combinations(shown, 2):
        assert overlap(first, second) < 4, f"{a!r} lies over {b!r}"
