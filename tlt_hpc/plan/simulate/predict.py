"""``tlt simulate``: builds the job to simulate from the options, and shows what comes out."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import Config, ConfigError, check_replicas, load_config
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.simulate import recorded
from tlt_hpc.plan.simulate.assumed import GpuFigures, derating_of, gpu_costs, gpu_phases, speculative_costs
from tlt_hpc.plan.simulate.costs import TokenCosts
from tlt_hpc.plan.simulate.job import NodesRow, SimulatedJob, row
from tlt_hpc.plan.simulate.lengths import MEDIAN_SHARE, LengthSource, LogNormal
from tlt_hpc.plan.simulate.recorded import RecordedRun, read_run
from tlt_hpc.plan.simulate.step import StepPhases, setting_from
from tlt_hpc.plan.simulate.validate import PredictionCheck, validate
from tlt_hpc.storage.folder import RunFolder

MISSED = 1
"""Exit status of a prediction that is off by more than a tenth."""
_GPUS = 8


def run(options: argparse.Namespace) -> int:
    """Print what the options ask for; returns the exit status.

    Raises:
        ValueError: an option, the configuration or a file is invalid.
    """
    console = TextConsole()
    if options.validate:
        return _validate(options, console)
    log = read_run(options.source) if options.source else None
    config = _config(options, log)
    ranks_per_node = _positive(options.gpus, "--gpus") or (log.num_ranks if log else _GPUS)
    nodes = read_nodes(options.nodes)
    job = simulated_job(config, options, log)
    for count in nodes:
        check_replicas(config, count * ranks_per_node)
    rows = [row(job, count, ranks_per_node) for count in nodes]
    if options.json:
        print(json.dumps({"origin": job.origin, "rows": [asdict(one) for one in rows]}, indent=2))
    else:
        show(config.run.name, job, rows, console)
    return 0


def simulated_job(config: Config, options: argparse.Namespace, log: RecordedRun | None) -> SimulatedJob:
    """The job with its costs: of a run, or of an H100-class GPU.

    Raises:
        ValueError: an option is out of range, or a file cannot be read.
    """
    if (steps := _positive(options.steps, "--steps")) is None or steps > 10_000:
        raise ConfigError(f"--steps {options.steps}: give 1 to 10,000")
    lengths, said = _lengths(config, options, log)
    setting = setting_from(config)
    if log is not None:
        setting = replace(setting, prompt_tokens=1.0, read_share=1.0, stop_seconds=float(log.stop_seconds.mean()))
        costs, phases, origin = _measured_costs(config, log)
    else:
        costs, phases, origin = _assumed_costs(config, options)
    return SimulatedJob(
        prompts=config.rollout.prompts_per_step,
        group=config.rollout.group_size,
        shard=config.rollout.shard,
        num_steps=config.run.num_steps,
        setting=setting,
        costs=costs if config.speculation.mode != "plain" else costs.plain,
        phases=phases,
        lengths=lengths,
        origin=(*origin, said),
        simulated_steps=steps,
    )


_Costs = tuple[TokenCosts, StepPhases, list[str]]
"""Costs of rounds, the rest of a step, and where both come from, in words."""


def _measured_costs(config: Config, log: RecordedRun) -> _Costs:
    costs = recorded.costs_by_strategy(log, max(config.rollout.max_live, log.config.rollout.max_live))
    known_by = "its cost profile" if log.profile else "a line through them"
    origin = [
        f"rounds, phases: measured in {log.name}, {len(log.lengths)} steps on {log.num_ranks} ranks",
        f"batches with few rounds of a strategy: from its rounds at others, by {known_by}",
    ]
    return costs, recorded.phases_of(log), origin


def _assumed_costs(config: Config, options: argparse.Namespace) -> _Costs:
    shape, gpu = find_shape(config.model.path, options.shape), GpuFigures()
    if config.speculation.mode == "ngram":
        raise ConfigError("speculation.mode = 'ngram': no speed-up of n-grams is known; give --from RUN of such a run")
    plain = gpu_costs(shape, config.rollout.tensor_parallel, config.rollout.max_live, gpu)
    origin = [
        f"rounds (assumed): H100-class card, {gpu.bytes_share:.0%} of 3.35 TB/s, {gpu.decode_flops_share:.0%} of 990 "
        "TFLOP/s",
        "speed-ups: a trained drafter's, TLT paper, 32B on 4 cards, derated by a draft step's bytes",
        f"update (assumed): {gpu.update_flops_share:.0%} of 990 TFLOP/s, and {gpu.fixed_step_seconds:g} s a step",
    ]
    costs = speculative_costs(plain, derating_of(find_shape("Qwen2.5-32B", None), shape), plain.most_live)
    return costs, gpu_phases(shape, gpu, config.checkpoint.every_steps), origin


def _lengths(config: Config, options: argparse.Namespace, log: RecordedRun | None) -> tuple[LengthSource, str]:
    cap = config.rollout.max_new_tokens
    if options.median is not None and not 0 <= options.median < math.inf:
        raise ConfigError(f"--median {options.median:g}: give a number of 0 or more")
    if log is not None and options.median is None:
        known = recorded.lengths_of(log)
        return known, f"lengths: the run's own {known.groups.size:,}, by group, drawn with replacement"
    law = LogNormal(cap * MEDIAN_SHARE if options.median is None else max(options.median, 1.0), cap)
    said = f"lengths (assumed): log-normal, median {law.median:,.0f}, cap {cap:,}, spread {law.spread:g}"
    return law, f"{said}, {law.prompt_share:.0%} of the variance between prompts"


def _config(options: argparse.Namespace, log: RecordedRun | None) -> Config:
    if log is not None and (options.config is None or "=" in options.config):
        overrides = [*filter(None, [options.config]), *options.overrides]
        return load_config(str(RunFolder(options.source).config), overrides)
    if options.config is None:
        raise ConfigError("nothing to simulate; give a CONFIG.toml, --from RUN or --validate RUN")
    if Path(options.config).is_dir():
        raise ConfigError(f"{options.config} is a folder; for a run give --from {options.config}, else a CONFIG.toml")
    return load_config(options.config, options.overrides)


def read_nodes(text: str) -> list[int]:
    """Numbers of nodes, ascending.

    Raises:
        ConfigError: something else.
    """
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1 or counts[-1] > 100_000:
        raise ConfigError(f"--nodes {text}: give numbers of 1 or more with commas between them, as in 1,2,4,8")
    return counts


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} {value}: give 1 or more")
    return value


def _validate(options: argparse.Namespace, console: Console) -> int:
    found = [one for path in options.validate for one in validate(read_run(path))]
    if options.json:
        print(json.dumps([one.as_json() for one in found], indent=2))
    else:
        show_validation(found, console)
    return 0 if all(one.holds for one in found) else MISSED


# --- tables of 80 columns ---


def show(name: str, job: SimulatedJob, rows: Sequence[NodesRow], console: Console) -> None:
    """Print where the figures come from, and the table by nodes."""
    _say(console, f"{name}: {job.prompts} x {job.group} responses a step, {job.num_steps} steps; simulated, not run")
    for line in job.origin:
        _say(console, f"  {line}")
    columns = ("nodes", "ranks", "rollout s", "step s", "rank-h", "idle", "harvested", "gain")
    cells = (
        (str(one.nodes), str(one.ranks), _seconds(one.rollout_seconds), _seconds(one.step_seconds), _few(one.gpu_hours),
         f"{one.idle_share:.0%}", f"{one.harvested_share:.0%}", f"{one.gain:.2f}")
        for one in rows
    )  # fmt: skip
    console.print(_table("By number of nodes", columns, cells))
    _say(
        console,
        "rank-h: of the run, a rank a GPU; idle: of all rank-seconds; harvested: of the idle ones; gain: "
        "plain step over this one. What training the drafter brings to accept lengths is not modelled. To compare "
        "settings, give other values: rollout.max_live=32. tlt plan says whether they fit.",
    )


def show_validation(found: Sequence[PredictionCheck], console: Console) -> None:
    """Print how predictions of recorded runs compare with what the runs took."""
    cells = (
        (one.run, one.mode, str(one.num_ranks), one.split, f"{one.rollout_measured:.1f}",
         f"{one.rollout_predicted:.1f}", f"{one.rollout_error:+.0%}", f"{one.step_error:+.0%}")
        for one in found
    )  # fmt: skip
    columns = ("run", "mode", "ranks", "asked", "measured s", "predicted s", "error", "step error")
    console.print(_table("Rollouts of recorded runs, predicted from other steps of the same run", columns, cells))
    _say(console, "asked: the second half of the steps, or every other one; step error: of whole steps.")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="right")
    for cells in rows:
        shown.add_row(*cells)
    return shown


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)
