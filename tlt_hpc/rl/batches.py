"""Owns how a step's samples become mini-batches, ranks' shares and padded micro-batches; knows no model and no tensors.

Everything here is a pure function of the rollouts in the order of their keys, so a run repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.records import Rollout

Indices = tuple[int, ...]
"""Places of samples in the step; empty for a micro-batch that only keeps pace with the other ranks."""


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded sequences of one forward and backward pass.

    ``tokens`` [B, L] int64. Only the last K positions have a response token after them in any row: ``mask`` [B, K] is
    true where position L - K + k predicts one. ``targets`` [T] int64 are those tokens and ``rows`` [T] int64 their row,
    in the order in which ``mask`` selects them: by row, then by position.
    """

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    targets: NDArray[np.int64]
    rows: NDArray[np.int64]


def plan_updates(
    lengths: Sequence[int], num_updates: int, num_ranks: int, token_budget: int
) -> list[list[list[Indices]]]:
    """For each update and rank, its micro-batches.

    All ranks of one update have the same number, filled up with empty ones: ZeRO 2 and 3 communicate in every backward
    pass, so a rank with fewer would leave the others waiting.

    Args:
        lengths: tokens of each sample, prompt and response.
        num_updates: divides the number of samples.
        token_budget: most padded tokens of one micro-batch; a single sample may exceed it.
    """
    plans = []
    for indices in mini_batches(len(lengths), num_updates):
        shares = balance(indices, lengths, num_ranks)
        cuts = [cut_micro_batches(share, lengths, token_budget) for share in shares]
        most = max(len(cut) for cut in cuts)
        plans.append([cut + [()] * (most - len(cut)) for cut in cuts])
    return plans


def mini_batches(num_samples: int, num_updates: int) -> list[Indices]:
    """Samples of each optimiser step: every ``num_updates``-th, so that each step sees every prompt where it can."""
    assert num_samples % num_updates == 0, f"{num_updates} updates do not divide {num_samples} samples"
    return [tuple(range(update, num_samples, num_updates)) for update in range(num_updates)]


def balance(indices: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share samples out over ranks by tokens: the longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def cut_micro_batches(indices: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[Indices]:
    """Cut one rank's samples, longest first, so that rows times longest stays within the budget."""
    batches: list[list[int]] = []
    width = 0
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return [tuple(batch) for batch in batches]


def pad(rollouts: Sequence[Rollout], pad_token: int = 0) -> MicroBatch:
    """Lay rollouts out as the rows of one micro-batch; none gives a row of padding that predicts nothing.

    The padding lies behind the causal mask of every real token, so its value and length change nothing.
    """
    if not rollouts:
        nothing = np.zeros(0, np.int64)
        return MicroBatch(np.full((1, 2), pad_token, np.int64), np.zeros((1, 1), np.bool_), nothing, nothing)
    starts = np.array([rollout.prompt_tokens.size for rollout in rollouts])
    ends = starts + [rollout.response_tokens.size for rollout in rollouts]
    assert starts.min() >= 1, "an empty prompt has no position that predicts the first response token"
    tokens = np.full((len(rollouts), int(ends.max())), pad_token, np.int64)
    for row, rollout in enumerate(rollouts):
        tokens[row, : starts[row]] = rollout.prompt_tokens
        tokens[row, starts[row] : ends[row]] = rollout.response_tokens
    first = int(starts.min()) - 1
    positions = np.arange(first, tokens.shape[1])
    mask = (positions >= starts[:, None] - 1) & (positions < ends[:, None] - 1)
    rows, columns = np.nonzero(mask)
    return MicroBatch(tokens, mask, tokens[rows, columns + first + 1], rows.astype(np.int64))
