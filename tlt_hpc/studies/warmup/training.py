"""Second phase of a warm-up: its updates, the validation of the drafter, and what of both is saved."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from safetensors.torch import save_file

from tlt_hpc.common.records import Request
from tlt_hpc.drafting.offline import batches_of, deal, learning_rate, passes_of, with_noise
from tlt_hpc.drafting.packing import pack
from tlt_hpc.models.drafter_file import DRAFTER_FILE
from tlt_hpc.models.once import read_once
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.storage.records import FACTS_FILE, DrafterFacts, write_record
from tlt_hpc.studies.warmup.parts import Warmup
from tlt_hpc.studies.warmup.plan import VALIDATION, validation_tokens
from tlt_hpc.studies.warmup.progress import Progress, from_json, share_done, to_json
from tlt_hpc.studies.warmup.shelf import Shelf

_TRAINING = (".trained", ".exp_avg", ".exp_avg_sq")


class Training:
    """The documents in the order of their updates, a pure function of the seed, and the drafter that learns them."""

    def __init__(self, warmup: Warmup, shelf: Shelf, first_update: int) -> None:
        self._warmup, self._shelf, self._limits = warmup, shelf, warmup.config.warmup
        batches = batches_of(shelf.lengths, self._limits.batch_tokens, warmup.config.run.seed)
        self._batches = islice(batches, first_update, None)

    def update(self, progress: Progress) -> tuple[float, int]:
        """One update of all ranks: its loss, and its response tokens; collective."""
        warmup, limits = self._warmup, self._limits
        batch = next(self._batches)
        own = deal(batch, self._shelf.lengths, warmup.world.size)[warmup.world.rank]
        passes = passes_of([self._shelf.read(index) for index in own], warmup.config.drafter.micro_step_tokens)
        noise = self._noise_of(progress.updates)
        packed = (with_noise(pack(excerpts, warmup.decoder.device), limits.noise, noise) for excerpts in passes)
        done = share_done(progress, limits)
        warmup.trainer.learning_rate = learning_rate(limits.learning_rate, progress.updates, done, limits.ramp_updates)
        loss = warmup.trainer.learn(packed, warmup.world)
        return loss, sum(self._shelf.lengths[index] for index in batch)

    def _noise_of(self, update: int) -> torch.Generator:
        source = random.Random(f"noise/{self._warmup.config.run.seed}/{update}/{self._warmup.world.rank}")
        return torch.Generator().manual_seed(source.getrandbits(63))


class Validation:
    """An engine with the validation strategy alone; each replica answers its share of the held-out prompts."""

    def __init__(self, warmup: Warmup) -> None:
        self._warmup = warmup
        requests = warmup.texts.validation_requests(warmup.config.run.seed)
        self._requests: list[Request] = requests[warmup.replica.number :: warmup.replica.count]
        self._engine = warmup.make_engine(validation_settings(warmup, requests), warmup.served)
        self._engine.calibrate(requests[:1])

    def accept_length(self) -> float | None:
        """Tokens per target pass and sequence with the drafter as it is now, over all ranks; collective.

        None if a rank was asked to stop before all had finished.
        """
        self._engine.load_drafter(self._warmup.trainer.drafter.state_dict(), trained=True)
        self._engine.take_counts()
        roster = self._warmup.generate(self._engine, self._requests)
        self._engine.abort()
        self._engine.collect()
        counts = self._engine.take_counts()
        # a replica's ranks count the same, each of them
        tokens, passes = self._warmup.world.sum(np.array([counts.num_tokens, counts.num_row_passes], np.int64))
        return None if roster.stopping else float(tokens / passes)


def validation_settings(warmup: Warmup, requests: list[Request]) -> EngineSettings:
    """The rollout's sampling. No tie guard: the text is not at stake, and accept lengths do not see one token."""
    settings = warmup.settings()
    params = replace(settings.params, max_tokens=validation_tokens(warmup.config))
    return replace(
        settings,
        params=replace(params, min_tokens=min(params.min_tokens, params.max_tokens)),
        tie_guard=False,
        strategies=(VALIDATION,),
        max_live=min(settings.max_live, -(-len(requests) // warmup.replica.count)),
        max_prompt_tokens=max(len(request.prompt_tokens) for request in requests),
    )


def keep_drafter(warmup: Warmup) -> None:
    """Write the drafter, without what only training needs, where ``drafter.init`` finds it.

    Raises:
        WriteError: the disk refused; the one before stays.
    """
    state = {name: tensor for name, tensor in warmup.trainer.state().items() if not name.endswith(_TRAINING)}
    with writing_beside(warmup.drafter / DRAFTER_FILE) as path:
        save_file(state, path)


def keep_facts(warmup: Warmup, shelf: Shelf, progress: Progress) -> None:
    """Write what is on record of the kept drafter.

    Raises:
        WriteError: the disk refused.
    """
    config, best = warmup.config, progress.best
    assert best is not None, "validated once"
    facts = DrafterFacts(
        target=config.model.path,
        data=", ".join(config.warmup.sources) or config.data.source_name,
        init=config.warmup.init,
        num_responses=len(shelf),
        num_tokens=sum(shelf.lengths),
        num_updates=best.updates,
        learning_rate=config.warmup.learning_rate,
        batch_tokens=config.warmup.batch_tokens,
        accept_length=best.accept_length,
        strategy=VALIDATION.name,
        temperature=config.rollout.temperature,
        num_validation_prompts=len(warmup.texts.held_out),
        num_ranks=warmup.world.size,
        curve=progress.curve,
    )
    write_record(warmup.drafter / FACTS_FILE, facts)


def save(warmup: Warmup, progress: Progress) -> None:
    """Save what the next update needs; collective.

    Raises:
        CheckpointError: on all ranks, where one could not write.
    """
    shards = {"drafter": warmup.trainer.state()} if warmup.world.rank == 0 else {}
    # a save under a number that is taken is left out, and a validation changes the state too
    number = progress.updates + len(progress.curve)
    warmup.saves.save(number, warmup.world, shards, {"progress": to_json(progress)})


def resume(warmup: Warmup) -> Progress:
    """Take up the newest save, where there is one; collective.

    Raises:
        CheckpointError: there are saves, and none is good.
    """
    saved = warmup.world.once(warmup.saves.newest)
    if saved is None:
        return Progress()
    node, names = warmup.world.node_group, saved.names("drafter")
    warmup.trainer.load_state({name: read_once(node, partial(saved.read, "drafter", name)) for name in names})
    return from_json(saved.state["progress"])
