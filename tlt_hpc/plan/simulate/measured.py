"""Costs and phases fitted to a run's own log.

A rank's seconds from its start to its last token are divided over its rounds in proportion to their measured seconds,
so that what lies between rounds is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import PREFILL
from tlt_hpc.plan.simulate.costs import TokenCosts, chance_of
from tlt_hpc.plan.simulate.lengths import Logged
from tlt_hpc.plan.simulate.profile import round_seconds
from tlt_hpc.plan.simulate.run_log import RecordedRun
from tlt_hpc.plan.simulate.step import Setting, StepPhases
from tlt_hpc.rollout.cost_profile import CostProfile
from tlt_hpc.rollout.strategy import OFF, Source, strategy_named

Floats = NDArray[np.float64]
LEAST_ROUNDS = 4
"""RecordedRounds of a strategy in a power of two of batches, from which its seconds there are believed."""
MANY_ROUNDS = 8
"""Plain rounds in a power of two from which they count for more there than all others together: single rounds vary by a
quarter and more, the median of this many by a tenth."""


@dataclass(frozen=True)
class RecordedRounds:
    """All decoding rounds of a log, [K] each; ``strategy`` is an index into ``names``. A long run has millions."""

    names: tuple[str, ...]
    strategy: NDArray[np.int16]
    live: NDArray[np.int32]
    tokens: NDArray[np.int32]
    seconds: Floats

    @cached_property
    def bucket(self) -> NDArray[np.int8]:
        """The power of two that each round's batch is in."""
        most = int(self.live.max(initial=1))
        found: NDArray[np.int8] = bucket_of(np.arange(1, most + 1)).astype(np.int8)[self.live - 1]
        return found

    @property
    def ran(self) -> list[str]:
        """Names of the strategies that ran."""
        return [self.names[i] for i in np.flatnonzero(np.bincount(self.strategy, minlength=len(self.names)))]

    def are(self, name: str) -> NDArray[np.bool_]:
        """Which rounds used a strategy."""
        place = self.names.index(name) if name in self.names else -1
        chosen: NDArray[np.bool_] = self.strategy == place
        return chosen


def read_rounds(log: RecordedRun) -> tuple[RecordedRounds, float]:
    """The rounds, and the seconds of reading one response's prompt."""
    read_seconds, num_responses, at = 0.0, 0, 0
    names = tuple(dict.fromkeys(name for ranks in log.ranks for rank in ranks for name in rank.strategy_names))
    most = sum(len(rank.spans) for ranks in log.ranks for rank in ranks)
    rounds = RecordedRounds(
        names, np.empty(most, np.int16), np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.float64)
    )
    for rank in (rank for ranks in log.ranks for rank in ranks):
        spans, timing = rank.spans, rank.timing
        stretch = (timing.last_token_seconds - timing.start_seconds) / max(float(spans.seconds.sum()), 1e-12)
        is_read = spans.strategy_index == PREFILL
        seconds = spans.seconds.astype(np.float64) * max(stretch, 1.0)
        read_seconds += float(seconds[is_read].sum())
        num_responses += len(rank.response_lengths)
        kept = ~is_read & (spans.num_live > 0)
        place = slice(at, at := at + int(np.count_nonzero(kept)))
        own = np.array([names.index(name) for name in rank.strategy_names], np.int16)
        rounds.strategy[place] = own[spans.strategy_index[kept]]
        rounds.live[place], rounds.tokens[place] = spans.num_live[kept], spans.num_tokens[kept]
        rounds.seconds[place] = seconds[kept]
    found = RecordedRounds(names, rounds.strategy[:at], rounds.live[:at], rounds.tokens[:at], rounds.seconds[:at])
    return found, read_seconds / max(num_responses, 1)


def costs_as_chosen(log: RecordedRun, most_live: int) -> TokenCosts:
    """Seconds a token by batch with the strategies that the run took there, trials included."""
    rounds, read_seconds = read_rounds(log)
    seconds, _ = curve(rounds, np.ones(len(rounds.live), bool), most_live, least=1)
    return TokenCosts(("as chosen",), seconds[None, :], np.zeros((1, most_live)), read_seconds)


def costs_by_strategy(log: RecordedRun, most_live: int) -> TokenCosts:
    """Seconds a token by strategy and batch; a strategy is allowed at batches where it ran often enough.

    Raises:
        ValueError: the run never decoded plainly, so there is nothing to compare others with.
    """
    rounds, read_seconds = read_rounds(log)
    names = [OFF.name, *sorted(set(rounds.ran) - {OFF.name})]
    token, allowed = [plain_seconds(log, rounds, most_live)], [np.ones(most_live, bool)]
    for name in names[1:]:
        chosen = rounds.are(name)
        shape = shape_of(rounds, name, most_live, log.profile)
        seconds, seen = curve(rounds, chosen, most_live, LEAST_ROUNDS, shape)
        token.append(seconds)
        allowed.append(seen)
    return TokenCosts(tuple(names), np.array(token), np.zeros((len(names), most_live)), read_seconds, np.array(allowed))


def plain_seconds(log: RecordedRun, rounds: RecordedRounds, most_live: int) -> Floats:
    """Seconds of a plain round at batches 1 to ``most_live``, also at those where the run never decoded plainly.

    The shape over batches (``shape_of``) times the median ratio of the run's plain rounds to it. Each power of two has
    its own median, shrunk towards that of all rounds, in which no power of two counts for more than ``MANY_ROUNDS``.

    Raises:
        ValueError: the run never decoded plainly.
    """
    is_plain = rounds.are(OFF.name)
    if not is_plain.any():
        raise ValueError(f"{log.name} has no plain round to compare speculation with; give a longer run")
    shape = shape_of(rounds, OFF.name, most_live, log.profile)
    ratio, bucket = rounds.seconds[is_plain] / shape[rounds.live[is_plain].astype(int) - 1], rounds.bucket[is_plain]
    count = np.bincount(bucket)
    whole = _median(ratio, np.minimum(1.0, MANY_ROUNDS / count[bucket]))
    factor, of_batch = np.full(most_live, whole), bucket_of(np.arange(1, most_live + 1))
    for each in np.unique(bucket):
        own = float(np.median(ratio[bucket == each]))
        factor[of_batch == each] = (count[each] * own + MANY_ROUNDS * whole) / (count[each] + MANY_ROUNDS)
    return factor * shape


def has_plain(rounds: RecordedRounds, most_live: int) -> NDArray[np.bool_]:
    """Batches 1 to ``most_live`` in whose power of two the run decoded plainly often enough."""
    count = np.bincount(rounds.bucket[rounds.are(OFF.name)], minlength=64)
    often: NDArray[np.bool_] = count[bucket_of(np.arange(1, most_live + 1))] >= MANY_ROUNDS
    return often


def shape_of(rounds: RecordedRounds, name: str, most_live: int, profile: CostProfile | None) -> Floats:
    """How a strategy's seconds a round depend on the batch, up to a factor.

    From the run's cost profile, or else a line through the medians of the strategy's own rounds.
    """
    strategy, batch = strategy_named(name), np.arange(1, most_live + 1)
    if profile is not None and profile.covers([strategy], 1):
        return np.array([round_seconds(profile, strategy, int(one)) for one in batch])
    at, values, weights = [], [], []
    of = rounds.are(name)
    for bucket in np.unique(rounds.bucket[of]):
        own = of & (rounds.bucket == bucket)
        at.append(float(np.median(rounds.live[own])))
        values.append(float(np.median(rounds.seconds[own])))
        weights.append(min(MANY_ROUNDS, int(np.count_nonzero(own))) / values[-1] ** 2)
    fixed, each = fit_line(np.array(at), np.array(values), np.array(weights))
    seconds: Floats = fixed + each * batch.astype(np.float64)
    return seconds


def fit_line(at: Floats, values: Floats, weights: Floats) -> tuple[float, float]:
    """A fixed part and a slope by weighted least squares, neither negative; a single point gives a slope of 0."""
    mean_at, mean = float(np.average(at, weights=weights)), float(np.average(values, weights=weights))
    spread = float(np.average((at - mean_at) ** 2, weights=weights))
    if not spread:
        return mean, 0.0
    each = max(0.0, float(np.average((at - mean_at) * (values - mean), weights=weights)) / spread)
    fixed = mean - each * mean_at
    if fixed < 0:
        return 0.0, float(np.average(at * values, weights=weights) / np.average(at * at, weights=weights))
    return fixed, each


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])


def curve(
    rounds: RecordedRounds, chosen: NDArray[np.bool_], most_live: int, least: int, shape: Floats | None = None
) -> tuple[Floats, NDArray[np.bool_]]:
    """Seconds a token at batches 1 to ``most_live``, and at which of them the powers of two were measured.

    Between and beyond these they follow ``shape`` [most_live]; without it they are linear in log2 of the batch, then
    constant.
    """
    batch = np.arange(1, most_live + 1)
    shape = np.ones(most_live) if shape is None else shape
    at, values, seen = [], [], np.zeros(most_live, bool)
    for bucket in np.unique(rounds.bucket[chosen]):
        of = chosen & (rounds.bucket == bucket)
        if np.count_nonzero(of) < least:
            continue
        steps_forward = rounds.tokens[of] / rounds.live[of]
        at.append(float(np.average(np.log2(rounds.live[of]), weights=steps_forward)))
        usual = steps_forward * shape[rounds.live[of].astype(int) - 1]
        values.append(float(rounds.seconds[of].sum() / usual.sum()))
        seen |= bucket_of(batch) == bucket
    if not at:
        return np.full(most_live, np.inf), seen
    between: Floats = np.interp(np.log2(batch), at, values) * shape
    return between, seen


def bucket_of(live: NDArray[Any]) -> NDArray[np.int64]:
    """The power of two that a batch is in."""
    bucket: NDArray[np.int64] = np.floor(np.log2(live)).astype(np.int64)
    return bucket


def chances_of(log: RecordedRun) -> dict[Source, float]:
    """Chances that a draft is accepted, given those before it, from the run's accept lengths, by kind of draft.

    A tree has the chance of a chain that gives as many tokens. A kind of which no round ran is left out.
    """
    rounds, _ = read_rounds(log)
    sums: dict[Source, list[float]] = {}
    for name in sorted(set(rounds.ran) - {OFF.name}):
        strategy, of = strategy_named(name), rounds.are(name)
        drafts, tokens = float(rounds.live[of].sum()), float(rounds.tokens[of].sum())
        both = sums.setdefault(strategy.source, [0.0, 0.0])
        both[0] += drafts * chance_of(tokens / drafts, strategy.reach)
        both[1] += drafts
    return {source: chance / drafts for source, (chance, drafts) in sums.items()}


def phases_of(log: RecordedRun) -> StepPhases:
    """The step's seconds beside the rollout, as a line over the tokens of a rank."""
    other, tokens = log.step_seconds - log.rollout_seconds, log.tokens / log.num_ranks
    spread = float(((tokens - tokens.mean()) ** 2).sum())
    slope = float(((tokens - tokens.mean()) * (other - other.mean())).sum()) / spread if spread else 0.0
    slope = float(np.clip(slope, 0.0, other.mean() / tokens.mean()))
    return StepPhases(slope, float(other.mean() - slope * tokens.mean()))


def setting_of(log: RecordedRun) -> Setting:
    """How the run rolled out; prompts are read at the measured seconds, each one token long."""
    config = log.config
    return Setting(
        max_live=config.rollout.max_live,
        prompt_tokens=1.0,
        min_idle=config.drafter.min_idle,
        micro_step_seconds=config.drafter.micro_step_seconds,
        trains=config.drafter.train and config.speculation.mode == "full",
        stop_seconds=float(log.stop_seconds.mean()),
    )


def lengths_of(log: RecordedRun) -> Logged:
    """The run's responses, by group if groups stayed together."""
    values = log.lengths[log.lengths > 0]
    group = log.config.rollout.group_size if log.config.rollout.shard == "group" else 1
    return Logged(values.reshape(-1, group))
