"""The algorithms' parts against values worked out by hand, and what a name stands for against the papers."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tlt_hpc.config import AlgorithmSection, ConfigError, load_config, parse_config, to_toml
from tlt_hpc.config.recipes import RECIPES, Recipe
from tlt_hpc.models.policy_model import token_entropy, token_log_probs
from tlt_hpc.rl.advantage import (
    centred_advantages,
    leave_one_out_advantages,
    overlong_penalties,
    whiten,
)
from tlt_hpc.rl.aggregation import token_weights
from tlt_hpc.rl.loss import (
    clipped_loss,
    kl_estimate,
    policy_loss,
    sequence_clipped_loss,
    weight_clipped_loss,
)

ROOT = Path(__file__).parent.parent
REWARDS = np.array([1, 0, 0, 3, 2, 2, 2, 2], np.float32)
LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8])


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("grpo", ("group", "clip", "token-mean", 0.2, 0.2)),
        ("dr-grpo", ("group-mean", "clip", "seq-mean-token-sum-norm", 0.2, 0.2)),
        ("dapo", ("group", "clip", "token-mean", 0.2, 0.28)),
        ("rloo", ("leave-one-out", "clip", "seq-mean-token-sum", 0.2, 0.2)),
        ("gspo", ("group", "sequence-clip", "seq-mean-token-mean", 3e-4, 4e-4)),
    ],
)
def test_what_a_name_stands_for(name: Any, parts: Any) -> None:
    assert AlgorithmSection(name=name).recipe == Recipe(*parts)


@pytest.mark.parametrize(
    ("overrides", "bounds"),
    [
        (["algorithm.name=gspo", "algorithm.clip_low=0.1"], (0.1, 4e-4)),
        (["algorithm.name=cispo", "algorithm.clip_high=1"], (1.0, 1.0)),
    ],
)
def test_bounds_that_are_set_replace_the_algorithms(overrides: list[str], bounds: tuple[float, float]) -> None:
    recipe = load_config(ROOT / "jobs" / "tiny.toml", overrides).algorithm.recipe
    assert (recipe.clip_low, recipe.clip_high) == bounds


def test_what_a_run_saves_is_resolved() -> None:
    text = to_toml(load_config(ROOT / "jobs" / "tiny.toml", ["algorithm.name=gspo"]))
    section = text[text.index("[algorithm]") : text.index("[optimizer]")]
    assert "clip_high = 0.0004" in section and 'kl_estimator = "k3"' in section and "auto" not in section
    assert parse_config(tomllib.loads(text)).algorithm.recipe == RECIPES["gspo"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("name=ppo", "algorithm.name = 'ppo': input should be 'grpo', 'dr-grpo', 'dapo'"),
        ("clip_low=true", "algorithm.clip_low = true: use a number from 0 to 1e+06, or 'auto'"),
        ("name=rloo", "rollout.group_size = 1 with algorithm.name = 'rloo', whose advantage needs a group; use"),
    ],
)
def test_what_cannot_be_is_one_line(override: str, said: str) -> None:
    with_it = {"name=rloo": ["rollout.group_size=1", "rollout.prompts_per_step=16"]}
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "jobs" / "tiny.toml", [f"algorithm.{override}", *with_it.get(override, [])])
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


# -- advantages -------------------------------------------------------------------------------------------------------


def test_the_groups_mean_is_the_baseline() -> None:
    assert centred_advantages(REWARDS, 4).tolist() == [0, -1, -1, 2, 0, 0, 0, 0]


def test_leave_one_out_is_the_reward_less_the_others_mean() -> None:
    wanted = [1 - 1, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3, 0, 0, 0, 0]
    assert leave_one_out_advantages(REWARDS, 4).tolist() == pytest.approx(wanted)


def test_whitened_values_have_mean_zero_and_variance_one_over_tokens() -> None:
    whitened = whiten(REWARDS.astype(np.float64), LENGTHS)
    tokens = np.repeat(whitened.astype(np.float64), LENGTHS)
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.var(ddof=1) == pytest.approx(1, abs=1e-6)
    assert (np.argsort(whitened, kind="stable") == np.argsort(REWARDS, kind="stable")).all()
    assert whiten(np.full(3, 0.1), np.array([1, 2, 3])).tolist() == [0, 0, 0]


def test_coming_close_to_the_longest_costs_evenly() -> None:
    lengths = np.array([1, 80, 81, 90, 100, 120])
    assert overlong_penalties(lengths, 100, 20).tolist() == pytest.approx([0, 0, -0.05, -0.5, -1, -1])


# -- aggregation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("token-mean", [1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-mean", [1 / 3, 1 / 6, 1 / 9]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_what_a_token_counts(kind: Any, wanted: list[float]) -> None:
    weights = token_weights([1, 2, 3], kind, norm_length=10)
    assert weights.tolist() == pytest.approx(wanted)
    if kind.endswith("mean"):
        assert float((weights * [1, 2, 3]).sum()) == pytest.approx(1), "a mean of ones is one"


# -- losses -----------------------------------------------------------------------------------------------------------


def tensors(ratios: list[float], advantages: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    log_probs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return log_probs, old, torch.tensor(advantages, dtype=torch.float64)


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    log_probs, old, advantages = tensors([2.0, 0.5, 1.21, 1.0], [3.0, 3.0, 1.0, 1.0])
    rows = torch.tensor([0, 0, 1, 1])
    losses, clipped = sequence_clipped_loss(log_probs, old, advantages, rows, 0.2, 0.05)
    assert losses.tolist() == pytest.approx([-3.0, -3.0, -1.05, -1.05])  # 1.0, and 1.1 held at 1.05
    assert clipped.tolist() == [False, False, True, True]
    losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx([-3.0, -3.0, 0.0, 0.0])


def test_a_clipped_weight_leaves_every_token_its_gradient() -> None:
    log_probs, old, advantages = tensors([9.0, 2.0, 0.01], [1.0, -1.0, 2.0])
    losses, clipped = weight_clipped_loss(log_probs, old, advantages, 1.0, 5.0)
    losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx([-6.0, 2.0, -0.02])
    assert clipped.tolist() == [True, False, False]


def test_the_clip_takes_effect_only_where_it_lowers_the_objective() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.25, 1.25]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    losses, clipped = clipped_loss(*tensors(ratios, advantages), 0.2, 0.28)
    assert losses.tolist() == pytest.approx([-2.0, -1.28, 1.5, -0.5, 0.8, -1.25, 1.25])
    assert clipped.tolist() == [False, True, False, False, True, False, False]


@pytest.mark.parametrize("kind", ["clip", "sequence-clip", "weight-clip"])
def test_at_ratio_one_every_loss_has_the_policy_gradient(kind: Any) -> None:
    log_probs, old, advantages = tensors([1.0, 1.0, 1.0], [1.0, -0.5, 2.0])
    losses, clipped = policy_loss(kind, log_probs, old, advantages, torch.tensor([0, 0, 1]), 0.2, 0.2)
    losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx([-1.0, 0.5, -2.0])
    assert not clipped.any()


def test_a_wild_ratio_stays_finite_whatever_the_loss() -> None:
    one = torch.tensor([0.0])
    for kind in ("clip", "sequence-clip", "weight-clip"):
        losses, _ = policy_loss(kind, one, one - 500, -torch.ones(1), torch.tensor([0]), 0.2, 0.2)
        assert losses.isfinite().all()


# -- distance from the reference --------------------------------------------------------------------------------------


def test_the_estimates_of_the_distance() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_estimate("k1", policy, reference).tolist() == pytest.approx([0.5, -1.0])
    assert kl_estimate("k2", policy, reference).tolist() == pytest.approx([0.125, 0.5])
    assert kl_estimate("k3", policy, reference).tolist() == pytest.approx([np.exp(-0.5) - 0.5, np.exp(1.0) - 2.0])


def test_gradients_equal_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(8, dtype=torch.float64, generator=generator).requires_grad_()
    old, advantages = log_probs.detach() + 0.1, torch.randn(8, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: clipped_loss(x, old, advantages, 0.2, 0.28)[0], log_probs)
    assert torch.autograd.gradcheck(lambda x: kl_estimate("k2", x, old), log_probs)
    assert torch.autograd.gradcheck(lambda x: kl_estimate("k3", x, old), log_probs)


# -- log-probabilities ------------------------------------------------------------------------------------------------


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
