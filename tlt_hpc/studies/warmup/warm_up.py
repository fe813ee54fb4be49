"""Runs ``tlt warmup``: capture features, then update, validate, keep the best, until a budget or the patience ends.

Every rank runs it. What is saved with a validation is all that the next update needs, so a second start repeats what a
killed one had done since, to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic import TypeAdapter

from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.config import Config, UserError
from tlt_hpc.config.recipes import scheduled_rate
from tlt_hpc.drafting.offline import balanced_shards, iter_update_batches, pack_forward_passes, update_on_all_ranks
from tlt_hpc.drafting.pool import LEAST_LENGTH, pack_excerpts
from tlt_hpc.kernels.dispatch import deterministic_operations
from tlt_hpc.models.drafter_file import write_drafter
from tlt_hpc.models.piece import read_and_broadcast_each
from tlt_hpc.mpi.world import World
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.run.session import count_tokens, most_frequent_tokens
from tlt_hpc.storage.feature_file import Document, FeatureCacheReader
from tlt_hpc.storage.records import FACTS_FILE, CurvePoint, DrafterFacts, write_json
from tlt_hpc.studies.warmup.capture import capture_features_all_ranks
from tlt_hpc.studies.warmup.parts import Warmup, build_warmup
from tlt_hpc.studies.warmup.plan import VALIDATION
from tlt_hpc.studies.warmup.progress import Progress
from tlt_hpc.studies.warmup.texts import Texts

_ONLY_TRAINING = (".trained", ".exp_avg", ".exp_avg_sq")


class WarmupReporter(Protocol):
    """Shows a warm-up to its user; called on rank 0 alone."""

    def show_start(self, config: Config, texts: Texts, progress: Progress) -> None:
        """Show the start, or that it continues from ``progress``."""

    def show_capture(self, num_done: int, num_texts: int) -> None:
        """Show how many texts have their features."""

    def show_training(self, num_documents: int, num_tokens: int) -> None:
        """Show what is trained on, in documents and response tokens."""

    def show_update(self, progress: Progress) -> None:
        """Show the progress after an update."""

    def show_validation(self, point: CurvePoint, is_best: bool) -> None:
        """Show a point of the curve."""


@dataclass(frozen=True)
class WarmupResult:
    """The state of a warm-up when it ended; the same on every rank."""

    folder: Path
    progress: Progress
    was_finished: bool
    """It had finished before this start."""
    reason: str
    """Why it ended: a budget, no new best, or the signal that stopped it."""


def warm_up(config: Config, world: World, reporter: WarmupReporter) -> WarmupResult:
    """Warm up, or resume warming up, the drafter that ``config`` (from ``plan.warmup_config``) describes. Collective.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data, logs).
    """
    with closing(build_warmup(config, world)) as warmup:
        progress = load_and_broadcast_newest_state(warmup)
        was_finished, has_begun = progress.is_finished, bool(progress.updates or progress.curve)
        if world.rank == 0 and not was_finished:
            reporter.show_start(config, warmup.texts, progress)
        # once training was saved it resumes on the features that it began with
        if not was_finished and (has_begun or capture_features_all_ranks(warmup, reporter.show_capture)):
            progress = train(warmup, progress, reporter)
    reason = progress.end_reason(config.warmup) if progress.is_finished else world.gather_first_stop_reason()
    return WarmupResult(warmup.path, progress, was_finished, reason)


class CapturedDocuments:
    """All captured documents with a response that can be learned from, numbered; the same on every rank.

    Raises:
        UserError: there is none.
        DamagedFile: a file is truncated or corrupted; its text has the remedy.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Open the files of all parts, in the order that numbers the documents."""
        self._readers = [FeatureCacheReader(path) for path in files]
        lengths = ((reader, index, n) for reader in self._readers for index, n in enumerate(reader.lengths.tolist()))
        self._places = [place for place in lengths if place[2] >= LEAST_LENGTH]
        self.lengths: list[int] = [length for _, _, length in self._places]
        """Response lengths."""
        if not self.lengths:
            self.close()
            raise UserError(
                "no response of two tokens or more to train on; raise warmup.responses or drafter.cache_bytes"
            )

    def read(self, index: int) -> Document:
        """Read one document.

        Raises:
            DamagedFile: its bytes do not match their checksum.
        """
        reader, place, _ = self._places[index]
        return reader.read(place)

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()


def train(warmup: Warmup, progress: Progress, reporter: WarmupReporter) -> Progress:
    """Update and validate until it is over, or a stop vote comes; return the progress, which is saved. Collective."""
    limits = warmup.config.warmup
    files = warmup.world.run_first_and_broadcast(
        lambda: sorted(warmup.features_folder.glob("part-*/cache/step-*/rank-*.h5"))
    )
    with closing(CapturedDocuments(files)) as captured:
        if warmup.world.rank == 0:
            reporter.show_training(len(captured.lengths), sum(captured.lengths))
        if progress.documents not in (0, len(captured.lengths)):
            raise UserError(
                f"{warmup.features_folder} has {len(captured.lengths)} of the {progress.documents} responses the "
                f"training began with; delete {warmup.path / 'training'} to train again on those that are left"
            )
        progress = replace(progress, documents=len(captured.lengths))
        if progress.updates == 0:
            choose_vocabulary(warmup, captured)
        batches = islice(
            iter_update_batches(captured.lengths, limits.batch_tokens, warmup.config.run.seed), progress.updates, None
        )
        engine = make_validation_engine(warmup)
        stopped = False
        while not progress.is_finished and not stopped:
            is_validation = progress.validation_is_due(limits, warmup.trainer.trained.has_learned)
            if is_validation:
                progress, stopped = validate(warmup, engine, captured, progress, reporter)
            else:
                progress, stopped = take_update(warmup, captured, next(batches), progress)
                if warmup.world.rank == 0:
                    reporter.show_update(progress)
            if is_validation or stopped:
                save(warmup, progress)
    return progress


def choose_vocabulary(warmup: Warmup, captured: CapturedDocuments) -> None:
    """Give a new EAGLE-3 drafter the tokens that responses are made of as its vocabulary. Collective."""
    ids, world = warmup.trainer.trained.drafter.token_ids, warmup.world
    if ids is None or warmup.trainer.trained.has_learned:
        return
    documents = map(captured.read, range(world.rank, len(captured.lengths), world.size))
    settings = warmup.engine_settings()
    counts = world.sum_over_ranks(count_tokens((d.tokens[d.prompt_length :] for d in documents), settings.num_tokens))
    warmup.trainer.trained.set_draft_vocabulary(most_frequent_tokens(counts, len(ids), settings.eos_token_ids))


@BEAT.in_phase(Phase.UPDATE)
@deterministic_operations()
def take_update(
    warmup: Warmup, captured: CapturedDocuments, batch: Sequence[int], progress: Progress
) -> tuple[Progress, bool]:
    """Take one update on a batch of documents, numbered as in ``captured``. Collective.

    Returns the progress, by rank 0's clock, and whether a rank votes to stop.
    """
    world, trainer, start = warmup.world, warmup.trainer, time.perf_counter()
    settings, limits = warmup.config.drafter, warmup.config.warmup
    own = balanced_shards(batch, captured.lengths, world.size)[world.rank]
    passes = pack_forward_passes([captured.read(index) for index in own], settings.micro_step_tokens)
    done = progress.share_done(limits)
    rise = limits.ramp_updates + 1
    trainer.trained.learning_rate = scheduled_rate(settings.learning_rate, progress.updates, rise, done, "cosine")
    loss = update_on_all_ranks(trainer, (pack_excerpts(excerpts, warmup.decoder.device) for excerpts in passes), world)
    seconds = world.broadcast(time.perf_counter() - start)
    progress = progress.after_update(loss, sum(captured.lengths[index] for index in batch), seconds)
    return progress, bool(world.agree_to_stop())


def make_validation_engine(warmup: Warmup) -> RolloutEngine:
    """Return a calibrated engine with the validation strategy alone, and the rollout's sampling. Collective.

    It has no tie guard: a single exchanged token does not change an accept length.
    """
    settings, requests = warmup.engine_settings(), warmup.texts.validation_requests(warmup.config.run.seed)
    max_tokens = min(warmup.config.warmup.validation_tokens, settings.params.max_tokens)
    settings = replace(
        settings,
        params=replace(settings.params, max_tokens=max_tokens),
        tie_guard=False,
        strategies=(VALIDATION,),
        max_live=min(settings.max_live, -(-len(requests) // warmup.replica.count)),
        max_prompt_tokens=max(len(request.prompt_tokens) for request in requests),
    )
    engine = warmup.make_engine(settings, warmup.engine_drafter)
    warmup.calibrate_with_own_keys(engine, requests[:1])
    return engine


@BEAT.in_phase(Phase.EVALUATION)
def validate(
    warmup: Warmup, engine: RolloutEngine, captured: CapturedDocuments, progress: Progress, reporter: WarmupReporter
) -> tuple[Progress, bool]:
    """Measure one point of the curve, and write the drafter if it is the best. Collective.

    Returns the progress, and whether a rank votes to stop, which leaves it as it was.
    """
    world, start = warmup.world, time.perf_counter()
    digests = set(world.allgather(warmup.trainer.trained.fingerprint()))
    assert len(digests) == 1, f"the ranks' drafters differ: {digests}"
    engine.load_drafter(warmup.trainer.trained.drafter.state_dict(), trained=True)
    engine.take_counts()
    requests = warmup.texts.validation_requests(warmup.config.run.seed)
    roster = warmup.generate(engine, requests[warmup.replica.number :: warmup.replica.count])
    engine.abort()
    engine.take_finished_rollouts()
    counts = engine.take_counts()
    if roster.has_stop_vote:
        return progress, bool(world.agree_to_stop())
    # tokens per target pass and sequence; a replica's ranks count the same, each of them
    tokens, passes = world.sum_over_ranks(np.array([counts.num_tokens, counts.num_row_passes], np.int64))
    accept_length = float(tokens / passes)
    progress = progress.after_validation(accept_length, world.broadcast(time.perf_counter() - start))
    is_best = progress.best == progress.curve[-1]

    def keep() -> None:
        if is_best:
            write_best_drafter(warmup)
        write_drafter_facts(warmup, captured, progress)

    world.run_first_and_broadcast(keep)
    if world.rank == 0:
        reporter.show_validation(progress.curve[-1], is_best)
    return replace(progress, is_finished=bool(progress.end_reason(warmup.config.warmup))), False


def write_best_drafter(warmup: Warmup) -> None:
    """Write the drafter, without what only training needs, where ``drafter.init`` finds it.

    Raises:
        WriteError: the disk refused; the one before stays.
    """
    state = {
        name: tensor
        for name, tensor in warmup.trainer.trained.host_state_copy().items()
        if not name.endswith(_ONLY_TRAINING)
    }
    write_drafter(warmup.path / "drafter", state)


def write_drafter_facts(warmup: Warmup, captured: CapturedDocuments, progress: Progress) -> None:
    """Write the facts of the kept drafter.

    Raises:
        WriteError: the disk refused.
    """
    config, best = warmup.config, progress.best
    assert best is not None, "validated once"
    facts = DrafterFacts(
        target=config.model.path,
        data=", ".join(config.warmup.sources) or config.data.source_name,
        num_responses=len(captured.lengths),
        num_tokens=sum(captured.lengths),
        num_updates=best.updates,
        accept_length=best.accept_length,
        strategy=VALIDATION.name,
        temperature=config.rollout.temperature,
        num_validation_prompts=len(warmup.texts.held_out),
        curve=progress.curve,
    )
    write_json(warmup.path / "drafter" / FACTS_FILE, asdict(facts))


def save(warmup: Warmup, progress: Progress) -> None:
    """Save the state that the next update needs. Collective.

    Raises:
        CheckpointError: on all ranks, where one could not write.
    """
    shards = {"drafter": warmup.trainer.trained.host_state_copy()} if warmup.world.rank == 0 else {}
    # a save under a number that is taken is left out, and a validation changes the state too
    number = progress.updates + len(progress.curve)
    warmup.saves.save(number, warmup.world, shards, {"progress": asdict(progress)})


def load_and_broadcast_newest_state(warmup: Warmup) -> Progress:
    """Load the newest save, if there is one, and return its progress. Collective.

    Raises:
        CheckpointError: there are saves, and none is good.
    """
    saved = warmup.world.run_first_and_broadcast(warmup.saves.open_newest)
    if saved is None:
        return Progress()
    node, names = warmup.world.node_group, saved.tensor_names("drafter")
    with saved.open_tensor_reader("drafter") as read:
        warmup.trainer.trained.load_state(dict(read_and_broadcast_each(node, names, read)))
    return TypeAdapter(Progress).validate_python(saved.state["progress"])
