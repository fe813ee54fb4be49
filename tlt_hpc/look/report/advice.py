"""What to change, from what a run's figures show: each piece says what was seen, and what to set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tlt_hpc.look.analysis.kinds import Kind
from tlt_hpc.look.analysis.result import share
from tlt_hpc.look.report.findings import Findings
from tlt_hpc.look.report.gain import Gain

_LONG_WAIT, _MUCH_CUT, _LITTLE_USED = 0.25, 0.05, 0.5
_LITTLE_TAUGHT, _MUCH_UPDATE, _MUCH_SAVE = 0.5, 0.6, 0.05
_APART = 0.01
"""Mean distance of the rollout's probabilities from the trainer's, from which corrections are worth while."""


@dataclass(frozen=True)
class Advice:
    """``seen``: the figure behind it; ``change``: what to type or set."""

    seen: str
    change: str


def advise(found: Findings, gain: Gain | None) -> list[Advice]:
    """All that applies, what costs most first; nothing where all is well."""
    if not found.is_begun or len(found.throughput.steps) == 0:
        return []
    pieces = [rule(found) for rule in _RULES]
    return [piece for piece in [_speculation(found, gain), *pieces] if piece is not None]


def _speculation(found: Findings, gain: Gain | None) -> Advice | None:
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
        f"{name} is no number from step {step} on.",
        f"Go back to a checkpoint before step {step} and lower optimizer.learning_rate.",
    )


def _teaching(found: Findings) -> Advice | None:
    teaching = found.mean("rollout/teaching_share")
    group = found.log.setting("rollout", "group_size")
    if not teaching < _LITTLE_TAUGHT or (isinstance(group, int) and group < 2):
        return None
    nearer = "choose prompts nearer to what the policy can just do."
    has_refills = bool(found.log.setting("algorithm", "max_refills"))
    change = f"Set algorithm.max_refills (groups that teach nothing are drawn anew), or {nearer}"
    return Advice(
        f"Only {share(teaching, 1)} of the groups taught anything: in the others all responses had the same reward.",
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
    idle, whole = found.idle
    if found.num_ranks < 2 or not idle > _LONG_WAIT * whole:
        return None
    if found.log.setting("rollout", "shard") == "group" and (found.log.setting("rollout", "group_size") or 1) > 1:
        change = 'Try rollout.shard = "sample": it deals single responses over the ranks, not whole groups.'
    else:
        change = "More prompts a step (rollout.prompts_per_step) or fewer ranks leave less to wait for."
    return Advice(
        f"Ranks waited for {share(idle, whole)} of their rollout time.",
        f"{change} tlt simulate --from RUN says what either would bring.",
    )


def _harvest(found: Findings) -> Advice | None:
    (idle, whole), harvested = found.idle, found.harvested
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
        "Larger micro-batches (optimizer.micro_batch_tokens) as memory allows (tlt plan); on a GPU, flash-attn.",
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
    if not found.mean("rollout/preemptions") > 0.05 * found.mean("rollout/samples"):
        return None
    return Advice(
        f"{found.mean('rollout/preemptions'):,.0f} responses a step gave up their memory and were read anew.",
        "Lower rollout.max_live, or give the engine more room (rollout.kv_bytes; tlt plan).",
    )


def _mismatch(found: Findings) -> Advice | None:
    apart = found.mean("training/rollout_probs_diff_mean")
    if not apart > _APART or found.log.setting("algorithm", "rollout_correction") not in (None, "none"):
        return None
    return Advice(
        f"The rollout's probabilities lie {apart:.3f} from the trainer's on average.",
        "Set algorithm.rollout_correction, or a model.dtype of more bits.",
    )


def _faults(found: Findings) -> Advice | None:
    faults = found.mean("rollout/drafter_faults")
    if not faults > 0:
        return None
    return Advice(
        "The drafter gave figures that are no numbers, and was left out of rounds for it.",
        "Lower drafter.learning_rate; a drafter from an earlier checkpoint serves meanwhile (drafter.init).",
    )


_RULES: tuple[Callable[[Findings], Advice | None], ...] = (
    _not_finite,
    _teaching,
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
    """Of a kind over all steps, as a mean of the ranks."""
    if kind not in found.throughput.kinds:
        return 0.0
    return float(found.throughput.seconds[:, found.throughput.kinds.index(kind)].sum())
