"""The paper's gains by nodes, predicted from the one-node gain of the 7B model alone; every assumption is listed.

One number is fitted, the median response length; nothing else is turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.simulate import published
from tlt_hpc.plan.simulate.card import Card, card_costs
from tlt_hpc.plan.simulate.lengths import SPREAD, LogNormal, deal
from tlt_hpc.plan.simulate.published import Drafting
from tlt_hpc.plan.simulate.step import Phases, Setting, simulate

STEPS = 40
WITHIN = 0.10
_MOST_LIVE = 512
_NO_PHASES = Phases()


@dataclass(frozen=True)
class Assumptions:
    """What the paper does not say, or says in one figure. ``SOURCES`` has where each comes from."""

    responses: float = 512
    tensor_parallel: int = 4
    spread: float = SPREAD
    prompt_share: float = 0.0
    cap: float = published.CAP
    threshold: float = published.THRESHOLD
    rollout_share: float = published.ROLLOUT_SHARE
    share_everywhere: bool = True
    steps_cost: bool = True
    speed_up: float = 1.0
    bytes_share: float = Card.bytes_share
    decode_flops_share: float = Card.decode_flops_share


SOURCES = {
    "responses": "responses a step, any number of nodes: 64 prompts x 8, public 7B script",
    "tensor_parallel": "cards a replica: the paper's for 32B; for 7B the public script's",
    "spread": "log-normal lengths: spread of tlt bench's long tail",
    "prompt_share": "of the variance, between prompts: lengths are independent",
    "cap": "most tokens: the paper's 32k",
    "threshold": "speculation at so many live sequences or fewer: the paper's 32",
    "rollout_share": "of a plain step: the paper's 85 %",
    "share_everywhere": "that share at every number of nodes; no: at one, updates scaling ideally",
    "steps_cost": "speed-ups (32B) derated to the model by what a draft step reads: ours, without a fit",
    "speed_up": "factor on what speculation gains",
    "bytes_share": "of the card's 3.35 TB/s that decoding reaches: assumed",
    "decode_flops_share": "of its 990 TFLOP/s: assumed",
}


@dataclass(frozen=True)
class Models:
    small: ModelShape
    large: ModelShape


@dataclass(frozen=True)
class Prediction:
    """Gains by nodes for both models; ``derating`` is the smaller model's share of the published speed-up."""

    median: float
    small: dict[int, float]
    large: dict[int, float]
    derating: float

    def rows(self) -> list[tuple[str, int, float, float, bool]]:
        """Model, nodes, published, predicted, and whether it was fitted."""
        found = [("7B", nodes, gain, self.small[nodes], nodes == 1) for nodes, gain in published.GAINS_7B.items()]
        return found + [("32B", nodes, gain, self.large[nodes], False) for nodes, gain in published.GAINS_32B.items()]

    @property
    def worst(self) -> float:
        """The largest relative error of what was not fitted."""
        return max(abs(predicted / gain - 1) for _, _, gain, predicted, fitted in self.rows() if not fitted)


def predict(models: Models, assumed: Assumptions, steps: int = STEPS, seed: int = 0) -> Prediction:
    """Fit the median length on the 7B's gain on one node, and predict the rest.

    Raises:
        ValueError: no median gives that gain.
    """
    median = _fit(models, assumed, steps, seed)
    small = gains(models.small, models, tuple(published.GAINS_7B), median, assumed, steps, seed)
    large = gains(models.large, models, tuple(published.GAINS_32B), median, assumed, steps, seed)
    factor = published.derating(models.large, models.small) if assumed.steps_cost else 1.0
    return Prediction(median, small, large, factor)


def gains(
    shape: ModelShape,
    models: Models,
    nodes: Sequence[int],
    median: float,
    assumed: Assumptions,
    steps: int = STEPS,
    seed: int = 0,
) -> dict[int, float]:
    """Plain step over speculative step, by nodes."""
    one = _rollouts(shape, models, nodes[0], median, assumed, steps, seed)
    found = {}
    share = assumed.rollout_share
    for count in nodes:
        plain, fast = _rollouts(shape, models, count, median, assumed, steps, seed)
        rest = plain if assumed.share_everywhere else one[0] * nodes[0] / count
        rest *= (1 - share) / share
        found[count] = (plain + rest) / (fast + rest)
    return found


def _rollouts(
    shape: ModelShape, models: Models, nodes: int, median: float, assumed: Assumptions, steps: int, seed: int
) -> tuple[float, float]:
    """Seconds of rollouts, plain and speculative, of the same lengths."""
    card = Card(bytes_share=assumed.bytes_share, decode_flops_share=assumed.decode_flops_share)
    replicas = nodes * published.GPUS_PER_NODE // assumed.tensor_parallel
    law = LogNormal(median, round(assumed.cap), assumed.spread, assumed.prompt_share)
    drawn = law.draw(steps, round(assumed.responses), 1, np.random.default_rng(seed))
    lengths = deal(drawn, replicas, "sample")
    plain = card_costs(shape, assumed.tensor_parallel, _MOST_LIVE, card)
    drafting = Drafting(models.large, assumed.steps_cost, assumed.speed_up)
    fast = drafting.costs(plain, shape, round(assumed.threshold))
    setting = Setting(assumed.tensor_parallel, _MOST_LIVE)
    rest = simulate(lengths, plain, setting, _NO_PHASES), simulate(lengths, fast, setting, _NO_PHASES)
    return float(rest[0].rollout_seconds.mean()), float(rest[1].rollout_seconds.mean())


def _fit(models: Models, assumed: Assumptions, steps: int, seed: int) -> float:
    low, high, wanted = 50.0, assumed.cap, published.GAINS_7B[1]

    def gain(median: float) -> float:
        return gains(models.small, models, (1,), median, assumed, steps, seed)[1]

    if not gain(high) <= wanted <= gain(low):
        raise ValueError(f"no median length gives the 7B model's gain of {wanted} on one node under these assumptions")
    for _ in range(14):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > wanted else (low, middle)
    return float((low * high) ** 0.5)


def sensitivity(models: Models, assumed: Assumptions, steps: int = STEPS) -> list[dict[str, Any]]:
    """Each assumption a quarter down and up, the other way round where it is yes or no; the median fitted anew."""
    rows = []
    for name, value in vars(assumed).items():
        turned: list[Any] = [not value] if isinstance(value, bool) else [0.75 * value, 1.25 * value]
        if name == "tensor_parallel":
            turned = [value // 2, value * 2]
        if name == "prompt_share":
            turned = [0.5]
        if name == "rollout_share":
            turned = [0.75 * value, min(1.25 * value, 0.99)]
        for changed in turned:
            try:
                found = predict(models, replace(assumed, **{name: changed}), steps)
            except ValueError:
                rows.append({"assumption": name, "value": changed, "gains": None})
                continue
            gain = {"7B": found.small, "32B": found.large}
            rows.append(
                {"assumption": name, "value": changed, "gains": gain, "worst": found.worst, "median": found.median}
            )
    return rows
