"""Weights that a node's first rank reads and the others are given, one tensor at a time. Knows no file and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tlt_hpc.mpi.node import NodeGroup


def read_once(node: NodeGroup, read: Callable[[], Tensor]) -> Tensor:
    """The tensor that ``read`` gives on the node's first rank, in host memory; collective over the node.

    Raises:
        ValueError: on all its ranks, where ``read`` raises one.
    """
    if node.size == 1:
        return read()
    found: list[Tensor] = []

    def look() -> tuple[torch.Size, torch.dtype]:
        found.append(read().contiguous())
        return found[0].shape, found[0].dtype

    shape, dtype = node.once(look)
    tensor = found[0] if found else torch.empty(shape, dtype=dtype)
    share(node, [tensor])
    return tensor


def read_all_once(node: NodeGroup, read: Callable[[], Mapping[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The tensors that ``read`` gives on the node's first rank by name, or None; collective over the node.

    Raises:
        ValueError: on all its ranks, where ``read`` raises one.
    """
    found: list[Mapping[str, Tensor]] = []

    def look() -> list[str] | None:
        tensors = read()
        found.append(tensors or {})
        return None if tensors is None else list(tensors)

    names = node.once(look)
    if names is None:
        return None
    return {name: read_once(node, lambda name=name: found[0][name]) for name in names}  # type: ignore[misc]


def share(node: NodeGroup, tensors: Iterable[Tensor]) -> None:
    """Write the first rank's contiguous tensors in host memory into the others', of equal sizes in the same order."""
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.shape, tensor.device)
        node.broadcast(tensor.detach().reshape(-1).view(torch.uint8).numpy())
