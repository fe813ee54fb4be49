"""Keys and values of the live sequences, behind one attention call over a flat token batch. Knows no sampling.

Live sequences occupy rows 0..B-1, so that a pass reads them as a view. A query sees the positions up to its own;
what lies beyond (rejected drafts, a finished row's remains) is overwritten before anything can see it, so nothing is
ever cleared. Paging replaces ``attend`` and ``move_row`` alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.models.layers import Attend
from tlt_hpc.models.shape import ModelShape

_ROUND_LENGTH = 16
"""Key lengths are rounded up to this, so that few shapes occur."""


class KVCache:
    """Keys and values [layers][rows, positions, g, d]."""

    def __init__(
        self,
        shape: ModelShape,
        num_rows: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        num_layers: int | None = None,
    ) -> None:
        self.num_positions = -(-num_positions // _ROUND_LENGTH) * _ROUND_LENGTH
        self._groups = shape.num_heads // shape.num_kv_heads
        self._kv_shape = (num_rows, self.num_positions, shape.num_kv_heads, shape.head_dim)
        count = shape.num_layers if num_layers is None else num_layers
        size = (count, num_rows * self.num_positions, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(size, dtype=dtype, device=device)
        self._values = torch.zeros(size, dtype=dtype, device=device)

    def attend(self, positions: Tensor, first_row: int = 0) -> Attend:
        """Attention over rows from ``first_row`` on, with tokens at ``positions`` [B, n]; stores keys and values."""
        num_rows, width = positions.shape
        after = first_row + num_rows
        _, stride, g, d = self._kv_shape
        longest = min(stride, -(-(int(positions.max()) + 1) // _ROUND_LENGTH) * _ROUND_LENGTH)
        rows = torch.arange(first_row, after, device=positions.device).unsqueeze(1)
        index = (rows * stride + positions).flatten()
        unseen = torch.arange(longest, device=positions.device) > positions.unsqueeze(-1)  # [B, n, K]
        mask = torch.zeros(unseen.shape, dtype=self._keys.dtype, device=positions.device).masked_fill_(
            unseen, -torch.inf
        )
        # the query heads that share a key head are laid out as further queries: no key is read twice
        mask = mask.unsqueeze(1).expand(-1, self._groups, -1, -1).reshape(num_rows, 1, self._groups * width, longest)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys.index_copy_(0, index, key)
            values.index_copy_(0, index, value)
            k = keys.view(self._kv_shape)[first_row:after, :longest].transpose(1, 2)
            v = values.view(self._kv_shape)[first_row:after, :longest].transpose(1, 2)
            q = query.reshape(num_rows, width, g, self._groups, d).permute(0, 2, 3, 1, 4)
            out = F.scaled_dot_product_attention(q.reshape(num_rows, g, self._groups * width, d), k, v, mask)
            out = out.view(num_rows, g, self._groups, width, d).permute(0, 3, 1, 2, 4)
            return out.reshape(num_rows * width, g * self._groups * d)

        return attend

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one row over another row."""
        stride = self.num_positions
        for tensor in (self._keys, self._values):
            tensor[:, target * stride : target * stride + length] = tensor[
                :, source * stride : source * stride + length
            ]
