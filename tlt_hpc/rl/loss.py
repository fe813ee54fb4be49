"""Owns the formulas of the policy loss, as pure functions of tensors; knows no model, no batch layout and no ranks.

Shapes: T tokens, flat over all samples; V vocabulary.
"""

from __future__ import annotations

import torch

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped here, so that one wild token gives a large loss and not an infinite one (as verl does)."""


def token_log_probs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of each target token under the temperature-scaled softmax, before top-k, top-p and min-p.

    Args:
        logits: [T, V], any floating dtype; computed in float32.
        targets: [T] int64.
        temperature: above 0.

    Returns:
        [T] float32.
    """
    assert temperature > 0, f"temperature = {temperature}"
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy [T] in nats of the temperature-scaled softmax of ``logits`` [T, V]; carries no gradient."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def grpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped policy-gradient loss of each token (PPO, eq. 7; the two-sided clip is DAPO's).

    All tensors have one shape; sum the losses and divide by the global token count for the token mean.

    Returns:
        Loss per token, zero where ``mask`` is false; and, as bool, where the clip took effect.
    """
    ratio = (log_probs - old_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    return torch.where(mask, torch.maximum(unclipped, clipped), zero), (clipped > unclipped) & mask


def kl_k3(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples: exp(d) - d - 1, d = reference - policy.

    Never negative (Schulman's k3; DeepSeekMath eq. 4). All tensors have one shape.
    """
    difference = (reference_log_probs - log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1.0
