"""How long a run's responses are, by step and over all, and how many were cut at the cap.

    python tools/lengths.py runs/tiny --theme both

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

from tlt_hpc.look.analysis.lengths import analyse_lengths


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the verdict and write the figure."""
    options = make_parser(
        "How long a run's responses are, by step and over all, and how many were cut at the cap."
    ).parse_args(arguments)
    found = analyse_lengths(open_run(options.run, options.last))
    from tlt_hpc.look.figures.steps import draw_lengths

    show(options, "lengths", found, draw_lengths)


if __name__ == "__main__":
    sys.exit(ending("lengths", main))
