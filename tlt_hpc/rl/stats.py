"""The figures of one step's update, and the sums that they are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.config import Config, UserError
from tlt_hpc.models.piece import LOWER_RATE

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

    def sum_over_ranks(self, world: World, num_alike: int) -> TokenSums:
        """The sums of all ranks together, ``num_alike`` of which have the same each; collective."""
        total = TokenSums()
        total.sums = world.sum_over_ranks(self.sums / num_alike)
        total.largest = max(world.allgather(self.largest))
        return total


# -- values that are not finite end the step ---------------------------------------------------------------------------

_NAMED = 3


class NotFiniteError(UserError):
    """A step met values that are not finite; raised before they reach a metrics line or a checkpoint."""


def check_rollouts_are_finite(config: Config, rollouts: Sequence[Rollout], rewards: NDArray[np.float32]) -> None:
    """Check what an update is about to learn from: log-probabilities of the rollout, and the rewards [N].

    Raises:
        NotFiniteError: with the step and the responses.
    """
    if bad := [rollout.key for rollout in rollouts if not np.isfinite(rollout.log_probs).all()]:
        what = f"{_format_step(bad[0])}: log-probabilities of {format_response_keys(bad)}"
        raise NotFiniteError(f"{what} are not finite; {non_finite_remedy(config)}")
    if bad := [rollout.key for rollout, reward in zip(rollouts, rewards, strict=True) if not np.isfinite(reward)]:
        what = f"{_format_step(bad[0])}: the reward of {format_response_keys(bad)}"
        raise NotFiniteError(f"{what} is not finite; correct the reward function")


def gradient_error(
    config: Config, keys: Sequence[SampleKey], norm: float, update: int, blamed: Iterable[int]
) -> NotFiniteError:
    """The error to raise for a gradient that is not finite.

    Args:
        keys: of the step's responses.
        update: the number of the optimiser's step, from 1 over the whole run.
        blamed: indices of the responses whose own loss is not finite, on any rank.
    """
    bad = [keys[index] for index in sorted(set(blamed))]
    cause = (
        f"nor is the loss of {format_response_keys(bad)}"
        if bad
        else "the losses are, so the backward pass has overflowed"
    )
    words = f"the gradient (norm {norm}, optimiser step {update}) is not finite"
    return NotFiniteError(f"{_format_step(keys[0])}: {words}; {cause}; {non_finite_remedy(config)}")


def format_response_keys(keys: Sequence[SampleKey]) -> str:
    """Responses by draw and sample, as the rollout log names them."""
    words = ", ".join(f"draw {key.draw} sample {key.sample}" for key in keys[:_NAMED])
    more = f" and {len(keys) - _NAMED:,} more" if len(keys) > _NAMED else ""
    return f"{format_count(len(keys), 'response')} ({words}{more})"


def non_finite_remedy(config: Config) -> str:
    """The remedy for values that are not finite, in words."""
    return f"{LOWER_RATE} than {config.optimizer.learning_rate}"


def _format_step(key: SampleKey) -> str:
    return f"step {key.step + 1}"
