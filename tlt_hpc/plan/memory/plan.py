"""What a memory plan is made of: the job it is for, bytes by name and phase, and the memory that is available."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlt_hpc.config import Config
from tlt_hpc.models.shape import ModelShape, adapter_parameters, part_of

GB = 1_000_000_000
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
    def item(self) -> int:
        """Bytes of a number in the model's precision."""
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def decoding_item(self) -> int:
        """Bytes of a number in rollouts (``models.folder.decoding_dtype``)."""
        if self.device != "cpu":
            return self.item
        return 8 if self.shape.num_experts else 4

    @property
    def is_guarded(self) -> bool:
        """Whether the tie guard is on, as it is where rollouts are not in half precision."""
        return self.decoding_item >= 4

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its response."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens

    @property
    def part(self) -> ModelShape:
        """The shape of one rank's share of the decoder, which tensor parallelism divides over a replica."""
        return part_of(self.shape, self.config.rollout.tensor_parallel)

    @property
    def own_parameters(self) -> int:
        """Trained parameters of one rank's shard where ZeRO divides them over all ranks."""
        return -(-self.trained_parameters // self.num_ranks)

    @property
    def trained_parameters(self) -> int:
        """Parameters that have gradients and moments: the model's, or those of its adapters."""
        lora = self.config.lora
        return adapter_parameters(self.shape, lora.rank) if lora.rank else self.shape.num_parameters

    @property
    def frozen_parameters(self) -> int:
        """Parameters that adapters are added to."""
        return self.shape.num_parameters if self.config.lora.rank else 0

    @property
    def learns_drafting(self) -> bool:
        return self.config.speculation.mode == "full"

    @property
    def trains_drafter(self) -> bool:
        return self.learns_drafting and self.config.drafter.train

    @property
    def has_tail(self) -> bool:
        """Whether there is a replica that can wait for another, and trains the drafter meanwhile."""
        return self.trains_drafter and self.num_ranks > self.config.rollout.tensor_parallel

    @property
    def has_reference(self) -> bool:
        """Whether a second model is held; with adapters the first one without them is the reference."""
        return self.config.algorithm.kl_coefficient > 0 and not self.config.lora.rank

    @property
    def offloads(self) -> bool:
        """Whether the optimiser's state is in host memory, on a machine where that is not the device's own."""
        return bool(self.config.optimizer.offload) and self.device == "cuda"

    @property
    def offloads_parameters(self) -> bool:
        """Whether a rank's parameters are in host memory too."""
        return self.offloads and self.config.optimizer.offload == "parameters"


@dataclass(frozen=True)
class PhaseMemory:
    """What a rank's device holds at the peak of a phase: what is resident, and what only the phase itself takes."""

    name: str
    parts: NamedBytes

    @property
    def num_bytes(self) -> int:
        return total(self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on one rank's device, what each rank takes in host memory, and what the run takes on disk."""

    situation: Situation
    phases: tuple[PhaseMemory, ...]
    host: NamedBytes
    first_host: NamedBytes
    """What rank 0 alone takes in addition to ``host``."""
    disk: NamedBytes

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def node_bytes(self) -> int:
        """Host memory of rank 0's node, which takes most; on CPUs the ranks' tensors are part of it."""
        device = self.peak.num_bytes if self.situation.device == "cpu" else 0
        ranks = min(self.situation.ranks_per_node, self.situation.num_ranks)
        return (total(self.host) + device) * ranks + total(self.first_host)


HERE = "this machine's available memory"


@dataclass(frozen=True)
class MemoryLimits:
    """The bytes that are available, of each GPU and of each node's host memory; None: not given."""

    device: int | None = None
    host: int | None = None
    host_is: str = "each node's host memory"
    """What ``host`` is of, in words."""

    def hold(self, plan: MemoryPlan) -> bool:
        """Whether the plan stays within what was given."""
        return max(self.shares(plan)) <= 1

    def shares(self, plan: MemoryPlan) -> tuple[float, float]:
        """The share that is used of a GPU's memory and of a node's; 0 if it was not given."""
        used = (plan.peak.num_bytes, self.device), (plan.node_bytes, self.host)
        device, host = (0.0 if limit is None else num_bytes / limit for num_bytes, limit in used)
        return device, host


def total(parts: NamedBytes) -> int:
    """Bytes of all parts together."""
    return sum(parts.values())


def present(parts: NamedBytes) -> NamedBytes:
    """The parts that take any bytes."""
    return {name: count for name, count in parts.items() if count}


def size(num_bytes: float) -> str:
    """Bytes in words."""
    return f"{few_digits(num_bytes / GB)} GB" if num_bytes >= GB else f"{num_bytes / GB * 1000:.0f} MB"


def few_digits(value: float) -> str:
    """A number with one or two digits after the point."""
    return f"{value:,.1f}" if value >= 9.995 or not value else f"{value:.2f}"
