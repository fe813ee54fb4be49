"""Attention of draft trees over paged keys and values. Knows no page allocation and no layer.

Shapes: ``B`` sequences, ``N`` nodes of a tree (at most 64), ``h`` query heads, ``g`` key-value heads, ``d`` head size,
``M`` pages of a sequence. Node j's key and value stand at slot ``committed + j`` of its sequence, slot s of a sequence
at ``page_table[s // page_size]``, offset ``s % page_size``. Plain decoding is a tree of one node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_hpc.kernels.dispatch import has_flash_attention, runs_triton

MAX_NODES = 64
"""A node's ancestors are the bits of one int64."""

_FLASH_PAGE = 256
"""FlashAttention 2 reads pages of a multiple of this many slots."""


def paged_tree_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    tree_mask: Tensor,
    num_splits: int | None = None,
) -> Tensor:
    """Each node attends to the committed slots, to its ancestors and to itself.

    query [B, N, h, d], key_pages and value_pages [num_pages, page_size, g, d], page_table [B, M] int32, committed [B]
    int32, tree_mask [B, N] int64 where bit j of node i is set if node j is its ancestor or itself -> [B, N, h * d].
    A node that sees nothing gives zeros. ``num_splits`` cuts the slots of a sequence into that many programs; None
    chooses by shape. On a GPU nothing is read back, so it can be captured in a graph.
    """
    _check(query, key_pages, value_pages, page_table, committed, tree_mask)
    if not runs_triton(query):
        return paged_tree_attention_reference(query, key_pages, value_pages, page_table, committed, tree_mask)
    from tlt_hpc.kernels.programs import attention

    return attention.paged_tree_attention(query, key_pages, value_pages, page_table, committed, tree_mask, num_splits)


def flash_can_run(query: Tensor, key_pages: Tensor) -> bool:
    """Whether ``flash_tree_attention`` serves: flash-attn installed, half precision on a GPU, pages it can read."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return has_flash_attention() and query.is_cuda and half and key_pages.shape[1] % _FLASH_PAGE == 0


def flash_tree_attention(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, committed: Tensor, tree_mask: Tensor
) -> Tensor:
    """``paged_tree_attention`` with the prefix through FlashAttention 2 and the tree's block dense beside it.

    Only where ``flash_can_run``. Source: the merge of partial attentions by log-sum-exp, FlashAttention (Dao et al.).
    """
    _check(query, key_pages, value_pages, page_table, committed, tree_mask)
    from flash_attn import flash_attn_with_kvcache

    prefix, lse = flash_attn_with_kvcache(
        query, key_pages, value_pages, cache_seqlens=committed, block_table=page_table, causal=False,
        return_softmax_lse=True,
    )  # fmt: skip
    return join_prefix(query, key_pages, value_pages, page_table, committed, tree_mask, prefix, lse)


def join_prefix(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    committed: Tensor,
    tree_mask: Tensor,
    prefix: Tensor,
    prefix_lse: Tensor,
) -> Tensor:
    """Adds the tree's own block to attention over the committed slots: prefix [B, N, h, d], its lse [B, h, N].

    What the prefix holds of a sequence without committed slots is not read. -> [B, N, h * d]
    """
    B, N, h, d = query.shape
    page_size = key_pages.shape[1]
    nodes = torch.arange(N, device=query.device)
    slots = committed.long().unsqueeze(1) + nodes
    page = page_table.long().gather(1, slots // page_size)
    key, value = key_pages[page, slots % page_size], value_pages[page, slots % page_size]  # [B, N, g, d]
    visible = (tree_mask.unsqueeze(-1) >> nodes) & 1 != 0
    tree, tree_lse = _dense(query, key, value, visible)
    empty = (committed == 0).view(B, 1, 1)
    lse = prefix_lse.transpose(1, 2).masked_fill(empty, -torch.inf)
    share = torch.sigmoid(lse - tree_lse).nan_to_num().unsqueeze(-1)  # of the prefix; NaN if a node sees nothing
    merged = prefix.float().masked_fill(empty.unsqueeze(-1), 0.0) * share + tree * (1 - share)
    return merged.to(query.dtype).view(B, N, h * d)


def paged_tree_attention_reference(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, committed: Tensor, tree_mask: Tensor
) -> Tensor:
    """``paged_tree_attention`` in plain PyTorch: every sequence gathered to the longest, one dense attention."""
    B, N, h, d = query.shape
    page_size = key_pages.shape[1]
    slots = torch.arange(int(committed.max()) + N if B else 0, device=query.device)
    page = page_table[:, slots // page_size].long()
    key, value = key_pages[page, slots % page_size], value_pages[page, slots % page_size]  # [B, S, g, d]
    node = slots - committed.unsqueeze(1)  # [B, S]
    own = (tree_mask.unsqueeze(-1) >> node.clamp(0, N - 1).unsqueeze(1)) & 1 != 0
    visible = (node < 0).unsqueeze(1) | (own & (node < N).unsqueeze(1))
    return _dense(query, key, value, visible)[0].to(query.dtype).view(B, N, h * d)


def _dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """query [B, N, h, d], key and value [B, S, g, d], visible [B, N, S] -> fp32 [B, N, h, d], lse [B, N, h]."""
    B, N, h, d = query.shape
    g = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    # keys that no node sees may hold anything
    value = value.to(wide).masked_fill(~visible.any(1).view(B, -1, 1, 1), 0.0)
    grouped = query.to(wide).view(B, N, g, h // g, d)
    score = torch.einsum("bngqd,bsgd->bngqs", grouped, key.to(wide)) * d**-0.5
    score = score.masked_fill(~visible.view(B, N, 1, 1, -1), -torch.inf)
    lse = score.logsumexp(-1)
    weight = (score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("bngqs,bsgd->bngqd", weight, value).reshape(B, N, h, d), lse.view(B, N, h)


def _check(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor, committed: Tensor, tree_mask: Tensor
) -> None:
    B, N, h, d = query.shape
    g = key_pages.shape[2]
    assert key_pages.shape == value_pages.shape and key_pages.shape[3] == d and h % g == 0
    assert 1 <= N <= MAX_NODES, f"a tree of {N} nodes; a mask has {MAX_NODES} bits"
    assert committed.shape == (B,) and tree_mask.shape == (B, N) and page_table.shape[0] == B
    assert page_table.dtype == committed.dtype == torch.int32 and tree_mask.dtype == torch.int64
    assert query.stride()[2:] == (d, 1) and key_pages.stride()[2:] == value_pages.stride()[2:] == (d, 1)
    assert tree_mask.is_contiguous() and page_table.stride(1) == 1
