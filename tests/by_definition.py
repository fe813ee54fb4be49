"""Sampling by its definition, in plain Python and NumPy, for what tests expect: nothing of the code under test.

A sample's words are the first 16 bytes of SHA-256 over its key's five numbers, int64 little-endian. Philox4x32-10:
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11); its answers are checked in ``test_noise.py``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import SampleKey


def words_of(key: SampleKey) -> list[int]:
    """The four 32-bit words of a sample."""
    fields = (key.seed, key.stream, key.step, key.draw, key.sample)
    digest = hashlib.sha256(b"".join(number.to_bytes(8, "little", signed=True) for number in fields)).digest()
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Python's whole numbers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def noise_of(key: SampleKey, position: int, num_tokens: int) -> NDArray[np.float64]:
    """The Gumbel noise [V] of a response's position."""
    w0, w1, w2, w3 = words_of(key)
    blocks = (philox((block, position, w2, w3), (w0, w1)) for block in range(-(-num_tokens // 4)))
    lanes = [lane for block in blocks for lane in block][:num_tokens]
    return np.array([-math.log(-math.log1p(-(lane + 0.5) / 2**32)) for lane in lanes])


def law_of(logits: Any, rule: Any) -> NDArray[np.float64]:
    """Probabilities [V] of the next token: the softmax of the logits over the temperature, of which top-k keeps so many
    tokens, top-p the likeliest before which less than that mass lies; what both keep is made to add up to one.
    """
    scaled = np.asarray(logits, np.float64)[: rule.num_tokens] / (rule.temperature or 1.0)
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    order = sorted(range(len(chances)), key=lambda token: -chances[token])
    if rule.temperature == 0:
        return np.eye(len(chances))[order[0]]
    before = [0.0, *accumulate(chances[token] for token in order)]
    kept = [
        token
        for rank, token in enumerate(order)
        if (not rule.top_k or rank < rule.top_k) and (rule.top_p >= 1 or before[rank] < rule.top_p)
    ]
    law = np.zeros_like(chances)
    law[kept] = chances[kept] / chances[kept].sum()
    return law


def choice_of(logits: Any, noise: Any, rule: Any) -> int:
    """The token that the noise [V] chooses: the highest logarithm of ``law_of`` plus noise."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(law_of(logits, rule)) + np.asarray(noise, np.float64)[: rule.num_tokens]))
