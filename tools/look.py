"""What the tools that look at runs share: their command line, where they write, what they print. Knows no figure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path[:1]:
    sys.path.insert(0, str(ROOT))

from tlt_hpc.common.errors import UserError  # noqa: E402
from tlt_hpc.look.analysis.result import Analysis  # noqa: E402
from tlt_hpc.look.analysis.run_log import RunLog  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = TypeVar("Found", bound=Analysis)


def make_parser(describe: str, several: bool = False) -> argparse.ArgumentParser:
    """Options that all of them have."""
    parser = argparse.ArgumentParser(description=describe)
    what = "the runs' folders, two or more" if several else "the run's folder, e.g. runs/tiny, or a copy of it"
    parser.add_argument("run", metavar="RUN", type=Path, nargs="+" if several else None, help=what)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where to write (default: RUN/figures)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON, too; - for standard output")
    parser.add_argument("--theme", choices=("light", "dark", "both"), default="both", help="default: both")
    parser.add_argument("--last", metavar="N", type=int, help="look at the last N steps alone (default: all)")
    return parser


def open_run(path: Path, last: int | None = None) -> RunLog:
    """A run to look at, its last steps alone where ``last`` says how many.

    Raises:
        UserError: there is none, or none of it is asked for.
    """
    if last is not None and last < 1:
        raise UserError(f"--last {last}: give 1 or more")
    return RunLog(path, last)


def show(options: argparse.Namespace, name: str, found: Found, draw: Callable[[Found], Figure]) -> None:
    """Print the verdict, draw, and say what was written."""
    first: Path = options.run[0] if isinstance(options.run, list) else options.run
    to_standard_output = options.json == "-"
    say = print_to_errors if to_standard_output else print
    say(found.verdict)
    for problem in found.problems:
        say(f"left out: {problem}")
    if not found.has_data:
        say("no figure: there is nothing to draw yet")
    else:
        for path in _draw(name, found, draw, options.out or first / "figures", options.theme):
            say(f"wrote {path}")
    if options.json:
        write_json(found.to_json(), options.json)
    if options.json and not to_standard_output:
        say(f"wrote {options.json}")


def write_json(tree: dict[str, Any], place: str) -> None:
    """To a file, or for ``-`` to standard output."""
    text = json.dumps(tree, indent=1, allow_nan=False) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        Path(place).write_text(text, encoding="utf-8")


def print_to_errors(text: str) -> None:
    """Where standard output is for the figures alone."""
    print(text, file=sys.stderr)


def _draw(name: str, found: Found, draw: Callable[[Found], Figure], folder: Path, theme: str) -> list[Path]:
    from tlt_hpc.look.figures.style import THEMES, save, themed  # takes a second to import: not for --help

    paths = []
    for each in THEMES if theme == "both" else (theme,):
        with themed(each):
            paths += save(draw(found), folder, name)
    return paths
