"""What a step generates and what it trains on: its own prompts, then those of refills (dynamic sampling).

Dynamic sampling replaces groups whose scores are all equal (DAPO, 2503.14476, section 3.2). All of it depends on
configuration, data and scores alone, so a step that is repeated from the log draws, keeps and leaves out the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Prompt, Request, Rollout, SampleKey, Stream
from tlt_hpc.config import Config, RolloutSection
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.mpi.world import World
from tlt_hpc.rollout.responses import Texts

LEAST_SHARE = 0.125
"""Smallest share of informative groups that is assumed, so that a step of zero-variance groups draws no more."""


class StepDraws:
    """The prompts and requests of one step, of all ranks."""

    def __init__(self, config: Config, prompts: PromptSource, step: int) -> None:
        self.config, self.source, self.step = config, prompts, step
        self._prompts = {Stream.TRAIN: prompts.draw_step_prompts(step), Stream.REFILL: list[Prompt]()}
        self.num_refills = 0

    @property
    def num_groups(self) -> int:
        """Prompts drawn so far."""
        return sum(map(len, self._prompts.values()))

    def prompt_of(self, rollout: Rollout) -> Prompt:
        """The prompt of a response."""
        return self._prompts[Stream(rollout.key.stream)][rollout.key.draw]

    def first_requests(self) -> list[Request]:
        """The requests of the step's own prompts, ordered by key."""
        return self._make_requests(Stream.TRAIN, 0)

    def allows_refill(self) -> bool:
        """True if a further refill is allowed."""
        return self.num_refills < self.config.algorithm.max_refills

    def draw_refill_requests(self, scores: NDArray[np.float32]) -> list[Request]:
        """The requests of the next refill, ordered by key; none if enough groups are informative.

        Args:
            scores: [N], of all that was asked for so far, ordered by key.
        """
        assert self.allows_refill() and len(scores) == self.num_groups * self.config.rollout.group_size
        is_informative = informative_groups(scores, self.config.rollout.group_size)
        size = refill_size(is_informative, self.config.rollout.prompts_per_step)
        if not size:
            return []
        self.num_refills += 1
        start = len(self._prompts[Stream.REFILL])
        self._prompts[Stream.REFILL] = self.source.draw_refill_prompts(self.step, start + size)
        return self._make_requests(Stream.REFILL, start)

    def _make_requests(self, stream: Stream, start: int) -> list[Request]:
        return [
            Request(SampleKey(self.config.run.seed, stream, self.step, draw, sample), prompt.tokens)
            for draw, prompt in list(enumerate(self._prompts[stream]))[start:]
            for sample in range(self.config.rollout.group_size)
        ]


def responses_to_train_on(rollout: RolloutSection, scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """The indices of the responses that a step trains on, [samples_per_step], ascending.

    Args:
        scores: [N], of all that the step generated, ordered by key.
    """
    size = rollout.group_size
    groups = groups_to_train_on(informative_groups(scores, size), rollout.prompts_per_step)
    return (groups[:, None] * size + np.arange(size)).reshape(-1)


def informative_groups(scores: NDArray[np.float32], group_size: int) -> NDArray[np.bool_]:
    """True for groups whose scores are not all equal, so that their advantages are not all 0; [N / group_size].

    Args:
        scores: [N], group by group.
    """
    groups = scores.reshape(-1, group_size)
    return np.asarray((groups != groups[:, :1]).any(axis=1))


def refill_size(is_informative: NDArray[np.bool_], wanted: int) -> int:
    """The number of groups to draw so that ``wanted`` are informative, by the share so far; 0 if there are enough.

    At most ``wanted``: a refill is no larger than a step's own rollout.

    Args:
        is_informative: [groups drawn so far] bool.
    """
    missing = wanted - int(is_informative.sum())
    if missing <= 0:
        return 0
    share = max(float(is_informative.mean()), LEAST_SHARE)
    return min(wanted, math.ceil(missing / share))


def groups_to_train_on(is_informative: NDArray[np.bool_], wanted: int) -> NDArray[np.int64]:
    """The groups to train on, [wanted] ascending, of those drawn, [groups].

    The first informative ones; if they are too few, the first of the others, as without dynamic sampling.
    """
    order = np.concatenate([np.flatnonzero(is_informative), np.flatnonzero(~is_informative)])
    return np.sort(order[:wanted])


class Gathered(NamedTuple):
    """All ranks' results of a step's rollout."""

    rollouts: list[Rollout]
    """Ordered by key."""
    rewards: NDArray[np.float32]
    """[N] float32, of the rollouts."""
    texts: list[Texts]
    """What was generated ahead, by rank."""


def gather_rollouts(world: World, rollouts: Sequence[Rollout], rewards: NDArray[np.float32], texts: Texts) -> Gathered:
    """Gather the N rollouts of all ranks, their rewards [N] and the texts generated ahead; collective.

    What the update reads does not depend on which rank had a response, or finished first.
    """
    ranks = world.allgather((list(zip(rollouts, rewards, strict=True)), texts))
    pairs = sorted((pair for own, _ in ranks for pair in own), key=lambda pair: pair[0].key)
    scores = np.array([reward for _, reward in pairs], dtype=np.float32)
    return Gathered([rollout for rollout, _ in pairs], scores, [own for _, own in ranks])
