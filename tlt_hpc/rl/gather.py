"""What all ranks' responses of a step are to the update: one order, whoever generated them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Rollout
from tlt_hpc.mpi.world import World


def gather(
    world: World, rollouts: Sequence[Rollout], rewards: NDArray[np.float32]
) -> tuple[list[Rollout], NDArray[np.float32]]:
    """All ranks' rollouts and their rewards [N] float32, ordered by key; collective.

    What the update reads does not depend on which rank had a response, or finished first.
    """
    ranks = world.allgather(list(zip(rollouts, rewards, strict=True)))
    pairs = sorted((pair for rank in ranks for pair in rank), key=lambda pair: pair[0].key)
    return [rollout for rollout, _ in pairs], np.array([reward for _, reward in pairs], dtype=np.float32)
