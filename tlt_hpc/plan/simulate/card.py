"""What a card needs for a round, from its published figures and a model's sizes, where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.simulate.costs import Costs
from tlt_hpc.plan.simulate.step import Phases

ITEM_BYTES = 2
"""Of a weight, a key and a value: bfloat16."""


@dataclass(frozen=True)
class Card:
    """An H100-class card; shares are of the published figures, as decoding and training reach them."""

    bytes_per_second: float = 3.35e12
    flops: float = 990e12
    bytes_share: float = 0.7
    decode_flops_share: float = 0.5
    update_flops_share: float = 0.35
    fixed_step_seconds: float = 5.0
    """Of a step: handing weights to the engine, loading optimiser state, rewards."""
    save_seconds: float = 0.1
    """By which a save holds a step up: 97 ms, selective and asynchronous (TLT paper, arXiv 2511.16665, second-hand)."""


UPDATE_PASSES = 5
"""Forward passes that an update is worth: old log-probabilities 1, forward 1, repeated 1, backward 2."""


def card_costs(shape: ModelShape, tensor_parallel: int, most_live: int, card: Card) -> Costs:
    """Plain decoding on ``tensor_parallel`` cards: weights and keys are read once a round, or products take longer."""
    batch = np.arange(1, most_live + 1)
    bandwidth = card.bytes_per_second * card.bytes_share * tensor_parallel
    flops = card.flops * card.decode_flops_share * tensor_parallel
    weights = read_parameters(shape)
    token = np.maximum(ITEM_BYTES * weights / bandwidth, 2 * weights * batch / flops)
    position = np.full((1, most_live), position_bytes(shape) / bandwidth)
    return Costs(("off",), token[None, :], position, 2 * weights / flops)


def card_phases(shape: ModelShape, card: Card, save_every: int) -> Phases:
    """The rest of a step on such cards; sharded state is taken to cost nothing more."""
    token = 2 * UPDATE_PASSES * shape.num_parameters / (card.flops * card.update_flops_share)
    return Phases(token, card.fixed_step_seconds, card.save_seconds, save_every)


def position_bytes(shape: ModelShape) -> int:
    """Keys and values of one position, over all cards of a replica."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * ITEM_BYTES


def read_parameters(shape: ModelShape) -> int:
    """Weights that a decoding round reads: all but the embedding's rows."""
    return shape.num_parameters - (0 if shape.tied_head else shape.vocab_size * shape.hidden_size)


def draft_share(shape: ModelShape) -> float:
    """Bytes that a draft step of a one-layer drafter reads, over those of a target round: a layer, fc and the head."""
    head = shape.vocab_size * shape.hidden_size
    layer = (read_parameters(shape) - head) / shape.num_layers
    return (layer + 2 * shape.hidden_size**2 + head) / read_parameters(shape)
