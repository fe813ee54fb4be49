"""Chances that a draft is accepted at every position and depth of one response, under three rules of verification.

Given the response, acceptances at different depths are independent of each other, under all three rules; and the
response itself is a sample of the target under all three. So one response serves all rules, and products of chances
along it are unbiased. Knows logits, not models. Shapes: ``A`` sharpnesses, ``C`` numbers of candidates, ``L`` depths,
``R`` positions, ``M`` positions of a chunk, ``N`` draws, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tlt_hpc.studies.bench.coupling import draw_gumbel, hits, noise_given_winner, ranks
from tlt_hpc.studies.bench.lengths import Floats
from tlt_hpc.studies.bench.rejection import acceptance, overlap
from tlt_hpc.studies.bench.unroll import TokenLogits

Rule = Literal["shared_noise", "rejection", "top_k"]
RULES: tuple[Rule, ...] = get_args(Rule)
_CHUNK_NUMBERS = 1 << 21
"""Numbers in a tensor of one chunk's draws."""


@dataclass(frozen=True)
class Grid:
    """What is tried: numbers of candidates, factors on the drafter's logits, and draws per chance."""

    candidates: tuple[int, ...]
    sharpness: tuple[float, ...]
    num_draws: int


@dataclass(frozen=True)
class Chances:
    """Of one response; depths that reach beyond its end have chance 0."""

    entropy: Floats
    """[R] nats of the target's distribution; at temperature 0 of that at 1."""
    walk: dict[Rule, Floats]
    """[A, C, L, R] given the response's token: entry (l, r) is of token r + l, drafted from before token r."""
    first: dict[Rule, Floats]
    """[A, C, R] of the first draft, over all tokens the target may choose."""
    overlap: Floats
    """[A, R] 1 - TV of target and sharpened drafter."""


def measure(logits: TokenLogits, temperature: float, grid: Grid, generator: torch.Generator) -> Chances:
    """The chances along one response that was sampled at ``temperature``."""
    length, depth = len(logits.tokens), len(logits.draft)
    shape = (len(grid.sharpness), len(grid.candidates), depth, length)
    walk: dict[Rule, Floats] = {rule: np.zeros(shape) for rule in RULES}
    for level, draft in enumerate(logits.draft):
        for rows in _chunks(len(draft), logits.target.shape[1] * grid.num_draws):
            ahead = slice(rows.start + level, rows.stop + level)
            found = _given(logits.target[ahead], draft[rows], logits.tokens[ahead], temperature, grid, generator)
            for rule in RULES:
                walk[rule][:, :, level, rows] = found[rule]
    first: dict[Rule, Floats] = {rule: np.zeros((shape[0], shape[1], length)) for rule in RULES}
    shared = np.zeros((shape[0], length))
    for rows in _chunks(length, logits.target.shape[1] * grid.num_draws):
        target, draft = logits.target[rows], logits.draft[0][rows]
        for rule, values in _overall(target, draft, temperature, grid, generator).items():
            first[rule][:, :, rows] = values
        shared[:, rows] = _overlaps(target, draft, temperature, grid)
    return Chances(_entropy(logits.target, temperature), walk, first, shared)


def _given(
    target: Tensor, draft: Tensor, tokens: Tensor, temperature: float, grid: Grid, generator: torch.Generator
) -> dict[Rule, Floats]:
    """[A, C, M] of each rule, given that ``tokens`` [M] are the target's."""
    by_rank = _every_sharpness(_select(hits(ranks(draft, tokens).unsqueeze(1), _most(grid)), grid), grid)
    if temperature == 0:
        return dict.fromkeys(RULES, by_rank)
    scaled = target / temperature
    noise = noise_given_winner(scaled, tokens, grid.num_draws, generator)
    columns = tokens.unsqueeze(1).expand(-1, grid.num_draws)
    shared, rejection = [], []
    for sharpness in grid.sharpness:
        sharp = draft * (sharpness / temperature)
        shared.append(_select(hits(ranks(sharp.unsqueeze(1) + noise, columns), _most(grid)), grid))
        both = scaled.softmax(-1), sharp.softmax(-1)
        chance = acceptance(*both, tokens, _most(grid), grid.num_draws, generator)
        rejection.append(_select(chance.of_token, grid))
    return {"shared_noise": np.stack(shared), "rejection": np.stack(rejection), "top_k": by_rank}


def _overall(
    target: Tensor, draft: Tensor, temperature: float, grid: Grid, generator: torch.Generator
) -> dict[Rule, Floats]:
    """[A, C, M] of each rule, over the target's distribution."""
    if temperature == 0:
        return _given(target, draft, target.argmax(-1), temperature, grid, generator)
    scaled = target / temperature
    mass = scaled.softmax(-1).gather(-1, draft.topk(_most(grid), -1).indices).cumsum(-1).T
    noise = draw_gumbel((len(target), grid.num_draws, target.shape[1]), generator)
    chosen = (scaled.unsqueeze(1) + noise).argmax(-1)
    shared, rejection = [], []
    for sharpness in grid.sharpness:
        sharp = draft * (sharpness / temperature)
        shared.append(_select(hits(ranks(sharp.unsqueeze(1) + noise, chosen), _most(grid)), grid))
        both = scaled.softmax(-1), sharp.softmax(-1)
        chance = acceptance(*both, chosen[:, 0], _most(grid), grid.num_draws, generator)
        rejection.append(_select(chance.overall, grid))
    of_rank = _every_sharpness(_select(mass, grid), grid)
    return {"shared_noise": np.stack(shared), "rejection": np.stack(rejection), "top_k": of_rank}


def _overlaps(target: Tensor, draft: Tensor, temperature: float, grid: Grid) -> Floats:
    warmth = temperature or 1.0
    probabilities = (target / warmth).softmax(-1)
    shared = [overlap(probabilities, (draft * (sharpness / warmth)).softmax(-1)) for sharpness in grid.sharpness]
    return torch.stack(shared).double().numpy()


def _entropy(target: Tensor, temperature: float) -> Floats:
    log_probs = (target / (temperature or 1.0)).double().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).numpy()


def _most(grid: Grid) -> int:
    return max(grid.candidates)


def _select(by_count: Tensor, grid: Grid) -> Floats:
    """The wanted numbers of candidates [C, M] out of 1..K [K, M]."""
    return by_count[[count - 1 for count in grid.candidates]].double().numpy()


def _every_sharpness(values: Floats, grid: Grid) -> Floats:
    """[C, M] -> [A, C, M]: sharpness does not change an order."""
    return np.broadcast_to(values, (len(grid.sharpness), *values.shape))


def _chunks(length: int, numbers_per_row: int) -> Iterator[slice]:
    size = max(1, _CHUNK_NUMBERS // numbers_per_row)
    for start in range(0, length, size):
        yield slice(start, min(length, start + size))
