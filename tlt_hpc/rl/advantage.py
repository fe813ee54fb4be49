"""From a step's rewards to its tokens' advantages, and what each token counts in the loss; without tensors.

Rewards are those of a whole step, ordered by group, so an advantage does not depend on which rank had which response.
The tokens' weights are of one optimizer step's responses, of all ranks and micro-batches, so that neither how they are
sharded nor how they are cut changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config.recipes import AdvantageName, AggregationName

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as verl does."""
BATCH_EPSILON = 1e-8
"""Added to the variance of a batch, as verl and OpenRLHF do."""

Floats = NDArray[np.float32]


def token_advantages(
    kind: AdvantageName,
    rewards: Floats,
    lengths: NDArray[np.int64],
    group_size: int,
    token_rewards: NDArray[np.float64] | None = None,
) -> Floats:
    """One advantage a token, [T] float32, by response. The tokens of a response have one, with one exception.

    Where there are ``token_rewards`` the kind ``batch`` gives each token its own, from the rewards that it and the
    tokens after it get (REINFORCE++, 2501.03262, eq. 6 to 8). The other kinds have one baseline for a whole response
    and so take its whole reward, as verl and TRL do.

    Args:
        kind: see the functions below.
        rewards: [G * S] of whole responses, ordered by group.
        lengths: [G * S], response tokens, together T.
        group_size: S, at least 2 but for ``batch``.
        token_rewards: [T], the part of ``rewards`` that single tokens get; the rest comes with a response's last.
    """
    if kind == "batch" and token_rewards is not None:
        return whiten(returns_to_go(rewards, lengths, token_rewards), np.ones_like(token_rewards, np.int64))
    return np.repeat(_response_advantages(kind, rewards, lengths, group_size), lengths)


def _response_advantages(kind: AdvantageName, rewards: Floats, lengths: NDArray[np.int64], group_size: int) -> Floats:
    """One advantage a response, [G * S] float32."""
    if kind == "group":
        return group_advantages(rewards, group_size)
    if kind == "group-mean":
        return centred_advantages(rewards, group_size)
    if kind == "leave-one-out":
        return leave_one_out_advantages(rewards, group_size)
    if kind == "batch":
        return whiten(rewards.astype(np.float64), lengths)
    if kind == "group-mean-batch":
        return whiten(centred_advantages(rewards, group_size).astype(np.float64), lengths)
    assert_never(kind)


def returns_to_go(
    rewards: Floats, lengths: NDArray[np.int64], token_rewards: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A response's reward less what the tokens before a token were given, [T]. Arguments as ``token_advantages``."""
    before = np.cumsum(token_rewards) - token_rewards
    starts = np.cumsum(lengths) - lengths
    returns: NDArray[np.float64] = np.repeat(rewards + before[starts], lengths) - before
    return returns


def group_advantages(rewards: Floats, group_size: int) -> Floats:
    """GRPO: each reward less its group's mean, over its group's standard deviation (DeepSeekMath, section 4.1.2).

    The standard deviation is the unbiased one (n - 1) plus 1e-6, the convention of verl and TRL. A group whose rewards
    are all equal has advantages of exactly zero.

    Args:
        rewards: [G * S], ordered by group.
        group_size: S, at least 2.

    Returns:
        [G * S] float32, in the order of ``rewards``.
    """
    groups, centred = _rewards_by_group(rewards, group_size)
    deviation = groups.std(axis=1, ddof=1, keepdims=True)
    advantages: NDArray[np.float64] = centred / (deviation + STD_EPSILON)
    return advantages.reshape(-1).astype(np.float32)


def centred_advantages(rewards: Floats, group_size: int) -> Floats:
    """Dr.GRPO: each reward less its group's mean (2503.20783, section 3.2). Arguments as ``group_advantages``."""
    return _rewards_by_group(rewards, group_size)[1].reshape(-1).astype(np.float32)


def leave_one_out_advantages(rewards: Floats, group_size: int) -> Floats:
    """RLOO: each reward less the mean of the others in its group (2402.14740, eq. 8). Arguments as above."""
    centred = _rewards_by_group(rewards, group_size)[1]
    return (centred * (group_size / (group_size - 1))).reshape(-1).astype(np.float32)


def whiten(values: NDArray[np.float64], lengths: NDArray[np.int64]) -> Floats:
    """REINFORCE++: less the batch's mean, over its standard deviation, both over tokens (2501.03262, eq. 8).

    The variance is the unbiased one. A batch of equal values gives zeros.

    Args:
        values: [N].
        lengths: [N], the tokens that each value counts for.

    Returns:
        [N] float32.
    """
    assert values.shape == lengths.shape and lengths.min() >= 1
    total = int(lengths.sum())
    centred = values - (values * lengths).sum() / total
    if np.ptp(values) == 0:
        return np.zeros(values.size, np.float32)
    variance = (centred**2 * lengths).sum() / (total - 1)
    whitened: NDArray[np.float64] = centred / np.sqrt(variance + BATCH_EPSILON)
    return whitened.astype(np.float32)


def overlong_penalties(lengths: NDArray[np.int64], longest: int, buffer: int) -> Floats:
    """DAPO's soft overlong punishment (2503.14476, eq. 13): the term of each reward for its length, none above zero.

    Zero up to ``longest - buffer`` tokens, then falling linearly to -1 at ``longest``.

    Args:
        lengths: [N], in tokens, like ``longest`` and ``buffer``.

    Returns:
        [N] float32.
    """
    assert 0 < buffer <= longest, f"a buffer of {buffer} tokens in {longest}"
    exceeded = np.maximum(lengths - (longest - buffer), 0) / buffer
    return -np.minimum(exceeded, 1.0).astype(np.float32)


def _rewards_by_group(rewards: Floats, group_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rewards by group [G, S], and the same less each group's mean, exactly zero where a group's are all equal.

    Sums of float32 are exact in float64, so that the mean of equal rewards is no rounding error off, which a tiny
    denominator would blow up.
    """
    assert rewards.dtype == np.float32, f"rewards in {rewards.dtype}"
    assert group_size >= 2, f"group_size = {group_size}: a group of one has no spread"
    assert rewards.ndim == 1 and rewards.size % group_size == 0, f"{rewards.shape} is not groups of {group_size}"
    groups = rewards.astype(np.float64).reshape(-1, group_size)
    centred: NDArray[np.float64] = groups - groups.mean(axis=1, keepdims=True)
    return groups, centred


def token_weights(lengths: Sequence[int], kind: AggregationName, norm_length: int) -> NDArray[np.float64]:
    """The weight of each response's tokens in the sum of losses; [N], for N responses.

    ``token-mean``: 1 / sum of lengths (DAPO, eq. 8). ``seq-mean-token-mean``: 1 / (N * own length) (DeepSeekMath, eq.
    3). ``seq-mean-token-sum``: 1 / N (RLOO). ``seq-mean-token-sum-norm``: 1 / (N * norm_length) (Dr.GRPO, section 3.2).

    Args:
        lengths: response tokens of each, at least 1.
        norm_length: the constant length, used by the last kind alone.
    """
    own = np.asarray(lengths, dtype=np.float64)
    assert own.size and own.min() >= 1 and norm_length >= 1, "responses of at least one token"
    if kind == "token-mean":
        return np.full(own.size, 1.0 / own.sum())
    if kind == "seq-mean-token-mean":
        return 1.0 / (own.size * own)
    if kind == "seq-mean-token-sum":
        return np.full(own.size, 1.0 / own.size)
    if kind == "seq-mean-token-sum-norm":
        return np.full(own.size, 1.0 / (own.size * norm_length))
    assert_never(kind)
