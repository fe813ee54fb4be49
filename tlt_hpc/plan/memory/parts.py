"""What a memory plan is made of: bytes by name, phases, and the situation that they are predicted for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tlt_hpc.config import Config
from tlt_hpc.models.shape import ModelShape, part_of

DeviceType = Literal["cpu", "cuda"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Situation:
    """What a plan is for."""

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
        """The sizes of what a rank has of the layers that its replica decodes with."""
        return part_of(self.shape, self.config.rollout.tensor_parallel)

    @property
    def learns_drafting(self) -> bool:
        return self.config.speculation.mode == "full"

    @property
    def has_reference(self) -> bool:
        return self.config.algorithm.kl_coefficient > 0

    @property
    def offloads(self) -> bool:
        """Whether the optimiser's state is in host memory beside a device's own."""
        return self.config.optimizer.offload and self.device == "cuda"

    @property
    def offloads_parameters(self) -> bool:
        """Whether a rank's parameters are there too."""
        return self.offloads and self.config.optimizer.offload_parameters


@dataclass(frozen=True)
class Part:
    """Bytes of one thing."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Phase:
    """What a rank's device holds at the peak of a phase: what stays, and what the phase itself takes."""

    name: str
    resident: tuple[Part, ...]
    own: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.resident, *self.own)

    @property
    def num_bytes(self) -> int:
        return total(self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on one rank's device, what each rank takes in host memory, and what the run takes on disk."""

    situation: Situation
    phases: tuple[Phase, ...]
    host: tuple[Part, ...]
    first_host: tuple[Part, ...]
    """Beside ``host``, of rank 0 alone."""
    disk: tuple[Part, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def host_bytes_per_node(self) -> int:
        """Of rank 0's node, which takes most."""
        ranks = min(self.situation.ranks_per_node, self.situation.num_ranks)
        return total(self.host) * ranks + total(self.first_host)


def total(parts: Iterable[Part]) -> int:
    """Bytes of all parts together."""
    return sum(part.num_bytes for part in parts)


def some(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts that are there at all."""
    return tuple(part for part in parts if part.num_bytes)
