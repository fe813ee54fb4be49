"""The figures of one step's update, and the sums that they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World


@dataclass(frozen=True)
class RolloutMismatch:
    """The distance of the probabilities recorded in a step's rollout from the trainer's before the update."""

    rollout_probs_diff_mean: float
    """Mean distance of a token's probability."""
    rollout_probs_diff_max: float
    rollout_kl: float
    """Distance of the distributions, by k1."""
    rollout_k3: float
    """The same by k3, which no token makes negative."""
    rollout_is_mean: float
    """Mean of the weights that the correction gave the tokens; 1 without one."""
    rollout_is_outside: float
    """Share of tokens at which one of its bounds took effect."""


@dataclass(frozen=True)
class PolicyStats:
    """One step's update, the same on all ranks: token means over all of the step's updates."""

    pg_loss: float
    """As the algorithm aggregates it, mean over the updates."""
    entropy: float
    ppo_kl: float
    """Mean of old minus new log-probability."""
    pg_clipfrac: float
    kl_loss: float
    """Estimate of the distance from the reference; 0 where it is no part of the loss."""
    router_aux_loss: float
    """Load-balancing loss of the micro-batches; 0 where it is no part of the loss."""
    grad_norm: float
    """Before clipping, mean over the updates."""
    lr: float
    """Of the last update."""
    num_tokens: int
    """Response tokens trained on."""
    old_log_prob_seconds: float
    update_seconds: float
    """Both of the slowest rank; ``update_seconds`` does not include the other."""
    mismatch: RolloutMismatch


@dataclass(frozen=True)
class Update:
    """The data that an update was made from, of all ranks' responses ordered by key, and its statistics."""

    trained: NDArray[np.int64]
    """[M], ascending: which of the step's responses it was made from."""
    informative_share: float
    """Of all groups that were drawn, those whose scores differ."""
    rewards: NDArray[np.float32]
    """[M]: scores less what the algorithm takes for length and distance from the reference."""
    advantages: NDArray[np.float32]
    """[M], of each response's first token; the others have the same one, or less of the reward to come."""
    reward_kl: float
    """Mean over tokens of the distance that was taken from the rewards; 0 where it is no part of them."""
    stats: PolicyStats


class TokenSums:
    """Sums over tokens, and the largest distance, from which the figures of an update are made."""

    def __init__(self) -> None:
        self.sums = np.zeros(11)
        self.largest = 0.0

    def add(self, per_token: Sequence[torch.Tensor], distance: torch.Tensor) -> None:
        """Count a micro-batch's tokens: ``per_token`` 11 tensors, and ``distance``, [T] each."""
        self.sums += torch.stack([values.double().sum() for values in per_token]).cpu().numpy()
        if distance.numel():
            self.largest = max(self.largest, float(distance.max()))

    def over_ranks(self, world: World, num_alike: int) -> TokenSums:
        """The sums of all ranks together, ``num_alike`` of which have the same each; collective."""
        total = TokenSums()
        total.sums = world.sum(self.sums / num_alike)
        total.largest = max(world.allgather(self.largest))
        return total
