"""A round's passes step by step, with the tie guard: on a host always, on a device where a graph cannot decide.

Shapes: ``T`` tokens of a pass, ``B`` rows, ``m`` columns of the longest path, ``V`` vocabulary, ``D`` depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tlt_hpc.rollout.drafts import LearnedDrafts, Proposal
from tlt_hpc.rollout.ngram_drafts import NoiseAt, make_noise_reader
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.sampling import choose_tokens_by_rule, token_log_probs
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.spans import NUM_KEPT, DraftTable, SpanLayout, Spans, flatten_drafts
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.target_pass import AcceptedPath, PassOutcome, TargetPass
from tlt_hpc.rollout.tie_guard import TieGuard


@dataclass
class EagerPasses:
    """The drafter's passes and the target's, whose near-ties the guard decides at once."""

    target: TargetPass
    scheduler: Scheduler
    noise: NoiseWindow
    guard: TieGuard
    learned: LearnedDrafts | None

    def __post_init__(self) -> None:
        self.layout_of_widths = lru_cache(NUM_KEPT)(self.target.cache.make_span_layout)
        """The layout of a pass over all live rows, whose spans have these widths (a tuple)."""

    # -- drafts -------------------------------------------------------------------------------------------------

    def draft_rows(self, which: Sequence[int], strategy: Strategy) -> Proposal:
        """The learned drafter's drafts for these rows."""
        assert self.learned is not None, f"strategy {strategy.name} without a drafter"
        noise = self._noise_of_next_positions(which, strategy.depth)
        layout = self.scheduler.layout_of_rows(tuple(which))
        return self.learned.propose(self.scheduler.rows, which, layout, noise, strategy)

    def noise_reader(self, which: Sequence[int], depth: int) -> NoiseAt:
        """Reads the noise of the next positions of these rows on the host."""
        return make_noise_reader(self._noise_of_next_positions(which, depth))

    def _noise_of_next_positions(self, which: Sequence[int], depth: int) -> Tensor:
        """Noise [B, D, V] of the next positions of these rows."""
        rows = self.scheduler.rows
        self.noise.prepare(rows.response_lengths, depth)
        index = rows.index_of(which)
        positions = (rows.lengths - rows.starts)[index].unsqueeze(1) + torch.arange(depth, device=index.device)
        noise = self.noise.noise_at(index.unsqueeze(1).expand_as(positions).flatten(), positions.flatten())
        return noise.view(*positions.shape, -1)

    # -- the target ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify_and_commit(
        self, drafts: DraftTable, layout: SpanLayout, is_guarded: bool, mark: Callable[[], None] = lambda: None
    ) -> PassOutcome:
        """Verify drafts of all live rows and commit what these accept; ``mark`` is called between pass and choice."""
        rows = self.scheduler.rows

        def decide(spans: Spans, logits: Tensor) -> tuple[AcceptedPath, Tensor, None]:
            mark()
            self.noise.prepare(rows.response_lengths, drafts.deepest + 1)
            accepted, choices = self._accept(spans, logits, is_guarded)
            used, heat = logits[:, : self.noise.vocab_size], rows.temperatures
            if not spans.is_tree:
                return accepted, token_log_probs(used, choices, heat[layout.rows].unsqueeze(1))[accepted.path], None
            # most nodes are not on the path
            heat = heat[: layout.num_rows].view(-1, 1, 1)
            return accepted, token_log_probs(used[accepted.path], accepted.chosen, heat), None

        spans = rows.make_spans(layout, drafts.deepest, flatten_drafts(drafts, layout))
        layouts = [self.scheduler.layout_of_rows(group.rows) for group in layout.groups]
        return self.target.verify_and_commit(spans, layouts, decide)

    def _accept(self, spans: Spans, logits: Tensor, is_guarded: bool) -> tuple[AcceptedPath, Tensor]:
        """The path along the target's own choices [T], of which near-ties on it are decided canonically."""
        rows, at = self.scheduler.rows, spans.layout.rows
        rules = [response.rule for response in rows.responses]
        noise = self.noise.noise_at(at, rows.response_positions(spans))
        tolerated = self.guard.logit_tolerance
        choice = choose_tokens_by_rule(logits, noise, rules, at, self.guard.score_tolerance)
        choices, doubtful = choice.token, choice.doubtful
        decided = torch.zeros_like(doubtful)
        while True:
            accepted = self.target.accepted_path(spans, choices)
            if not is_guarded or not bool(doubtful.any()):
                return accepted, choices
            ties = (doubtful & ~decided)[accepted.path] & accepted.is_emitted
            if not bool(ties.any()):
                return accepted, choices
            # one tie a row at a time: its decision tells which later positions are reached at all
            for row in ties.any(1).nonzero().flatten().tolist():
                column = int(ties[row].long().argmax())
                node = int(accepted.path[row, column])
                prefix = torch.cat(
                    [rows.tokens[row, : rows.lengths[row]], spans.tokens[accepted.path[row, 1 : column + 1]]]
                )
                choices[node] = self.guard.decide_token_in_float64(prefix, noise[node], logits[node], rules[row])
                decided[node] = True
            if self.guard.logit_tolerance > tolerated:
                tolerated = self.guard.logit_tolerance
                doubtful = choose_tokens_by_rule(logits, noise, rules, at, self.guard.score_tolerance).doubtful
