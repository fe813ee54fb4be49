"""The tie guard: near-ties are decided by a float64 pass that no batch, strategy or cache can influence.

Verify passes and one-token passes sum in different orders, so logits differ in their last bits and a near-tie could
flip. Where the best two perturbed scores lie closer than ``tolerance``, both paths ask this module instead.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.kv_cache import KVCache
from tlt_hpc.rollout.sampling import SamplingRule, choose

logger = logging.getLogger(__name__)

SAFETY = 20.0
"""How far the tolerance stands above the measured error between paths."""
_LEAST_ERROR = 1e-6


class TieGuard:
    """Decides doubtful tokens canonically, and watches that its tolerance stays wide enough."""

    def __init__(self, decoder: Decoder, rule: SamplingRule, active: bool) -> None:
        self.active = active
        self.tolerance = 0.0
        self.num_guarded = 0
        self.num_raised = 0
        self._decoder, self._rule = decoder, rule

    def probe(self, tokens: Tensor) -> None:
        """Measure the error of the fast path on one sequence [T] of the longest length in use; sets the tolerance."""
        fast = _cached_logits(self._decoder, tokens)
        error = float((fast.double() - self._decoder.reference_logits(tokens, len(fast))).abs().max())
        self.tolerance = SAFETY * self._in_score_units(max(error, _LEAST_ERROR))

    def decide(self, prefix: Tensor, noise: Tensor, fast_logits: Tensor) -> int:
        """The canonical next token after ``prefix`` [T], with noise [V] and the fast path's logits [V] to check."""
        self.num_guarded += 1
        exact = self._decoder.reference_logits(prefix, 1)[0]
        self._check(float((exact - fast_logits.double()).abs().max()))
        return int(choose(exact, noise.double(), self._rule, 0.0).token)

    def _check(self, error: float) -> None:
        if self._in_score_units(error) <= self.tolerance / 4:
            return
        self.num_raised += 1
        raised = SAFETY * self._in_score_units(error)
        logger.warning(
            "tie guard: logits off by %.2e, tolerance raised from %.2e to %.2e", error, self.tolerance, raised
        )
        self.tolerance = raised

    def _in_score_units(self, error: float) -> float:
        return error / self._rule.temperature if self._rule.temperature > 0 else error


def _cached_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits [T, V] of one sequence by the rollout's own path: a cached first half, then the rest in one pass."""
    cache = KVCache(decoder.shape, 1, len(tokens), decoder.dtype, decoder.device)
    half = len(tokens) // 2
    parts = []
    for start, end in ((0, half), (half, len(tokens))):
        if end > start:
            positions = torch.arange(start, end, device=decoder.device).unsqueeze(0)
            parts.append(decoder.hidden(tokens[start:end], positions.flatten(), cache.attend(positions)))
    return decoder.logits(torch.cat(parts))
