"""The losses and their gradients against TRL's own, where it has the same ones; TRL is here for that alone."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_hpc.config.recipes import RECIPES
from tlt_hpc.rl.advantage import token_weights
from tlt_hpc.rl.loss import kl_estimate, policy_loss

trainers = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is installed by requirements/cpu.txt")

LENGTHS, WIDTH, LONGEST = [7, 1, 4, 3], 7, 10
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
ROWS = torch.arange(len(LENGTHS))[:, None].expand_as(MASK)[MASK]


def make_inputs(spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs now, before the update, of a reference [4, 7], and advantages [4]."""
    generator = torch.Generator().manual_seed(3)
    now = -torch.rand(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    old = now + spread * torch.randn(now.shape, generator=generator, dtype=torch.float64)
    reference = now + 0.3 * torch.randn(now.shape, generator=generator, dtype=torch.float64)
    return now.requires_grad_(), old, reference, torch.tensor([1.2, -0.7, 0.4, -1.1], dtype=torch.float64)


def trl_self(now: torch.Tensor, **settings: Any) -> SimpleNamespace:
    """What ``_compute_loss`` asks its trainer for, the model's answer among it."""
    everyone = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
    return SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (now, torch.zeros_like(now), None),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
            "use_vllm": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": LONGEST,
            "accelerator": everyone,
            "_entropy_bonus_enabled": False,
            "_metrics": defaultdict(lambda: defaultdict(list)),
            **settings,
        }
    )


def trl_inputs(old: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor) -> dict[str, Any]:
    ids = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    return {
        "prompt_ids": ids,
        "prompt_mask": ids + 1,
        "completion_ids": ids.expand(-1, WIDTH),
        "completion_mask": MASK.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "old_logps": (old * MASK).sum(1),
        "ref_per_token_logps": reference,
        "num_items_in_batch": MASK.sum().double(),
    }


def our_loss(
    name: str,
    now: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    beta: float,
    aggregation: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The update's loss, and where a bound took effect."""
    recipe = RECIPES[name]
    losses, clipped = policy_loss(
        recipe.loss, now[MASK], old[MASK], advantages[ROWS], ROWS, recipe.clip_low, recipe.clip_high
    )  # fmt: skip
    losses = losses + beta * kl_estimate("k3", now[MASK], reference[MASK])
    weights = torch.from_numpy(token_weights(LENGTHS, aggregation or recipe.aggregation, LONGEST))
    return (losses * weights[ROWS]).sum(), clipped


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("name", "aggregation", "settings"),
    [
        ("grpo", "seq-mean-token-mean", {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
        ("grpo", "token-mean", {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
        ("dapo", None, {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}),
        ("dr-grpo", None, {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
        (
            "gspo",
            None,
            {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
        ),
        ("cispo", None, {"loss_type": "cispo", "epsilon_high": 5.0}),  # TRL's is the bound of the ratio itself
    ],
)
def test_losses_and_gradients_are_trls(name: str, aggregation: Any, settings: dict[str, Any], beta: float) -> None:
    now, old, reference, advantages = make_inputs(spread=2.0 if name == "cispo" else 0.3)
    compute = trainers.GRPOTrainer._compute_loss
    wanted = compute(trl_self(now, beta=beta, **settings), None, trl_inputs(old, reference, advantages))
    found, clipped = our_loss(name, now, old, reference, advantages, beta, aggregation)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
    (theirs,), (ours,) = torch.autograd.grad(wanted, now), torch.autograd.grad(found, now)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    assert theirs.abs().max() > 0 and clipped.any() and not clipped.all(), "no bound was at work"
