"""Weights of experts by both of their names: a tensor for each, as in files, or one for all, as in transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_FUSED = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
"""Tensors [E, N, K] of all experts, and the matrices of an expert that lie one above the other in its part."""


class Place(NamedTuple):
    """The place of a weight in a tensor of all experts: of the expert ``number``, part ``part`` of ``num_parts``."""

    name: str
    number: int
    part: int
    num_parts: int

    def take(self, tensor: Tensor) -> Tensor:
        """A view of the weight [N / num_parts, K] in the tensor of all experts [E, N, K]."""
        return tensor[self.number].chunk(self.num_parts)[self.part]


def is_expert(name: str) -> bool:
    """True if the tensor of transformers with this name holds the matrices of all experts."""
    return name.endswith(tuple(_FUSED))


def each_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights with a tensor for each expert, views [N / num_parts, K] of those for all [E, N, K]."""
    for name, tensor in weights:
        if is_expert(name):
            yield from ((own, place.take(tensor)) for own, (place, _) in places(name, tensor.shape).items())
        else:
            yield name, tensor


def places(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Place, tuple[int, int]]]:
    """The weights in a tensor of all experts [E, N, K] by their names in a file: where each is, and its shape."""
    kinds = next(kinds for fused, kinds in _FUSED.items() if name.endswith(fused))
    (count, rows, columns), stem = shape, name.rpartition(".")[0]
    return {
        f"{stem}.{number}.{kind}.weight": (Place(name, number, part, len(kinds)), (rows // len(kinds), columns))
        for number in range(count)
        for part, kind in enumerate(kinds)
    }
