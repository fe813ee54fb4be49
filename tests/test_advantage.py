"""Advantages against the formula, and how a step's samples are cut into updates, shares and micro-batches."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.rl.advantage import group_advantages
from tlt_hpc.rl.batches import cut_micro_batches, mini_batches, pack, plan_updates

lengths_strategy = st.lists(st.integers(2, 300), min_size=1, max_size=40)


# --- advantages ---


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


def test_rewards_that_are_no_groups_are_a_programmers_error() -> None:
    with pytest.raises(AssertionError):
        group_advantages(np.zeros(7, np.float32), 2)
    with pytest.raises(AssertionError):
        group_advantages(np.zeros(4, np.float32), 1)


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


def make_rollout(prompt: list[int], response: list[int]) -> Rollout:
    return Rollout(
        key=SampleKey(0, 0, 0, 0, 0),
        prompt_tokens=np.array(prompt, np.int32),
        response_tokens=np.array(response, np.int32),
        log_probs=np.zeros(len(response), np.float32),
        finish_reason=FinishReason.EOS,
        weight_version=0,
        num_target_passes=1,
        finished_seconds=0.0,
    )


def test_packing_keeps_the_positions_that_predict_responses() -> None:
    micro = pack([make_rollout([1, 2, 3], [4, 5]), make_rollout([6, 7], [8])])
    assert micro.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert micro.lengths == (5, 3)
    assert micro.tokens[micro.where].tolist() == [3, 4, 7], "3 predicts 4, 4 predicts 5, 7 predicts 8"
    assert micro.targets.tolist() == [4, 5, 8] and micro.rows.tolist() == [0, 0, 1]


def test_an_empty_micro_batch_predicts_nothing() -> None:
    micro = pack([])
    assert micro.tokens.size == sum(micro.lengths) > 0
    assert micro.where.size == micro.targets.size == micro.rows.size == 0
