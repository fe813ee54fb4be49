"""Advice from a run's figures: what was seen, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tlt_hpc.look.report.findings import RunFindings
from tlt_hpc.look.report.verdict import RunGain
from tlt_hpc.look.words import share

_LONG_WAIT, _MUCH_CUT, _LITTLE_USED, _LITTLE_INFORMATIVE = 0.25, 0.05, 0.5, 0.5
_MAX_DIFFERENCE = 0.01
"""Mean difference of the rollout's and the trainer's probabilities above which a correction is worthwhile."""


class Advice(NamedTuple):
    """``seen``: what the figures show; ``change``: what to set or run."""

    seen: str
    change: str


def advise(found: RunFindings, gain: RunGain | None) -> list[Advice]:
    """All advice that applies, the most important first."""
    if not found.learning.has_data or not found.throughput.has_data:
        return []
    return [*_speculation(found, gain), *_policy(found), *_waiting(found)]


def _speculation(found: RunFindings, gain: RunGain | None) -> Iterator[Advice]:
    if found.log.mode == "plain":
        yield Advice("Speculation was off.", 'Set speculation.mode = "full", or "ngram", which needs no drafter.')
    elif gain is not None and gain.is_of_speculation and gain.speed.is_faster is False:
        yield Advice(
            f"Speculation does not pay: rollouts take {1 / gain.speed.rollout:.2f} times as long.",
            "Warm the drafter up first (tlt warmup), or lower rollout.max_live: speculation pays where few sequences "
            "are live. The chooser leaves it off where it costs; what is left is its trials.",
        )
    elif found.log.mode == "full" and found.log.setting("drafter", "init") == "random":
        change = "Start the next run from a trained one: tlt warmup CONFIG.toml."
        yield Advice("The drafter began with random weights.", change)


def _policy(found: RunFindings) -> Iterator[Advice]:
    """What keeps the policy from learning."""
    log = found.log
    if found.learning.not_finite:
        name, step = min(found.learning.not_finite.items(), key=lambda each: each[1])
        change = f"Go back to a checkpoint before step {step} and lower optimizer.learning_rate."
        yield Advice(f"{name} is not finite from step {step} on.", change)
    informative = log.mean("rollout/teaching_share")
    if informative < _LITTLE_INFORMATIVE and log.setting("rollout", "group_size") != 1:
        yield Advice(
            f"Only {share(informative, 1)} of the groups were informative: in the others all rewards were equal.",
            "Choose prompts that the policy solves some of the time, or set algorithm.max_refills: groups with equal "
            "rewards are then replaced by new prompts.",
        )
    cut, total = int(found.lengths.num_cut.sum()), int(found.lengths.num_responses.sum())
    if cut > _MUCH_CUT * total:
        change = "Raise rollout.max_new_tokens, or punish length (algorithm.overlong_buffer)."
        yield Advice(f"{share(cut, total)} of the responses were cut at the longest length.", change)
    difference = log.mean("training/rollout_probs_diff_mean")
    if difference > _MAX_DIFFERENCE and log.setting("algorithm", "rollout_correction") in (None, "none"):
        yield Advice(
            f"The rollout's probabilities differ from the trainer's by {difference:.3f} on average.",
            "Set algorithm.rollout_correction, or a model.dtype of more bits.",
        )


def _waiting(found: RunFindings) -> Iterator[Advice]:
    log, idle, rollout = found.log, found.throughput.idle, found.throughput.rollout
    if found.num_ranks > 1 and idle > _LONG_WAIT * rollout:
        change = "More prompts a step (rollout.prompts_per_step) or fewer ranks shorten the wait."
        if log.setting("rollout", "shard") == "group" and log.setting("rollout", "group_size") != 1:
            change = 'Try rollout.shard = "sample": it distributes single responses over the ranks, not whole groups.'
        yield Advice(f"Ranks waited for {share(idle, rollout)} of their rollout time.", change)
    trains = log.mode == "full" and log.setting("drafter", "train") is not False
    if trains and idle >= 0.05 * rollout and found.throughput.harvested < _LITTLE_USED * idle:
        yield Advice(
            f"Only {share(found.throughput.harvested, idle)} of the waiting was used to train the drafter.",
            "See drafter.min_idle (how many ranks must wait first) and "
            "drafter.micro_step_seconds (what does not fit before the release is dropped).",
        )
