"""Drafts of the learned drafter, with the same noise that the target will sample with.

The drafts at a node are the best of ``sharpness * drafter_logits / temperature + G[t, :]``: where drafter and target
agree in distribution, they agree in the token (shared noise, Gumbel-max coupling).
Shapes: ``B`` rows, ``F`` nodes that grow, ``K`` branching, ``D`` depth, ``H`` hidden, ``V`` (draft) vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.kernels.gumbel import gumbel_argmax, gumbel_noise
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.linear import Linear
from tlt_hpc.rollout.kv_cache import Layout, PagedCache
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.sampling import top_scores
from tlt_hpc.rollout.strategy import MAX_BRANCHES, MAX_DEPTH, Strategy
from tlt_hpc.rollout.transfer import upload, write_number_on_device

_CATCH_UP_WIDTH = 256
"""Positions of a row in one catch-up pass: a drafter that was not used for a long response has much to read."""
_CATCH_UP_TOKENS = 4096
"""Positions of all rows in one catch-up pass, as many as a prefill reads."""
_LATE = 2 * MAX_DEPTH
"""Unread positions from which on a few rows are read without the others: more than rounds leave between two drafts."""
_BACKLOG = 8
"""Positions that a row has unread beyond the usual ones, on average, from which on reading them takes long."""
_EDGES = (0.05, 0.15, 0.3, 0.6, 1.0, 1.5, 2.2, 3.0, 4.0, 6.0)
_FIRST_GUESS = (0.75, 0.12, 0.05)
"""Chance of the first, second and any further candidate, before anything is counted."""
_GUESS_WEIGHT = 4.0
_KEPT = 0.999
"""Share of the counts that a further round keeps: the drafter and the policy change."""


class ChanceTable:
    """Chance that a drafted node is the target's choice, given that its parent is on the path.

    Counts visits and hits in cells (rank, margin): the margin is a candidate's distance to its best rival. The product
    of chances along a branch decides the order in which a tree grows.
    """

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self._edges = torch.tensor(_EDGES, device=device)
        self._bins = len(_EDGES) + 1
        guess = torch.tensor([_FIRST_GUESS[min(rank, 2)] for rank in range(num_ranks)], device=device)
        self._guess = guess.repeat_interleave(self._bins)
        self._visits = torch.zeros_like(self._guess)
        self._hits = torch.zeros_like(self._guess)

    def cells_of_scores(self, scores: Tensor) -> Tensor:
        """Cells [..., K] of candidates whose perturbed scores [..., K] descend."""
        rank = torch.arange(scores.shape[-1], device=scores.device)
        rival = scores[..., 1:2] if scores.shape[-1] > 1 else scores - 1.0
        margin = torch.where(rank == 0, scores - rival, scores[..., :1] - scores)
        return rank * self._bins + torch.bucketize(margin.float().contiguous(), self._edges)

    def chances(self, cells: Tensor) -> Tensor:
        """Chance of each cell; below 1, so that a child never comes before its parent."""
        hits = self._hits + self._guess * _GUESS_WEIGHT
        return (hits / (self._visits + _GUESS_WEIGHT)).clamp(max=0.995)[cells]

    def count_nodes(self, cells: Tensor, visited: Tensor, hit: Tensor) -> None:
        """Count nodes with these cells: ``visited`` where the parent was on the realised path, ``hit`` where it was."""
        self._visits.mul_(_KEPT).scatter_add_(0, cells.flatten(), visited.flatten().float())
        self._hits.mul_(_KEPT).scatter_add_(0, cells.flatten(), hit.flatten().float())


def perturb_logits(logits: Tensor, noise: Tensor, temperatures: Tensor, sharpness: float) -> Tensor:
    """Scores of logits [B, F, V] with the noise [B, 1, V] of their position, at temperatures [B]; 0 is greedy."""
    heat = temperatures.view(-1, 1, 1)
    return torch.where(heat > 0, logits * (sharpness / heat) + noise, logits)


Pick = Callable[[int, Tensor, int], tuple[Tensor, Tensor]]
"""From the d-th drafted position, logits [B, F, V] and a count: the best scores and their indices [B, F, count]."""


@dataclass(frozen=True)
class Proposal:
    """The learned drafter's drafts for some rows."""

    tokens: Tensor
    """[B, N], node 0 is the last committed token."""
    scores: Tensor
    """Numbers [B], in which any NaN of the drafter's scores shows."""
    parents: Tensor | None = None
    """[B, N] of trees."""
    cells: Tensor | None = None
    """Cells [B, N] of the drafts' chances, where they form trees."""

    def first_rows(self, count: int) -> Proposal:
        """Drafts of the first rows."""
        return Proposal(*(None if x is None else x[:count] for x in vars(self).values()))  # type: ignore[arg-type]


class LearnedDrafts:
    """Chains and trees from the learned drafter, whose own layer of the cache follows the committed features."""

    def __init__(self, drafter: Drafter, decoder: Decoder, cache: PagedCache, num_rows: int, num_tokens: int) -> None:
        self.drafter, self._decoder, self._cache, self._num_tokens = drafter, decoder, cache, num_tokens
        self.known = torch.zeros(num_rows, dtype=torch.int64, device=decoder.device)
        """Positions of each row whose true features the drafter has seen."""
        self.chances = ChanceTable(MAX_BRANCHES, decoder.device)
        self.num_backlogs = 0
        """Rounds before which it had to read much that it was not asked for."""
        self._vocabulary = drafter.served_ids
        self._head: Linear | None = None
        """Rows of the target's head, where drafts are among some of its tokens."""
        if self._vocabulary is not None and drafter.token_ids is None:
            self._head = Linear(decoder.head.new_empty(len(self._vocabulary), decoder.head.shape[1]))
            self.copy_target_head()

    def copy_target_head(self) -> None:
        """Take what drafts read of the target's head, in place; call after each load of the target."""
        if self._head is not None and self._vocabulary is not None:
            torch.index_select(self._decoder.head, 0, self._vocabulary, out=self._head.weight)
            self._head.pack_weights()

    @property
    def head_bytes(self) -> int:
        """Bytes of the copy of a part of the target's head."""
        return 0 if self._head is None else self._head.weight.nbytes + self._head.packed_bytes

    def reset_row(self, row: int, response: Response) -> None:
        """Give a row to a sequence of which nothing is known yet."""
        write_number_on_device(self.known, row, 0)
        response.num_read = 0

    def reset_read_positions(self, responses: Sequence[Response]) -> None:
        """The drafter changed: what its layer of the cache holds is another's."""
        self.known.zero_()
        for response in responses:
            response.num_read = 0

    @torch.inference_mode()
    def propose(
        self, rows: LiveRows, which: Sequence[int], layout: Layout | None, noise: Tensor, strategy: Strategy
    ) -> Proposal:
        """Drafts after the committed tokens of the rows ``which``, of which ``layout`` is.

        ``noise`` [B, D.., V] starts at the position of the first draft. Catches up with all positions that the drafter
        has not seen, however long it was not asked.
        """
        noise = noise[..., : self._num_tokens] if self._vocabulary is None else noise[..., self._vocabulary]
        index = rows.index_of(which)
        temperatures = rows.temperatures[index]
        feature = self.run_on_unread_positions(rows, which, layout, strategy.depth + 1)

        def pick(d: int, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
            return top_scores(perturb_logits(logits, noise[:, d : d + 1], temperatures, strategy.sharpness), count)

        return self.draft_chain_or_tree(rows, index, layout, pick, strategy, feature)

    def count_accepted_nodes(self, proposal: Proposal, on_path: Tensor) -> None:
        """Count which nodes of the proposal's trees were on the path [B, N], of those whose parents were.

        Rows whose scores are NaN tell nothing.
        """
        if proposal.cells is None or proposal.parents is None:
            return
        on_path = on_path & ~torch.isnan(proposal.scores).unsqueeze(1)
        visited = on_path.gather(1, proposal.parents)[:, 1:]
        self.chances.count_nodes(proposal.cells[:, 1:], visited, on_path[:, 1:])

    def run_on_unread_positions(
        self, rows: LiveRows, which: Sequence[int], layout: Layout | None, usual: int = 0
    ) -> Tensor:
        """Read whatever the drafter has not of the rows ``which``, usually at most ``usual`` positions of each; returns
        its own feature [B, H] at each one's newest true position.
        """
        responses, device = [rows.responses[row] for row in which], rows.lengths.device
        unread = [len(response.text) - 1 - response.num_read for response in responses]
        self.note_backlog(unread, usual)
        late = [row for row, number in zip(which, unread, strict=True) if number > _LATE]
        if 0 < len(late) <= len(which) // 2:  # the others would repeat their last position in every pass
            tables = [rows.responses[row].pages for row in late]
            own = self._cache.build_layout(tables, 1 + max(map(max, tables)))
            self.run_on_next_positions(rows, upload(late, device), own, max(unread))
            unread = [number for number in unread if number <= _LATE]
        feature = self.run_on_next_positions(rows, rows.index_of(which), layout, max(1, *unread))
        for response in responses:
            response.num_read = len(response.text) - 1
        return feature

    def note_backlog(self, unread: Collection[int], usual: int) -> None:
        """Count a round if its rows have many more positions ``unread`` than the ``usual`` number."""
        self.num_backlogs += sum(max(0, number - usual) for number in unread) > _BACKLOG * len(unread)

    def run_on_next_positions(self, rows: LiveRows, which: Tensor, layout: Layout | None, width: int) -> Tensor:
        """Run on the next positions, at most ``width``, of the rows ``which`` [B].

        ``layout`` is that of these rows. Returns as ``run_on_unread_positions`` does.
        """
        lengths, known = rows.lengths[which], self.known[which]
        last = lengths - 2
        start = torch.minimum(known, last.clamp(min=0))
        count, index = len(lengths), torch.arange(len(lengths), device=lengths.device)
        assert self._cache.features is not None
        feature = self._cache.features[:count, -self.drafter.shape.hidden_size :]
        most = max(1, min(_CATCH_UP_WIDTH, _CATCH_UP_TOKENS // count))
        for begin in range(0, width, most):
            columns = torch.arange(begin, min(width, begin + most), device=lengths.device)
            # a row with less to read repeats its newest position: the same values to the same place
            at = torch.minimum(start.unsqueeze(1) + columns, last.clamp(min=0).unsqueeze(1))
            out = self._run_at_positions(rows, which, layout, at)
            column = (last - start - begin).clamp(0, len(columns) - 1)
            newest = out[index, column]
            feature = newest if begin == 0 else torch.where((last - start >= begin).unsqueeze(1), newest, feature)
        self.known[which] = lengths - 1
        # a sequence of one token has no feature to draft from yet: what is proposed for it is a guess
        return feature

    def _run_at_positions(self, rows: LiveRows, which: Tensor, layout: Layout | None, at: Tensor) -> Tensor:
        """The drafter's features [B, n, H] at committed positions [B, n], whose keys and values it keeps."""
        assert self._cache.features is not None
        tables = self._cache.tables[which]
        tokens = rows.tokens[which.unsqueeze(1), at + 1]
        features = self._cache.features[self._cache.slots_of_positions(at, tables)]
        states = self.drafter.fuse(features.flatten(0, 1)).view(*at.shape, -1)
        attend = self._cache.make_attention(layout, tables, at, only_layer=self._cache.drafter_layer)
        return self._run_drafter(tokens, states, at, attend)

    def make_picker(self, words: Tensor, positions: Tensor, temperatures: Tensor, sharpness: float) -> Pick:
        """The ``Pick`` of a device: words [B, 4], response positions [B] of the first draft, temperatures [B]."""
        columns = self._num_tokens if self._vocabulary is None else self._vocabulary

        def pick(d: int, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
            if count == 1 and logits.shape[1] == 1 and self._vocabulary is None:
                # over all tokens the best one comes from one pass, noise and all; a NaN shows in the normaliser
                choice = gumbel_argmax(logits[:, 0], temperatures / sharpness, words, positions + d, self._num_tokens)
                return choice.log_normaliser.view(-1, 1, 1), choice.token.view(-1, 1, 1)
            noise = gumbel_noise(words, positions + d, columns).unsqueeze(1)
            return top_scores(perturb_logits(logits, noise, temperatures, sharpness), count)

        return pick

    def draft_chain_or_tree(
        self, rows: LiveRows, which: Tensor, layout: Layout | None, pick: Pick, strategy: Strategy, feature: Tensor
    ) -> Proposal:
        """Drafts of the rows ``which`` [B]; ``feature`` [B, H] belongs to their newest positions.

        Reads and writes nothing on the host, and no shape depends on data.
        """
        grow = self._draft_chain if strategy.branching == 1 else self._draft_tree
        return grow(rows, which, layout, pick, strategy, feature)

    def _run_drafter(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: object) -> Tensor:
        embedded = F.embedding(tokens.flatten(), self._decoder.embedding)
        out: Tensor = self.drafter(embedded, features.flatten(0, 1), positions.flatten(), attend)
        return out.view(*tokens.shape, -1)

    def _logits(self, features: Tensor) -> Tensor:
        """Draft logits [B, F, V] of features [B, F, H]."""
        flat = features.flatten(0, 1)
        if self.drafter.token_ids is not None:
            logits = self.drafter.logits(flat).float()
        elif self._head is not None:
            logits = self._head.multiply_in_float32(flat)
        else:
            logits = self._decoder.logits(flat)[:, : self._num_tokens]
        return logits.view(*features.shape[:2], -1)

    def _to_token_ids(self, index: Tensor) -> Tensor:
        return index if self._vocabulary is None else self._vocabulary[index]

    def _draft_chain(
        self, rows: LiveRows, which: Tensor, layout: Layout | None, pick: Pick, strategy: Strategy, feature: Tensor
    ) -> Proposal:
        at = (rows.lengths[which] - 1).unsqueeze(1) + torch.arange(strategy.depth - 1, device=feature.device)
        feature = feature.unsqueeze(1)
        attends = []
        if strategy.depth > 1:
            tables, layer = self._cache.tables[which], self._cache.drafter_layer
            attends = self._cache.make_step_attentions(layout, tables, at, only_layer=layer)
        drafts, best = [rows.last_tokens(which).unsqueeze(1)], []
        for d in range(strategy.depth):
            values, indices = pick(d, self._logits(feature), 1)
            best.append(values.flatten(1))
            drafts.append(self._to_token_ids(indices.flatten(1)))
            if d + 1 < strategy.depth:
                feature = self._run_drafter(drafts[-1], feature, at[:, d : d + 1], attends[d])
        return Proposal(torch.cat(drafts, 1), torch.cat(best, 1).sum(1))

    def _draft_tree(
        self, rows: LiveRows, which: Tensor, layout: Layout | None, pick: Pick, strategy: Strategy, feature: Tensor
    ) -> Proposal:
        """Grow level by level, each time the likeliest nodes of a level; keep the likeliest nodes of all."""
        count, branching = len(feature), min(strategy.branching, MAX_BRANCHES)
        device = feature.device
        last = (rows.lengths[which] - 2).unsqueeze(1)
        tables = self._cache.tables[which]
        num_slots = 1 + (strategy.depth - 1) * branching
        feature = feature.unsqueeze(1)
        # index of the growing nodes among all candidates; 0 is the root
        node = torch.zeros(count, 1, dtype=torch.int64, device=device)
        chance = torch.ones(count, 1, device=device)
        slots = torch.arange(num_slots, device=device)
        reach = (slots == 0).expand(count, 1, -1)
        tokens, parents = [rows.last_tokens(which).unsqueeze(1)], [node]
        chances, cells = [torch.full((count, 1), 2.0, device=device)], [node]
        best, num_candidates = [], 1
        for d in range(strategy.depth):
            values, indices = pick(d, self._logits(feature), branching)
            best.append(values.flatten(1))
            cell = self.chances.cells_of_scores(values)
            each = (chance.unsqueeze(2) * self.chances.chances(cell)).flatten(1)
            tokens.append(self._to_token_ids(indices).flatten(1))
            parents.append(node.repeat_interleave(branching, 1))
            chances.append(each)
            cells.append(cell.flatten(1))
            if d + 1 < strategy.depth:
                chance, grown = each.topk(branching, 1)
                parent = (grown // branching).unsqueeze(2)
                slot = 1 + d * branching + torch.arange(branching, device=device)
                reach = reach.gather(1, parent.expand(-1, -1, num_slots)) | (slots == slot.unsqueeze(1))
                node = num_candidates + grown
                attend = self._cache.make_attention(
                    layout, tables, last + slot, last.squeeze(1), reach, only_layer=self._cache.drafter_layer
                )
                before = feature.gather(1, parent.expand(-1, -1, feature.shape[2]))
                position = (last + 1 + d).expand(-1, branching)
                feature = self._run_drafter(tokens[-1].gather(1, grown), before, position, attend)
            num_candidates += each.shape[1]
        likeliest = _keep_likeliest_nodes(strategy, *(torch.cat(part, 1) for part in (tokens, parents, chances, cells)))
        return Proposal(likeliest[0], torch.cat(best, 1).sum(1), *likeliest[1:])


def _keep_likeliest_nodes(
    strategy: Strategy, tokens: Tensor, parents: Tensor, chances: Tensor, cells: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and cells [B, N] of a tree: the root and the ``num_drafts`` likeliest candidates [B, C].

    A child's chance is below its parent's, so with a node all its ancestors are kept.
    """
    # stable: where a chance has run out of digits and equals its parent's, the parent, which comes first, is kept first
    order = chances.sort(dim=1, descending=True, stable=True).indices
    kept = order[:, : strategy.num_drafts + 1].sort(1).values
    place = torch.zeros_like(tokens).scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    parent = place.gather(1, parents.gather(1, kept))
    return tokens.gather(1, kept), parent, cells.gather(1, kept)
