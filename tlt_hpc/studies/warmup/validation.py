"""How well the drafter drafts: accept length by really speculating on held-out prompts, always the same responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tlt_hpc.common.records import Request
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.session import make_engine
from tlt_hpc.studies.warmup.parts import Parts
from tlt_hpc.studies.warmup.plan import VALIDATION, validation_tokens


class Validation:
    """An engine with the validation strategy alone; each replica answers its share of the held-out prompts."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        requests = parts.texts.validation_requests(parts.config.run.seed)
        self._requests: list[Request] = requests[parts.replica.number :: parts.replica.count]
        self._engine = make_engine(parts.decoder, settings_of(parts, requests), parts.served, parts.replica)
        self._engine.calibrate(requests[:1])

    def accept_length(self) -> float | None:
        """Tokens per target pass and sequence with the drafter as it is now, over all ranks; collective.

        None where a rank was asked to stop before it was through.
        """
        world, replica = self._parts.world, self._parts.replica
        self._engine.load_drafter(self._parts.trainer.drafter.state_dict(), trained=True)
        self._engine.take_counts()
        self._engine.submit(self._requests)
        # what one rank of a replica was told all of them heed, before the same step
        while self._engine.has_work and not replica.agree(int(world.stop_requested), self._engine.text_mark):
            self._engine.step()
        num_left = self._engine.abort()
        self._engine.collect()
        counts = self._engine.take_counts()
        # a replica's ranks count the same, each of them
        tokens, passes, left = world.sum(np.array([counts.num_tokens, counts.num_row_passes, num_left], np.int64))
        return float(tokens / passes) if left == 0 else None


def settings_of(parts: Parts, requests: list[Request]) -> EngineSettings:
    """The rollout's sampling. No tie guard: the text is not at stake, and accept lengths do not see one token."""
    params = replace(parts.settings.params, max_tokens=validation_tokens(parts.config))
    return replace(
        parts.settings,
        params=replace(params, min_tokens=min(params.min_tokens, params.max_tokens)),
        tie_guard=False,
        strategies=(VALIDATION,),
        max_live=min(parts.settings.max_live, -(-len(requests) // parts.replica.count)),
        max_prompt_tokens=max(len(request.prompt_tokens) for request in requests),
    )
