"""A job on a number of ranks: its lengths, costs and phases put together, and what comes out. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tlt_hpc.config import Config
from tlt_hpc.plan.simulate.costs import Costs
from tlt_hpc.plan.simulate.energy import Watts, kilowatt_hours
from tlt_hpc.plan.simulate.lengths import Ints, Lengths, Shard, deal
from tlt_hpc.plan.simulate.step import Phases, Setting, Steps, simulate


@dataclass(frozen=True)
class Workload:
    """All but the number of ranks. ``origin`` says where costs and lengths come from, in words."""

    prompts: int
    group: int
    shard: Shard
    num_steps: int
    """Of the run."""
    setting: Setting
    costs: Costs
    phases: Phases
    lengths: Lengths
    origin: tuple[str, ...]
    speculates: bool = True
    seed: int = 0
    simulated_steps: int = 20

    def replicas(self, num_ranks: int) -> int:
        return num_ranks // self.setting.ranks_per_replica

    def drawn(self) -> Ints:
        """[T, P, G], the same for any number of ranks and any setting."""
        rng = np.random.default_rng(self.seed)
        return self.lengths.draw(self.simulated_steps, self.prompts, self.group, rng)

    def dealt(self, num_ranks: int) -> Ints:
        return deal(self.drawn(), self.replicas(num_ranks), self.shard)

    def run(self, num_ranks: int, speculates: bool | None = None) -> Steps:
        """Simulate the steps; ``speculates`` as the job has it where it is not said."""
        does = self.speculates if speculates is None else speculates
        return simulate(self.dealt(num_ranks), self.costs if does else self.costs.plain, self.setting, self.phases)

    def with_setting(self, **changes: int | float) -> Workload:
        return replace(self, setting=replace(self.setting, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """One number of ranks: means of a step, sums of the run."""

    nodes: int
    ranks: int
    rollout_seconds: float
    step_seconds: float
    gpu_hours: float
    kilowatt_hours: float | None
    """None where no watts are known."""
    idle_share: float
    """Of all rank-seconds."""
    harvested_share: float
    """Of the idle ones."""
    speculated_share: float
    """Of all tokens."""
    gain: float
    """Plain step over this one."""


def rows(work: Workload, nodes: list[int], ranks_per_node: int, watts: Watts | None) -> list[Row]:
    """The table: a row for each number of nodes."""
    return [_row(work, count, count * ranks_per_node, watts) for count in nodes]


def _row(work: Workload, nodes: int, ranks: int, watts: Watts | None) -> Row:
    steps, plain = work.run(ranks), work.run(ranks, speculates=False)
    seconds = float(steps.step_seconds.mean())
    return Row(
        nodes=nodes,
        ranks=ranks,
        rollout_seconds=float(steps.rollout_seconds.mean()),
        step_seconds=seconds,
        gpu_hours=seconds * ranks * work.num_steps / 3600,
        kilowatt_hours=None if watts is None else kilowatt_hours(steps, watts) * work.num_steps,
        idle_share=steps.idle_share,
        harvested_share=steps.harvested_share,
        speculated_share=float(steps.speculated_tokens.sum() / steps.tokens.sum()),
        gain=float(plain.step_seconds.mean()) / seconds,
    )


def setting_from(config: Config) -> Setting:
    """How a job rolls out."""
    rollout, drafter = config.rollout, config.drafter
    return Setting(
        ranks_per_replica=rollout.tensor_parallel,
        max_live=rollout.max_live,
        prompt_tokens=config.data.max_prompt_tokens / 2,
        read_share=1 / rollout.group_size if rollout.shard == "group" else 1.0,
        min_idle=drafter.min_idle,
        micro_step_seconds=drafter.micro_step_seconds,
        trains=drafter.train and config.speculation.mode == "full",
        stop_seconds=0.005,
    )
