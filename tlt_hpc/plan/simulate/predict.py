"""``tlt simulate``: builds the job to simulate from the options, and shows what comes out."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import Config, ConfigError, check_replicas, load_config
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.simulate import measured, tables
from tlt_hpc.plan.simulate.alternatives import pays_up_to, search, what_ifs
from tlt_hpc.plan.simulate.assumed import GpuFigures, derating_of, gpu_costs, gpu_phases, speculative_costs
from tlt_hpc.plan.simulate.costs import TokenCosts
from tlt_hpc.plan.simulate.lengths import MEDIAN_SHARE, SPREAD, LengthSource, LogNormal, read_lengths
from tlt_hpc.plan.simulate.profile import DEFAULT_CHANCES, read_costs
from tlt_hpc.plan.simulate.run_log import RecordedRun, read_run
from tlt_hpc.plan.simulate.step import StepPhases
from tlt_hpc.plan.simulate.validate import validate
from tlt_hpc.plan.simulate.workload import SimulatedJob, read_watts, rows, setting_from
from tlt_hpc.rollout.strategy import OFF, Source, Strategy, strategies_of
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
    if options.plot is not None and options.plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {options.plot}: give a file that ends in .png or .svg")
    if options.plot is not None and not options.plot.parent.is_dir():
        raise ConfigError(f"--plot {options.plot}: its folder does not exist; make it first")
    log = read_run(options.source) if options.source else None
    config = _config(options, log)
    ranks_per_node = _positive(options.gpus, "--gpus") or (log.num_ranks if log else _GPUS)
    nodes = read_nodes(options.nodes)
    job = simulated_job(config, options, log)
    is_assumed = log is None and options.profile is None
    watts = read_watts(options.watts) if is_assumed or options.watts else None
    for count in nodes:
        check_replicas(config, count * ranks_per_node)
    table = rows(job, nodes, ranks_per_node, watts)
    at = (_positive(options.at, "--at") or default_at(job, nodes, ranks_per_node)) * ranks_per_node
    check_replicas(config, at)
    tried, others = search(job, at), what_ifs(job, at, options.prediction_error)
    if options.json:
        tree = {
            "origin": job.origin,
            "rows": [asdict(row) for row in table],
            "search": [asdict(one) for one in tried],
            "what_if": [asdict(one) | {"pays": one.pays} for one in others],
            "sd_pays_up_to": pays_up_to(job) if job.speculates else 0,
            "watts": asdict(watts) if watts else None,
        }
        print(json.dumps(tree, indent=2))
    else:
        tables.show(config.run.name, job, table, tried, others, watts, at, console)
    if options.plot is not None:
        from tlt_hpc.plan.simulate.plot import plot

        plot(config.run.name, table, options.plot)
    return 0


def simulated_job(config: Config, options: argparse.Namespace, log: RecordedRun | None) -> SimulatedJob:
    """The job with its costs: of a run, of a cost profile, or of an H100-class GPU.

    Raises:
        ValueError: an option is out of range, or a file cannot be read.
    """
    if (steps := _positive(options.steps, "--steps")) is None or steps > 10_000:
        raise ConfigError(f"--steps {options.steps}: give 1 to 10,000")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give 0 or more")
    lengths, said = _lengths(config, options, log)
    setting = setting_from(config)
    if options.profile is not None:
        costs, phases, origin = _profile_costs(config, options, log)
    elif log is not None:
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
        costs=costs,
        phases=phases,
        lengths=lengths,
        origin=(*origin, said),
        speculates=config.speculation.mode != "plain",
        seed=options.seed,
        simulated_steps=steps,
    )


_Costs = tuple[TokenCosts, StepPhases, list[str]]
"""Costs of rounds, the rest of a step, and where both come from, in words."""


def _most_live(config: Config) -> int:
    """Most live sequences that costs are needed for: the search tries twice the job's."""
    return 2 * config.rollout.max_live


def _profile_costs(config: Config, options: argparse.Namespace, log: RecordedRun | None) -> _Costs:
    strategies = strategies_of(config.speculation.mode, config.speculation.strategies)
    chances, said = _chances(options, log, strategies)
    costs = read_costs(options.profile, strategies, _most_live(config), chances, config.rollout.prefill_tokens)
    origin = [
        f"rounds: {options.profile.name}; prompts are read as in its widest pass",
        said,
        "update and save: not known, left out; the gain is the rollout's",
    ]
    return costs, StepPhases(), origin


def _measured_costs(config: Config, log: RecordedRun) -> _Costs:
    costs = measured.costs_by_strategy(log, max(_most_live(config), log.config.rollout.max_live))
    known_by = "its cost profile" if log.profile else "a line through them"
    origin = [
        f"rounds, phases: measured in {log.name}, {len(log.steps)} steps on {log.num_ranks} ranks",
        f"batches with few rounds of a strategy: from its rounds at others, by {known_by}",
    ]
    return costs, measured.phases_of(log), origin


def _assumed_costs(config: Config, options: argparse.Namespace) -> _Costs:
    shape, gpu = find_shape(config.model.path, options.shape), GpuFigures()
    if config.speculation.mode == "ngram":
        raise ConfigError(
            "speculation.mode = 'ngram': no speed-up of n-grams is known; give --from RUN of such a run, or --profile"
        )
    plain = gpu_costs(shape, config.rollout.tensor_parallel, _most_live(config), gpu)
    origin = [
        f"rounds (assumed): H100-class card, {gpu.bytes_share:.0%} of 3.35 TB/s, {gpu.decode_flops_share:.0%} of 990 "
        "TFLOP/s",
        "speed-ups: a trained drafter's, TLT paper, 32B on 4 cards, derated by a draft step's bytes",
        f"update (assumed): {gpu.update_flops_share:.0%} of 990 TFLOP/s, and {gpu.fixed_step_seconds:g} s a step",
    ]
    costs = speculative_costs(plain, derating_of(find_shape("Qwen2.5-32B", None), shape), plain.most_live)
    return costs, gpu_phases(shape, gpu, config.checkpoint.every_steps), origin


def _chances(
    options: argparse.Namespace, log: RecordedRun | None, strategies: Sequence[Strategy]
) -> tuple[dict[Source, float], str]:
    """The chances that drafts are accepted: given, else measured in the run, else assumed; and which, in words."""
    seen = measured.chances_of(log) if log is not None else {}
    chances, said = {}, []
    for source in dict.fromkeys(strategy.source for strategy in strategies if strategy != OFF):
        given = options.ngram_chance if source == "ngram" else options.chance
        known = seen.get(source, seen.get("drafter") if source == "hybrid" else None)
        chance, origin = (given, "given") if given is not None else (known, "measured")
        chances[source], origin = (DEFAULT_CHANCES[source], "assumed") if chance is None else (chance, origin)
        said.append(f"{source} {chances[source]:.2f} ({origin})")
    return chances, f"a draft is accepted with chance: {', '.join(said) or 'nothing is drafted'}"


def _lengths(config: Config, options: argparse.Namespace, log: RecordedRun | None) -> tuple[LengthSource, str]:
    cap = config.rollout.max_new_tokens
    for name in ("median", "spread", "chance", "ngram_chance", "prediction_error"):
        value, option = vars(options)[name], f"--{name.replace('_', '-')}"
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{option} {value:g}: give a number of 0 or more")
        if value is not None and name.endswith("chance") and value >= 1:
            raise ConfigError(f"{option} {value:g}: give a chance under 1")
    if not 0 <= options.prompt_share <= 1:
        raise ConfigError(f"--prompt-share {options.prompt_share:g}: give a share from 0 to 1")
    if options.lengths is not None:
        return read_lengths(options.lengths, cap), f"lengths: {options.lengths}"
    if log is not None and options.median is None and options.spread is None:
        known = measured.lengths_of(log)
        return known, f"lengths: the run's own {known.groups.size:,}, by group, drawn with replacement"
    median = cap * MEDIAN_SHARE if options.median is None else max(options.median, 1.0)
    spread = SPREAD if options.spread is None else options.spread
    law = f"log-normal, median {median:,.0f}, cap {cap:,}, spread {spread:g}"
    said = f"lengths (assumed): {law}, {options.prompt_share:.0%} of the variance between prompts"
    return LogNormal(median, cap, spread, options.prompt_share), said


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


def default_at(job: SimulatedJob, nodes: list[int], ranks_per_node: int) -> int:
    """The most of these nodes on which every replica has something to do: settings are tried there."""
    units = job.prompts if job.shard == "group" else job.prompts * job.group
    return max((count for count in nodes if job.replicas(count * ranks_per_node) <= units), default=nodes[0])


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} {value}: give 1 or more")
    return value


def _validate(options: argparse.Namespace, console: TextConsole) -> int:
    checks = [one for path in options.validate for one in validate(read_run(path))]
    if options.json:
        print(json.dumps([one.as_json() for one in checks], indent=2))
    else:
        tables.show_checks(checks, console)
    return 0 if all(one.holds for one in checks if one.split == checks[0].split) else MISSED
