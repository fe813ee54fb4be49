"""``tlt bench rollout``: tokens per second of a job's rollouts, plain, with each strategy alone and with all of them.

All ways answer the same prompts on all ranks. They are interleaved, and a figure is the median of its repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np

from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.common.records import Request, SampleKey, Stream
from tlt_hpc.config import Config
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import serving_drafter
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import read_assets_once
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, Strategy, strategies_of
from tlt_hpc.session import (
    Session,
    load_folder,
    open_session,
    read_initial_drafter,
)
from tlt_hpc.studies.compare import num_mismatched

PLAIN, ADAPTIVE = "plain", "adaptive"
_FIRST_STEP, _WARM_UP_STEP = 2_000_000, 3_000_000
"""First steps of the draws, after those of any run: an engine learns on other prompts than it is measured on."""
_MIN_SEQUENCES, _SEQUENCES_PER_ROW = 16, 4
"""Sequences of a replica: so many that the end of the rollout, with few left, does not decide the rate."""
_COLUMNS = ("sequences at a time", "way", "tokens/s", "plain = 1", "accept length", "tokens that differ")


@dataclass
class WayFigures:
    """What one way of decoding gave at one batch size, by repetition; sums over ranks."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    """Tokens of one repetition; the same in all, unless texts differ."""
    passes: int = 0
    """Target passes by sequence."""
    mismatched_tokens: int = 0
    """Compared with the first plain repetition, over all of them."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    @property
    def accept_length(self) -> float:
        return self.tokens / self.passes


Ways = dict[str, tuple[Strategy, ...]]
"""Way to decode -> the strategies that it chooses from."""


def bench_rollout(
    config: Config, world: World, batches: Sequence[int], num_sequences: int | None, repeats: int
) -> dict[str, Any] | None:
    """Measure a job's rollouts; collective. Returns the figures as JSON; None if a stop was requested.

    Args:
        batches: sequences that each replica decodes at a time.
        num_sequences: of each replica's rollouts; None: four for each of a batch, 16 at least.
    """
    assets = read_assets_once(config, world.size, world.node_group)
    with closing(open_session(config, world, assets)) as session, BEAT.within(Phase.ROLLOUT):
        load_folder(session)
        weights = None
        if config.speculation.mode == "full":
            weights = read_initial_drafter(config, session.decoder.shape, world.node_group)
        drafter = None if weights is None else serving_drafter(weights, session.decoder)
        strategies = strategies_of(config.speculation.mode, config.speculation.strategies)
        if drafter is None:
            strategies = tuple(strategy for strategy in strategies if not strategy.has_drafter)
        ways: Ways = {PLAIN: (OFF,), **{s.name: (s,) for s in strategies if s != OFF}}
        if len(strategies) > 1:
            ways[ADAPTIVE] = strategies
        tree: dict[str, Any] = {}
        for batch in batches:
            world.say(f"{batch} sequences at a time")
            size = num_sequences or max(_MIN_SEQUENCES, _SEQUENCES_PER_ROW * batch)
            found = _measure(session, assets.prompts, drafter, ways, batch, size, repeats)
            if found is None:
                return None
            tree[str(batch)] = _tree(found)
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "num_ranks": world.size,
        "repeats": repeats,
        "batch": tree,
    }


def _measure(
    session: Session,
    prompts: PromptSource,
    drafter: Drafter | None,
    ways: Ways,
    batch: int,
    size: int,
    repeats: int,
) -> dict[str, WayFigures] | None:
    """All ways at one batch size; None if a stop was requested. Collective."""
    requests = requests_of(session, prompts, _FIRST_STEP, size)
    others = requests_of(session, prompts, _WARM_UP_STEP, size)
    figures = {way: WayFigures() for way in ways}
    reference: dict[SampleKey, np.ndarray] = {}
    for _ in range(repeats):
        for way, strategies in ways.items():
            settings = replace(session.settings(), max_live=batch, strategies=strategies)
            own_drafter = drafter if any(strategy.has_drafter for strategy in strategies) else None
            texts = _roll_out(session, settings, own_drafter, others, requests, figures[way])
            if texts is None:
                return None
            reference = reference or texts
            own = session.replica.index == 0  # a replica's ranks all have the same texts
            mismatched = session.world.sum(np.array([own * num_mismatched(reference, texts)], np.int64))
            figures[way].mismatched_tokens += int(mismatched[0])
    return figures


def _roll_out(
    session: Session,
    settings: EngineSettings,
    drafter: Drafter | None,
    others: list[Request],
    requests: list[Request],
    figures: WayFigures,
) -> dict[SampleKey, np.ndarray] | None:
    """One repetition by a new engine that has answered ``others``; this rank's texts, or None after a stop request."""
    engine = session.make_engine(settings, drafter)
    engine.drafter_ready = drafter is not None
    session.calibrate(engine, others)
    if session.generate(engine, others).stopping:
        return None
    engine.collect(), engine.take_counts()
    session.world.barrier()
    start = time.perf_counter()
    if session.generate(engine, requests).stopping:
        return None
    figures.seconds.append(time.perf_counter() - start)
    counts, own = engine.take_counts(), session.replica.index == 0
    sums = session.world.sum(own * np.array([counts.num_tokens, counts.num_row_passes], np.int64))
    figures.tokens, figures.passes = map(int, sums)
    return {rollout.key: rollout.response_tokens for rollout in engine.collect()}


def requests_of(session: Session, prompts: PromptSource, first_step: int, size: int) -> list[Request]:
    """This replica's requests, one for each prompt drawn from ``first_step`` on; collective over the node."""
    replica, seed = session.replica, session.config.run.seed
    draws = chain.from_iterable(prompts.batch(step) for step in count(first_step))
    drawn = enumerate(islice(draws, size * replica.count))
    return [
        Request(SampleKey(seed, Stream.EVALUATION, first_step, number, 0), prompt.tokens)
        for number, prompt in drawn
        if replica.takes(number)
    ]


def _tree(figures: dict[str, WayFigures]) -> dict[str, Any]:
    plain = figures[PLAIN].tokens_per_second
    return {
        way: {
            **asdict(found),
            "tokens_per_second": found.tokens_per_second,
            "accept_length": found.accept_length,
            "speedup": found.tokens_per_second / plain,
        }
        for way, found in figures.items()
    }


def table(tree: dict[str, Any]) -> str:
    """The figures as text."""
    rows = [
        (batch, way, f"{found['tokens_per_second']:,.0f}", f"{found['speedup']:.2f}",
         f"{found['accept_length']:.2f}", f"{found['mismatched_tokens']:,}")
        for batch, ways in tree["batch"].items() for way, found in ways.items()
    ]  # fmt: skip
    return "\n".join("  ".join(f"{cell:>19}" for cell in row) for row in (_COLUMNS, *rows))
