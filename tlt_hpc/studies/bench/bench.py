"""Runs ``tlt bench``: opens what the options name, measures, prints, writes JSON and plots."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch
from tokenizers import Tokenizer

from tlt_hpc.models.generate import Generate
from tlt_hpc.studies.bench.accept import bench_accept
from tlt_hpc.studies.bench.bench_options import AcceptOptions, BenchOptions, RolloutOptions
from tlt_hpc.studies.bench.rollout import Plan, run_bench
from tlt_hpc.studies.bench.strategies import chosen_strategies
from tlt_hpc.studies.bench.subject import Subject, open_subject
from tlt_hpc.studies.bench.tables import about, accept_table, accept_tree, rollout_table, rollout_tree, write_json
from tlt_hpc.studies.bench.workload import Lengths, Tokens, Workload, built_in_prompts, read_prompts


def run(options: RolloutOptions | AcceptOptions) -> None:
    """Run one bench.

    Raises:
        ValueError: something that the options name is missing or does not fit.
    """
    device = choose_device(options.device)
    if isinstance(options, RolloutOptions):
        _run_rollout(options, device)
    else:
        _run_accept(options, device)


def choose_device(name: str) -> torch.device:
    """The device asked for.

    Raises:
        ValueError: there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu or fix the allocation")
    return torch.device(name)


def open_workload(options: BenchOptions, subject: Subject, lengths: Lengths, temperature: float) -> Workload:
    """Prompts and lengths of a bench.

    Raises:
        ValueError: prompts are missing or do not fit, with the response, in the model's positions.
    """
    prompts = _open_prompts(options, subject.tokenizer)
    workload = Workload(prompts, subject.tokenizer, lengths, options.max_new_tokens, temperature, options.seed)
    room = subject.decoder.shape.max_positions - workload.max_prompt_tokens
    if options.max_new_tokens > room:
        raise ValueError(
            f"--max-new-tokens {options.max_new_tokens} after a prompt of {workload.max_prompt_tokens} tokens exceeds "
            f"the model's {subject.decoder.shape.max_positions} positions; use {max(1, room)} or less"
        )
    return workload


def _open_prompts(options: BenchOptions, tokenizer: Tokenizer) -> tuple[Tokens, ...] | None:
    if options.prompts is not None:
        return read_prompts(options.prompts, tokenizer)
    return None if options.is_embedded else built_in_prompts(tokenizer)


def _run_rollout(options: RolloutOptions, device: torch.device) -> None:
    subject = open_subject(options.model, options.drafter, options.dtype, device)
    plan = Plan(
        batches=options.batches,
        num_sequences=options.sequences,
        max_live=options.max_live,
        strategies=chosen_strategies(options.strategies, subject),
        repeats=options.repeats,
        each_strategy=options.each_strategy,
        profile_seconds=options.profile_seconds,
    )
    workload = open_workload(options, subject, options.lengths, options.temperature)
    generate = Generate(subject.folder, options.dtype, device, options.assistant)
    report = run_bench(subject, workload, plan, generate, _say)
    settings = settings_tree(options) | {"strategies": [strategy.name for strategy in plan.strategies]}
    tree = rollout_tree(report, about(subject, settings))
    print(rollout_table(report))
    if options.json is not None:
        write_json(tree, options.json)
    if options.plots is not None:
        from tlt_hpc.studies.bench.plots import plot_rollout

        for path in plot_rollout(tree, options.plots):
            print(f"wrote {path}")


def _run_accept(options: AcceptOptions, device: torch.device) -> None:
    subject = open_subject(options.model, options.drafter, options.dtype, device)
    workload = open_workload(options, subject, "own", 1.0)
    reports = []
    for temperature in options.temperatures:
        reports.append(bench_accept(subject, workload, temperature, options.responses))
        print(accept_table(reports[-1]), end="\n\n", flush=True)
    if options.json is not None:
        write_json(accept_tree(reports, about(subject, settings_tree(options))), options.json)


def settings_tree(options: BenchOptions) -> dict[str, Any]:
    """The options as JSON holds them."""
    kept = {name: value for name, value in asdict(options).items() if name not in ("json", "plots")}
    return {
        name: value if isinstance(value, int | float | list | tuple | None) else str(value)
        for name, value in kept.items()
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
