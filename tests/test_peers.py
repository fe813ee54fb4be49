"""Each algorithm from scores to gradient against the formulas of verl, written down in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import ROOT
from logged import make_rollout
from torch import Tensor

from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.config import load_config
from tlt_hpc.config.recipes import RECIPES
from tlt_hpc.rl.advantage import token_weights
from tlt_hpc.rl.loss import kl_estimate, policy_loss
from tlt_hpc.rl.update import update_policy

TINY = ROOT / "jobs" / "tiny.toml"
LENGTHS, GROUP, WIDTH = [7, 1, 4, 3, 5, 2], 3, 7
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
ROWS = torch.arange(len(LENGTHS))[:, None].expand_as(MASK)[MASK]
SCORES = np.array([1, 0, 0.5, 0, 0, 1], np.float32)
BETA = 0.2


def make_inputs(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs now, before the update and of the reference, [6, 7]."""
    generator = torch.Generator().manual_seed(11)
    now = -torch.rand(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    old = now + spread * torch.randn(now.shape, generator=generator, dtype=torch.float64)
    reference = now + 0.5 * torch.randn(now.shape, generator=generator, dtype=torch.float64)
    return now.requires_grad_(), old, reference


# -- theirs: padded rows, one advantage a token -----------------------------------------------------------------------


def token_rewards(kl: Tensor) -> Tensor:
    """verl's ``apply_kl_penalty``: the score with the last token, the divergence with each."""
    rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] = float(SCORES[row])
    return rewards - BETA * kl * MASK


def whitened(values: Tensor) -> Tensor:
    """verl's ``masked_whiten``."""
    own = values[MASK]
    return (values - own.mean()) * (own.var(unbiased=True) + 1e-8).rsqrt()


def returns_to_go(rewards: Tensor) -> Tensor:
    """verl's sum from behind, with gamma = 1."""
    returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.float64)
    for place in reversed(range(WIDTH)):
        running = (rewards[:, place] + running) * MASK[:, place]
        returns[:, place] = running
    return returns


def verl_advantages(name: str, rewards: Tensor) -> Tensor:
    """``compute_*_outcome_advantage`` of verl."""
    if name == "reinforce++":
        return whitened(returns_to_go(rewards)) * MASK
    totals = rewards.sum(1)
    found = torch.zeros_like(totals)
    for start in range(0, len(totals), GROUP):
        group = totals[start : start + GROUP]
        for place, total in enumerate(group):
            others = (group.sum() - total) / (GROUP - 1)
            centred = total - (others if name == "rloo" else group.mean())
            divided = name in ("grpo", "dapo", "gspo", "cispo")
            found[start + place] = centred / (group.std() + 1e-6) if divided else centred
    tokens = found[:, None] * MASK
    return whitened(tokens) * MASK if name == "reinforce++-baseline" else tokens


def verl_losses(name: str, now: Tensor, old: Tensor, advantages: Tensor, clip_dual: float) -> Tensor:
    """``compute_policy_loss_vanilla``, ``_gspo`` and ``_cispo`` of verl, before the aggregation."""
    difference = now - old
    if name == "gspo":
        mean = (difference * MASK).sum(1) / MASK.sum(1)
        difference = now - now.detach() + mean.detach()[:, None]
        ratio, low, high = difference.clamp(max=10.0).exp(), 3e-4, 4e-4
    else:
        ratio, low, high = difference.clamp(-20, 20).exp(), 0.2, 0.28 if name == "dapo" else 0.2
    if name == "cispo":
        return -ratio.clamp(0.0, 5.0).detach() * advantages * now
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if clip_dual:
        losses = torch.where(advantages < 0, torch.minimum(-advantages * clip_dual, losses), losses)
    return losses


def verl_mean(name: str, losses: Tensor) -> Tensor:
    """``agg_loss`` of verl; of Dr.GRPO's it leaves out the mean over responses."""
    sums = (losses * MASK).sum(1)
    if name == "gspo":
        return (sums / MASK.sum(1)).mean()
    if name == "rloo":
        return sums.mean()
    if name == "dr-grpo":
        return sums.sum() / MASK.shape[1] / len(LENGTHS)
    return sums.sum() / MASK.sum()


# -- ours -------------------------------------------------------------------------------------------------------------


class Given:
    """A policy at a given distance [T] from its reference, which keeps the advantages that it is to learn from."""

    def __init__(self, kl: Tensor | None) -> None:
        self._kl = kl

    def reference_kl_by_token_all_ranks(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        assert self._kl is not None and [r.response_tokens.size for r in rollouts] == LENGTHS
        return self._kl[MASK].numpy()

    def update(self, rollouts: Sequence[Rollout], advantages: np.ndarray) -> None:
        self.advantages = advantages


def our_advantages(name: Any, kl: Tensor | None) -> np.ndarray:
    """[T], as ``update_policy`` gives them to the policy."""
    penalty = [] if kl is None else ["algorithm.kl_estimator=k1", f"algorithm.kl_coefficient={BETA}"]
    sizes = [f"rollout.prompts_per_step={len(LENGTHS) // GROUP}", f"rollout.group_size={GROUP}"]
    config = load_config(TINY, [f"algorithm.name={name}", *sizes, "algorithm.updates_per_step=1", *penalty])
    rollouts = [make_rollout(SampleKey(0, 0, 0, *divmod(i, GROUP)), [2], [3] * n) for i, n in enumerate(LENGTHS)]
    policy: Any = Given(kl)
    update_policy(config, policy, rollouts, SCORES)
    return np.asarray(policy.advantages)


CASES = [
    (name, in_reward, clip_dual)
    for name in RECIPES
    for in_reward in (False, True)
    for clip_dual in (0.0, 3.0)
    # the configuration refuses the others
    if not (in_reward and RECIPES[name].advantage == "group") and not (clip_dual and name == "cispo")
]


@pytest.mark.parametrize(("name", "in_reward", "clip_dual"), CASES)
def test_every_algorithm_is_verls(name: Any, in_reward: bool, clip_dual: float) -> None:
    recipe = RECIPES[name]
    now, old, reference = make_inputs(spread=3.0 if name == "cispo" else 1.5)
    kl = (old - reference).detach() if in_reward else None  # verl's k1, of the log-probs before the update
    theirs = verl_advantages(name, token_rewards(kl if kl is not None else torch.zeros_like(old)))
    ours = torch.from_numpy(our_advantages(name, kl)).double()
    torch.testing.assert_close(ours, theirs[MASK], rtol=2e-6, atol=2e-6)
    wanted = verl_mean(name, verl_losses(name, now, old, theirs, clip_dual))
    bounds = recipe.clip_low, recipe.clip_high, clip_dual
    losses, clipped = policy_loss(recipe.loss, now[MASK], old[MASK], ours, ROWS, *bounds)
    weights = torch.from_numpy(token_weights(LENGTHS, recipe.aggregation, WIDTH))
    found = (losses * weights[ROWS]).sum()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    (their_gradient,), (our_gradient,) = torch.autograd.grad(wanted, now), torch.autograd.grad(found, now)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-6)
    assert their_gradient.abs().max() > 1e-3 and clipped.any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+", "low_var_kl"])
def test_every_estimate_is_verls(kind: Any) -> None:
    """verl's ``kl_penalty``; its k3 and k3+ hold the value at 10 as its low_var_kl does, which ours do not."""
    now, _, reference = make_inputs(spread=1.5)
    difference = now - reference
    k2, k3 = 0.5 * difference**2, (-difference).exp() - 1 + difference
    assert k3.max() < 10
    wanted = {
        "k1": difference, "k2": k2, "k3": k3, "k3+": k2 - k2.detach() + k3.detach(), "low_var_kl": k3.clamp(-10, 10)
    }[kind]  # fmt: skip
    found = kl_estimate(kind, now, reference)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    theirs, ours = (torch.autograd.grad(each.sum(), now, retain_graph=True)[0] for each in (wanted, found))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
