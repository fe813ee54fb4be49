"""Corrections for a rollout engine whose probabilities differ from the trainer's, and the warning about it.

The functions are pure; tensors [T] are flat over whole responses.
"""

from __future__ import annotations

import torch

from tlt_hpc.config.recipes import Correction
from tlt_hpc.rl.loss import LARGEST_LOG_RATIO


def correction_weights(
    correction: Correction, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the tokens' losses, and bool where a bound took effect; both [T], without gradient.

    With w = pi_old / pi_rollout of the token; the papers of the first two have no lower bound (low = 0):

    - ``tis``: w, at least low and at most high, truncated importance sampling ("Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training", Yao et al. 2025; Ionides 2008).
    - ``mis``: w where low <= w <= high, else 0, masked importance sampling ("When Speed Kills Stability", Liu et al.
      2025).
    - ``icepop``: w where low <= w <= high, else 0 ("Every Step Evolves", 2510.18855, eq. 4 and 5).

    Args:
        old_log_probs: [T], of the policy that the update began with, by the trainer.
        rollout_log_probs: [T], of the same tokens, as the rollout engine recorded them.
    """
    if correction.name == "none":
        return torch.ones_like(old_log_probs), torch.zeros_like(old_log_probs, dtype=torch.bool)
    difference = (old_log_probs - rollout_log_probs).detach()
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    outside = (ratio < correction.low) | (ratio > correction.high)
    if correction.name == "tis":
        return ratio.clamp(correction.low, correction.high), outside
    return ratio.masked_fill(outside, 0.0), outside


def mismatch_terms(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token's distances, all [T]: |p_old - p_rollout|, and estimates k1 and k3 of KL(rollout || trainer).

    The tokens are samples of the rollout's distribution, so that with d = log p_rollout - log p_old the means of d and
    of exp(-d) - 1 + d are the distance (Schulman, "Approximating KL divergence").
    """
    difference = (rollout_log_probs - old_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (
        (old_log_probs.exp() - rollout_log_probs.exp()).abs(),
        difference,
        torch.expm1(-difference) + difference,
    )


# -- what to tell the user --------------------------------------------------------------------------------------------

LARGEST_K3 = {"float32": 1e-6, "bfloat16": 1e-2}
"""Distances between engine and trainer that rounding alone does not explain. In float32 it gives 1e-12 and less; for
bfloat16 the field reports 1e-4 to 1e-3 (verl's guide to rollout correction calls 1e-3 healthy)."""


class MismatchWatch:
    """Warns once in a start that rollout and trainer give different probabilities."""

    def __init__(self, dtype: str, corrected: bool) -> None:
        """``dtype``: ``model.dtype``; ``corrected``: whether a rollout correction is on."""
        self._dtype, self._corrected, self._has_warned = dtype, corrected, False

    def look(self, probs_diff: float, k3: float) -> str:
        """The warning for a step with these distances, token means over all ranks; empty if there is none."""
        if self._has_warned or not k3 > LARGEST_K3[self._dtype]:
            return ""
        self._has_warned = True
        found = f"rollout and trainer give different probabilities: mean difference {probs_diff:.3g}, k3 {k3:.3g}"
        if self._dtype == "float32":
            return (
                f"{found}, far more than float32 explains: they do not hold the same weights, or one of them computes "
                "wrongly on this device; run `tlt compare` with speculation.mode = 'plain' and report it"
            )
        remedy = (
            "lower optimizer.learning_rate, or use model.dtype = 'float32'"
            if self._corrected
            else "set algorithm.rollout_correction = 'tis' or 'icepop', or use model.dtype = 'float32'"
        )
        return f"{found}, more than bfloat16's rounding usually gives; {remedy}"
