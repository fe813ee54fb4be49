"""How many tokens a target pass gave a sequence: by step, by live sequences, by strategy.

    python tools/acceptance.py runs/tiny --theme both

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

from tlt_hpc.look.analysis.acceptance import analyse_acceptance


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the verdict and write the figure."""
    options = make_parser(
        "How many tokens a target pass gave a sequence: by step, by live sequences, by strategy."
    ).parse_args(arguments)
    found = analyse_acceptance(open_run(options.run, options.last))
    from tlt_hpc.look.figures.steps import draw_acceptance

    show(options, "acceptance", found, draw_acceptance)


if __name__ == "__main__":
    sys.exit(ending("acceptance", main))
