"""What a memory plan is made of: bytes by name and phase, and the memory that is available."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_hpc.plan.memory.engine import PlannedEngine
from tlt_hpc.plan.memory.situation import NamedBytes, Situation, total_bytes


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on a rank's device at the peak of a phase, by part: resident ones, and those of the phase alone."""

    name: str
    parts: NamedBytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return total_bytes(self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on one rank's device, what each rank takes in host memory, and what the run takes on disk."""

    situation: Situation
    engine: PlannedEngine
    phases: tuple[PhaseMemory, ...]
    host: NamedBytes
    first_host: NamedBytes
    """What rank 0 alone takes in addition to ``host``."""
    disk: NamedBytes

    @property
    def peak_phase(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def node_bytes(self) -> int:
        """Host memory of rank 0's node, which takes most; on CPUs the ranks' tensors are part of it."""
        device = self.peak_phase.num_bytes if self.situation.device == "cpu" else 0
        ranks = min(self.situation.ranks_per_node, self.situation.num_ranks)
        return (total_bytes(self.host) + device) * ranks + total_bytes(self.first_host)


HERE = "this machine's available memory"


@dataclass(frozen=True)
class MemoryLimits:
    """The bytes that are available, of each GPU and of each node's host memory; None: not given."""

    device: int | None = None
    host: int | None = None
    host_is: str = "each node's host memory"
    """What ``host`` is of, in words."""

    def plan_fits(self, plan: MemoryPlan) -> bool:
        """Return True if the plan stays within the limits."""
        return max(self.used_shares(plan)) <= 1

    def used_shares(self, plan: MemoryPlan) -> tuple[float, float]:
        """The share that is used of a GPU's memory and of a node's; 0 if it was not given."""
        used = (plan.peak_phase.num_bytes, self.device), (plan.node_bytes, self.host)
        device, host = (0.0 if limit is None else num_bytes / limit for num_bytes, limit in used)
        return device, host
