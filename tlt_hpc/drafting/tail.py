"""When within a step the drafter is trained, and on which responses; ``tlt ablate`` compares other ways."""

from __future__ import annotations

from collections.abc import Callable

from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.storage.feature_cache import FeatureCache


class TailTraining:
    """Idle ranks train during the rollout, on this step's responses and the last step's (paper, section 4.2)."""

    cache: type[FeatureCache] = FeatureCache
    """Source of the documents that the drafter is trained on."""
    in_tail = True
    """Whether idle ranks train during the rollout."""

    def after_rollout(self, spot: SpotTrainer, step: int, rank: int, should_stop: Callable[[], bool]) -> None:
        """Train after a rollout has ended, before the policy's update, on every rank: here not at all."""


IN_TAIL = TailTraining()
"""How a run trains its drafter unless an experiment says otherwise."""
