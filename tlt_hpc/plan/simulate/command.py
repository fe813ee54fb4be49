"""``tlt simulate``: what is asked for, put together and shown."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import Config, ConfigError, check_replicas, load_config
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.simulate import measured, paper, report
from tlt_hpc.plan.simulate.card import Card, card_costs, card_phases
from tlt_hpc.plan.simulate.costs import Costs
from tlt_hpc.plan.simulate.energy import read_watts
from tlt_hpc.plan.simulate.lengths import MEDIAN_SHARE, SPREAD, Lengths, LogNormal, read_lengths
from tlt_hpc.plan.simulate.profile import DEFAULT_CHANCES, read_costs
from tlt_hpc.plan.simulate.published import Drafting
from tlt_hpc.plan.simulate.run_log import RunLog, read_run
from tlt_hpc.plan.simulate.search import pays_up_to, search
from tlt_hpc.plan.simulate.step import Phases
from tlt_hpc.plan.simulate.validate import validate
from tlt_hpc.plan.simulate.what_if import what_ifs
from tlt_hpc.plan.simulate.workload import Workload, rows, setting_from
from tlt_hpc.rollout.strategy import OFF, Source, Strategy, strategies_of
from tlt_hpc.storage.folder import RunFolder

MISSED = 1
"""Exit status of a prediction that is off by more than a tenth."""
_GPUS = 8


def run(options: argparse.Namespace) -> int:
    """Print what is asked for; returns the exit status.

    Raises:
        ValueError: an option, the configuration or a file cannot be.
    """
    console = TextConsole()
    if options.validate:
        return _validate(options, console)
    if options.paper:
        return _paper(options, console)
    if options.plot is not None and options.plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {options.plot}: give a file that ends in .png or .svg")
    if options.plot is not None and not options.plot.parent.is_dir():
        raise ConfigError(f"--plot {options.plot}: its folder does not exist; make it first")
    log = read_run(options.source) if options.source else None
    config = _config(options, log)
    ranks_per_node = _positive(options.gpus, "--gpus") or (log.num_ranks if log else _GPUS)
    nodes = read_nodes(options.nodes)
    work = workload(config, options, log)
    is_card = log is None and options.profile is None
    watts = read_watts(options.watts) if is_card or options.watts else None
    for count in nodes:
        check_replicas(config, count * ranks_per_node)
    table = rows(work, nodes, ranks_per_node, watts)
    at = (_positive(options.at, "--at") or default_at(work, nodes, ranks_per_node)) * ranks_per_node
    check_replicas(config, at)
    found, others = search(work, at), what_ifs(work, at, options.prediction_error)
    if options.json:
        tree = {
            "origin": work.origin,
            "rows": [asdict(row) for row in table],
            "search": [asdict(one) for one in found],
            "what_if": [asdict(one) | {"pays": one.pays} for one in others],
            "sd_pays_up_to": pays_up_to(work) if work.speculates else 0,
            "watts": asdict(watts) if watts else None,
        }
        print(json.dumps(tree, indent=2))
    else:
        report.show(config.run.name, work, table, found, others, watts, at, console)
    if options.plot is not None:
        from tlt_hpc.plan.simulate.plot import plot

        plot(config.run.name, table, options.plot)
    return 0


def workload(config: Config, options: argparse.Namespace, log: RunLog | None) -> Workload:
    """The job with its costs: of a run, of a profile, or of an H100-class card.

    Raises:
        ValueError: an option is out of range, or a file cannot be read.
    """
    if (steps := _positive(options.steps, "--steps")) is None or steps > 10_000:
        raise ConfigError(f"--steps {options.steps}: give 1 to 10,000")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give 0 or more")
    setting = setting_from(config)
    lengths, said = _lengths(config, options, log)
    mode, most = config.speculation.mode, 2 * setting.max_live  # the search tries as many
    if options.profile is not None:
        strategies = strategies_of(mode, config.speculation.strategies)
        chances, said_chances = _chances(options, log, strategies)
        costs = read_costs(options.profile, strategies, most, chances, config.rollout.prefill_tokens)
        phases = Phases()
        origin = [
            f"rounds: {options.profile.name}; prompts are read as in its widest pass",
            said_chances,
            "update and save: nothing is known, left out; the gain is the rollout's",
        ]
    elif log is not None:
        most = max(most, log.config.rollout.max_live)
        costs, phases = measured.costs_by_strategy(log, most), measured.phases_of(log)
        setting = replace(setting, prompt_tokens=1.0, read_share=1.0, stop_seconds=float(log.stop_seconds.mean()))
        known_by = "its cost profile" if log.profile else "a line through them"
        origin = [
            f"rounds, phases: measured in {log.name}, {len(log.steps)} steps on {log.num_ranks} ranks",
            f"batches with few rounds of a strategy: from its rounds at others, by {known_by}",
        ]
    else:
        shape = find_shape(config.model.path, options.shape)
        costs, origin = _card_costs(config, shape)
        phases = card_phases(shape, Card(), config.checkpoint.every_steps)
    if mode == "ngram" and log is None and options.profile is None:
        raise ConfigError(
            "speculation.mode = 'ngram': no speed-up of n-grams is known; give --from RUN of such a run, or --profile"
        )
    return Workload(
        prompts=config.rollout.prompts_per_step,
        group=config.rollout.group_size,
        shard=config.rollout.shard,
        num_steps=config.run.num_steps,
        setting=setting,
        costs=costs,
        phases=phases,
        lengths=lengths,
        origin=(*origin, said),
        speculates=mode != "plain",
        seed=options.seed,
        simulated_steps=steps,
    )


def _chances(
    options: argparse.Namespace, log: RunLog | None, strategies: Sequence[Strategy]
) -> tuple[dict[Source, float], str]:
    """That drafts stand: as given, else as measured in the run, else as assumed; and which is which, in words."""
    seen = measured.chances_of(log) if log is not None else {}
    chances, said = {}, []
    for source in dict.fromkeys(strategy.source for strategy in strategies if strategy != OFF):
        given = options.ngram_chance if source == "ngram" else options.chance
        known = seen.get(source, seen.get("drafter") if source == "hybrid" else None)
        chance, origin = (given, "given") if given is not None else (known, "measured")
        chances[source], origin = (DEFAULT_CHANCES[source], "assumed") if chance is None else (chance, origin)
        said.append(f"{source} {chances[source]:.2f} ({origin})")
    return chances, f"a draft stands with chance: {', '.join(said) or 'nothing is drafted'}"


def _card_costs(config: Config, shape: ModelShape) -> tuple[Costs, list[str]]:
    card = Card()
    reference = find_shape("Qwen2.5-32B", None)
    most = 2 * config.rollout.max_live  # the search tries as many
    plain = card_costs(shape, config.rollout.tensor_parallel, most, card)
    origin = [
        f"rounds (assumed): H100-class card, {card.bytes_share:.0%} of 3.35 TB/s, {card.decode_flops_share:.0%} of 990 "
        "TFLOP/s",
        "speed-ups: a trained drafter's, TLT paper, 32B on 4 cards, derated by a draft step's bytes",
        f"update (assumed): {card.update_flops_share:.0%} of 990 TFLOP/s, and {card.fixed_step_seconds:g} s a step",
    ]
    return Drafting(reference).costs(plain, shape, most), origin


def _lengths(config: Config, options: argparse.Namespace, log: RunLog | None) -> tuple[Lengths, str]:
    cap = config.rollout.max_new_tokens
    for name in ("median", "spread", "chance", "ngram_chance", "prediction_error"):
        value = vars(options)[name]
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: give a number of 0 or more")
    if not 0 <= options.prompt_share <= 1:
        raise ConfigError(f"--prompt-share {options.prompt_share:g}: give a share from 0 to 1")
    for name in ("chance", "ngram_chance"):
        if vars(options)[name] is not None and vars(options)[name] >= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {vars(options)[name]:g}: give a chance under 1")
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


def _config(options: argparse.Namespace, log: RunLog | None) -> Config:
    if log is not None and (options.config is None or "=" in options.config):
        overrides = [*filter(None, [options.config]), *options.overrides]
        return load_config(str(RunFolder(options.source).config), overrides)
    if options.config is not None and Path(options.config).is_dir():
        raise ConfigError(f"{options.config} is a folder; for a run give --from {options.config}, else a CONFIG.toml")
    if options.config is not None:
        return load_config(options.config, options.overrides)
    raise ConfigError("nothing to simulate; give a CONFIG.toml, --from RUN, --validate RUN or --paper")


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


def default_at(work: Workload, nodes: list[int], ranks_per_node: int) -> int:
    """Where settings are tried: the most nodes, of those asked for, on which every replica has something to do."""
    units = work.prompts if work.shard == "group" else work.prompts * work.group
    return max((count for count in nodes if work.replicas(count * ranks_per_node) <= units), default=nodes[0])


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} {value}: give 1 or more")
    return value


def _validate(options: argparse.Namespace, console: TextConsole) -> int:
    checks = [one for path in options.validate for one in validate(read_run(path))]
    if options.json:
        print(json.dumps([one.as_json() for one in checks], indent=2))
    else:
        report.show_checks(checks, console)
    return 0 if all(one.holds for one in checks if one.split == checks[0].split) else MISSED


def _paper(options: argparse.Namespace, console: TextConsole) -> int:
    models = paper.Models(find_shape("Qwen2.5-7B", None), find_shape("Qwen2.5-32B", None))
    assumed = paper.Assumptions()
    prediction = paper.predict(models, assumed)
    turned = paper.sensitivity(models, assumed)
    if options.json:
        tree: dict[str, Any] = {
            "assumptions": asdict(assumed),
            "sources": paper.SOURCES,
            "fitted_median": prediction.median,
            "derating_7B": prediction.derating,
            "rows": [
                dict(zip(("model", "nodes", "published", "predicted", "fitted"), row, strict=True))
                for row in prediction.rows()
            ],
            "sensitivity": turned,
        }
        print(json.dumps(tree, indent=2))
    else:
        report.show_paper(prediction, assumed, turned, console)
    return 0 if prediction.worst <= paper.WITHIN else MISSED
