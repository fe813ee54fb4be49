"""Training steps over all ranks, from response lengths and costs: rollouts, waiting, spot training, update, save.

All live sequences of a replica advance together, so in tokens its rollout is list scheduling on ``max_live`` places:
``simulate_rollouts`` advances from one response's end to the next, between which the batch is constant, for many
replicas at once.
Shapes: ``T`` steps, ``R`` replicas (in ``simulate_rollouts`` rollouts, of a step and a replica each), ``N`` responses
of the largest shard, in the order of their admission; a length of 0 is no response.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.config import Config, DrafterSection
from tlt_hpc.extras.simulate.costs import Floats, TokenCosts
from tlt_hpc.extras.simulate.lengths import Ints


@dataclass(frozen=True)
class Setting:
    """The settings of a rollout, and of what ranks do while they wait."""

    ranks_per_replica: int = 1
    max_live: int = 64
    prompt_tokens: float = 0.0
    read_share: float = 1.0
    """Share of the responses whose prompt is read: one of each group if groups stay together."""
    micro_step_seconds: float = DrafterSection.micro_step_seconds
    trains: bool = True
    stop_seconds: float = 0.0
    """From the last token of any rank until all have left the rollout."""


@dataclass(frozen=True)
class StepPhases:
    """The rest of a step: seconds for each response token on one rank, and for each step."""

    token_seconds: float = 0.0
    fixed_seconds: float = 0.0

    def seconds(self, tokens: Floats, num_ranks: int) -> Floats:
        """Seconds [T] of steps beside the rollout, for response tokens [T] over all ranks."""
        return np.asarray(self.fixed_seconds + self.token_seconds * tokens / num_ranks)


@dataclass(frozen=True)
class Steps:
    """Simulated steps, [T] each; rank-seconds are sums over the ranks."""

    num_ranks: int
    rollout_seconds: Floats
    other_seconds: Floats
    idle_rank_seconds: Floats
    harvested_rank_seconds: Floats
    tokens: Floats

    @property
    def step_seconds(self) -> Floats:
        """Seconds [T] of whole steps."""
        return self.rollout_seconds + self.other_seconds

    @property
    def idle_share(self) -> float:
        """Share of all rank-seconds in which a rank waits for the rollout's end."""
        return float(self.idle_rank_seconds.sum() / (self.step_seconds.sum() * self.num_ranks))

    @property
    def harvested_share(self) -> float:
        """Share of the idle rank-seconds that trains the drafter."""
        idle = float(self.idle_rank_seconds.sum())
        return float(self.harvested_rank_seconds.sum()) / idle if idle else 0.0


def setting_from(config: Config) -> Setting:
    """The settings of a job."""
    rollout = config.rollout
    return Setting(
        ranks_per_replica=rollout.tensor_parallel,
        max_live=rollout.max_live,
        prompt_tokens=config.data.max_prompt_tokens / 2,
        read_share=1 / rollout.group_size if rollout.shard == "group" else 1.0,
        trains=config.speculation.trains_drafter,
        stop_seconds=0.005,
    )


def simulate(lengths: Ints, costs: TokenCosts, setting: Setting, phases: StepPhases) -> Steps:
    """Simulate steps whose responses are ``lengths`` [T, R, N], in the order of their admission."""
    steps, replicas, number = lengths.shape
    flat = lengths.reshape(steps * replicas, number)
    ends = simulate_rollouts(flat, costs, setting.max_live, setting.prompt_tokens, setting.read_share)
    ended = ends.max(1, initial=0.0).reshape(steps, replicas)
    release = ended.max(1) + setting.stop_seconds
    tokens, num_ranks = lengths.sum((1, 2)).astype(np.float64), replicas * setting.ranks_per_replica
    return Steps(
        num_ranks=num_ranks,
        rollout_seconds=release,
        other_seconds=phases.seconds(tokens, num_ranks),
        idle_rank_seconds=(release[:, None] - ended).sum(1) * setting.ranks_per_replica,
        harvested_rank_seconds=_harvested_seconds(ended, release, setting).sum(1) * setting.ranks_per_replica,
        tokens=tokens,
    )


def _harvested_seconds(ended: Floats, release: Floats, setting: Setting) -> Floats:
    """Seconds [T, R] of whole micro-steps, from the rank's last token until the release."""
    if not setting.trains:
        return np.zeros_like(ended)
    fitting = np.floor((release[:, None] - ended) / setting.micro_step_seconds + 1e-9)
    return np.where(ended < ended.max(1, keepdims=True), fitting * setting.micro_step_seconds, 0.0)


def simulate_rollouts(
    lengths: Ints, costs: TokenCosts, max_live: int, prompt_tokens: float = 0.0, read_share: float = 1.0
) -> Floats:
    """Simulate rollouts: the seconds after the start at which each response ended, [R, N].

    Args:
        lengths: [R, N]; zeros come last in a row.
        prompt_tokens: of each response; they are part of the context, and are read when it is admitted.
        read_share: the share of responses whose prompt has to be read: one of a group that stays together.
    """
    costs = costs.up_to(max_live)
    starts, order, finish = schedule(lengths, max_live)
    count = (lengths > 0).sum(1)
    rows, number = lengths.shape
    index = np.arange(number)
    live = np.clip(count[:, None] - index, 0, max_live)
    span = np.diff(finish, axis=1, prepend=0.0)
    held = context_positions(starts, order, finish, span, count, live, max_live) + prompt_tokens * live
    rate = costs.best_token_seconds(live, held)
    admitted = np.zeros((rows, number))
    admitted[:, 0] = np.minimum(count, max_live)
    admitted[:, 1:] = count[:, None] > max_live + index[:-1]
    read = np.cumsum(admitted, 1) * (prompt_tokens * read_share * costs.prompt_token_seconds)
    together = np.maximum.accumulate(np.where(span > 0, index, 0), axis=1)  # of those that end in one round the first
    clock = np.cumsum(span * rate, 1) + np.take_along_axis(read, together, 1)
    ends = np.zeros_like(clock)
    np.put_along_axis(ends, order, clock, 1)
    ends[lengths == 0] = 0.0
    return ends


def schedule(lengths: Ints, max_live: int) -> tuple[Floats, Ints, Floats]:
    """In tokens, [R, N] each: when responses are admitted, in which order they end, and when; flat behind the last."""
    rows, number = lengths.shape
    starts, finish = np.zeros((rows, number)), lengths.astype(np.float64)
    if number > max_live:
        places = finish[:, :max_live].copy()
        every = np.arange(rows)
        for index in range(max_live, number):
            free = places.argmin(1)
            starts[:, index] = places[every, free]
            finish[:, index] += starts[:, index]
            places[every, free] = np.where(lengths[:, index] > 0, finish[:, index], np.inf)
    finish[lengths == 0] = np.inf
    order = np.argsort(finish, axis=1, kind="stable")
    finish = np.take_along_axis(finish, order, 1)
    last = np.where(np.isfinite(finish), finish, 0.0).max(1, initial=0.0)
    return starts, order, np.minimum(finish, last[:, None])


def context_positions(
    starts: Floats, order: Ints, finish: Floats, span: Floats, count: Ints, live: Ints, max_live: int
) -> Floats:
    """Response tokens in the contexts of the live sequences, half-way through each span [R, N]."""
    number = starts.shape[1]
    begun = np.cumsum(starts, 1)
    index = np.minimum(np.minimum(np.arange(number) + max_live, number)[None, :], np.maximum(count, 1)[:, None]) - 1
    all_begun = np.take_along_axis(begun, index, 1)
    ended = np.cumsum(np.take_along_axis(starts, order, 1), 1)
    ended = np.concatenate([np.zeros((len(starts), 1)), ended[:, :-1]], 1)
    middle = finish - span / 2
    held: Floats = np.where(live > 0, live * middle - (all_begun - ended), 0.0)
    return held
