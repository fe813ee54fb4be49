"""What memory there is, and whether a plan stays within it. Counts alone."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_hpc.plan.memory.parts import MemoryPlan


@dataclass(frozen=True)
class Limits:
    """What there is, in bytes: of each GPU and of each node's host memory; None: not said."""

    device: int | None = None
    host: int | None = None

    def hold(self, plan: MemoryPlan) -> bool:
        """Whether the plan stays within what was said."""
        return self.filled(plan) <= 1

    def filled(self, plan: MemoryPlan) -> float:
        """How full the fuller memory is of those that were said; 0 where none was."""
        return max(self._shares(plan))

    def better(self, plan: MemoryPlan, other: MemoryPlan) -> bool:
        """Whether ``other`` fills the fuller memory less, and has none run over that does not yet."""
        shares = zip(self._shares(plan), self._shares(other), strict=True)
        return self.filled(other) < self.filled(plan) and all(new <= max(1.0, old) for old, new in shares)

    def _shares(self, plan: MemoryPlan) -> tuple[float, float]:
        device = plan.peak.num_bytes / self.device if self.device is not None else 0.0
        return device, node_bytes(plan) / self.host if self.host is not None else 0.0


def node_bytes(plan: MemoryPlan) -> int:
    """Host memory of a node; on CPUs the ranks' tensors are there as well."""
    device = plan.peak.num_bytes if plan.situation.device == "cpu" else 0
    return plan.host_bytes_per_node + device * min(plan.situation.ranks_per_node, plan.situation.num_ranks)
