"""One round of the live rows: draft, verify in one target pass, accept the path that the target itself would take.

Every emitted token is the target's own sample at its position (method, section 2): what is drafted decides how many
come at once, never which. Knows no queue, no page and no request.
Shapes: ``B`` rows, ``N`` nodes of a draft tree, ``m`` columns of the longest path, ``V`` vocabulary, ``H`` hidden.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.drafts import LearnedDrafts, Proposal, join_proposals
from tlt_hpc.rollout.ngram_drafts import NgramDrafts, NoiseAt, make_noise_reader
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rounds import PhaseSeconds, RoundPlan, RoundResult
from tlt_hpc.rollout.sampling import choose_tokens_by_rule, token_log_probs
from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.rollout.target_pass import AcceptedPath, TargetPass, noise_by_node, values_along_path
from tlt_hpc.rollout.tie_guard import TieGuard
from tlt_hpc.rollout.tree import DraftTree, make_chains_from_rows, make_tree

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
        noise = self.noise.noise_at_positions(rows.response_lengths, plan.strategy.depth + 1)
        phases.sample += clock.take_lap_seconds()
        proposal, is_sound = self.propose(plan, noise)
        drafts = proposal.drafts
        phases.draft += clock.take_lap_seconds()
        features, logits = self.target.forward(drafts, self.scheduler.layout)
        phases.verify += clock.take_lap_seconds()
        accepted = self._accept(drafts, logits, noise_by_node(noise, drafts))
        self._commit(drafts, accepted, features, logits)
        if self.learned is not None:
            self.learned.count_accepted_nodes(proposal, accepted.on_path)
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

    # -- draft --------------------------------------------------------------------------------------------------

    def propose(self, plan: RoundPlan, noise: Tensor) -> tuple[Proposal, bool]:
        """Drafts of a round, and whether the drafter is sound; where it is not there are no drafts."""
        rest = plan.strategy.rest
        found = (
            self._propose_by_strategy(plan.strategy, noise)
            if rest is None
            else self._propose_with_stored_texts(plan, rest, noise)
        )
        is_sound = self.rest_drafter_if_nan(found.scores)
        return (found if is_sound else self._propose_by_strategy(OFF, noise)), is_sound

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

    def _propose_by_strategy(self, strategy: Strategy, noise: Tensor) -> Proposal:
        """Drafts of the first rows, as many as ``noise`` [B, D, V] has."""
        rows, count = self.scheduler.rows, len(noise)
        if strategy.source == "off":
            return Proposal(DraftTree(rows.last_tokens(count).unsqueeze(1)))
        if strategy.source == "ngram":
            nodes = self.ngram_chains(strategy, make_noise_reader(noise), count)
            return Proposal(make_chains_from_rows(nodes, max(map(len, nodes)), noise.device))
        assert self.learned is not None, f"strategy {strategy.name} without a drafter"
        return self.learned.propose(rows, self.scheduler.layout_of_first_rows(count), noise, strategy)

    def _propose_with_stored_texts(self, plan: RoundPlan, rest: Strategy, noise: Tensor) -> Proposal:
        """Drafts of stored texts for the rows that have any, which are the last ones, and others for the rest."""
        count, nodes = self.stored_draft_nodes(plan)
        others = self._propose_by_strategy(rest, noise[:count, : rest.depth + 1]) if count else None
        width = max(*map(len, nodes), others.drafts.num_nodes if others else 0)
        found = join_proposals(others, nodes, width, noise.device)
        if found.drafts.parents is None:
            return found
        return replace(found, drafts=make_tree(found.drafts.tokens, found.drafts.parents, width - 1))

    def stored_draft_nodes(self, plan: RoundPlan) -> tuple[int, list[list[int]]]:
        """The number of rows without drafts from stored texts, and last token and drafts of each row after them."""
        responses, num_rest = self.scheduler.rows.responses, self.scheduler.rows.num_live - len(plan.stored)
        with_text = [(one, one.stored) for one in responses[num_rest:] if one.stored is not None]
        return num_rest, [[one.text[-1], *stored.next_drafts(plan.strategy.depth)] for one, stored in with_text]

    def ngram_chains(self, strategy: Strategy, noise: NoiseAt, count: int) -> list[list[int]]:
        """The last token of each of the first rows, and the drafts after it."""
        responses = self.scheduler.rows.responses[:count]
        drafted = self.ngram.draft_chains(responses, noise, strategy)
        return [[response.text[-1], *tokens] for response, tokens in zip(responses, drafted, strict=True)]

    # -- accept -------------------------------------------------------------------------------------------------

    def _accept(self, drafts: DraftTree, logits: Tensor, noise: Tensor) -> AcceptedPath:
        """The target's own choices along the realised path, near-ties decided canonically."""
        rows = self.scheduler.rows
        rules = [response.rule for response in rows.responses]
        tolerated = self.guard.logit_tolerance
        choice = choose_tokens_by_rule(logits, noise, rules, self.guard.score_tolerance)
        chosen, doubtful = choice.token, choice.doubtful
        decided = torch.zeros_like(doubtful)
        while True:
            accepted = self.target.accepted_path(drafts, chosen)
            if not self.is_guarded or not bool(doubtful.any()):
                return accepted
            reached = torch.arange(accepted.path.shape[1], device=chosen.device) < accepted.counts.unsqueeze(1)
            ties = (doubtful & ~decided).gather(1, accepted.path) & reached
            if not bool(ties.any()):
                return accepted
            # one tie a row at a time: its decision tells which later positions are reached at all
            for row in ties.any(1).nonzero().flatten().tolist():
                column = int(ties[row].long().argmax())
                node = int(accepted.path[row, column])
                prefix = torch.cat(
                    [rows.tokens[row, : rows.lengths[row]], drafts.tokens[row, accepted.path[row, 1 : column + 1]]]
                )
                chosen[row, node] = self.guard.decide_token_in_float64(
                    prefix, noise[row, node], logits[row, node], rules[row]
                )
                decided[row, node] = True
            if self.guard.logit_tolerance > tolerated:
                tolerated = self.guard.logit_tolerance
                doubtful = choose_tokens_by_rule(logits, noise, rules, self.guard.score_tolerance).doubtful

    # -- commit -------------------------------------------------------------------------------------------------

    def _commit(self, drafts: DraftTree, accepted: AcceptedPath, features: Tensor, logits: Tensor) -> None:
        """Commit what the rows accepted, with its log-probs."""
        rows = self.scheduler.rows
        at_path = (logits if drafts.depths is None else values_along_path(logits, accepted.path))[
            ..., : self.noise.vocab_size
        ]
        log_probs = token_log_probs(at_path, accepted.chosen, rows.temperatures[: rows.num_live].view(-1, 1, 1))
        columns = self.target.commit(drafts, accepted, features)
        rows.log_probs[torch.arange(len(columns)).unsqueeze(1), columns.cpu()] = log_probs.cpu()


def append_accepted_tokens(
    responses: Sequence[Response], accepted: AcceptedPath
) -> tuple[list[int], list[bool], list[int]]:
    """Append the emitted tokens to the texts; returns how many, whether an end token came, and drafts accepted."""
    counts: list[int] = accepted.counts.tolist()
    for response, row, count in zip(responses, accepted.chosen.tolist(), counts, strict=True):
        response.text.extend(row[:count])
    return counts, accepted.ended.tolist(), [int(count) - 1 for count in accepted.on_path.sum(1).tolist()]


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
