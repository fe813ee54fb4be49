"""Runs ``tlt warmup``: capture features, then update, validate, keep the best, until a budget or the patience ends.

Every rank runs it. What is saved with a validation is all that the next update needs, so a second start repeats what a
killed one had done since, to the same bits.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.config import Config
from tlt_hpc.drafting.vocabulary import count_tokens, most_frequent_tokens
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.records import CurvePoint
from tlt_hpc.studies.warmup.capture import CaptureReporter, capture, fix_parts, parts_of
from tlt_hpc.studies.warmup.parts import Warmup, assemble
from tlt_hpc.studies.warmup.progress import Progress, end_reason, is_over, validation_is_due
from tlt_hpc.studies.warmup.shelf import Shelf
from tlt_hpc.studies.warmup.texts import Texts
from tlt_hpc.studies.warmup.training import Training, Validation, keep_drafter, keep_facts, resume, save


class WarmupReporter(CaptureReporter, Protocol):
    """Whoever shows a warm-up to its user; called on rank 0 alone."""

    def started(self, config: Config, texts: Texts, progress: Progress) -> None: ...

    def training(self, num_documents: int, num_tokens: int) -> None: ...

    def learned(self, progress: Progress, loss: float) -> None: ...

    def validating(self) -> None: ...

    def validated(self, point: CurvePoint, is_best: bool) -> None: ...


@dataclass(frozen=True)
class WarmupResult:
    """Where a warm-up stood when it ended; the same on every rank."""

    folder: Path
    progress: Progress
    was_finished: bool
    """It had finished before this start."""
    reason: str
    """Why it ended: a budget, no new best, or the signal that stopped it."""

    @property
    def finished(self) -> bool:
        return self.progress.is_finished


def warm_up(config: Config, world: World, reporter: WarmupReporter) -> WarmupResult:
    """Warm up, or resume warming up, the drafter that ``config`` (from ``plan.config_of``) describes; collective.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data, logs).
    """
    with closing(assemble(config, world)) as warmup:
        progress = resume(warmup)
        was_finished = progress.is_finished
        if world.rank == 0 and not was_finished:
            reporter.started(config, warmup.texts, progress)
        if not was_finished and capture(warmup, reporter):
            progress = train(warmup, progress, reporter)
    reason = end_reason(progress, config.warmup) if progress.is_finished else world.first_stop_reason()
    return WarmupResult(warmup.path, progress, was_finished, reason)


def train(warmup: Warmup, progress: Progress, reporter: WarmupReporter) -> Progress:
    """Update and validate until it is over, or a stop vote comes; collective. What it returns has been saved."""
    all_parts, _ = parts_of(warmup)
    made = warmup.world.once(lambda: [part for part in all_parts if part.file.exists()])
    with Shelf([part.file for part in made]) as shelf:
        if warmup.world.rank == 0:
            fix_parts(warmup, made)
            reporter.training(len(shelf), sum(shelf.lengths))
        if progress.updates == 0:
            choose_vocabulary(warmup, shelf)
        training, validation = Training(warmup, shelf, progress.updates), Validation(warmup)
        while not progress.is_finished:
            if validation_is_due(progress, warmup.config.warmup, warmup.trainer.is_trained):
                progress, stopped = validate(warmup, validation, shelf, progress, reporter)
                is_saved = True
            else:
                progress, stopped = take_update(warmup, training, progress, reporter)
                is_saved = stopped
            if is_saved:
                save(warmup, progress)
            if stopped:
                break
    return progress


def choose_vocabulary(warmup: Warmup, shelf: Shelf) -> None:
    """Give a new drafter with a vocabulary of its own the tokens that responses are made of; collective."""
    ids = warmup.trainer.drafter.token_ids
    if ids is None or warmup.trainer.is_trained:
        return
    responses = (d.tokens[d.prompt_length :] for d in shelf.share(warmup.world.rank, warmup.world.size))
    settings = warmup.settings()
    counts = warmup.world.sum(count_tokens(responses, settings.num_tokens))
    warmup.trainer.draft_among(most_frequent_tokens(counts, len(ids), settings.eos_token_ids))


@BEAT.within(Phase.UPDATE)
def take_update(
    warmup: Warmup, training: Training, progress: Progress, reporter: WarmupReporter
) -> tuple[Progress, bool]:
    """One update, and whether a rank votes to stop; the clock is rank 0's."""
    world, start = warmup.world, time.perf_counter()
    loss, num_tokens = training.update(progress)
    elapsed = time.perf_counter() - start
    vote = np.array([float(world.stop_requested), elapsed if world.rank == 0 else 0.0])
    stops, seconds = world.sum(vote).tolist()
    progress = progress.learned(loss, num_tokens, seconds)
    if world.rank == 0:
        reporter.learned(progress, loss)
    return progress, bool(stops) and bool(world.agree_to_stop())


@BEAT.within(Phase.EVALUATION)
def validate(
    warmup: Warmup, validation: Validation, shelf: Shelf, progress: Progress, reporter: WarmupReporter
) -> tuple[Progress, bool]:
    """One point of the curve, and the drafter kept where it is the best; whether a rank votes to stop instead."""
    world, start = warmup.world, time.perf_counter()
    if world.rank == 0:
        reporter.validating()
    digests = set(world.allgather(warmup.trainer.sha256()))
    assert len(digests) == 1, f"the ranks' drafters differ: {digests}"
    accept_length = validation.accept_length()
    if accept_length is None:
        return progress, bool(world.agree_to_stop())
    progress = progress.validated(accept_length, world.broadcast(time.perf_counter() - start))
    if world.rank == 0:
        is_best = progress.best == progress.curve[-1]
        if is_best:
            keep_drafter(warmup)
        keep_facts(warmup, shelf, progress)
        reporter.validated(progress.curve[-1], is_best)
    return replace(progress, is_finished=is_over(progress, warmup.config.warmup)), False
