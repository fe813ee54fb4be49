"""Writes the batch scripts in sbatch/ as tlt_hpc/cluster/scripts.py describes them; edit there, then call this.

python tools/make_batch_scripts.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.cluster.batch import render
from tlt_hpc.cluster.scripts import SCRIPTS

FOLDER = Path(__file__).resolve().parent.parent / "sbatch"


def main() -> None:
    for name, batch in SCRIPTS.items():
        path = FOLDER / f"{name}.sh"
        path.write_text(render(batch))
        path.chmod(0o755)
        print(path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    sys.exit(ending("make_batch_scripts", main))
