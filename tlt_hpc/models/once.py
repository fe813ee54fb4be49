"""Weights that a node's first rank reads and passes to the others, one tensor at a time.

A node of None is one rank alone, which has or needs no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_hpc.models.piece import Cut

if TYPE_CHECKING:
    from tlt_hpc.mpi.node import NodeGroup

ReadCut = Callable[[Cut | None], Tensor]
"""Reads a stored tensor: all of it, or a block."""


def read_once(node: NodeGroup | None, read: Callable[[], Tensor]) -> Tensor:
    """The tensor that ``read`` gives on the node's first rank, in host memory; collective over the node.

    Raises:
        ValueError: on all its ranks, if ``read`` raises one.
    """
    found = read_all_once(node, lambda: {"tensor": read()})
    assert found is not None
    return found["tensor"]


def read_all_once(node: NodeGroup | None, read: Callable[[], Mapping[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The tensors that ``read`` gives on the node's first rank by name, or None; collective over the node.

    Raises:
        ValueError: on all its ranks, if ``read`` raises one.
    """

    def readers() -> Iterator[tuple[str, ReadCut]]:
        for name, tensor in (read() or {}).items():
            yield name, partial(_cut, name, tensor)

    return {name: take(None) for name, take in readers_once(node, readers())} or None


def readers_once(node: NodeGroup | None, readers: Iterable[tuple[str, ReadCut]]) -> Iterator[tuple[str, ReadCut]]:
    """Named tensors to be read one after another, whose files the node's first rank alone opens; collective over it.

    That rank reads them whole, and the others take their blocks of what they are given.

    Raises:
        ValueError: on all its ranks, if reading one raises one.
    """
    if node is None or node.size == 1:
        yield from readers
        return
    left, found = iter(readers), list[Tensor]()

    def look() -> tuple[str, torch.Size, torch.dtype] | None:
        named = next(left, None)
        if named is None:
            return None
        found[:] = [named[1](None).contiguous()]
        return named[0], found[0].shape, found[0].dtype

    while (told := node.once(look)) is not None:
        name, shape, dtype = told
        tensor = found[0] if found else torch.empty(shape, dtype=dtype)
        share(node, [tensor])
        yield name, partial(_cut, name, tensor)


def _cut(name: str, tensor: Tensor, cut: Cut | None) -> Tensor:
    return tensor if cut is None else cut.take(name, tensor)


def share(node: NodeGroup, tensors: Iterable[Tensor]) -> None:
    """Write the first rank's contiguous tensors in host memory into the others', of equal sizes in the same order."""
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.shape, tensor.device)
        node.broadcast_bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())
