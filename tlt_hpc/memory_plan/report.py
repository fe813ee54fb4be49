"""A memory plan for people and for programs: the table, the verdict, the knobs, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tlt_hpc.memory_plan.knobs import Turned
from tlt_hpc.memory_plan.parts import MemoryPlan, Part, Phase, total

GB = 1_000_000_000


@dataclass(frozen=True)
class Limits:
    """What there is, in bytes: of each GPU and of each node's host memory; None: not said."""

    device: int | None = None
    host: int | None = None

    def hold(self, plan: MemoryPlan) -> bool:
        """Whether the plan stays within what was said."""
        device_fits = self.device is None or plan.peak.num_bytes <= self.device
        return device_fits and (self.host is None or _node_bytes(plan) <= self.host)


def show(plan: MemoryPlan, limits: Limits, knobs: Sequence[Turned], console: Console) -> None:
    """Print the table of phases by parts, host memory and disk, the verdict and the knobs."""
    console.print(_phase_table(plan))
    console.print(_totals(plan))
    console.print(verdict(plan, limits), soft_wrap=True)
    if knobs:
        console.print(_knob_table(plan, knobs, limits))


def verdict(plan: MemoryPlan, limits: Limits) -> str:
    """One line: what the peak is, what is left or lacks of either memory."""
    of, who = ("GPU", "GPU") if plan.situation.device == "cuda" else ("rank", "rank's memory")
    peak = f"Peak {_gb(plan.peak.num_bytes)} GB a {of}, in the phase {plan.peak.name!r}"
    if limits.device is None and limits.host is None:
        return f"{peak}."
    room = [] if limits.device is None else [_room(limits.device - plan.peak.num_bytes, limits.device, f"each {who}")]
    if limits.host is not None:
        room.append(_room(limits.host - _node_bytes(plan), limits.host, "each node's host memory"))
    return f"{'Fits' if limits.hold(plan) else 'Does not fit'}. {peak}; {'; '.join(room)}."


def one_line(plan: MemoryPlan) -> str:
    """For the plan of a dry run."""
    return (
        f"{_gb(plan.peak.num_bytes)} GB at the peak ({plan.peak.name}) of a "
        f"{'GPU' if plan.situation.device == 'cuda' else 'rank'}, predicted; `tlt plan` has the parts"
    )


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
        "host_bytes_per_node": _node_bytes(plan),
        "disk": {part.name: part.num_bytes for part in plan.disk},
        "fits": limits.hold(plan),
        "knobs": [vars(knob) for knob in knobs],
    }


def _phase_table(plan: MemoryPlan) -> Table:
    where = "GPU" if plan.situation.device == "cuda" else "rank"
    table = Table(title=f"GB of each {where}, at the peak of each phase", title_justify="left")
    table.add_column("part")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for name in dict.fromkeys(part.name for phase in plan.phases for part in phase.parts):
        table.add_row(name, *(_cell(phase, name) for phase in plan.phases))
    table.add_section()
    table.add_row("together", *(_gb(phase.num_bytes) for phase in plan.phases), style="bold")
    return table


def _cell(phase: Phase, name: str) -> str:
    found = [part.num_bytes for part in phase.parts if part.name == name]
    return _gb(sum(found)) if found else ""


def _totals(plan: MemoryPlan) -> str:
    host = f"Host memory of a rank: {_gb(total(plan.host))} GB ({_listed(plan.host)})"
    node = f"; of a node: {_gb(_node_bytes(plan))} GB"
    return f"{host}{node}.\nDisk, at most: {_gb(total(plan.disk))} GB ({_listed(plan.disk)})."


def _node_bytes(plan: MemoryPlan) -> int:
    """Host memory of a node; on CPUs the ranks' tensors are there as well."""
    device = plan.peak.num_bytes if plan.situation.device == "cpu" else 0
    return plan.host_bytes_per_node + device * min(plan.situation.ranks_per_node, plan.situation.num_ranks)


def _listed(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.name} {_gb(part.num_bytes)}" for part in parts)


def _knob_table(plan: MemoryPlan, knobs: Sequence[Turned], limits: Limits) -> Table:
    table = Table(title="What each of these alone would give", title_justify="left")
    for name, side in (("turn", "left"), ("GB less", "right"), ("peak", "right"), ("fits", "left"), ("costs", "left")):
        table.add_column(name, justify="right" if side == "right" else "left")
    for knob in knobs:
        fits = "" if limits.device is None else "yes" if knob.peak_bytes <= limits.device else "no"
        gain = plan.peak.num_bytes - knob.peak_bytes
        table.add_row(knob.what, _gb(gain), _gb(knob.peak_bytes), fits, knob.cost)
    return table


def _room(left: int, whole: int, of: str) -> str:
    if left < 0:
        return f"{_gb(-left)} GB too much for {of} of {_gb(whole)} GB"
    return f"{_gb(left)} GB ({left / whole:.0%}) of {of} are left"


def _gb(num_bytes: int) -> str:
    value = num_bytes / GB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
