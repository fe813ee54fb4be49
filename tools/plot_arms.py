"""Draw by step how much faster the arms of ``tlt ablate`` generate than its first one, over runs with several seeds.

    python tools/plot_arms.py runs/moved0-ablate runs/moved1-ablate runs/moved2-ablate --output docs

Speed is that of decoding, by CPU seconds: in the figure sums over all runs and a window of steps, in the text by run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np

from tlt_hpc.look.figures import style
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.ablation_plan import ARMS

WINDOW, LAST = 12, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures")
    given = parser.parse_args()
    arms = [arm for arm in ARMS if (given.folders[0] / arm).is_dir()]
    runs = [[read_lines(folder / arm / "metrics.jsonl").values() for arm in arms] for folder in given.folders]
    seconds = np.array([[[line["rollout/decode_cpu_seconds"] for line in lines] for lines in run] for run in runs])
    for folder, run in zip(given.folders, seconds, strict=True):
        for what, sums in (("all steps", run.sum(1)), (f"last {LAST} steps", run[:, -LAST:].sum(1))):
            print(folder, what, *(f"{arm} {sums[0] / one:.2f}" for arm, one in zip(arms, sums, strict=True)), sep="  ")
    smooth = [np.convolve(one, np.ones(WINDOW), "valid") for one in seconds.sum(0)]
    for theme in style.THEMES:
        with style.themed(theme):
            figure = style.new_figure(2.6)
            axes = figure.subplots()
            for index, one in enumerate(smooth):
                style.line(axes, np.arange(len(one)) + WINDOW, smooth[0] / one, index, arms[index])
            style.panel(axes, f"Speed of decoding, {arms[0]} = 1, last {WINDOW} steps", x="step")
            axes.legend(ncols=len(arms))
            style.save(figure, given.output, f"drafter-ablation-{theme}")
    return 0


if __name__ == "__main__":
    sys.exit(ending("plot_arms", main))
