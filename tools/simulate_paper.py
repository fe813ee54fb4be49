"""The TLT paper's gains by nodes, predicted by the simulator from the one-node gain of the 7B model alone.

python tools/simulate_paper.py          # status 1: a prediction is more than 10 % off

One number is fitted, the median response length; docs/simulator.md has the sources of the assumptions. The paper's
figures (arXiv 2511.16665) are second-hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.simulate.assumed import GpuFigures, derating_of, gpu_costs, speculative_costs
from tlt_hpc.plan.simulate.lengths import SPREAD, LogNormal, deal
from tlt_hpc.plan.simulate.step import Setting, StepPhases, simulate

GAINS_7B = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}
GAINS_32B = {4: 1.83, 8: 2.12}
GPUS_PER_NODE, MAX_LIVE, STEPS, WITHIN = 8, 512, 40, 0.10
SMALL, LARGE = find_shape("Qwen2.5-7B", None), find_shape("Qwen2.5-32B", None)


@dataclass(frozen=True)
class Assumptions:
    """What the paper does not say, or says in one figure."""

    responses: float = 512
    tensor_parallel: int = 4
    spread: float = SPREAD
    prompt_share: float = 0.0
    cap: float = 32768
    threshold: float = 32
    """Speculation at this many live sequences or fewer: the paper's 2.44x, and the public 7B script's."""
    rollout_share: float = 0.85
    share_everywhere: bool = True
    steps_cost: bool = True
    speed_up: float = 1.0
    bytes_share: float = GpuFigures.bytes_share
    decode_flops_share: float = GpuFigures.decode_flops_share


def gains(shape: ModelShape, nodes: Sequence[int], median: float, assumed: Assumptions) -> dict[int, float]:
    """Plain step over speculative step, by nodes."""
    one, share, found = rollouts(shape, nodes[0], median, assumed), assumed.rollout_share, {}
    for count in nodes:
        plain, fast = rollouts(shape, count, median, assumed)
        rest = (plain if assumed.share_everywhere else one[0] * nodes[0] / count) * (1 - share) / share
        found[count] = (plain + rest) / (fast + rest)
    return found


def rollouts(shape: ModelShape, nodes: int, median: float, assumed: Assumptions) -> tuple[float, float]:
    """Seconds of rollouts of the same lengths, plain and speculative."""
    gpu = GpuFigures(bytes_share=assumed.bytes_share, decode_flops_share=assumed.decode_flops_share)
    law = LogNormal(median, round(assumed.cap), assumed.spread, assumed.prompt_share)
    drawn = law.draw(STEPS, round(assumed.responses), 1, np.random.default_rng(0))
    lengths = deal(drawn, nodes * GPUS_PER_NODE // assumed.tensor_parallel, "sample")
    plain = gpu_costs(shape, assumed.tensor_parallel, MAX_LIVE, gpu)
    derating = derating_of(LARGE, shape) if assumed.steps_cost else 1.0
    fast = speculative_costs(plain, derating, round(assumed.threshold), assumed.speed_up)
    setting = Setting(assumed.tensor_parallel, MAX_LIVE)
    seconds = [simulate(lengths, costs, setting, StepPhases()).rollout_seconds.mean() for costs in (plain, fast)]
    return float(seconds[0]), float(seconds[1])


def fit_median(assumed: Assumptions) -> float | None:
    """The median length that gives the 7B model's gain on one node; None if none does."""
    low, high, wanted = 50.0, assumed.cap, GAINS_7B[1]
    if not gains(SMALL, (1,), high, assumed)[1] <= wanted <= gains(SMALL, (1,), low, assumed)[1]:
        return None
    for _ in range(14):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gains(SMALL, (1,), middle, assumed)[1] > wanted else (low, middle)
    return float((low * high) ** 0.5)


def line(title: str, assumed: Assumptions) -> tuple[str, float]:
    """Predictions under these assumptions in words, and the largest relative error of what was not fitted."""
    median = fit_median(assumed)
    if median is None:
        return f"{title:28} no median length gives the gain on one node", float("inf")
    small = gains(SMALL, tuple(GAINS_7B), median, assumed)
    large = gains(LARGE, tuple(GAINS_32B), median, assumed)
    errors = [small[n] / GAINS_7B[n] - 1 for n in (2, 4, 8)] + [large[n] / GAINS_32B[n] - 1 for n in (4, 8)]
    worst = max(map(abs, errors))
    cells = " ".join(f"{gain:.2f}" for gain in (*small.values(), *large.values()))
    return f"{title:28} {cells}   {median:6,.0f} {worst:6.1%}{' *' * (worst > WITHIN)}", worst


def changed_values(name: str, value: Any) -> list[Any]:
    """A quarter down and up; the other value of a switch."""
    special = {"tensor_parallel": [value // 2, value * 2], "prompt_share": [0.5]}
    if isinstance(value, bool):
        return [not value]
    return special.get(name, [0.75 * value, min(1.25 * value, 0.99) if name == "rollout_share" else 1.25 * value])


def main() -> int:
    """Print the predictions, and how they change with each assumption."""
    print(f"{'nodes of 8 GPUs':28} 7B:1    2    4    8  32B:4  8   median  worst (* over 10 % off)")
    published = " ".join(f"{gain:.2f}" for gain in (*GAINS_7B.values(), *GAINS_32B.values()))
    print(f"{'published':28} {published}")
    words, worst = line("predicted", Assumptions())
    print(words)
    for name, value in vars(Assumptions()).items():
        for changed in changed_values(name, value):
            print(line(f"{name} = {changed:g}", replace(Assumptions(), **{name: changed}))[0], flush=True)
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(ending("simulate_paper.py", main))
