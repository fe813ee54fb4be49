"""The best settings by trying them: a small search on the same lengths. Every other setting stays as the job has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tlt_hpc.plan.simulate.costs import Costs
from tlt_hpc.plan.simulate.workload import Workload


@dataclass(frozen=True)
class Tried:
    """A setting with one value: seconds a step, responses a second, and the harvested share of the idle seconds."""

    setting: str
    value: int
    is_own: bool
    step_seconds: float
    responses_per_second: float
    harvested_share: float
    is_best: bool = False


def search(work: Workload, num_ranks: int) -> list[Tried]:
    """Thresholds, places for live sequences, ranks to wait for, prompts and group sizes; the best of each is marked.

    Thresholds and places count by seconds a step, ``min_idle`` by what is harvested (of equals the larger: fewer
    starts), sizes by responses a second. Sizes change what is learned, the others do not.
    """
    found: list[Tried] = []
    live, least = work.setting.max_live, work.setting.min_idle
    if work.speculates and len(work.costs.names) > 1:
        own = pays_up_to(work)
        tried = [
            _try(work, num_ranks, "SD threshold", n, n == own, costs=work.costs.below(n)) for n in _thresholds(live)
        ]
        found += _mark(tried, lambda one: -one.step_seconds)
    tried = [
        _try(work.with_setting(max_live=n), num_ranks, "rollout.max_live", n, n == live)
        for n in sorted({max(1, live // 2), live, live * 2})
    ]
    found += _mark(tried, lambda one: -one.step_seconds)
    if work.setting.trains:
        values = sorted({least, 1, *(n for n in (num_ranks // 16, num_ranks // 4, num_ranks // 2) if n > 0)})
        tried = [_try(work.with_setting(min_idle=n), num_ranks, "drafter.min_idle", n, n == least) for n in values]
        found += _mark(tried, lambda one: (round(one.harvested_share, 2), one.value))
    for name, own in (("prompts", work.prompts), ("group", work.group)):
        sizes = sorted({max(1, own // 2), own, own * 2})
        title = "rollout.prompts_per_step" if name == "prompts" else "rollout.group_size"
        tried = [_try(work, num_ranks, title, n, n == own, **{name: n}) for n in sizes]
        found += _mark(tried, lambda one: one.responses_per_second)
    return found


def pays_up_to(work: Workload) -> int:
    """The most live sequences at which the chooser speculates, at contexts of no length; 0: at none."""
    batch = np.arange(1, work.setting.max_live + 1)
    _, chosen = work.costs.up_to(work.setting.max_live).best(batch, np.zeros(len(batch)))
    return int(batch[chosen > 0].max(initial=0))


def _thresholds(max_live: int) -> list[int]:
    return sorted({0, max_live, *(1 << i for i in range(max_live.bit_length()))} - {max_live + 1})


def _try(work: Workload, num_ranks: int, setting: str, value: int, is_own: bool, **changes: int | Costs) -> Tried:
    changed = replace(work, **changes)  # type: ignore[arg-type]
    steps = changed.run(num_ranks)
    seconds = float(steps.step_seconds.mean())
    return Tried(setting, value, is_own, seconds, changed.prompts * changed.group / seconds, steps.harvested_share)


def _mark(tried: list[Tried], worth: Callable[[Tried], Any]) -> list[Tried]:
    best = max(tried, key=worth)
    return [replace(one, is_best=one is best) for one in tried]
