"""The mean of a drafter's weights over its last merges: what too high a learning rate leaves in them cancels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class WeightAverage:
    """Follows named weights (Polyak & Juditsky, 1992): their plain mean at first, later an exponential one.

    ``span`` is about how many of the last ``take`` it reaches back over; with 1 it holds nothing and is the weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], span: int) -> None:
        assert span >= 1, f"span = {span}"
        self._weights, self._span = weights, span
        self._means = {name: torch.empty_like(weight) for name, weight in weights.items()} if span > 1 else {}
        self.num_taken = 0
        """How often the weights have gone into the mean; until then it is the weights as they are."""

    @property
    def num_bytes(self) -> int:
        return sum(mean.nbytes for mean in self._means.values())

    @torch.no_grad()
    def take(self) -> None:
        """Let the weights of now into the mean, the first time as all of it."""
        self.num_taken += 1
        share = 1 / min(self.num_taken, self._span)
        for name, mean in self._means.items():
            if share == 1:  # what the mean held before is nothing, not even a number perhaps
                mean.copy_(self._weights[name])
            else:
                mean.lerp_(self._weights[name], share)

    def means(self) -> Mapping[str, Tensor]:
        """The mean by name; the tensors themselves, which the next ``take`` changes."""
        return self._means if self._means and self.num_taken else self._weights

    def load(self, means: Mapping[str, Tensor], num_taken: int) -> None:
        """Resume from ``means()`` and ``num_taken`` of another one."""
        self.num_taken = num_taken
        for name, mean in self._means.items():
            mean.copy_(means[name])
