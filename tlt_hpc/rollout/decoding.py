"""One round of the live rows: draft, verify in one target pass, accept the path that the target itself would take.

Every emitted token is the target's own sample at its position (method, section 2): what is drafted decides how many
come at once, never which. Each row has a span of its own length in the pass. Knows no queue, no page and no request.
Shapes: ``T`` tokens of a pass, ``B`` rows, ``N`` nodes of the widest span, ``m`` columns of the longest path, ``V``
vocabulary, ``H`` hidden.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.drafts import LearnedDrafts, Proposal
from tlt_hpc.rollout.ngram_drafts import NgramDrafts, NoiseAt, make_noise_reader
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rounds import PhaseSeconds, RoundPlan, RoundResult
from tlt_hpc.rollout.sampling import choose_tokens_by_rule, token_log_probs
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.spans import (
    DraftTable,
    LayoutCache,
    SpanLayout,
    Spans,
    group_by_width,
    make_draft_chains,
    make_span_layout,
    make_spans,
    replace_rows,
)
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.target_pass import AcceptedPath, TargetPass
from tlt_hpc.rollout.tie_guard import TieGuard

logger = logging.getLogger(__name__)


@dataclass
class HostRounds:
    """Rounds on a host: each has been read when it is launched."""

    decoder: Decoder
    scheduler: Scheduler
    noise: NoiseWindow
    guard: TieGuard
    learned: LearnedDrafts | None
    ngram: NgramDrafts
    drafter_is_sound: bool = True

    def __post_init__(self) -> None:
        layers = self.learned.drafter.feature_layers if self.learned else ()
        self.target = TargetPass(self.decoder, self.scheduler.rows, self.scheduler.cache, layers)
        self._done: deque[RoundResult] = deque()
        self._layouts = LayoutCache()

    # -- what a device adds -------------------------------------------------------------------------------------

    @property
    def is_guarded(self) -> bool:
        """True if near-ties count: texts that are generated ahead are drafts, which need not be exact."""
        return self.guard.active and not self.scheduler.rows.responses[0].is_ahead

    def overlaps(self, strategy: Strategy) -> bool:
        """True if a round of this strategy may be launched before the round before it is read."""
        return False

    def capture(self, truncates: bool) -> None:
        """Record ahead what can be replayed: nothing here."""

    @property
    def graph_bytes(self) -> int:
        """Device memory of captured graphs."""
        return 0

    @property
    def num_in_flight(self) -> int:
        """Rounds that were launched and have not been read."""
        return len(self._done)

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that a row may have got in rounds that have not been read."""
        return 0

    def finish_oldest_round(self) -> RoundResult:
        """Wait for the oldest round under way, and append its tokens to the texts."""
        return self._done.popleft()

    # -- a round ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: RoundPlan) -> None:
        """Draft, verify, accept, commit."""
        rows, clock, phases = self.scheduler.rows, _Clock(), PhaseSeconds()
        responses, num_guarded = list(rows.responses), self.guard.num_guarded
        self.noise.prepare(rows.response_lengths, plan.deepest + 1)
        phases.sample += clock.take_lap_seconds()
        drafts, proposal, which = self.draft(plan)
        is_sound = self.rest_drafter_if_nan(None if proposal is None else proposal.scores)
        if not is_sound:
            drafts, proposal = self._plain_table(), None
        phases.draft += clock.take_lap_seconds()
        layout = self._layouts.get(tuple(drafts.widths), self.make_layout)
        spans = make_spans(drafts, layout, rows.lengths)
        features, logits = self.target.forward(
            spans, [self.scheduler.layout_of_rows(group.rows) for group in layout.groups]
        )
        phases.verify += clock.take_lap_seconds()
        accepted = self._accept(spans, logits)
        self._commit(spans, accepted, features, logits)
        if proposal is not None:
            self.count_accepted_nodes(proposal, which, layout, accepted.walk.on_path)
        phases.sample += clock.take_lap_seconds()
        given = append_accepted_tokens(responses, accepted)
        phases.other += clock.take_lap_seconds()
        self._done.append(
            RoundResult(
                plan,
                responses,
                *given,
                seconds=plan.prepared_seconds + clock.total,
                phases=phases,
                num_guarded=self.guard.num_guarded - num_guarded,
                is_sound=is_sound,
                is_measurement=is_sound,
            )
        )

    def make_layout(self, widths: tuple[int, ...]) -> SpanLayout:
        """The layout of a pass over all live rows, whose spans have these widths."""
        return make_span_layout(group_by_width(widths), self.decoder.device)

    # -- draft --------------------------------------------------------------------------------------------------

    def draft(self, plan: RoundPlan) -> tuple[DraftTable, Proposal | None, Sequence[int]]:
        """Drafts of a round, with what the learned drafter has proposed, if it took part, and for which rows."""
        strategy, responses = plan.strategy, self.scheduler.rows.responses
        which = [row for row in range(len(responses)) if row not in plan.stored]
        chains: DraftTable | None = None
        if plan.stored or strategy.source == "ngram":
            stored = [(row, responses[row].stored) for row in plan.stored]
            drafts = {row: text.next_drafts(plan.stored_depth) for row, text in stored if text is not None}
            if strategy.source == "ngram" and which:
                reader, others = self.noise_reader(which, strategy.depth), [responses[row] for row in which]
                drafts.update(zip(which, self.ngram.draft_chains(others, reader, strategy), strict=True))
            nodes = [[one.text[-1], *drafts.get(row, ())] for row, one in enumerate(responses)]
            chains = make_draft_chains(nodes, self.decoder.device)
        if strategy.source != "drafter" or not which:
            return chains or self._plain_table(), None, ()
        found = self.draft_with_model(strategy, which)
        width, depth = strategy.widest_pass, strategy.depth
        own = DraftTable(found.tokens, [width] * len(which), found.parents, depth if found.parents is not None else 0)
        return own if chains is None else replace_rows(chains, which, own), found, which

    def _plain_table(self) -> DraftTable:
        """No drafts."""
        rows = self.scheduler.rows
        return DraftTable(rows.last_tokens(rows.index[: rows.num_live]).unsqueeze(1), [1] * rows.num_live)

    def noise_reader(self, which: Sequence[int], depth: int) -> NoiseAt:
        """Reads the noise of the next positions of these rows on the host."""
        return make_noise_reader(self._noise_of_next_positions(which, depth))

    def draft_with_model(self, strategy: Strategy, which: Sequence[int]) -> Proposal:
        """The learned drafter's drafts for these rows."""
        assert self.learned is not None, f"strategy {strategy.name} without a drafter"
        layout, noise = (
            self.scheduler.layout_of_rows(tuple(which)),
            self._noise_of_next_positions(which, strategy.depth),
        )
        return self.learned.propose(self.scheduler.rows, which, layout, noise, strategy)

    def _noise_of_next_positions(self, which: Sequence[int], depth: int) -> Tensor:
        """Noise [B, D, V] of the next positions of these rows."""
        rows = self.scheduler.rows
        index = rows.index_of(which)
        first = (rows.lengths - rows.starts)[index].unsqueeze(1)
        positions = first + torch.arange(depth, device=first.device)
        return self.noise.noise_at(index.unsqueeze(1).expand_as(positions).flatten(), positions.flatten()).view(
            *positions.shape, -1
        )

    def rest_drafter_if_nan(self, scores: Tensor | None) -> bool:
        """True unless a score is NaN; then the drafter rests from now on."""
        if scores is None or not bool(torch.isnan(scores).any()):
            return True
        if self.drafter_is_sound:
            logger.warning(
                "the drafter's scores are not numbers; it rests until a new one is loaded, the text is not affected"
            )
        self.drafter_is_sound = False
        return False

    def count_accepted_nodes(
        self, proposal: Proposal, which: Sequence[int], layout: SpanLayout, on_path: Tensor | None
    ) -> None:
        """Count which nodes of drafted trees were on the path [T]."""
        if self.learned is None or on_path is None:
            return
        first = layout.first_tokens[self.scheduler.rows.index_of(which)]
        nodes = torch.arange(proposal.tokens.shape[1], device=first.device)
        self.learned.count_accepted_nodes(proposal, on_path[first.unsqueeze(1) + nodes])

    # -- accept -------------------------------------------------------------------------------------------------

    def _accept(self, spans: Spans, logits: Tensor) -> AcceptedPath:
        """The target's own choices along the realised path, near-ties decided canonically."""
        rows = self.scheduler.rows
        rules = [response.rule for response in rows.responses]
        noise = self.noise.noise_at(spans.layout.rows, rows.response_positions(spans))
        tolerated = self.guard.logit_tolerance
        choice = choose_tokens_by_rule(logits, noise, rules, spans.layout.rows, self.guard.score_tolerance)
        chosen, doubtful = choice.token, choice.doubtful
        decided = torch.zeros_like(doubtful)
        while True:
            accepted = self.target.accepted_path(spans, chosen)
            if not self.is_guarded or not bool(doubtful.any()):
                return accepted
            reached = torch.arange(accepted.walk.path.shape[1], device=chosen.device) < accepted.counts.unsqueeze(1)
            ties = (doubtful & ~decided)[accepted.walk.path] & reached
            if not bool(ties.any()):
                return accepted
            # one tie a row at a time: its decision tells which later positions are reached at all
            for row in ties.any(1).nonzero().flatten().tolist():
                column = int(ties[row].long().argmax())
                node = int(accepted.walk.path[row, column])
                prefix = torch.cat(
                    [rows.tokens[row, : rows.lengths[row]], spans.tokens[accepted.walk.path[row, 1 : column + 1]]]
                )
                chosen[node] = self.guard.decide_token_in_float64(prefix, noise[node], logits[node], rules[row])
                decided[node] = True
            if self.guard.logit_tolerance > tolerated:
                tolerated = self.guard.logit_tolerance
                doubtful = choose_tokens_by_rule(
                    logits, noise, rules, spans.layout.rows, self.guard.score_tolerance
                ).doubtful

    # -- commit -------------------------------------------------------------------------------------------------

    def _commit(self, spans: Spans, accepted: AcceptedPath, features: Tensor, logits: Tensor) -> None:
        """Commit what the rows accepted, with its log-probs."""
        rows, used = self.scheduler.rows, logits[:, : self.noise.vocab_size]
        if spans.is_tree:  # most nodes are not on the path
            heat = rows.temperatures[: rows.num_live].view(-1, 1, 1)
            log_probs = token_log_probs(used[accepted.walk.path], accepted.chosen, heat)
        else:
            each = token_log_probs(used, accepted.choices, rows.temperatures[spans.layout.rows].unsqueeze(1))
            log_probs = each[accepted.walk.path]
        columns = self.target.commit(spans, accepted, features)
        rows.log_probs[torch.arange(len(columns)).unsqueeze(1), columns.cpu()] = log_probs.cpu()


def append_accepted_tokens(
    responses: Sequence[Response], accepted: AcceptedPath
) -> tuple[list[int], list[bool], list[int]]:
    """Append the emitted tokens to the texts; returns how many, whether an end token came, and drafts accepted."""
    counts: list[int] = accepted.counts.tolist()
    for response, row, count in zip(responses, accepted.chosen.tolist(), counts, strict=True):
        response.text.extend(row[:count])
    return counts, accepted.ended.tolist(), accepted.walk.accepted.tolist()


class _Clock:
    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    @property
    def total(self) -> float:
        return self._last - self._start

    def take_lap_seconds(self) -> float:
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed
