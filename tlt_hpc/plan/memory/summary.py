"""``tlt plan``: predicts the memory that a job takes, and prints it as tables or JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import Config, ConfigError, check_ranks, load_config
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import MemoryLimits, MemoryPart, MemoryPlan, Situation, total
from tlt_hpc.plan.memory.savings import Combination, Saving, cheapest_fit, furthest, turn_knobs
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.plan.shape_checks import check_shape

GB = 1_000_000_000


class _Unit:
    """GB, or MB where the whole plan is small."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.name, self._size = ("GB", GB) if plan.peak.num_bytes >= GB else ("MB", GB // 1000)

    def __call__(self, num_bytes: int) -> str:
        value = num_bytes / self._size
        return f"{value:,.1f}" if value >= 9.995 or not value else f"{value:.2f}"

    def of(self, num_bytes: int) -> str:
        """With the unit."""
        return f"{self(num_bytes)} {self.name}"


def show(plan: MemoryPlan, limits: MemoryLimits, knobs: Sequence[Saving], console: Console) -> None:
    """Print the table of phases by parts, host memory and disk, the verdict and the knobs."""
    console.print(_phase_table(plan))
    for line in (*_totals(plan), verdict(plan, limits)):
        console.print(line, soft_wrap=True, highlight=False)
    if knobs:
        console.print(_knob_table(plan, knobs, limits))
    if not limits.hold(plan):
        console.print(way_out(plan, limits), soft_wrap=True, highlight=False)


def verdict(plan: MemoryPlan, limits: MemoryLimits) -> str:
    """One line: what the peak is, what is left or lacks of either memory."""
    unit, of = _Unit(plan), _place(plan)
    peak = f"Peak {unit.of(plan.peak.num_bytes)} a {of}, in the phase {plan.peak.name!r}"
    if limits.device is None and limits.host is None:
        return f"{peak}."
    rooms = "; ".join(room for _, room in _rooms(unit, plan, limits))
    return f"{'Fits' if limits.hold(plan) else 'Does not fit'}. {peak}; {rooms}."


def _rooms(unit: _Unit, plan: MemoryPlan, limits: MemoryLimits) -> Iterator[tuple[int, str]]:
    """Of each memory that was said: the bytes that are left, and that in words."""
    if limits.device is not None:
        left = limits.device - plan.peak.num_bytes
        yield left, _room(unit, left, limits.device, f"each {_place(plan)}")
    if limits.host is not None:
        left = limits.host - plan.node_bytes
        yield left, _room(unit, left, limits.host, "each node's host memory")


def way_out(plan: MemoryPlan, limits: MemoryLimits) -> str:
    """One line: the least costly settings that make a plan fit, or how much memory the least takes."""
    found, unit, of = cheapest_fit(plan, limits), _Unit(plan), _place(plan)
    if found is not None:
        peak = found.plan.peak
        return f"Fits with {found.what}: {unit.of(peak.num_bytes)} a {of} at the peak ({peak.name})."
    least = furthest(plan, limits)
    peak, lack = least.plan.peak, (room for left, room in _rooms(unit, least.plan, limits) if left < 0)
    return (
        "No settings of this job fit that leave alone what is learned. "
        f"{f'Even with {least.what} it' if least.turned else 'It'} takes {unit.of(peak.num_bytes)} a {of} in the phase "
        f"{peak.name!r} and {_gb(least.plan.node_bytes)} of a node's host memory: {'; '.join(lack)}. More ranks share "
        "out more."
    )


def one_line(plan: MemoryPlan) -> str:
    """For the plan of a dry run."""
    peak = _Unit(plan).of(plan.peak.num_bytes)
    return f"{peak} at the peak ({plan.peak.name}) of each {_place(plan)}, predicted; tlt plan has the parts"


def as_json(plan: MemoryPlan, limits: MemoryLimits, knobs: Sequence[Saving]) -> dict[str, Any]:
    """All that is shown, in bytes."""
    return {
        "device": plan.situation.device,
        "ranks": plan.situation.num_ranks,
        "ranks_per_node": plan.situation.ranks_per_node,
        "parameters": plan.situation.shape.num_parameters,
        "phases": {phase.name: {part.name: part.num_bytes for part in phase.parts} for phase in plan.phases},
        "peak": {"phase": plan.peak.name, "bytes": plan.peak.num_bytes},
        "host_by_rank": {part.name: part.num_bytes for part in plan.host},
        "host_of_rank_0": {part.name: part.num_bytes for part in plan.first_host},
        "host_bytes_per_node": plan.node_bytes,
        "disk": {part.name: part.num_bytes for part in plan.disk},
        "fits": limits.hold(plan),
        "fits_with": _as_json(cheapest_fit(plan, limits)),
        "least": _as_json(furthest(plan, limits)),
        "knobs": [vars(knob) for knob in knobs],
    }


def _as_json(found: Combination | None) -> dict[str, Any] | None:
    if found is None:
        return None
    peak, host = found.plan.peak, found.plan.node_bytes
    return {"settings": found.turned, "phase": peak.name, "peak_bytes": peak.num_bytes, "host_bytes_per_node": host}


def _place(plan: MemoryPlan) -> str:
    return "GPU" if plan.situation.device == "cuda" else "rank"


def _phase_table(plan: MemoryPlan) -> Table:
    unit = _Unit(plan)
    table = _table(f"{unit.name} of each {_place(plan)} at the peak of each phase")
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for name in dict.fromkeys(part.name for phase in plan.phases for part in phase.parts):
        found = ([part.num_bytes for part in phase.parts if part.name == name] for phase in plan.phases)
        table.add_row(name, *(unit(sum(sizes)) if sizes else "" for sizes in found))
    table.add_section()
    table.add_row("together", *(unit(phase.num_bytes) for phase in plan.phases), style="bold")
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _totals(plan: MemoryPlan) -> tuple[str, str]:
    first = f", rank 0 {_listed(plan.first_host)} more" if plan.first_host else ""
    host = f"Host memory: {_gb(total(plan.host))} a rank ({_listed(plan.host)}){first}, "
    return f"{host}{_gb(plan.node_bytes)} a node.", f"Disk, at most: {_gb(total(plan.disk))} ({_listed(plan.disk)})."


def _listed(parts: Sequence[MemoryPart]) -> str:
    return ", ".join(f"{part.name} {_gb(part.num_bytes)}" for part in parts)


def _knob_table(plan: MemoryPlan, knobs: Sequence[Saving], limits: MemoryLimits) -> Table:
    unit = _Unit(plan)
    table = _table("What each of these alone would give")
    table.add_column("turn", overflow="fold", min_width=max(len(knob.what) for knob in knobs))
    table.add_column(f"{unit.name} less", justify="right")
    table.add_column("peak", justify="right")
    if limits.device is not None:
        table.add_column("fits")
    table.add_column("at what cost")
    for knob in knobs:
        fits = [] if limits.device is None else ["yes" if knob.peak_bytes <= limits.device else "no"]
        less = plan.peak.num_bytes - knob.peak_bytes
        table.add_row(knob.what, unit(less), unit(knob.peak_bytes), *fits, knob.cost)
    return table


def _room(unit: _Unit, left: int, whole: int, of: str) -> str:
    if left < 0:
        return f"{unit.of(-left)} more than the {unit.of(whole)} of {of}"
    return f"{unit.of(left)} ({left / whole:.0%}) of {of} left"


def _gb(num_bytes: int) -> str:
    value = num_bytes / GB
    return f"{value:,.1f} GB" if value >= 1 else f"{1000 * value:.0f} MB"


DOES_NOT_FIT = 1
"""Exit status of a plan that exceeds what there is."""


def run(options: argparse.Namespace) -> int:
    """Print the plan of a job; returns the exit status.

    Raises:
        ValueError: the configuration, the shape or an option cannot be.
    """
    config = load_config(options.config, options.overrides)
    limits = _limits(options)
    plan = plan_memory(_situation(config, options))
    knobs = turn_knobs(plan)
    if options.json:
        print(json.dumps(as_json(plan, limits, knobs), indent=2))
    else:
        show(plan, limits, knobs, TextConsole())
    return 0 if limits.hold(plan) else DOES_NOT_FIT


def summarise(config: Config, shape: ModelShape, num_ranks: int) -> str:
    """The line of a dry run: the peak of a run on GPUs. Empty where it would be on CPUs."""
    if config.model.device == "cpu" or (config.model.device == "auto" and config.model.dtype == "float32"):
        return ""
    return one_line(plan_memory(Situation(config, shape, num_ranks, num_ranks, "cuda")))


def _situation(config: Config, options: argparse.Namespace) -> Situation:
    num_ranks = options.ranks or options.gpus or config.run.ranks
    check_ranks(config, num_ranks)
    shape = find_shape(config.model.path, options.shape)
    check_shape(config, shape, num_ranks)
    size = config.rollout.tensor_parallel
    if options.gpus is not None and options.gpus % size:
        raise ConfigError(
            f"--gpus {options.gpus} makes no whole replicas of rollout.tensor_parallel = {size} on a node; use "
            f"{math.gcd(options.gpus, size)} or nodes of another number of GPUs"
        )
    if options.gpus is None:
        if config.model.device == "cuda":
            raise ConfigError("model.device = 'cuda' and no --gpus; say how many GPUs a node has, e.g. --gpus 8")
        return Situation(config, shape, num_ranks, num_ranks, "cpu")
    if config.model.device == "cpu":
        raise ConfigError(f"--gpus {options.gpus} with model.device = 'cpu'; leave one of them out")
    if num_ranks > options.gpus and num_ranks % options.gpus:
        raise ConfigError(
            f"--ranks {num_ranks} do not fill nodes of --gpus {options.gpus}; use --ranks "
            f"{num_ranks // options.gpus * options.gpus}, a rank for each GPU"
        )
    return Situation(config, shape, num_ranks, options.gpus, "cuda")


def _limits(options: argparse.Namespace) -> MemoryLimits:
    for name in ("gpus", "ranks", "gpu_memory", "host_memory"):
        value = vars(options)[name]
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    if options.gpu_memory is not None and options.gpus is None:
        raise ConfigError(f"--gpu-memory {options.gpu_memory:g} without --gpus; say how many GPUs a node has")
    device, host = (None if gb is None else int(gb * GB) for gb in (options.gpu_memory, options.host_memory))
    return MemoryLimits(device, host)
