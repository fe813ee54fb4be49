"""From a step's responses and scores to the policy's update: penalties, advantages, optimiser steps.

It is the same for responses that were just generated and for those that are read from the log. Then ``take_step`` in
train.py loads the new weights into the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Rollout
from tlt_hpc.config import Config
from tlt_hpc.rl.advantage import overlong_penalties, token_advantages
from tlt_hpc.rl.draws import informative_groups, responses_to_train_on
from tlt_hpc.rl.policy import Policy
from tlt_hpc.rl.stats import Update, check_rollouts_are_finite


def update_policy(config: Config, policy: Policy, rollouts: Sequence[Rollout], scores: NDArray[np.float32]) -> Update:
    """Train the policy on a step's responses; collective, with the same arguments on every rank.

    Args:
        rollouts: all that the step generated, ordered by key; dynamic sampling may leave some out.
        scores: [N] float32, theirs.

    Raises:
        NotFiniteError: a log-probability, a reward or the gradient is not finite, on all ranks.
    """
    check_rollouts_are_finite(config, rollouts, scores)  # also of those that are left out: the rollout log has them
    algorithm, trained = config.algorithm, responses_to_train_on(config.rollout, scores)
    informative_share = float(informative_groups(scores, config.rollout.group_size).mean())
    rollouts, scores = [rollouts[index] for index in trained], scores[trained]
    lengths = np.array([rollout.response_tokens.size for rollout in rollouts], np.int64)
    rewards = scores
    if algorithm.overlong_buffer:
        rewards = scores + overlong_penalties(lengths, config.rollout.max_new_tokens, algorithm.overlong_buffer)
    token_kl, token_rewards = np.zeros(lengths.sum()), None
    if algorithm.kl_coefficient and algorithm.kl_placement == "reward":
        token_kl = policy.reference_kl_by_token_all_ranks(rollouts)
        token_rewards = -algorithm.kl_coefficient * token_kl
    kl = np.zeros(len(rollouts))
    np.add.at(kl, np.repeat(np.arange(lengths.size), lengths), token_kl)  # one after another, in every version of numpy
    if token_rewards is not None:
        rewards = (rewards - algorithm.kl_coefficient * kl).astype(np.float32)
    check_rollouts_are_finite(config, rollouts, rewards)
    kind = algorithm.recipe.advantage
    advantages = token_advantages(kind, rewards, lengths, config.rollout.group_size, token_rewards)
    first = advantages[np.cumsum(lengths) - lengths]
    mean_kl, stats = float(kl.sum() / lengths.sum()), policy.update(rollouts, advantages)
    return Update(trained, informative_share, rewards, first, mean_kl, stats)
