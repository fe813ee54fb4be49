"""Analyses of runs: prints one paragraph of what was found, and writes a figure as PNG and SVG.

    python tools/look.py timeline runs/tiny --step 7     # which rank did what when in one step
    python tools/look.py throughput runs/tiny            # where the seconds go, and tokens per second
    python tools/look.py acceptance runs/tiny            # tokens per target pass, and which strategies were chosen
    python tools/look.py lengths runs/tiny               # response lengths, and how many were cut
    python tools/look.py learning runs/tiny              # score, KL, entropy, gradients, evaluations
    python tools/look.py compare runs/plain runs/tail    # runs side by side: the same tokens? seconds

Needs neither torch nor MPI: it runs on a login node, or on a laptop with a copy of the run's folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.script import run_script

# isort: split
from tlt_hpc.extras.report.analysis.acceptance import ACCEPTANCE
from tlt_hpc.extras.report.analysis.comparison import analyse_comparison
from tlt_hpc.extras.report.analysis.learning import analyse_learning
from tlt_hpc.extras.report.analysis.lengths import LENGTHS
from tlt_hpc.extras.report.analysis.survey import Survey, run_survey
from tlt_hpc.extras.report.analysis.throughput import THROUGHPUT
from tlt_hpc.extras.report.analysis.timeline import analyse_timeline
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.plan.plan_options import parse_positive_integer
from tlt_hpc.storage.folder import GIVE_OUTPUT, check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tlt_hpc.extras.report.analysis.base import Analysis

SURVEYS: dict[str, Survey[Any]] = {"throughput": THROUGHPUT, "acceptance": ACCEPTANCE, "lengths": LENGTHS}
NAMES = ("timeline", *SURVEYS, "learning", "compare")


def main(arguments: Sequence[str] | None = None) -> None:
    """Analyse, draw and print."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", choices=NAMES)
    parser.add_argument("run", metavar="RUN", type=Path, nargs="+", help="a run's folder; to compare: two or more")
    parser.add_argument("--step", metavar="N", type=int, help="of the timeline, from 1 (default: the last whole one)")
    parser.add_argument(
        "--last", metavar="N", type=parse_positive_integer, help="look at the last N steps alone (default: all)"
    )
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write (default: RUN/figures)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON, too; - for standard output")
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="default: light")
    options = parser.parse_args(arguments)
    if options.what != "compare" and len(options.run) > 1:
        raise UserError(f"{options.what} takes one run; `compare` takes several")
    found = analyse(options.what, [RunLog(path, options.last) for path in options.run], options.step)
    say = partial(print, file=sys.stderr if options.json == "-" else sys.stdout)
    say(found.verdict)
    for problem in found.problems:
        say(f"left out: {problem}")
    if found.has_data:
        folder = options.output or options.run[0] / "figures"
        check_writable(folder, GIVE_OUTPUT)
        for path in draw(options.what, found, folder, options.theme):
            say(f"wrote {path}")
    else:
        say("no figure: there is nothing to draw yet")
    if options.json:
        write_json(found.to_json(), options.json)


def analyse(what: str, runs: list[RunLog], step: int | None) -> Analysis:
    """The analysis of a name."""
    if what == "compare":
        return analyse_comparison(runs)
    if what == "timeline":
        return analyse_timeline(runs[0], step)
    if what == "learning":
        return analyse_learning(runs[0])
    found: Analysis = run_survey(runs[0], SURVEYS[what])
    return found


def draw(what: str, found: Any, folder: Path, theme: str) -> list[Path]:
    """Write the figure."""
    from tlt_hpc.extras.report.figures import steps, style, timeline  # take a second to import: not for --help

    drawings: dict[str, Callable[[Any], Figure]] = {
        "timeline": timeline.draw_timeline,
        "throughput": steps.draw_throughput,
        "acceptance": steps.draw_acceptance,
        "lengths": steps.draw_lengths,
        "learning": steps.draw_learning,
        "compare": steps.draw_comparison,
    }
    with style.themed(theme):
        figure = drawings[what](found)
        figure.suptitle(f"{found.run}: {what}", x=0.01, ha="left", fontsize=12, fontweight="bold")
        return style.save_figure(figure, folder, f"{what}-{theme}")


def write_json(tree: dict[str, Any], place: str) -> None:
    """Write JSON to a file, or to standard output for ``-``."""
    text = json.dumps(tree, indent=1, allow_nan=False) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        Path(place).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_script("look", main))
