"""The live sequences' state on the device, rows 0..B-1. Knows how rows move, not how tokens are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from tlt_hpc.rollout.sequences import Sequence


class LiveRows:
    """Tokens, lengths, log-probs and end tokens of the rows, beside the sequences that they belong to."""

    def __init__(self, num_rows: int, num_positions: int, device: torch.device) -> None:
        self.num_positions = num_positions
        self.tokens = torch.zeros(num_rows, num_positions, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(num_rows, num_positions, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.caps = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """Length at which each row's response has its last token."""
        self.ends = torch.full((num_rows, 1), -1, dtype=torch.int64, device=device)
        """End tokens of each row, filled with -1."""
        self.index = torch.arange(num_rows, device=device)
        self.sequences: list[Sequence] = []

    @property
    def num_live(self) -> int:
        return len(self.sequences)

    @property
    def capacity(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.log_probs.nbytes

    @property
    def response_lengths(self) -> list[int]:
        return [sequence.num_response for sequence in self.sequences]

    def add(self, sequence: Sequence) -> int:
        """Make a row for a sequence; returns it."""
        row, text = self.num_live, sequence.text
        device = self.tokens.device
        self.tokens[row, : len(text)] = torch.tensor(text, device=device)
        self.lengths[row] = len(text)
        self.caps[row] = sequence.prompt_length + sequence.params.max_tokens
        self._set_ends(row, sequence.end_token_ids)
        if sequence.log_probs is not None:
            self.log_probs[row, sequence.prompt_length : len(text)] = torch.from_numpy(sequence.log_probs).to(device)
            sequence.log_probs = None
        self.sequences.append(sequence)
        return row

    def _set_ends(self, row: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.ends.shape[1]:
            more = torch.full((self.capacity, len(ids) - self.ends.shape[1]), -1, device=self.ends.device)
            self.ends = torch.cat([self.ends, more], 1)
        self.ends[row] = -1
        self.ends[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64, device=self.ends.device)

    def last_tokens(self) -> Tensor:
        """The newest token [B] of each row."""
        count = self.num_live
        return self.tokens[self.index[:count], self.lengths[:count] - 1]

    def commit(self, chosen: Tensor, counts: Tensor, log_probs: Tensor) -> None:
        """Append the first ``counts`` [B] of ``chosen`` [B, n].

        Columns beyond a row's count are written too: nothing reads past ``lengths``, and the next round overwrites.
        """
        num_rows, width = chosen.shape
        rows = self.index[:num_rows].unsqueeze(1)
        columns = self.lengths[:num_rows].unsqueeze(1) + torch.arange(width, device=chosen.device)
        self.tokens[rows, columns] = chosen
        self.log_probs[rows, columns] = log_probs
        self.lengths[:num_rows] += counts

    def response_log_probs(self, row: int) -> Tensor:
        """Log-probs [R] of a row's response."""
        sequence = self.sequences[row]
        return self.log_probs[row, sequence.prompt_length : len(sequence.text)]

    def remove(self, row: int) -> int | None:
        """Drop a row; the last one takes its place. Returns the row that moved, if any."""
        last = self.num_live - 1
        self.sequences[row] = self.sequences[last]
        self.sequences.pop()
        if row == last:
            return None
        length = int(self.lengths[last])
        for tensor in (self.lengths, self.caps, self.ends):
            tensor[row] = tensor[last]
        self.tokens[row, :length] = self.tokens[last, :length]
        self.log_probs[row, :length] = self.log_probs[last, :length]
        return last
