"""What the program does not do: moving sequences, ordering by predicted length, single samples on many ranks.

Each is held against the job as it is, on the same lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tlt_hpc.plan.simulate.costs import Costs, Floats
from tlt_hpc.plan.simulate.lengths import Ints, deal
from tlt_hpc.plan.simulate.step import Phases, Setting, Steps, after_rollouts, simulate
from tlt_hpc.plan.simulate.walk import positions, schedule
from tlt_hpc.plan.simulate.workload import Workload

PREDICTION_ERROR = 0.5
"""Standard deviation of the log of predicted over real length."""
LEAST_GAIN = 0.02
"""Of a step, from which a change is said to pay."""
_NO_PHASES = Phases()
_RANKS_A_PROMPT = 4


@dataclass(frozen=True)
class WhatIf:
    """``gain``: the job's step seconds over these; ``note`` says what it takes for granted."""

    name: str
    rollout_seconds: float
    step_seconds: float
    gain: float
    note: str
    is_possible: bool = True
    """No: a bound, from what nobody can know."""

    @property
    def pays(self) -> bool:
        """Whether it could be done and would shorten the step, by more than noise."""
        return self.is_possible and self.gain >= 1 + LEAST_GAIN


def what_ifs(work: Workload, num_ranks: int, error: float = PREDICTION_ERROR) -> list[WhatIf]:
    """All of them, at one number of ranks; the first is the job as it is."""
    drawn, replicas = work.drawn(), work.replicas(num_ranks)
    costs = work.costs if work.speculates else work.costs.plain
    own = work.run(num_ranks)

    def entry(name: str, steps: Steps, note: str, is_possible: bool = True) -> WhatIf:
        seconds = float(steps.step_seconds.mean())
        gain = float(own.step_seconds.mean()) / seconds
        return WhatIf(name, float(steps.rollout_seconds.mean()), seconds, gain, note, is_possible)

    def simulated(lengths: Ints, setting: Setting = work.setting) -> Steps:
        return simulate(lengths, costs, setting, work.phases)

    rng = np.random.default_rng(work.seed + 1)
    predicted: Floats = drawn.astype(np.float64) * np.exp(error * rng.standard_normal(drawn.shape))
    found = [entry("as it is", own, f"{work.shard}s dealt in turn")]
    longest = deal_by(drawn, predicted, replicas, work.shard == "group", False)
    found.append(
        entry("longest predicted first", simulated(longest), f"within a replica; error {error:g} in log length")
    )
    spread = deal_by(drawn, predicted, replicas, work.shard == "group", True)
    found.append(entry("dealt by predicted length", simulated(spread), f"evenly over replicas; error {error:g}"))
    known = deal_by(drawn, drawn.astype(np.float64), replicas, work.shard == "group", True)
    found.append(entry("the same, lengths known", simulated(known), "no prediction is better", False))
    moved, seconds, moves = shared_tail(work.dealt(num_ranks), costs, work.setting)
    steps = after_rollouts(moved, own.tokens, own.speculated_tokens, num_ranks, work.setting, work.phases)
    note = f"at no cost; some {moves:.0f} moves a step, it pays if one takes under {seconds:.2g} s"
    found.append(entry("sequences moved freely", steps, note))
    if work.shard == "group":
        single = replace(work.setting, read_share=1.0)
        note = "n-grams lose their siblings; prompts read on every replica"
        found.append(entry('shard = "sample"', simulated(deal(drawn, replicas, "sample"), single), note))
    found.append(_more_ranks(work, num_ranks, own))
    return found


def _more_ranks(work: Workload, num_ranks: int, own: Steps) -> WhatIf:
    """Four replicas a prompt, each with single samples."""
    many = _RANKS_A_PROMPT * work.prompts * work.setting.ranks_per_replica
    spread = replace(work, shard="sample").with_setting(read_share=1.0)
    steps = spread.run(many)
    seconds, before = float(steps.step_seconds.mean()), float(own.step_seconds.mean())
    hours = seconds * many / (before * num_ranks)
    note = f"single samples, {many} ranks: {hours:.2g} times the GPU-hours"
    return WhatIf("more ranks than prompts", float(steps.rollout_seconds.mean()), seconds, before / seconds, note)


def deal_by(drawn: Ints, predicted: Floats, num_replicas: int, whole_groups: bool, across: bool) -> Ints:
    """[T, R, N] with the longest predicted first: in each replica's own shard, or dealt to and fro over replicas."""
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
    """As ``deal`` deals lengths."""
    places = np.arange(1, values.size + 1).reshape(values.shape)
    dealt = deal(places, num_replicas, "group")
    return np.where(dealt > 0, values.reshape(-1)[np.maximum(dealt, 1) - 1], 0.0)


def shared_tail(lengths: Ints, costs: Costs, setting: Setting) -> tuple[Floats, float, float]:
    """If live sequences were spread evenly over all replicas at every moment: one pool with so many times the places.

    Returns when each replica had its last token, [T, R]; the seconds that a move may take before nothing is won, were
    each to hold up the rollout; and the moves a step, those of sequences that live on when a replica runs dry.
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
    """Sequences a step that would move: as one replica runs dry, it takes one from the fullest, in token time."""
    total = 0
    for step in lengths:
        left = [np.sort(own[own > 0]) for own in step]
        dry = np.sort([float(own[-1]) if len(own) else 0.0 for own in left])[:-1]
        live = [len(own) - np.searchsorted(own, dry, "right") for own in left]
        total += int(np.count_nonzero(np.max(live, axis=0, initial=0) > 1))
    return total / len(lengths)
