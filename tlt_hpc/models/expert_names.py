"""Weights of experts by both of their names: a tensor for each, as in files, or one for all, as in transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

_FUSED = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
"""Tensors [E, N, K] of all experts; gate and up are one above the other."""


def each_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights with a tensor for each expert, views of those for all."""
    for name, tensor in weights:
        if (parts := parts_of(name)) is None:
            yield name, tensor
            continue
        stem, kinds = parts
        for number, expert in enumerate(tensor):
            for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                yield f"{stem}.{number}.{kind}.weight", matrix


def parts_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """For a tensor of all experts, the stem of their own names and the matrices that it holds of each; else None."""
    for fused, kinds in _FUSED.items():
        if name.endswith(fused):
            return name.rpartition(".")[0], kinds
    return None
