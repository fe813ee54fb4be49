"""Owns how a step's samples become mini-batches, ranks' shares and packed micro-batches; knows no model and no tensors.

Everything here is a pure function of the rollouts in the order of their keys, so a run repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Rollout

Indices = tuple[int, ...]
"""Places of samples in the step; empty for a micro-batch that only keeps pace with the other ranks."""


@dataclass(frozen=True)
class MicroBatch:
    """Prompts with their responses, end to end, of one forward and backward pass.

    ``tokens`` and ``positions`` [T] int64, positions counted from each document's start; ``lengths`` of the documents,
    T together. ``where`` [R] int64 are the places before a response token, ``targets`` [R] int64 those tokens and
    ``rows`` [R] int64 their document: by document, then by position.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]
    where: NDArray[np.int64]
    targets: NDArray[np.int64]
    rows: NDArray[np.int64]


def plan_updates(
    lengths: Sequence[int], num_updates: int, num_ranks: int, token_budget: int, attention_crossover_tokens: float
) -> list[list[list[Indices]]]:
    """For each update and rank, its micro-batches.

    All ranks of one update have the same number, filled up with empty ones: ZeRO 2 and 3 communicate in every backward
    pass, so a rank with fewer would leave the others waiting.

    Args:
        lengths: tokens of each sample, prompt and response.
        num_updates: divides the number of samples.
        token_budget: most tokens of one micro-batch; a single sample may exceed it.
        attention_crossover_tokens: tokens of a sample at which its attention costs as much as all else.
    """
    plans = []
    costs = [length * (1 + length / attention_crossover_tokens) for length in lengths]
    for indices in mini_batches(len(lengths), num_updates):
        shares = split_by_cost(indices, costs, num_ranks)
        cuts = [cut_micro_batches(share, lengths, token_budget) for share in shares]
        most = max(len(cut) for cut in cuts)
        plans.append([cut + [()] * (most - len(cut)) for cut in cuts])
    return plans


def mini_batches(num_samples: int, num_updates: int) -> list[Indices]:
    """Samples of each optimiser step: every ``num_updates``-th, so that each step sees every prompt where it can."""
    assert num_samples % num_updates == 0, f"{num_updates} updates do not divide {num_samples} samples"
    return [tuple(range(update, num_samples, num_updates)) for update in range(num_updates)]


def split_by_cost(indices: Sequence[int], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Distribute samples over ranks by cost: the most expensive first, each to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap: ranks and samples grow together
    for index in sorted(indices, key=lambda index: (-costs[index], index)):
        load, rank = loads[0]
        shares[rank].append(index)
        heapreplace(loads, (load + costs[index], rank))
    return shares


def cut_micro_batches(indices: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[Indices]:
    """Cut one rank's samples, longest first, so that the tokens of each part stay within the budget.

    The parts are as few as first-fit finds: a short sample goes where a long one has left room.
    """
    batches: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(indices, key=lambda index: (-lengths[index], index)):
        fitting = next((i for i, room in enumerate(rooms) if lengths[index] <= room), None)
        if fitting is None:
            batches.append([])
            rooms.append(token_budget)
            fitting = len(rooms) - 1
        batches[fitting].append(index)
        rooms[fitting] -= lengths[index]
    return [tuple(batch) for batch in batches]


def pack_rollouts(rollouts: Sequence[Rollout], pad_token: int = 0) -> MicroBatch:
    """Lay rollouts end to end; none gives a document of two tokens that predicts nothing."""
    if not rollouts:
        nothing = np.zeros(0, np.int64)
        return MicroBatch(np.full(2, pad_token, np.int64), np.arange(2), (2,), nothing, nothing, nothing)
    prompts = np.array([rollout.prompt_tokens.size for rollout in rollouts])
    responses = np.array([rollout.response_tokens.size for rollout in rollouts])
    assert prompts.min() >= 1, "an empty prompt has no position that predicts the first response token"
    lengths = prompts + responses
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([part for each in rollouts for part in (each.prompt_tokens, each.response_tokens)])
    tokens = tokens.astype(np.int64)
    rows = np.repeat(np.arange(len(rollouts)), responses)
    within = np.arange(rows.size) - np.repeat(np.cumsum(responses) - responses, responses)
    where = (starts + prompts - 1)[rows] + within
    positions = np.arange(tokens.size) - np.repeat(starts, lengths)
    return MicroBatch(tokens, positions, tuple(lengths.tolist()), where, tokens[where + 1], rows)
