"""Metrics of one step over all ranks, under the names that are usual in the field, and the timer of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.common.formatting import FIRST_STEP
from tlt_hpc.common.records import FinishReason, RolloutTiming
from tlt_hpc.drafting.merge import MergeReport
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.answer import PART, WITH_PARTS
from tlt_hpc.rl.stats import Update
from tlt_hpc.rollout.acceptance import DraftCounts
from tlt_hpc.storage.rollout_log import StepRecord
from tlt_hpc.storage.step_lines import STEP

SCORE, TOKENS, TRAINED_TOKENS = "critic/score/mean", "perf/total_num_tokens", "actor/num_tokens"
PROBS_DIFF = "training/rollout_probs_diff_mean"
K3 = "training/rollout_k3"
KEPT_TOKENS = "rollout/kept_tokens"
"""Tokens that an earlier start generated: none of this start's seconds belong to them."""
LATE = "rollout/late_seconds"
"""Time from a rank's learning of the release to its leaving the loop."""
DECODE_CPU = "rollout/decode_cpu_seconds"
"""A rank's CPU seconds until its own last token."""
MERGE_EXPOSED = "drafter/merge_exposed_seconds"
DUE = "drafter/due"
"""1 where the step was to train the drafter."""
_MAXIMA = (LATE, DECODE_CPU, MERGE_EXPOSED, DUE)
"""Metrics of a rank that are the maximum over the ranks; the others are sums."""
_CUT, _PASSES, _STRATEGY = "cut", "passes", "rollout/strategy_share/"


class RankPart(NamedTuple):
    """The part of a rank's step record that the metrics need."""

    lengths: NDArray[np.int64]
    rewards: NDArray[np.float32]
    timings: tuple[RolloutTiming, ...]
    """Times of the step's rollout and of each refill."""
    drafter_loss: float
    """NaN without a drafter update."""
    own: Mapping[str, float]
    """Metrics of the rank, to be summed over the ranks."""


def extract_rank_part(record: StepRecord) -> RankPart:
    """Extract the part of this rank's record."""
    timings, rollouts, micro_steps = (record.timing, *record.refills), record.rollouts, record.micro_steps
    own = {
        _CUT: sum(rollout.finish_reason == FinishReason.LENGTH for rollout in rollouts),
        _PASSES: sum(rollout.num_target_passes for rollout in rollouts),
        "drafter/steps": float(len(micro_steps)),
        "rollout/idle_rank_seconds": sum(timing.idle_seconds for timing in timings),
        "rollout/harvested_rank_seconds": record.harvested_seconds,
        "rollout/guarded_near_ties": float(record.guarded_near_ties),
        **record.metrics,
    }
    names = [f"{_STRATEGY}{name}" for name in record.strategy_names]
    own |= dict(zip(names, record.strategy_tokens.tolist(), strict=True))
    lengths = np.array([len(rollout.response_tokens) for rollout in rollouts])
    loss = float(np.mean([micro_step.loss for micro_step in micro_steps])) if micro_steps else np.nan
    return RankPart(lengths, record.rewards, timings, loss, own)


def gather_step_metrics(
    world: World, record: StepRecord, update: Update, merge: MergeReport | None, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Combine all ranks' records of a step to its metrics, equal on all ranks except for seconds of phases; collective.

    Seconds of phases are this rank's; idle and harvested rank-seconds are sums over the ranks.
    """
    ranks = world.allgather(extract_rank_part(record))
    lengths = np.concatenate([rank.lengths for rank in ranks])
    scores = np.concatenate([rank.rewards for rank in ranks])
    rollouts = list(zip(*(rank.timings for rank in ranks), strict=True))  # each one's times, of all ranks
    losses = [rank.drafter_loss for rank in ranks if not np.isnan(rank.drafter_loss)]
    own = {name: float((max if name in _MAXIMA else sum)(rank.own[name] for rank in ranks)) for name in ranks[0].own}
    tokens = int(lengths.sum())
    generated = tokens - own[KEPT_TOKENS]
    metrics = {
        STEP: float(record.step + FIRST_STEP),
        **_mean_max_min("critic/score", scores),
        **_mean_max_min("critic/rewards", update.rewards),
        **_mean_max_min("critic/advantages", update.advantages),
        "actor/reward_kl_penalty": update.reward_kl,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/p50": float(np.median(lengths)),
        "response_length/clip_ratio": own.pop(_CUT) / len(lengths),
        **{f"actor/{name}": float(value) for name, value in vars(update.stats).items() if name != "mismatch"},
        **{f"training/{name}": value for name, value in vars(update.stats.mismatch).items()},
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        TOKENS: float(tokens),
        "perf/throughput": generated / seconds["step"],
        "drafter/spec_decode/mean_acceptance_length": tokens / own.pop(_PASSES),
        "drafter/loss": float(np.mean(losses)) if losses else 0.0,
        "drafter/version": float(merge.num_steps) if merge else 0.0,
        "rollout/seconds": sum(_last_release_time(times) - min(t.start_seconds for t in times) for times in rollouts),
        "rollout/stop_latency_seconds": max(
            _last_release_time(times) - max(t.last_token_seconds for t in times) for times in rollouts
        ),
        "rollout/refills": len(rollouts) - 1.0,
        "rollout/samples": float(len(lengths)),
        "rollout/trained_samples": float(len(update.trained)),
        "rollout/teaching_share": update.informative_share,
    }
    for name, value in own.items():
        if name.startswith(_STRATEGY):
            metrics[name] = value / max(generated, 1)
        elif name.startswith(PART):
            total = sum(rank.own[name] * rank.own[WITH_PARTS] for rank in ranks)
            metrics[name] = total / max(own[WITH_PARTS], 1)
        else:
            metrics[name] = value
    if merge:
        counts = DraftCounts.from_metrics(metrics)
        metrics["drafter/own_accept_length"] = counts.accept_length
        metrics["drafter/own_first_draft_share"] = counts.accepted[0] / max(counts.reached[0], 1.0)
        metrics["drafter/own_sequences"] = counts.reached[0]
    return metrics


def _last_release_time(times: Sequence[RolloutTiming]) -> float:
    """The time at which the last rank left a rollout."""
    return max(timing.release_seconds for timing in times)


def mean_of(values: NDArray[np.float32]) -> float:
    """The mean of values [N] in float64, so that it does not depend on which rank had which value."""
    return float(values.astype(np.float64).mean())


def _mean_max_min(name: str, values: NDArray[np.float32]) -> dict[str, float]:
    parts = (("mean", mean_of(values)), ("max", float(values.max())), ("min", float(values.min())))
    return {f"{name}/{part}": value for part, value in parts}


# -- the phases of a step in wall-clock and CPU seconds, reported to the watch ----------------------------------------

WATCHED = {
    "gen": Phase.ROLLOUT,
    "reward": Phase.REWARD,
    "update_actor": Phase.UPDATE,
    "refresh": Phase.REFRESH,
}
"""Name of a phase in the metrics -> phase of the watch."""


class PhaseTimer:
    """Sums the seconds of named phases until they are taken.

    CPU seconds are user and system time of all threads of this process; processes that it started are not included.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._cpu_seconds: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as ``phase``, one of ``WATCHED``."""
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            with self.recording_span(phase), BEAT.in_phase(WATCHED[phase]):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self._cpu_seconds[phase] = self._cpu_seconds.get(phase, 0.0) + time.process_time() - cpu_start

    @contextmanager
    def recording_span(self, phase: str) -> Iterator[None]:
        """Record a block that is not part of a step's seconds, such as a save."""
        start = time.time()
        try:
            yield
        finally:
            self._spans.append((phase, start, time.time()))

    def take_spans(self) -> list[tuple[str, float, float]]:
        """Name, start and end (seconds since the epoch) of all blocks since the last call, ordered by end."""
        taken, self._spans = self._spans, []
        return taken

    def take_phase_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call, and their sum as ``step``; resets them."""
        taken, self._seconds = self._seconds, {}
        return {**taken, "step": sum(taken.values())}

    def take_cpu(self) -> dict[str, float]:
        """CPU seconds of the rollout and of the step since the last call, as metrics; resets them."""
        taken, self._cpu_seconds = self._cpu_seconds, {}
        return {"perf/rollout_cpu_seconds": taken["gen"], "perf/cpu_seconds": sum(taken.values())}
