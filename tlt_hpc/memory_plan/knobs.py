"""Which settings make a plan smaller, and by how much: each is turned, and the plan made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tlt_hpc.config import Config, ConfigError, check_ranks, check_sequence_parallel, parse_config
from tlt_hpc.memory_plan.engine import page_bytes, pool_bytes, positions
from tlt_hpc.memory_plan.parts import MemoryPlan, Situation
from tlt_hpc.memory_plan.phases import plan_memory
from tlt_hpc.models.shape import check_sharding

_LEAST_GAIN = 0.005
"""Share of the peak under which a knob is not worth naming."""


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


def _knobs(situation: Situation) -> Iterator[tuple[str, str, Situation]]:
    for key, value, cost in _settings(situation):
        try:
            config = _with(situation.config, key, value)
        except ConfigError:  # a combination that cannot be is no way out
            continue
        yield f"{key}={_written(value)}", cost, replace(situation, config=config)
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


def _settings(situation: Situation) -> Iterator[tuple[str, object, str]]:
    config = situation.config
    if config.optimizer.zero_stage < 3:
        yield "optimizer.zero_stage", 3, "more communication"
    if not config.optimizer.offload and config.optimizer.zero_stage and situation.device == "cuda":
        yield "optimizer.offload", True, "slower step, host memory"
    if not config.optimizer.repeats_layers(situation.device):
        yield "optimizer.gradient_checkpointing", True, "update a third slower"
    more = 2 * config.optimizer.sequence_parallel
    if not situation.num_ranks % more and _shares(situation, more):
        yield "optimizer.sequence_parallel", more, "more communication"
    more = 2 * config.rollout.tensor_parallel
    if not situation.num_ranks % more and not situation.ranks_per_node % more and _divides(situation, more):
        yield "rollout.tensor_parallel", more, "half the replicas"
    if config.optimizer.micro_batch_tokens > situation.longest:
        tokens = max(situation.longest, config.optimizer.micro_batch_tokens // 2)
        yield "optimizer.micro_batch_tokens", tokens, "more passes"
    yield "rollout.max_new_tokens", max(1, config.rollout.max_new_tokens // 2), "shorter responses"
    half = _half_the_pool(situation)
    if half:
        yield "rollout.kv_bytes", half, "fewer live at once"
    if config.rollout.max_live > 1:
        yield "rollout.max_live", config.rollout.max_live // 2, "fewer live at once"
    if situation.learns_drafting:
        yield "drafter.micro_step_tokens", max(256, config.drafter.micro_step_tokens // 2), "smaller micro-steps"
        if config.drafter.average_merges > 1:
            yield "drafter.average_merges", 1, "a noisier drafter"
        yield "speculation.mode", "ngram", "no learned drafter"
    if config.algorithm.kl_coefficient:
        yield "algorithm.kl_coefficient", 0.0, "no reference"


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


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
