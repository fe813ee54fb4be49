"""Figures: everything that is written lies within them and over nothing else; alike each time; readable in grey."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from small_run import START, line_of, small_record, small_run

from tlt_hpc.common.records import PhaseSpan, RolloutTiming
from tlt_hpc.look.analysis.acceptance import analyse_acceptance
from tlt_hpc.look.analysis.comparison import analyse_comparison
from tlt_hpc.look.analysis.kinds import Kind
from tlt_hpc.look.analysis.learning import analyse_learning
from tlt_hpc.look.analysis.lengths import analyse_lengths
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.throughput import analyse_throughput
from tlt_hpc.look.analysis.timeline import analyse_timeline
from tlt_hpc.look.figures.steps import draw_acceptance, draw_comparison, draw_learning, draw_lengths, draw_throughput
from tlt_hpc.look.figures.style import DARK, HATCHES, LIGHT, PAGE, PHONE, THEMES, WIDE, Layout, save, theme, themed
from tlt_hpc.look.figures.timeline import draw_timeline
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step


def compared(run: RunLog) -> Any:
    return analyse_comparison([run, run])


FIGURES = {
    "timeline": (analyse_timeline, draw_timeline),
    "lengths": (analyse_lengths, draw_lengths),
    "acceptance": (analyse_acceptance, draw_acceptance),
    "learning": (analyse_learning, draw_learning),
    "throughput": (analyse_throughput, draw_throughput),
    "comparison": (compared, draw_comparison),
}
CASES = ("few", "begun", "ranks", "one", "refill", "long")


def make_run(path: Path, case: str) -> RunLog:
    """The runs that the figures are tried on."""
    if case == "begun":
        RunFolder(path).create()
    elif case == "ranks":
        small_run(path, num_steps=1, num_ranks=40)
    elif case == "refill":
        folder = RunFolder(path)
        before = PhaseSpan("testing", START - 400, START - 1)
        for rank, lasts in ((0, (1.0, 9.0)), (1, (3.0, 8.5))):
            first = RolloutTiming(START, START + lasts[0], START + 4)
            again = RolloutTiming(START + 8, START + lasts[1], START + 10)
            changes = {"timing": first, "refills": (again,), "micro_steps": (), "phases": (before,)}
            write_step(folder.rollout_log(0, rank), small_record(0, rank, **changes))
    elif case == "one":
        small_run(path, num_steps=1, num_ranks=1)
    elif case == "long":
        folder = RunFolder(path)
        for step in range(150):
            write_step(folder.rollout_log(step, 0), small_record(step, 0, 1))
        folder.metrics.write_text("".join(json.dumps(line_of(step)) + "\n" for step in range(150)))
    else:
        folder = small_run(path)
        lines = [line_of(step, **{"val-core/gsm8k/acc/mean@8": 0.1 * step}) for step in range(3)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunLog(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunLog]:
    """Each made once."""
    return {case: make_run(tmp_path_factory.mktemp(case) / "run", case) for case in CASES}


def written(figure: Figure) -> list[tuple[str, Bbox]]:
    """All text that shows, with where it is; drawn before."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [t for t in figure.findobj(mpl.text.Text) if t.get_visible() and t.get_text().strip()]
    hidden = {id(t) for axes in figure.axes if not axes.get_visible() for t in axes.findobj(mpl.text.Text)}
    shown = []
    for axes in figure.axes:  # ticks beyond the limits are there, and not drawn
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high or not tick.label1.get_visible():
                    hidden |= {id(tick.label1), id(tick.label2)}
    for text in texts:
        box = text.get_window_extent(renderer)
        if id(text) not in hidden and box.width > 0:
            shown.append((text.get_text(), box))
    return shown


def overlap(a: Bbox, b: Bbox) -> float:
    """Of two boxes, in square pixels."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(0.0, width) * max(0.0, height)


@pytest.mark.parametrize("arranged", (WIDE, PAGE, PHONE), ids=lambda layout: layout.name)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_written_over(runs: dict[str, RunLog], name: str, case: str, arranged: Layout) -> None:
    if arranged is PAGE and case != "few":
        pytest.skip("differs from the wide one by its title alone")
    if case == "begun" and name == "timeline":
        pytest.skip("there is no step to show")
    analyse, draw = FIGURES[name]
    found = analyse(runs[case])
    with themed("light", arranged):
        figure = draw(found)
        figure.canvas.draw()
        shown = written(figure)
        whole = figure.bbox
        for text, box in shown:
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
            assert inside, f"{text!r} leaves the figure: {box} of {whole}"
        for (a, first), (b, second) in combinations(shown, 2):
            assert overlap(first, second) < 4, f"{a!r} lies over {b!r}"
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        for legend in legends:
            for axes in figure.axes:
                if axes.get_visible():
                    box = axes.get_window_extent()
                    assert overlap(legend.get_window_extent(), box) < 20, "a legend covers data"


def test_many_runs_of_long_names(tmp_path: Path) -> None:
    """The line below the headline tells of each."""
    logs = [RunLog(small_run(tmp_path / f"a-run-of-a-rather-long-name-{i}", num_steps=2).path) for i in range(6)]
    with themed("light"):
        figure = draw_comparison(analyse_comparison(logs))
        figure.canvas.draw()
        shown = written(figure)
    assert all(box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1 for _, box in shown)
    assert sum("a-run-of" in text for text, _ in shown) >= 6


@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_text_and_the_same_bytes_each_time(runs: dict[str, RunLog], tmp_path: Path, name: str) -> None:
    analyse, draw = FIGURES[name]
    found = analyse(runs["few"])
    saved = []
    for place in ("a", "b"):
        with themed("dark"):
            paths = save(draw(found), tmp_path / place, name)
        assert [path.name for path in paths] == [f"{name}-dark.png", f"{name}-dark.svg"]
        saved.append([path.read_bytes() for path in paths])
    assert saved[0] == saved[1]
    svg = saved[0][1].decode()
    assert svg.count("<text") > 10 and DARK.background in svg and "<dc:date>" not in svg
    assert len(svg) < 400_000


def test_a_theme_ends_with_its_block() -> None:
    before = mpl.rcParams["figure.facecolor"]
    with themed("dark") as chosen:
        assert theme() is chosen is DARK and mpl.rcParams["figure.facecolor"] == DARK.background
    assert theme() is LIGHT and mpl.rcParams["figure.facecolor"] == before


def lightness(colour: str) -> float:
    """CIE L*, 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = float(np.dot((0.2126, 0.7152, 0.0722), linear))
    return 116 * np.cbrt(luminance) - 16 if luminance > 0.008856 else 903.3 * luminance


@pytest.mark.parametrize("chosen", THEMES.values(), ids=THEMES)
def test_what_a_rollout_is_made_of_differs_in_grey(chosen) -> None:
    within = (Kind.PREFILL, Kind.DECODE, Kind.SPECULATE, Kind.TRAIN)
    for a, b in combinations(within, 2):
        assert abs(lightness(chosen.kinds[a]) - lightness(chosen.kinds[b])) > 7, (a, b)
    assert Kind.IDLE in HATCHES and chosen.kinds[Kind.IDLE] == chosen.background
    for colour in (chosen.ink, chosen.faint):
        assert abs(lightness(colour) - lightness(chosen.background)) > 50
    for colour in chosen.series:
        assert abs(lightness(colour) - lightness(chosen.background)) > 25, colour
    assert len(set(chosen.series)) == len(chosen.series) and set(chosen.kinds) == set(Kind)
