"""Costs and phases fitted to a run's own log. Knows no published figure.

A round's seconds are what the rank took from its start to its last token, shared out over its rounds as they were
measured, so that what lies between rounds is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.records import PREFILL
from tlt_hpc.simulate.costs import Costs
from tlt_hpc.simulate.lengths import Logged
from tlt_hpc.simulate.run_log import RunLog
from tlt_hpc.simulate.step import Phases, Setting

Floats = NDArray[np.float64]
OFF = "off"
_LEAST_ROUNDS = 4
"""Rounds of a strategy in a power of two of batches, from which its seconds there are believed."""


@dataclass(frozen=True)
class Rounds:
    """All decoding rounds of a log, [K] each."""

    strategy: NDArray[np.str_]
    live: Floats
    tokens: Floats
    seconds: Floats

    @property
    def bucket(self) -> NDArray[np.int64]:
        return np.floor(np.log2(self.live)).astype(np.int64)


def read_rounds(log: RunLog) -> tuple[Rounds, float]:
    """The rounds, and the seconds of reading one response's prompt."""
    parts: list[tuple[Floats, ...]] = []
    names: list[NDArray[np.str_]] = []
    read_seconds, num_responses = 0.0, 0
    for rank in (rank for ranks in log.ranks for rank in ranks):
        spans, timing = rank.spans, rank.summary.timing
        stretch = (timing.last_token_seconds - timing.start_seconds) / max(float(spans.seconds.sum()), 1e-12)
        is_read = spans.strategy_index == PREFILL
        seconds = spans.seconds.astype(np.float64) * max(stretch, 1.0)
        read_seconds += float(seconds[is_read].sum())
        num_responses += len(rank.summary.response_lengths)
        kept = ~is_read & (spans.num_live > 0)
        names.append(np.array(rank.summary.strategy_names)[spans.strategy_index[kept]])
        parts.append((spans.num_live[kept].astype(float), spans.num_tokens[kept].astype(float), seconds[kept]))
    live, tokens, seconds = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Rounds(np.concatenate(names), live, tokens, seconds), read_seconds / max(num_responses, 1)


def costs_as_chosen(log: RunLog, most_live: int) -> Costs:
    """Seconds a token by batch, whatever strategies the run took there, its trials among them."""
    rounds, read_seconds = read_rounds(log)
    seconds, _ = curve(rounds, np.ones(len(rounds.live), bool), most_live, least=1)
    return Costs(("as chosen",), seconds[None, :], np.zeros((1, most_live)), read_seconds)


def costs_by_strategy(log: RunLog, most_live: int) -> Costs:
    """Seconds a token by strategy and batch; a strategy is allowed at batches where it was seen often enough.

    Raises:
        ValueError: the run never decoded plainly, so there is nothing to hold others against.
    """
    rounds, read_seconds = read_rounds(log)
    names = [OFF, *sorted(set(rounds.strategy.tolist()) - {OFF})]
    if OFF not in rounds.strategy:
        raise ValueError(f"{log.name} has no plain round to hold speculation against; give a longer run")
    curves = [curve(rounds, rounds.strategy == name, most_live, 1 if name == OFF else _LEAST_ROUNDS) for name in names]
    token = np.array([seconds for seconds, _ in curves])
    return Costs(
        tuple(names), token, np.zeros_like(token), read_seconds, allowed=np.array([seen for _, seen in curves])
    )


def curve(rounds: Rounds, chosen: NDArray[np.bool_], most_live: int, least: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Seconds a token at batches 1 to ``most_live``, and where they rest on measurements: sums by powers of two."""
    batch = np.arange(1, most_live + 1)
    at, values, seen = [], [], np.zeros(most_live, bool)
    for bucket in np.unique(rounds.bucket[chosen]):
        of = chosen & (rounds.bucket == bucket)
        if np.count_nonzero(of) < least:
            continue
        steps_forward = rounds.tokens[of] / rounds.live[of]
        at.append(float(np.average(np.log2(rounds.live[of]), weights=steps_forward)))
        values.append(float(rounds.seconds[of].sum() / steps_forward.sum()))
        seen |= np.floor(np.log2(batch)) == bucket
    if not at:
        return np.full(most_live, np.inf), seen
    between: Floats = np.interp(np.log2(batch), at, values)
    return between, seen


def phases_of(log: RunLog) -> Phases:
    """The step's seconds beside the rollout, as a line over the tokens of a rank."""
    other, tokens = log.step_seconds - log.rollout_seconds, log.tokens / log.num_ranks
    spread = float(((tokens - tokens.mean()) ** 2).sum())
    slope = float(((tokens - tokens.mean()) * (other - other.mean())).sum()) / spread if spread else 0.0
    slope = float(np.clip(slope, 0.0, other.mean() / tokens.mean()))
    return Phases(slope, float(other.mean() - slope * tokens.mean()))


def setting_of(log: RunLog) -> Setting:
    """How the run rolled out; prompts are read at the measured seconds, each one token long."""
    config = log.config
    return Setting(
        max_live=config.rollout.max_live,
        prompt_tokens=1.0,
        min_idle=config.drafter.min_idle,
        micro_step_seconds=config.drafter.micro_step_seconds,
        trains=config.drafter.train and config.drafter.place == "tail" and config.speculation.mode == "full",
        stop_seconds=float(log.stop_seconds.mean()),
    )


def lengths_of(log: RunLog) -> Logged:
    """The run's responses, by group where groups stayed together."""
    values = log.lengths[log.lengths > 0]
    group = log.config.rollout.group_size if log.config.rollout.shard == "group" else 1
    return Logged(values.reshape(-1, group))
