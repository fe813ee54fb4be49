"""Weights that a node's first rank reads and passes to the others, a few tensors at a time.

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
BLOCK_BYTES = 2**24
"""Of tensors that are sent together; larger ones go alone."""


def read_each_once(
    node: NodeGroup | None, names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names that ``read`` gives on the node's first rank, in host memory, of any shape.

    Collective over the node.

    Raises:
        ValueError: on all its ranks, if ``read`` raises one.
    """

    def reader(name: str) -> ReadCut:
        return lambda cut: _cut(name, read(name), cut)

    return ((name, take(None)) for name, take in readers_once(node, ((name, reader(name)) for name in names)))


def read_all_once(node: NodeGroup | None, read: Callable[[], Mapping[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The tensors by name that ``read`` gives on the node's first rank, of any shape, or None; collective over it.

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

    def look() -> list[tuple[str, torch.Size, torch.dtype]]:
        found.clear()
        told, size = [], 0
        for name, read in left:
            found.append(read(None).contiguous())
            told.append((name, found[-1].shape, found[-1].dtype))
            size += found[-1].nbytes
            if size >= BLOCK_BYTES:
                break
        return told

    while told := node.once(look):
        tensors = list(found) or [torch.empty(shape, dtype=dtype) for _, shape, dtype in told]
        share(node, tensors)
        yield from ((name, partial(_cut, name, tensor)) for (name, _, _), tensor in zip(told, tensors, strict=True))


def _cut(name: str, tensor: Tensor, cut: Cut | None) -> Tensor:
    return tensor if cut is None else cut.take(name, tensor)


def share(node: NodeGroup, tensors: Iterable[Tensor]) -> None:
    """Copy the first rank's contiguous tensors in host memory into the others', of the same shapes in the same order.

    Small ones are sent together: where ranks share cores, each message takes milliseconds.
    """
    small, size = list[Tensor](), 0
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.shape, tensor.device)
        octets = tensor.detach().reshape(-1).view(torch.uint8)
        if octets.numel() >= BLOCK_BYTES:
            node.broadcast_bytes(octets.numpy())
            continue
        small.append(octets)
        size += octets.numel()
        if size >= BLOCK_BYTES:
            _share_together(node, small)
            small, size = [], 0
    _share_together(node, small)


def _share_together(node: NodeGroup, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    packed = torch.cat(tensors) if tensors and node.rank == 0 else torch.empty(sum(sizes), dtype=torch.uint8)
    node.broadcast_bytes(packed.numpy())
    if node.rank:
        for tensor, received in zip(tensors, torch.split(packed, sizes), strict=True):
            tensor.copy_(received)
