"""The job, the model and the ranks that memory is planned for, and bytes by the name of what takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tlt_hpc.config import Config
from tlt_hpc.models.folder import decoding_dtype
from tlt_hpc.models.shape import ModelShape, num_adapter_parameters

DeviceType = Literal["cpu", "cuda"]
NamedBytes = dict[str, int]
"""Bytes by the name of what takes them."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Situation:
    """The job, the model and the ranks that a plan is made for."""

    config: Config
    shape: ModelShape
    num_ranks: int
    ranks_per_node: int
    device: DeviceType

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a number in the model's precision."""
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def decoding_dtype(self) -> torch.dtype:
        """The precision of rollouts."""
        return decoding_dtype(self.config.model.dtype, torch.device(self.device), self.shape)

    @property
    def decoding_bytes_per_number(self) -> int:
        """Bytes of a number in rollouts."""
        return self.decoding_dtype.itemsize

    @property
    def has_tie_guard(self) -> bool:
        """True where the tie guard is on: rollouts are not in half precision."""
        return self.decoding_bytes_per_number >= 4

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest prompt with its response."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens

    @property
    def num_shard_parameters(self) -> int:
        """Trained parameters of one rank's shard where ZeRO divides them over all ranks."""
        return -(-self.trained_parameters // self.num_ranks)

    @property
    def trained_parameters(self) -> int:
        """Parameters that have gradients and moments: the model's, or those of its adapters."""
        lora = self.config.lora
        return num_adapter_parameters(self.shape, lora.rank) if lora.rank else self.shape.num_parameters

    @property
    def frozen_parameters(self) -> int:
        """Parameters that adapters are added to."""
        return self.shape.num_parameters if self.config.lora.rank else 0

    @property
    def has_learned_drafter(self) -> bool:
        """True if the job has a learned drafter."""
        return self.config.speculation.has_drafter

    @property
    def trains_drafter(self) -> bool:
        """True if the run trains it."""
        return self.config.speculation.trains_drafter

    @property
    def has_tail_phase(self) -> bool:
        """True if there is a replica that can wait for another, and trains the drafter meanwhile."""
        return self.trains_drafter and self.num_ranks > self.config.rollout.tensor_parallel

    @property
    def has_reference(self) -> bool:
        """True if a second model is held; with adapters the first one without them is the reference."""
        return self.config.algorithm.kl_coefficient > 0 and not self.config.lora.rank

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimiser's state is in host memory, on a machine where that is not the device's own."""
        return bool(self.config.optimizer.offload) and self.device == "cuda"

    @property
    def offloads_parameters(self) -> bool:
        """True if a rank's parameters are in host memory too."""
        return self.offloads_optimizer and self.config.optimizer.offload == "parameters"


def total_bytes(parts: NamedBytes) -> int:
    """Bytes of all parts together."""
    return sum(parts.values())


def without_empty_parts(parts: NamedBytes) -> NamedBytes:
    """The parts that take any bytes."""
    return {name: count for name, count in parts.items() if count}
