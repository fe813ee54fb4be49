"""The noise of the live rows: the only source of randomness of a response. ``kernels.gumbel`` defines it."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.common.records import SampleKey
from tlt_hpc.kernels.gumbel import gumbel_noise, gumbel_noise_reference, philox
from tlt_hpc.rollout.transfer import swap_rows_in_place, upload

logger = logging.getLogger(__name__)


def noise_key(key: SampleKey) -> tuple[int, int, int, int]:
    """Four 32-bit words that identify a sample: the key of Philox (two) and the upper half of its counter (two)."""
    packed = struct.pack("<5q", key.seed, key.stream, key.step, key.draw, key.sample)
    words = struct.unpack("<4I", hashlib.sha256(packed).digest()[:16])
    return words[0], words[1], words[2], words[3]


def gumbel_number(words: Sequence[int], position: int, token: int) -> float:
    """One number of the noise, on the host: for the few that a lookup among n-grams asks for."""
    lanes = philox((token // 4, position, words[2], words[3]), (words[0], words[1]))
    return -math.log(-math.log1p(-(lanes[token % 4] + 0.5) * 2.0**-32))


_COMPILED_FROM = 16_384
"""Vocabularies from this size on are worth the ten seconds that a compiler takes for the fused loop (five times as fast
on a CPU, and the same bits: tests/test_noise.py).
"""


@cache
def _compiled_noise_function(vocab_size: int) -> Callable[[Tensor, Tensor, int], Tensor]:
    """The function that makes the noise: one fused loop, or the usual operations without a compiler that works."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return gumbel_noise_reference
    from torch._dynamo.exc import BackendCompilerFailed  # takes seconds to import

    fused: Callable[[Tensor, Tensor, int], Tensor] = torch.compile(gumbel_noise_reference, dynamic=True)
    try:
        fused(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), vocab_size)  # compiles it
    except BackendCompilerFailed as error:
        lines = [line.strip() for line in str(error.inner_exception).splitlines() if line.strip()]
        logger.warning(
            "%s does not compile the noise, which takes five times as long without; set CXX to another compiler, or "
            "TORCHINDUCTOR_CACHE_DIR to an empty folder: %s",
            compiler, next((line for line in lines if "error:" in line), "".join(lines[-1:])),
        )  # fmt: skip
        return gumbel_noise_reference

    def padded(words: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """A single row is padded to two, since one would be compiled separately."""
        if len(words) > 1:
            return fused(words, positions, vocab_size)
        return fused(words.repeat(2, 1), positions.repeat(2), vocab_size)[:1]

    return padded


def _compiled_gumbel_noise(words: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    return _compiled_noise_function(vocab_size)(words, positions, vocab_size)  # compiled at the first call


class NoiseWindow:
    """Noise of the next positions of every live row, generated once, and in blocks since a call is expensive.

    A ring by position: row b's noise of position t is at ``t % width``, as long as t is among its next ``width``.
    """

    _MAX_WIDTH = 32
    _BLOCK_NUMBERS = 1 << 15
    _CALL_NUMBERS = 1 << 21
    """Numbers of one call at most: its temporaries are a hundred bytes each."""

    def __init__(self, num_rows: int, vocab_size: int, least_width: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.width = max(least_width, min(self._MAX_WIDTH, self._BLOCK_NUMBERS // vocab_size))
        self.words = torch.zeros(num_rows, 4, dtype=torch.int64, device=device)
        """``noise_key`` of each row's sample."""
        self._ring: Tensor | None = None
        self._rows_of = _compiled_gumbel_noise if vocab_size >= _COMPILED_FROM else gumbel_noise_reference
        self._made = [0] * num_rows
        """Each row's first position without noise yet."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring, from its first use on; 0 where kernels generate the noise themselves."""
        return 0 if self.words.is_cuda else 4 * len(self.words) * self.width * self.vocab_size

    @property
    def _noise_ring(self) -> Tensor:
        """[R * width, V], allocated on first use: not at all where kernels generate the noise themselves."""
        if self._ring is None:
            with torch.inference_mode(False):  # rows are moved outside of it
                self._ring = torch.zeros(len(self.words) * self.width, self.vocab_size, device=self.words.device)
        return self._ring

    def set_row(self, row: int, key: SampleKey, position: int) -> None:
        """Give a row to a sample whose next response position is ``position``."""
        self.words[row] = upload(noise_key(key), self.words.device)
        self._made[row] = position

    def swap_rows(self, one: int, other: int) -> None:
        """Exchange two rows' places in their streams."""
        swap_rows_in_place(self.words, one, other)
        if self._ring is not None:
            swap_rows_in_place(self._ring.view(-1, self.width, self.vocab_size), one, other)
        self._made[one], self._made[other] = self._made[other], self._made[one]

    def prepare(self, positions: Sequence[int], width: int) -> None:
        """Have the noise of rows 0..B-1 at ``positions`` and the ``width - 1`` after each.

        Positions of a row never go back.
        """
        assert width <= self.width
        if self.words.is_cuda:  # there a call is cheap, and a ring over a wide vocabulary would take a gigabyte
            return
        if any(made < position + width for made, position in zip(self._made, positions, strict=False)):
            self._generate_missing_noise(np.asarray(positions, dtype=np.int64))

    def noise_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Noise [T, V] of rows [T] at positions [T] that have been prepared."""
        if self.words.is_cuda:
            return gumbel_noise(self.words[rows], positions, self.vocab_size)
        return self._noise_ring[rows * self.width + positions % self.width]

    def _generate_missing_noise(self, start: NDArray[np.int64]) -> None:
        """Make what the rows' next ``width`` positions still lack."""
        first = np.maximum(np.array(self._made[: len(start)], dtype=np.int64), start)
        counts = start + self.width - first
        row = np.repeat(np.arange(len(start)), counts)
        within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        position = np.repeat(first, counts) + within
        most = max(1, self._CALL_NUMBERS // self.vocab_size)
        for begin in range(0, len(row), most):
            self._write_noise_to_ring(row[begin : begin + most], position[begin : begin + most])
        self._made[: len(start)] = (start + self.width).tolist()

    def _write_noise_to_ring(self, row: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        device = self._noise_ring.device
        words = self.words[torch.from_numpy(row).to(device)]
        noise = self._rows_of(words, torch.from_numpy(position).to(device), self.vocab_size)
        target = torch.from_numpy(row * self.width + position % self.width).to(device)
        self._noise_ring.index_copy_(0, target, noise)
