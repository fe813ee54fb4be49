"""Ends a step whose responses, rewards or gradient hold values that are not finite, and names the responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, UserError
from tlt_hpc.models.piece import LOWER_RATE

_NAMED = 3


class NotFiniteError(UserError):
    """A step met values that are not finite; raised before they reach a metrics line or a checkpoint."""


def check_step(config: Config, rollouts: Sequence[Rollout], rewards: NDArray[np.float32]) -> None:
    """Check what an update is about to learn from: log-probabilities of the rollout, and the rewards [N].

    Raises:
        NotFiniteError: with the step and the responses.
    """
    if bad := [rollout.key for rollout in rollouts if not np.isfinite(rollout.log_probs).all()]:
        raise NotFiniteError(f"{_step(bad[0])}: log-probabilities of {named(bad)} are not finite; {remedy(config)}")
    if bad := [rollout.key for rollout, reward in zip(rollouts, rewards, strict=True) if not np.isfinite(reward)]:
        raise NotFiniteError(f"{_step(bad[0])}: the reward of {named(bad)} is not finite; correct the reward function")


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
    cause = f"nor is the loss of {named(bad)}" if bad else "the losses are, so the backward pass has overflowed"
    words = f"the gradient (norm {norm}, optimiser step {update}) is not finite"
    return NotFiniteError(f"{_step(keys[0])}: {words}; {cause}; {remedy(config)}")


def named(keys: Sequence[SampleKey]) -> str:
    """Responses by draw and sample, as the rollout log names them."""
    words = ", ".join(f"draw {key.draw} sample {key.sample}" for key in keys[:_NAMED])
    more = f" and {len(keys) - _NAMED:,} more" if len(keys) > _NAMED else ""
    return f"{count(len(keys), 'response')} ({words}{more})"


def remedy(config: Config) -> str:
    """The remedy for values that are not finite, in words."""
    return f"{LOWER_RATE} than {config.optimizer.learning_rate}"


def _step(key: SampleKey) -> str:
    return f"step {key.step + 1}"
