"""Triton programs for the counter-based noise and for Gumbel-max over the vocabulary, in blocks and then across them.

Shapes: ``R`` rows, ``V`` vocabulary. Philox4x32-10 gives four columns a counter; columns of one counter stay in one
thread, so that logits are read in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Columns of one program: small enough that one row of a 152k vocabulary fills a GPU."""


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 values."""
    for _ in tl.static_range(10):
        left = tl.umulhi(c0, 0xD2511F53)
        right = tl.umulhi(c2, 0xCD9E8D57)
        left_low = c0 * 0xD2511F53
        right_low = c2 * 0xCD9E8D57
        c0 = right ^ c1 ^ k0
        c2 = left ^ c3 ^ k1
        c1 = right_low
        c3 = left_low
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(k):
    """-log(-log1p(-w)), w = (k + 0.5) / 2**32, to a few units in the last place of float32 at both tails.

    t is w or 1 - w, whichever is at most a half, so that it keeps its digits. -log1p(-t) is 2 atanh(t / (2 - t)) as a
    series, whose argument is at most a third; -log1p(-(1 - t)) is -log(t).
    """
    t = (tl.minimum(k, k ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    s = t / (2.0 - t)
    q = s * s
    series = 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    series = series * q + 1.0
    return -tl.log(tl.where(k < 0x80000000, 2.0 * s * series, -tl.log(t)))


@triton.jit
def _gumbel_of_words(bits, out, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + index, mask=index < count, other=0).to(tl.uint32)
    tl.store(out + index, _gumbel(word), mask=index < count)


@triton.jit
def _row_noise(words, positions, row, first_counter, BLOCK: tl.constexpr):
    """Noise of the BLOCK columns from 4 * first_counter on."""
    k0 = tl.load(words + row * 4).to(tl.uint32)
    k1 = tl.load(words + row * 4 + 1).to(tl.uint32)
    c2 = tl.load(words + row * 4 + 2).to(tl.uint32)
    c3 = tl.load(words + row * 4 + 3).to(tl.uint32)
    counter = (first_counter + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    same = counter & 0
    l0, l1, l2, l3 = _philox(counter, same + tl.load(positions + row).to(tl.uint32), same + c2, same + c3,
                             same + k0, same + k1)  # fmt: skip
    return _gumbel(tl.interleave(tl.interleave(l0, l2), tl.interleave(l1, l3)))


@triton.jit
def _noise(words, positions, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    column = first + tl.arange(0, BLOCK)
    noise = _row_noise(words, positions, row, first // 4, BLOCK)
    tl.store(out + row * num_columns + column, noise, mask=column < num_columns)


@triton.jit
def _noise_of_columns(words, positions, columns, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns + index, mask=index < num_columns, other=0)
    counter = (column // 4).to(tl.uint32)
    lane = column % 4
    same = counter & 0
    l0, l1, l2, l3 = _philox(
        counter,
        same + tl.load(positions + row).to(tl.uint32),
        same + tl.load(words + row * 4 + 2).to(tl.uint32),
        same + tl.load(words + row * 4 + 3).to(tl.uint32),
        same + tl.load(words + row * 4).to(tl.uint32),
        same + tl.load(words + row * 4 + 1).to(tl.uint32),
    )
    bits = tl.where(lane < 2, tl.where(lane == 0, l0, l1), tl.where(lane == 2, l2, l3))
    tl.store(out + row * num_columns + index, _gumbel(bits), mask=index < num_columns)


@triton.jit
def _block_choice(logits, temperature, words, positions, floats, tokens, row_stride, num_columns, num_tokens,
                  num_blocks, BLOCK: tl.constexpr):  # fmt: skip
    """The two best scores of one block of one row, the best one's column and scaled logit, and its share of the sum."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_tokens
    # bounded by the padded width, which is a multiple of 16 where num_tokens is not: the loads are 16 bytes wide
    scaled = tl.load(logits + row * row_stride + column, mask=column < num_columns, other=0.0).to(tl.float32)
    scaled = tl.where(inside, scaled, float("-inf"))
    heat = tl.load(temperature + row)
    score = scaled
    if heat > 0:
        scaled = tl.div_rn(scaled, heat)
        score = scaled + _row_noise(words, positions, row, block * (BLOCK // 4), BLOCK)
    best = tl.max(score, 0)
    token = tl.min(tl.where((score == best) & inside, column, num_tokens - 1), 0)
    second = tl.max(tl.where(column == token, float("-inf"), score), 0)
    highest = tl.max(scaled, 0)
    floor = tl.where(highest == float("-inf"), 0.0, highest)
    place = row * num_blocks + block
    stride = tl.num_programs(1).to(tl.int64) * num_blocks
    tl.store(tokens + place, token)
    tl.store(floats + place, best)
    tl.store(floats + stride + place, second)
    tl.store(floats + 2 * stride + place, tl.sum(tl.where(column == token, scaled, 0.0), 0))
    tl.store(floats + 3 * stride + place, highest)
    tl.store(floats + 4 * stride + place, tl.sum(tl.exp(scaled - floor), 0))


@triton.jit
def _join_blocks(floats, tokens, chosen, results, num_blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    place = row * num_blocks + block
    stride = num_rows * num_blocks
    bests = tl.load(floats + place, mask=inside, other=float("-inf"))
    seconds = tl.load(floats + stride + place, mask=inside, other=float("-inf"))
    best = tl.max(bests, 0)
    winner = tl.min(tl.where((bests == best) & inside, block, num_blocks - 1), 0)
    second = tl.max(tl.where(block == winner, seconds, bests), 0)
    highests = tl.load(floats + 3 * stride + place, mask=inside, other=float("-inf"))
    sums = tl.load(floats + 4 * stride + place, mask=inside, other=0.0)
    highest = tl.max(highests, 0)
    floor = tl.where(highest == float("-inf"), 0.0, highest)
    # a block without a finite logit has the sum 0 at the floor 0; NaN in any block must reach the result
    floors = tl.where(highests == float("-inf"), floor, highests)
    total = tl.sum(sums * tl.exp(floors - floor), 0)
    tl.store(chosen + row, tl.load(tokens + row * num_blocks + winner).to(tl.int64))
    tl.store(results + row, best)
    tl.store(results + num_rows + row, second)
    tl.store(results + 2 * num_rows + row, floor + tl.log(total))
    tl.store(results + 3 * num_rows + row, tl.load(floats + 2 * stride + row * num_blocks + winner))


def gumbel_of_words(bits: Tensor) -> Tensor:
    """Noise of given 32-bit words [n] int64, float32 [n]: for checks of the tails, which samples hardly reach."""
    out = torch.empty(len(bits), dtype=torch.float32, device=bits.device)
    _gumbel_of_words[(triton.cdiv(len(bits), _BLOCK),)](bits, out, len(bits), _BLOCK)
    return out


def gumbel_noise(words: Tensor, positions: Tensor, num_columns: int) -> Tensor:
    """words [R, 4], positions [R] -> noise of columns 0..num_columns-1, [R, num_columns] float32."""
    R = len(words)
    out = torch.empty((R, num_columns), dtype=torch.float32, device=words.device)
    if R:
        _noise[(triton.cdiv(num_columns, _BLOCK), R)](words, positions, out, num_columns, _BLOCK)
    return out


def gumbel_noise_of_columns(words: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """words [R, 4], positions [R], columns [C] -> noise of those columns, [R, C] float32."""
    R, C = len(words), len(columns)
    out = torch.empty((R, C), dtype=torch.float32, device=words.device)
    if R:
        _noise_of_columns[(triton.cdiv(C, _BLOCK), R)](words, positions, columns, out, C, _BLOCK)
    return out


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, words: Tensor, positions: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64, and [4, R] float32: best score, second, log-normaliser, chosen scaled logit.

    Arguments as ``kernels.gumbel.gumbel_argmax``.
    """
    R = len(logits)
    num_blocks = triton.cdiv(num_tokens, _BLOCK)
    floats = torch.empty((5, R, num_blocks), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((R, num_blocks), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(R, dtype=torch.int64, device=logits.device)
    results = torch.empty((4, R), dtype=torch.float32, device=logits.device)
    if R:
        _block_choice[(num_blocks, R)](
            logits,
            temperature,
            words,
            positions,
            floats,
            tokens,
            logits.stride(0),
            logits.shape[1],
            num_tokens,
            num_blocks,
            _BLOCK,
        )
        _join_blocks[(R,)](floats, tokens, chosen, results, num_blocks, triton.next_power_of_2(num_blocks))
    return chosen, results
