"""Several runs side by side: the same tokens or not, reward, lengths, seconds, accept length, waiting and harvest.

    python tools/compare_runs.py runs/plain runs/full --theme both

Figures go to the first run's folder where no other is given. Knows no torch and no MPI.
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

from tlt_hpc.look.analysis.comparison import MOST_TOKENS, analyse_comparison


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the verdict and write the figure."""
    parser = make_parser("Hold several runs side by side.", several=True)
    parser.add_argument(
        "--tokens",
        type=int,
        default=MOST_TOKENS,
        help=f"response tokens of a run to hold against the others' (default {MOST_TOKENS:,})",
    )
    options = parser.parse_args(arguments)
    found = analyse_comparison([open_run(path, options.last) for path in options.run], options.tokens)
    from tlt_hpc.look.figures.steps import draw_comparison

    show(options, "comparison", found, draw_comparison)


if __name__ == "__main__":
    sys.exit(ending("compare_runs", main))
