"""The spot trainer: short drafter updates in the tail of a rollout, until the last rank has finished.

Knows the pool of documents and the policy's embedding and head; not when to train (the roster says), how the drafters
of all ranks are merged (``merge``), nor what is saved of one (``state``).
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.records import MicroStepRecord
from tlt_hpc.config import DrafterSection
from tlt_hpc.drafting.loss import LossSettings, allowing_tf32, drafter_loss
from tlt_hpc.drafting.merge import Merge, MergeReport, SumOverRanks, sums_on_gpus
from tlt_hpc.drafting.pool import PackedBatch, TrainingPool, pack_excerpts
from tlt_hpc.drafting.state import TrainedDrafter
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import AS_TARGET, DraftLayer
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.eagle import Eagle3
from tlt_hpc.storage.feature_cache import FeatureCache

logger = logging.getLogger(__name__)

AVERAGE_MERGES = 5
"""The engine drafts with a running average of the drafter's weights over about this many merges, which tolerates a
learning rate that is too high."""
_LEAST_TOKENS = 256
"""Size of a micro-step that no time budget makes smaller, and of the first, before any was timed."""
_RATES = 6
"""Micro-steps whose slowest rate sizes the next: one quick one says little on a machine that others use too."""
_CHEAP_UPDATE = 0.25
"""Share of the time budget under which an update is carried out although the rollout is over: the gradient is there."""


class SpotTrainer:
    """Trains this rank's drafter from the feature cache whenever the rank is idle."""

    def __init__(
        self,
        decoder: Decoder,
        cache: FeatureCache,
        settings: DrafterSection,
        seed: int,
        rank: int,
        token_ids: Tensor | None = None,
        own: DraftLayer = AS_TARGET,
        average_merges: int = AVERAGE_MERGES,
    ) -> None:
        """Make an untrained drafter.

        Args:
            token_ids: [W], the vocabulary of an EAGLE-3 drafter; without it the drafter is of EAGLE's form.
            average_merges: 1 where nothing is merged.
        """
        drafter = make_drafter(decoder.shape, seed, torch.float32, decoder.device, token_ids, own)
        self.trained = TrainedDrafter(drafter, settings.learning_rate, average_merges)
        self._decoder, self._cache, self._settings = decoder, cache, settings
        self._seed, self._rank = seed, rank
        self._loss = LossSettings(num_steps=settings.num_unrolled)
        self._pool: TrainingPool | None = None
        self._random = random.Random()
        self._rates: deque[float] = deque(maxlen=_RATES)
        """Tokens per second of the last micro-steps."""
        self._most_tokens = settings.micro_step_tokens
        self._update_seconds = 0.0
        """Seconds of the last update, from when its gradient was there."""
        self._reset()

    def _reset(self) -> None:
        self.records: list[MicroStepRecord] = []
        """Micro-steps of the current rollout."""
        self.cut_seconds = 0.0
        """Seconds of the current rollout in a micro-step that was dropped because the rollout ended."""
        self.num_skipped = 0
        """Updates of the current rollout that were left out because their gradient was not finite."""
        self.merge_report = MergeReport(0, self.trained.num_steps, "", 0.0)
        """The report of the merge after the current rollout."""

    def begin_rollout(self, step: int) -> None:
        """Start the rollout of ``step``, with nothing trained yet; on every rank, also where none will train."""
        self._random = random.Random(f"{self._seed}/{step}/{self._rank}")
        self._reset()
        self.copy_policy_head()  # here, where all ranks do: where nobody trains, they must be equal after the merge too
        if self.trained.has_learned and not self.trained.average.num_taken:
            self.trained.average.add_current_weights()  # a warm drafter's own weights are the first

    def copy_policy_head(self) -> None:
        """Give an EAGLE-3 drafter that has learned nothing yet the policy's own head and final norm."""
        drafter = self.trained.drafter
        if isinstance(drafter, Eagle3) and not self.trained.has_learned:
            drafter.init_output_from_target(self._decoder.head, self._decoder.final_norm.weight)

    def take_micro_step(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Take one optimiser step within the time budget; return False if there is nothing to train on.

        ``is_over`` is asked between packing, forward, backward and update: once it says so the micro-step is dropped
        and leaves nothing but ``cut_seconds``. An update that is cheap and all that is missing is carried out.
        """
        start = time.time()
        BEAT.tick()
        has_drawn = False
        try:
            with closing(self._run_micro_step_stages(start)) as stages:
                for stage in stages:
                    has_drawn = stage
                    self._synchronize()  # what a GPU has done counts, not what was launched
                    if is_over():
                        self.trained.drop_gradients()
                        self.cut_seconds += time.time() - start
                        return True
        except torch.OutOfMemoryError as error:
            self.trained.drop_gradients()
            self._halve_micro_step_tokens(error)
            return True
        return has_drawn

    def _run_micro_step_stages(self, start: float) -> Generator[bool]:
        """A micro-step that began at ``start``; yields where it may be dropped: whether documents have been drawn."""
        if self._pool is None:
            self._pool = TrainingPool(self._cache, self._random)
        self._pool.refresh()
        if not len(self._pool):
            return
        yield False
        opened = time.time()
        excerpts = self._pool.draw_excerpts(self._num_tokens())
        if not excerpts:
            return
        yield True
        batch = pack_excerpts(excerpts, self._decoder.device)
        yield True
        with allowing_tf32():
            loss = self.loss(batch)
            yield True
            loss.backward()  # type: ignore[no-untyped-call]
        if self._update_seconds > _CHEAP_UPDATE * self._settings.micro_step_seconds:
            yield True
        value = self._update(loss)
        end = time.time()
        self._rates.append(batch.num_tokens / max(end - opened, 1e-6))
        if value is not None:
            self.records.append(MicroStepRecord(start, end, int(batch.counts.sum()), value))

    def loss(self, batch: PackedBatch) -> Tensor:
        """Return ``drafter_loss``, a scalar, with the policy's embedding and head of now."""
        return drafter_loss(self.trained.drafter, batch, self._decoder.embedding, self._decoder.head, self._loss)

    def _update(self, loss: Tensor) -> float | None:
        """Take the optimiser's step; returns the loss, or None where the gradient is not finite."""
        self._synchronize()  # not to count the backward pass
        start = time.perf_counter()
        has_learned = self.trained.step()
        if not has_learned:
            self.num_skipped += 1
            if self.num_skipped == 1:
                logger.warning(
                    "rank %d: the gradient of a micro-step of the drafter is not finite; such micro-steps are skipped "
                    "(drafter/skipped_steps counts them)",
                    self._rank,
                )
        value = float(loss.detach())
        self._update_seconds = time.perf_counter() - start
        return value if has_learned else None

    def _synchronize(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.current_stream(self._decoder.device).synchronize()

    def _halve_micro_step_tokens(self, error: torch.OutOfMemoryError) -> None:
        """Learn from half as many tokens at once from now on: the rollout's own memory is what it is."""
        if self._most_tokens <= _LEAST_TOKENS:
            raise error
        self._most_tokens = max(_LEAST_TOKENS, self._most_tokens // 2)
        logger.warning(
            "a micro-step of the drafter ran out of device memory; from now on they have at most %d tokens: lower "
            "drafter.micro_step_tokens or rollout.kv_bytes",
            self._most_tokens,
        )
        torch.cuda.empty_cache()

    def _num_tokens(self) -> int:
        """As many tokens as the time budget lets, by the slowest of the last micro-steps."""
        fitting = int(min(self._rates, default=0.0) * self._settings.micro_step_seconds)
        return min(self._most_tokens, max(fitting, _LEAST_TOKENS))

    def end_rollout(self) -> None:
        """End the rollout's training, and close the pool's files."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @contextmanager
    def merging_drafters(self, world: SumOverRanks) -> Iterator[None]:
        """Merge all ranks' drafters: through host memory while the block runs, on GPUs before it. Collective.

        ``merge_report`` then says what it did. A block that fails leaves the drafter as it was.

        Raises:
            UserError: as ``Merge.wait_and_assign_mean``.
        """
        merge = Merge(self.trained, sum(record.num_tokens for record in self.records), self._rank, world)
        is_at_once = sums_on_gpus()  # in milliseconds
        if is_at_once:
            self.merge_report = merge.wait_and_assign_mean()
        yield
        if not is_at_once:
            self.merge_report = merge.wait_and_assign_mean()

    def memory_table(self) -> dict[str, int]:
        """Return the bytes that training takes besides the engine, without activations, by what takes them."""
        weights = sum(parameter.nbytes for parameter in self.trained.parameters.values())
        table = {"trained drafter": weights, "its moments": 2 * weights}
        if average := self.trained.average.num_bytes:
            copies = 1 if self._decoder.device.type == "cuda" else 2  # sent and received stand in host memory
            merge = copies * 3 * weights
            table |= {"its average": average, "its gradients": weights, "its merge": merge}
        return table
