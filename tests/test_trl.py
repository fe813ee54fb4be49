"""The losses and their gradients against TRL's own, where it has the same ones; TRL is here for that alone."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_hpc.config import AlgorithmSection
from tlt_hpc.rl.advantage import token_weights
from tlt_hpc.rl.loss import correction_weights, kl_estimate, policy_loss

trainers = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl is installed by requirements/test.txt")

LENGTHS, WIDTH, LONGEST = [7, 1, 4, 3], 7, 10
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
ROWS = torch.arange(len(LENGTHS))[:, None].expand_as(MASK)[MASK]


ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.1], dtype=torch.float64)
CHANGES = torch.tensor(
    [[1, -1, 1, 0.1, 1, -0.1, 1], [1] + 6 * [0], [-1, 1, -1, -0.1, 0, 0, 0], [-1, 1, -1] + 4 * [0]], dtype=torch.float64
)
"""Log-ratios, to be scaled: of either advantage tokens above and below the bounds, and whole responses too."""


def make_inputs(spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs now, before the update and of a reference, [4, 7]."""
    generator = torch.Generator().manual_seed(3)
    now = -torch.rand(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64)
    reference = now + 0.3 * torch.randn(now.shape, generator=generator, dtype=torch.float64)
    return now.requires_grad_(), (now - spread * CHANGES).detach(), reference


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


def trl_inputs(old: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor = MASK, **more: Any) -> dict[str, Any]:
    ids = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    return {
        "prompt_ids": ids,
        "prompt_mask": ids + 1,
        "completion_ids": ids.expand(-1, WIDTH),
        "completion_mask": mask.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum().double(),
        **more,
    }


def our_loss(
    name: Any, now: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, beta: float = 0.0, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The update's loss, and where a bound took effect."""
    algorithm = AlgorithmSection(name=name, **changes)
    recipe = algorithm.recipe
    bounds = recipe.clip_low, recipe.clip_high, algorithm.clip_dual
    losses, clipped = policy_loss(recipe.loss, now[MASK], old[MASK], ADVANTAGES[ROWS], ROWS, *bounds)
    losses = losses + beta * kl_estimate("k3", now[MASK], reference[MASK])
    weights = torch.from_numpy(token_weights(LENGTHS, recipe.aggregation, LONGEST))
    return (losses * weights[ROWS]).sum(), clipped


def assert_same(found: torch.Tensor, wanted: torch.Tensor, now: torch.Tensor) -> None:
    assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
    (theirs,), (ours,) = torch.autograd.grad(wanted, now), torch.autograd.grad(found, now)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    assert theirs.abs().max() > 0


TOKEN_BOUNDS = {"epsilon_low": 0.2, "epsilon_high": 0.2}
UNEQUAL_BOUNDS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
SEQUENCE_BOUNDS = {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("grpo", {"aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo", **TOKEN_BOUNDS}),
        ("grpo", {}, {"loss_type": "bnpo", **TOKEN_BOUNDS}),
        ("dapo", {}, {"loss_type": "dapo", **UNEQUAL_BOUNDS}),
        ("dr-grpo", {}, {"loss_type": "dr_grpo", **TOKEN_BOUNDS}),
        ("gspo", {}, {"loss_type": "grpo", **SEQUENCE_BOUNDS}),
        ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),  # TRL's is the bound of the ratio itself
        ("dapo", {"clip_dual": 3.0}, {"loss_type": "dapo", **UNEQUAL_BOUNDS}),
        ("gspo", {"clip_dual": 1.5}, {"loss_type": "grpo", **SEQUENCE_BOUNDS}),
    ],
)
def test_losses_and_gradients_are_trls(
    name: str, changes: dict[str, Any], settings: dict[str, Any], beta: float
) -> None:
    now, old, reference = make_inputs(spread=2.0 if name == "cispo" or changes.get("clip_dual") else 0.5)
    trainer = trl_self(now, beta=beta, **settings)
    trainer.args.delta = changes.get("clip_dual")
    wanted = trainers.GRPOTrainer._compute_loss(trainer, None, trl_inputs(old, reference))
    found, clipped = our_loss(name, now, old, reference, beta, **changes)
    assert_same(found, wanted, now)
    assert clipped.any() and not clipped.all()


@pytest.mark.parametrize("bounds", [(0.0, 2.0), (0.5, 1.5)])
@pytest.mark.parametrize("name", ["tis", "mis", "icepop"])
def test_corrected_losses_are_trls(name: Any, bounds: tuple[float, float]) -> None:
    """The weights by the formulas of ``vllm_importance_sampling_mode``: token_truncate and token_mask."""
    now, old, reference = make_inputs(spread=0.5)
    recorded = old + torch.linspace(-1.2, 1.2, WIDTH, dtype=torch.float64)
    ratio = (old - recorded).exp()
    weights = ratio.clamp(*bounds) if name == "tis" else ratio * ((ratio >= bounds[0]) & (ratio <= bounds[1]))
    settings = {"loss_type": "dapo", **UNEQUAL_BOUNDS, "use_vllm": True, "vllm_importance_sampling_correction": True}
    inputs = trl_inputs(old, reference, importance_sampling_ratio=weights)
    trainer = trl_self(now, **settings, vllm_importance_sampling_mode="token_mask")
    wanted = trainers.GRPOTrainer._compute_loss(trainer, None, inputs)
    section = AlgorithmSection(rollout_correction={name: bounds})
    found, outside = correction_weights(section.correction, old[MASK], recorded[MASK])
    assert outside.any() and not outside.all()
    losses, _ = policy_loss("clip", now[MASK], old[MASK], ADVANTAGES[ROWS], ROWS, 0.2, 0.28)
    assert_same((losses * found).mean(), wanted, now)
