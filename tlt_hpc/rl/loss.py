"""Owns the formulas of the policy loss, as pure functions of tensors; knows no model, no batch layout and no ranks.

Shapes: T tokens, flat over all samples.
"""

from __future__ import annotations

from typing import assert_never

import torch

from tlt_hpc.config.recipes import Correction, KLName, LossName

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped here, so that one wild token gives a large loss and not an infinite one (as verl does)."""
K3_BOUND = 10.0
"""Bound of ``low_var_kl``; reached where the reference makes a token 13.6 times as likely as the policy does."""


# -- policy losses: one value a token, and where a bound took effect --------------------------------------------------


def policy_loss(
    kind: LossName,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    rows: torch.Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, and as bool where a bound took effect; all [T].

    Args:
        kind: see the functions below.
        clip_dual: largest ratio of tokens with a negative advantage, above ``1 + clip_high``; 0: any. ``weight-clip``
            has none, for ``clip_high`` bounds its ratios whatever the advantage.
        log_probs: of the policy that is trained; they alone carry a gradient.
        old_log_probs: of the policy that the update began with.
        rows: the response that each token is of, int64; all tokens of a response, standing together.
    """
    if kind == "clip":
        return clipped_loss(log_probs, old_log_probs, advantages, clip_low, clip_high, clip_dual)
    if kind == "sequence-clip":
        return sequence_clipped_loss(log_probs, old_log_probs, advantages, rows, clip_low, clip_high, clip_dual)
    if kind == "weight-clip":
        return weight_clipped_loss(log_probs, old_log_probs, advantages, clip_low, clip_high)
    assert_never(kind)


def clipped_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus min(ratio A, clip(ratio, 1 - low, 1 + high) A) (PPO, 1707.06347, eq. 7; two bounds: DAPO, eq. 8).

    With ``clip_dual`` no more than minus dual A where A is negative (dual-clip PPO, 1912.09729, eq. 5). Shapes and
    results as ``policy_loss``.
    """
    ratio = _ratio(log_probs - old_log_probs)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    losses, outside = torch.maximum(unclipped, clipped), clipped > unclipped
    if not clip_dual:
        return losses, outside
    wild = (advantages < 0) & (ratio > clip_dual)
    return torch.where(wild, -clip_dual * advantages, losses), outside | wild


def sequence_clipped_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    rows: torch.Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``clipped_loss`` by the whole response's ratio, the geometric mean of its tokens' (GSPO, 2507.18071, eq. 7).

    Each token has the response's value, and the gradient of its own share, so that the mean over a response's tokens
    is the response's loss (GSPO-token, eq. 13 and 14). Shapes and results as ``policy_loss``.
    """
    difference = log_probs - old_log_probs
    mean = _mean_by_row(difference.detach(), rows)
    # the value of the mean, the gradient of the token's own term
    own = mean + (log_probs - log_probs.detach())
    return clipped_loss(own, torch.zeros_like(mean), advantages, clip_low, clip_high, clip_dual)


def weight_clipped_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus clip(ratio) A log-prob, the clipped ratio a constant; no token loses its gradient (MiniMax-M1, eq. 4).

    Shapes and results as ``policy_loss``.
    """
    ratio = _ratio((log_probs - old_log_probs).detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * log_probs, weight != ratio


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _mean_by_row(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Each token's row's mean, [T]; a row's tokens stand together."""
    if not rows.numel():
        return values
    counts = rows.unique_consecutive(return_counts=True)[1]  # type: ignore[no-untyped-call]
    means = torch.segment_reduce(values, "mean", lengths=counts)  # in one order on every device
    return means.repeat_interleave(counts)


# -- distance from the reference --------------------------------------------------------------------------------------


def kl_estimate(kind: KLName, log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's own samples; all tensors have one shape.

    With d = log-prob - reference (Schulman, "Approximating KL divergence"; as a loss: 2512.21852):

    - ``k1`` = d: unbiased; as a loss its gradient is zero in the mean.
    - ``k2`` = d^2 / 2: biased, but in the mean its gradient is that of KL(policy || reference).
    - ``k3`` = exp(-d) - 1 + d: unbiased and never negative; in the mean its gradient is that of KL(reference || policy)
      (DeepSeekMath, eq. 4).
    - ``k3+``: the value of k3 with the gradient of k2 (verl).
    - ``low_var_kl``: k3 held at ``K3_BOUND`` (verl and slime); tokens beyond have no gradient.
    """
    difference = (log_probs - reference_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if kind == "k1":
        return difference
    k2 = 0.5 * difference.square()
    if kind == "k2":
        return k2
    k3 = (-difference).exp() - 1.0 + difference
    if kind == "k3":
        return k3
    if kind == "k3+":
        return k3.detach() + (k2 - k2.detach())
    if kind == "low_var_kl":
        return k3.clamp(max=K3_BOUND)
    assert_never(kind)


# -- correction of a rollout engine whose probabilities differ from the trainer's --------------------------------------


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

    def warning_for_step(self, probs_diff: float, k3: float) -> str:
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
