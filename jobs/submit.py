"""``tlt submit`` as a program of the clone, which runs the clone's own package, installed or not.

    python jobs/submit.py jobs/qwen7b.toml --script sbatch/train_qwen7b.sh --sweep run.seed=0,1,2
    python jobs/submit.py status FOLDER

Jobs are sent with submitit (tlt_hpc/cluster/executor.py); the options are those of ``tlt submit --help``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if (Path(__file__).resolve().parent.parent / "tlt_hpc").is_dir():  # else this is a copy beside an installed package
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script


def main(given: Sequence[str] | None = None) -> int:
    """Run ``tlt submit`` with these words; returns its exit status."""
    from tlt_hpc.cli.main import main as tlt

    return tlt(["submit", *(sys.argv[1:] if given is None else given)])


if __name__ == "__main__":
    sys.exit(run_script("submit", main))
