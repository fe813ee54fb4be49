"""Costs if nothing was measured: a GPU's published figures, a model's sizes, and the TLT paper's speed-ups.

The paper's figures (arXiv 2511.16665) are second-hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.extras.simulate.costs import Floats, TokenCosts, with_speed_ups
from tlt_hpc.extras.simulate.step import StepPhases
from tlt_hpc.models.shape import ModelShape

ITEM_BYTES = 2
"""Bytes of a weight, a key and a value: bfloat16."""
UPDATE_PASSES = 5
"""Forward passes that an update is worth: old log-probabilities 1, forward 1, recomputed 1, backward 2."""
SPEED_UPS: dict[str, tuple[float, ...]] = {"verify-16": (3.22, 3.01, 2.67, 2.48), "verify-64": (3.62, 2.98, 1.91, 1.70)}
SPEED_UP_BATCHES = (1, 4, 16, 32)
"""Batches of ``SPEED_UPS``, which the paper measured with Qwen2.5-32B on 4 GPUs at depth 10."""
DEPTH = 10


@dataclass(frozen=True)
class GpuFigures:
    """An H100-class GPU; shares are the part of the published figures that decoding and training reach."""

    bytes_per_second: float = 3.35e12
    flops: float = 990e12
    bytes_share: float = 0.7
    decode_flops_share: float = 0.5
    update_flops_share: float = 0.35
    fixed_step_seconds: float = 5.0
    """Seconds of every step: handing weights to the engine, loading optimiser state, rewards."""
    save_seconds: float = 0.1
    """Seconds by which a save delays a step: 97 ms, selective and asynchronous (TLT paper, second-hand)."""


def gpu_costs(shape: ModelShape, tensor_parallel: int, most_live: int, gpu: GpuFigures) -> TokenCosts:
    """Plain decoding on ``tensor_parallel`` GPUs: a round reads weights and keys, or is bound by its products."""
    batch = np.arange(1, most_live + 1)
    bandwidth = gpu.bytes_per_second * gpu.bytes_share * tensor_parallel
    flops = gpu.flops * gpu.decode_flops_share * tensor_parallel
    weights = parameters_read_per_round(shape)
    token = np.maximum(ITEM_BYTES * weights / bandwidth, 2 * weights * batch / flops)
    position_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ITEM_BYTES
    position = np.full((1, most_live), position_bytes / bandwidth)
    return TokenCosts(token[None, :], position, 2 * weights / flops)


def gpu_phases(shape: ModelShape, gpu: GpuFigures, save_every: int) -> StepPhases:
    """The rest of a step on such GPUs; sharded state is assumed to cost nothing more."""
    token = 2 * UPDATE_PASSES * shape.num_parameters / (gpu.flops * gpu.update_flops_share)
    return StepPhases(token, gpu.fixed_step_seconds + gpu.save_seconds / save_every)


def parameters_read_per_round(shape: ModelShape) -> int:
    """Weights that a decoding round reads: all but the embedding's rows."""
    return shape.num_parameters - (0 if shape.tied_head else shape.vocab_size * shape.hidden_size)


def speculative_costs(plain: TokenCosts, derating: float) -> TokenCosts:
    """``plain`` and the paper's strategies, linear in log2 of the batch and beyond the last on its slope.

    Args:
        derating: factor on the paper's speed-ups, as ``derating_of``.
    """
    at, log = np.log2(SPEED_UP_BATCHES), np.log2(np.arange(1, plain.most_live + 1))
    gains = list[Floats]()
    for points in SPEED_UPS.values():
        slope = (points[-1] - points[-2]) / (at[-1] - at[-2])
        curve = np.where(log > at[-1], points[-1] + slope * (log - at[-1]), np.interp(log, at, points))
        gains.append(derating * np.maximum(curve, 0.1))
    return with_speed_ups(plain, gains)


def derating_of(reference: ModelShape, shape: ModelShape) -> float:
    """Speed-up on ``shape`` over that on ``reference`` at one sequence, if draft steps cost what they read.

    The chance that a draft is accepted is the one that explains the reference's speed-up of a narrow draft at depth 10;
    the other model uses the depth that is best for it.
    """
    return _best_speed_up(reference, shape) / SPEED_UPS["verify-16"][0]


def _best_speed_up(reference: ModelShape, shape: ModelShape) -> float:
    """Speed-up of a narrow draft on ``shape`` at one sequence, at the depth that is best for it."""
    chance = acceptance_chance(SPEED_UPS["verify-16"][0] * (1 + DEPTH * _draft_share(reference)), DEPTH)
    return max(expected_tokens(chance, depth) / (1 + depth * _draft_share(shape)) for depth in range(1, 2 * DEPTH + 1))


def _draft_share(shape: ModelShape) -> float:
    """Bytes that a draft step of a one-layer drafter reads, over those of a target round: a layer, fc and the head."""
    head = shape.vocab_size * shape.hidden_size
    layer = (parameters_read_per_round(shape) - head) / shape.num_layers
    return (layer + 2 * shape.hidden_size**2 + head) / parameters_read_per_round(shape)


def expected_tokens(chance: float, depth: int) -> float:
    """Tokens of a round in which each draft is accepted with this chance, given those before it."""
    return float(sum(chance**i for i in range(depth + 1)))


def acceptance_chance(accept: float, depth: int) -> float:
    """The chance with which a round of this depth gives ``accept`` tokens: the inverse of ``expected_tokens``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, depth) < accept else (low, middle)
    return (low + high) / 2
