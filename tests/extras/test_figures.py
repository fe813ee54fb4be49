"""Figures: text lies within them and not over other text; the same bytes each time; colours differ in grey."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from small_run import START, line_of, small_record, small_run

from tlt_hpc.common.records import PhaseSpan, RolloutTiming
from tlt_hpc.extras.report.analysis.acceptance import ACCEPTANCE
from tlt_hpc.extras.report.analysis.comparison import analyse_comparison
from tlt_hpc.extras.report.analysis.learning import analyse_learning
from tlt_hpc.extras.report.analysis.lengths import LENGTHS
from tlt_hpc.extras.report.analysis.survey import take
from tlt_hpc.extras.report.analysis.throughput import THROUGHPUT
from tlt_hpc.extras.report.analysis.timeline import analyse_timeline
from tlt_hpc.extras.report.figures.steps import (
    draw_acceptance,
    draw_comparison,
    draw_learning,
    draw_lengths,
    draw_throughput,
)
from tlt_hpc.extras.report.figures.style import THEMES, save, themed
from tlt_hpc.extras.report.figures.timeline import draw_timeline
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

FIGURES: dict[str, Any] = {
    "timeline": lambda run: draw_timeline(analyse_timeline(run)),
    "lengths": lambda run: draw_lengths(take(run, LENGTHS)),
    "acceptance": lambda run: draw_acceptance(take(run, ACCEPTANCE)),
    "learning": lambda run: draw_learning(analyse_learning(run)),
    "throughput": lambda run: draw_throughput(take(run, THROUGHPUT)),
    "comparison": lambda run: draw_comparison(analyse_comparison([run, run])),
}
CASES = ("few", "begun", "ranks", "refill", "long")


def make_run(path: Path, case: str) -> RunLog:
    """The runs that the figures are tried on."""
    folder = RunFolder(path)
    if case == "begun":
        folder.create()
    elif case == "ranks":
        small_run(path, num_steps=1, num_ranks=40)
    elif case == "refill":
        before = PhaseSpan("testing", START - 400, START - 1)
        for rank, lasts in ((0, (1.0, 9.0)), (1, (3.0, 8.5))):
            first = RolloutTiming(START, START + lasts[0], START + 4)
            again = RolloutTiming(START + 8, START + lasts[1], START + 10)
            changes = {"timing": first, "refills": (again,), "micro_steps": (), "phases": (before,)}
            write_step(folder.rollout_log(0, rank), small_record(0, rank, **changes))
    else:
        num_steps = 3 if case == "few" else 60
        small_run(path, num_steps, 2 if case == "few" else 1)
        lines = [line_of(step, **{"val-core/gsm8k/acc/mean@8": 0.1 * step}) for step in range(num_steps)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunLog(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunLog]:
    """Each made once."""
    return {case: make_run(tmp_path_factory.mktemp(case) / "run", case) for case in CASES}


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_written_over(runs: dict[str, RunLog], name: str, case: str) -> None:
    if case == "begun" and name == "timeline":
        pytest.skip("there is no step to show")
    with themed("light"):
        figure = FIGURES[name](runs[case])
        figure.canvas.draw()
        shown, whole = texts_of(figure), figure.bbox
    for text, box in shown:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
        assert inside, f"{text!r} leaves the figure: {box} of {whole}"
    for (a, first), (b, second) in combinations(shown, 2):
        assert overlap(first, second) < 4, f"{a!r} lies over {b!r}"


@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_text_and_the_same_bytes_each_time(runs: dict[str, RunLog], tmp_path: Path, name: str) -> None:
    before, saved = mpl.rcParams["figure.facecolor"], []
    for place in ("a", "b"):
        with themed("dark"):
            paths = save(FIGURES[name](runs["few"]), tmp_path / place, name)
        assert [path.name for path in paths] == [f"{name}.png", f"{name}.svg"]
        saved.append([path.read_bytes() for path in paths])
    assert saved[0] == saved[1] and mpl.rcParams["figure.facecolor"] == before
    svg = saved[0][1].decode()
    assert svg.count("<text") > 10 and THEMES["dark"]["background"] in svg and len(svg) < 400_000
