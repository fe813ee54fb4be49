"""What one rank holds of a tensor that is spread over ranks: a run of its elements, or a block. Knows no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tlt_hpc.models.shape import TAKE_CONFIG

LOWER_RATE = (
    "a resume would meet the same values: export the last checkpoint (tlt export-policy), and start another run.name "
    "from it with a lower optimizer.learning_rate"
)
"""The way on where a policy's values are not finite: a run's own learning rate cannot change."""


@dataclass(frozen=True)
class Piece:
    """The elements ``start`` to ``stop_index`` of a tensor of the given shape, counted flat."""

    values: Tensor
    """[stop_index - start], not a copy."""
    start: int
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """A piece with all elements of a tensor of any shape."""
        return cls(tensor.detach().reshape(-1), 0, tuple(tensor.shape))

    @property
    def stop_index(self) -> int:
        """The flat index after the piece's last element."""
        return self.start + self.values.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece's elements."""
        return self.values.numel() * self.values.element_size()


@dataclass(frozen=True)
class Cut:
    """The block that one rank takes of a tensor of ``sizes``: ``slices`` of its first dimensions, all of the others."""

    sizes: tuple[int, ...]
    slices: tuple[slice, ...]

    @property
    def cut_sizes(self) -> tuple[int, ...]:
        """The sizes of the block."""
        kept = (len(range(size)[part]) for size, part in zip(self.sizes, self.slices, strict=False))
        return *kept, *self.sizes[len(self.slices) :]

    def cut_from(self, name: str, tensor: Tensor) -> Tensor:
        """The block, of shape ``cut_sizes``, of a tensor of shape ``sizes``; a view."""
        self.check(name, tensor.shape)
        return tensor[self.slices]

    def check(self, name: str, sizes: Sequence[int]) -> None:
        """Refuse a tensor of other sizes, whose block might be of the right ones.

        Raises:
            ValueError: with the name.
        """
        if tuple(sizes) != self.sizes:
            raise ValueError(
                f"weight {name!r} has shape {list(sizes)}, config.json asks for {list(self.sizes)}; {TAKE_CONFIG}"
            )


def own_tensor_pieces(tensors: Iterable[tuple[str, Tensor]], rank: int, num_ranks: int) -> Iterator[tuple[str, Piece]]:
    """This rank's share of tensors of any shape that all ranks hold: equal counts of elements, in few pieces.

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


def is_finite(tensor: Tensor) -> Tensor:
    """True, as bool [] on the tensor's device, if all values of a tensor of any shape are finite.

    Unlike ``isfinite`` it takes no memory of the tensor's size.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def names_not_finite(found: Mapping[str, Tensor]) -> list[str]:
    """The names whose results of ``is_finite`` (each of shape []) are false; waits for each device once."""
    by_device: dict[torch.device, list[str]] = {}
    for name, value in found.items():
        by_device.setdefault(value.device, []).append(name)
    told = ((names, torch.stack([found[name] for name in names]).tolist()) for names in by_device.values())
    return [name for names, values in told for name, value in zip(names, values, strict=True) if not value]


if TYPE_CHECKING:
    from tlt_hpc.mpi.world import NodeGroup

# -- weights that a node's first rank reads and passes to the others, a few tensors at a time -------------------------
#
# A node of None is one rank alone, which has or needs no MPI.

ReadCut = Callable[[Cut | None], Tensor]
"""Reads a stored tensor: all of it, or a block."""
BLOCK_BYTES = 2**24
"""Of tensors that are sent together; larger ones go alone."""


def read_and_broadcast_each(
    node: NodeGroup | None, names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names that ``read`` gives on the node's first rank, in host memory, of any shape.

    Collective over the node.

    Raises:
        ValueError: on all its ranks, if ``read`` raises one.
    """

    def reader(name: str) -> ReadCut:
        return lambda cut: _cut(name, read(name), cut)

    return (
        (name, take(None)) for name, take in read_and_broadcast_parts(node, ((name, reader(name)) for name in names))
    )


def read_and_broadcast_all(
    node: NodeGroup | None, read: Callable[[], Mapping[str, Tensor] | None]
) -> dict[str, Tensor] | None:
    """The tensors by name that ``read`` gives on the node's first rank, of any shape, or None; collective over it.

    Raises:
        ValueError: on all its ranks, if ``read`` raises one.
    """

    def readers() -> Iterator[tuple[str, ReadCut]]:
        for name, tensor in (read() or {}).items():
            yield name, partial(_cut, name, tensor)

    return {name: take(None) for name, take in read_and_broadcast_parts(node, readers())} or None


def read_and_broadcast_parts(
    node: NodeGroup | None, readers: Iterable[tuple[str, ReadCut]]
) -> Iterator[tuple[str, ReadCut]]:
    """Named tensors to be read one after another, whose files the node's first rank alone opens; collective over it.

    That rank reads them whole, and the others take their blocks of what they are given.

    Raises:
        ValueError: on all its ranks, if reading one raises one.
    """
    if node is None or node.size == 1:
        yield from readers
        return
    left, found = iter(readers), list[Tensor]()

    def read_next_block() -> list[tuple[str, torch.Size, torch.dtype]]:
        found.clear()
        told, size = [], 0
        for name, read in left:
            found.append(read(None).contiguous())
            told.append((name, found[-1].shape, found[-1].dtype))
            size += found[-1].nbytes
            if size >= BLOCK_BYTES:
                break
        return told

    while told := node.run_first_and_broadcast(read_next_block):
        tensors = list(found) or [torch.empty(shape, dtype=dtype) for _, shape, dtype in told]
        broadcast_on_node(node, tensors)
        yield from ((name, partial(_cut, name, tensor)) for (name, _, _), tensor in zip(told, tensors, strict=True))


def _cut(name: str, tensor: Tensor, cut: Cut | None) -> Tensor:
    return tensor if cut is None else cut.cut_from(name, tensor)


def broadcast_on_node(node: NodeGroup, tensors: Iterable[Tensor]) -> None:
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
            _broadcast_packed(node, small)
            small, size = [], 0
    _broadcast_packed(node, small)


def _broadcast_packed(node: NodeGroup, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    packed = torch.cat(tensors) if tensors and node.rank == 0 else torch.empty(sum(sizes), dtype=torch.uint8)
    node.broadcast_bytes(packed.numpy())
    if node.rank:
        for tensor, received in zip(tensors, torch.split(packed, sizes), strict=True):
            tensor.copy_(received)
