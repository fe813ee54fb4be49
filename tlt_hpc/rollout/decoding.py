"""One round of the live rows: draft, verify in one target pass, accept the path that the target itself would take.

Every emitted token is the target's own sample at its position (method, section 2): what is drafted decides how many
come at once, never which. Knows no queue, no page and no request.
Shapes: ``B`` rows, ``N`` nodes of a draft tree, ``m`` columns of the longest path, ``V`` vocabulary, ``H`` hidden.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.drafts import DrafterFault, LearnedDrafts, NgramDrafts, Perturbation, hybrid
from tlt_hpc.rollout.guard import TieGuard
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.residents import Residents
from tlt_hpc.rollout.sampling import choose_rows, token_log_probs
from tlt_hpc.rollout.sequences import Sequence
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.tree import DraftTree, chain, emitted_counts, from_lists, path_of, walk

logger = logging.getLogger(__name__)


@dataclass
class PhaseSeconds:
    """Where rounds spend their time; on a device, where the host waits for it. ``sample`` includes making the noise."""

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0


@dataclass(frozen=True)
class Emitted:
    """What a round gave each live row: its new tokens, whether the last ends it, and drafts accepted before any cut."""

    tokens: list[list[int]]
    ended: list[bool]
    accepted: list[int]


@dataclass
class Rounds:
    """The parts that a round needs, and its counters."""

    decoder: Decoder
    residents: Residents
    noise: NoiseWindow
    guard: TieGuard
    learned: LearnedDrafts | None
    ngram: NgramDrafts
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    num_faults: int = 0
    """Rounds in which the drafter gave no numbers."""
    drafter_is_sound: bool = True

    @torch.inference_mode()
    def run(self, strategy: Strategy) -> Emitted:
        """Draft, verify, accept, commit."""
        rows, clock = self.residents.rows, _Clock()
        sequences = rows.sequences
        noise = self.noise.at(rows.response_lengths, strategy.depth + 1)
        self.seconds.sample += clock.lap()
        drafts, cells = self.propose(strategy, noise)
        self.seconds.draft += clock.lap()
        hidden, logits = self._verify(drafts)
        self.seconds.verify += clock.lap()
        verdict = self._accept(drafts, logits, _by_node(noise, drafts))
        self._commit(drafts, verdict, hidden, logits)
        if cells is not None and self.learned is not None and drafts.parents is not None:
            _learn_chances(self.learned, drafts, cells, verdict.on_path)
        self.seconds.sample += clock.lap()
        tokens = [row[:count] for row, count in zip(verdict.chosen.tolist(), verdict.counts.tolist(), strict=True)]
        for sequence, more in zip(sequences, tokens, strict=True):
            sequence.text.extend(more)
            sequence.num_passes += 1
        accepted = [int(count) - 1 for count in verdict.on_path.sum(1).tolist()]
        self.seconds.other += clock.lap()
        return Emitted(tokens, verdict.ended.tolist(), accepted)

    # -- draft --------------------------------------------------------------------------------------------------

    def propose(self, strategy: Strategy, noise: Tensor) -> tuple[DraftTree, Tensor | None]:
        """Drafts of a round, and the cells of their chances where they form trees; none where the drafter fails."""
        rows = self.residents.rows
        try:
            return self._proposals(strategy, noise)
        except DrafterFault as fault:
            self.num_faults += 1
            if self.drafter_is_sound:
                logger.warning("%s; it rests until a new one is loaded, the text is not affected", fault)
            self.drafter_is_sound = False
            return chain(rows.last_tokens(), rows.tokens[: rows.num_live, :0]), None

    def _proposals(self, strategy: Strategy, noise: Tensor) -> tuple[DraftTree, Tensor | None]:
        rows = self.residents.rows
        if strategy.source == "off":
            return chain(rows.last_tokens(), rows.tokens[: rows.num_live, :0]), None
        if strategy.source == "ngram":
            return self._ngram_chains(strategy, noise), None
        assert self.learned is not None, f"strategy {strategy.name} without a drafter"
        how = Perturbation.of(rows.sequences, noise.device)
        drafts, cells = self.learned.propose(rows, self.residents.layout, noise, strategy, how)
        if strategy.source == "hybrid":
            # grafted nodes stand behind the drafted ones, and the drafter's counts are of its own alone
            return hybrid(drafts, self.ngram.chains(rows.sequences, noise, strategy)), cells
        return drafts, cells

    def _ngram_chains(self, strategy: Strategy, noise: Tensor) -> DraftTree:
        rows = self.residents.rows
        last = [sequence.text[-1] for sequence in rows.sequences]
        chains = self.ngram.chains(rows.sequences, noise, strategy)
        nodes = [[(token, 0), *((t, i) for i, t in enumerate(more))] for token, more in zip(last, chains, strict=True)]
        return from_lists(nodes, noise.device)

    # -- verify -------------------------------------------------------------------------------------------------

    def _verify(self, drafts: DraftTree) -> tuple[Tensor, Tensor]:
        """The target's hidden states [B, N, H] and logits [B, N, V] at every node."""
        rows, cache = self.residents.rows, self.residents.cache
        count, n = drafts.tokens.shape
        first = (rows.lengths[:count] - 1).unsqueeze(1)
        places = first + torch.arange(n, device=first.device)
        positions = places if drafts.depths is None else first + drafts.depths
        attend = cache.attend(
            self.residents.layout,
            cache.tables[:count],
            places,
            None if drafts.ancestors is None else first.squeeze(1),
            drafts.ancestors,
        )
        fed = drafts.tokens.clamp(min=0)
        hidden = self.decoder.hidden(fed.flatten(), positions.flatten(), attend)
        return hidden.view(count, n, -1), self.decoder.logits(hidden).view(count, n, -1)

    def decide(self, drafts: DraftTree, noise: Tensor) -> Verdict:
        """Verify and walk, without a commitment."""
        return self._accept(drafts, self._verify(drafts)[1], _by_node(noise, drafts))

    # -- accept -------------------------------------------------------------------------------------------------

    def _accept(self, drafts: DraftTree, logits: Tensor, noise: Tensor) -> Verdict:
        """The target's own choices along the realised path, near-ties decided canonically."""
        rows = self.residents.rows
        sequences = rows.sequences
        rules = [sequence.rule for sequence in sequences]
        banned = _Banned.of(sequences, drafts, rows.ends)
        tolerated = self.guard.logit_tolerance
        scored = logits if banned is None else logits.masked_fill(banned.mask(logits.shape[2]), -torch.inf)
        choice = choose_rows(scored, noise, rules, self.guard.tolerance)
        chosen, doubtful = choice.token, choice.doubtful
        decided = torch.zeros_like(doubtful)
        while True:
            verdict = self._walk(drafts, chosen)
            if not self.guard.active or not bool(doubtful.any()):
                return verdict
            reached = torch.arange(verdict.path.shape[1], device=chosen.device) < verdict.counts.unsqueeze(1)
            ties = (doubtful & ~decided).gather(1, verdict.path) & reached
            if not bool(ties.any()):
                return verdict
            # one tie a row at a time: its verdict decides which later positions are reached at all
            for row in ties.any(1).nonzero().flatten().tolist():
                column = int(ties[row].long().argmax())
                node = int(verdict.path[row, column])
                prefix = torch.cat(
                    [rows.tokens[row, : rows.lengths[row]], drafts.tokens[row, verdict.path[row, 1 : column + 1]]]
                )
                ban = None if banned is None else banned.ids(row, node)
                chosen[row, node] = self.guard.decide(prefix, noise[row, node], logits[row, node], rules[row], ban)
                decided[row, node] = True
            if self.guard.logit_tolerance > tolerated:
                tolerated = self.guard.logit_tolerance
                doubtful = choose_rows(scored, noise, rules, self.guard.tolerance).doubtful

    def _walk(self, drafts: DraftTree, chosen: Tensor) -> Verdict:
        rows = self.residents.rows
        count = rows.num_live
        on_path = walk(chosen, drafts)
        if drafts.depths is None:
            path = torch.arange(drafts.num_nodes, device=chosen.device).expand(count, -1)
            along = chosen.clone()
        else:
            path = path_of(on_path, int(on_path.sum(1).max()))
            along = chosen.gather(1, path)
        room = rows.caps[:count] - rows.lengths[:count]
        counts, ended = emitted_counts(along, on_path.sum(1) - 1, room, rows.ends[:count])
        return Verdict(on_path, path, along, counts, ended)

    # -- commit -------------------------------------------------------------------------------------------------

    def _commit(self, drafts: DraftTree, verdict: Verdict, hidden: Tensor, logits: Tensor) -> None:
        """Put the path's keys and values where a chain would have them; keep tokens, log-probs and features."""
        rows, cache = self.residents.rows, self.residents.cache
        count, width = verdict.path.shape
        tables = cache.tables[:count]
        first = (rows.lengths[:count] - 1).unsqueeze(1)
        along = first + torch.arange(width, device=first.device)
        straight = drafts.depths is None
        if not straight and width > 1:
            source = cache.slots(first + verdict.path, tables)
            cache.move_slots(source[:, 1:].flatten(), cache.slots(along, tables)[:, 1:].flatten())
        if cache.features is not None:
            kept = hidden if straight else hidden.gather(1, verdict.path.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
            cache.features[cache.slots(along, tables).flatten()] = kept.flatten(0, 1)
        at_path = logits if straight else logits.gather(1, verdict.path.unsqueeze(2).expand(-1, -1, logits.shape[2]))
        log_probs = token_log_probs(at_path, verdict.chosen, _temperatures(rows.sequences, logits.device))
        rows.commit(verdict.chosen, verdict.counts, log_probs)


@dataclass(frozen=True)
class Verdict:
    """What a round accepted: nodes on the realised path [B, N], the path [B, m], choices on it [B, m], counts [B]."""

    on_path: Tensor
    path: Tensor
    chosen: Tensor
    counts: Tensor
    ended: Tensor


@dataclass(frozen=True)
class _Banned:
    """End tokens where a row is still below its least length."""

    where: Tensor
    """[B, N]"""
    ends: Tensor

    @classmethod
    def of(cls, sequences: list[Sequence], drafts: DraftTree, ends: Tensor) -> _Banned | None:
        """None where no row has a least length to reach."""
        left = [sequence.params.min_tokens - sequence.num_response for sequence in sequences]
        if max(left) <= 0:
            return None
        device = drafts.tokens.device
        depths = torch.arange(drafts.num_nodes, device=device) if drafts.depths is None else drafts.depths
        return cls(depths < torch.tensor(left, device=device).unsqueeze(1), ends[: len(sequences)])

    def mask(self, num_tokens: int) -> Tensor:
        """[B, N, V]"""
        hit = torch.zeros(self.ends.shape[0], num_tokens + 1, dtype=torch.bool, device=self.ends.device)
        hit.scatter_(1, torch.where(self.ends < 0, num_tokens, self.ends), True)
        return self.where.unsqueeze(2) & hit[:, :num_tokens].unsqueeze(1)

    def ids(self, row: int, node: int) -> Tensor | None:
        ends = self.ends[row]
        return ends[ends >= 0] if bool(self.where[row, node]) else None


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed


def _by_node(noise: Tensor, drafts: DraftTree) -> Tensor:
    """Noise [B, N, V] of each node's own position, from that of each depth [B, D + 1, V]."""
    if drafts.depths is None:
        return noise[:, : drafts.num_nodes]
    rows = torch.arange(len(noise), device=noise.device).unsqueeze(1)
    return noise[rows, drafts.depths]


def _temperatures(sequences: list[Sequence], device: torch.device) -> float | Tensor:
    """One number where all rows agree, else [B, 1, 1] with 1 for greedy rows."""
    values = [sequence.rule.temperature for sequence in sequences]
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor([value or 1.0 for value in values], device=device).view(-1, 1, 1)


def _learn_chances(learned: LearnedDrafts, drafts: DraftTree, cells: Tensor, on_path: Tensor) -> None:
    """Tell the drafter's table which of its nodes were on the path, of those whose parents were."""
    assert drafts.parents is not None
    own = cells.shape[1]
    visited = on_path.gather(1, drafts.parents)[:, 1:own]
    learned.chances.observe(cells[:, 1:], visited, on_path[:, 1:own])
