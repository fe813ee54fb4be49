"""Settings that make a plan smaller without changing what is learned, and those of them that make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tlt_hpc.config import ConfigError, check_sequence_parallel, parse_config
from tlt_hpc.models.shape import check_sharding
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.plan import MemoryLimits, MemoryPlan


@dataclass(frozen=True)
class Savings:
    """Settings by key that were changed, and the plan that results."""

    plan: MemoryPlan
    changed: dict[str, object] = field(default_factory=dict)

    @property
    def command_line_settings(self) -> str:
        """The settings as they are written on the command line."""
        values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.changed.items()}
        return " ".join(f"{key}={value}" for key, value in values.items())


def find_memory_savings(plan: MemoryPlan, limits: MemoryLimits) -> Savings:
    """Change settings in turn, the least costly first, until the plan fits; then undo what is not needed.

    The result does not fit if all of them are not enough. A change helps if it lowers a memory that exceeds its limit
    and does not make the other one exceed its own. ZeRO stage 3 counts as help, since offload needs it.
    """
    found, times = Savings(plan), Counter[str]()
    while not limits.plan_fits(found.plan):
        for key, value in sorted(_candidate_setting_changes(found.plan), key=lambda change: times[change[0]]):
            changed = _savings_from_settings(plan, {**found.changed, key: value})
            if changed is not None and (
                key == "optimizer.zero_stage" or _lowers_exceeded_memory(found.plan, changed.plan, limits)
            ):
                found = changed
                times[key] += 1
                break
        else:
            return found
    for key in reversed(found.changed):
        without = _savings_from_settings(plan, {other: value for other, value in found.changed.items() if other != key})
        if without is not None and limits.plan_fits(without.plan):
            found = without
    return found


def _lowers_exceeded_memory(plan: MemoryPlan, other: MemoryPlan, limits: MemoryLimits) -> bool:
    shares = list(zip(limits.used_shares(plan), limits.used_shares(other), strict=True))
    exceeding = any(new < old for old, new in shares if old > 1)
    return exceeding and all(new <= max(1.0, old) for old, new in shares)


def _savings_from_settings(plan: MemoryPlan, changed: dict[str, object]) -> Savings | None:
    """The plan with other settings by key; None if the model or the ranks do not allow them."""
    situation, tree = plan.situation, plan.situation.config.model_dump()
    for key, value in changed.items():
        section, name = key.split(".")
        tree[section][name] = value
    try:
        config = parse_config(tree)
        if situation.num_ranks % config.optimizer.sequence_parallel:
            return None
        check_sharding(situation.shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
        check_sequence_parallel(
            config.optimizer, situation.shape.num_heads, situation.shape.num_kv_heads, situation.num_ranks
        )
        same_engine = plan.engine if config.rollout == situation.config.rollout else None
        return Savings(plan_memory(replace(situation, config=config), same_engine), changed)
    except ConfigError:
        return None


def _candidate_setting_changes(plan: MemoryPlan) -> Iterator[tuple[str, object]]:
    """One further change of each setting, the least costly first: more passes, then more communication, fewer replicas
    or live sequences, a slower update, host memory."""
    situation, sizes = plan.situation, plan.engine.sizes
    config, longest = situation.config, situation.max_sequence_tokens
    rollout, optimizer, drafter = config.rollout, config.optimizer, config.drafter
    if optimizer.micro_batch_tokens > longest:
        yield "optimizer.micro_batch_tokens", max(longest, optimizer.micro_batch_tokens // 2)
    if situation.has_learned_drafter and drafter.micro_step_tokens > 256:
        yield "drafter.micro_step_tokens", max(256, drafter.micro_step_tokens // 2)
    if optimizer.zero_stage < 3:
        yield "optimizer.zero_stage", 3
    yield "optimizer.sequence_parallel", 2 * optimizer.sequence_parallel
    pages = (sizes.num_pages + 1) // 2
    if rollout.kv_bytes and pages > -(-sizes.num_positions // sizes.page_size):  # room for one of full length
        yield "rollout.kv_bytes", pages * plan.engine.page_bytes
    elif not rollout.kv_bytes and rollout.max_live > 1:  # the rows determine the number of pages
        yield "rollout.max_live", rollout.max_live // 2
    if not situation.ranks_per_node % (2 * rollout.tensor_parallel):
        yield "rollout.tensor_parallel", 2 * rollout.tensor_parallel
    if not optimizer.uses_gradient_checkpointing(situation.device):
        yield "optimizer.gradient_checkpointing", True
    if situation.device == "cuda" and not optimizer.offload:
        yield "optimizer.offload", True
    if situation.offloads_optimizer and optimizer.zero_stage == 3 and optimizer.offload != "parameters":
        yield "optimizer.offload", "parameters"
