"""The spot trainer: short drafter updates in the tail of a rollout, and their merge over the ranks at its end.

Knows the pool of documents and the policy's embedding and head; not when to train (the roster says) nor how a
collective works (it hands one flat array to ``SumOverRanks``).
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.common.records import MicroStepRecord
from tlt_hpc.config import DrafterSection, UserError
from tlt_hpc.drafting.average import WeightAverage
from tlt_hpc.drafting.loss import LossSettings, drafter_loss, fast_products
from tlt_hpc.drafting.packing import PackedBatch, pack
from tlt_hpc.drafting.pool import TrainingPool
from tlt_hpc.drafting.sums import SumOverRanks, start_sum
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.draft_layer import AS_TARGET, TOKEN_IDS, DraftLayer, layer_of
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.eagle3 import Eagle3
from tlt_hpc.storage.feature_cache import FeatureCache

logger = logging.getLogger(__name__)

AVERAGE_MERGES = 5
"""The engine drafts with a running average of the drafter's weights over about this many merges, which tolerates a
learning rate that is too high."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BETAS, _MAX_GRAD_NORM = (0.9, 0.95), 1.0
_LEAST_TOKENS = 256
"""Size of a micro-step that no time budget makes smaller, and of the first, before any was timed."""
_RATES = 6
"""Micro-steps whose slowest rate sizes the next: one quick one says little on a machine that others use too."""
_CHEAP_UPDATE = 0.25
"""Share of the time budget under which an update is carried out although the rollout is over: the gradient is there."""

_CPU_CHUNK, _CUDA_CHUNK = 2**16, 2**22
"""Values that are fingerprinted at once: what a cache holds, and what makes a launch worth its while."""


class _ReleasedError(Exception):
    """The rollout ended inside a micro-step."""


@dataclass(frozen=True)
class MergeReport:
    """What a merge did; the same on every rank but for ``exposed_seconds`` and ``is_dropped``."""

    num_tokens: int
    num_steps: int
    """Steps the merged drafter has taken: the most of any rank."""
    fingerprint: str
    """Empty where nothing was merged."""
    exposed_seconds: float
    """Time this rank waited for the sum."""
    is_dropped: bool = False
    """Whether this rank's replica was not finite, and had no part in it."""


class SpotTrainer:
    """A replica of the drafter that learns from the feature cache whenever its rank is idle."""

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
        """``token_ids`` [W]: the vocabulary of an EAGLE-3 drafter; without it the drafter is of EAGLE's form."""
        self.drafter = make_drafter(decoder.shape, seed, torch.float32, decoder.device, token_ids, own)
        self._decoder, self._cache, self._settings = decoder, cache, settings
        self._seed, self._rank = seed, rank
        self.learning_rate = settings.learning_rate
        self.is_trained = False
        """Whether the weights have ever learned anything; a random drafter is not worth asking."""
        self._loss = LossSettings(num_steps=settings.num_unrolled)
        self._parameters = dict(self.drafter.named_parameters())
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._parameters.items()}
        self._average = WeightAverage(
            {name: p.data for name, p in self._parameters.items()}, average_merges if settings.train else 1
        )
        self.num_steps = 0
        """Optimiser steps that the drafter's weights have seen."""
        self._pool: TrainingPool | None = None
        self._random = random.Random()
        self._rates: deque[float] = deque(maxlen=_RATES)
        """Tokens per second of the last micro-steps."""
        self._most_tokens = settings.micro_step_tokens
        self._update_seconds = 0.0
        """Of the last update, once its gradient was there."""
        self._pending: Callable[[], Tensor] | None = None
        self.records: list[MicroStepRecord] = []
        """Micro-steps of the current rollout."""
        self.cut_seconds = 0.0
        """Seconds of the current rollout in a micro-step that was dropped because the rollout ended."""
        self.num_skipped = 0
        """Updates of the current rollout that were left out because their gradient was not finite."""
        self._is_dropped = False
        """Whether the merge under way goes without this replica, which is not finite."""

    def begin(self, step: int) -> None:
        """Start a rollout: nothing trained yet."""
        assert self._pending is None, "the last merge was not finished"
        self._random = random.Random(f"{self._seed}/{step}/{self._rank}")
        self.records = []
        self.cut_seconds = 0.0
        self.num_skipped = 0
        self._take_up_head()  # here, where all ranks do: where nobody trains, they must be equal after the merge too
        if self.is_trained and not self._average.num_taken:
            self._average.take()  # a warm drafter's own weights are the first

    def micro_step(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """One optimiser step within the time budget; False where there is nothing to train on.

        ``is_over`` is asked between packing, forward, backward and update: once it says so the micro-step is dropped
        and leaves nothing but ``cut_seconds``. An update that is cheap and all that is missing is carried out.
        """
        start = time.time()
        BEAT.tick()
        try:
            return self._micro_step(start, is_over)
        except _ReleasedError:
            self._drop_gradients()
            self.cut_seconds += time.time() - start
            return True
        except torch.OutOfMemoryError as error:
            self._drop_gradients()
            self._halve(error)
            return True

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _halve(self, error: torch.OutOfMemoryError) -> None:
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

    def _micro_step(self, start: float, is_over: Callable[[], bool]) -> bool:
        if self._pool is None:
            self._pool = TrainingPool(self._cache, self._random)
        self._pool.refresh()
        if not len(self._pool):
            return False
        self._ask(is_over)
        opened = time.time()
        excerpts = self._pool.draw(self._num_tokens())
        if not excerpts:
            return False
        self._ask(is_over)
        batch = pack(excerpts, self._decoder.device)
        self._ask(is_over)
        with fast_products():
            loss = drafter_loss(self.drafter, batch, self._decoder.embedding, self._decoder.head, self._loss)
            self._ask(is_over)
            loss.backward()  # type: ignore[no-untyped-call]
        if self._update_seconds > _CHEAP_UPDATE * self._settings.micro_step_seconds:
            self._ask(is_over)
        value = self._update(loss)
        end = time.time()
        self._rates.append(batch.num_tokens / max(end - opened, 1e-6))
        if value is not None:
            self.records.append(MicroStepRecord(start, end, int(batch.counts.sum()), value))
        return True

    def _take_up_head(self) -> None:
        """A drafter that has learned nothing yet begins with the policy's own head, where it is to have one."""
        if isinstance(self.drafter, Eagle3) and not self.is_trained:
            self.drafter.read_like(self._decoder.head, self._decoder.final_norm.weight)

    def _ask(self, is_over: Callable[[], bool]) -> None:
        """Give up where the rollout is over; on a GPU once the work so far is done, not when it was launched."""
        if self._decoder.device.type == "cuda":
            torch.cuda.current_stream(self._decoder.device).synchronize()
        if is_over():
            raise _ReleasedError

    def _update(self, loss: Tensor) -> float | None:
        """``_clip_and_step``; returns the loss, or None where nothing was learned. The device has come so far then."""
        if self._decoder.device.type == "cuda":
            torch.cuda.current_stream(self._decoder.device).synchronize()  # not to count the backward pass
        start = time.perf_counter()
        has_learned = self._clip_and_step()
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

    def _clip_and_step(self) -> bool:
        """Clip the gradient and take the optimiser's step; False where it is not finite, which changes nothing."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), _MAX_GRAD_NORM)
        if bool(norm.isfinite()):
            self._adam()
            return True
        self._drop_gradients()
        return False

    def end(self) -> None:
        """Leave the tail: the pool's files are closed."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def memory_table(self) -> dict[str, int]:
        """Bytes that training takes besides the engine, without activations; the merge's on the drafter's device."""
        weights = sum(parameter.nbytes for parameter in self._parameters.values())
        table = {"trained drafter": weights, "its moments": 2 * weights}
        if self._settings.train:
            copies = 1 if self._decoder.device.type == "cuda" else 2  # sent and received stand in host memory
            merge = copies * 3 * weights
            table |= {"its average": self._average.num_bytes, "its gradients": weights, "its merge": merge}
        return table

    # -- all ranks at once --------------------------------------------------------------------------------------

    def learn(self, batches: Iterable[PackedBatch], world: SumOverRanks) -> float:
        """One update on the mean loss over the tokens of all ranks' batches, and that loss; collective.

        The replicas stay equal without a merge. A rank may have no batch.

        Raises:
            UserError: on all ranks, if the gradient is not finite.
        """
        self._take_up_head()
        loss, count = 0.0, 0
        for batch in batches:
            num_counted = int(batch.counts.sum())
            with fast_products():
                part = drafter_loss(self.drafter, batch, self._decoder.embedding, self._decoder.head, self._loss)
                (part * num_counted).backward()  # type: ignore[no-untyped-call]
            loss, count = loss + float(part.detach()) * num_counted, count + num_counted
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters.values()]
        flat = torch.cat([*(g.flatten() for g in gradients), gradients[0].new_tensor([loss, count])])
        summed = start_sum(world, flat)()
        total = summed[-1]
        for parameter, values in zip(
            self._parameters.values(), torch.split(summed[:-2] / total, [g.numel() for g in gradients]), strict=True
        ):
            parameter.grad = values.view_as(parameter)
        if not self._clip_and_step():
            raise UserError(
                "the gradient of an update of the drafter is not finite: use a lower learning rate than "
                f"{self.learning_rate:g}"
            )
        return float(summed[-2] / total)

    # -- merge --------------------------------------------------------------------------------------------------

    def start_merge(self, world: SumOverRanks) -> None:
        """Post the sum of all replicas' weights and Adam moments, each weighted with the tokens it trained on.

        A replica that is not finite weighs nothing.
        """
        tensors = self._state_tensors()
        tokens = float(sum(record.num_tokens for record in self.records))
        # one copy: three times the drafter is much
        flat = torch.cat([*(tensor.flatten() for tensor in tensors), tensors[0].new_tensor([1.0, 0.0])]).mul_(tokens)
        self._is_dropped = not bool(torch.stack(flat.aminmax()).isfinite().all())  # as sent: the product may overflow
        if self._is_dropped:
            flat.zero_()[-1:].fill_(1.0)
        self._pending = start_sum(world, flat)

    def finish_merge(self, world: SumOverRanks) -> MergeReport:
        """Take the weighted mean; unchanged where nobody trained. Asserts that every rank holds the same drafter.

        Raises:
            UserError: on all ranks, if no rank has a finite drafter left.
        """
        assert self._pending is not None, "start_merge first"
        start = time.perf_counter()
        summed, self._pending = self._pending(), None
        total, num_dropped = summed[-2:].tolist()
        exposed = time.perf_counter() - start
        if self._is_dropped:
            self.num_steps = 0  # its steps count no more than its weights
        if total > 0:
            self._assign(summed[:-2].div_(total))
            self._average.take()
        elif num_dropped:
            self._take_back(world)
        if num_dropped and self._rank == 0:
            logger.warning("drafters of %d of %d ranks are not finite: left out of the merge", num_dropped, world.size)
        fingerprint = self.fingerprint()
        reports = world.allgather((self.num_steps, fingerprint))
        assert len({found for _, found in reports}) == 1, f"drafters differ after the merge: {reports}"
        self.num_steps = max(steps for steps, _ in reports)
        self.is_trained |= total > 0
        return MergeReport(int(total), self.num_steps, fingerprint, exposed, self._is_dropped)

    def _take_back(self, world: SumOverRanks) -> None:
        """Take up the drafter of the first rank that has it as it was before the rollout: finite, and not trained."""
        is_kept = not self.records and not self._is_dropped
        told = world.allgather((int(is_kept), "trained" if self.is_trained else ""))
        source = next((rank for rank, (kept, _) in enumerate(told) if kept), None)
        if source is None:
            raise UserError(
                "no rank has a drafter with finite weights and moments: resume from the last checkpoint with a lower "
                f"drafter.learning_rate than {self._settings.learning_rate:g}"
            )
        flat = torch.cat([tensor.flatten() for tensor in self._state_tensors()])
        if self._rank != source:
            flat.zero_()
        self._assign(start_sum(world, flat)())
        self.is_trained = told[source][1] == "trained"

    def served(self) -> dict[str, Tensor]:
        """What the engine is to draft with, by parameter name: weights averaged over the last merges."""
        return {**self.drafter.state_dict(), **self._average.means()}

    def fingerprint(self) -> str:
        """A digest of the bits of weights, moments and averaged weights, computed on their device."""
        sums = torch.stack([_bit_sum(tensor) for tensor in self._all_tensors()])
        return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()

    # -- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights, averaged and as they are, moments and counters by name, copied to the host."""
        return {name: tensor.cpu().clone() for name, tensor in self.live_state().items()}

    def live_state(self) -> dict[str, Tensor]:
        """``state``, but the tensors themselves, which the next micro-step or merge changes.

        ``<name>.weight`` is what is served, and ``<name>.trained``, where it may differ, what training continues from.
        """
        return {
            **{f"{name}.weight": mean for name, mean in self._average.means().items()},
            **self._training_tensors("trained" if self._average.num_bytes else "weight"),
            **self._vocabulary(),
            **self.drafter.own.stored(),
            "num_averaged": torch.tensor(self._average.num_taken),
            "num_steps": torch.tensor(self.num_steps),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of ``state``, also of one that was averaged otherwise.

        Raises:
            UserError: a tensor is missing or has another shape, or the layer other settings.
        """
        self._check_layer(state)
        is_averaged = any(name.endswith(".trained") for name in state)
        wanted = self._training_tensors("trained" if is_averaged else "weight")
        for name, tensor in {**self._training_tensors("weight"), **wanted}.items():
            _check(name, state, tensor)
        self.num_steps = int(state["num_steps"])
        self.is_trained |= self.num_steps > 0
        self._take_vocabulary(state)
        for name, tensor in wanted.items():
            tensor.copy_(state[name])
        averaged = int(state.get("num_averaged", torch.tensor(0)))
        self._average.load({name: state[f"{name}.weight"] for name in self._parameters}, averaged)

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """Take up another drafter's weights, in any precision, but neither its moments nor its step count.

        Raises:
            UserError: a weight is missing or has another shape, or the layer other settings.
        """
        self._check_layer(state)
        for name, parameter in self._parameters.items():
            _check(f"{name}.weight", state, parameter)
            parameter.data.copy_(state[f"{name}.weight"])
        self._take_vocabulary(state)
        self.is_trained = True

    def draft_among(self, token_ids: NDArray[np.int64]) -> None:
        """Give an untrained drafter with a vocabulary of its own another one of the same size [W], ascending."""
        assert self.drafter.token_ids is not None and not self.is_trained
        self.drafter.token_ids.copy_(torch.from_numpy(token_ids))

    def _check_layer(self, state: Mapping[str, Tensor]) -> None:
        if (found := layer_of(state)) != (own := self.drafter.own):
            raise UserError(
                f"the drafter's layer has the settings {found.changes}, and this run's {own.changes}; use the "
                "drafter.init that the run began with"
            )

    def _vocabulary(self) -> dict[str, Tensor]:
        ids = self.drafter.token_ids
        return {} if ids is None else {TOKEN_IDS: ids}

    def _take_vocabulary(self, state: Mapping[str, Tensor]) -> None:
        if self.drafter.token_ids is not None:
            _check(TOKEN_IDS, state, self.drafter.token_ids)
            self.drafter.token_ids.copy_(state[TOKEN_IDS])

    def _state_tensors(self) -> list[Tensor]:
        return [tensor for name, p in self._parameters.items() for tensor in (p.data, *self._moments[name])]

    def _training_tensors(self, kind: str) -> dict[str, Tensor]:
        """What training continues from: weights under ``<name>.<kind>``, and both moments."""
        return {
            f"{name}.{part}": tensor
            for name, p in self._parameters.items()
            for part, tensor in zip((kind, *_MOMENTS), (p.data, *self._moments[name]), strict=True)
        }

    def _all_tensors(self) -> list[Tensor]:
        return [*self._state_tensors(), *self._average.means().values()]

    def _assign(self, flat: Tensor) -> None:
        tensors = self._state_tensors()
        for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))

    @torch.no_grad()
    def _adam(self) -> None:
        """Adam (Kingma & Ba, 2015); the moments are kept here because the merge averages them too."""
        self.num_steps += 1
        self.is_trained = True
        first, second = (1 - beta**self.num_steps for beta in _BETAS)
        for name, parameter in self._parameters.items():
            mean, square = self._moments[name]
            gradient = parameter.grad
            assert gradient is not None
            mean.lerp_(gradient, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            denominator = (square / second).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, denominator, value=-self.learning_rate / first)
            parameter.grad = None

    def _num_tokens(self) -> int:
        """As many tokens as the time budget lets, by the slowest of the last micro-steps."""
        fitting = int(min(self._rates, default=0.0) * self._settings.micro_step_seconds)
        return min(self._most_tokens, max(fitting, _LEAST_TOKENS))


def _bit_sum(tensor: Tensor) -> Tensor:
    """Sum of x(2x + 1) over the bits of each float32, modulo 2^64.

    No two values have the same term, so that any one that differs shows, and an ulp more here and less there do not
    cancel as they would in a plain sum.
    """
    bits = tensor.detach().flatten().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _CUDA_CHUNK if bits.is_cuda else _CPU_CHUNK):
        values = part.long()
        total += (values * (2 * values + 1)).sum()
    return total


def _check(name: str, state: Mapping[str, Tensor], wanted: Tensor) -> None:
    if name not in state or state[name].shape != wanted.shape:
        found = list(state[name].shape) if name in state else "missing"
        raise UserError(
            f"drafter tensor {name!r}: {found}, this model needs {list(wanted.shape)}; "
            "give a drafter trained for this model or drafter.init = 'random'"
        )
