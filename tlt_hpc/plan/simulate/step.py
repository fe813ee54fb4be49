"""Training steps over all ranks: rollouts, waiting, spot training, update, save. Knows costs, not where they come from.

Shapes: ``T`` steps, ``R`` replicas, ``N`` responses of the largest shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.plan.simulate.costs import Costs, Floats
from tlt_hpc.plan.simulate.walk import walk

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """How the ranks roll out and what they do while they wait."""

    ranks_per_replica: int = 1
    max_live: int = 64
    prompt_tokens: float = 0.0
    read_share: float = 1.0
    """Share of the responses whose prompt is read: where groups stay together, one of each."""
    min_idle: int = 1
    micro_step_seconds: float = 0.2
    trains: bool = True
    stop_seconds: float = 0.0
    """From the last token of any rank until all have left the rollout."""


@dataclass(frozen=True)
class Phases:
    """The rest of a step: seconds of each response token on one rank, seconds a step, and of every so many-th step."""

    token_seconds: float = 0.0
    fixed_seconds: float = 0.0
    save_seconds: float = 0.0
    save_every: int = 1

    def seconds(self, tokens: Floats, num_ranks: int) -> Floats:
        """Of steps of so many tokens, over so many ranks."""
        saved: Floats = (
            self.fixed_seconds + self.save_seconds / self.save_every + self.token_seconds * tokens / num_ranks
        )
        return saved


@dataclass(frozen=True)
class Steps:
    """What came out, [T] each; rank-seconds are sums over the ranks."""

    num_ranks: int
    rollout_seconds: Floats
    other_seconds: Floats
    idle_rank_seconds: Floats
    harvested_rank_seconds: Floats
    tokens: Floats
    speculated_tokens: Floats

    @property
    def step_seconds(self) -> Floats:
        return self.rollout_seconds + self.other_seconds

    @property
    def idle_share(self) -> float:
        """Of all rank-seconds, those in which a rank waits for the rollout's end."""
        return float(self.idle_rank_seconds.sum() / (self.step_seconds.sum() * self.num_ranks))

    @property
    def harvested_share(self) -> float:
        """Of the idle rank-seconds."""
        idle = float(self.idle_rank_seconds.sum())
        return float(self.harvested_rank_seconds.sum()) / idle if idle else 0.0


def simulate(lengths: Ints, costs: Costs, setting: Setting, phases: Phases) -> Steps:
    """Run steps whose responses are ``lengths`` [T, R, N], in the order of their admission."""
    steps, replicas, number = lengths.shape
    flat = lengths.reshape(steps * replicas, number)
    done = walk(flat, costs, setting.max_live, setting.prompt_tokens, setting.read_share)
    tokens = lengths.sum((1, 2)).astype(np.float64)
    num_ranks = replicas * setting.ranks_per_replica
    speculated = done.speculated.reshape(steps, replicas).sum(1)
    return after_rollouts(done.seconds.reshape(steps, replicas), tokens, speculated, num_ranks, setting, phases)


def after_rollouts(
    ended: Floats, tokens: Floats, speculated: Floats, num_ranks: int, setting: Setting, phases: Phases
) -> Steps:
    """Steps whose replicas had their last tokens at ``ended`` [T, R] seconds."""
    release = ended.max(1) + setting.stop_seconds
    idle = release[:, None] - ended
    return Steps(
        num_ranks=num_ranks,
        rollout_seconds=release,
        other_seconds=phases.seconds(tokens, num_ranks),
        idle_rank_seconds=idle.sum(1) * setting.ranks_per_replica,
        harvested_rank_seconds=_harvested(ended, release, setting).sum(1) * setting.ranks_per_replica,
        tokens=tokens,
        speculated_tokens=speculated,
    )


def _harvested(ended: Floats, release: Floats, setting: Setting) -> Floats:
    """Seconds [T, R] in whole micro-steps: from where a rank is idle, and ``min_idle`` are, to the release."""
    number = -(-setting.min_idle // setting.ranks_per_replica)
    if not setting.trains or number > ended.shape[1]:
        return np.zeros_like(ended)
    enough = np.sort(ended, axis=1)[:, number - 1 : number]
    last = ended.max(1, keepdims=True)
    begin = np.maximum(ended, enough)
    fitting = np.floor((release[:, None] - begin) / setting.micro_step_seconds + 1e-9)
    return np.where(begin < last, fitting * setting.micro_step_seconds, 0.0)
