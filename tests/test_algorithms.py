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
from tlt_hpc.rl.advantage import (
    group_advantages,
    token_advantages,
)
from tlt_hpc.rl.batches import cut_micro_batches, mini_batches, pack_rollouts, plan_updates
from tlt_hpc.rl.loss import MismatchWatch, correction_weights, kl_estimate, mismatch_terms, policy_loss
from tlt_hpc.rl.stats import NotFiniteError
from tlt_hpc.rl.update import update_policy

TINY = Path(__file__).parent.parent / "jobs" / "tiny.toml"
KEY = SampleKey(0, 0, 0, 0, 0)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clip", "parts"),
    [
        ("grpo", "auto", ("group", "clip", "token-mean", 0.2, 0.2)),
        ("dapo", "auto", ("group", "clip", "token-mean", 0.2, 0.28)),
        ("gspo", [0.1, 4e-4], ("group", "sequence-clip", "seq-mean-token-mean", 0.1, 4e-4)),
    ],
)
def test_what_a_name_stands_for_and_bounds_in_place_of_its_own(name: Any, clip: Any, parts: Any) -> None:
    assert AlgorithmSection(name=name, clip=clip).recipe == Recipe(*parts)


def test_what_a_run_saves_is_resolved() -> None:
    text = to_toml(load_config(TINY, ["algorithm.name=gspo", "algorithm.rollout_correction=tis"]))
    section = text[text.index("[algorithm]") : text.index("[optimizer]")]
    assert "clip = [0.0003, 0.0004]" in section and 'kl_estimator = "k3"' in section and "auto" not in section
    assert parse_config(tomllib.loads(text)).algorithm.recipe == RECIPES["gspo"]


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


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_token_advantages_are_whitened_returns_to_go(lengths: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    rewards = [generator.normal(size=length) for length in lengths]
    totals = np.array([each.sum() for each in rewards], np.float32)
    returns = [sum(each[place:]) for each in rewards for place in range(len(each))]
    found = token_advantages("batch", totals, np.array(lengths), 1, token_rewards=np.concatenate(rewards))
    if len(returns) == 1:
        assert found.tolist() == [0]
        return
    wanted = (np.array(returns) - np.mean(returns)) / math.sqrt(statistics.variance(returns) + 1e-8)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


# -- aggregation ------------------------------------------------------------------------------------------------------


# -- losses -----------------------------------------------------------------------------------------------------------


def test_a_wild_ratio_stays_finite_whatever_the_loss() -> None:
    one = torch.tensor([0.0])
    for kind in ("clip", "sequence-clip", "weight-clip"):
        losses, _ = policy_loss(kind, one, one - 500, -torch.ones(1), torch.tensor([0]), 0.2, 0.2)
        assert losses.isfinite().all()


# -- distance from the reference --------------------------------------------------------------------------------------


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


# -- log-probabilities ------------------------------------------------------------------------------------------------


# -- a group's advantages, updates, shares and micro-batches --


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-8, 12345.678])
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    rewards = np.array([reward] * 7 + [0.0] * 6 + [1.0], np.float32)
    advantages = group_advantages(rewards, 7)
    assert not advantages[:7].any() and advantages[13] > 2


# --- updates, shares, micro-batches ---


@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=40),
    num_ranks=st.integers(1, 6),
    budget=st.integers(1, 1000),
    data=st.data(),
)
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
    micro = pack_rollouts([make_rollout(KEY, [1, 2, 3], [4, 5]), make_rollout(KEY, [6, 7], [8])])
    assert micro.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert micro.lengths == (5, 3)
    assert micro.tokens[micro.where].tolist() == [3, 4, 7], "3 predicts 4, 4 predicts 5, 7 predicts 8"
    assert micro.targets.tolist() == [4, 5, 8] and micro.rows.tolist() == [0, 0, 1]


def test_an_empty_micro_batch_predicts_nothing() -> None:
    micro = pack_rollouts([])
    assert micro.tokens.size == sum(micro.lengths) > 0
    assert micro.where.size == micro.targets.size == micro.rows.size == 0


# -- corrections of the rollout's probabilities --


RATIOS = torch.tensor([1.5, 4.0, 0.4, 0.8, 1.5])
ROLLOUT = torch.tensor([-1.0, -3.0, -0.5, -2.0, -1.2])
OLD = ROLLOUT + RATIOS.log()


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
    rollout, old = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    distance, k1, k3 = mismatch_terms(old, rollout)
    for estimate in (k1, k3):
        torch.testing.assert_close((rollout.exp() * estimate).sum(), (rollout.exp() * (rollout - old)).sum())
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
def test_the_warning_names_a_remedy_once(k3: float, dtype: str, corrected: bool, said: str) -> None:
    watch = MismatchWatch(dtype, corrected)
    assert re.search(said, watch.warning_for_step(0.05, k3)) and not watch.warning_for_step(0.05, k3)


# -- from scores to the policy's update --


TOKENS = [10, 90, 95, 100]
SCORES = np.array([1, 0, 1, 1], np.float32)


class Policy:
    """Keeps what it is given."""

    def reference_kl_by_token_all_ranks(self, rollouts: list[Rollout]) -> np.ndarray:
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


def test_length_is_punished_before_the_advantage() -> None:
    update, given = learned("algorithm.name=dr-grpo", "algorithm.overlong=20")
    assert update.rewards.tolist() == pytest.approx([1, -0.5, 0.25, 0])
    assert given == pytest.approx([0.75, -0.75, 0.125, -0.125])


def test_what_dynamic_sampling_leaves_out_is_not_learned_from() -> None:
    sizes = "rollout.prompts_per_step=1", "algorithm.updates_per_step=1", "algorithm.max_refills=1"
    update, given = learned("algorithm.name=dr-grpo", *sizes, scores=np.array([1, 1, 0, 1], np.float32))
    assert update.trained.tolist() == [2, 3] and update.rewards.tolist() == [0, 1] and given == [-0.5, 0.5]
    assert update.informative_share == 0.5, "of all groups that were drawn"


@pytest.mark.parametrize(("name", "differ"), [("reinforce++", True), ("reinforce++-baseline", False), ("rloo", False)])
def test_the_distance_is_of_the_tokens_that_follow(name: str, differ: bool) -> None:
    """Where a response has one baseline, its whole distance is part of its one reward, as in verl and TRL."""
    kl = "algorithm.kl_estimator=k1", "algorithm.kl_coefficient=0.1"
    config = load_config(TINY, ["rollout.group_size=2", "rollout.max_new_tokens=100", f"algorithm.name={name}", *kl])
    rollouts = [make_rollout(SampleKey(0, 0, 0, i // 2, i % 2), response=[0] * n) for i, n in enumerate(TOKENS)]
    policy: Any = Policy()
    update = update_policy(config, policy, rollouts, SCORES)
    assert update.advantages.tolist() == [tokens[0] for tokens in policy.given]
    assert update.reward_kl == pytest.approx(3.0 / sum(TOKENS))
    assert update.rewards.tolist() == pytest.approx([0.95, -0.1, 1.05, 0.8])
    for tokens, kl_sum in zip(policy.given, (0.5, 1.0, -0.5, 2.0), strict=True):
        steps = np.diff(tokens)
        assert (steps * kl_sum > 0).all() if differ else not steps.any()
