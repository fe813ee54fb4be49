"""Advice from a run's figures: what was seen, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tlt_hpc.look.analysis.kinds import Kind
from tlt_hpc.look.report.findings import RunFindings
from tlt_hpc.look.report.gain import RunGain
from tlt_hpc.look.words import share

_LONG_WAIT, _MUCH_CUT, _LITTLE_USED = 0.25, 0.05, 0.5
_LITTLE_INFORMATIVE, _MUCH_UPDATE, _MUCH_SAVE = 0.5, 0.6, 0.05
_MAX_DIFFERENCE = 0.01
"""Mean difference of the rollout's and the trainer's probabilities above which a correction is worthwhile."""


@dataclass(frozen=True)
class Advice:
    """``seen``: what the figures show; ``change``: what to set or run."""

    seen: str
    change: str


def advise(found: RunFindings, gain: RunGain | None) -> list[Advice]:
    """All advice that applies, the most important first."""
    if not found.is_begun or not found.throughput.has_data:
        return []
    return [*_speculation(found, gain), *_policy(found), *_time(found), *_engine(found)]


def _speculation(found: RunFindings, gain: RunGain | None) -> Iterator[Advice]:
    if found.mode == "plain":
        text = "the text stays the same" if found.is_guarded else "its samples are as exact"
        change = f'Set speculation.mode = "full" (or "ngram", which needs no drafter): {text}.'
        yield Advice("Speculation was off.", change)
    elif gain is not None and gain.is_of_speculation and gain.pays is False:
        yield Advice(
            f"Speculation does not pay: rollouts take {1 / gain.rollout:.2f} times as long.",
            "Warm the drafter up first (tlt warmup), or lower rollout.max_live: speculation pays where few sequences "
            "are live. The chooser leaves it off where it costs; what is left is its trials.",
        )
    elif found.mode == "full" and found.log.setting("drafter", "init") == "random":
        change = "Start the next run from a trained one: tlt warmup CONFIG.toml."
        yield Advice("The drafter began with random weights.", change)


def _policy(found: RunFindings) -> Iterator[Advice]:
    """What keeps the policy from learning."""
    log = found.log
    if found.learning.not_finite:
        name, step = min(found.learning.not_finite.items(), key=lambda each: each[1])
        yield Advice(
            f"{name} is not finite from step {step} on.",
            f"Go back to a checkpoint before step {step} and lower optimizer.learning_rate.",
        )
    informative = log.mean("rollout/teaching_share")
    if informative < _LITTLE_INFORMATIVE and log.setting("rollout", "group_size") != 1:
        refills = "" if log.setting("algorithm", "max_refills") else (
            "Set algorithm.max_refills (groups with equal rewards are replaced by new prompts), or c"
        )  # fmt: skip
        yield Advice(
            f"Only {share(informative, 1)} of the groups were informative: in the others all rewards were equal.",
            f"{refills or 'C'}hoose prompts that the policy solves some of the time.",
        )
    cut, total = int(found.lengths.num_cut.sum()), int(found.lengths.num_responses.sum())
    if cut > _MUCH_CUT * total:
        yield Advice(
            f"{share(cut, total)} of the responses were cut at the longest length.",
            "Raise rollout.max_new_tokens, or punish length (algorithm.overlong_buffer).",
        )
    difference = log.mean("training/rollout_probs_diff_mean")
    if difference > _MAX_DIFFERENCE and log.setting("algorithm", "rollout_correction") in (None, "none"):
        yield Advice(
            f"The rollout's probabilities differ from the trainer's by {difference:.3f} on average.",
            "Set algorithm.rollout_correction, or a model.dtype of more bits.",
        )


def _time(found: RunFindings) -> Iterator[Advice]:
    """Where a step's time could be saved."""
    log, throughput = found.log, found.throughput
    idle, harvested, rollout = throughput.idle, throughput.harvested, throughput.rollout
    if found.num_ranks > 1 and idle > _LONG_WAIT * rollout:
        change = "More prompts a step (rollout.prompts_per_step) or fewer ranks shorten the wait."
        if log.setting("rollout", "shard") == "group" and log.setting("rollout", "group_size") != 1:
            change = 'Try rollout.shard = "sample": it distributes single responses over the ranks, not whole groups.'
        yield Advice(
            f"Ranks waited for {share(idle, rollout)} of their rollout time.",
            f"{change} tlt simulate --from RUN estimates the effect.",
        )
    trains = found.mode == "full" and log.setting("drafter", "train") is not False
    if trains and idle >= 0.05 * rollout and harvested < _LITTLE_USED * idle:
        yield Advice(
            f"Only {share(harvested, idle)} of the waiting was used to train the drafter.",
            "See drafter.min_idle (how many ranks must wait first) and "
            "drafter.micro_step_seconds (what does not fit before the release is dropped).",
        )
    whole = float(np.nansum(throughput.step_seconds))
    update, save = throughput.total(Kind.UPDATE), throughput.total(Kind.SAVE)
    if update > _MUCH_UPDATE * whole:
        yield Advice(
            f"The policy's update takes {share(update, whole)} of a step, which speculation cannot shorten.",
            "Use larger micro-batches (optimizer.micro_batch_tokens) if memory allows (tlt plan).",
        )
    if save > _MUCH_SAVE * whole:
        change = "Save less often (checkpoint.every_steps), or to a faster disk."
        yield Advice(f"Saving delays the steps by {share(save, whole)}.", change)


def _engine(found: RunFindings) -> Iterator[Advice]:
    preemptions = found.log.mean("rollout/preemptions")
    if preemptions > 0.05 * found.log.mean("rollout/samples"):
        yield Advice(
            f"{preemptions:,.0f} responses a step were preempted and had to be prefilled again.",
            "Lower rollout.max_live, or give the engine more room (rollout.kv_bytes; tlt plan).",
        )
    if found.log.mean("rollout/drafter_faults") > 0:
        yield Advice(
            "The drafter's output was not finite in some rounds, which ran without it.",
            "Lower drafter.learning_rate; until then, use a drafter from an earlier checkpoint (drafter.init).",
        )
