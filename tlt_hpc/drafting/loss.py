"""The drafter's loss: hit the target's next feature, and the distribution the target's head reads from it. Pure.

EAGLE (arXiv 2401.15077, section 3.2): smooth-L1 on features plus soft cross-entropy through the frozen head.
Shapes: ``T`` packed pairs, ``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.drafting.packing import PackedBatch
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.layers import attend_documents


@dataclass(frozen=True)
class LossWeights:
    """Factors of the feature and the token term."""

    feature: float
    token: float


def drafter_loss(drafter: Drafter, batch: PackedBatch, embedding: Tensor, head: Tensor, weights: LossWeights) -> Tensor:
    """Mean loss over the pairs that predict response tokens; ``embedding`` and ``head`` [V, H] are the policy's."""
    with torch.no_grad():
        embedded = F.embedding(batch.next_tokens, embedding).to(batch.features.dtype)
    attend = attend_documents(drafter.shape, batch.documents)
    predicted = drafter(embedded, batch.features, batch.positions, attend)[batch.counts]
    wanted = batch.wanted[batch.counts]
    feature = F.smooth_l1_loss(predicted, wanted)
    with torch.no_grad():
        target = F.linear(wanted.to(head.dtype), head).float().softmax(-1)
    token = F.cross_entropy(F.linear(predicted.to(head.dtype), head).float(), target)
    return weights.feature * feature + weights.token * token
