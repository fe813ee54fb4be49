"""One pass of the target over the spans of the rows: forward, the walk along its choices, and what is kept of it.

Looks at no tensor's numbers, so that graphs can capture it. Knows neither how drafts come about nor how a token is
chosen.
Shapes: ``T`` tokens of a pass, ``R`` rows, ``m`` columns of the longest path, ``V`` vocabulary, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.kv_cache import Layout, PagedCache
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.scheduler import PrefillChunk
from tlt_hpc.rollout.spans import Spans, Walk, emitted_counts, walk
from tlt_hpc.rollout.transfer import upload

NUM_FIGURES = 4
"""Numbers of a row's outcome beside its tokens: their count, drafts accepted, and 1 for an end token and a near-tie."""


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted path of each row, and what it emits."""

    walk: Walk
    chosen: Tensor
    """Choices along the path [R, m]."""
    counts: Tensor
    """Choices that are emitted [R]."""
    ended: Tensor
    """True where the last of them is an end token [R]."""

    @property
    def path(self) -> Tensor:
        """The path's nodes [R, m]."""
        return self.walk.path

    @property
    def is_emitted(self) -> Tensor:
        """The columns of the path that count, a mask [R, m]."""
        return torch.arange(self.path.shape[1], device=self.counts.device) < self.counts.unsqueeze(1)


class PassOutcome(NamedTuple):
    """What a pass has given the rows."""

    figures: Tensor
    """Choices along the path [R, m], of which as many count as the next column says, and the other ``NUM_FIGURES``."""
    log_probs: Tensor
    """Of these choices [R, m]."""
    on_path: Tensor | None = None
    """Of trees the nodes on the path, a mask [T]."""


Decide = Callable[[Spans, Tensor], tuple[AcceptedPath, Tensor, Tensor | None]]
"""From a pass's spans and logits [T, V]: the accepted path, the log-probs [R, m] of its choices, and a mask [T] of the
choices that are in doubt, if any may be left.
"""


@dataclass(frozen=True)
class TargetPass:
    """The target over rows whose keys and values are in a cache."""

    decoder: Decoder
    rows: LiveRows
    cache: PagedCache
    feature_layers: tuple[int, ...] = ()
    """Layers whose inputs are kept of every position, beside the hidden state."""

    def prefill(self, chunk: PrefillChunk) -> None:
        """Read a chunk of prompts, or of texts that were preempted: keep its keys, values and features."""
        cache, device, responses = self.cache, self.decoder.device, chunk.responses
        # a sequence with less to do repeats its last position: the same values to the same place
        columns = [
            [min(response.num_cached + i, end - 1) for i in range(chunk.width)]
            for response, end in zip(responses, chunk.ends, strict=True)
        ]
        tokens = [[one.text[i] for i in row] for one, row in zip(responses, columns, strict=True)]
        positions = upload(columns, device)
        width = cache.tables.shape[1]
        tables = upload([one.pages + [cache.num_pages] * (width - len(one.pages)) for one in responses], device)
        attend = cache.make_attention(chunk.layout, tables, positions)
        flat = upload(tokens, device).flatten(), positions.flatten()
        _, features = self.decoder.features(*flat, attend, self.feature_layers)
        if cache.features is not None:
            cache.features[cache.slots_of_positions(positions, tables).flatten()] = features

    def verify_and_commit(self, spans: Spans, layouts: Sequence[Layout | None], decide: Decide) -> PassOutcome:
        """Verify the drafts of spans and commit what is accepted; ``layouts``: of the rows of each group of spans."""
        attend = self.cache.make_span_attention(spans, layouts)
        hidden, features = self.decoder.features(
            spans.tokens.clamp(min=0), spans.positions, attend, self.feature_layers
        )
        accepted, log_probs, near_ties = decide(spans, self.decoder.logits(hidden))
        self._keep_path(spans, accepted, features)
        self.rows.append_tokens(accepted.chosen, accepted.counts)
        is_doubtful = torch.zeros_like(accepted.ended)
        if near_ties is not None:
            is_doubtful = (near_ties[accepted.path] & accepted.is_emitted).any(1)
        figures = torch.stack((accepted.counts, accepted.walk.accepted, accepted.ended, is_doubtful), 1)
        return PassOutcome(torch.cat([accepted.chosen, figures], 1), log_probs, accepted.walk.on_path)

    def accepted_path(self, spans: Spans, choices: Tensor) -> AcceptedPath:
        """The path through the target's choices [T]."""
        rows, found, num_rows = self.rows, walk(choices, spans), spans.layout.num_rows
        chosen = choices[found.path]
        room = rows.caps[:num_rows] - rows.lengths[:num_rows]
        counts, ended = emitted_counts(chosen, found.accepted, room, rows.ends)
        return AcceptedPath(found, chosen, counts, ended)

    def _keep_path(self, spans: Spans, accepted: AcceptedPath, features: Tensor) -> None:
        """Put the path's keys and values where a chain would have them, and keep the features [T, F]."""
        cache, rows, on_path = self.cache, spans.layout.rows, accepted.walk.on_path
        if on_path is None and cache.features is None:
            return
        slots = cache.slots_of_tokens(rows, spans.positions)
        if on_path is not None:  # a node off the path would overwrite the one on it
            slots = torch.where(on_path, slots, cache.spare_slot)
            cache.copy_slots(cache.slots_of_tokens(rows, spans.places), slots)
        if cache.features is not None:
            cache.features[slots] = features
