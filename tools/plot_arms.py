"""Draw by step how much faster the arms of ``tlt ablate`` generate than its first one, over runs with several seeds.

    python tools/plot_arms.py runs/moved0-ablate runs/moved1-ablate runs/moved2-ablate --output docs

Speed is that of decoding, by CPU seconds: sums over the seeds and over a window of steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np

from tlt_hpc.config import UserError
from tlt_hpc.look.figures import style
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.ablation_plan import ARMS

SECONDS, WINDOW = "rollout/decode_cpu_seconds", 12
NAME = "drafter-ablation"


def seconds_of(folder: Path, arm: str) -> list[float]:
    """CPU seconds of an arm's rollouts by step."""
    if lines := read_lines(folder / arm / "metrics.jsonl"):
        return [line[SECONDS] for line in lines.values()]
    raise UserError(f"{folder} has no steps of {arm}; give folders of tlt ablate with the same arms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures")
    given = parser.parse_args()
    arms = [arm for arm in ARMS if (given.folders[0] / arm).is_dir()]
    if len(arms) < 2:
        raise UserError(f"{given.folders[0]} has {len(arms)} arms; give folders of tlt ablate")
    sums = {arm: np.sum([seconds_of(folder, arm) for folder in given.folders], axis=0) for arm in arms}
    smooth = {arm: np.convolve(values, np.ones(WINDOW), "valid") for arm, values in sums.items()}
    steps = np.arange(len(smooth[arms[0]])) + WINDOW
    for theme in style.THEMES:
        with style.themed(theme):
            figure = style.new_figure(2.6)
            axes = figure.subplots()
            for index, arm in enumerate(arms):
                style.line(axes, steps, smooth[arms[0]] / smooth[arm], index, arm)
            style.panel(axes, f"Speed of decoding, {arms[0]} = 1, last {WINDOW} steps", x="step")
            axes.legend(ncols=len(arms))
            for path in style.save(figure, given.output, f"{NAME}-{theme}"):
                print(path)
    for arm in arms:
        print(f"{arm:11} {sums[arm].sum():7.1f} CPU seconds, {sums[arms[0]].sum() / sums[arm].sum():.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(ending("plot_arms", main))
