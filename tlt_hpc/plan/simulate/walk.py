"""Rollouts of many replicas at once, from response lengths and costs to the second that each response ends in.

All live sequences of a replica advance together, so in tokens its rollout is list scheduling on ``max_live`` places:
the walk goes from one response's end to the next, over which the batch is constant. Shapes: ``R`` rollouts (of a step
and replica each), ``N`` responses of the largest, in the order of their admission; a length of 0 is no response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.plan.simulate.costs import Costs, Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Walk:
    """``ends`` [R, N]: seconds after the start in which each response ended; [R] ``seconds`` of the last one, responses
    ``tokens``, and ``speculated`` tokens, those that did not come from plain decoding."""

    ends: Floats
    seconds: Floats
    tokens: Ints
    speculated: Floats


def walk(lengths: Ints, costs: Costs, max_live: int, prompt_tokens: float = 0.0, read_share: float = 1.0) -> Walk:
    """Roll out.

    Args:
        lengths: [R, N]; zeros stand behind all others in a row.
        prompt_tokens: of each response; they lie in the context, and are read when it is admitted.
        read_share: the share of responses whose prompt has to be read: one of a group that is together.
    """
    costs = costs.up_to(max_live)
    starts, order, finish = schedule(lengths, max_live)
    count = (lengths > 0).sum(1)
    rows, number = lengths.shape
    index = np.arange(number)
    live = np.clip(count[:, None] - index, 0, max_live)
    span = np.diff(finish, axis=1, prepend=0.0)
    held = positions(starts, order, finish, span, count, live, max_live) + prompt_tokens * live
    rate, chosen = costs.best(live, held)
    admitted = np.zeros((rows, number))
    admitted[:, 0] = np.minimum(count, max_live)
    admitted[:, 1:] = count[:, None] > max_live + index[:-1]
    read = np.cumsum(admitted, 1) * (prompt_tokens * read_share * costs.prompt_token_seconds)
    together = np.maximum.accumulate(np.where(span > 0, index, 0), axis=1)  # of those that end in one round the first
    clock = np.cumsum(span * rate, 1) + np.take_along_axis(read, together, 1)
    ends = np.zeros_like(clock)
    np.put_along_axis(ends, order, clock, 1)
    ends[lengths == 0] = 0.0
    speculated = (span * live * (chosen > 0)).sum(1)
    last = ends.max(1, initial=0.0)
    return Walk(ends, last, lengths.sum(1), speculated)


def schedule(lengths: Ints, max_live: int) -> tuple[Floats, Ints, Floats]:
    """In tokens: when each response is admitted [R, N]; who ends in turn; and when [R, N], flat behind the last."""
    rows, number = lengths.shape
    starts, finish = np.zeros((rows, number)), lengths.astype(np.float64)
    if number > max_live:
        places = finish[:, :max_live].copy()
        every = np.arange(rows)
        for index in range(max_live, number):
            free = places.argmin(1)
            starts[:, index] = places[every, free]
            finish[:, index] += starts[:, index]
            places[every, free] = np.where(lengths[:, index] > 0, finish[:, index], np.inf)
    finish[lengths == 0] = np.inf
    order = np.argsort(finish, axis=1, kind="stable")
    finish = np.take_along_axis(finish, order, 1)
    last = np.where(np.isfinite(finish), finish, 0.0).max(1, initial=0.0)
    return starts, order, np.minimum(finish, last[:, None])


def positions(
    starts: Floats, order: Ints, finish: Floats, span: Floats, count: Ints, live: Ints, max_live: int
) -> Floats:
    """Tokens that stand behind the prompts of the live sequences, half-way through each span [R, N]."""
    number = starts.shape[1]
    begun = np.cumsum(starts, 1)
    index = np.minimum(np.minimum(np.arange(number) + max_live, number)[None, :], np.maximum(count, 1)[:, None]) - 1
    all_begun = np.take_along_axis(begun, index, 1)
    ended = np.cumsum(np.take_along_axis(starts, order, 1), 1)
    ended = np.concatenate([np.zeros((len(starts), 1)), ended[:, :-1]], 1)
    middle = finish - span / 2
    held: Floats = np.where(live > 0, live * middle - (all_begun - ended), 0.0)
    return held
