"""A memory plan for people and for programs: the table, the verdict, the knobs, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.plan.memory.knobs import Turned
from tlt_hpc.plan.memory.limits import Limits, node_bytes
from tlt_hpc.plan.memory.parts import MemoryPlan, Part, Phase, total
from tlt_hpc.plan.memory.search import Combination, cheapest_fit, furthest

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


def show(plan: MemoryPlan, limits: Limits, knobs: Sequence[Turned], console: Console) -> None:
    """Print the table of phases by parts, host memory and disk, the verdict and the knobs."""
    console.print(_phase_table(plan))
    for line in (*_totals(plan), verdict(plan, limits)):
        console.print(line, soft_wrap=True, highlight=False)
    if knobs:
        console.print(_knob_table(plan, knobs, limits))
    if not limits.hold(plan):
        console.print(way_out(plan, limits), soft_wrap=True, highlight=False)


def verdict(plan: MemoryPlan, limits: Limits) -> str:
    """One line: what the peak is, what is left or lacks of either memory."""
    unit, of = _Unit(plan), _place(plan)
    peak = f"Peak {unit.of(plan.peak.num_bytes)} a {of}, in the phase {plan.peak.name!r}"
    if limits.device is None and limits.host is None:
        return f"{peak}."
    rooms = "; ".join(room for _, room in _rooms(unit, plan, limits))
    return f"{'Fits' if limits.hold(plan) else 'Does not fit'}. {peak}; {rooms}."


def _rooms(unit: _Unit, plan: MemoryPlan, limits: Limits) -> Iterator[tuple[int, str]]:
    """Of each memory that was said: the bytes that are left, and that in words."""
    if limits.device is not None:
        left = limits.device - plan.peak.num_bytes
        yield left, _room(unit, left, limits.device, f"each {_place(plan)}")
    if limits.host is not None:
        left = limits.host - node_bytes(plan)
        yield left, _room(unit, left, limits.host, "each node's host memory")


def way_out(plan: MemoryPlan, limits: Limits) -> str:
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
        f"{peak.name!r} and {_gb(node_bytes(least.plan))} of a node's host memory: {'; '.join(lack)}. More ranks share "
        "out more."
    )


def one_line(plan: MemoryPlan) -> str:
    """For the plan of a dry run."""
    peak = _Unit(plan).of(plan.peak.num_bytes)
    return f"{peak} at the peak ({plan.peak.name}) of each {_place(plan)}, predicted; tlt plan has the parts"


def as_json(plan: MemoryPlan, limits: Limits, knobs: Sequence[Turned]) -> dict[str, Any]:
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
        "host_bytes_per_node": node_bytes(plan),
        "disk": {part.name: part.num_bytes for part in plan.disk},
        "fits": limits.hold(plan),
        "fits_with": _as_json(cheapest_fit(plan, limits)),
        "least": _as_json(furthest(plan, limits)),
        "knobs": [vars(knob) for knob in knobs],
    }


def _as_json(found: Combination | None) -> dict[str, Any] | None:
    if found is None:
        return None
    peak, host = found.plan.peak, node_bytes(found.plan)
    return {"settings": found.turned, "phase": peak.name, "peak_bytes": peak.num_bytes, "host_bytes_per_node": host}


def _place(plan: MemoryPlan) -> str:
    return "GPU" if plan.situation.device == "cuda" else "rank"


def _phase_table(plan: MemoryPlan) -> Table:
    unit = _Unit(plan)
    title = f"{unit.name} of each {_place(plan)} at the peak of each phase"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for name in dict.fromkeys(part.name for phase in plan.phases for part in phase.parts):
        table.add_row(name, *(_cell(unit, phase, name) for phase in plan.phases))
    table.add_section()
    table.add_row("together", *(unit(phase.num_bytes) for phase in plan.phases), style="bold")
    return table


def _cell(unit: _Unit, phase: Phase, name: str) -> str:
    found = [part.num_bytes for part in phase.parts if part.name == name]
    return unit(sum(found)) if found else ""


def _totals(plan: MemoryPlan) -> tuple[str, str]:
    first = f", rank 0 {_listed(plan.first_host)} more" if plan.first_host else ""
    host = f"Host memory: {_gb(total(plan.host))} a rank ({_listed(plan.host)}){first}, "
    return f"{host}{_gb(node_bytes(plan))} a node.", f"Disk, at most: {_gb(total(plan.disk))} ({_listed(plan.disk)})."


def _listed(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.name} {_gb(part.num_bytes)}" for part in parts)


def _knob_table(plan: MemoryPlan, knobs: Sequence[Turned], limits: Limits) -> Table:
    unit = _Unit(plan)
    table = Table(
        title="What each of these alone would give", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
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
