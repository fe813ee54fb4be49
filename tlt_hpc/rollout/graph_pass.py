"""The two halves of a round as static functions of device buffers, recorded as graphs: drafts, and the target's pass.

A graph of the drafter belongs to a number of rows and a strategy; one of the target, with sampling, walk and
commitment, to a number of tokens, whichever rows have them. Nothing here is read back, no shape depends on data.
Shapes: ``B`` rows of a graph, ``R`` all rows, ``T`` tokens of a pass, ``m`` columns of the longest path, ``V``
vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from tlt_hpc.kernels.graphs import GraphPool
from tlt_hpc.kernels.gumbel import GumbelChoice, gumbel_argmax
from tlt_hpc.rollout.device_cache import DevicePagedCache
from tlt_hpc.rollout.drafts import LearnedDrafts, Proposal
from tlt_hpc.rollout.ngram_drafts import NoiseAt
from tlt_hpc.rollout.noise import NoiseWindow, gumbel_number, noise_key
from tlt_hpc.rollout.sampling import lowest_kept_scores, token_log_probs
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.spans import NUM_KEPT, DraftTable, SpanLayout, Spans, flatten_drafts
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.target_pass import AcceptedPath, PassOutcome, TargetPass
from tlt_hpc.rollout.tie_guard import score_tolerances

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 16, 64)
"""Fewer rows or tokens than the last of these take about as long as it: a pass reads all weights, and the matrix unit
takes at least 16 rows at once.
"""
_SORTED_ROWS = 32


def graph_size(count: int, most: int, is_tree: bool = False) -> int:
    """The rows or tokens of the graph that serves so many, never above ``most``.

    Above 256 they are at most a quarter more, of trees, which large batches hardly use, half.
    """
    if count <= _SMALL_SIZES[-1]:
        return min(most, next(size for size in _SMALL_SIZES if size >= count))
    step = max(_SMALL_SIZES[-1], 1 << ((count - 1).bit_length() - (2 if is_tree else 3)))
    return min(most, -(-count // step) * step)


def graph_sizes(largest: int, most: int, is_tree: bool = False) -> list[int]:
    """Sizes of the graphs that serve up to ``largest``, from it down."""
    return sorted({graph_size(count, most, is_tree) for count in range(1, largest + 1)}, reverse=True)


class GraphPasses:
    """The graphs of an engine's strategies, captured on first use or ahead."""

    def __init__(
        self,
        target: TargetPass,
        cache: DevicePagedCache,
        noise: NoiseWindow,
        learned: LearnedDrafts | None,
        settings: EngineSettings,
    ) -> None:
        self._target, self._cache, self._noise, self._learned = target, cache, noise, learned
        self._rows, device = target.rows, target.decoder.device
        self._strategies, self._deepest = settings.strategies, settings.max_depth
        self._most_tokens = settings.max_pass_tokens(target.decoder.shape.vocab_size)
        self._read_width = 1 + max(strategy.depth for strategy in settings.strategies)
        """Positions that the drafter reads in its graph; whatever else it has missed must have been read before."""
        self._tolerance = torch.zeros(1, device=device)
        """The tie guard's zone of doubt in logits; 0: off."""
        self._given_tolerance = 0.0
        self._graphs, self._layout_of_widths = GraphPool(device), lru_cache(NUM_KEPT)(self._make_layout)

    @property
    def num_graphs(self) -> int:
        """Number of graphs that have been captured."""
        return len(self._graphs)

    def set_tolerance(self, tolerance: float) -> None:
        """Set the tie guard's zone of doubt in logits; 0: off."""
        if tolerance != self._given_tolerance:
            self._given_tolerance = tolerance
            self._tolerance.fill_(tolerance)

    def layout_of_drafts(self, drafts: DraftTable) -> SpanLayout:
        """The layout of all live rows, which have these drafts, filled up to a graph's size."""
        return self._layout_of_widths(tuple(drafts.widths), drafts.parents is not None)

    def _make_layout(self, widths: tuple[int, ...], is_tree: bool) -> SpanLayout:
        return self._cache.make_span_layout(widths, graph_size(sum(widths), self._most_tokens[is_tree], is_tree))

    # -- graphs -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, truncates: bool) -> None:
        """Capture all graphs now, the largest first, instead of each on its first use."""
        assert not self._rows.num_live, "a row would get what the capture runs through"
        start, device = time.perf_counter(), self._tolerance.device
        for count in graph_sizes(self._rows.capacity, self._rows.capacity):
            for strategy in sorted(self._strategies, key=lambda one: -one.widest_pass):
                if strategy.has_drafter:
                    self._draft_by_graph(torch.full((count,), self._rows.capacity, device=device), strategy)
        least = min((one.widest_pass for one in self._strategies if one.branching > 1), default=0)
        for width, largest, is_tree in (
            (least, self._most_tokens.get(True, 0), True),
            (2, self._most_tokens[False], False),
            (1, self._rows.capacity, False),
        ):
            tokens = torch.zeros(1, width, dtype=torch.int64, device=device) if width > 1 else None
            drafts = DraftTable(tokens, [width], tokens if is_tree else None)
            for count in graph_sizes(largest, self._most_tokens.get(is_tree, 0), is_tree):
                if count >= width:
                    self.verify_and_commit(drafts, self._cache.make_span_layout(drafts.widths, count), truncates)
        seconds = time.perf_counter() - start
        logger.info(
            "%d graphs captured in %.1f s: %d MiB of device memory", self.num_graphs, seconds, self.num_bytes >> 20
        )

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs take."""
        return self._graphs.num_bytes

    # -- drafts -------------------------------------------------------------------------------------------------

    def draft_rows(self, which: Sequence[int], strategy: Strategy, in_flight: int) -> Proposal:
        """The learned drafter's drafts for these rows, each of which may have got ``in_flight`` tokens that have not
        been read.
        """
        self._run_drafter_on_backlog(which, in_flight)
        missing = graph_size(len(which), self._rows.capacity) - len(which)
        padded = self._rows.index_of([*which, *[self._rows.capacity] * missing])
        return self._draft_by_graph(padded, strategy).first_rows(len(which))

    def noise_reader(self, which: Sequence[int], depth: int) -> NoiseAt:
        """Computes the noise of the next positions of these rows on the host, without a copy from the device."""
        responses = [self._rows.responses[row] for row in which]
        words = [noise_key(response.request.key) for response in responses]
        first = [response.num_response_tokens for response in responses]
        return lambda row, d, token: gumbel_number(words[row], first[row] + d, token)

    def _run_drafter_on_backlog(self, which: Sequence[int], in_flight: int) -> None:
        """Let the drafter read what its graph has no room for, of these rows.

        Rows with less to read stay out: beside a new row's prompt, or a long text that was preempted, each of them
        would repeat its last position in every pass.
        """
        assert self._learned is not None
        responses = self._rows.responses
        unread = {row: len(responses[row].text) + in_flight - 1 - responses[row].num_read for row in which}
        self._learned.note_backlog(unread.values(), self._read_width)
        late = [row for row, number in unread.items() if number > self._read_width]
        if late:
            index = self._rows.index_of(late)
            self._learned.run_on_next_positions(self._rows, index, None, max(unread.values()))
        for row in which:  # at least; what is in flight is known when it is read
            responses[row].num_read = len(responses[row].text) - 1

    def _draft_by_graph(self, which: Tensor, strategy: Strategy) -> Proposal:
        """The learned drafter's drafts for the rows ``which`` [B], by one graph."""
        learned = self._learned
        assert learned is not None, f"strategy {strategy.name} without a drafter"
        key = "draft", len(which), strategy
        out = self._graphs.capture_once_and_replay(
            key, lambda which: self._draft_captured(which, strategy), (which,), (learned.known,)
        )
        # the target's graph may use the memory of these outputs
        return Proposal(*(x.clone() for x in out))

    def _draft_captured(self, which: Tensor, strategy: Strategy) -> tuple[Tensor, ...]:
        """Tokens [B, N], scores [B], and of trees parents and cells [B, N]."""
        learned, rows = self._learned, self._rows
        assert learned is not None
        feature = learned.run_on_next_positions(rows, which, None, self._read_width)
        first = (rows.lengths - rows.starts)[which]
        pick = learned.make_picker(self._noise.words[which], first, rows.temperatures[which], strategy.sharpness)
        found = learned.draft_chain_or_tree(rows, which, None, pick, strategy, feature)
        return tuple(x for x in vars(found).values() if x is not None)

    # -- the target ---------------------------------------------------------------------------------------------

    def verify_and_commit(self, drafts: DraftTable, layout: SpanLayout, truncates: bool) -> PassOutcome:
        """Verify drafts of all live rows and commit what these accept; ``truncates``: any row's rule is top-k or top-p.

        The outcome holds until the next graph runs.
        """
        assert layout.numbers is not None and layout.token_of_slot is not None
        num_tokens, num_queries = len(layout.rows), layout.token_of_slot.shape[1]
        inputs = [layout.numbers, *flatten_drafts(drafts, layout)]
        found = self._graphs.capture_once_and_replay(
            ("verify", num_tokens, num_queries, len(inputs), truncates),
            partial(self._verify_captured, num_tokens=num_tokens, num_queries=num_queries, truncates=truncates),
            inputs,
            (self._rows.lengths,),
        )
        return PassOutcome(*found)

    def _verify_captured(
        self,
        numbers: Tensor,
        *drafts: Tensor,
        num_tokens: int,
        num_queries: int,
        truncates: bool,
    ) -> list[Tensor]:
        num_rows = len(self._rows.lengths)
        layout = SpanLayout.from_numbers(numbers, num_tokens, num_queries, num_rows, self._deepest + 1)

        def decide(spans: Spans, logits: Tensor) -> tuple[AcceptedPath, Tensor, Tensor]:
            choice = self._choose(spans, self._mask_truncated_tokens(layout.rows, logits) if truncates else logits)
            accepted = self._target.accepted_path(spans, choice.token)
            log_probs = self._log_probs(choice, layout.rows, logits, truncates)
            return accepted, log_probs[accepted.path], self._near_ties(choice, layout.rows)

        spans = self._rows.make_spans(layout, self._deepest, drafts)
        return [x for x in self._target.verify_and_commit(spans, (), decide) if x is not None]

    def _mask_truncated_tokens(self, rows: Tensor, logits: Tensor) -> Tensor:
        """Logits [T, used tokens] with -inf where a row's rule does not let it choose."""
        allowed = logits[:, : self._noise.vocab_size]
        scaled = allowed / self._temperatures(rows).unsqueeze(1)
        rules = self._rows.top_k[rows], self._rows.top_p[rows]
        # sorting takes much memory: some rows at a time
        parts = zip(*(torch.split(x, _SORTED_ROWS) for x in (scaled, *rules)), strict=True)
        kept = scaled >= torch.cat([lowest_kept_scores(*part) for part in parts])
        return allowed.masked_fill(~kept, -torch.inf)

    def _choose(self, spans: Spans, logits: Tensor) -> GumbelChoice:
        """The target's choice at each token."""
        live, rows = self._rows, spans.layout.rows
        at = live.response_positions(spans)
        return gumbel_argmax(logits, live.temperatures[rows], self._noise.words[rows], at, self._noise.vocab_size)

    def _log_probs(self, choice: GumbelChoice, rows: Tensor, logits: Tensor, truncates: bool) -> Tensor:
        """Log-probabilities [T] of the choices, before any truncation, as ``token_log_probs`` has them."""
        if not truncates:
            return choice.scaled_logit - choice.log_normaliser
        # the choice knows only what was allowed
        return token_log_probs(logits[:, : self._noise.vocab_size], choice.token, self._temperatures(rows).unsqueeze(1))

    def _near_ties(self, choice: GumbelChoice, rows: Tensor) -> Tensor:
        """Choices [T] that the tie guard must decide, as a mask."""
        zone = score_tolerances(self._tolerance, self._rows.temperatures[rows])
        return choice.best - choice.second < zone

    def _temperatures(self, rows: Tensor) -> Tensor:
        """Temperatures [T] of tokens of these rows; 1 for greedy ones."""
        temperatures = self._rows.temperatures[rows]
        return torch.where(temperatures > 0, temperatures, 1.0)
