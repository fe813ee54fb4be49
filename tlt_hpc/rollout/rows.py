"""The live sequences' state, one row each, rows 0..B-1 live. Knows how rows move, not how tokens are chosen."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from tlt_hpc.records import Request

T = TypeVar("T")


class LiveRows:
    """Tokens, lengths, log-probs and (where a drafter wants them) features of the rows."""

    def __init__(
        self, num_rows: int, num_positions: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``hidden_size`` 0 keeps no features."""
        self.num_positions = num_positions
        self.tokens = torch.zeros(num_rows, num_positions, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.prompt_lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(num_rows, num_positions, device=device)
        self.features = (
            torch.zeros(num_rows, num_positions, hidden_size, dtype=dtype, device=device) if hidden_size else None
        )
        self.index = torch.arange(num_rows, device=device)
        self.requests: list[Request] = []
        self.texts: list[list[int]] = []
        """Prompt and response tokens of each live row, on the host."""
        self.num_passes: list[int] = []
        self.learned: list[int] = []
        """Tokens of each row that the n-gram table has seen."""

    @property
    def num_live(self) -> int:
        return len(self.requests)

    @property
    def capacity(self) -> int:
        return len(self.lengths)

    def add(self, requests: list[Request]) -> int:
        """Make rows for new sequences; returns the first of them."""
        first = self.num_live
        for row, request in enumerate(requests, first):
            text = request.prompt_tokens.tolist()
            self.tokens[row, : len(text)] = torch.tensor(text, device=self.tokens.device)
            self.lengths[row] = self.prompt_lengths[row] = len(text)
            self.requests.append(request)
            self.texts.append(text)
            self.num_passes.append(0)
            self.learned.append(0)
        return first

    def commit(self, chosen: Tensor, counts: Tensor, log_probs: Tensor, hidden: Tensor) -> None:
        """Append the first ``counts`` [B] of ``chosen`` [B, n]; ``hidden`` [B, n, H] are the positions that chose them.

        Columns beyond a row's count are written too: nothing reads past ``lengths``, and the next round overwrites.
        """
        num_rows, width = chosen.shape
        rows = self.index[:num_rows].unsqueeze(1)
        columns = self.lengths[:num_rows].unsqueeze(1) + self.index.new_tensor(range(width))
        self.tokens[rows, columns] = chosen
        self.log_probs[rows, columns] = log_probs
        if self.features is not None:
            self.features[rows, columns - 1] = hidden
        self.lengths[:num_rows] += counts

    def extend_texts(self, chosen: list[list[int]], counts: list[int]) -> None:
        """The host's side of ``commit``."""
        for row, count in enumerate(counts):
            self.texts[row].extend(chosen[row][:count])
            self.num_passes[row] += 1

    def remove(self, row: int) -> int | None:
        """Drop a row; the last one takes its place. Returns the row that moved, if any."""
        last = self.num_live - 1
        _drop(self.requests, row)
        _drop(self.texts, row)
        _drop(self.num_passes, row)
        _drop(self.learned, row)
        if row == last:
            return None
        length = int(self.lengths[last])
        for tensor in (self.lengths, self.prompt_lengths):
            tensor[row] = tensor[last]
        self.tokens[row, :length] = self.tokens[last, :length]
        self.log_probs[row, :length] = self.log_probs[last, :length]
        if self.features is not None:
            self.features[row, :length] = self.features[last, :length]
        return last


def _drop(values: list[T], index: int) -> None:
    """Remove an item; the last one takes its place."""
    values[index] = values[-1]
    values.pop()
