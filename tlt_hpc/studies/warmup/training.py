"""The updates of a warm-up: which documents each takes, dealt over the ranks, and what rate it learns at."""

from __future__ import annotations

import random
from itertools import islice

import torch

from tlt_hpc.drafting.offline import batches_of, deal, learning_rate, passes_of, with_noise
from tlt_hpc.drafting.packing import pack
from tlt_hpc.studies.warmup.parts import Parts
from tlt_hpc.studies.warmup.progress import Progress, share_done
from tlt_hpc.studies.warmup.shelf import Shelf


class Training:
    """The documents in the order of their updates, a pure function of the seed, and the drafter that learns them."""

    def __init__(self, parts: Parts, shelf: Shelf, first_update: int) -> None:
        self._parts, self._shelf, self._limits = parts, shelf, parts.config.warmup
        batches = batches_of(shelf.lengths, self._limits.batch_tokens, parts.config.run.seed)
        self._batches = islice(batches, first_update, None)

    def update(self, progress: Progress) -> tuple[float, int]:
        """One update of all ranks: its loss, and its response tokens; collective."""
        parts, limits = self._parts, self._limits
        batch = next(self._batches)
        own = deal(batch, self._shelf.lengths, parts.world.size)[parts.world.rank]
        passes = passes_of([self._shelf.read(index) for index in own], parts.config.drafter.micro_step_tokens)
        noise = self._noise_of(progress.updates)
        packed = (with_noise(pack(excerpts, parts.decoder.device), limits.noise, noise) for excerpts in passes)
        done = share_done(progress, limits)
        parts.trainer.learning_rate = learning_rate(limits.learning_rate, progress.updates, done, limits.ramp_updates)
        loss = parts.trainer.learn(packed, parts.world)
        return loss, sum(self._shelf.lengths[index] for index in batch)

    def _noise_of(self, update: int) -> torch.Generator:
        source = random.Random(f"noise/{self._parts.config.run.seed}/{update}/{self._parts.world.rank}")
        return torch.Generator().manual_seed(source.getrandbits(63))
