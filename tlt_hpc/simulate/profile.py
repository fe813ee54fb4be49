"""Costs from a cost profile that the engine has measured, and a chance that a draft stands, which no profile knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tlt_hpc.rollout.cost_profile import read_profile
from tlt_hpc.rollout.strategy import OFF, strategy_named
from tlt_hpc.simulate.costs import Costs
from tlt_hpc.simulate.published import expected

DEFAULT_CHANCE = 0.8


def read_costs(path: Path, strategies: Sequence[str], most_live: int, chance: float | None = None) -> Costs:
    """Seconds a token of plain decoding and of those strategies that the profile covers.

    Raises:
        ValueError: no cost profile.
    """
    try:
        profile = read_profile(path)
    except OSError as error:
        raise ValueError(f"--profile {path}: {error.strerror}; profiles are in TLT_CACHE, as profiles/*.json") from None
    named = [OFF, *(strategy_named(name) for name in strategies if name != OFF.name)]
    known = [strategy for strategy in named if profile.covers([strategy], 1)]
    if OFF not in known:
        raise ValueError(f"--profile {path}: has no pass of one token, so no plain round; give another profile")
    token = np.array(
        [
            [
                profile.seconds(strategy, batch)
                / expected(DEFAULT_CHANCE if chance is None else chance, strategy.reach)
                for batch in range(1, most_live + 1)
            ]
            for strategy in known
        ]
    )
    return Costs(tuple(strategy.name for strategy in known), token, np.zeros_like(token))
