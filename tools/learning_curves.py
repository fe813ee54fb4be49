"""Reward over RL steps of several algorithms and seeds on a job: runs what is missing, tables and draws all.

    python tools/learning_curves.py                                     # grpo, dapo, rloo; seeds 0, 1, 2; 60 steps
    python tools/learning_curves.py --algorithms grpo gspo --seeds 0 --steps 30 --plot curves.svg

Each run is `tlt train JOB algorithm.name=NAME run.seed=SEED`; one that was stopped goes on where it was, one that is
there is only read. The reward of a step is the mean score of its responses at the rollout's temperature; the curve
is the mean over the last five steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import read_lines

ROOT = Path(__file__).resolve().parent.parent

WINDOW = 5
GOAL = 0.8
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")

Curve = NDArray[np.float64]


def train(algorithm: str, seed: int, options: argparse.Namespace) -> Path:
    """The folder of a run of so many steps, which is made or gone on with where it is not there yet."""
    name = f"{algorithm}-{seed}"
    folder: Path = options.folder / name
    if len(read_lines(RunFolder(folder).metrics)) < options.steps:
        command = [sys.executable, "-m", "tlt_hpc", "train", str(options.job), f"run.name={name}"]
        command += [f"run.folder={options.folder}", f"run.seed={seed}", f"run.num_steps={options.steps}"]
        command += [f"algorithm.name={algorithm}", *options.override]
        print(f"{name}: training", flush=True)
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def rewards_of(folder: Path, num_steps: int) -> Curve:
    """Mean score of every step."""
    lines = read_lines(RunFolder(folder).metrics)
    return np.array([lines[step]["critic/score/mean"] for step in range(num_steps)])


def smooth(rewards: Curve) -> Curve:
    """Mean over the last five steps, or as many as there are."""
    sums = np.cumsum(np.concatenate([[0.0], rewards]))
    ends = np.arange(1, len(rewards) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def row_of(rewards: Curve) -> str:
    """First and last mean of five steps, and the step from which on the curve has reached the goal."""
    curve = smooth(rewards)
    reached = np.flatnonzero(curve >= GOAL)
    when = f"{reached[0] + 1}" if len(reached) else "-"
    return f"{rewards[:WINDOW].mean():.3f} | {curve[-1]:.3f} | {curve.max():.3f} | {when}"


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Every seed thin, their mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "tlt_hpc"
    figure, axes = pyplot.subplots(figsize=(7.2, 4.0), layout="constrained")
    for colour, (algorithm, rows) in zip(COLOURS, curves.items(), strict=False):
        steps = np.arange(1, len(rows[0]) + 1)
        for row in rows:
            axes.plot(steps, smooth(row), color=colour, linewidth=0.8, alpha=0.4)
        mean = np.mean([smooth(row) for row in rows], axis=0)
        axes.plot(steps, mean, color=colour, linewidth=2.2, label=f"{algorithm} ({len(rows)} seeds)")
    axes.axhline(GOAL, color="#555555", linewidth=0.8, linestyle="--")
    axes.set(xlabel="RL step", ylabel=f"reward, mean of {WINDOW} steps", xlim=(1, None))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "tiny.toml")
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "dapo", "rloo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("runs/curves"), help="where the runs are")
    parser.add_argument("--override", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of every run")
    parser.add_argument("--plot", type=Path, help="a .svg or .png to draw")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    curves: dict[str, list[Curve]] = {name: [] for name in options.algorithms}
    for seed in options.seeds:
        for name in options.algorithms:
            curves[name].append(rewards_of(train(name, seed, options), options.steps))
    print(f"| algorithm | seed | first {WINDOW} steps | last {WINDOW} | best {WINDOW} | {GOAL} reached at step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, rows in curves.items():
        for seed, row in zip(options.seeds, rows, strict=True):
            print(f"| {name} | {seed} | {row_of(row)} |")
    if options.plot:
        draw(curves, options.plot)
        print(f"drawn: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(ending("learning_curves", main))
