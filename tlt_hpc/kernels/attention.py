"""Attention of chains and draft trees over paged keys and values. Knows no page allocation and no layer.

A query's result has the same bits in every pass: alone, among drafts, in a chunk of a prompt, as a node of a tree.
Shapes: ``B`` sequences, ``N`` queries of each, ``T`` tokens, ``h`` query heads, ``g`` key-value heads, ``d`` head size,
``M`` pages of a sequence, ``W`` nodes of the longest path. Slot s of a sequence is in page ``page_table[s //
page_size]`` at offset ``s % page_size``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_hpc.kernels.dispatch import runs_triton

MAX_QUERIES = 64
"""Queries that a call takes of a sequence, so that few programs are compiled."""
_ROWS_WITHOUT_TRITON = 16
PARTIAL_BYTES = 2**29
"""Most memory that a call takes on a GPU, for partial results of spans; with more sequences it takes some at a time."""


def rows_of_tile(query: Tensor) -> int:
    """Rows (queries times the query heads of a key-value head) that a program takes at once, of queries [..., d]."""
    if not runs_triton(query):
        return _ROWS_WITHOUT_TRITON
    from tlt_hpc.kernels.programs import attention

    return attention.tile_of(query).rows


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    seen: Tensor,
    tokens: Tensor,
    paths: Tensor | None = None,
    by_span: bool | None = None,
    window: int = 0,
) -> Tensor:
    """Attend from each query to the committed slots, and to the first ``seen`` ones after them or on its path.

    query [T, h, d], key_pages and value_pages [num_pages, page_size, g, d], page_table [B, M] int32, committed [B]
    int32, seen and tokens [B, N] int32, paths [B, N, W] int32: in a tree, query i sees the slots ``committed +
    paths[i, t]`` for t < seen[i]; without paths ``committed + t`` -> [T, h * d]. The query of sequence b at place i is
    that of token ``tokens[b, i]``, and there is none where ``seen`` is -1; each token is one's.
    With a ``window`` above 0 a query sees the last so many of these alone. One that sees nothing gives zeros.
    A query of a chain sees at most N slots beyond the committed ones, one of a tree at most W.
    ``by_span``: programs share the spans of all sequences rather than each reading a sequence; None chooses by shape.
    On a GPU nothing is read back, so it can be captured in a graph.
    """
    (B, N), (_, h, d) = seen.shape, query.shape
    assert N <= MAX_QUERIES and key_pages.shape == value_pages.shape and key_pages.shape[3] == d
    assert h % key_pages.shape[2] == 0 and tokens.shape == seen.shape
    assert seen.is_contiguous() and tokens.is_contiguous()
    assert committed.shape == (B,) == page_table.shape[:1]
    assert page_table.dtype == committed.dtype == seen.dtype == tokens.dtype == torch.int32
    assert paths is None or (paths.shape[:2] == (B, N) and paths.dtype == torch.int32 and paths.is_contiguous())
    assert query.stride()[1:] == key_pages.stride()[2:] == value_pages.stride()[2:] == (d, 1)
    if not runs_triton(query):
        given = query, key_pages, value_pages, page_table, committed, seen, tokens, paths
        return paged_attention_reference(*given, window)
    from tlt_hpc.kernels.programs import attention

    given = query, key_pages, value_pages, page_table, committed, seen, tokens, paths
    return attention.paged_attention(*given, by_span, window, PARTIAL_BYTES)


def paged_attention_reference(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    seen: Tensor,
    tokens: Tensor,
    paths: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """``paged_attention`` in plain PyTorch: all sequences gathered to the longest, in float64 for half precision.

    Arguments and result as ``paged_attention``.
    """
    (B, N), (_, h, d) = seen.shape, query.shape
    page_size, g = key_pages.shape[1], key_pages.shape[2]
    longest = int((committed + seen.amax(1)).max()) if B and N else 0
    place = torch.arange(longest, device=query.device)
    own = place - committed.unsqueeze(1)  # [B, S]
    slots = place.expand(B, 1, -1)
    if paths is not None:
        node = paths.long().gather(2, own.clamp(0, paths.shape[2] - 1).unsqueeze(1).expand(-1, N, -1))
        slots = torch.where(own.unsqueeze(1) < 0, place, committed.view(B, 1, 1) + node)
    inside = own < seen.amax(1, keepdim=True) if N else own < 0
    slots = torch.where(inside.unsqueeze(1), slots, 0)
    pages = page_table.long().unsqueeze(1).expand(-1, slots.shape[1], -1).gather(2, slots // page_size)
    visible = (own.unsqueeze(1) < seen.unsqueeze(2)) & (seen >= 0).unsqueeze(2)  # [B, N, S]
    if window:
        visible &= own.unsqueeze(1) >= seen.unsqueeze(2) - window
    wide = torch.float64 if query.dtype.itemsize < 4 else query.dtype
    key, value = (
        pool[pages, slots % page_size].masked_fill(~inside.view(B, 1, -1, 1, 1), 0).to(wide)
        for pool in (key_pages, value_pages)
    )  # [B, 1 or N, S, g, d]; slots beyond may hold NaN
    grouped = query[tokens].view(B, N, g, -1, d).to(wide)
    if paths is None:
        score = torch.einsum("bngrd,bsgd->bngrs", grouped, key[:, 0]) * d**-0.5
    else:
        score = torch.einsum("bngrd,bnsgd->bngrs", grouped, key) * d**-0.5
    score = score.masked_fill(~visible.view(B, N, 1, 1, -1), -torch.inf)
    weights = score.softmax(-1).nan_to_num()
    if paths is None:
        mixed = torch.einsum("bngrs,bsgd->bngrd", weights, value[:, 0])
    else:
        mixed = torch.einsum("bngrs,bnsgd->bngrd", weights, value)
    out, real = query.new_zeros(len(query), h * d), seen >= 0
    out[tokens[real]] = mixed.to(query.dtype).reshape(B, N, h * d)[real]
    return out
