"""Counter-based Gumbel noise and the token it chooses, in one pass over the vocabulary. Knows no sample and no rule.

    G[t, v] = -log(-log1p(-w)),  w = (k + 0.5) / 2**32
    k = lane v % 4 of Philox4x32-10 with the key words[0:2] and the counter (v // 4, t, words[2], words[3])

This is exact at both tails; with fp32 uniforms the formula would return infinity for 0.45 % of the tokens of a 152k
vocabulary. PyTorch computes the noise in float64 and rounds it, Triton in float32 within 1e-6 of that.
Shapes: ``R`` rows, ``V`` vocabulary. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton

_LOW = 0xFFFFFFFF
N = TypeVar("N", int, Tensor)


@dataclass(frozen=True)
class GumbelChoice:
    """The tokens chosen at R positions and their scores, all [R]: the token int64, the rest float32.

    ``best`` - ``second`` is the gap to the runner-up in score. The log-probability of the token under the
    temperature-scaled policy is ``scaled_logit`` - ``log_normaliser``.
    """

    token: Tensor
    best: Tensor
    second: Tensor
    log_normaliser: Tensor
    scaled_logit: Tensor


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, words: Tensor, positions: Tensor, num_tokens: int
) -> GumbelChoice:
    """The token of the highest logits / temperature + noise, the first of equals; temperature 0 adds no noise.

    logits [R, V] fp32 or half precision, temperature [R] float32, words [R, 4] int64 (32-bit words), positions [R]
    int64. Columns from ``num_tokens`` on are padding and never chosen. A logit of -inf bans its token. NaN logits give
    a NaN ``log_normaliser`` and some token below ``num_tokens``. A row whose tokens are all banned gives a token below
    ``num_tokens`` and a ``best`` of -inf.
    """
    assert 0 < num_tokens <= logits.shape[1] and logits.stride(1) == 1
    assert temperature.dtype == torch.float32 and words.shape == (len(logits), 4) and words.is_contiguous()
    assert temperature.shape == positions.shape == (len(logits),)
    if not runs_triton(logits):
        return gumbel_argmax_reference(logits, temperature, words, positions, num_tokens)
    from tlt_hpc.kernels.programs import gumbel

    token, results = gumbel.gumbel_argmax(logits, temperature.contiguous(), words, positions.contiguous(), num_tokens)
    return GumbelChoice(token, *results.unbind(0))


def gumbel_noise(words: Tensor, positions: Tensor, columns: int | Tensor) -> Tensor:
    """Gumbel noise of response positions: words [R, 4] int64, positions [R] -> [R, C] float32.

    ``columns`` is their number, or the token ids [C] whose noise is wanted (a draft vocabulary).
    """
    assert words.shape == (len(positions), 4) and words.is_contiguous()
    if not runs_triton(words):
        return gumbel_noise_reference(words, positions, columns)
    from tlt_hpc.kernels.programs import gumbel

    if isinstance(columns, int):
        return gumbel.gumbel_noise(words, positions.contiguous(), columns)
    return gumbel.gumbel_noise_of_columns(words, positions.contiguous(), columns.contiguous())


def gumbel_argmax_reference(
    logits: Tensor, temperature: Tensor, words: Tensor, positions: Tensor, num_tokens: int
) -> GumbelChoice:
    """``gumbel_argmax`` in plain PyTorch; arguments as there, results [R]."""
    warm = (temperature > 0).unsqueeze(1)
    scaled = logits[:, :num_tokens].float() / torch.where(warm, temperature.unsqueeze(1), 1.0)
    scores = scaled + gumbel_noise_reference(words, positions, num_tokens).masked_fill_(~warm, 0.0)
    scores = scores.masked_fill_(scores.isnan(), -torch.inf)
    token = scores.argmax(1, keepdim=True)
    best = scores.gather(1, token)
    second = scores.scatter(1, token, -torch.inf).amax(1)
    return GumbelChoice(
        token.squeeze(1), best.squeeze(1), second, scaled.logsumexp(1), scaled.gather(1, token).squeeze(1)
    )


def gumbel_noise_reference(words: Tensor, positions: Tensor, columns: int | Tensor) -> Tensor:
    """``gumbel_noise`` in plain PyTorch, through float64; arguments as there -> [R, C] float32."""
    counters = columns // 4 if isinstance(columns, Tensor) else torch.arange(-(-columns // 4), device=words.device)
    k0, k1, c2, c3 = words.unsqueeze(2).unbind(1)
    lanes = philox((counters, positions.unsqueeze(1), c2, c3), (k0, k1))
    bits = torch.stack([lane.expand(len(words), len(counters)) for lane in lanes], -1)
    if isinstance(columns, Tensor):
        return gumbel(bits.gather(2, (columns % 4).expand(len(words), -1).unsqueeze(2)).squeeze(2))
    return gumbel(bits.flatten(1)[:, :columns])


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise (float32) of uniform 32-bit words (int64), of any shape."""
    w = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-w)).float()


def philox(counter: tuple[N, N, N, N], key: tuple[N, N]) -> tuple[N, N, N, N]:
    """Philox4x32-10 of 32-bit words: of numbers, or of broadcastable int64 tensors."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        # int64 products wrap, but their 64 bits are those of the unsigned product
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((right >> 32) & _LOW) ^ c1 ^ k0, right & _LOW
        c2, c3 = ((left >> 32) & _LOW) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
