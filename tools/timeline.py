"""Which rank did what when in one step of a run: prefill, decoding, drafter training in the tail, idle, update.

    python tools/timeline.py runs/tiny --step 7 --theme both

Knows no torch and no MPI: it runs on a login node, or on a laptop over a copy of the run's folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from look import make_parser, open_run, show

from tlt_hpc.look.analysis.timeline import analyse_timeline


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the verdict and write the figure."""
    parser = make_parser("Which rank did what when in one step of a run.")
    parser.add_argument("--step", type=int, help="default: the last one with the logs of all its ranks")
    options = parser.parse_args(arguments)
    found = analyse_timeline(open_run(options.run, options.last), options.step)
    from tlt_hpc.look.figures.timeline import draw_timeline

    show(options, f"timeline-{found.step:06d}" if options.step is not None else "timeline", found, draw_timeline)


if __name__ == "__main__":
    sys.exit(ending("timeline", main))
