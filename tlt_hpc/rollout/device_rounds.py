"""Rounds on a device without a wait: queued as graphs, and read while the next one runs.

The host learns a round late which tokens a row got and that it has ended: the round launched meanwhile gave such a row
tokens that are discarded. Near-ties and n-grams need the texts: with them a round is read before the next one starts.
On a CPU the same functions run eagerly, for tests.
Shapes: as in ``graph_round``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tlt_hpc.rollout.decoding import HostRounds, append_accepted_tokens
from tlt_hpc.rollout.drafts import Proposal
from tlt_hpc.rollout.graph_round import NUM_FIGURES, GraphRound
from tlt_hpc.rollout.ngram_drafts import NoiseAt
from tlt_hpc.rollout.noise import gumbel_number, noise_key
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rounds import PhaseSeconds, RoundPlan, RoundResult
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.spans import DraftTable, SpanLayout, make_spans
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.transfer import PendingHostCopy, upload


@dataclass(kw_only=True)
class DeviceRounds(HostRounds):
    """Rounds whose tensors stay on the device.

    With the tie guard on, and with n-grams, a round is read before the next one starts. With the guard on and a row
    whose rule truncates (top-k, top-p), it is carried out as on the host: the guard knows more zones of doubt there.
    """

    settings: EngineSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        self._graphs = GraphRound(self.target, self.noise, self.learned, self.settings)
        self._in_flight: deque[_Round] = deque()

    def capture(self, truncates: bool) -> None:
        """Record the graphs of rounds in which a row's rule truncates, or none does."""
        self._graphs.capture(truncates)

    @property
    def graph_bytes(self) -> int:
        """Device memory of captured graphs, bytes."""
        return self._graphs.num_bytes

    @property
    def num_in_flight(self) -> int:
        """Number of rounds that were launched and have not been read."""
        return len(self._in_flight) + super().num_in_flight

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that a row may have got in rounds that have not been read."""
        return sum(started.plan.deepest + 1 for started in self._in_flight)

    # -- which rounds -------------------------------------------------------------------------------------------

    def overlaps(self, strategy: Strategy) -> bool:
        """True if neither the guard nor the strategy's drafts need the texts of the round before."""
        return not (self.is_guarded or strategy.source == "ngram")

    # -- a round ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: RoundPlan) -> None:
        """Draft, verify, accept, commit, all of it queued on the device."""
        rows = self.scheduler.rows
        truncates = any(response.rule.truncates for response in rows.responses)
        if self.is_guarded and truncates:
            assert not self._in_flight, "a round on the host needs the texts"
            super().launch(plan)
            return
        since = self._in_flight[-1].watch if plan.is_next and self._in_flight else None
        self._graphs.tolerance.fill_(self.guard.logit_tolerance if self.is_guarded else 0.0)
        num_captured = len(self._graphs)
        watch = _Stopwatch(self.decoder.device)
        drafts, proposal, which = self.draft(plan)
        layout = self._graphs.layout_of_widths(tuple(drafts.widths))
        watch.mark()
        before = rows.lengths.clone() if self.is_guarded else None
        outcome, log_probs, on_path = self._graphs.verify_and_commit(drafts, layout, truncates)
        live = slice(rows.num_live)
        host_copies = (
            PendingHostCopy(outcome[live]),
            PendingHostCopy(log_probs[live]),
            None if proposal is None else PendingHostCopy(proposal.scores),
        )
        if proposal is not None:
            self.count_accepted_nodes(proposal, which, layout, on_path)
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
                has_captured=len(self._graphs) > num_captured,
            )
        )

    def make_layout(self, widths: tuple[int, ...]) -> SpanLayout:
        """The layout of a pass that is no graph."""
        return replace(self._graphs.make_layout(widths, sum(widths)), num_rows=len(widths))

    def noise_reader(self, which: Sequence[int], depth: int) -> NoiseAt:
        """Computes the noise on the host, without a copy from the device."""
        return _make_host_noise_reader([self.scheduler.rows.responses[row] for row in which])

    def draft_with_model(self, strategy: Strategy, which: Sequence[int]) -> Proposal:
        """The learned drafter's drafts for these rows."""
        self._run_drafter_on_backlog(which)
        return self._graphs.draft_rows(which, strategy)

    def _run_drafter_on_backlog(self, which: Sequence[int]) -> None:
        """Let the drafter read what its graph has no room for, of these rows.

        Rows with less to read stay out: beside a new row's prompt, or a long text that was preempted, each of them
        would repeat its last position in every pass.
        """
        assert self.learned is not None
        rows, in_flight = self.scheduler.rows, self.tokens_in_flight
        unread = {row: len(rows.responses[row].text) + in_flight - 1 - rows.responses[row].num_read for row in which}
        late = [row for row, number in unread.items() if number > self._graphs.read_width]
        if late:
            self.learned.run_on_next_positions(rows, upload(late, self.decoder.device), None, max(unread.values()))
        for row in which:  # at least; what is in flight is known when it is read
            rows.responses[row].num_read = len(rows.responses[row].text) - 1

    # -- read ---------------------------------------------------------------------------------------------------

    def finish_oldest_round(self) -> RoundResult:
        """Wait for the oldest round under way, and append its tokens to the texts."""
        if not self._in_flight:
            return super().finish_oldest_round()
        started, num_guarded = self._in_flight.popleft(), self.guard.num_guarded
        phases = PhaseSeconds(*started.watch.wait_for_lap_seconds())
        outcome, log_probs, scores = (None if copy is None else copy.wait() for copy in started.host_copies)
        assert outcome is not None and log_probs is not None
        is_sound = self.rest_drafter_if_nan(scores)
        start = time.perf_counter()
        if started.before is not None and bool((outcome[:, -1] >= 2).any()):
            given = self._redo_round_with_guard(started)
        else:
            given = self._append_outcome(started.responses, outcome.tolist(), log_probs)
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
            num_guarded=self.guard.num_guarded - num_guarded,
            is_sound=is_sound,
            is_measurement=is_sound and not started.has_captured,
            overlapped=started.since is not None,
        )

    def _append_outcome(
        self, responses: Sequence[Response], outcome: list[list[int]], log_probs: Tensor
    ) -> tuple[list[int], list[bool], list[int]]:
        """Append what ``GraphRound.verify_and_commit`` gave the rows, with log-probs [B, m].

        Returns as ``append_accepted_tokens`` does.
        """
        counts, ended, accepted, kept = list[int](), list[bool](), list[int](), list[tuple[int, int, int, int]]()
        for i, (response, row) in enumerate(zip(responses, outcome, strict=True)):
            count, num_accepted, flags = row[-NUM_FIGURES:]
            # one that was preempted since waits at least until this round has been read
            here = response.row >= 0 and count > 0
            counts.append(count if here else 0)
            ended.append(here and bool(flags & 1))
            if here:
                kept.append((i, response.row, len(response.text), count))
                response.text += row[:count]
                accepted.append(num_accepted)
        self.scheduler.rows.write_log_probs(log_probs, kept)
        return counts, ended, accepted

    @torch.inference_mode()
    def _redo_round_with_guard(self, started: _Round) -> tuple[list[int], list[bool], list[int]]:
        """A near-tie was reached: undo the commitment and accept the same drafts as on the host, by the guard."""
        assert started.before is not None and not self._in_flight
        rows = self.scheduler.rows
        rows.lengths.copy_(started.before)
        self.noise.prepare(rows.response_lengths, started.drafts.deepest + 1)
        layout = self._layouts.get(tuple(started.drafts.widths), self.make_layout)
        spans = make_spans(started.drafts, layout, rows.lengths)
        features, logits = self.target.forward(spans, ())
        accepted = self._accept(spans, logits)
        self._commit(spans, accepted, features, logits)
        return append_accepted_tokens(started.responses, accepted)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Round:
    """A launched round: its plan and drafts, and the copies of its outcome on their way to the host."""

    plan: RoundPlan
    responses: list[Response]
    drafts: DraftTable
    before: Tensor | None
    """Lengths before it, kept for the tie guard."""
    host_copies: tuple[PendingHostCopy, PendingHostCopy, PendingHostCopy | None]
    """The outcome and log-probs of ``GraphRound.verify_and_commit``, and the drafter's scores."""
    watch: _Stopwatch
    since: _Stopwatch | None
    """Stopwatch of the round before, if the device had nothing else to do between them."""
    has_captured: bool

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


def _make_host_noise_reader(responses: Sequence[Response]) -> NoiseAt:
    words = [noise_key(response.request.key) for response in responses]
    first = [response.num_response_tokens for response in responses]
    return lambda row, d, token: gumbel_number(words[row], first[row] + d, token)
