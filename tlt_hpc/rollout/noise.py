"""Counter-based Gumbel noise: the only source of randomness of a response. Knows no model and keeps no state.

``G[t, v] = -log(-log1p(-w))`` with ``w = (k + 0.5) / 2**32`` and ``k = Philox4x32-10(key; t, v)``: exact at both tails,
where the same formula with fp32 uniforms would return infinity for 0.45 % of the tokens of a 152k vocabulary.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from tlt_hpc.records import SampleKey

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def noise_key(key: SampleKey) -> tuple[int, int, int, int]:
    """Four 32-bit words that stand for a sample: two key Philox, two are the upper half of its counter."""
    packed = struct.pack("<5q", key.seed, key.stream, key.step, key.draw, key.sample)
    words = struct.unpack("<4I", hashlib.sha256(packed).digest()[:16])
    return words[0], words[1], words[2], words[3]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of broadcastable int64 tensors that hold 32-bit words; returns four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, but their 64 bits are those of the unsigned product
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _LOW) ^ c1 ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise (float32) of uniform 32-bit words (int64)."""
    w = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-w)).float()


def gumbel_rows(words: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise of response positions: words [B, 4] (``noise_key``), positions [B, n] -> [B, n, V] float32."""
    columns = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=words.device)
    k0, k1, c2, c3 = (w.view(-1, 1, 1) for w in words.unbind(1))
    lanes = philox((columns, positions.unsqueeze(-1), c2, c3), (k0, k1))
    shape = (*positions.shape, len(columns))
    bits = torch.stack([lane.expand(shape) for lane in lanes], -1)
    return gumbel(bits.flatten(-2)[..., :vocab_size])


class NoiseWindow:
    """Noise of the next positions of every live row, made in blocks because one call costs more than its numbers."""

    _BLOCK_NUMBERS = 1 << 15

    def __init__(self, num_rows: int, vocab_size: int, least_width: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.width = max(least_width, min(32, self._BLOCK_NUMBERS // vocab_size))
        self._words = torch.zeros(num_rows, 4, dtype=torch.int64, device=device)
        self._noise = torch.zeros(num_rows, self.width, vocab_size, device=device)
        self._start = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(num_rows, device=device).unsqueeze(1)
        self._rounds_left = 0
        """Positions by which rows may still advance, at least, before a refill."""

    def set_rows(self, rows: list[int], keys: list[SampleKey]) -> None:
        """Give rows to new samples, at their first positions."""
        index = torch.tensor(rows, device=self._words.device)
        self._words[index] = torch.tensor([noise_key(key) for key in keys], device=self._words.device)
        self._fill(index, torch.zeros_like(index))

    def move_row(self, source: int, target: int) -> None:
        """Copy one row's place in its stream to another row."""
        for tensor in (self._words, self._noise, self._start):
            tensor[target] = tensor[source]

    def at(self, positions: Tensor, width: int) -> Tensor:
        """Noise of rows 0..B-1 at ``positions`` [B] and the ``width - 1`` after each: [B, width, V].

        Positions of a row never go back, and advance by at most the width that was last asked for.
        """
        rows = self._rows[: len(positions)]
        if self._rounds_left < width:
            self._fill(rows.squeeze(1), positions)
            self._rounds_left = self.width
        self._rounds_left -= width  # the most that any row can have advanced when it asks again
        offsets = (positions - self._start[: len(positions)]).unsqueeze(1)
        return self._noise[rows, offsets + torch.arange(width, device=positions.device)]

    def _fill(self, rows: Tensor, positions: Tensor) -> None:
        steps = torch.arange(self.width, device=positions.device)
        self._start[rows] = positions
        self._noise[rows] = gumbel_rows(self._words[rows], positions.unsqueeze(1) + steps, self.vocab_size)
