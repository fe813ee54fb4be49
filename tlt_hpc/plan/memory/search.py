"""Which settings turned together make a plan fit, at the least price; or how far they go. Counts alone."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tlt_hpc.plan.memory.knobs import free_knobs, written
from tlt_hpc.plan.memory.limits import Limits
from tlt_hpc.plan.memory.parts import MemoryPlan
from tlt_hpc.plan.memory.phases import plan_memory


@dataclass(frozen=True)
class Combination:
    """Settings turned together, and the plan that they leave."""

    plan: MemoryPlan
    turned: Mapping[str, object] = field(default_factory=dict)
    price: int = 0

    @property
    def what(self) -> str:
        """As they are written behind the command."""
        return " ".join(f"{key}={written(value)}" for key, value in self.turned.items())


def cheapest_fit(plan: MemoryPlan, limits: Limits) -> Combination | None:
    """The least costly settings that make a plan fit and leave what is learned alone; None where none do.

    By Dijkstra's algorithm over settings, of which only those are turned that lower what is over.
    """
    if not limits.hold(furthest(plan, limits).plan):
        return None
    numbers = itertools.count()
    waiting = [(0, limits.filled(plan), next(numbers), Combination(plan))]
    seen: set[frozenset[tuple[str, object]]] = set()
    while waiting:
        *_, found = heapq.heappop(waiting)
        if limits.hold(found.plan):
            return found
        for more in _turned_further(found, limits):
            settings = frozenset(more.turned.items())
            if settings not in seen:
                seen.add(settings)
                heapq.heappush(waiting, (more.price, limits.filled(more.plan), next(numbers), more))
    return None


def furthest(plan: MemoryPlan, limits: Limits) -> Combination:
    """The settings turned as far as they help, whatever that costs."""
    found = Combination(plan)
    while further := list(_turned_further(found, limits)):
        found = min(further, key=lambda each: limits.filled(each.plan))
    return found


def _turned_further(found: Combination, limits: Limits) -> Iterator[Combination]:
    """With one setting more turned, or turned again, where that helps or lets another help."""
    for knob, situation in free_knobs(found.plan.situation):
        plan = plan_memory(situation)
        if knob.opens or limits.better(found.plan, plan):
            yield Combination(plan, {**found.turned, knob.key: knob.value}, found.price + knob.price)
