"""Costs from a cost profile that the engine has measured, and assumed chances that a draft is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tlt_hpc.plan.simulate.costs import TokenCosts, expected
from tlt_hpc.rollout.costs import CostProfile, read_profile
from tlt_hpc.rollout.strategy import OFF, Source, Strategy

DEFAULT_CHANCES: dict[Source, float] = {"drafter": 0.8, "ngram": 0.5}
"""Assumed chances that a draft is accepted, given those before it: for a trained drafter, and for texts that repeat
themselves somewhat."""


def read_costs(
    path: Path, strategies: Sequence[Strategy], most_live: int, chances: Mapping[Source, float], prefill_tokens: int
) -> TokenCosts:
    """Seconds a token of plain decoding, of the strategies that the profile covers, and of reading prompts.

    ``prefill_tokens``: most prompt tokens that one pass reads.

    Raises:
        ValueError: no cost profile.
    """
    try:
        profile = read_profile(path)
    except OSError as error:
        raise ValueError(f"--profile {path}: {error.strerror}; give a run's cost_profile.json") from None
    known = [strategy for strategy in dict.fromkeys([OFF, *strategies]) if profile.covers([strategy], 1)]
    if OFF not in known:
        raise ValueError(f"--profile {path}: has no pass of one token, so no plain round; give another profile")
    token = np.array(
        [
            [round_seconds(profile, strategy, batch) / _accept(strategy, chances) for batch in range(1, most_live + 1)]
            for strategy in known
        ]
    )
    read_seconds = prompt_token_seconds(profile, prefill_tokens)
    return TokenCosts(tuple(strategy.name for strategy in known), token, np.zeros_like(token), read_seconds)


def round_seconds(profile: CostProfile, strategy: Strategy, batch: int) -> float:
    """Seconds of a round; beyond the profile's largest batch, on the line through its last two."""
    batches = [measured for measured, _ in profile.verify.rows]
    if batch <= batches[-1] or len(batches) == 1:
        return profile.seconds(strategy, batch)
    last, before = (profile.seconds(strategy, measured) for measured in (batches[-1], batches[-2]))
    slope = max(0.0, (last - before) / (batches[-1] - batches[-2]))
    return last + slope * (batch - batches[-1])


def prompt_token_seconds(profile: CostProfile, prefill_tokens: int) -> float:
    """Seconds of reading a prompt token, taken from the profile's widest pass, since it has no prefill.

    Chunks of prompts are wider, and a pass whose tokens all get a distribution costs more, so this is an upper bound.
    """
    passes = [(batch * width, seconds) for batch, row in profile.verify.rows for width, seconds in row]
    fitting = [one for one in passes if one[0] <= prefill_tokens] or [min(passes)]
    tokens, seconds = max(fitting)
    return seconds / tokens


def _accept(strategy: Strategy, chances: Mapping[Source, float]) -> float:
    return 1.0 if strategy == OFF else expected(chances[strategy.source], strategy.reach)
