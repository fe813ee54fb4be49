"""Advice from a run's figures: what was seen, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tlt_hpc.look.analysis.kinds import Kind
from tlt_hpc.look.report.findings import Findings
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


def advise(found: Findings, gain: RunGain | None) -> list[Advice]:
    """All advice that applies, the most important first."""
    if not found.is_begun or len(found.throughput.steps) == 0:
        return []
    pieces = [rule(found) for rule in _RULES]
    return [piece for piece in [_speculation(found, gain), *pieces] if piece is not None]


def _speculation(found: Findings, gain: RunGain | None) -> Advice | None:
    if found.mode == "plain":
        return Advice(
            "Speculation was off.",
            'Set speculation.mode = "full" (or "ngram", which needs no drafter)'
            + (": the text stays the same." if found.is_guarded else ": its samples are as exact."),
        )
    if gain is not None and gain.is_of_speculation and gain.pays is False:
        return Advice(
            f"Speculation does not pay: rollouts take {1 / gain.rollout:.2f} times as long.",
            "Warm the drafter up first (tlt warmup), or lower rollout.max_live: speculation pays where few sequences "
            "are live. The chooser leaves it off where it costs; what is left is its trials.",
        )
    if found.mode == "full" and found.log.setting("drafter", "init") == "random":
        return Advice(
            "The drafter began with random weights.", "Start the next run from a trained one: tlt warmup CONFIG.toml."
        )
    return None


def _not_finite(found: Findings) -> Advice | None:
    if not found.learning.not_finite:
        return None
    name, step = min(found.learning.not_finite.items(), key=lambda each: each[1])
    return Advice(
        f"{name} is not finite from step {step} on.",
        f"Go back to a checkpoint before step {step} and lower optimizer.learning_rate.",
    )


def _informative(found: Findings) -> Advice | None:
    informative = found.log.mean("rollout/teaching_share")
    group = found.log.setting("rollout", "group_size")
    if not informative < _LITTLE_INFORMATIVE or (isinstance(group, int) and group < 2):
        return None
    nearer = "choose prompts that the policy solves some of the time."
    has_refills = bool(found.log.setting("algorithm", "max_refills"))
    change = f"Set algorithm.max_refills (groups with equal rewards are replaced by new prompts), or {nearer}"
    return Advice(
        f"Only {share(informative, 1)} of the groups were informative: in the others all rewards were equal.",
        nearer.capitalize() if has_refills else change,
    )


def _cut(found: Findings) -> Advice | None:
    cut, total = int(found.lengths.num_cut.sum()), int(found.lengths.num_responses.sum())
    if total == 0 or cut <= _MUCH_CUT * total:
        return None
    return Advice(
        f"{share(cut, total)} of the responses were cut at the longest length.",
        "Raise rollout.max_new_tokens, or punish length (algorithm.overlong_buffer).",
    )


def _waiting(found: Findings) -> Advice | None:
    idle, whole = found.throughput.whole_idle, found.throughput.whole_rollout
    if found.num_ranks < 2 or not idle > _LONG_WAIT * whole:
        return None
    if found.log.setting("rollout", "shard") == "group" and (found.log.setting("rollout", "group_size") or 1) > 1:
        change = 'Try rollout.shard = "sample": it distributes single responses over the ranks instead of whole groups.'
    else:
        change = "More prompts a step (rollout.prompts_per_step) or fewer ranks shorten the wait."
    return Advice(
        f"Ranks waited for {share(idle, whole)} of their rollout time.",
        f"{change} tlt simulate --from RUN estimates the effect.",
    )


def _harvest(found: Findings) -> Advice | None:
    idle, whole = found.throughput.whole_idle, found.throughput.whole_rollout
    harvested = found.throughput.whole_harvested
    is_on = found.mode == "full" and found.log.setting("drafter", "train") is not False
    if not is_on or found.log.setting("drafter", "place") == "serial" or idle < 0.05 * whole:
        return None
    if harvested >= _LITTLE_USED * idle:
        return None
    return Advice(
        f"Only {share(harvested, idle)} of the waiting was used to train the drafter.",
        "See drafter.min_idle (how many ranks must wait first), drafter.schedule (which steps train) and "
        "drafter.micro_step_seconds (what does not fit before the release is dropped).",
    )


def _update(found: Findings) -> Advice | None:
    update, whole = _seconds(found, Kind.UPDATE), float(np.nansum(found.throughput.step_seconds))
    if not update > _MUCH_UPDATE * whole:
        return None
    return Advice(
        f"The policy's update takes {share(update, whole)} of a step, which speculation cannot shorten.",
        "Use larger micro-batches (optimizer.micro_batch_tokens) if memory allows (tlt plan); on a GPU, flash-attn.",
    )


def _save(found: Findings) -> Advice | None:
    save, whole = _seconds(found, Kind.SAVE), float(np.nansum(found.throughput.step_seconds))
    if not save > _MUCH_SAVE * whole:
        return None
    return Advice(
        f"Saving holds the steps up by {share(save, whole)}.",
        "Save less often (checkpoint.every_steps), or to a faster disk.",
    )


def _preempted(found: Findings) -> Advice | None:
    if not found.log.mean("rollout/preemptions") > 0.05 * found.log.mean("rollout/samples"):
        return None
    return Advice(
        f"{found.log.mean('rollout/preemptions'):,.0f} responses a step were preempted and had to be prefilled again.",
        "Lower rollout.max_live, or give the engine more room (rollout.kv_bytes; tlt plan).",
    )


def _mismatch(found: Findings) -> Advice | None:
    difference = found.log.mean("training/rollout_probs_diff_mean")
    if not difference > _MAX_DIFFERENCE or found.log.setting("algorithm", "rollout_correction") not in (None, "none"):
        return None
    return Advice(
        f"The rollout's probabilities differ from the trainer's by {difference:.3f} on average.",
        "Set algorithm.rollout_correction, or a model.dtype of more bits.",
    )


def _faults(found: Findings) -> Advice | None:
    faults = found.log.mean("rollout/drafter_faults")
    if not faults > 0:
        return None
    return Advice(
        "The drafter's output was not finite in some rounds, which ran without it.",
        "Lower drafter.learning_rate; until then, use a drafter from an earlier checkpoint (drafter.init).",
    )


_RULES: tuple[Callable[[Findings], Advice | None], ...] = (
    _not_finite,
    _informative,
    _waiting,
    _harvest,
    _update,
    _cut,
    _preempted,
    _save,
    _mismatch,
    _faults,
)


def _seconds(found: Findings, kind: Kind) -> float:
    """Seconds of a kind over all steps, mean over the ranks."""
    if kind not in found.throughput.kinds:
        return 0.0
    return float(found.throughput.seconds[:, found.throughput.kinds.index(kind)].sum())
