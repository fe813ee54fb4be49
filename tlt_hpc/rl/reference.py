"""The reference model: frozen, renewed from the policy's weights, and in pieces for a checkpoint.

At ZeRO stage 3 it is distributed over the ranks as the policy is; below, it is whole, and the same bits, on every rank.
Knows no loss and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tlt_hpc.config import Config
from tlt_hpc.models.piece import Piece, deal
from tlt_hpc.models.policy_model import PolicyModel
from tlt_hpc.models.sequence_parallel import SequenceGroup
from tlt_hpc.rl.engine import start_frozen_engine

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World


class Reference:
    """A model that is read alone, sharded like the policy. All methods are collective, ``shard`` and its bytes aside.

    The model belongs to it from here on; at stage 3 rank 0's counts alone.
    """

    def __init__(self, model: torch.nn.Module, config: Config, world: World, sequence: SequenceGroup | None) -> None:
        import deepspeed

        self._rank, self._num_ranks = world.rank, world.size
        model.requires_grad_(False).eval()
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        read = PolicyModel(model, sequence=sequence)
        self._is_dealt = config.optimizer.zero_stage == 3
        self._engine = start_frozen_engine(read, config, world.size) if self._is_dealt else None
        device = torch.device(deepspeed.get_accelerator().current_device_name())
        self.model: Callable[..., Any] = self._engine or read.to(device)
        """What ``PolicyModel`` computes; at stage 3 a layer is whole on a rank only while it is used."""

    @torch.no_grad()
    def renew(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights, all of them by name."""
        own = dict(self._parameters)
        for name, weight in weights:
            parameter = own.pop(name)
            with _written(parameter):
                parameter.copy_(weight)
        assert not own, f"the policy has no {sorted(own)[0]}"

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take over weights that ``shard`` gave on all ranks; ``read`` gives a whole one by name."""
        self.renew((name, read(name)) for name in self._parameters)

    def shard(self) -> Iterator[tuple[str, Piece]]:
        """This rank's share of the weights; not a copy. All ranks' together have each element once."""
        if not self._is_dealt:
            yield from deal(self._parameters.items(), self._rank, self._num_ranks)
            return
        for name, parameter in self._parameters.items():
            own = parameter.ds_tensor
            start = own.numel() * self._rank
            rest = max(parameter.ds_numel - start, 0)  # beyond it is padding
            if rest:
                yield name, Piece(own.detach()[:rest], start, tuple(parameter.ds_shape))

    @property
    def num_shard_bytes(self) -> int:
        """Bytes of ``shard``."""
        return sum(piece.num_bytes for _, piece in self.shard())

    def close(self) -> None:
        """Free the engine, if there is one; nobody may hold the object longer."""
        if self._engine is not None:
            self._engine.destroy()


def _written(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Within it a sharded parameter is whole, and what rank 0 writes there is kept; others are as they are."""
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return context
