"""Settings that make a plan smaller: what each saves alone, and the cheapest combination that fits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tlt_hpc.config import Config, ConfigError, check_ranks, check_sequence_parallel, parse_config
from tlt_hpc.models.shape import check_sharding
from tlt_hpc.plan.memory.engine import page_bytes, pool_bytes, positions
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import MemoryLimits, MemoryPlan, Situation

_MIN_GAIN = 0.005
"""Share of the peak below which a setting is not worth naming."""


@dataclass(frozen=True)
class Knob:
    """A setting, and the value that it may be changed to."""

    key: str
    value: object
    cost: str
    price: int = 0
    """Roughly how much slower a step becomes: only the order of sums counts. 0: it changes what is learned."""
    opens: bool = False
    """Others can be changed only after it, so it may help even if it saves nothing by itself."""

    @property
    def what(self) -> str:
        """The setting as it is written on the command line."""
        return _override(self.key, self.value)


@dataclass(frozen=True)
class Saving:
    """A changed setting, and the peak that remains."""

    what: str
    """As it is written on the command line."""
    cost: str
    peak_bytes: int


@dataclass(frozen=True)
class Combination:
    """Settings changed together, and the plan that results."""

    plan: MemoryPlan
    turned: Mapping[str, object] = field(default_factory=dict)
    price: int = 0

    @property
    def what(self) -> str:
        """The settings as they are written on the command line."""
        return " ".join(_override(key, value) for key, value in self.turned.items())


def turn_knobs(plan: MemoryPlan) -> list[Saving]:
    """Every setting that lowers the peak by itself, the largest gain first."""
    situation, more = plan.situation, 2 * plan.situation.num_ranks
    found = [(knob.what, knob.cost, turned) for knob, turned in _turn_all(situation)]
    if _is_valid(lambda: check_ranks(situation.config, more)):
        cost = "twice the GPUs" if situation.device == "cuda" else "twice the ranks"
        found.append((f"--ranks {more}", cost, replace(situation, num_ranks=more)))
    savings = [Saving(what, cost, plan_memory(turned).peak.num_bytes) for what, cost, turned in found]
    worth = [saving for saving in savings if saving.peak_bytes < (1 - _MIN_GAIN) * plan.peak.num_bytes]
    return sorted(worth, key=lambda saving: saving.peak_bytes)


def cheapest_fit(plan: MemoryPlan, limits: MemoryLimits) -> Combination | None:
    """The cheapest settings that make a plan fit and do not change what is learned; None if none do.

    By Dijkstra's algorithm over settings, of which only those are changed that lower what exceeds the limits.
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


def furthest(plan: MemoryPlan, limits: MemoryLimits) -> Combination:
    """The settings changed as far as they help, at any cost."""
    found = Combination(plan)
    while further := list(_turned_further(found, limits)):
        found = min(further, key=lambda each: limits.filled(each.plan))
    return found


def _turned_further(found: Combination, limits: MemoryLimits) -> Iterator[Combination]:
    """Combinations with one more change, if that helps or lets another help."""
    for knob, situation in free_knobs(found.plan.situation):
        plan = plan_memory(situation)
        if knob.opens or limits.better(found.plan, plan):
            yield Combination(plan, {**found.turned, knob.key: knob.value}, found.price + knob.price)


def free_knobs(situation: Situation) -> Iterator[tuple[Knob, Situation]]:
    """Settings that change neither what is learned nor the machine, each with the situation that results."""
    for knob, turned in _turn_all(situation):
        # without a budget of bytes the rows determine the number of pages
        if knob.price and (knob.key != "rollout.kv_bytes" or situation.config.rollout.kv_bytes):
            yield knob, turned


def _turn_all(situation: Situation) -> Iterator[tuple[Knob, Situation]]:
    for knob in (*_of_the_update(situation), *_of_the_rollout(situation), *_of_the_rest(situation)):
        try:
            config = _with(situation.config, knob.key, knob.value)
        except ConfigError:  # an invalid combination is no way out
            continue
        yield knob, replace(situation, config=config)


def _of_the_update(situation: Situation) -> Iterator[Knob]:
    optimizer = situation.config.optimizer
    if optimizer.zero_stage < 3:
        yield Knob("optimizer.zero_stage", 3, "more communication", 2, opens=True)
    if not optimizer.offload and optimizer.zero_stage and situation.device == "cuda":
        yield Knob("optimizer.offload", True, "slower step, host memory", 6)
    if situation.offloads and optimizer.zero_stage == 3 and not optimizer.offload_parameters:
        yield Knob("optimizer.offload_parameters", True, "more host memory", 8)
    if not optimizer.repeats_layers(situation.device):
        yield Knob("optimizer.gradient_checkpointing", True, "update a third slower", 4)
    more = 2 * optimizer.sequence_parallel
    if not situation.num_ranks % more and _shares_sequences(situation, more):
        yield Knob("optimizer.sequence_parallel", more, "more communication", 2)
    if optimizer.micro_batch_tokens > situation.longest:
        tokens = max(situation.longest, optimizer.micro_batch_tokens // 2)
        yield Knob("optimizer.micro_batch_tokens", tokens, "more passes", 1)


def _of_the_rollout(situation: Situation) -> Iterator[Knob]:
    rollout = situation.config.rollout
    more = 2 * rollout.tensor_parallel
    divides_ranks = not situation.num_ranks % more and not situation.ranks_per_node % more
    if divides_ranks and _is_valid(lambda: check_sharding(situation.shape, more, "rollout.tensor_parallel")):
        yield Knob("rollout.tensor_parallel", more, "half the replicas", 4)
    yield Knob("rollout.max_new_tokens", max(1, rollout.max_new_tokens // 2), "shorter responses")
    if half := _half_the_pool(situation):
        yield Knob("rollout.kv_bytes", half, "fewer live at once", 4)
    if rollout.max_live > 1:
        yield Knob("rollout.max_live", rollout.max_live // 2, "fewer live at once", 4)


def _of_the_rest(situation: Situation) -> Iterator[Knob]:
    config = situation.config
    if situation.learns_drafting:
        tokens = max(256, config.drafter.micro_step_tokens // 2)
        yield Knob("drafter.micro_step_tokens", tokens, "smaller micro-steps", 1)
        if config.drafter.average_merges > 1:
            yield Knob("drafter.average_merges", 1, "a noisier drafter", 2)
        yield Knob("speculation.mode", "ngram", "no learned drafter")
    if situation.has_reference:
        yield Knob("algorithm.kl_coefficient", 0.0, "no reference")


def _shares_sequences(situation: Situation, size: int) -> bool:
    shape, config = situation.shape, _with(situation.config, "optimizer.sequence_parallel", size)
    return _is_valid(lambda: check_sequence_parallel(config, shape.num_heads, shape.num_kv_heads, situation.num_ranks))


def _half_the_pool(situation: Situation) -> int:
    """Half of the pages, if that still holds one response of full length; else 0."""
    size, rollout = page_bytes(situation), situation.config.rollout
    pages = pool_bytes(situation) // size // 2
    return pages * size if pages > -(-positions(situation) // rollout.page_size) else 0


def _is_valid(check: Callable[[], None]) -> bool:
    try:
        check()
    except ConfigError:
        return False
    return True


def _with(config: Config, key: str, value: object) -> Config:
    section, name = key.split(".")
    tree = config.model_dump()
    tree[section][name] = value
    return parse_config(tree)


def _override(key: str, value: object) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
