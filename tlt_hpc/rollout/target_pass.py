"""One pass of the target over the drafts of the rows: forward, the walk along its choices, and what is kept of it.

Tensors alone, and where a path's length is bounded ahead no look at them: what graphs capture is made of these parts.
Knows neither how drafts come about nor how a token is chosen.
Shapes: ``B`` rows, ``N`` nodes of a draft tree, ``m`` columns of the longest path, ``V`` vocabulary, ``F`` features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.kv_cache import Layout, PagedCache
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.scheduler import PrefillChunk
from tlt_hpc.rollout.transfer import upload
from tlt_hpc.rollout.tree import DraftTree, emitted_counts, nodes_on_path, path_nodes_in_order


@dataclass(frozen=True)
class AcceptedPath:
    """Accepted path of each row: nodes on it [B, N], in order [B, m], choices on it [B, m], and how many count [B]."""

    on_path: Tensor
    path: Tensor
    chosen: Tensor
    counts: Tensor
    ended: Tensor


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

    def forward(self, drafts: DraftTree, layout: Layout | None) -> tuple[Tensor, Tensor]:
        """Features to keep [B, N, F] and logits [B, N, V] at every node."""
        rows, cache = self.rows, self.cache
        count, n = drafts.tokens.shape
        first = (rows.lengths[:count] - 1).unsqueeze(1)
        places = first + torch.arange(n, device=first.device)
        positions = places if drafts.depths is None else first + drafts.depths
        attend = cache.make_attention(
            layout,
            cache.tables[:count],
            places,
            None if drafts.ancestors is None else first.squeeze(1),
            drafts.ancestors,
        )
        fed = drafts.tokens.clamp(min=0)
        flat = fed.flatten(), positions.flatten()
        hidden, features = self.decoder.features(*flat, attend, self.feature_layers)
        return features.view(count, n, -1), self.decoder.logits(hidden).view(count, n, -1)

    def accepted_path(self, drafts: DraftTree, chosen: Tensor, longest: int | None = None) -> AcceptedPath:
        """The path through the target's choices [B, N]; ``longest`` bounds its columns without a look at it."""
        rows, count = self.rows, len(chosen)
        on_path = nodes_on_path(chosen, drafts)
        if drafts.depths is None:
            path = torch.arange(drafts.num_nodes, device=chosen.device).expand(count, -1)
            along = chosen.clone()
        else:
            path = path_nodes_in_order(on_path, int(on_path.sum(1).max()) if longest is None else longest)
            along = chosen.gather(1, path)
        room = rows.caps[:count] - rows.lengths[:count]
        counts, ended = emitted_counts(along, on_path.sum(1) - 1, room, rows.ends)
        return AcceptedPath(on_path, path, along, counts, ended)

    def commit(self, drafts: DraftTree, accepted: AcceptedPath, features: Tensor) -> Tensor:
        """Put the path's keys and values where a chain would have them; keep features and tokens.

        Returns the columns [B, m] of the rows' texts at which the path's tokens stand.
        """
        rows, cache = self.rows, self.cache
        count, width = accepted.path.shape
        tables = cache.tables[:count]
        first = (rows.lengths[:count] - 1).unsqueeze(1)
        along = first + torch.arange(width, device=first.device)
        straight = drafts.depths is None
        if not straight and width > 1:
            source = cache.slots_of_positions(first + accepted.path, tables)
            cache.copy_slots(source[:, 1:].flatten(), cache.slots_of_positions(along, tables)[:, 1:].flatten())
        if cache.features is not None:
            kept = features if straight else values_along_path(features, accepted.path)
            cache.features[cache.slots_of_positions(along, tables).flatten()] = kept.flatten(0, 1)
        return rows.append_tokens(accepted.chosen, accepted.counts)


def noise_by_node(noise: Tensor, drafts: DraftTree) -> Tensor:
    """Noise [B, N, V] of each node's own position, from that of each depth [B, D + 1, V]."""
    if drafts.depths is None:
        return noise[:, : drafts.num_nodes]
    rows = torch.arange(len(noise), device=noise.device).unsqueeze(1)
    return noise[rows, drafts.depths]


def values_along_path(values: Tensor, path: Tensor) -> Tensor:
    """Values [B, m, X] on the path [B, m], of those [B, N, X] of all nodes."""
    return values.gather(1, path.unsqueeze(2).expand(-1, -1, values.shape[2]))
