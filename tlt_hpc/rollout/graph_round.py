"""The two halves of a round as static functions of device buffers, recorded as graphs: drafts, and the target's pass.

A graph of the drafter belongs to a batch bucket and a strategy; one of the target, with sampling, walk and commitment,
to a bucket and a width, so strategies of one width share it. Nothing here is read back, no shape depends on data.
Knows neither sequences nor what the host makes of the outcome.
Shapes: ``B`` rows of a bucket, those beyond the live ones padding; ``N`` nodes of a draft tree, ``V`` vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tlt_hpc.kernels.graphs import GraphPool
from tlt_hpc.kernels.gumbel import GumbelChoice, gumbel_argmax
from tlt_hpc.rollout.drafts import LearnedDrafts, Proposal
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.sampling import lowest_kept_scores, token_log_probs
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.target_pass import TargetPass
from tlt_hpc.rollout.tie_guard import score_tolerances
from tlt_hpc.rollout.tree import DraftTree, make_tree

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8)
_BUCKET_STEP = 16
_SORTED_ROWS = 32
NUM_FIGURES = 3
"""Numbers of a row's outcome beside its tokens: their count, drafts accepted, end or near-tie."""


def batch_buckets(most: int) -> list[int]:
    """Batch sizes that graphs are made for: powers of two, from 16 on multiples of it, and ``most`` itself."""
    sizes = [size for size in (*_BUCKETS, *range(_BUCKET_STEP, most, _BUCKET_STEP)) if size < most]
    return [*sizes, most]


@dataclass(frozen=True)
class _Form:
    """Properties, beside the batch, that a graph of the target depends on."""

    width: int
    is_tree: bool
    truncates: bool
    """True if any row's rule is top-k or top-p."""


class GraphRound:
    """The graphs of an engine's strategies, captured on first use or ahead."""

    def __init__(
        self, target: TargetPass, noise: NoiseWindow, learned: LearnedDrafts | None, strategies: Sequence[Strategy]
    ) -> None:
        self._target, self._noise, self._learned = target, noise, learned
        self._rows, device = target.rows, target.decoder.device
        self._strategies = strategies
        self._buckets = batch_buckets(self._rows.capacity)
        self.read_width = 1 + max(strategy.depth for strategy in strategies if strategy.source != "stored")
        """Positions that the drafter reads in its graph; whatever else it has missed must have been read before."""
        self._longest = 1 + max(strategy.depth for strategy in strategies)
        self.tolerance = torch.zeros(1, device=device)
        """The tie guard's zone of doubt in logits; 0: off."""
        self._graphs = GraphPool(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def bucket_size(self, num_live: int) -> int:
        """The rows that take part where so many are live."""
        return next(size for size in self._buckets if size >= num_live)

    # -- graphs -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, truncates: bool) -> None:
        """Capture all graphs now, the largest first, instead of each on its first use."""
        assert not self._rows.num_live, "a row would get what the capture runs through"
        start, vocab_size = time.perf_counter(), self._target.decoder.shape.vocab_size
        for count in reversed(self._buckets):
            for strategy in sorted(self._strategies, key=lambda one: -one.widest_pass):
                if count > self.bucket_size(min(self._rows.capacity, strategy.max_rows(vocab_size))):
                    continue  # the engine does not choose it for so many
                if strategy.has_drafter:
                    self.draft_by_graph(count, strategy)
                for width, is_tree in self._verifying_pass_widths(strategy):
                    tokens = torch.zeros(count, width, dtype=torch.int64, device=self.tolerance.device)
                    self.verify_and_commit(DraftTree(tokens, torch.zeros_like(tokens) if is_tree else None), truncates)
        seconds = time.perf_counter() - start
        logger.info("%d graphs captured in %.1f s: %d MiB of device memory", len(self), seconds, self.num_bytes >> 20)

    def _verifying_pass_widths(self, strategy: Strategy) -> list[tuple[int, bool]]:
        """Widths of the passes that verify a strategy's drafts, and whether they are trees.

        A round with stored texts is a pass over trees if the rows without such a text have trees.
        """
        width, is_tree = strategy.widest_pass, strategy.branching > 1
        if strategy.source != "stored":
            return [(width, is_tree)]
        trees = (one for one in self._strategies if one.branching > 1 and one.depth <= strategy.depth)
        return [(width, False), *((max(width, one.widest_pass), True) for one in trees)]

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs take."""
        return self._graphs.num_bytes

    # -- drafts -------------------------------------------------------------------------------------------------

    def draft_by_graph(self, count: int, strategy: Strategy) -> Proposal:
        """The learned drafter's drafts for the first ``count`` rows, by one graph; ``scores`` [B] is NaN or not."""
        learned = self._learned
        assert learned is not None, f"strategy {strategy.name} without a drafter"
        key = "draft", count, strategy
        out = self._graphs.capture_once_and_replay(
            key, lambda: self._draft_captured(count, strategy), (), (learned.known,)
        )
        # the target's graph may use the memory of these outputs
        tokens, scores, *more = (x.clone() for x in out)
        return Proposal(DraftTree(tokens, more[0]), scores, more[1]) if more else Proposal(DraftTree(tokens), scores)

    def _draft_captured(self, count: int, strategy: Strategy) -> tuple[Tensor, ...]:
        """Tokens [B, N], scores [B], and of trees parents and cells [B, N]."""
        learned, rows = self._learned, self._rows
        assert learned is not None
        feature = learned.run_on_next_positions(rows, slice(count), None, self.read_width)
        first = rows.lengths[:count] - rows.starts[:count]
        pick = learned.make_picker(self._noise.words[:count], first, rows.temperatures[:count], strategy.sharpness)
        found = learned.draft_chain_or_tree(rows, None, pick, strategy, feature)
        assert found.scores is not None
        if found.drafts.parents is None or found.cells is None:
            return found.drafts.tokens, found.scores
        return found.drafts.tokens, found.scores, found.drafts.parents, found.cells

    # -- the target ---------------------------------------------------------------------------------------------

    def verify_and_commit(self, drafts: DraftTree, truncates: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Verify drafts of a bucket and commit what the rows accept.

        ``truncates``: any row's rule is top-k or top-p.

        Returns the outcome [B, m + NUM_FIGURES] (choices along the longest path, how many of them count, drafts
        accepted, and 1 for an end token, 2 for a near-tie among them, 3 for both), log-probs along the path [B, m] and
        which nodes are on it [B, N]; they hold until the next graph runs.
        """
        count, width = drafts.tokens.shape
        inputs = (drafts.tokens,) if drafts.parents is None else (drafts.tokens, drafts.parents)
        form = _Form(width, drafts.parents is not None, truncates)
        run = partial(self._verify_and_commit_captured, truncates=truncates)
        outcome, log_probs, on_path = self._graphs.capture_once_and_replay(
            ("verify", count, form), run, inputs, (self._rows.lengths,)
        )
        return outcome, log_probs, on_path

    def _verify_and_commit_captured(
        self, tokens: Tensor, parents: Tensor | None = None, *, truncates: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, n = tokens.shape
        drafts = DraftTree(tokens) if parents is None else make_tree(tokens, parents, n - 1)
        features, logits = self._target.forward(drafts, None)
        choice = self._choose(drafts, self._mask_truncated_tokens(logits) if truncates else logits)
        longest = min(n, self._longest)  # no path is deeper than the deepest strategy
        accepted = self._target.accepted_path(drafts, choice.token.view(count, n), longest)
        log_probs = self._log_probs(choice, logits, truncates).view(count, n).gather(1, accepted.path)
        near = self._near_ties(choice, count, n).view(count, n).gather(1, accepted.path)
        reached = torch.arange(near.shape[1], device=tokens.device) < accepted.counts.unsqueeze(1)
        self._target.commit(drafts, accepted, features)
        flags = accepted.ended.long() + 2 * (near & reached).any(1).long()
        figures = torch.stack((accepted.counts, accepted.on_path.sum(1) - 1, flags), 1)
        return torch.cat([accepted.chosen, figures], 1), log_probs, accepted.on_path

    def _mask_truncated_tokens(self, logits: Tensor) -> Tensor:
        """Logits [B, N, used tokens] with -inf where a row's rule does not let it choose."""
        count, n = logits.shape[:2]
        allowed = logits[..., : self._noise.vocab_size].flatten(0, 1)
        scaled = allowed / self._node_temperatures(count, n).unsqueeze(1)
        rules = [rule[:count].repeat_interleave(n) for rule in (self._rows.top_k, self._rows.top_p)]
        # sorting takes much memory: some rows at a time
        parts = zip(*(torch.split(x, _SORTED_ROWS) for x in (scaled, *rules)), strict=True)
        kept = scaled >= torch.cat([lowest_kept_scores(*part) for part in parts])
        return allowed.masked_fill(~kept, -torch.inf).view(count, n, -1)

    def _choose(self, drafts: DraftTree, logits: Tensor) -> GumbelChoice:
        """The target's choice at each node, flat [B * N]."""
        rows, (count, n) = self._rows, drafts.tokens.shape
        depths = torch.arange(n, device=logits.device) if drafts.depths is None else drafts.depths
        position = (rows.lengths[:count] - rows.starts[:count]).unsqueeze(1) + depths
        return gumbel_argmax(
            logits.flatten(0, 1),
            rows.temperatures[:count].unsqueeze(1).expand(-1, n).flatten().contiguous(),
            self._noise.words[:count].unsqueeze(1).expand(-1, n, -1).flatten(0, 1).contiguous(),
            position.flatten(),
            self._noise.vocab_size,
        )

    def _log_probs(self, choice: GumbelChoice, logits: Tensor, truncates: bool) -> Tensor:
        """Log-probabilities [B * N] of the choices, before any truncation, as ``token_log_probs`` has them."""
        if not truncates:
            return choice.scaled_logit - choice.log_normaliser
        # the choice knows only what was allowed
        logits = logits[..., : self._noise.vocab_size]
        return token_log_probs(
            logits.flatten(0, 1), choice.token, self._node_temperatures(*logits.shape[:2]).unsqueeze(1)
        )

    def _near_ties(self, choice: GumbelChoice, count: int, n: int) -> Tensor:
        """Choices [B * N] that the tie guard must decide, as a mask."""
        zone = score_tolerances(self.tolerance, self._rows.temperatures[:count]).unsqueeze(1).expand(-1, n).flatten()
        return choice.best - choice.second < zone

    def _node_temperatures(self, count: int, n: int) -> Tensor:
        """Temperatures [B * N] of the nodes' rows; 1 for greedy ones."""
        temperatures = self._rows.temperatures[:count]
        return torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1).expand(-1, n).flatten()
