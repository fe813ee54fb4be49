"""Which settings make a plan smaller, and by how much: each is turned, and the plan made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tlt_hpc.config import Config, ConfigError, check_ranks, check_sequence_parallel, parse_config
from tlt_hpc.models.shape import check_sharding
from tlt_hpc.plan.memory.engine import page_bytes, pool_bytes, positions
from tlt_hpc.plan.memory.parts import MemoryPlan, Situation
from tlt_hpc.plan.memory.phases import plan_memory

_LEAST_GAIN = 0.005
"""Share of the peak under which a knob is not worth naming."""


@dataclass(frozen=True)
class Knob:
    """A setting, and what it may be turned to."""

    key: str
    value: object
    cost: str
    price: int = 0
    """How much slower a step becomes, roughly: only the order of sums counts. 0: it changes what is learned."""
    opens: bool = False
    """Others can be turned only after it, so it may be worth turning even where it gives nothing by itself."""


@dataclass(frozen=True)
class Turned:
    """A setting turned, and the peak that it leaves."""

    what: str
    """As it is written behind the command."""
    cost: str
    peak_bytes: int


def turn_knobs(plan: MemoryPlan) -> list[Turned]:
    """Every knob that lowers the peak, the largest gain first."""
    turned = [
        Turned(what, cost, plan_memory(situation).peak.num_bytes) for what, cost, situation in _knobs(plan.situation)
    ]
    worth = [knob for knob in turned if knob.peak_bytes < (1 - _LEAST_GAIN) * plan.peak.num_bytes]
    return sorted(worth, key=lambda knob: knob.peak_bytes)


def free_knobs(situation: Situation) -> Iterator[tuple[Knob, Situation]]:
    """Those that change neither what is learned nor the machine, each with the situation that it leaves."""
    for knob, turned in _turn_all(situation):
        # without a budget of bytes the rows say how many pages there are
        if knob.price and (knob.key != "rollout.kv_bytes" or situation.config.rollout.kv_bytes):
            yield knob, turned


def _knobs(situation: Situation) -> Iterator[tuple[str, str, Situation]]:
    for knob, turned in _turn_all(situation):
        yield f"{knob.key}={written(knob.value)}", knob.cost, turned
    more = 2 * situation.num_ranks
    try:
        check_ranks(situation.config, more)
    except ConfigError:
        return
    yield (
        f"--ranks {more}",
        "twice the GPUs" if situation.device == "cuda" else "twice the ranks",
        replace(situation, num_ranks=more),
    )


def _turn_all(situation: Situation) -> Iterator[tuple[Knob, Situation]]:
    for knob in (*_of_the_update(situation), *_of_the_rollout(situation), *_of_the_rest(situation)):
        try:
            config = _with(situation.config, knob.key, knob.value)
        except ConfigError:  # a combination that cannot be is no way out
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
    if not situation.num_ranks % more and _shares(situation, more):
        yield Knob("optimizer.sequence_parallel", more, "more communication", 2)
    if optimizer.micro_batch_tokens > situation.longest:
        tokens = max(situation.longest, optimizer.micro_batch_tokens // 2)
        yield Knob("optimizer.micro_batch_tokens", tokens, "more passes", 1)


def _of_the_rollout(situation: Situation) -> Iterator[Knob]:
    rollout = situation.config.rollout
    more = 2 * rollout.tensor_parallel
    if not situation.num_ranks % more and not situation.ranks_per_node % more and _divides(situation, more):
        yield Knob("rollout.tensor_parallel", more, "half the replicas", 4)
    yield Knob("rollout.max_new_tokens", max(1, rollout.max_new_tokens // 2), "shorter responses")
    half = _half_the_pool(situation)
    if half:
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


def _shares(situation: Situation, size: int) -> bool:
    shape, config = situation.shape, _with(situation.config, "optimizer.sequence_parallel", size)
    try:
        check_sequence_parallel(config, shape.num_heads, shape.num_kv_heads, situation.num_ranks)
    except ConfigError:
        return False
    return True


def _divides(situation: Situation, size: int) -> bool:
    try:
        check_sharding(situation.shape, size, "rollout.tensor_parallel")
    except ValueError:
        return False
    return True


def _half_the_pool(situation: Situation) -> int:
    """Half of the pages, where that still holds one response of full length; else 0."""
    size, rollout = page_bytes(situation), situation.config.rollout
    pages = pool_bytes(situation) // size // 2
    return pages * size if pages > -(-positions(situation) // rollout.page_size) else 0


def _with(config: Config, key: str, value: object) -> Config:
    section, name = key.split(".")
    tree = config.model_dump()
    tree[section][name] = value
    return parse_config(tree)


def written(value: object) -> str:
    """As TOML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
