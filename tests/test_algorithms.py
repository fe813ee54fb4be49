"""The parts of the algorithms by values worked out by hand: advantages, losses, corrections, updates, and names."""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logged import make_rollout

from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.config import AlgorithmSection, ConfigError, load_config, load_saved_config, parse_config, to_toml
from tlt_hpc.config.recipes import RECIPES, Correction, CorrectionName, Recipe
from tlt_hpc.models.policy_model import _Read
from tlt_hpc.rl.advantage import (
    advantages_of,
    centred_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalties,
    token_weights,
    whiten,
)
from tlt_hpc.rl.batches import cut_micro_batches, mini_batches, pack, plan_updates
from tlt_hpc.rl.loss import MismatchWatch, clipped_loss, correction_weights, kl_estimate, mismatch_terms, policy_loss
from tlt_hpc.rl.stats import NotFiniteError
from tlt_hpc.rl.update import update_policy

TINY = Path(__file__).parent.parent / "jobs" / "tiny.toml"
REWARDS = np.array([1, 0, 0, 3, 2, 2, 2, 2], np.float32)
LENGTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8])
KEY = SampleKey(0, 0, 0, 0, 0)


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
        (["algorithm.name=gspo", "algorithm.clip=[0.1,4e-4]"], (0.1, 4e-4)),
        (["algorithm.name=cispo", "algorithm.clip=[1.0,1.0]"], (1.0, 1.0)),
    ],
)
def test_bounds_that_are_set_replace_the_algorithms(overrides: list[str], bounds: tuple[float, float]) -> None:
    recipe = load_config(TINY, overrides).algorithm.recipe
    assert (recipe.clip_low, recipe.clip_high) == bounds


def test_what_a_run_saves_is_resolved() -> None:
    text = to_toml(load_config(TINY, ["algorithm.name=gspo", "algorithm.rollout_correction=tis"]))
    section = text[text.index("[algorithm]") : text.index("[optimizer]")]
    assert "clip = [0.0003, 0.0004]" in section and 'kl_estimator = "k3"' in section and "auto" not in section
    assert parse_config(tomllib.loads(text)).algorithm.recipe == RECIPES["gspo"]


def test_a_run_saved_without_a_correction_can_be_the_job_of_one_with_it() -> None:
    saved = tomllib.loads(to_toml(load_config(TINY, [])))
    saved["algorithm"]["rollout_correction"] = "tis"
    assert parse_config(saved).algorithm.correction == Correction("tis", 0.0, 2.0)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("optimizer.offload_parameters=true", "use optimizer.offload = 'parameters'"),
        ("checkpoint.replay=false", "logged steps are always repeated; remove a step's folder in rollouts/"),
        ("checkpoint.keep_responses_seconds=60", "finished responses are written every 300 s; leave it out"),
        ("algorithm.clip_low=0.1", "use algorithm.clip = [LOW, HIGH]"),
        ("algorithm.clip_high=0.1", "use algorithm.clip = [LOW, HIGH]"),
    ],
)
def test_a_key_of_an_earlier_commit_is_named_with_what_replaces_it(override: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown key '[\w.]+', which was removed: {re.escape(advice)}"):
        load_config(TINY, [override])


def test_a_run_saved_by_an_earlier_commit_is_read(tmp_path: Path) -> None:
    config, path = load_config(TINY, ["algorithm.name=dapo"]), tmp_path / "config.toml"
    text = to_toml(config).replace("clip = [0.2, 0.28]", "clip_low = 0.2\nclip_high = 0.28")
    path.write_text(text.replace("[checkpoint]", "[checkpoint]\nreplay = false\nkeep_responses_seconds = 60.0"))
    assert load_saved_config(path) == config


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


def test_advantages_are_found_by_name() -> None:
    starts = np.cumsum(LENGTHS) - LENGTHS
    for kind, wanted in {
        "group": group_advantages(REWARDS, 4),
        "group-mean": centred_advantages(REWARDS, 4),
        "leave-one-out": leave_one_out_advantages(REWARDS, 4),
        "batch": whiten(REWARDS.astype(np.float64), LENGTHS),
        "group-mean-batch": whiten(centred_advantages(REWARDS, 4).astype(np.float64), LENGTHS),
    }.items():
        found = advantages_of(kind, REWARDS, LENGTHS, 4)  # type: ignore[arg-type]
        assert found.dtype == np.float32 and found[starts].tolist() == wanted.tolist(), kind
        assert found.tolist() == np.repeat(wanted, LENGTHS).tolist(), kind


def test_a_token_is_worth_what_comes_after_it() -> None:
    """REINFORCE++ (2501.03262), eq. 6 to 8, with the reward at the last token and the divergence at each."""
    kl = np.array([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1])
    totals = np.array([1 - 1.0, 0 - 1.0], np.float32)
    found = advantages_of("batch", totals, np.array([4, 4]), 1, token_rewards=-kl)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([0.25, 0.44, 0.84, 1.43, -1.73, -0.94, -0.35, 0.05], abs=0.006)
    alike = advantages_of("batch", totals, np.array([4, 4]), 1)
    assert alike.tolist() == pytest.approx([0.935] * 4 + [-0.935] * 4, abs=0.001)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_token_advantages_are_whitened_returns_to_go(lengths: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    rewards = [generator.normal(size=length) for length in lengths]
    totals = np.array([each.sum() for each in rewards], np.float32)
    returns = [sum(each[place:]) for each in rewards for place in range(len(each))]
    found = advantages_of("batch", totals, np.array(lengths), 1, token_rewards=np.concatenate(rewards))
    if len(returns) == 1:
        assert found.tolist() == [0]
        return
    wanted = (np.array(returns) - np.mean(returns)) / math.sqrt(statistics.variance(returns) + 1e-8)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("kind", "bounds", "ratios", "advantages", "gradients", "clipped"),
    [  # the clip takes effect only where it lowers the objective
        ("clip", (0.2, 0.28), [1.0, 1.5, 1.5, 0.5, 0.5, 1.25, 1.25], [2.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0],
         [-2.0, 0.0, 1.5, -0.5, 0.0, -1.25, 1.25], [1, 4]),
        # the ratios of two sequences are the geometric means of their tokens': 1.0, and 1.1 held at 1.05
        ("sequence-clip", (0.2, 0.05), [2.0, 0.5, 1.21, 1.0], [3.0, 3.0, 1.0, 1.0], [-3.0, -3.0, 0.0, 0.0], [2, 3]),
        # a clipped weight leaves every token its gradient
        ("weight-clip", (1.0, 5.0), [9.0, 2.0, 0.01], [1.0, -1.0, 2.0], [-6.0, 2.0, -0.02], [0]),
    ],
)  # fmt: skip
def test_gradients_by_hand(kind, bounds, ratios, advantages, gradients, clipped) -> None:
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    log_probs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    rows = torch.arange(len(ratios)) // 2
    losses, found = policy_loss(kind, log_probs, old, torch.tensor(advantages), rows, *bounds)
    losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx(gradients)
    assert found.nonzero().flatten().tolist() == clipped


def test_a_negative_advantage_counts_a_wild_ratio_up_to_a_bound() -> None:
    """Dual-clip PPO (1912.09729), eq. 5; as TRL's delta and verl's clip_ratio_c."""
    ratios = torch.tensor([0.5, 1.5, 2.9, 3.1, 400.0, 0.5, 1.1, 3.1], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, -1.0, -2.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    for kind, rows in (("clip", torch.arange(8)), ("sequence-clip", torch.arange(8))):
        log_probs = ratios.log().requires_grad_()
        losses, clipped = policy_loss(kind, log_probs, torch.zeros_like(ratios), advantages, rows, 0.2, 0.2, 3.0)  # type: ignore[arg-type]
        assert losses.tolist() == pytest.approx([0.8, 1.5, 2.9, 6.0, 3.0, -0.5, -1.1, -1.2])
        (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
        assert gradient.tolist() == pytest.approx([0, 1.5, 2.9, 0, 0, -0.5, -1.1, 0])
        assert clipped.nonzero().flatten().tolist() == [0, 3, 4, 7]


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


def policies_apart(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over nine tokens, and a reference's log-probabilities at this KL(policy || reference)."""
    generator = torch.Generator().manual_seed(5)
    logits, other = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        reference = (logits + middle * other).log_softmax(-1)
        low, high = (low, middle) if exact_distance(logits.log_softmax(-1), reference) > distance else (middle, high)
    return logits.requires_grad_(), reference


def exact_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.exp() * (one - other)).sum()


def mean_over_samples(kind: Any, logits: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimate's mean over samples of the policy, and its gradient: every token, weighted by its probability."""
    log_probs = logits.log_softmax(-1)
    mean = (log_probs.exp().detach() * kl_estimate(kind, log_probs, reference)).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize(("distance", "k3_error"), [(0.001, 0.0220), (0.02, 0.0946), (2.5, 0.4807)])
def test_which_estimate_has_the_gradient_of_which_distance(distance: float, k3_error: float) -> None:
    """k2 and k3+ that of KL(policy || reference), which k3 estimates; k3 that of KL(reference || policy)."""
    logits, reference = policies_apart(distance)
    log_probs = logits.log_softmax(-1)
    forward, reverse = exact_distance(log_probs, reference), exact_distance(reference, log_probs)
    assert forward.item() == pytest.approx(distance)
    (wanted,) = torch.autograd.grad(forward, logits, retain_graph=True)
    (reversed_one,) = torch.autograd.grad(reverse, logits)
    values, gradients = {}, {}
    for kind in ("k1", "k2", "k3", "k3+"):
        values[kind], gradients[kind] = mean_over_samples(kind, logits, reference)
    for kind in ("k1", "k3", "k3+"):
        assert values[kind].item() == pytest.approx(distance), kind
    for kind in ("k2", "k3+"):
        torch.testing.assert_close(gradients[kind], wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients["k3"], reversed_one, rtol=1e-9, atol=1e-12)
    assert gradients["k1"].abs().max() < 1e-12, "k1 has none"
    assert ((gradients["k3"] - wanted).norm() / wanted.norm()).item() == pytest.approx(k3_error, rel=0.005)


def test_a_bounded_estimate_gives_up_tokens_that_the_reference_makes_14_times_likelier() -> None:
    """verl's and slime's low_var_kl: k3 held at 10."""
    differences = torch.tensor([-19.0, -2.65, -2.55, 0.0, 3.0, 10.9, 11.1], dtype=torch.float64)
    log_probs = differences.clone().requires_grad_()
    bounded = kl_estimate("low_var_kl", log_probs, torch.zeros_like(differences))
    k3 = (-differences).exp() - 1 + differences
    torch.testing.assert_close(bounded.detach(), k3.clamp(max=10.0))
    (gradient,) = torch.autograd.grad(bounded.sum(), log_probs)
    wanted = torch.where(k3 > 10, 0.0, 1 - (-differences).exp())
    torch.testing.assert_close(gradient, wanted)
    assert gradient.count_nonzero() == 3


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
    log_probs, found = _Read.apply(torch.eye(6), logits.t().contiguous(), targets, temperature, False)
    torch.testing.assert_close(log_probs, chosen.log(), rtol=1e-5, atol=1e-6)
    entropy = [-sum(p * math.log(p) for p in row.tolist()) for row in probabilities]
    torch.testing.assert_close(found, torch.tensor(entropy), rtol=1e-5, atol=1e-6)


# -- a group's advantages, updates, shares and micro-batches --


lengths_strategy = st.lists(st.integers(2, 300), min_size=1, max_size=40)


def test_advantages_are_the_formula_group_by_group() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.25, 0.5, 0.0, 0.0]
    expected = [
        (reward - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        for group in (rewards[:4], rewards[4:])
        for reward in group
    ]
    advantages = group_advantages(np.array(rewards, np.float32), 4)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-8, 12345.678])
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    rewards = np.array([reward] * 7 + [0.0] * 6 + [1.0], np.float32)
    advantages = group_advantages(rewards, 7)
    assert not advantages[:7].any() and advantages[13] > 2


@pytest.mark.parametrize(("num_rewards", "group_size"), [(7, 2), (4, 1)])
def test_rewards_that_are_no_groups_are_a_programmers_error(num_rewards: int, group_size: int) -> None:
    with pytest.raises(AssertionError):
        group_advantages(np.zeros(num_rewards, np.float32), group_size)


# --- updates, shares, micro-batches ---


@given(lengths=lengths_strategy, num_ranks=st.integers(1, 6), budget=st.integers(1, 1000), data=st.data())
def test_a_plan_holds_every_sample_once_within_the_budget(
    lengths: list[int], num_ranks: int, budget: int, data: st.DataObject
) -> None:
    num_updates = data.draw(st.sampled_from([n for n in range(1, len(lengths) + 1) if len(lengths) % n == 0]))
    plan = plan_updates(lengths, num_updates, num_ranks, budget, attention_crossover_tokens=100.0)
    assert len(plan) == num_updates
    for update, ranks in enumerate(plan):
        assert len(ranks) == num_ranks
        assert len({len(micro_batches) for micro_batches in ranks}) == 1, "ranks differ in their number of passes"
        assert any(ranks[rank][-1] for rank in range(num_ranks)), "a pass in which no rank has anything to do"
        planned = [index for micro_batches in ranks for indices in micro_batches for index in indices]
        assert sorted(planned) == list(range(update, len(lengths), num_updates))
        for indices in (indices for micro_batches in ranks for indices in micro_batches if len(indices) > 1):
            assert sum(lengths[index] for index in indices) <= budget


def test_mini_batches_do_not_depend_on_ranks_and_mix_the_prompts() -> None:
    group_of = [sample // 4 for sample in range(12)]
    for indices in mini_batches(12, 2):
        assert [group_of[index] for index in indices] == [0, 0, 1, 1, 2, 2]


def test_a_long_sample_counts_more_than_its_tokens() -> None:
    """Attention grows with the square of the length."""
    (ranks,) = plan_updates([390, 200, 200, 200], 1, 2, 10_000, attention_crossover_tokens=100.0)
    assert ranks == [[(0,)], [(1, 2, 3)]]
    (ranks,) = plan_updates([390, 200, 200, 200], 1, 2, 10_000, attention_crossover_tokens=1e9)
    assert ranks == [[(0, 3)], [(1, 2)]]


def test_micro_batches_fill_the_budget_longest_first() -> None:
    assert cut_micro_batches([0, 1, 2, 3], [5, 10, 5, 4], 10) == [(1,), (0, 2), (3,)]
    assert cut_micro_batches([0, 1, 2, 3], [6, 7, 3, 4], 10) == [(1, 2), (0, 3)]
    assert cut_micro_batches([], [], 10) == []


def test_packing_keeps_the_positions_that_predict_responses() -> None:
    micro = pack([make_rollout(KEY, [1, 2, 3], [4, 5]), make_rollout(KEY, [6, 7], [8])])
    assert micro.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert micro.lengths == (5, 3)
    assert micro.tokens[micro.where].tolist() == [3, 4, 7], "3 predicts 4, 4 predicts 5, 7 predicts 8"
    assert micro.targets.tolist() == [4, 5, 8] and micro.rows.tolist() == [0, 0, 1]


def test_an_empty_micro_batch_predicts_nothing() -> None:
    micro = pack([])
    assert micro.tokens.size == sum(micro.lengths) > 0
    assert micro.where.size == micro.targets.size == micro.rows.size == 0


# -- corrections of the rollout's probabilities --


RATIOS = torch.tensor([1.5, 4.0, 0.4, 0.8, 1.5])
ROLLOUT = torch.tensor([-1.0, -3.0, -0.5, -2.0, -1.2])
OLD = ROLLOUT + RATIOS.log()


def test_bounds_that_are_set_replace_the_corrections() -> None:
    for name, bounds, wanted in (
        ("tis", (0.5, 3.0), [1.5, 3, 0.5, 0.8, 1.5]),
        ("mis", (0.5, 3.0), [1.5, 0, 0, 0.8, 1.5]),
        ("icepop", (0.2, 1.4), [0, 0, 0.4, 0.8, 0]),
    ):
        section = AlgorithmSection(rollout_correction={name: bounds})
        weights, _ = correction_weights(section.correction, OLD, ROLLOUT)
        torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "wanted", "outside"),
    [
        ("none", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("tis", [1.5, 2, 0.4, 0.8, 1.5], [0, 1, 0, 0, 0]),
        ("mis", [1.5, 0, 0.4, 0.8, 1.5], [0, 1, 0, 0, 0]),
        ("icepop", [1.5, 4, 0, 0.8, 1.5], [0, 0, 1, 0, 0]),
    ],
)
def test_weights_by_hand(name: CorrectionName, wanted: list[float], outside: list[int]) -> None:
    old = OLD.clone().requires_grad_()
    weights, found = correction_weights(AlgorithmSection(rollout_correction=name).correction, old, ROLLOUT)
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=0)
    assert found.tolist() == [bool(value) for value in outside]
    assert not weights.requires_grad


def test_a_wild_ratio_stays_finite() -> None:
    weights, _ = correction_weights(Correction("tis", 0.0, math.inf), torch.tensor([0.0]), torch.tensor([-500.0]))
    assert weights.isfinite().all()


def test_distances_are_those_of_the_distributions() -> None:
    """Over all tokens of a vocabulary, weighted by the rollout's probabilities, both estimates are the KL distance."""
    generator = torch.Generator().manual_seed(0)
    rollout, old = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    wanted = (rollout.exp() * (rollout - old)).sum()
    distance, k1, k3 = mismatch_terms(old, rollout)
    for estimate in (k1, k3):
        torch.testing.assert_close((rollout.exp() * estimate).sum(), wanted)
    assert (k3 >= 0).all()
    torch.testing.assert_close(distance, (old.exp() - rollout.exp()).abs())


# -- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k3", "dtype", "corrected", "said"),
    [
        (1e-13, "float32", False, "^$"),
        (5e-4, "bfloat16", False, "^$"),
        (1e-3, "float32", False, "mean difference 0.05, k3 0.001, far more .* run `tlt compare`"),
        (0.02, "bfloat16", False, "set algorithm.rollout_correction"),
        (0.02, "bfloat16", True, "lower optimizer.learning_rate"),
    ],
)
def test_the_warning_names_a_remedy(k3: float, dtype: str, corrected: bool, said: str) -> None:
    assert re.search(said, MismatchWatch(dtype, corrected).look(0.05, k3))


def test_it_warns_once() -> None:
    watch = MismatchWatch("bfloat16", False)
    assert [bool(watch.look(0.05, k3)) for k3 in (1e-4, 0.02, 0.02)] == [False, True, False]


# -- from scores to the policy's update --


TOKENS = [10, 90, 95, 100]
SCORES = np.array([1, 0, 1, 1], np.float32)


class Policy:
    """Keeps what it is given."""

    def reference_kl(self, rollouts: list[Rollout]) -> np.ndarray:
        lengths = [rollout.response_tokens.size for rollout in rollouts]
        return np.repeat(np.array([0.5, 1.0, -0.5, 2.0]) / lengths, lengths)

    def update(self, rollouts: list[Rollout], advantages: np.ndarray) -> str:
        ends = np.cumsum([rollout.response_tokens.size for rollout in rollouts])
        assert advantages.size == ends[-1] and advantages.dtype == np.float32
        self.given = [part.tolist() for part in np.split(advantages, ends[:-1])]
        self.groups = [rollout.key.draw for rollout in rollouts]
        return "stats"


def learned(*overrides: str, scores: np.ndarray = SCORES) -> tuple[Any, list[float]]:
    """What the update says of itself, and the advantages that the policy was given, one for all of a response."""
    config = load_config(TINY, ["rollout.group_size=2", "rollout.max_new_tokens=100", *overrides])
    policy: Any = Policy()
    rollouts = [make_rollout(SampleKey(0, 0, 0, i // 2, i % 2), response=[0] * n) for i, n in enumerate(TOKENS)]
    update = update_policy(config, policy, rollouts, scores)
    assert policy.groups == [index // 2 for index in update.trained]
    assert all(len(set(tokens)) == 1 for tokens in policy.given)
    return update, [tokens[0] for tokens in policy.given]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_ends_the_step_and_is_named(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the policy is given anything: a reward, or a log-probability of the rollout."""
    monkeypatch.setattr(Policy, "update", lambda *_: pytest.fail("the policy was updated"))
    with pytest.raises(NotFiniteError, match=r"^step 1: the reward of 1 response \(draw 1 sample 0\) is not finite; "):
        learned(scores=np.array([1, 0, value, 1], np.float32))
    make, make_true = partial(make_rollout, log_probs=np.array([-1.0, value], np.float32)), make_rollout
    monkeypatch.setitem(globals(), "make_rollout", make)
    words = r"^step 1: log-probabilities of 4 responses \(draw 0 sample 0, .* and 1 more\) are not finite; a resume "
    with pytest.raises(NotFiniteError, match=words):
        learned()

    def make_second(key: SampleKey, **given: Any) -> Rollout:
        return (make if key.draw == 1 else make_true)(key, **given)

    monkeypatch.setitem(globals(), "make_rollout", make_second)
    left_out = "rollout.prompts_per_step=1", "algorithm.updates_per_step=1", "algorithm.max_refills=1"
    with pytest.raises(NotFiniteError, match=r"log-probabilities of 2 responses \(draw 1 sample 0, draw 1 sample 1\)"):
        learned(*left_out, scores=np.array([1, 0, 1, 1], np.float32))


def test_without_penalties_rewards_are_scores() -> None:
    update, given = learned("algorithm.name=dr-grpo")
    assert update.rewards.tolist() == SCORES.tolist() and update.reward_kl == 0 and update.stats == "stats"
    assert given == update.advantages.tolist() == [0.5, -0.5, 0, 0]


def test_length_is_punished_before_the_advantage() -> None:
    update, given = learned("algorithm.name=dr-grpo", "algorithm.overlong=20")
    assert update.rewards.tolist() == pytest.approx([1, -0.5, 0.25, 0])
    assert given == pytest.approx([0.75, -0.75, 0.125, -0.125])


def test_what_dynamic_sampling_leaves_out_is_not_learned_from() -> None:
    sizes = "rollout.prompts_per_step=1", "algorithm.updates_per_step=1", "algorithm.max_refills=1"
    update, given = learned("algorithm.name=dr-grpo", *sizes, scores=np.array([1, 1, 0, 1], np.float32))
    assert update.trained.tolist() == [2, 3] and update.rewards.tolist() == [0, 1] and given == [-0.5, 0.5]
    assert update.informative_share == 0.5, "of all groups that were drawn"


def test_the_distance_is_taken_from_the_reward() -> None:
    update, given = learned("algorithm.name=rloo", "algorithm.kl_estimator=k1", "algorithm.kl_coefficient=0.1")
    assert update.rewards.tolist() == pytest.approx([0.95, -0.1, 1.05, 0.8])
    assert given == pytest.approx([1.05, -1.05, 0.25, -0.25])
    assert update.reward_kl == pytest.approx(3.0 / sum(TOKENS))


def test_whole_batch_advantages_count_tokens() -> None:
    _, given = learned("algorithm.name=reinforce++")
    mean = 205 / 295
    assert given[0] / given[1] == pytest.approx((1 - mean) / -mean, rel=1e-4)


@pytest.mark.parametrize(("name", "differ"), [("reinforce++", True), ("reinforce++-baseline", False), ("rloo", False)])
def test_the_distance_is_of_the_tokens_that_follow(name: str, differ: bool) -> None:
    """Where a response has one baseline, its whole distance is part of its one reward, as in verl and TRL."""
    kl = "algorithm.kl_estimator=k1", "algorithm.kl_coefficient=0.1"
    config = load_config(TINY, ["rollout.group_size=2", "rollout.max_new_tokens=100", f"algorithm.name={name}", *kl])
    rollouts = [make_rollout(SampleKey(0, 0, 0, i // 2, i % 2), response=[0] * n) for i, n in enumerate(TOKENS)]
    policy: Any = Policy()
    update = update_policy(config, policy, rollouts, SCORES)
    assert update.advantages.tolist() == [tokens[0] for tokens in policy.given]
    assert update.rewards.tolist() == pytest.approx([0.95, -0.1, 1.05, 0.8])
    for tokens, kl_sum in zip(policy.given, (0.5, 1.0, -0.5, 2.0), strict=True):
        steps = np.diff(tokens)
        assert (steps * kl_sum > 0).all() if differ else not steps.any()
