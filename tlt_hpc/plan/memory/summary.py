"""``tlt plan``: predicts the memory that a job takes, and prints it as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.common.console import TextConsole
from tlt_hpc.common.formatting import GB, few_digits, format_bytes
from tlt_hpc.common.host_memory import available_bytes
from tlt_hpc.config import Config, ConfigError, ModelSection, check_ranks, check_replicas, load_config
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.models.weight_check import check_weights
from tlt_hpc.plan.inputs import check_shape
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import HERE, MemoryLimits, MemoryPlan
from tlt_hpc.plan.memory.savings import find_memory_savings
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.memory.situation import NamedBytes, Situation, total_bytes

DOES_NOT_FIT = 1
"""Exit status of a plan that exceeds what there is."""


def print_plan(plan: MemoryPlan, limits: MemoryLimits, console: Console) -> None:
    """Print the table of phases by parts, host memory and disk, and whether it fits."""
    unit, divisor = ("GB", GB) if plan.peak_phase.num_bytes >= GB else ("MB", GB // 1000)
    title = f"{unit} of each {_device_word(plan)} at the peak of each phase"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for name in dict.fromkeys(name for phase in plan.phases for name in phase.parts):
        sizes = [phase.parts.get(name) for phase in plan.phases]
        table.add_row(name, *("" if size is None else few_digits(size / divisor) for size in sizes))
    table.add_section()
    table.add_row("together", *(few_digits(phase.num_bytes / divisor) for phase in plan.phases), style="bold")
    console.print(table)
    first = f", rank 0 {_format_parts(plan.first_host)} more" if plan.first_host else ""
    host = f"Host memory: {format_bytes(total_bytes(plan.host))} a rank ({_format_parts(plan.host)}){first}, "
    lines = [
        f"{host}{format_bytes(plan.node_bytes)} a node.",
        f"Disk, at most: {format_bytes(total_bytes(plan.disk))} ({_format_parts(plan.disk)}).",
        describe_fit(plan, limits),
    ]
    if not limits.plan_fits(plan):
        lines.append(savings_advice(plan, limits))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def describe_fit(plan: MemoryPlan, limits: MemoryLimits) -> str:
    """One line: what the peak is, what is left or lacks of either memory."""
    peak = (
        f"Peak {format_bytes(plan.peak_phase.num_bytes)} a {_device_word(plan)}, in the phase {plan.peak_phase.name!r}"
    )
    rooms = _describe_free_memory(plan, limits)
    if not rooms:
        return f"{peak}."
    return f"{'Fits' if limits.plan_fits(plan) else 'Does not fit'}. {peak}; {'; '.join(rooms)}."


def _describe_free_memory(plan: MemoryPlan, limits: MemoryLimits) -> list[str]:
    """What is left or lacks of each memory that was given, in words."""
    given = [
        (limits.device, plan.peak_phase.num_bytes, f"each {_device_word(plan)}"),
        (limits.host, plan.node_bytes, limits.host_is),
    ]
    return [
        f"{format_bytes(used - limit)} more than the {format_bytes(limit)} of {of}"
        if used > limit
        else f"{format_bytes(limit - used)} ({1 - used / limit:.0%}) of {of} left"
        for limit, used, of in given
        if limit is not None
    ]


def savings_advice(plan: MemoryPlan, limits: MemoryLimits) -> str:
    """One line: settings that make a plan fit, or how much memory is lacking with all of them."""
    found = find_memory_savings(plan, limits)
    peak = found.plan.peak_phase
    takes = f"{format_bytes(peak.num_bytes)} a {_device_word(plan)} in the phase {peak.name!r}"
    if limits.plan_fits(found.plan):
        return f"Fits with {found.command_line_settings}: {takes}."
    lacks_device = limits.device is not None and peak.num_bytes > limits.device
    lacks_host = limits.host is not None and found.plan.node_bytes > limits.host
    fewer = "fewer ranks per node, or " if plan.situation.ranks_per_node > 1 else ""
    advice = " Use more nodes." * lacks_device + f" Use {fewer}nodes with more memory." * lacks_host
    return (
        "No settings make this job fit without changing what is learned. Even with "
        f"{found.command_line_settings or 'none changed'} it takes {takes} and "
        f"{format_bytes(found.plan.node_bytes)} of a node's host memory: "
        f"{'; '.join(_describe_free_memory(found.plan, limits))}.{advice}"
    )


def _device_word(plan: MemoryPlan) -> str:
    return "GPU" if plan.situation.device == "cuda" else "rank"


def _format_parts(parts: NamedBytes) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())


def run(options: argparse.Namespace) -> int:
    """Print the plan of a job; returns the exit status.

    Raises:
        ValueError: the configuration, the shape or an option cannot be.
    """
    config = load_config(options.config, options.overrides)
    device, host = (gb and int(gb * GB) for gb in (options.gpu_memory, options.host_memory))
    plan = plan_memory(_read_and_check_situation(config, options))
    is_here = plan.situation.device == "cpu" and options.nodes == 1 and not _may_use_gpus(config.model)
    limits = MemoryLimits(device, host)
    if is_here and host is None:
        limits = MemoryLimits(device, available_bytes(), HERE)
    print_plan(plan, limits, TextConsole())
    if plan.situation.device == "cpu" and _may_use_gpus(config.model):
        print("This is for ranks on CPUs; --gpus-per-node N plans for GPUs.")
    return 0 if limits.plan_fits(plan) else DOES_NOT_FIT


def summarise_memory_plan(config: Config, shape: ModelShape, num_ranks: int) -> str:
    """The line of a dry run: the peak of a run on GPUs. Empty where it would be on CPUs."""
    if not _may_use_gpus(config.model):
        return ""
    peak = plan_memory(Situation(config, shape, num_ranks, num_ranks, "cuda")).peak_phase
    return (
        f"{format_bytes(peak.num_bytes)} at the peak ({peak.name}) of each GPU, if it runs on GPUs; "
        f"tlt plan --gpus-per-node {num_ranks} has the parts"
    )


def _may_use_gpus(model: ModelSection) -> bool:
    return model.device == "cuda" or (model.device == "auto" and model.dtype == "bfloat16")


def _read_and_check_situation(config: Config, options: argparse.Namespace) -> Situation:
    gpus = options.gpus_per_node
    ranks_per_node = gpus or config.run.ranks
    num_ranks = options.nodes * ranks_per_node
    check_ranks(config, num_ranks)
    shape, folder = find_shape(config.model.path, options.shape), Path(config.model.path)
    if options.shape is None and any(folder.glob("*.safetensors")):  # the sizes of a model may be there alone
        check_weights(folder, shape)
    check_shape(config, shape, num_ranks)
    check_replicas(config.rollout, ranks_per_node)
    if gpus is None:
        if config.model.device == "cuda":
            raise ConfigError("model.device = 'cuda' and no --gpus-per-node; give the GPUs of a node, e.g. 8")
        if options.gpu_memory is not None:
            raise ConfigError("--gpu-memory without --gpus-per-node; give the GPUs of a node, e.g. 8")
        return Situation(config, shape, num_ranks, ranks_per_node, "cpu")
    if config.model.device == "cpu":
        raise ConfigError(f"--gpus-per-node {gpus} with model.device = 'cpu'; leave one of them out")
    return Situation(config, shape, num_ranks, gpus, "cuda")
