"""What would be faster, on the same lengths: other settings, one at a time, and changes that the program does not make.

The settings are a small search by trying values. The changes are moving sequences, ordering by predicted length, and
single samples on many ranks; each is compared with the job as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tlt_hpc.plan.simulate.costs import Floats, TokenCosts
from tlt_hpc.plan.simulate.lengths import Ints, deal
from tlt_hpc.plan.simulate.step import Setting, StepPhases, Steps, after_rollouts, positions, schedule, simulate
from tlt_hpc.plan.simulate.workload import SimulatedJob

PREDICTION_ERROR = 0.5
"""Standard deviation of the log of predicted over real length."""
MIN_GAIN = 0.02
"""Share of a step from which a change is said to pay."""
_NO_PHASES = StepPhases()
_RANKS_A_PROMPT = 4


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


def search(job: SimulatedJob, num_ranks: int) -> list[Tried]:
    """Try thresholds, numbers of live sequences, ``min_idle``, prompts and group sizes; the best of each is marked.

    Thresholds and live sequences are judged by seconds a step, ``min_idle`` by what is harvested (of equal values the
    larger one, which starts less often), sizes by responses a second. Sizes change what is learned, the others do not.
    """
    found: list[Tried] = []
    live, least = job.setting.max_live, job.setting.min_idle
    if job.speculates and len(job.costs.names) > 1:
        own = pays_up_to(job)
        tried = [_try(job, num_ranks, "SD threshold", n, n == own, costs=job.costs.below(n)) for n in _thresholds(live)]
        found += _mark(tried, lambda one: -one.step_seconds)
    tried = [
        _try(job.with_setting(max_live=n), num_ranks, "rollout.max_live", n, n == live)
        for n in sorted({max(1, live // 2), live, live * 2})
    ]
    found += _mark(tried, lambda one: -one.step_seconds)
    if job.setting.trains:
        values = sorted({least, 1, *(n for n in (num_ranks // 16, num_ranks // 4, num_ranks // 2) if n > 0)})
        tried = [_try(job.with_setting(min_idle=n), num_ranks, "drafter.min_idle", n, n == least) for n in values]
        found += _mark(tried, lambda one: (round(one.harvested_share, 2), one.value))
    for name, own in (("prompts", job.prompts), ("group", job.group)):
        sizes = sorted({max(1, own // 2), own, own * 2})
        title = "rollout.prompts_per_step" if name == "prompts" else "rollout.group_size"
        tried = [_try(job, num_ranks, title, n, n == own, **{name: n}) for n in sizes]
        found += _mark(tried, lambda one: one.responses_per_second)
    return found


def pays_up_to(job: SimulatedJob) -> int:
    """The most live sequences at which the chooser speculates with empty contexts; 0: at none."""
    batch = np.arange(1, job.setting.max_live + 1)
    _, chosen = job.costs.up_to(job.setting.max_live).best(batch, np.zeros(len(batch)))
    return int(batch[chosen > 0].max(initial=0))


def _thresholds(max_live: int) -> list[int]:
    return sorted({0, max_live, *(1 << i for i in range(max_live.bit_length()))} - {max_live + 1})


def _try(
    job: SimulatedJob, num_ranks: int, setting: str, value: int, is_own: bool, **changes: int | TokenCosts
) -> Tried:
    changed = replace(job, **changes)  # type: ignore[arg-type]
    steps = changed.run(num_ranks)
    seconds = float(steps.step_seconds.mean())
    return Tried(setting, value, is_own, seconds, changed.prompts * changed.group / seconds, steps.harvested_share)


def _mark(tried: list[Tried], worth: Callable[[Tried], Any]) -> list[Tried]:
    best = max(tried, key=worth)
    return [replace(one, is_best=one is best) for one in tried]


@dataclass(frozen=True)
class WhatIf:
    """A change; ``gain`` is the job's step seconds over these, ``note`` says what is assumed."""

    name: str
    rollout_seconds: float
    step_seconds: float
    gain: float
    note: str
    is_possible: bool = True
    """False: a bound that rests on what cannot be known."""

    @property
    def pays(self) -> bool:
        """Whether it could be done and would shorten the step by more than noise."""
        return self.is_possible and self.gain >= 1 + MIN_GAIN


def what_ifs(job: SimulatedJob, num_ranks: int, error: float = PREDICTION_ERROR) -> list[WhatIf]:
    """All changes at one number of ranks; the first is the job as it is."""
    drawn, replicas = job.drawn(), job.replicas(num_ranks)
    costs = job.costs if job.speculates else job.costs.plain
    own = job.run(num_ranks)

    def entry(name: str, steps: Steps, note: str, is_possible: bool = True) -> WhatIf:
        seconds = float(steps.step_seconds.mean())
        gain = float(own.step_seconds.mean()) / seconds
        return WhatIf(name, float(steps.rollout_seconds.mean()), seconds, gain, note, is_possible)

    def simulated(lengths: Ints, setting: Setting = job.setting) -> Steps:
        return simulate(lengths, costs, setting, job.phases)

    rng = np.random.default_rng(job.seed + 1)
    predicted: Floats = drawn.astype(np.float64) * np.exp(error * rng.standard_normal(drawn.shape))
    found = [entry("as it is", own, f"{job.shard}s dealt in turn")]
    longest = deal_by(drawn, predicted, replicas, job.shard == "group", False)
    found.append(
        entry("longest predicted first", simulated(longest), f"within a replica; error {error:g} in log length")
    )
    spread = deal_by(drawn, predicted, replicas, job.shard == "group", True)
    found.append(entry("dealt by predicted length", simulated(spread), f"evenly over replicas; error {error:g}"))
    known = deal_by(drawn, drawn.astype(np.float64), replicas, job.shard == "group", True)
    found.append(entry("the same, lengths known", simulated(known), "no prediction is better", False))
    moved, seconds, moves = shared_tail(job.dealt(num_ranks), costs, job.setting)
    steps = after_rollouts(moved, own.tokens, own.speculated_tokens, num_ranks, job.setting, job.phases)
    note = f"at no cost; some {moves:.0f} moves a step, it pays if one takes under {seconds:.2g} s"
    found.append(entry("sequences moved freely", steps, note))
    if job.shard == "group":
        single = replace(job.setting, read_share=1.0)
        note = "n-grams lose their siblings; prompts read on every replica"
        found.append(entry('shard = "sample"', simulated(deal(drawn, replicas, "sample"), single), note))
    found.append(_more_ranks(job, num_ranks, own))
    return found


def _more_ranks(job: SimulatedJob, num_ranks: int, own: Steps) -> WhatIf:
    """Four replicas for each prompt, each with single samples."""
    many = _RANKS_A_PROMPT * job.prompts * job.setting.ranks_per_replica
    spread = replace(job, shard="sample").with_setting(read_share=1.0)
    steps = spread.run(many)
    seconds, before = float(steps.step_seconds.mean()), float(own.step_seconds.mean())
    hours = seconds * many / (before * num_ranks)
    note = f"single samples, {many} ranks: {hours:.2g} times the GPU-hours"
    return WhatIf("more ranks than prompts", float(steps.rollout_seconds.mean()), seconds, before / seconds, note)


def deal_by(drawn: Ints, predicted: Floats, num_replicas: int, whole_groups: bool, across: bool) -> Ints:
    """Lengths [T, R, N], longest predicted first: in each replica's shard, or dealt over replicas in snake order."""
    steps, _, group = drawn.shape
    size = group if whole_groups else 1
    real, guess = drawn.reshape(steps, -1, size), predicted.reshape(steps, -1, size)
    if across:
        order = np.argsort(-guess.sum(2), axis=1, kind="stable")
        real = np.take_along_axis(real, order[:, :, None], 1)
        guess = np.take_along_axis(guess, order[:, :, None], 1)
        turn = np.arange(real.shape[1])
        lap, place = turn // num_replicas, turn % num_replicas
        seat = lap * num_replicas + np.where(lap % 2, num_replicas - 1 - place, place)
        room = -(-real.shape[1] // num_replicas) * num_replicas
        seated, guessed = np.zeros((steps, room, size), np.int64), np.zeros((steps, room, size))
        seated[:, seat], guessed[:, seat] = real, guess
        real, guess = seated, guessed
    shards, guesses = deal(real, num_replicas, "group"), _deal_floats(guess, num_replicas)
    order = np.argsort(-np.where(shards > 0, guesses, -1.0), axis=2, kind="stable")
    return np.take_along_axis(shards, order, 2)


def _deal_floats(values: Floats, num_replicas: int) -> Floats:
    """Distributes other values as ``deal`` distributes lengths."""
    places = np.arange(1, values.size + 1).reshape(values.shape)
    dealt = deal(places, num_replicas, "group")
    return np.where(dealt > 0, values.reshape(-1)[np.maximum(dealt, 1) - 1], 0.0)


def shared_tail(lengths: Ints, costs: TokenCosts, setting: Setting) -> tuple[Floats, float, float]:
    """Steps whose live sequences are spread evenly over all replicas at every moment, as one pool.

    Returns when each replica had its last token, [T, R]; the seconds that a move may take before nothing is gained, if
    each one delays the rollout; and the moves a step: one whenever a replica has nothing left and others do.
    """
    steps, replicas, _ = lengths.shape
    live_limit = setting.max_live
    costs = costs.up_to(live_limit)
    pool = lengths.reshape(steps, -1)
    pool = np.take_along_axis(pool, np.argsort(pool == 0, axis=1, kind="stable"), 1)
    places = live_limit * replicas
    starts, order, finish = schedule(pool, places)
    count = (pool > 0).sum(1)
    live = np.clip(count[:, None] - np.arange(pool.shape[1]), 0, places)
    fullest = -(-live // replicas)
    span = np.diff(finish, axis=1, prepend=0.0)
    context = positions(starts, order, finish, span, count, live, places) / np.maximum(live, 1) + setting.prompt_tokens
    rate, _ = costs.best(fullest, context * fullest)
    read = setting.prompt_tokens * setting.read_share * costs.prompt_token_seconds * count / replicas
    last = (span * rate).sum(1) + read
    own = simulate(lengths, costs, setting, _NO_PHASES)
    moves = _moves(lengths)
    saved = float(own.rollout_seconds.mean() - last.mean() - setting.stop_seconds)
    return np.repeat(last[:, None], replicas, 1), max(saved, 0.0) / max(moves, 1.0), moves


def _moves(lengths: Ints) -> float:
    """Sequences a step that would move: a replica with nothing left takes one from the fullest, in token time."""
    total = 0
    for step in lengths:
        left = [np.sort(own[own > 0]) for own in step]
        dry = np.sort([float(own[-1]) if len(own) else 0.0 for own in left])[:-1]
        live = [len(own) - np.searchsorted(own, dry, "right") for own in left]
        total += int(np.count_nonzero(np.max(live, axis=0, initial=0) > 1))
    return total / len(lengths)
