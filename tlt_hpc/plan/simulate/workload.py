"""A job on a number of ranks: lengths, costs and phases combined, and the seconds, GPU-hours and energy that result."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from tlt_hpc.config import Config
from tlt_hpc.plan.simulate.costs import TokenCosts
from tlt_hpc.plan.simulate.lengths import Ints, LengthSource, Shard, deal
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
    speculates: bool = True
    seed: int = 0
    simulated_steps: int = 20

    def replicas(self, num_ranks: int) -> int:
        return num_ranks // self.setting.ranks_per_replica

    def drawn(self) -> Ints:
        """Lengths [T, P, G], the same for any number of ranks and any setting."""
        rng = np.random.default_rng(self.seed)
        return self.lengths.draw(self.simulated_steps, self.prompts, self.group, rng)

    def dealt(self, num_ranks: int) -> Ints:
        return deal(self.drawn(), self.replicas(num_ranks), self.shard)

    def run(self, num_ranks: int, speculates: bool | None = None) -> Steps:
        """Simulate the steps; ``speculates``: the job's own if None."""
        does = self.speculates if speculates is None else speculates
        return simulate(self.dealt(num_ranks), self.costs if does else self.costs.plain, self.setting, self.phases)

    def with_setting(self, **changes: int | float) -> SimulatedJob:
        return replace(self, setting=replace(self.setting, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class NodesRow:
    """One number of ranks: means of a step, sums of the run."""

    nodes: int
    ranks: int
    rollout_seconds: float
    step_seconds: float
    gpu_hours: float
    kilowatt_hours: float | None
    """None if no watts are known."""
    idle_share: float
    """Share of all rank-seconds."""
    harvested_share: float
    """Share of the idle ones."""
    speculated_share: float
    """Share of all tokens."""
    gain: float
    """Seconds of a plain step over those of this one."""


def rows(job: SimulatedJob, nodes: list[int], ranks_per_node: int, watts: Watts | None) -> list[NodesRow]:
    """The table: a row for each number of nodes."""
    return [_row(job, count, count * ranks_per_node, watts) for count in nodes]


def _row(job: SimulatedJob, nodes: int, ranks: int, watts: Watts | None) -> NodesRow:
    steps, plain = job.run(ranks), job.run(ranks, speculates=False)
    seconds = float(steps.step_seconds.mean())
    return NodesRow(
        nodes=nodes,
        ranks=ranks,
        rollout_seconds=float(steps.rollout_seconds.mean()),
        step_seconds=seconds,
        gpu_hours=seconds * ranks * job.num_steps / 3600,
        kilowatt_hours=None if watts is None else kilowatt_hours(steps, watts) * job.num_steps,
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


@dataclass(frozen=True)
class Watts:
    """Watts of one GPU with its share of the node; assumed, not measured: an H100's limit is 700 W."""

    decode: float = 450.0
    train: float = 600.0
    wait: float = 150.0
    update: float = 650.0


def kilowatt_hours(steps: Steps, watts: Watts) -> float:
    """Energy of an average step, all ranks together."""
    idle, harvested = float(steps.idle_rank_seconds.mean()), float(steps.harvested_rank_seconds.mean())
    busy = float(steps.rollout_seconds.mean()) * steps.num_ranks - idle
    update = float(steps.other_seconds.mean()) * steps.num_ranks
    joules = busy * watts.decode + harvested * watts.train + (idle - harvested) * watts.wait + update * watts.update
    return joules / 3.6e6


def read_watts(text: str) -> Watts:
    """Read watts such as ``decode=450,wait=150``.

    Raises:
        ValueError: an unknown phase, or no number of 0 or more.
    """
    known = [field.name for field in fields(Watts)]
    given: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            given[name.strip()] = float(value)
        except ValueError:
            given[name.strip()] = -1.0
    if bad := [name for name, value in given.items() if name not in known or not 0 <= value < 1e6]:
        raise ValueError(f"--watts {text}: {bad[0]!r} is none of {', '.join(known)} with watts, as in decode=450")
    return Watts(**given)
