"""A job on a number of ranks: lengths, costs and phases combined, and the seconds, GPU-hours that result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.plan.simulate.costs import TokenCosts
from tlt_hpc.plan.simulate.lengths import LengthSource, Shard, deal
from tlt_hpc.plan.simulate.step import Setting, StepPhases, Steps, simulate


@dataclass(frozen=True)
class SimulatedJob:
    """A job without its number of ranks. ``origin`` says where costs and lengths come from, in words."""

    prompts: int
    group: int
    shard: Shard
    num_steps: int
    """Steps of the run."""
    setting: Setting
    costs: TokenCosts
    phases: StepPhases
    lengths: LengthSource
    origin: tuple[str, ...]
    simulated_steps: int = 20

    def run(self, num_ranks: int, speculates: bool = True) -> Steps:
        """Simulate the steps; lengths are the same for any number of ranks, with and without speculation."""
        drawn = self.lengths.draw(self.simulated_steps, self.prompts, self.group, np.random.default_rng(0))
        dealt = deal(drawn, num_ranks // self.setting.ranks_per_replica, self.shard)
        return simulate(dealt, self.costs if speculates else self.costs.plain, self.setting, self.phases)


@dataclass(frozen=True)
class NodesRow:
    """One number of ranks: means of a step, sums of the run."""

    nodes: int
    ranks: int
    rollout_seconds: float
    step_seconds: float
    gpu_hours: float
    idle_share: float
    """Share of all rank-seconds."""
    harvested_share: float
    """Share of the idle ones."""
    speculated_share: float
    """Share of all tokens."""
    gain: float
    """Seconds of a plain step over those of this one."""


def row(job: SimulatedJob, nodes: int, ranks_per_node: int) -> NodesRow:
    """What the job takes on a number of nodes."""
    ranks = nodes * ranks_per_node
    steps, plain = job.run(ranks), job.run(ranks, speculates=False)
    seconds = float(steps.step_seconds.mean())
    return NodesRow(
        nodes=nodes,
        ranks=ranks,
        rollout_seconds=float(steps.rollout_seconds.mean()),
        step_seconds=seconds,
        gpu_hours=seconds * ranks * job.num_steps / 3600,
        idle_share=steps.idle_share,
        harvested_share=steps.harvested_share,
        speculated_share=float(steps.speculated_tokens.sum() / steps.tokens.sum()),
        gain=float(plain.step_seconds.mean()) / seconds,
    )
