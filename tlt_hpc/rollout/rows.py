"""The live rows on the device: their tokens and the numbers that a round reads.

Live rows are 0 to ``num_live - 1``. The last row never is: it is the padding of passes of a given size, a text of one
token that has reached its cap, so that it emits nothing.
Shapes: ``R`` rows at most, ``B`` rows of a round, ``P`` positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.spans import NUM_KEPT, SpanLayout, Spans, make_spans
from tlt_hpc.rollout.transfer import swap_rows_in_place, upload, write_number_on_device


class LiveRows:
    """Tokens [R, P] and numbers [R] of the rows on the device, with their responses. Addresses never change."""

    def __init__(
        self, num_rows: int, num_positions: int, device: torch.device, end_token_ids: Sequence[int] = ()
    ) -> None:
        self.capacity = num_rows
        """Most rows that are live."""
        num_rows += 1
        self.num_positions = num_positions
        self.tokens = torch.zeros(num_rows, num_positions, dtype=torch.int64, device=device)
        self.lengths = torch.ones(num_rows, dtype=torch.int64, device=device)
        self.caps = torch.ones(num_rows, dtype=torch.int64, device=device)
        """Length of each row's text at which its response has its last token."""
        self.starts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """Length of each row's prompt."""
        self.temperatures = torch.ones(num_rows, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_rows, device=device)
        self.log_probs = torch.zeros(num_rows, num_positions)
        """Log-probs of the tokens [R, P], on the host."""
        self.ends = torch.tensor(end_token_ids, dtype=torch.int64, device=device)
        """End tokens [e], the same for all rows."""
        self.index = torch.arange(num_rows, device=device)
        self._uploaded = lru_cache(NUM_KEPT)(partial(upload, device=device))
        self.responses: list[Response] = []

    @property
    def _tensors_by_row(self) -> tuple[Tensor, ...]:
        return self.tokens, self.lengths, self.caps, self.starts, self.temperatures, self.top_k, self.top_p

    @property
    def num_live(self) -> int:
        """Number of rows that have a sequence."""
        return len(self.responses)

    @property
    def num_bytes(self) -> int:
        """Bytes of tokens and log-probs."""
        return self.tokens.nbytes + self.log_probs.nbytes

    @property
    def response_lengths(self) -> list[int]:
        """Response tokens so far, of each live row."""
        return [response.num_response_tokens for response in self.responses]

    def add(self, response: Response) -> int:
        """Make a row for a sequence; returns it."""
        row, text, device = self.num_live, response.text, self.tokens.device
        self.tokens[row, : len(text)] = upload(text, device)
        write_number_on_device(self.lengths, row, len(text))
        write_number_on_device(self.caps, row, response.longest)
        write_number_on_device(self.starts, row, response.prompt_length)
        write_number_on_device(self.temperatures, row, response.rule.temperature)
        write_number_on_device(self.top_k, row, response.rule.top_k)
        write_number_on_device(self.top_p, row, response.rule.top_p)
        if response.log_probs is not None:
            self.log_probs[row, response.prompt_length : len(text)] = torch.from_numpy(response.log_probs)
            response.log_probs = None
        self.responses.append(response)
        response.row = row
        return row

    def last_tokens(self, which: Tensor) -> Tensor:
        """The newest token [B] of each of the rows ``which`` [B]."""
        return self.tokens[which, self.lengths[which] - 1]

    def make_spans(self, layout: SpanLayout, deepest: int, drafts: Sequence[Tensor]) -> Spans:
        """The spans of ``flatten_drafts``; without any the last tokens alone."""
        return make_spans(layout, self.lengths, deepest, *(drafts or [self.last_tokens(layout.rows)]))

    def response_positions(self, spans: Spans) -> Tensor:
        """Position [T] in its row's response of the token that the target chooses at each node."""
        return spans.positions + 1 - self.starts[spans.layout.rows]

    def index_of(self, which: Sequence[int]) -> Tensor:
        """Rows as an index [B]."""
        if which[-1] == len(which) - 1:  # they ascend, up to repetitions of the spare row: these are the first
            return self.index[: len(which)]
        return self._uploaded(tuple(which))

    def append_tokens(self, chosen: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` [B] of ``chosen`` [B, n].

        Columns beyond a row's count are written too: nothing reads past ``lengths``, and the next round overwrites.
        """
        num_rows, width = chosen.shape
        columns = self.lengths[:num_rows].unsqueeze(1) + torch.arange(width, device=chosen.device)
        self.tokens[self.index[:num_rows].unsqueeze(1), columns] = chosen
        self.lengths[:num_rows] += counts

    def write_log_probs(self, log_probs: Tensor, kept: Sequence[tuple[int, int, int, int]]) -> None:
        """Note log-probs [B, m] of new tokens; ``kept``: which of them, for which row, from where on, and how many."""
        held, new = self.log_probs.numpy(), log_probs.numpy()
        for which, row, start, count in kept:
            held[row, start : start + count] = new[which, :count]

    def response_log_probs(self, row: int) -> Tensor:
        """Log-probs [R] of a row's response."""
        response = self.responses[row]
        return self.log_probs[row, response.prompt_length : len(response.text)]

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        responses = self.responses
        responses[one], responses[other] = responses[other], responses[one]
        responses[one].row, responses[other].row = one, other
        for tensor in (*self._tensors_by_row, self.log_probs):
            swap_rows_in_place(tensor, one, other)

    def remove_last(self) -> None:
        """Drop the last row, which is padding from now on."""
        self.responses.pop().row = -1
        write_number_on_device(self.lengths, self.num_live, 1)
        write_number_on_device(self.caps, self.num_live, 1)
