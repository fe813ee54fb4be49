"""The policy engine on 1, 2 and 4 ranks against plain single-process torch, and its state across ranks and stages."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import run_on_ranks
from logged import make_rollout
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, get_scheduler

from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.config import Config, load_config, parse_config
from tlt_hpc.mpi.world import World
from tlt_hpc.rl import distributed
from tlt_hpc.rl.distributed import (
    deepspeed_settings,
    frozen_deepspeed_settings,
    join_process_group,
    learning_rate,
    leave_process_group,
)
from tlt_hpc.rl.policy import Policy
from tlt_hpc.rl.stats import NotFiniteError, PolicyStats

VOCABULARY = 40
NUM_PROMPTS, GROUP_SIZE, NUM_UPDATES = 3, 4, 2
TEMPERATURE = 0.8
TOLERANCE = 1e-5

pytestmark = pytest.mark.mpi

# Large: the key biases have no gradient but rounding, of which Adam would otherwise make full steps.
EPSILON = 1e-3


def make_config(**changes: Any) -> Config:
    """``section__key=value`` changes one value."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "num_steps": 1},
        "model": {"path": "unused", "dtype": "float32"},
        "data": {"source": "unused"},
        "rollout": {
            "prompts_per_step": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "max_new_tokens": 32,
            "temperature": TEMPERATURE,
        },
        "algorithm": {"updates_per_step": NUM_UPDATES, "clip": [0.2, 0.28]},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1, "micro_batch_tokens": 48},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return parse_config(tree)


def make_model(dtype: torch.dtype = torch.float32, tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(7)
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(shape).to(dtype)


def make_rollouts(step: int = 0) -> list[Rollout]:
    generator = np.random.default_rng(step)
    return [
        random_rollout(SampleKey(0, 0, step, draw, sample), generator)
        for draw in range(NUM_PROMPTS)
        for sample in range(GROUP_SIZE)
    ]


def random_rollout(key: SampleKey, generator: np.random.Generator) -> Rollout:
    length = int(generator.integers(1, 25))
    prompt, response = (generator.integers(2, VOCABULARY, count) for count in (2 + key.draw, length))
    return make_rollout(key, prompt, response, log_probs=-10 * generator.random(length).astype(np.float32))


def make_advantages(step: int = 0) -> np.ndarray:
    """One a token, of all responses."""
    num_tokens = sum(rollout.response_tokens.size for rollout in make_rollouts(step))
    return np.random.default_rng(100 + step).normal(size=num_tokens).astype(np.float32)


def connect() -> Any:
    distributed.ADAM_EPSILON = EPSILON
    world = World.connect()
    join_process_group(world, "cpu")
    return world


def on_a_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gets the world first, whose other arguments ``run_on_ranks`` is given."""

    @wraps(function)
    def connected(*arguments: Any) -> Any:
        found = function(connect(), *arguments)
        leave_process_group()
        return found

    return connected


def make_policy(config: Config, world: Any, **changes: Any) -> Any:
    return Policy(make_model(getattr(torch, config.model.dtype), **changes), config, world)


# --- the reference: one process, one sample at a time, no padding, the papers' formulas ---


@dataclass
class Part:
    """One response: all log-softmax rows, its tokens' log-probs now, before and as recorded, and advantages."""

    rows: torch.Tensor
    log_probs: torch.Tensor
    old: torch.Tensor
    recorded: torch.Tensor
    advantages: torch.Tensor


class Reference:
    """What an update should be; keeps the gradients of every update, and the figures of the last step."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = make_model()
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), settings.learning_rate, eps=EPSILON, weight_decay=settings.weight_decay
        )
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.norms: list[float] = []
        self.pg_loss = self.clipped = self.entropy = 0.0

    def log_softmax(self, rollout: Rollout) -> torch.Tensor:
        tokens = torch.tensor(np.concatenate([rollout.prompt_tokens, rollout.response_tokens]), dtype=torch.int64)
        logits = self.model(input_ids=tokens[None]).logits[0] / self.config.rollout.temperature
        return torch.log_softmax(logits, -1)[rollout.prompt_tokens.size - 1 : -1]

    def log_probs(self, rollout: Rollout) -> torch.Tensor:
        return self.log_softmax(rollout)[range(rollout.response_tokens.size), rollout.response_tokens.tolist()]

    def update(self, rollouts: Sequence[Rollout], advantages: np.ndarray) -> None:
        num_updates = self.config.algorithm.updates_per_step
        with torch.no_grad():
            old = [self.log_probs(rollout) for rollout in rollouts]
        self.pg_loss = self.clipped = self.entropy = 0.0
        ends = np.cumsum([rollout.response_tokens.size for rollout in rollouts])
        own = torch.from_numpy(advantages).tensor_split(ends[:-1].tolist())
        for update in range(num_updates):
            parts = []
            for i in range(update, len(rollouts), num_updates):
                rows, tokens = self.log_softmax(rollouts[i]), rollouts[i].response_tokens.tolist()
                recorded = torch.from_numpy(rollouts[i].log_probs)
                parts.append(Part(rows, rows[range(len(tokens)), tokens], old[i], recorded, own[i]))
            loss = objective(self.config, parts)
            self.count(parts, float(loss.detach()) / num_updates)
            self.optimizer.zero_grad()
            loss.backward()
            self.gradients.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
            limit = self.config.optimizer.max_grad_norm or math.inf
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
            self.optimizer.step()

    def count(self, parts: list[Part], loss: float) -> None:
        self.pg_loss += loss
        for part in parts:
            ratio = (part.log_probs - part.old).exp()
            self.entropy += float(-(part.rows.exp() * part.rows).sum())
            self.clipped += int(torch.where(part.advantages > 0, ratio > 1.28, ratio < 0.8).sum())


def objective(config: Config, parts: list[Part]) -> torch.Tensor:
    """The loss of one update."""
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    losses = []
    for part in parts:
        advantages, difference = part.advantages, part.log_probs - part.old
        ratio = difference.exp()
        if algorithm.name == "gspo":
            ratio = difference.mean().exp().expand(len(difference))
            loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
        else:
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        if algorithm.correction.name == "tis":
            loss = loss * (part.old - part.recorded).exp().clamp(max=MAX_WEIGHT)
        entropy = -(part.rows.exp() * part.rows).sum(-1)
        losses.append(loss - algorithm.entropy_coefficient * entropy)
    if algorithm.name == "dr-grpo":
        return torch.stack([loss.sum() / longest for loss in losses]).mean()
    if algorithm.name == "gspo" or algorithm.aggregation == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).mean()


def capture_gradients(policy: Any) -> list[dict[str, torch.Tensor]]:
    """The full gradients of every update from now on, before clipping."""
    from deepspeed.utils import safe_get_full_grad  # after load_deepspeed

    captured: list[dict[str, torch.Tensor]] = []
    step = policy.engine.step

    def record_and_step() -> None:
        captured.append({name: safe_get_full_grad(p).detach().clone() for name, p in policy._parameters.items()})
        step()

    policy.engine.step = record_and_step
    return captured


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in policy.gather_named_weights()}


# --- gradients and weights ---


def largest_of(gradients: Sequence[dict[str, torch.Tensor]]) -> float:
    return max(float(g.abs().max()) for each in gradients for g in each.values())


@on_a_rank
def compare_with_reference(world: World, stages: list[int], changes: dict[str, Any]) -> list[Any]:
    """Per stage: the weights' hash and the figures of the second step, all as the reference has them."""
    found, reference = [], Reference(make_config(**changes))
    for step in range(2):
        reference.update(make_rollouts(step), make_advantages(step))
    updated = dict(reference.model.named_parameters())
    assert largest_of(reference.gradients[:1]) > 0.05 and reference.clipped > 5
    assert distance(dict(make_model().named_parameters()), updated) > 0.01
    num_tokens = sum(rollout.response_tokens.size for rollout in make_rollouts(1))
    for stage in stages:
        policy = make_policy(make_config(optimizer__zero_stage=stage, **changes), world)
        captured = capture_gradients(policy)
        stats = [policy.update(make_rollouts(step), make_advantages(step)) for step in range(2)][1]
        apart = max(map(distance, captured, reference.gradients)), distance(weights_of(policy), updated)
        assert max(apart) < TOLERANCE, (stage, apart)
        figures = [stats.grad_norm, stats.pg_loss, stats.entropy]
        wanted = [float(np.mean(reference.norms[NUM_UPDATES:])), reference.pg_loss, reference.entropy / num_tokens]
        assert figures == pytest.approx(wanted, rel=0, abs=1e-4), (stage, figures, wanted)
        assert stats.grad_norm > 1.0, "DeepSpeed would clip at 1 where max_grad_norm = 0 says not to"
        assert abs(stats.pg_clipfrac * num_tokens - reference.clipped) < 1.5
        assert (stats.num_tokens, policy.optimizer_step_count) == (num_tokens, 4)
        found.append([policy.gather_weights_sha256(), *figures, stats.ppo_kl, stats.update_seconds])
        policy.close()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "stages", "changes"),
    [
        (2, [1, 2, 3], {}),
        (2, [1, 3], {"optimizer__sequence_parallel": 2, "optimizer__gradient_checkpointing": True}),
        pytest.param(1, [1, 0, 3], {"optimizer__max_grad_norm": 0.0}, marks=pytest.mark.ci),
        # at stage 3 the backward pass gathers each layer's weights twice
        pytest.param(2, [3, 1], {"optimizer__gradient_checkpointing": True}, marks=pytest.mark.ci),
        pytest.param(
            4, [1], {"optimizer__sequence_parallel": 2, "optimizer__micro_batch_tokens": 17}, marks=pytest.mark.ci
        ),
    ],
)
def test_gradients_and_weights_equal_plain_torch(num_ranks: int, stages: list[int], changes: dict[str, Any]) -> None:
    ranks = run_on_ranks(num_ranks, compare_with_reference, stages, changes)
    assert len(ranks[0]) == len(stages)
    assert all(rank == ranks[0] for rank in ranks), "hashes and stats differ between ranks"


# --- in a fixed order ---


@on_a_rank
def modes_seen(world: World) -> dict[str, list[int]]:
    """PyTorch's mode of determinism in forward and backward passes, and after an update and an error."""
    policy, seen = make_policy(make_config(), world), dict[str, list[int]]()

    def noting(when: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_act(*given: Any, **named: Any) -> Any:
            seen.setdefault(when, []).append(torch.get_deterministic_debug_mode())
            return act(*given, **named)

        return note_and_act

    for name in ("forward", "backward"):
        setattr(policy.engine, name, noting(name, getattr(policy.engine, name)))
    policy.update(make_rollouts(), make_advantages())
    noting("after an update", min)(0, 0)
    with contextlib.suppress(NotFiniteError):
        policy.update(make_rollouts(), np.full_like(make_advantages(), np.inf))
    noting("after an error", min)(0, 0)
    return seen


def test_an_update_adds_in_a_fixed_order_and_nothing_else_does() -> None:
    (seen,) = run_on_ranks(1, modes_seen)
    assert seen["after an update"] == seen["after an error"] == [0], "PyTorch's default"
    assert {*seen["forward"], *seen["backward"]} == {2} and len(seen["forward"]) > len(seen["backward"]) > 0


# --- the other algorithms ---


def distance_from_objective(
    world: World, config: Config, rollouts: list[Rollout], advantages: np.ndarray
) -> list[float]:
    """The largest difference of any gradient, and the largest gradient; of what is masked there is no objective."""
    policy, reference = make_policy(config, world), Reference(config)
    captured = capture_gradients(policy)
    policy.update(rollouts, advantages)
    policy.close()
    kept = [config.algorithm.overlong != "mask" or each.finish_reason != FinishReason.LENGTH for each in rollouts]
    own = np.repeat(kept, [rollout.response_tokens.size for rollout in rollouts])
    reference.update([rollout for rollout, is_kept in zip(rollouts, kept, strict=True) if is_kept], advantages[own])
    return [max(map(distance, captured, reference.gradients)), largest_of(reference.gradients)]


@on_a_rank
def distances_of_algorithms(world: World, every_change: list[dict[str, Any]]) -> list[list[float]]:
    results, rollouts, advantages = [], make_rollouts(), make_advantages()
    for config in (make_config(**changes) for changes in every_change):
        own = advantages
        if config.algorithm.name == "gspo":  # its objective is of whole responses
            own = np.repeat(advantages[: len(rollouts)], [rollout.response_tokens.size for rollout in rollouts])
        results.append(distance_from_objective(world, config, rollouts, own))
    return results


MAX_WEIGHT = 2.0
CORRECTED: dict[str, Any] = {"algorithm__rollout_correction": "tis", "algorithm__entropy_coefficient": 0.3}
ALGORITHMS: list[dict[str, Any]] = [
    {"algorithm__name": "dr-grpo"},
    {"algorithm__name": "gspo", "algorithm__clip": "auto"},
    {"algorithm__name": "grpo", "algorithm__aggregation": "seq-mean-token-mean", "algorithm__entropy_coefficient": 0.3},
    CORRECTED,
]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_every_algorithms_gradient_is_its_objectives(num_ranks: int) -> None:
    for changes, (difference, largest) in zip(
        ALGORITHMS, run_on_ranks(num_ranks, distances_of_algorithms, ALGORITHMS)[0], strict=True
    ):
        assert largest > 1e-3 and difference < TOLERANCE * max(1.0, largest), (changes, difference, largest)


def away(model: Any) -> Any:
    """Not the policy: there is a distance at once."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    return model


@on_a_rank
def figures_of_tokens(world: World, sharing: int) -> list[list[float]]:
    """Distances of all tokens from a reference and figures of the mismatch with the rollout, each with its formula."""
    rollouts = make_rollouts()
    distances = {"algorithm__name": "rloo", "algorithm__kl_coefficient": 0.5, "algorithm__kl_estimator": "k1"}
    config = make_config(optimizer__zero_stage=3, optimizer__sequence_parallel=sharing, **CORRECTED, **distances)
    policy = Policy(make_model(), config, world, reference=lambda: away(make_model()))
    found = policy.reference_kl_by_token_all_ranks(rollouts).tolist()
    mismatch = list(vars(policy.update(rollouts, make_advantages()).mismatch).values())
    plain, other = Reference(config), Reference(config)
    away(other.model)
    with torch.no_grad():
        old = torch.cat([plain.log_probs(rollout) for rollout in rollouts]).double()
        wanted = old - torch.cat([other.log_probs(rollout) for rollout in rollouts])
    recorded = torch.from_numpy(np.concatenate([rollout.log_probs for rollout in rollouts])).double()
    apart, weights = (old.exp() - recorded.exp()).abs(), (old - recorded).exp()
    k1, k3 = recorded - old, weights - 1 + recorded - old
    outside = (weights > MAX_WEIGHT).double().mean()
    assert 0.1 < outside < 0.9
    figures = [apart.mean(), apart.max(), k1.mean(), k3.mean(), weights.clamp(max=MAX_WEIGHT).mean(), outside]
    policy.close()
    return [found, wanted.tolist(), mismatch, list(map(float, figures))]


@pytest.mark.parametrize("sharing", [1, 2])
def test_distances_from_the_reference_and_the_rollout_are_of_all_tokens_before_the_update(sharing: int) -> None:
    for found, wanted, mismatch, figures in run_on_ranks(2, figures_of_tokens, sharing):
        # differences of two log-probs of up to ten, each rounded to about 1e-6
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5) and max(map(abs, wanted)) > 0.5
        assert mismatch == pytest.approx(figures, rel=1e-4)


# --- repeatability, padding, the other settings ---


@on_a_rank
def vary_settings(world: World) -> None:
    """Things that need no second job, on one world."""

    def update(num_steps: int = 1, reference: Any = None, **changes: Any) -> tuple[list[PolicyStats], Any]:
        policy = Policy(make_model(), make_config(**changes), world, reference=reference)
        stats = [policy.update(make_rollouts(step), make_advantages(step)) for step in range(num_steps)]
        weights = weights_of(policy)
        policy.close()
        return stats, weights

    one, usual, again, whole = (update(optimizer__micro_batch_tokens=tokens)[1] for tokens in (1, 48, 48, 10_000))
    assert all(torch.equal(again[name], usual[name]) for name in usual)
    assert max(distance(one, usual), distance(one, whole)) < TOLERANCE, "padding counts"
    stats, _ = update(3, optimizer__warmup_steps=4)
    assert [each.lr for each in stats] == pytest.approx([0.5e-2, 1e-2, 1e-2])
    stats, weights = update(2, make_model, algorithm__kl_coefficient=0.5)
    assert 0 < stats[0].kl_loss < stats[1].kl_loss and distance(weights, usual) > 1e-3
    policy = make_policy(make_config(rollout__temperature=0.0, algorithm__updates_per_step=1), world, tied=True)
    greedy = policy.update(make_rollouts(), np.zeros_like(make_advantages()))
    assert greedy.pg_loss == greedy.ppo_kl == 0
    named = [name for name, _ in policy.gather_named_weights() if "head" in name or "embed" in name]
    assert named == ["model.embed_tokens.weight"]


def test_repetition_padding_warmup_reference_and_ties() -> None:
    run_on_ranks(2, vary_settings)


# --- the learning rate ---


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0), ("linear", 3), ("cosine", 0), ("cosine", 3)])
def test_the_learning_rate_falls_as_in_transformers(schedule: str, warmup: int) -> None:
    """Theirs begins the warm-up at 0, ours at the first step above it."""
    steps = {"run__num_steps": 5, "algorithm__updates_per_step": 2}
    config = make_config(optimizer__schedule=schedule, optimizer__warmup_steps=warmup, **steps)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=10)
    wanted = []
    for _ in range(10):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    found = [learning_rate(config, step) for step in range(10)]
    assert found[warmup:] == pytest.approx(wanted[warmup:]) and 0 < found[-1] < 2e-3
    assert found[:warmup] == pytest.approx([1e-2 * (step + 1) / 3 for step in range(warmup)])
    constant = make_config(optimizer__warmup_steps=warmup, **steps)
    assert {learning_rate(constant, step) for step in range(warmup, 99)} == {1e-2}


# --- the load-balancing loss of a mixture of experts ---


def moe_model() -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))


def balance_by_transformers(plan: list[list[tuple[int, ...]]]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient and mean of transformers' own loss of each micro-batch, by its share of all response tokens."""
    model, rollouts, mean = moe_model(), make_rollouts(), torch.zeros(())
    whole = sum(rollout.response_tokens.size for rollout in rollouts)
    for part in [part for share in plan for part in share if part]:
        texts = [np.concatenate([rollouts[i].prompt_tokens, rollouts[i].response_tokens]) for i in part]
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
        loss = model(input_ids=tokens, attention_mask=mask, output_router_logits=True).aux_loss
        mean = mean + loss * sum(rollouts[i].response_tokens.size for i in part) / whole
    mean.backward()
    weights = model.named_parameters()
    return {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights}, float(mean)


@on_a_rank
def compare_balance(world: World, every_change: list[dict[str, Any]]) -> None:
    """What a coefficient of 0.1 adds to the gradient of an update, against transformers."""
    for changes in every_change:
        gradients, losses = [], []
        for coefficient in (0.0, 0.1):
            once = {"algorithm__updates_per_step": 1, "algorithm__router_aux_coefficient": coefficient}
            policy = Policy(moe_model(), make_config(**once, **changes), world)
            captured = capture_gradients(policy)
            losses.append(policy.update(make_rollouts(), make_advantages()).router_aux_loss)
            (plan,) = policy._plan_micro_batches(make_rollouts(), 1)
            policy.close()
            gradients += captured
        wanted, mean = balance_by_transformers(plan)
        added = {name: (gradients[1][name] - gradients[0][name]) / 0.1 for name in wanted}
        routers = {name: gradient for name, gradient in wanted.items() if name.endswith("mlp.gate.weight")}
        assert distance(added, wanted) < 10 * TOLERANCE < 1e-2 < largest_of([routers]), changes
        assert losses == [0, pytest.approx(mean, abs=1e-5)], changes
        assert max(len([part for part in share if part]) for share in plan) > 1, "several micro-batches"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_load_balancing_loss_is_that_of_transformers_by_micro_batch(num_ranks: int) -> None:
    changes = [
        {"optimizer__zero_stage": 1},
        {"optimizer__zero_stage": 3, "optimizer__gradient_checkpointing": True},
        {"optimizer__sequence_parallel": num_ranks, "optimizer__micro_batch_tokens": 41},
    ]
    run_on_ranks(num_ranks, compare_balance, changes)


# --- responses that were cut ---


@on_a_rank
def mask_cut_responses(world: World) -> None:
    cut, once = {1, 4, 5, 6, 7}, {"algorithm__updates_per_step": 1, "algorithm__entropy_coefficient": 0.3}
    all_cut = [replace(rollout, finish_reason=FinishReason.LENGTH) for rollout in make_rollouts()]
    rollouts = [all_cut[index] if index in cut else each for index, each in enumerate(make_rollouts())]
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        config = make_config(algorithm__aggregation=aggregation, algorithm__overlong="mask", **once)
        difference, largest = distance_from_objective(world, config, rollouts, make_advantages())
        assert difference < TOLERANCE < 1e-3 < largest, (aggregation, difference, largest)
    stats = make_policy(config, world).update(all_cut, make_advantages())
    assert (stats.grad_norm, stats.pg_loss) == (0, 0)
    assert stats.num_tokens == make_advantages().size, "all that were cut are counted"


def test_masked_responses_are_as_if_the_update_had_none_of_them() -> None:
    run_on_ranks(2, mask_cut_responses)


@on_a_rank
def overflow(world: World) -> str:
    advantages = make_advantages()
    # the first token of the fourth response, which belongs to the second of the two updates
    advantages[sum(rollout.response_tokens.size for rollout in make_rollouts()[:3])] = np.inf
    with pytest.raises(NotFiniteError) as caught:
        make_policy(make_config(), world).update(make_rollouts(), advantages)
    return str(caught.value)


def test_a_gradient_that_is_not_finite_stops_every_rank() -> None:
    wanted = r"step 1: the gradient \(norm (-1\.0|inf|nan), optimiser step 2\) is not finite; nor is the loss of "
    wanted += r"1 response \(draw \d sample \d\); a resume would meet the same values: export .* with a lower "
    wanted += rf"optimizer\.learning_rate than {make_config().optimizer.learning_rate}"
    for message in run_on_ranks(2, overflow):
        assert re.fullmatch(wanted, message), message


# --- the state, across ranks and stages ---


def gathered_state(policy: Any, world: Any) -> dict[str, torch.Tensor]:
    """All ranks' shards put together, every element exactly once."""
    own = [(name, piece.start, piece.shape, piece.values.cpu().numpy()) for name, piece in policy.state_shard()]
    found: dict[str, list[Any]] = {}
    for name, *piece in [piece for shard in world.allgather(own) for piece in shard]:
        found.setdefault(name, []).append(piece)
    whole = {}
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0])
        ends = np.cumsum([values.size for _, _, values in pieces])
        assert [start for start, _, _ in pieces] == [0, *ends[:-1]] and ends[-1] == np.prod(pieces[0][1]), name
        whole[name] = torch.from_numpy(np.concatenate([values for _, _, values in pieces])).view(pieces[0][1])
    return whole


def finish(policy: Any) -> str:
    digest: str = policy.gather_weights_sha256()
    policy.close()
    return digest


def change_settings(is_offloaded: bool, is_spread: bool = False) -> None:
    """Have the optimiser's state handled as ZeRO offload does, though everything is in host memory anyway.

    ``is_spread``: stage 3 divides all but the smallest parameters, as it does those of large models.
    """
    settings = distributed.deepspeed_settings

    def changed(config: Config, num_ranks: int, device: str) -> dict[str, Any]:
        found = settings(config, num_ranks, "cuda" if is_offloaded else device)
        if is_spread:
            found["zero_optimization"]["stage3_param_persistence_threshold"] = 200
        return found

    distributed.deepspeed_settings = changed


@on_a_rank
def save_after_two_steps(world: World, stages: list[int], folder: str, is_offloaded: bool = False) -> list[list[str]]:
    """Per stage: two steps, save, one more; hashes when saved and at the end, and the weights of the end on disk."""
    change_settings(is_offloaded)
    digests = []
    for stage in stages:
        policy = make_policy(make_config(optimizer__zero_stage=stage, optimizer__offload=is_offloaded), world)
        assert bool(policy.engine.zero_offload_optimizer()) == is_offloaded
        for step in range(2):
            policy.update(make_rollouts(step), make_advantages(step))
        whole, saved = gathered_state(policy, world), policy.gather_weights_sha256()
        policy.update(make_rollouts(2), make_advantages(2))
        weights = weights_of(policy)
        if world.rank == 0:
            save_file(whole, Path(folder) / f"stage-{stage}.safetensors")
            save_file(weights, Path(folder) / f"stage-{stage}-after.safetensors")
        digests.append([saved, finish(policy)])
    return digests


@on_a_rank
def load_in_halves(world: World, folder: str, changes: dict[str, bool]) -> list[bool]:
    """In bfloat16 at stage 3: whether each weight that was loaded is its master rounded, before any update."""
    change_settings(bool(changes), is_spread=True)
    saved = load_file(Path(folder) / "stage-3.safetensors")
    config = make_config(optimizer__zero_stage=3, model__dtype="bfloat16", **changes)
    policy = make_policy(config, world)
    whole, span = (lambda names: ((name, saved[name]) for name in names)), (lambda name: saved[name].flatten())
    policy.load_state(whole, lambda name, start, stop, shape: span(name)[start:stop], 2 * NUM_UPDATES)
    weights = weights_of(policy)
    same = [torch.equal(weight, saved[f"{name}.master"].to(weight.dtype)) for name, weight in weights.items()]
    policy.close()
    return same


@on_a_rank
def load_and_go_on(
    world: World, pairs: list[tuple[int, int]], folder: str, is_offloaded: bool = False
) -> list[list[str]]:
    """Per (stage saved at, stage loaded at): hashes of what came back, and of where the next step leads."""
    change_settings(is_offloaded, is_spread=True)
    results = []
    for saved_stage, stage in pairs:
        saved = load_file(Path(folder) / f"stage-{saved_stage}.safetensors")
        policy = make_policy(make_config(optimizer__zero_stage=stage, optimizer__offload=is_offloaded), world)
        whole, spans = list[str](), list[str]()

        def read(names: Any, saved: Any = saved, whole: list[str] = whole) -> Any:
            return ((name, saved[name]) for name in names if not whole.append(name))

        def read_span(name: str, start: int, stop: int, shape: Any, saved: Any = saved, spans: Any = spans) -> Any:
            spans.append(name)
            assert stop - start <= -(-saved[name].numel() // world.size) and shape == saved[name].shape
            return saved[name].flatten()[start:stop]

        policy.load_state(read, read_span, 2 * NUM_UPDATES)
        assert {*whole, *spans} == saved.keys() and (len(spans) > len(whole) if stage == 3 else not spans)
        loaded = policy.gather_weights_sha256()
        masters = {name: saved[f"{name}.master"] for name in weights_of(policy)}
        assert all(torch.equal(weight, masters[name]) for name, weight in weights_of(policy).items())
        again = gathered_state(policy, world)
        assert again.keys() == saved.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
        policy.update(make_rollouts(2), make_advantages(2))
        after = load_file(Path(folder) / f"stage-{saved_stage}-after.safetensors")
        assert distance(weights_of(policy), after) < 2e-6 and policy.optimizer_step_count == 3 * NUM_UPDATES
        results.append([loaded, finish(policy)])
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[str]]]:
    """States saved by two ranks at stages 1 and 3, and by stage the hashes when saved and a step later."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, dict(zip((1, 3), run_on_ranks(2, save_after_two_steps, [1, 3], str(folder))[0], strict=True))


@pytest.mark.parametrize(("num_ranks", "pairs"), [(2, [(1, 1), (3, 3), (1, 0)]), (3, [(1, 3), (3, 1)])])
def test_state_goes_on_at_another_rank_count_and_stage(
    saved: tuple[Path, dict[int, list[str]]], num_ranks: int, pairs: list[tuple[int, int]]
) -> None:
    folder, digests = saved
    for rank in run_on_ranks(num_ranks, load_and_go_on, pairs, str(folder)):
        for (saved_stage, stage), (loaded, end) in zip(pairs, rank, strict=True):
            assert loaded == digests[saved_stage][0], (saved_stage, stage)
            if num_ranks == 2 and saved_stage == stage:
                assert end == digests[stage][1], "not bit-equal at the same rank count and stage"


@pytest.mark.parametrize("changes", [{}, {"optimizer__offload": "parameters"}])
def test_a_state_in_half_precision_is_its_masters_rounded(
    saved: tuple[Path, dict[int, list[str]]], changes: dict[str, Any]
) -> None:
    for same in run_on_ranks(2, load_in_halves, str(saved[0]), changes):
        assert len(same) > 20 and all(same)


def test_offloaded_state_resumes_bit_for_bit_and_as_without_offload(
    saved: tuple[Path, dict[int, list[str]]], tmp_path: Path
) -> None:
    """With torch's AdamW, whose count of steps is restored; and what is offloaded trains as what is not."""
    digests = run_on_ranks(2, save_after_two_steps, [1, 3], str(tmp_path), True)[0]
    assert run_on_ranks(2, load_and_go_on, [(1, 1), (3, 3)], str(tmp_path), True) == [digests] * 2
    for stage in (1, 3):
        without, with_offload = (load_file(at / f"stage-{stage}-after.safetensors") for at in (saved[0], tmp_path))
        assert distance(without, with_offload) < 2e-6


@on_a_rank
def hold_and_gather(world: World, stages: list[int]) -> list[int]:
    """Per stage: this rank's bytes of the state, which are those it said and what DeepSpeed gathers."""
    results = []
    for stage in stages:
        policy = make_policy(make_config(optimizer__zero_stage=stage), world)
        before, announced = policy.gather_weights_sha256(), policy.num_shard_bytes
        fresh = dict(policy.state_shard())
        assert announced == sum(piece.num_bytes for piece in fresh.values())
        assert not any(piece.values.any() for name, piece in fresh.items() if not name.endswith("master"))
        assert policy.gather_weights_sha256() == before, "saving a fresh policy changes nothing"
        policy.update(make_rollouts(), make_advantages())
        for name, tensor in gathered_state(policy, world).items():
            parameter, _, kind = name.rpartition(".")
            gathered = policy._state._gather_full_state(policy._parameters[parameter], kind)
            assert torch.equal(tensor + 0.0, gathered + 0.0), (stage, name)
        results.append(sum(piece.num_bytes for _, piece in policy.state_shard()))
        assert policy.num_shard_bytes == results[-1]
        policy.close()
    return results


def test_a_shard_is_what_the_rank_has_of_the_state_and_no_more() -> None:
    num_ranks = 3
    whole = 3 * 4 * sum(parameter.numel() for parameter in make_model().parameters())
    for held in zip(*run_on_ranks(num_ranks, hold_and_gather, [0, 1, 3]), strict=True):
        assert sum(held) == whole and max(held) <= whole / num_ranks * 1.1, held


# --- the process group ---


@pytest.mark.parametrize(("device", "parts"), [("cuda", {"offload_optimizer", "offload_param"}), ("cpu", set())])
def test_what_is_offloaded_is_in_host_memory(device: str, parts: set[str]) -> None:
    asked = ["zero_stage=3", "offload=parameters"]
    job = Path(__file__).parent.parent / "jobs" / "tiny.toml"
    config = load_config(job, [f"optimizer.{key}" for key in asked])
    zero = deepspeed_settings(config, 2, device)["zero_optimization"]
    assert {name for name in zero if name.startswith("offload")} == parts
    assert all(zero[name]["device"] == "cpu" for name in parts)
    frozen = frozen_deepspeed_settings(config, 2, device)["zero_optimization"]
    assert {name for name in frozen if name.startswith("offload")} == parts - {"offload_optimizer"}
