"""Proposes the next tokens of every live sequence, with the same noise the target will sample with.

A draft token is the argmax of ``sharpness * drafter_logits / temperature + G[t, :]``: where drafter and target agree
in distribution, they agree in the token (method: shared-noise, Gumbel-max coupling). Knows no verification.
Shapes: ``B`` rows, ``k`` draft length, ``n`` pass width, ``V`` vocabulary, ``H`` hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.ngram import NgramDrafter
from tlt_hpc.rollout.kv_cache import KVCache
from tlt_hpc.rollout.sampling import SamplingRule

_CATCH_UP_WIDTH = 256
"""Positions of a row in one catch-up pass: a drafter that rested through a long response has much to read."""


class LearnedDrafts:
    """Chains from the learned drafter, whose own one-layer cache follows the target's committed features."""

    def __init__(
        self,
        drafter: Drafter,
        decoder: Decoder,
        rule: SamplingRule,
        sharpness: float,
        num_rows: int,
        num_positions: int,
    ) -> None:
        self._drafter, self._decoder, self._rule = drafter, decoder, rule
        self._scale = sharpness / rule.temperature if rule.temperature > 0 else 1.0
        self._cache = KVCache(decoder.shape, num_rows, num_positions, decoder.dtype, decoder.device, num_layers=1)
        self._known = torch.zeros(num_rows, dtype=torch.int64, device=decoder.device)
        """Positions of each row whose true features the cache has seen."""
        self._rows = torch.arange(num_rows, device=decoder.device)

    def set_rows(self, rows: list[int]) -> None:
        """Give rows to new sequences, of which nothing is known yet."""
        self._known[rows] = 0

    def move_row(self, source: int, target: int, length: int) -> None:
        self._cache.move_row(source, target, length)
        self._known[target] = self._known[source]

    @torch.inference_mode()
    def propose(self, tokens: Tensor, features: Tensor, lengths: Tensor, noise: Tensor, depth: int) -> Tensor:
        """Drafts [B, depth] after ``lengths`` [B] committed tokens of ``tokens`` [B, P].

        ``features`` [B, P, H] hold the target's at positions 0..length-2, ``noise`` [B, depth.., V] starts at the
        position of the first draft. Catches up with all positions it has not seen, however long it was not asked.
        """
        num_rows = len(lengths)
        rows = self._rows[:num_rows]
        last = lengths - 2  # the newest position with a true feature
        known = self._known[:num_rows]
        width = max(1, int((last - known).max()) + 1)
        # every row's window ends at or after its newest position; what it covers beyond is overwritten next time
        start = torch.minimum(known, last.clamp(min=0))
        feature = torch.zeros_like(features[:num_rows, 0])
        for begin in range(0, width, _CATCH_UP_WIDTH):
            columns = torch.arange(begin, min(width, begin + _CATCH_UP_WIDTH), device=rows.device)
            index = (start.unsqueeze(1) + columns).clamp(max=tokens.shape[1] - 2)
            embedded = F.embedding(tokens[rows.unsqueeze(1), index + 1], self._decoder.embedding)
            out = self._pass(embedded, features[rows.unsqueeze(1), index], index)
            at = last - start - begin
            inside = ((at >= 0) & (at < len(columns))).unsqueeze(1)
            feature = torch.where(inside, out[rows, at.clamp(0, len(columns) - 1)], feature)
        self._known[:num_rows] = lengths - 1
        drafts = []
        for d in range(depth):
            token = self._pick(feature, noise[:, d])
            drafts.append(token)
            if d + 1 < depth:
                embedded = F.embedding(token, self._decoder.embedding).unsqueeze(1)
                feature = self._pass(embedded, feature.unsqueeze(1), (last + 1 + d).unsqueeze(1)).squeeze(1)
        return torch.stack(drafts, 1)

    def _pass(self, embedded: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        num_rows, width = positions.shape
        attend = self._cache.attend(positions)
        out: Tensor = self._drafter(embedded.flatten(0, 1), features.flatten(0, 1), positions.flatten(), attend)
        return out.view(num_rows, width, -1)

    def _pick(self, feature: Tensor, noise: Tensor) -> Tensor:
        logits = self._decoder.logits(feature)[:, : self._rule.num_tokens]
        if self._rule.temperature == 0:
            return logits.argmax(-1)
        return (logits * self._scale + noise[:, : self._rule.num_tokens]).argmax(-1)


class NgramDrafts:
    """Chains of what followed the same context before; several known continuations compete under the noise."""

    def __init__(self, table: NgramDrafter, rule: SamplingRule, sharpness: float) -> None:
        self._table, self._rule, self._sharpness = table, rule, sharpness

    def propose(self, contexts: Sequence[list[int]], noise: Tensor, depth: int) -> list[list[int]]:
        """At most ``depth`` drafts for each row's tokens so far, fewer where no context is known."""
        rows = noise.tolist() if noise.shape[-1] <= 256 else None
        return [
            self._chain(context, noise[b] if rows is None else rows[b], depth) for b, context in enumerate(contexts)
        ]

    def _chain(self, context: list[int], noise: Tensor | list[list[float]], depth: int) -> list[int]:
        tail = context[-self._table.orders[0] :]
        drafts: list[int] = []
        while len(drafts) < depth and (found := self._table.continuations(tail)):
            token = found[0] if len(found) == 1 else self._pick(found, noise[len(drafts)])
            drafts.append(token)
            tail = [*tail[-self._table.orders[0] + 1 :], token]
        return drafts

    def _pick(self, found: tuple[int, ...], noise: Tensor | list[float]) -> int:
        if self._rule.temperature == 0:
            return found[0]
        # recency stands in for frequency: the i-th most recent continuation weighs 1 / (i + 1)
        scores = [float(noise[token]) - self._sharpness * math.log(i + 1) for i, token in enumerate(found)]
        return found[scores.index(max(scores))]
