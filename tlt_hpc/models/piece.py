"""A run of a tensor's elements, as one rank holds it: how state that is spread over ranks is named. Knows no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``stop`` of a tensor of the given shape, counted flat."""

    values: Tensor
    """[stop - start], not a copy."""
    start: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """All of a tensor."""
        return cls(tensor.detach().reshape(-1), 0, tuple(tensor.shape))

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def deal(tensors: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> Iterator[tuple[str, Piece]]:
    """This rank's share of tensors that all ranks hold alike: equal counts of elements, in few pieces.

    The shares of all ranks together have each element once; an empty tensor is the first rank's.
    """
    named = list(tensors)
    total = sum(tensor.numel() for _, tensor in named)
    first, last = total * rank // num_ranks, total * (rank + 1) // num_ranks
    offset = 0
    for name, tensor in named:
        start, stop = max(first - offset, 0), min(last - offset, tensor.numel())
        if start < stop or (tensor.numel() == 0 and rank == 0):
            yield name, Piece(tensor.detach().reshape(-1)[start:stop], start, tuple(tensor.shape))
        offset += tensor.numel()
