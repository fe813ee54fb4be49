"""Causal attention over documents laid end to end, in one launch for all of them. Knows no layer and no batch.

Both kernels keep no scores, take heads that share keys as they are, and have a backward pass.
Shapes: ``T`` tokens of the batch, ``D`` documents, ``h`` query heads, ``g`` key-value heads, ``d`` head size.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from tlt_hpc.kernels.dispatch import has_flash_attention

VarlenKernel = Literal["flash-attn", "torch"]
_MOST_HEAD = 256
"""Largest head of FlashAttention 2."""
_LEAST_CAPABILITY = (8, 0)
"""Ampere: neither kernel runs on older GPUs."""
_LEAST_TORCH = "2.11"
"""Earlier releases have the kernel under other arguments."""


def varlen_kernel(query: Tensor) -> VarlenKernel | None:
    """The kernel for queries [T, h, d]: flash-attn if it is installed, else PyTorch's; None: neither can run.

    Both compute in half precision on a GPU alone.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if not (query.is_cuda and half and query.shape[-1] <= _MOST_HEAD):
        return None
    if torch.cuda.get_device_capability(query.device) < _LEAST_CAPABILITY:
        return None
    if has_flash_attention():
        return "flash-attn"
    return "torch" if torch.__version__ >= _LEAST_TORCH else None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], kernel: VarlenKernel, window: int = 0
) -> Tensor:
    """query [T, h, d], key and value [T, g, d] of documents of these lengths -> [T, h, d].

    ``window``: how many positions a query sees, its own included; 0: all before it.
    Source: FlashAttention 2 (Dao, 2307.08691). Its backward pass adds in no fixed order outside of
    ``kernels.deterministic_operations``.
    """
    assert sum(lengths) == len(query) and min(lengths) > 0, f"documents of {lengths} tokens in a batch of {len(query)}"
    ends, longest = cumulative_lengths(lengths, query.device), max(lengths)
    seen = (window - 1 if window else -1, 0)  # those before a query, and none after it: this is what causal means
    if kernel == "torch":
        from torch.nn.attention.varlen import varlen_attn

        # where it is no argument, heads may share keys unasked
        asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
        grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if asks else {}
        mixed = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=seen, **grouped)
        assert isinstance(mixed, Tensor)
        return mixed
    from flash_attn import flash_attn_varlen_func

    fixed = torch.are_deterministic_algorithms_enabled()
    out: Tensor = flash_attn_varlen_func(
        query, key, value, ends, ends, longest, longest, causal=True, window_size=seen, deterministic=fixed
    )
    return out


@lru_cache(maxsize=4)
def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The start of each document and the end of the last: [D + 1] int32; made once for all layers of a pass."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
