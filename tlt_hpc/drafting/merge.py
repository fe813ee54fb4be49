"""The merge at the end of a rollout: the ranks' drafters become their mean, weighted by the tokens each trained on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.config import UserError
from tlt_hpc.drafting.state import TrainedDrafter

logger = logging.getLogger(__name__)


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> NDArray[np.float32]:
        """Return the sum [n], once all ranks have posted theirs."""


class SumOverRanks(Protocol):
    """The part of the world that a merge needs."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def start_sum(self, array: NDArray[np.float32]) -> Pending:
        """Post the sum of ``array`` [n] over all ranks. Collective."""

    def allgather(self, item: Any) -> list[Any]:
        """Return the items of all ranks, in their order. Collective."""


def sums_on_gpus() -> bool:
    """Return True if every rank has a GPU of its own and NCCL connects them; the same on all ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"


def start_sum(world: SumOverRanks, flat: Tensor) -> Callable[[], Tensor]:
    """Post the sum of ``flat`` [n] over all ranks, and return the function that waits for it. Collective.

    ``flat`` belongs to the sum from now on. With a process group of GPUs it is summed on them, beside other work; else
    through host memory by MPI.
    """
    if sums_on_gpus():
        work = torch.distributed.all_reduce(flat, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return flat

        return wait
    pending, device = world.start_sum(flat.cpu().numpy()), flat.device
    return lambda: torch.from_numpy(pending.wait()).to(device)


@dataclass(frozen=True)
class MergeReport:
    """The result of a merge; the same on every rank but for ``exposed_seconds`` and ``is_dropped``."""

    num_tokens: int
    num_steps: int
    """Steps the merged drafter has taken: the most of any rank."""
    fingerprint: str
    """Empty where nothing was merged."""
    exposed_seconds: float
    """Time this rank waited for the sum."""
    is_dropped: bool = False
    """This rank's drafter was not finite, and had no part in the mean."""


class Merge:
    """The mean of all ranks' weights and Adam moments, weighted by tokens; the constructor posts the sum."""

    def __init__(self, trained: TrainedDrafter, num_tokens: int, rank: int, world: SumOverRanks) -> None:
        """Post this rank's part of the sum. Collective.

        Args:
            num_tokens: response tokens that this rank trained on, its weight; a drafter that is not finite has none.
        """
        self._trained, self._num_tokens, self._rank, self._world = trained, num_tokens, rank, world
        tensors = trained.weights_and_moments()
        # one copy: three times the drafter is much
        flat = torch.cat([*(tensor.flatten() for tensor in tensors), tensors[0].new_tensor([1.0, 0.0])])
        flat.mul_(float(num_tokens))
        self._is_dropped = not bool(torch.stack(flat.aminmax()).isfinite().all())  # as sent: the product may overflow
        if self._is_dropped:
            flat.zero_()[-1:].fill_(1.0)
        self._wait = start_sum(world, flat)

    def wait_and_assign_mean(self) -> MergeReport:
        """Wait for the mean and assign it, unless nobody trained. Collective; call it once.

        Asserts that every rank then holds the same drafter.

        Raises:
            UserError: on all ranks, if no rank has a finite drafter left.
        """
        trained, start = self._trained, time.perf_counter()
        summed = self._wait()
        del self._wait  # and the memory of the sum
        total, num_dropped = summed[-2:].tolist()
        exposed = time.perf_counter() - start
        if self._is_dropped:
            trained.num_steps = 0  # its steps count no more than its weights
        if total > 0:
            trained.assign_flat_values(summed[:-2].div_(total))
            trained.average.add_current_weights()
        elif num_dropped:
            self._broadcast_untrained_drafter()
        if num_dropped and self._rank == 0:
            logger.warning(
                "drafters of %d of %d ranks are not finite: left out of the merge", num_dropped, self._world.size
            )
        fingerprint = trained.fingerprint()
        reports = self._world.allgather((trained.num_steps, fingerprint))
        assert len({found for _, found in reports}) == 1, f"drafters differ after the merge: {reports}"
        trained.num_steps = max(steps for steps, _ in reports)
        trained.has_learned |= total > 0
        return MergeReport(int(total), trained.num_steps, fingerprint, exposed, self._is_dropped)

    def _broadcast_untrained_drafter(self) -> None:
        """Take up the drafter of the first rank that has it as it was before the rollout: finite, and not trained."""
        trained, world = self._trained, self._world
        is_kept = not self._num_tokens and not self._is_dropped
        states = world.allgather((is_kept, trained.has_learned))
        source = next((rank for rank, (kept, _) in enumerate(states) if kept), None)
        if source is None:
            raise UserError(
                "no rank has a drafter with finite weights and moments: resume from the last checkpoint with a lower "
                f"drafter.learning_rate than {trained.learning_rate:g}"
            )
        flat = torch.cat([tensor.flatten() for tensor in trained.weights_and_moments()])
        if self._rank != source:
            flat.zero_()
        trained.assign_flat_values(start_sum(world, flat)())
        trained.has_learned = states[source][1]
