"""The fp32 training state of the policy's parameters as DeepSpeed keeps it at each ZeRO stage; knows no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.models.piece import Piece, own_tensor_pieces

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""The parts of a parameter's state: its fp32 weights and Adam's two moments."""


def gather_parameters(
    parameters: Iterable[torch.nn.Parameter], stage: int, modifier_rank: int | None = None
) -> AbstractContextManager[Any]:
    """Context in which the parameters are whole; what rank ``modifier_rank`` writes there is kept on all ranks."""
    if stage < 3:
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=modifier_rank
    )
    return whole


class TrainState:
    """The state of ``parameters``, by name, that an engine trains; all methods are collective.

    It holds the engine, whose process groups must end before Python does.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, torch.nn.Parameter], stage: int, world: World) -> None:
        self._engine, self._parameters, self._stage, self._world = engine, parameters, stage, world

    def gather_master_weights(self, name: str) -> torch.Tensor:
        """A parameter's fp32 weights in the parameter's shape, whole on every rank."""
        return self._gather_full_state(self._parameters[name], "master")

    def own_state_pieces(self) -> Iterator[tuple[str, Piece]]:
        """This rank's pieces, under names such as ``lm_head.weight.exp_avg``; see ``Policy.state_shard``."""
        if self._stage == 0:
            every = [
                (f"{name}.{kind}", self._gather_full_state(p, kind))
                for name, p in self._parameters.items()
                for kind in KINDS
            ]
            yield from own_tensor_pieces(every, self._world.rank, self._world.size)
            return
        for name, parameter in self._parameters.items():
            for kind in KINDS:
                piece = self._own_piece(parameter, kind)
                if piece is not None:
                    yield f"{name}.{kind}", piece

    @property
    def num_shard_bytes(self) -> int:
        """Bytes of ``own_state_pieces``, known before there are moments."""
        if self._stage == 0:
            masters = [(name, parameter) for name, parameter in self._parameters.items() for _ in KINDS]
            return sum(piece.num_bytes for _, piece in own_tensor_pieces(masters, self._world.rank, self._world.size))
        masters_only = (self._own_piece(parameter, "master") for parameter in self._parameters.values())
        return len(KINDS) * sum(piece.num_bytes for piece in masters_only if piece is not None)

    def load(
        self,
        read: Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]],
        read_span: Callable[[str, int, int, tuple[int, ...]], torch.Tensor],
        num_steps: int,
    ) -> None:
        """Load all ranks' ``own_state_pieces``, once there are moments; arguments as ``Policy.load_state``."""
        spread = {name: parameter for name, parameter in self._parameters.items() if _is_spread(parameter)}
        whole = (f"{name}.{kind}" for name in self._parameters if name not in spread for kind in KINDS)
        for full_name, tensor in read(whole):
            name, _, kind = full_name.rpartition(".")
            parameter = self._parameters[name]
            if kind == "master":  # the next forward pass reads the parameter, which only the next step would write
                with gather_parameters([parameter], self._stage, modifier_rank=0), torch.no_grad():
                    parameter.copy_(tensor)
            self._set_full_state(parameter, kind, tensor.to(self._engine.device))

        def read_own() -> None:
            for name, parameter in spread.items():
                for kind in KINDS:
                    self._load_own_shard(parameter, kind, partial(read_span, f"{name}.{kind}"))

        self._world.run_on_all_ranks(read_own)
        self.set_step_count(num_steps)

    def set_step_count(self, num_steps: int) -> None:
        """Set the number of steps that Adam's bias correction counts from."""
        for state in self._engine.basic_optimizer.state.values():
            state["step"].fill_(num_steps)

    def _gather_full_state(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        state: torch.Tensor
        BEAT.tick()
        if self._stage == 0:
            state = parameter.detach() if kind == "master" else self._engine.basic_optimizer.state[parameter][kind]
        elif kind == "master":
            state = safe_get_full_fp32_param(parameter)
        else:
            state = safe_get_full_optimizer_state(parameter, kind)
        return state

    def _own_piece(self, parameter: Any, kind: str) -> Piece | None:
        """What ZeRO keeps of a parameter's state on this rank; None where that is nothing."""
        if self._stage == 3:
            import deepspeed.utils as state

            if kind == "master":
                own = state.safe_get_local_fp32_param(parameter)
            else:
                own = state.safe_get_local_optimizer_state(parameter, kind)
            start = own.numel() * self._world.rank
            rest = max(parameter.ds_numel - start, 0)  # beyond it is padding
            return Piece(own.detach()[:rest], start, tuple(parameter.ds_shape)) if rest else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        fragment = mapping.get_hp_fragment(None if kind == "master" else kind)
        return Piece(fragment.detach(), mapping.lp_fragment_address.start, tuple(parameter.shape))

    def _set_full_state(self, parameter: torch.nn.Parameter, kind: str, value: torch.Tensor) -> None:
        import deepspeed.utils as state

        BEAT.tick()
        if self._stage == 0:
            self._gather_full_state(parameter, kind).copy_(value)
        elif self._stage == 3:
            # DeepSpeed's own setter of whole values fails on ranks whose number does not divide them.
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            padded = torch.nn.functional.pad(value.flatten(), (0, size * self._world.size - value.numel()))
            own = padded.narrow(0, size * self._world.rank, size)
            if kind == "master":
                state.safe_set_local_fp32_param(parameter, own)
            else:
                state.safe_set_local_optimizer_state(parameter, own, kind)
        elif kind == "master":
            state.safe_set_full_fp32_param(parameter, value)
        else:
            state.safe_set_full_optimizer_state(parameter, value, kind)

    def _load_own_shard(
        self, parameter: Any, kind: str, read: Callable[[int, int, tuple[int, ...]], torch.Tensor]
    ) -> None:
        """Read this rank's share of a parameter's state at stage 3, and of the parameter itself from its master."""
        import deepspeed.utils as state

        BEAT.tick()
        own = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)  # the last ranks' may end in padding
        start = own.numel() * self._world.rank
        if (count := min(own.numel(), parameter.ds_numel - start)) > 0:
            own[:count] = read(start, start + count, tuple(parameter.ds_shape))
        if kind == "master":
            assert parameter.ds_status.name == "NOT_AVAILABLE", "a gathered parameter would keep its old values"
            state.safe_set_local_fp32_param(parameter, own)
            with torch.no_grad():
                parameter.ds_tensor.copy_(own)
        else:
            state.safe_set_local_optimizer_state(parameter, own, kind)


def _is_spread(parameter: Any) -> bool:
    """True at ZeRO stage 3 for all parameters but small ones, which every rank holds whole."""
    return hasattr(parameter, "ds_tensor") and not parameter.ds_persist
