"""The loss formulas against values worked out by hand, and their gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from tlt_hpc.models.policy_model import token_entropy, token_log_probs
from tlt_hpc.rl.loss import clipped_loss, kl_estimate


def losses_of(ratios: list[float], advantages: list[float]) -> tuple[list, list]:
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    log_probs = old + torch.tensor(ratios, dtype=torch.float64).log()
    losses, clipped = clipped_loss(log_probs, old, torch.tensor(advantages, dtype=torch.float64), 0.2, 0.28)
    return losses.tolist(), clipped.tolist()


def test_the_clip_takes_effect_only_where_it_lowers_the_objective() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.25, 1.25]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    losses, clipped = losses_of(ratios, advantages)
    assert losses == pytest.approx([-2.0, -1.28, 1.5, -0.5, 0.8, -1.25, 1.25])
    assert clipped == [False, True, False, False, True, False, False]


def test_the_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    losses, _ = clipped_loss(log_probs, log_probs.detach(), advantages, 0.2, 0.28)
    losses.sum().backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, -advantages)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_and_entropy_are_of_the_tempered_softmax(temperature: float) -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    probabilities = torch.softmax(logits.double() / temperature, -1)
    chosen = torch.tensor([float(row[target]) for row, target in zip(probabilities, targets, strict=True)])
    torch.testing.assert_close(token_log_probs(logits, targets, temperature), chosen.log(), rtol=1e-5, atol=1e-6)
    entropy = [-sum(p * math.log(p) for p in row.tolist()) for row in probabilities]
    torch.testing.assert_close(token_entropy(logits, temperature), torch.tensor(entropy), rtol=1e-5, atol=1e-6)


def test_no_tokens_give_no_loss_but_a_gradient_of_zero() -> None:
    logits = torch.randn(0, 5, requires_grad=True)
    token_log_probs(logits, torch.zeros(0, dtype=torch.int64), 1.0).sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, 5)


def test_k3_is_zero_at_equality_never_negative_and_unbiased() -> None:
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64), -1)
    reference = torch.log_softmax(torch.tensor([1.0, 0.5, -0.3, 0.1], dtype=torch.float64), -1)
    assert not kl_estimate("k3", policy, policy).any()
    estimates = kl_estimate("k3", policy, reference)
    assert (estimates > 0).all()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact)


def test_gradients_equal_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(8, dtype=torch.float64, generator=generator).requires_grad_()
    old, advantages = log_probs.detach() + 0.1, torch.randn(8, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: clipped_loss(x, old, advantages, 0.2, 0.28)[0], log_probs)
    assert torch.autograd.gradcheck(lambda x: kl_estimate("k2", x, old), log_probs)
    assert torch.autograd.gradcheck(lambda x: kl_estimate("k3", x, old), log_probs)
