"""Metrics of one step over all ranks, under the names that are usual in the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tlt_hpc.common.records import FinishReason, RolloutTiming
from tlt_hpc.drafting.acceptance import DraftCounts
from tlt_hpc.drafting.spot import MergeReport
from tlt_hpc.look.energy import PREFIX as ENERGY
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.policy import Update
from tlt_hpc.storage.rollout_log import StepRecord

SCORE, TOKENS, TRAINED_TOKENS = "critic/score/mean", "perf/total_num_tokens", "actor/num_tokens"
PROBS_DIFF = "training/rollout_probs_diff_mean"
K3 = "training/rollout_k3"
KEPT_TOKENS = "rollout/kept_tokens"
"""Tokens that an earlier start generated: none of this start's seconds belong to them."""
LATE = "rollout/late_seconds"
"""Time from a rank's learning of the release to its leaving the loop."""
MERGE_EXPOSED = "drafter/merge_exposed_seconds"
DUE = "drafter/due"
"""1 where the step was to train the drafter."""
_MAXIMA = {LATE, MERGE_EXPOSED, DUE}
"""Metrics that are the maximum over the ranks; the others are sums."""


@dataclass(frozen=True)
class RankSummary:
    """The part of a rank's step record that the metrics need."""

    lengths: np.ndarray
    rewards: np.ndarray
    num_cut: int
    num_row_passes: int
    timings: tuple[RolloutTiming, ...]
    """Times of the step's rollout and of each refill."""
    harvested_seconds: float
    num_micro_steps: int
    drafter_loss: float
    num_guarded: int
    strategy_tokens: dict[str, int]
    own: dict[str, float]
    """Other metrics of the rank."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step; equal on all ranks except for the seconds of phases."""

    step: int
    metrics: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]


def summarise(
    world: World, record: StepRecord, update: Update, merge: MergeReport | None, seconds: Mapping[str, float]
) -> StepMetrics:
    """Combine all ranks' records of a step; collective.

    Seconds of phases are this rank's; idle and harvested rank-seconds are sums over the ranks.
    """
    ranks = world.allgather(summarise_rank(record))
    lengths = np.concatenate([rank.lengths for rank in ranks])
    scores = np.concatenate([rank.rewards for rank in ranks])
    tokens = int(lengths.sum())
    generated = tokens - sum(rank.own[KEPT_TOKENS] for rank in ranks)
    rollouts = list(zip(*(rank.timings for rank in ranks), strict=True))  # each one's times, of all ranks
    metrics = {
        "training/global_step": float(record.step),
        **_spread("critic/score", scores),
        **_spread("critic/rewards", update.rewards),
        **_spread("critic/advantages", update.advantages),
        "actor/reward_kl_penalty": update.reward_kl,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/p50": float(np.median(lengths)),
        "response_length/clip_ratio": sum(rank.num_cut for rank in ranks) / len(lengths),
        **{f"actor/{name}": float(value) for name, value in vars(update.stats).items() if name != "mismatch"},
        **{f"training/{name}": value for name, value in vars(update.stats.mismatch).items()},
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        TOKENS: float(tokens),
        "perf/throughput": generated / seconds["step"],
        "drafter/spec_decode/mean_acceptance_length": tokens / sum(rank.num_row_passes for rank in ranks),
        "drafter/steps": float(sum(rank.num_micro_steps for rank in ranks)),
        "drafter/loss": _mean([rank.drafter_loss for rank in ranks if rank.num_micro_steps]),
        "drafter/version": float(merge.num_steps) if merge else 0.0,
        "rollout/idle_rank_seconds": sum(timing.idle_seconds for rank in ranks for timing in rank.timings),
        "rollout/harvested_rank_seconds": sum(r.harvested_seconds for r in ranks),
        "rollout/seconds": sum(_released(times) - min(t.start_seconds for t in times) for times in rollouts),
        "rollout/stop_latency_seconds": max(
            _released(times) - max(t.last_token_seconds for t in times) for times in rollouts
        ),
        "rollout/refills": len(rollouts) - 1.0,
        "rollout/samples": float(len(lengths)),
        "rollout/trained_samples": float(len(update.trained)),
        "rollout/teaching_share": update.informative_share,
        "rollout/guarded_near_ties": float(sum(rank.num_guarded for rank in ranks)),
    }
    for name in ranks[0].own:
        values = [rank.own[name] for rank in ranks]
        figure = max(values) if name in _MAXIMA else sum(values)
        if not (name.startswith(ENERGY) and np.isnan(figure)):  # a counter was lost: the rest is not the whole
            metrics[name] = figure
    if merge:
        metrics |= _own_drafts(DraftCounts.from_metrics(metrics))
    for name in ranks[0].strategy_tokens:
        metrics[f"rollout/strategy_share/{name}"] = sum(r.strategy_tokens[name] for r in ranks) / max(generated, 1)
    return StepMetrics(record.step, metrics)


def _own_drafts(counts: DraftCounts) -> dict[str, float]:
    """Quality of the learned drafter's own drafts, from counts over all ranks."""
    return {
        "drafter/own_accept_length": counts.accept_length,
        "drafter/own_first_draft_share": counts.accepted[0] / max(counts.reached[0], 1.0),
        "drafter/own_sequences": counts.num_sequences,
    }


def summarise_rank(record: StepRecord) -> RankSummary:
    """Summarise this rank's record."""
    return RankSummary(
        lengths=np.array([len(rollout.response_tokens) for rollout in record.rollouts]),
        rewards=record.rewards,
        num_cut=sum(rollout.finish_reason == FinishReason.LENGTH for rollout in record.rollouts),
        num_row_passes=sum(rollout.num_target_passes for rollout in record.rollouts),
        timings=(record.timing, *record.refills),
        harvested_seconds=record.harvested_seconds,
        num_micro_steps=len(record.micro_steps),
        drafter_loss=_mean([micro_step.loss for micro_step in record.micro_steps]),
        num_guarded=record.guarded_near_ties,
        strategy_tokens=dict(zip(record.strategy_names, record.strategy_tokens.tolist(), strict=True)),
        own=record.metrics,
    )


def _released(times: Sequence[RolloutTiming]) -> float:
    """When the last rank left a rollout."""
    return max(timing.release_seconds for timing in times)


def mean_of(values: np.ndarray) -> float:
    """Mean in float64, so that the result does not depend on which rank had which value."""
    return float(values.astype(np.float64).mean())


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    parts = (("mean", mean_of(values)), ("max", float(values.max())), ("min", float(values.min())))
    return {f"{name}/{part}": value for part, value in parts}


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
