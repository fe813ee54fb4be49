"""What a memory plan is made of: the job it is for, bytes by name and phase, and the memory that is available."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tlt_hpc.config import Config
from tlt_hpc.models.shape import ModelShape, part_of

DeviceType = Literal["cpu", "cuda"]
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
    def longest(self) -> int:
        """Tokens of the longest prompt with its response."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens

    @property
    def part(self) -> ModelShape:
        """The shape of one rank's share of the decoder, which tensor parallelism divides over a replica."""
        return part_of(self.shape, self.config.rollout.tensor_parallel)

    @property
    def own_parameters(self) -> int:
        """Parameters of one rank's shard where ZeRO divides them over all ranks."""
        return -(-self.shape.num_parameters // self.num_ranks)

    @property
    def learns_drafting(self) -> bool:
        return self.config.speculation.mode == "full"

    @property
    def trains_drafter(self) -> bool:
        return self.learns_drafting and self.config.drafter.train

    @property
    def has_reference(self) -> bool:
        return self.config.algorithm.kl_coefficient > 0

    @property
    def offloads(self) -> bool:
        """Whether the optimiser's state is in host memory, on a machine where that is not the device's own."""
        return self.config.optimizer.offload and self.device == "cuda"

    @property
    def offloads_parameters(self) -> bool:
        """Whether a rank's parameters are in host memory too."""
        return self.offloads and self.config.optimizer.offload_parameters


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one thing."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class PhaseMemory:
    """What a rank's device holds at the peak of a phase: what is resident, and what only the phase itself takes."""

    name: str
    resident: tuple[MemoryPart, ...]
    own: tuple[MemoryPart, ...]

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        return (*self.resident, *self.own)

    @property
    def num_bytes(self) -> int:
        return total(self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on one rank's device, what each rank takes in host memory, and what the run takes on disk."""

    situation: Situation
    phases: tuple[PhaseMemory, ...]
    host: tuple[MemoryPart, ...]
    first_host: tuple[MemoryPart, ...]
    """What rank 0 alone takes in addition to ``host``."""
    disk: tuple[MemoryPart, ...]

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def host_bytes_per_node(self) -> int:
        """Host memory of rank 0's node, which takes most, without what CPU ranks hold as their device."""
        return total(self.host) * self._ranks_on_a_node + total(self.first_host)

    @property
    def node_bytes(self) -> int:
        """Host memory of rank 0's node; on CPUs the ranks' tensors are part of it."""
        device = self.peak.num_bytes if self.situation.device == "cpu" else 0
        return self.host_bytes_per_node + device * self._ranks_on_a_node

    @property
    def _ranks_on_a_node(self) -> int:
        return min(self.situation.ranks_per_node, self.situation.num_ranks)


@dataclass(frozen=True)
class MemoryLimits:
    """The bytes that are available, of each GPU and of each node's host memory; None: not given."""

    device: int | None = None
    host: int | None = None

    def hold(self, plan: MemoryPlan) -> bool:
        """Whether the plan stays within what was given."""
        return self.filled(plan) <= 1

    def filled(self, plan: MemoryPlan) -> float:
        """The share that is used of the fuller of both memories; 0 if neither was given."""
        return max(self._shares(plan))

    def better(self, plan: MemoryPlan, other: MemoryPlan) -> bool:
        """Whether ``other`` fills the fuller memory less, and exceeds neither that ``plan`` does not."""
        shares = zip(self._shares(plan), self._shares(other), strict=True)
        return self.filled(other) < self.filled(plan) and all(new <= max(1.0, old) for old, new in shares)

    def _shares(self, plan: MemoryPlan) -> tuple[float, float]:
        used = (plan.peak.num_bytes, self.device), (plan.node_bytes, self.host)
        device, host = (0.0 if limit is None else num_bytes / limit for num_bytes, limit in used)
        return device, host


def total(parts: Iterable[MemoryPart]) -> int:
    """Bytes of all parts together."""
    return sum(part.num_bytes for part in parts)


def parts_of(num_bytes: Mapping[str, int]) -> tuple[MemoryPart, ...]:
    """Parts from bytes by name; parts of no bytes are left out."""
    return tuple(MemoryPart(name, count) for name, count in num_bytes.items() if count)
