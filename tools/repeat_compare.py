"""Run ``tlt compare`` several times and print the medians: the project's figures for exactness and speed.

python tools/repeat_compare.py --times 10 --json runs/repeat.json -- jobs/tiny.toml --steps 6
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

Figures = dict[str, Any]


def run_once(arguments: list[str]) -> Figures:
    """One comparison's figures; its own output goes through.

    Raises:
        SystemExit: the command failed for another reason than unequal text.
    """
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "figures.json"
        command = [sys.executable, "-m", "tlt_hpc", "compare", *arguments, "--json", str(path)]
        status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        if not path.exists():
            raise SystemExit(f"{' '.join(command)}: status {status} and no figures")
        figures: Figures = json.loads(path.read_text())
        return figures


def summarise(runs: list[Figures]) -> Figures:
    """Counts of equal runs, and medians."""
    idle, harvested = (
        sum(run["runs"]["full"][f"{name}_rank_seconds"] for run in runs) for name in ("idle", "harvested")
    )
    modes = ("plain", "ngram", "full")
    return {
        "equal": {name: sum(bool(run["equal"][name]) for run in runs) for name in ("tokens", "rewards", "policy")},
        "tokens": sum(run["runs"]["plain"]["tokens"] for run in runs),
        "policies": sorted({found["policy_sha256"][:12] for run in runs for found in run["runs"].values()}),
        "speedup": {
            mode: {what: statistics.median(run["speedup"][mode][what] for run in runs) for what in ("rollout", "step")}
            for mode in modes
        },
        "accept_length": {
            mode: statistics.median(run["runs"][mode]["accept_length"] for run in runs) for mode in modes
        },
        "harvested_share": harvested / idle if idle else 0.0,
        "guarded_near_ties": sum(found["guarded_near_ties"] for run in runs for found in run["runs"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the summary and every run's figures there")
    parser.add_argument("arguments", nargs="+", help="what follows `tlt compare`")
    options = parser.parse_args()
    runs = []
    for number in range(1, options.times + 1):
        runs.append(run_once(options.arguments))
        print(f"{number:3d}  equal {runs[-1]['equal']}, speed {runs[-1]['speedup']['full']}", flush=True)
    summary = summarise(runs)
    print(json.dumps(summary, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps({"summary": summary, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(ending("repeat_compare", main))
