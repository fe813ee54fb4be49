"""One round of the live rows: draft, verify in one target pass, accept the path that the target itself would take.

Every emitted token is the target's own sample at its position (method, section 2): what is drafted decides how many
come at once, never which. Each row has a span of its own length in the pass. On a device a round is queued as graphs
and read while the next one runs: the host learns a round late which tokens a row got and that it has ended, and what
the round launched meanwhile gave such a row is discarded.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.device_cache import DevicePagedCache
from tlt_hpc.rollout.drafts import LearnedDrafts, Proposal
from tlt_hpc.rollout.eager_pass import EagerPasses
from tlt_hpc.rollout.graph_pass import GraphPasses
from tlt_hpc.rollout.ngram_drafts import NgramDrafts
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rounds import PhaseSeconds, RoundPlan, RoundResult
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.spans import DraftTable, make_draft_chains, replace_rows
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.target_pass import NUM_FIGURES, PassOutcome, TargetPass
from tlt_hpc.rollout.tie_guard import TieGuard
from tlt_hpc.rollout.transfer import PendingHostCopy

logger = logging.getLogger(__name__)


class DecodingRounds:
    """Launches rounds and reads them.

    By graphs a round may be launched before the one before it is read, unless near-ties or n-grams need the texts. With
    the tie guard on and a row whose rule truncates (top-k, top-p), a round is eager: the guard knows more zones of
    doubt there.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: EngineSettings,
        scheduler: Scheduler,
        noise: NoiseWindow,
        guard: TieGuard,
        learned: LearnedDrafts | None,
    ) -> None:
        self._scheduler, self._guard, self._learned, self._device = scheduler, guard, learned, decoder.device
        cache, layers = scheduler.cache, learned.drafter.feature_layers if learned else ()
        self.target = TargetPass(decoder, scheduler.rows, cache, layers)
        self._eager = EagerPasses(self.target, scheduler, noise, guard, learned)
        self.graphs: GraphPasses | None = None
        """The passes that are recorded ahead, where the cache is that of a device."""
        if isinstance(cache, DevicePagedCache):
            self.graphs = GraphPasses(self.target, cache, noise, learned, settings)
        self.ngram = NgramDrafts(any(strategy.source == "ngram" for strategy in settings.strategies))
        self.drafter_is_sound = True
        """False from the moment at which its scores were not numbers."""
        self._in_flight: deque[_Round] = deque()

    @property
    def num_in_flight(self) -> int:
        """Number of rounds that were launched and have not been read."""
        return len(self._in_flight)

    @property
    def num_graphs(self) -> int:
        """Number of graphs that have been captured."""
        return 0 if self.graphs is None else self.graphs.num_graphs

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that a row may have got in rounds that have not been read."""
        return sum(started.plan.deepest + 1 for started in self._in_flight)

    @property
    def is_guarded(self) -> bool:
        """True if near-ties count: texts that are generated ahead are drafts, which need not be exact."""
        return self._guard.active and not self._scheduler.rows.responses[0].is_ahead

    def overlaps(self, strategy: Strategy) -> bool:
        """True if a round of this strategy may be launched before the round before it is read."""
        return self.graphs is not None and not (self.is_guarded or strategy.source == "ngram")

    # -- a round ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: RoundPlan) -> None:
        """Draft, verify, accept, commit; on a device all of it is queued."""
        rows, is_guarded, graphs = self._scheduler.rows, self.is_guarded, self.graphs
        truncates = any(response.rule.truncates for response in rows.responses)
        since = self._in_flight[-1].watch if plan.is_next and self._in_flight else None
        num_captured = self.num_graphs
        num_backlogs = self._learned.num_backlogs if self._learned else 0
        watch = _Stopwatch(self._device)
        drafts, proposal, which = self._draft(plan)
        watch.mark()
        before = None
        if graphs is None or (is_guarded and truncates):
            layout = self._eager.layout_of_widths(tuple(drafts.widths))
            outcome = self._eager.verify_and_commit(drafts, layout, is_guarded, watch.mark)
        else:
            before = rows.lengths.clone() if is_guarded else None
            graphs.set_tolerance(self._guard.logit_tolerance if is_guarded else 0.0)
            layout = graphs.layout_of_drafts(drafts)
            outcome = graphs.verify_and_commit(drafts, layout, truncates)
        if proposal is not None and self._learned is not None and outcome.on_path is not None:
            nodes = layout.span_nodes[rows.index_of(which), : proposal.tokens.shape[1]]
            self._learned.count_accepted_nodes(proposal, outcome.on_path[nodes])
        live = slice(rows.num_live)
        host_copies = (
            PendingHostCopy(outcome.figures[live], is_own=graphs is None),
            PendingHostCopy(outcome.log_probs[live], is_own=graphs is None),
            None if proposal is None else PendingHostCopy(proposal.scores),
        )
        watch.mark()
        self._in_flight.append(
            _Round(
                plan=plan,
                responses=list(rows.responses),
                drafts=drafts,
                before=before,
                host_copies=host_copies,
                watch=watch,
                since=since,
                has_captured=self.num_graphs > num_captured,
                has_backlog=self._learned is not None and self._learned.num_backlogs > num_backlogs,
            )
        )

    # -- draft --------------------------------------------------------------------------------------------------

    def _draft(self, plan: RoundPlan) -> tuple[DraftTable, Proposal | None, Sequence[int]]:
        """Drafts of a round, with what the learned drafter has proposed, if it took part, and for which rows."""
        strategy, rows = plan.strategy, self._scheduler.rows
        responses, passes = rows.responses, self.graphs or self._eager
        which = [row for row in range(len(responses)) if row not in plan.stored]
        chains: DraftTable | None = None
        if plan.stored or strategy.source == "ngram":
            drafts = {row: text.next_drafts(plan.stored_depth) for row, text in plan.stored.items()}
            if strategy.source == "ngram" and which:
                self.ngram.update_table(responses)
                reader, others = passes.noise_reader(which, strategy.depth), [responses[row] for row in which]
                drafts.update(zip(which, self.ngram.draft_chains(others, reader, strategy), strict=True))
            nodes = [[one.text[-1], *drafts.get(row, ())] for row, one in enumerate(responses)]
            chains = make_draft_chains(nodes, self._device) if max(map(len, nodes)) > 1 else None
        if strategy.source == "drafter" and which:
            if self.graphs is not None:
                found = self.graphs.draft_rows(which, strategy, self.tokens_in_flight)
            else:
                found = self._eager.draft_rows(which, strategy)
            depth = 0 if found.parents is None else strategy.depth
            own = DraftTable(found.tokens, [strategy.widest_pass] * len(which), found.parents, depth)
            return own if chains is None else replace_rows(chains, which, own), found, which
        return chains or DraftTable(None, [1] * len(responses)), None, ()

    # -- read ---------------------------------------------------------------------------------------------------

    def finish_oldest_round(self) -> RoundResult:
        """Wait for the oldest round under way, and append its tokens to the texts."""
        started = self._in_flight.popleft()
        phases = PhaseSeconds(*started.watch.wait_for_lap_seconds())
        figures, log_probs, scores = (None if copy is None else copy.wait() for copy in started.host_copies)
        assert figures is not None and log_probs is not None
        is_sound = self._rest_drafter_if_nan(scores)
        start = time.perf_counter()
        if started.before is not None and bool(figures[:, -1].any()):
            figures, log_probs = (x.cpu() for x in self._redo_round_with_guard(started)[:2])
        given = self._append_outcome(started.responses, figures.tolist(), log_probs)
        for later in self._in_flight:
            if later.plan.strategy.has_drafter:  # it began where this one ended; none of these has a stored text
                for response in later.responses:
                    response.num_read = len(response.text) - 1
        return RoundResult(
            started.plan,
            started.responses,
            *given,
            seconds=started.seconds + (0.0 if started.since else time.perf_counter() - start),
            phases=phases,
            is_sound=is_sound,
            is_measurement=is_sound and not started.has_captured,
            is_typical=not started.has_backlog,
            overlapped=started.since is not None,
        )

    def _rest_drafter_if_nan(self, scores: Tensor | None) -> bool:
        """True unless a score is NaN; then the drafter rests from now on."""
        if scores is None or not bool(torch.isnan(scores).any()):
            return True
        if self.drafter_is_sound:
            logger.warning(
                "the drafter's scores are not numbers; it rests until a new one is loaded, the text is not affected"
            )
        self.drafter_is_sound = False
        return False

    def _append_outcome(
        self, responses: Sequence[Response], figures: list[list[int]], log_probs: Tensor
    ) -> tuple[list[int], list[bool], list[int]]:
        """Append an outcome's tokens to the texts, with log-probs [B, m]; returns how many, whether an end token came,
        and drafts accepted.
        """
        counts, ended, accepted, kept = list[int](), list[bool](), list[int](), list[tuple[int, int, int, int]]()
        for i, (response, row) in enumerate(zip(responses, figures, strict=True)):
            count, num_accepted, has_ended, _ = row[-NUM_FIGURES:]
            # one that was preempted since waits at least until this round has been read
            here = response.row >= 0 and count > 0
            counts.append(count if here else 0)
            ended.append(here and bool(has_ended))
            if here:
                kept.append((i, response.row, len(response.text), count))
                response.text += row[:count]
                accepted.append(num_accepted)
        self._scheduler.rows.write_log_probs(log_probs, kept)
        return counts, ended, accepted

    def _redo_round_with_guard(self, started: _Round) -> PassOutcome:
        """A near-tie was reached: undo the commitment and accept the same drafts by the guard."""
        assert started.before is not None and not self._in_flight
        self._scheduler.rows.lengths.copy_(started.before)
        layout = self._eager.layout_of_widths(tuple(started.drafts.widths))
        return self._eager.verify_and_commit(started.drafts, layout, is_guarded=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Round:
    """A launched round: its plan and drafts, and the copies of its outcome on their way to the host."""

    plan: RoundPlan
    responses: list[Response]
    drafts: DraftTable
    before: Tensor | None
    """Lengths before it, kept for the tie guard."""
    host_copies: tuple[PendingHostCopy, PendingHostCopy, PendingHostCopy | None]
    """Figures and log-probs of the outcome, and the drafter's scores."""
    watch: _Stopwatch
    since: _Stopwatch | None
    """Stopwatch of the round before, if the device had nothing else to do between them."""
    has_captured: bool
    has_backlog: bool

    @property
    def seconds(self) -> float:
        """From the end of the round before to its own; else its own, and the host's before it."""
        if self.since is not None:
            return self.watch.seconds_since(self.since)
        return sum(self.watch.wait_for_lap_seconds()) + self.plan.prepared_seconds


class _Stopwatch:
    """The times at marks in the device's work, by events on CUDA; the first mark is set at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def wait_for_lap_seconds(self) -> list[float]:
        """Wait for the last mark without a busy loop; the seconds from each mark to the next."""
        if self._device.type != "cuda":
            return [after - before for before, after in pairwise(self._times)]
        self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]

    def seconds_since(self, other: _Stopwatch) -> float:
        """Seconds from another's last mark to this one's, both of which have passed."""
        if self._device.type != "cuda":
            return self._times[-1] - other._times[-1]
        return float(other._events[-1].elapsed_time(self._events[-1])) / 1000
