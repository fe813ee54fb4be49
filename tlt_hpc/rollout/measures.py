"""Times the parts of a round for the cost profile, on rows that are discarded.

The cost of a pass does not depend on its tokens, so repeated tokens replace drafts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch

from tlt_hpc import __version__
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.rollout.costs import ProfileKey, processor_name
from tlt_hpc.rollout.decoding import HostRounds
from tlt_hpc.rollout.drafts import slots_needed
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import Strategy


class RoundMeasures:
    """Implements ``costs.Measures`` on an engine that has no work."""

    def __init__(self, scheduler: Scheduler, rounds: HostRounds, responses: Sequence[Response]) -> None:
        self._scheduler, self._rounds, self._responses = scheduler, rounds, responses

    def measure_verify(self, batch: int, width: int) -> float:
        """Seconds of a target pass over ``width`` tokens of each of ``batch`` rows, sampling and walk included."""
        self._occupy(batch, width)
        return self._rounds.time_verify(width)

    def measure_draft(self, batch: int, depth: int, strategy: Strategy) -> float:
        """Seconds of the strategy's drafts for ``batch`` rows, with its depth replaced by ``depth``."""
        self._occupy(batch, slots_needed(replace(strategy, depth=depth)))
        return self._rounds.time_draft(replace(strategy, depth=depth))

    def _occupy(self, batch: int, num_slots: int) -> None:
        """Make ``batch`` rows live with pages for the pass, or as many as the pool holds."""
        if self._scheduler.rows.num_live != batch:
            self._scheduler.abort()
            for order, response in enumerate(islice(cycle(self._responses), batch)):
                self._scheduler.wait(replace(response, order=order, text=list(response.text), pages=[]))
            before = -1
            while self._scheduler.rows.num_live > before or self._scheduler.prefilling:
                before = self._scheduler.rows.num_live
                self._scheduler.admit()
                self._scheduler.prefill()
        self._scheduler.reserve(num_slots)


def profile_key(decoder: Decoder, settings: EngineSettings, drafter: Drafter | None) -> ProfileKey:
    """All that the cost of a round depends on beside the strategy and the batch."""
    shape, size = decoder.part, decoder.sharding.size
    form = drafter.form if drafter is not None else "none"
    drafted = 0 if drafter is None or drafter.token_ids is None else len(drafter.token_ids)
    return ProfileKey(
        processor=processor_name(),
        num_cores=os.cpu_count() or 1,
        device=_device_name(decoder.device),
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        model=f"{shape.family}-{shape.num_layers}x{shape.hidden_size}x{shape.intermediate_size}-h{shape.num_heads}"
        f"-g{shape.num_kv_heads}-d{shape.head_dim}-v{shape.vocab_size}-{form}{drafted}"
        f"-{settings.attention}{settings.page_size}-guard{settings.tie_guard:d}-tlt{__version__}"
        f"{f'-part-of-{size}' if size > 1 else ''}",
        dtype=str(decoder.dtype),
    )


def _device_name(device: torch.device) -> str:
    """What a device is, not which of several alike."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
