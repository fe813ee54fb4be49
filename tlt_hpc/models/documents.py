"""Attention of a flat batch over itself, each document on its own; without a cache, with gradients. Knows no weights.

Training packs documents end to end without padding. Short neighbours are computed together under a mask, long
ones alone without one, so the cost is that of the documents, not of the whole batch squared. On a GPU one kernel takes
all of them in half precision (``kernels.varlen``).
``PathAttention`` is for looking ahead: from every pair of a document a path of further steps, all at once, as a draft
layer takes them.
Shapes: ``T`` tokens of the batch, ``S`` paths, ``n`` tokens of a run of documents, ``h`` query heads, ``g`` key-value
heads, ``u`` query heads that share one, ``d`` head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt_hpc.kernels.varlen import varlen_attention, varlen_kernel
from tlt_hpc.models.layers import Attend

RUN_TOKENS = 128
"""Documents up to this length together are attended to in one product."""
MAX_SCORES = 1 << 24
"""Scores of a path's step in memory at once: where there are more, rows go in chunks that the backward pass repeats."""


@dataclass(frozen=True)
class _Run:
    """Neighbouring documents that are computed together: tokens ``start`` .. ``end - 1``, and which sees which."""

    start: int
    end: int
    shown: Tensor | None
    """[n, n] bool: the keys a query sees; None: one document, every key up to the query's own."""


def _split_into_runs(lengths: Sequence[int], device: torch.device) -> Iterator[_Run]:
    start = 0
    for group in _group_short_documents(lengths):
        end = start + sum(group)
        yield _Run(start, end, _document_mask(group, device) if len(group) > 1 else None)
        start = end


def _group_short_documents(lengths: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > RUN_TOKENS:
            yield group
            group = []
        group.append(length)
    if group:
        yield group


def _document_mask(group: Sequence[int], device: torch.device) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(group)), torch.tensor(group)).to(device)
    return (document.unsqueeze(0) == document.unsqueeze(1)).tril_()


def attend_documents(lengths: Sequence[int] | None, windows: Sequence[int] = ()) -> Attend:
    """Causal attention within each of the documents of these lengths (None: all tokens are one).

    ``windows``: of each layer, how many positions a query sees, its own included; 0, or none given: all before it.
    """

    def attend(layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        window = windows[layer] if windows else 0
        if (kernel := varlen_kernel(query)) is not None:
            key, value = key_value.chunk(2, 1)
            return varlen_attention(query, key, value, tuple(lengths or [len(query)]), kernel, window).flatten(1)
        runs = list(_split_into_runs(lengths or [len(query)], query.device))
        # cut at once: every slice of its own would have the backward pass add a gradient as long as the whole batch
        sizes = [run.end - run.start for run in runs]
        queries, key_values = torch.split(query, sizes), torch.split(key_value, sizes)
        each = zip(queries, key_values, (run.shown for run in runs), strict=True)
        parts = [_attend_near(q, kv, shown, window) for q, kv, shown in each]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attend


def _attend_near(query: Tensor, key_value: Tensor, shown: Tensor | None, window: int) -> Tensor:
    """``_attend`` to the last ``window`` positions; of one long document in pieces, so that no mask is n by n."""
    count = len(query)
    if not window or count <= window:
        return _attend(query, key_value, shown)
    if shown is not None:
        return _attend(query, key_value, shown.triu(1 - window))
    parts, step = [], max(window, RUN_TOKENS)
    for start in range(0, count, step):
        stop, first = min(start + step, count), max(0, start - window + 1)
        own = torch.arange(start, stop, device=query.device).unsqueeze(1)
        keys = torch.arange(first, stop, device=query.device)
        near = (keys <= own) & (keys > own - window)
        parts.append(_attend(query[start:stop], key_value[first:stop], near))
    return torch.cat(parts)


def _attend(query: Tensor, key_value: Tensor, shown: Tensor | None) -> Tensor:
    """query [n, h, d], key_value [n, 2g, d] -> [n, h d]."""
    key, value = key_value.chunk(2, 1)
    if query.is_cuda:  # in float32 the kernels that keep no scores know no shared heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, shown, is_causal=shown is None, enable_gqa=not query.is_cuda)
    return out.squeeze(0).transpose(0, 1).reshape(len(query), -1)


class PathAttention:
    """Attention of one draft layer along paths: first over all tokens, then each path over its past and itself.

    The path that starts at token s sees the first step's keys up to s in its document and its own of every later step.
    """

    def __init__(self, lengths: Sequence[int] | None) -> None:
        self._lengths = lengths
        self._first: Tensor | None = None
        self._starts = torch.empty(0, dtype=torch.int64)
        self._own: list[Tensor] = []
        """Fused keys and values [S, 2g, d] of the later steps, of the paths that are left."""

    def attend_first_step(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """An ``Attend`` over all tokens, each starting a path: query [T, h, d], key_value [T, 2g, d] -> [T, h d]."""
        self._first = key_value
        self._starts = torch.arange(len(query), device=query.device)
        return attend_documents(self._lengths)(layer, query, key_value)

    def keep_paths(self, kept: Tensor) -> None:
        """Continue with some of the S paths: ``kept`` [at most S] are their indices, int64, ascending."""
        self._starts = self._starts[kept]
        self._own = [key_value[kept] for key_value in self._own]

    def attend_next_step(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """An ``Attend`` over the next token of each path left: query [S, h, d], key_value [S, 2g, d] -> [S, h d]."""
        self._own.append(key_value)
        parts = []
        for rows, first, shown, is_part in self._chunks(query.shape[1]):
            inputs = query[rows], first, shown, *(key_value[rows] for key_value in self._own)
            again = is_part and torch.is_grad_enabled()
            parts.append(
                checkpoint(_attend_path_step, *inputs, use_reentrant=False) if again else _attend_path_step(*inputs)
            )
        return torch.cat(parts)

    def _chunks(self, num_heads: int) -> Iterator[tuple[slice, Tensor, Tensor, bool]]:
        """Paths ``rows`` of one run, the first step's keys and values [n, 2g, d] there, which of them they see [rows,
        n], and whether the run's scores would be too many at once.
        """
        assert self._first is not None, "the first step comes first"
        device = self._first.device
        for run in _split_into_runs(self._lengths or [len(self._first)], device):
            inside = torch.arange(run.end - run.start, device=device)
            shown = inside.unsqueeze(0) <= inside.unsqueeze(1) if run.shown is None else run.shown
            begin, end = torch.searchsorted(self._starts, self._starts.new_tensor([run.start, run.end])).tolist()
            most = max(1, MAX_SCORES // (num_heads * len(inside)))
            for row in range(begin, end, most):
                rows = slice(row, min(row + most, end))
                of = shown[self._starts[rows] - run.start]
                yield rows, self._first[run.start : run.end], of, end - begin > most


def _attend_path_step(query: Tensor, first: Tensor, shown: Tensor, *own: Tensor) -> Tensor:
    """query [S, h, d] over ``first`` [n, 2g, d] where ``shown`` [S, n], and each path's own [S, 2g, d] -> [S, h d]."""
    num, heads, size = query.shape
    keys, values = first.chunk(2, 1)
    own_keys, own_values = torch.stack(own, 1).chunk(2, 2)
    q = query.view(num, keys.shape[1], -1, size) * size**-0.5
    past = torch.einsum("sgud,ngd->sgun", q, keys).masked_fill(~shown[:, None, None], -torch.inf)
    weights = torch.cat([past, torch.einsum("sgud,skgd->sguk", q, own_keys)], -1).softmax(-1)
    seen, kept = weights[..., : len(keys)], weights[..., len(keys) :]
    out = torch.einsum("sgun,ngd->sgud", seen, values) + torch.einsum("sguk,skgd->sgud", kept, own_values)
    return out.reshape(num, heads * size)
