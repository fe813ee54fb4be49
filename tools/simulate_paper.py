"""The TLT paper's gains by nodes, predicted by the simulator from the one-node gain of the 7B model alone.

python tools/simulate_paper.py          # status 1: a prediction is more than 10 % off

One number is fitted, the median response length; docs/simulator.md has the assumptions, and what changing them does.
The paper's figures (arXiv 2511.16665) are second-hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.simulate.assumed import GpuFigures, derating_of, gpu_costs, speculative_costs
from tlt_hpc.plan.simulate.lengths import log_normal, shard_lengths
from tlt_hpc.plan.simulate.step import Setting, StepPhases, simulate

GAINS_7B = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}
GAINS_32B = {4: 1.83, 8: 2.12}
GPUS_PER_NODE, MAX_LIVE, STEPS, WITHIN = 8, 512, 40, 0.10
SMALL, LARGE = find_shape("Qwen2.5-7B", None), find_shape("Qwen2.5-32B", None)
# What the paper does not say, or says in one figure:
RESPONSES, TENSOR_PARALLEL, CAP, ROLLOUT_SHARE = 512, 4, 32768, 0.85
THRESHOLD = 32
"""Speculation at this many live sequences or fewer: the paper's 2.44x, and the public 7B script's."""


def gains(shape: ModelShape, nodes: Sequence[int], median: float) -> list[float]:
    """Plain step over speculative step, by nodes."""
    found = []
    for count in nodes:
        plain, fast = rollouts(shape, count, median)
        rest = plain * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE
        found.append((plain + rest) / (fast + rest))
    return found


def rollouts(shape: ModelShape, nodes: int, median: float) -> tuple[float, float]:
    """Seconds of rollouts of the same lengths, plain and speculative."""
    drawn = log_normal((STEPS, RESPONSES, 1), median, CAP, prompt_share=0.0)
    lengths = shard_lengths(drawn, nodes * GPUS_PER_NODE // TENSOR_PARALLEL, "sample")
    plain = gpu_costs(shape, TENSOR_PARALLEL, MAX_LIVE, GpuFigures())
    fast = speculative_costs(plain, derating_of(LARGE, shape), THRESHOLD)
    setting = Setting(TENSOR_PARALLEL, MAX_LIVE)
    seconds = [simulate(lengths, costs, setting, StepPhases()).rollout_seconds.mean() for costs in (plain, fast)]
    return float(seconds[0]), float(seconds[1])


def fit_median() -> float:
    """The median length that gives the 7B model's gain on one node."""
    low, high = 50.0, float(CAP)
    for _ in range(14):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gains(SMALL, (1,), middle)[0] > GAINS_7B[1] else (low, middle)
    return float((low * high) ** 0.5)


def main() -> int:
    """Print the published gains and the predictions."""
    median = fit_median()
    published = [*GAINS_7B.values(), *GAINS_32B.values()]
    predicted = [*gains(SMALL, tuple(GAINS_7B), median), *gains(LARGE, tuple(GAINS_32B), median)]
    print("nodes of 8 GPUs  7B:1    2    4    8  32B:4  8")
    for title, values in (("published", published), ("predicted", predicted)):
        print(f"{title:15} ", *(f"{value:.2f}" for value in values))
    worst = max(abs(one / other - 1) for one, other in zip(predicted, published, strict=True))
    print(f"median length {median:,.0f}; largest error {worst:.1%}")
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(ending("simulate_paper.py", main))
