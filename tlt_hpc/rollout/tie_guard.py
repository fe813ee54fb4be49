"""The tie guard: near-ties are decided by a float64 pass that no batch, strategy or cache can influence.

Verify passes and one-token passes sum in different orders, so logits differ in their last bits and a near-tie could
flip. Where the best two perturbed scores lie closer than ``score_tolerance``, both paths ask this module
instead. It is off in bfloat16 on GPUs, where kernels are batch-invariant.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import chain, cycle

import torch
from torch import Tensor

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.device_cache import AttentionKind, make_cache
from tlt_hpc.rollout.kv_cache import PoolSizes
from tlt_hpc.rollout.sampling import SamplingRule, choose_tokens

logger = logging.getLogger(__name__)

SAFETY = 8.0
"""Factor of the tolerance over the largest logit error e that was measured.

Were e a bound, 2 would do, since a gap between two scores is off by 2 e at most; but later texts exceed a probe of
four. Measured (commit 62a01a8): no gap of 2,460 tokens of SmolLM2 was off by more than 0.7 e,
whichever texts were probed. The embedded model's errors have a long tail: of 73,597 tokens one gap was off by 4.8 e
after a middling probe and 11 e after the lowest of 400, where one wrong token in 3e10 is expected.
"""
NUM_PROBED = 4
"""Texts whose errors count in the tolerance."""
_MIN_ERROR = 1e-6
_SCORE_ROUNDING = 2.0**-17
"""A gap of float32 scores below 64 is off by this at most even for exact logits: two roundings of either score."""
_PIECE = 128
"""Positions whose logits are held at once: those of a long text over a wide vocabulary would fill the memory."""


def score_tolerances(logit_tolerance: Tensor, temperatures: Tensor) -> Tensor:
    """The zone of doubt in perturbed scores at temperatures [...], as in ``TieGuard.score_tolerance``; 0: no guard."""
    zone = torch.where(temperatures > 0, (logit_tolerance / temperatures).clamp(min=_SCORE_ROUNDING), logit_tolerance)
    return torch.where(logit_tolerance > 0, zone, 0.0)


class TieGuard:
    """Decides doubtful tokens canonically, and watches that its tolerance stays wide enough."""

    def __init__(self, decoder: Decoder, active: bool, attention: AttentionKind = "auto") -> None:
        self._is_wanted = self.active = active
        self.logit_tolerance = 0.0
        """Width of the zone of doubt in logits; over the temperature it is one in perturbed scores."""
        self.num_guarded = 0
        self.num_raised = 0
        self._decoder, self._attention = decoder, attention
        self._errors = deque([0.0], maxlen=NUM_PROBED)
        """Largest logit errors of the texts last measured."""
        self._longest: list[list[int]] = []
        """The longest texts finished since the last measurement."""
        self._probed: list[int] = []
        """The text that was measured last."""

    def score_tolerance(self, rule: SamplingRule) -> float:
        """The zone of doubt in units of a rule's perturbed scores; 0 where the guard is off."""
        if not self.active:
            return 0.0
        if rule.temperature == 0:
            return self.logit_tolerance
        return max(self.logit_tolerance / rule.temperature, _SCORE_ROUNDING)

    @property
    def is_calibrated(self) -> bool:
        """True if anything was measured."""
        return bool(self._probed)

    def note_finished_text(self, text: list[int]) -> None:
        """Keep a finished text for the next measurement, if it is among the longest."""
        self._longest = sorted([*self._longest, text], key=len)[-NUM_PROBED:]

    def measure_on_longest_texts(self, most: int) -> None:
        """Measure on the longest texts since the last time, or on the last one again where there are none."""
        texts = self._longest[-most:] or [self._probed]
        self._longest, self._probed = [], texts[-1]
        if self._is_wanted and self._probed:
            self.measure_and_set_tolerance(texts)

    def measure_and_set_tolerance(self, texts: Sequence[list[int]]) -> None:
        """Measure the error of the fast path on sequences of the longest lengths in use; sets the tolerance.

        The ``NUM_PROBED`` last measured count. One text at each policy step is enough: a step moves the weights too
        little to change what rounding does to them, and a float64 pass over a long text takes its time.
        """
        self._errors.extend(_logit_error(self._decoder, text, self._attention) for text in texts)
        self.logit_tolerance = SAFETY * max(*self._errors, _MIN_ERROR)

    def decide_token_in_float64(self, prefix: Tensor, noise: Tensor, fast_logits: Tensor, rule: SamplingRule) -> int:
        """The canonical next token after ``prefix`` [T], with noise [V] and the fast path's logits [V] to check."""
        self.num_guarded += 1
        exact = self._decoder.reference_logits(prefix, 1)[0]
        self._raise_tolerance_if_needed(float((exact - fast_logits.double()).abs().max()))
        return int(choose_tokens(exact, noise.double(), rule, 0.0).token)

    def _raise_tolerance_if_needed(self, error: float) -> None:
        # a gap is off by twice the error at most: a quarter of the tolerance leaves as much again to unseen tokens
        if error <= self.logit_tolerance / 4:
            return
        self.num_raised += 1
        self._errors.append(error)
        raised = SAFETY * error
        logger.warning(
            "tie guard: logits off by %.2e, tolerance raised from %.2e to %.2e", error, self.logit_tolerance, raised
        )
        self.logit_tolerance = raised


def _logit_error(decoder: Decoder, text: list[int], attention: AttentionKind) -> float:
    """Largest difference of logits over one sequence, between the rollout's own path and float64."""
    tokens = torch.tensor(text, device=decoder.device)
    fast, exact = _hidden_by_rollout_path(decoder, tokens, attention), decoder.reference_hidden(tokens)
    pieces = zip(torch.split(fast, _PIECE), torch.split(exact, _PIECE), strict=True)
    return max(
        float((decoder.logits(a).double() - decoder.reference_logits_of_hidden(b)).abs().max()) for a, b in pieces
    )


def _hidden_by_rollout_path(decoder: Decoder, tokens: Tensor, attention: AttentionKind) -> Tensor:
    """Hidden states [T, H] of one sequence by the rollout's path: a prefilled half, then the rest by few tokens a pass,
    some more, some fewer, as rounds feed them.
    """
    size = 64
    pages = list(range(-(-len(tokens) // size)))
    sizes = PoolSizes(len(pages), size, 1, len(tokens))
    cache = make_cache(decoder.part, sizes, decoder.dtype, decoder.device, attention)
    cache.set_table(0, pages)
    layout = cache.build_layout([pages], len(pages))
    parts, start = [], 0
    for width in chain([max(1, len(tokens) // 2)], cycle((1, 5, 9, 64, 1, 3))):
        positions = torch.arange(start, min(start + width, len(tokens)), device=decoder.device).unsqueeze(0)
        attend = cache.make_attention(layout, cache.tables, positions)
        parts.append(decoder.hidden_states(tokens[start : start + width], positions.flatten(), attend))
        start += width
        if start >= len(tokens):
            return torch.cat(parts)
    raise AssertionError("the widths never end")
