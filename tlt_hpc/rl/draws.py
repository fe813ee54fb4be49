"""What a step has generated: its own prompts, then those of refills, under their keys; and which of them it trains on.

Pure functions of configuration, data and scores, for a step that is generated and for one taken up from the log.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Prompt, Request, Rollout, SampleKey, Stream
from tlt_hpc.config import Config
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.rl.dynamic import chosen, informative, refill_size


class StepDraws:
    """The prompts and requests of one step, of all ranks."""

    def __init__(self, config: Config, prompts: PromptSource, step: int) -> None:
        self.config, self.source, self._step = config, prompts, step
        self._prompts = {Stream.TRAIN: prompts.batch(step), Stream.REFILL: list[Prompt]()}
        self.num_refills = 0

    @property
    def num_groups(self) -> int:
        """Prompts drawn so far."""
        return sum(map(len, self._prompts.values()))

    def prompt_of(self, rollout: Rollout) -> Prompt:
        """What a response answers."""
        return self._prompts[Stream(rollout.key.stream)][rollout.key.draw]

    def requests(self) -> list[Request]:
        """The step's own, ordered by key."""
        return self._requests(Stream.TRAIN, 0)

    def needs_scores(self) -> bool:
        """Whether a further refill is allowed."""
        return self.num_refills < self.config.algorithm.max_refills

    def refill(self, scores: NDArray[np.float32]) -> list[Request]:
        """The next refill's, ordered by key; none if enough groups are informative.

        Args:
            scores: [N], of all that was asked for so far, ordered by key.
        """
        assert self.needs_scores() and len(scores) == self.num_groups * self.config.rollout.group_size
        is_informative = informative(scores, self.config.rollout.group_size)
        size = refill_size(is_informative, self.config.rollout.prompts_per_step)
        if not size:
            return []
        self.num_refills += 1
        start = len(self._prompts[Stream.REFILL])
        self._prompts[Stream.REFILL] = self.source.refill(self._step, start + size)
        return self._requests(Stream.REFILL, start)

    def _requests(self, stream: Stream, start: int) -> list[Request]:
        return [
            Request(SampleKey(self.config.run.seed, stream, self._step, draw, sample), prompt.tokens)
            for draw, prompt in list(enumerate(self._prompts[stream]))[start:]
            for sample in range(self.config.rollout.group_size)
        ]


def trained_on(config: Config, scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Which responses a step trains on, [samples_per_step], ascending.

    Args:
        scores: [N], of all that the step generated, ordered by key.
    """
    size = config.rollout.group_size
    groups = chosen(informative(scores, size), config.rollout.prompts_per_step)
    return (groups[:, None] * size + np.arange(size)).reshape(-1)
