"""``tlt simulate``: builds the job to simulate from the options, and shows what comes out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import Config, ConfigError, check_replicas, load_config
from tlt_hpc.extras.simulate.assumed import (
    GpuFigures,
    derating_of,
    gpu_costs,
    gpu_phases,
    speculative_costs,
)
from tlt_hpc.extras.simulate.costs import TokenCosts
from tlt_hpc.extras.simulate.lengths import (
    MEDIAN_SHARE,
    PROMPT_SHARE,
    SPREAD,
    Ints,
    log_normal,
    resample_lengths,
    shard_lengths,
)
from tlt_hpc.extras.simulate.recorded import RecordedRun, costs_by_strategy, length_groups, phases_of, read_run
from tlt_hpc.extras.simulate.step import Setting, StepPhases, Steps, setting_from, simulate
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.plan_options import parse_positive_integer, parse_positive_integers, parse_positive_number
from tlt_hpc.storage.folder import RunFolder, WriteError
from tlt_hpc.storage.records import write_json

_GPUS = 8
NOTE = (
    "GPU-h: of the run, a rank a GPU; idle: of all rank-seconds; harvested: of the idle ones; gain: plain step over "
    "this one. Draft-ahead, and what training the drafter brings to accept lengths, are not modelled. To compare "
    "settings, give other values: rollout.max_live=32. tlt plan says whether they fit."
)


@dataclass(frozen=True)
class SimulatedJob:
    """A job without its number of ranks."""

    config: Config
    setting: Setting
    costs: TokenCosts
    phases: StepPhases
    lengths: Ints
    origin: tuple[str, ...]
    """The sources of costs and lengths, in words."""

    def run(self, num_ranks: int, costs: TokenCosts) -> Steps:
        """Simulate the steps; lengths are the same for any number of ranks, with and without speculation."""
        num_replicas = num_ranks // self.setting.ranks_per_replica
        shards = shard_lengths(self.lengths, num_replicas, self.config.rollout.shard)
        return simulate(shards, costs, self.setting, self.phases)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt simulate``."""
    add = command.add_argument
    add("config", metavar="CONFIG.toml", nargs="?", help="the run, e.g. jobs/qwen7b.toml")
    add("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.max_live=8")
    add("--nodes", type=parse_positive_integers, default=[1, 2, 4, 8], metavar="N,N", help="nodes (default 1,2,4,8)")
    add(
        "--gpus-per-node", type=parse_positive_integer, metavar="N", help="one rank each (default 8, or --from's ranks)"
    )
    add("--steps", type=parse_positive_integer, default=20, metavar="N", help="steps that are simulated (default 20)")
    # of each two the second would have no effect
    costs = command.add_mutually_exclusive_group().add_argument
    costs("--from", dest="source", type=Path, metavar="RUN", help="lengths, rounds and phases of this run's log")
    costs("--shape", metavar="CONFIG.json", help="the model's config.json, or a name such as Qwen2.5-7B")
    lengths = command.add_mutually_exclusive_group().add_argument
    lengths(
        "--median",
        type=parse_positive_number,
        metavar="TOKENS",
        help="of the log-normal law (default a sixth of the cap)",
    )
    lengths("--lengths", type=Path, metavar="RUN", help="lengths alone of this run's log")
    add("--json", type=Path, metavar="PATH", help="write all figures there as well")


def run(options: argparse.Namespace) -> int:
    """Print what the job would take on each number of nodes; returns the exit status.

    Raises:
        ValueError: an option, the configuration or a file is invalid.
    """
    log = read_run(options.source) if options.source else None
    config = _load_job_config(options, log)
    ranks_per_node = options.gpus_per_node or (log.num_ranks if log else _GPUS)
    for count in options.nodes:
        check_replicas(config.rollout, count * ranks_per_node)
    job = make_simulated_job(config, options, log)
    rows = [predict_row(job, count, ranks_per_node) for count in sorted(set(options.nodes))]
    print_prediction(job, rows, TextConsole())
    if options.json is not None:
        try:
            write_json(options.json, {"origin": job.origin, "rows": rows})
        except WriteError as error:
            raise ConfigError(f"{error.fact}; make room there or give another --json") from None
    return 0


def predict_row(job: SimulatedJob, nodes: int, ranks_per_node: int) -> dict[str, Any]:
    """The figures of the job on a number of nodes: means of a step, sums of the run, as ``NOTE`` explains them."""
    ranks = nodes * ranks_per_node
    steps, plain = job.run(ranks, job.costs), job.run(ranks, job.costs.plain)
    seconds = float(steps.step_seconds.mean())
    return {
        "nodes": nodes,
        "ranks": ranks,
        "rollout_seconds": float(steps.rollout_seconds.mean()),
        "step_seconds": seconds,
        "gpu_hours": seconds * ranks * job.config.run.num_steps / 3600,
        "idle_share": steps.idle_share,
        "harvested_share": steps.harvested_share,
        "gain": float(plain.step_seconds.mean()) / seconds,
        "plain_rollout_seconds": float(plain.rollout_seconds.mean()),
    }


def make_simulated_job(config: Config, options: argparse.Namespace, log: RecordedRun | None) -> SimulatedJob:
    """The job with its costs: of a run, or of an H100-class GPU.

    Raises:
        ValueError: an option is out of range, or a file cannot be read.
    """
    rollout = config.rollout
    shape, cap = (options.steps, rollout.prompts_per_step, rollout.group_size), rollout.max_new_tokens
    of = read_run(options.lengths) if options.lengths else log
    if of is not None and options.median is None:
        groups = length_groups(of)
        lengths, said = (
            resample_lengths(groups, shape),
            f"lengths: the {groups.size:,} of {of.name}, drawn with replacement",
        )
    else:
        median = options.median or cap * MEDIAN_SHARE
        lengths = log_normal(shape, median, cap)
        said = (
            f"lengths (assumed): log-normal, median {median:,.0f}, cap {cap:,}, spread {SPREAD:g}, {PROMPT_SHARE:.0%} "
            "of the variance between prompts"
        )
    if log is None:
        return _on_assumed_gpus(config, options.shape, lengths, said)
    # prompts are read at the measured seconds, each one token long
    setting = replace(
        setting_from(config), prompt_tokens=1.0, read_share=1.0, stop_seconds=float(log.stop_seconds.mean())
    )
    costs = costs_by_strategy(log)
    origin = (
        f"rounds, phases: measured in {log.name}, {len(log.lengths)} steps on {log.num_ranks} ranks, which took "
        f"{log.rollout_seconds.mean():.2f} s a rollout and {log.step_seconds.mean():.2f} s a step",
        said,
    )
    costs = costs if config.speculation.mode != "plain" else costs.plain
    return SimulatedJob(config, setting, costs, phases_of(log), lengths, origin)


def _on_assumed_gpus(config: Config, named_shape: str | None, lengths: Ints, said: str) -> SimulatedJob:
    shape, gpu = find_shape(config.model.path, named_shape), GpuFigures()
    if config.speculation.mode == "ngram":
        raise ConfigError("speculation.mode = 'ngram': no speed-up of n-grams is known; give --from RUN of such a run")
    costs = gpu_costs(shape, config.rollout.tensor_parallel, config.rollout.max_live, gpu)
    speed_ups = list[str]()
    if config.speculation.mode != "plain":
        costs = speculative_costs(costs, derating_of(find_shape("Qwen2.5-32B", None), shape))
        speed_ups = [
            "speed-ups: a trained drafter's, TLT paper, 32B on 4 cards, derated by a draft step's bytes",
            "above 32 responses at a time they are extrapolated: on few nodes, where ranks often "
            "generate more, the gain is probably too high",
        ]
    origin = (
        f"rounds (assumed): H100-class card, {gpu.bytes_share:.0%} of 3.35 TB/s, {gpu.decode_flops_share:.0%} of 990 "
        "TFLOP/s",
        *speed_ups,
        f"update (assumed): {gpu.update_flops_share:.0%} of 990 TFLOP/s, and {gpu.fixed_step_seconds:g} s a step",
        said,
    )
    phases = gpu_phases(shape, gpu, config.checkpoint.every_steps)
    return SimulatedJob(config, setting_from(config), costs, phases, lengths, origin)


def _load_job_config(options: argparse.Namespace, log: RecordedRun | None) -> Config:
    if log is not None and (options.config is None or "=" in options.config):
        overrides = [*filter(None, [options.config]), *options.overrides]
        return load_config(str(RunFolder(options.source).config), overrides)
    if options.config is None:
        raise ConfigError("nothing to simulate; give a CONFIG.toml or --from RUN")
    if Path(options.config).is_dir():
        raise ConfigError(f"{options.config} is a folder; for a run give --from {options.config}, else a CONFIG.toml")
    return load_config(options.config, options.overrides)


def print_prediction(job: SimulatedJob, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print where the figures come from, and the table by nodes."""
    run, rollout = job.config.run, job.config.rollout
    head = f"{run.name}: {rollout.prompts_per_step} x {rollout.group_size} responses a step, {run.num_steps} steps"
    console.print(f"{head}; simulated, not run", highlight=False, markup=False)
    for line in job.origin:
        console.print(f"  {line}", highlight=False, markup=False)
    table = Table(title="By number of nodes", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  pad_edge=False)  # fmt: skip
    for column in ("nodes", "ranks", "rollout s", "step s", "GPU-h", "idle", "harvested", "gain"):
        table.add_column(column, justify="right")
    for one in rows:
        table.add_row(
            str(one["nodes"]), str(one["ranks"]), f"{one['rollout_seconds']:,.1f}", f"{one['step_seconds']:,.1f}",
            f"{one['gpu_hours']:,.1f}", f"{one['idle_share']:.0%}", f"{one['harvested_share']:.0%}",
            f"{one['gain']:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(NOTE, highlight=False, markup=False)
