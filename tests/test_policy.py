"""The policy engine on 1, 2 and 4 ranks against plain single-process torch, and its state across ranks and stages."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from tlt_hpc.models import policy_model
from tlt_hpc.mpi.world import World
from tlt_hpc.rl import distributed
from tlt_hpc.rl.distributed import (
    engine_settings,
    frozen_settings,
    join_process_group,
    learning_rate,
    leave_process_group,
)
from tlt_hpc.rl.policy import Policy
from tlt_hpc.rl.stats import NotFiniteError

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
    return {name: weight.clone() for name, weight in policy.named_weights()}


# --- gradients and weights ---


def compare_with_reference(stages: list[int], changes: dict[str, Any]) -> list[dict[str, Any]]:
    world = connect()
    results = []
    reference = Reference(make_config(**changes))
    for step in range(2):
        reference.update(make_rollouts(step), make_advantages(step))
    for stage in stages:
        policy = make_policy(make_config(optimizer__zero_stage=stage, **changes), world)
        captured = capture_gradients(policy)
        stats = [policy.update(make_rollouts(step), make_advantages(step)) for step in range(2)][1]
        num_tokens = sum(rollout.response_tokens.size for rollout in make_rollouts(1))
        results.append(
            {
                "stage": stage,
                "gradient": max(map(distance, captured, reference.gradients)),
                "largest": float(max(g.abs().max() for g in reference.gradients[0].values())),
                "weights": distance(weights_of(policy), dict(reference.model.named_parameters())),
                "moved": distance(dict(make_model().named_parameters()), dict(reference.model.named_parameters())),
                "norm": abs(stats.grad_norm - float(np.mean(reference.norms[NUM_UPDATES:]))),
                "pg_loss": abs(stats.pg_loss - reference.pg_loss),
                "entropy": abs(stats.entropy - reference.entropy / num_tokens),
                "clipped": abs(stats.pg_clipfrac * num_tokens - reference.clipped),
                "num_clipped": reference.clipped,
                "num_tokens": stats.num_tokens - num_tokens,
                "sha256": policy.sha256(),
                "steps": policy.optimizer_step_count,
                "stats": [stats.pg_loss, stats.entropy, stats.ppo_kl, stats.grad_norm, stats.update_seconds],
            }
        )
        policy.close()
    leave_process_group()
    return results


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
    for result in ranks[0]:
        assert result["largest"] > 0.05 and result["moved"] > 0.01 and result["num_clipped"] > 5, result
        assert result["gradient"] < TOLERANCE and result["weights"] < TOLERANCE, result
        assert max(result["norm"], result["pg_loss"], result["entropy"]) < 1e-4, result
        assert result["clipped"] < 1.5 and result["num_tokens"] == 0 and result["steps"] == 4, result
        assert result["stats"][3] > 1.0, "DeepSpeed would clip at 1 where max_grad_norm = 0 says not to"
    assert all(rank == ranks[0] for rank in ranks), "hashes and stats differ between ranks"


# --- in a fixed order ---


def modes_seen() -> dict[str, list[int]]:
    """PyTorch's mode of determinism in attention's forward and backward passes, and after an update and an error."""
    world, seen = connect(), dict[str, list[int]]()
    make_attend = policy_model.attend_documents

    def note(when: str) -> None:
        seen.setdefault(when, []).append(torch.get_deterministic_debug_mode())

    def watch(lengths: Sequence[int] | None, windows: Sequence[int] = ()) -> Any:
        attend = make_attend(lengths, windows)

        def watched(*given: Any) -> torch.Tensor:
            out: torch.Tensor = attend(*given)
            note("forward")
            if out.requires_grad:
                out.register_hook(lambda _: note("backward"))
            return out

        return watched

    policy_model.attend_documents = watch
    policy = make_policy(make_config(optimizer__gradient_checkpointing=True), world)
    policy.update(make_rollouts(), make_advantages())
    note("after an update")
    with contextlib.suppress(NotFiniteError):
        policy.update(make_rollouts(), np.full_like(make_advantages(), np.inf))
    note("after an error")
    leave_process_group()
    return seen


def test_an_update_adds_in_a_fixed_order_and_nothing_else_does() -> None:
    (seen,) = run_on_ranks(1, modes_seen)
    assert seen["after an update"] == seen["after an error"] == [0], "PyTorch's default"
    assert {*seen["forward"], *seen["backward"]} == {2} and len(seen["forward"]) > len(seen["backward"]) > 0


# --- the other algorithms ---


def distances_from_objective(every_change: list[dict[str, Any]]) -> list[list[float]]:
    """By algorithm: largest difference of any gradient, and the largest gradient, over two updates."""
    world = connect()
    results = []
    for changes in every_change:
        config = make_config(**changes)
        policy, reference = make_policy(config, world), Reference(config)
        captured = capture_gradients(policy)
        advantages = make_advantages()
        if config.algorithm.name == "gspo":  # its objective is of whole responses
            lengths = [rollout.response_tokens.size for rollout in make_rollouts()]
            advantages = np.repeat(advantages[: len(lengths)], lengths)
        policy.update(make_rollouts(), advantages)
        policy.close()
        reference.update(make_rollouts(), advantages)
        largest = max(float(g.abs().max()) for each in reference.gradients for g in each.values())
        results.append([max(map(distance, captured, reference.gradients)), largest])
    leave_process_group()
    return results


MAX_WEIGHT = 2.0
CORRECTED: dict[str, Any] = {
    "algorithm__rollout_correction": "tis",
    "algorithm__entropy_coefficient": 0.3,
}
ALGORITHMS: list[dict[str, Any]] = [
    {"algorithm__name": "dr-grpo"},
    {"algorithm__name": "gspo", "algorithm__clip": "auto"},
    {"algorithm__name": "grpo", "algorithm__aggregation": "seq-mean-token-mean", "algorithm__entropy_coefficient": 0.3},
    CORRECTED,
]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_every_algorithms_gradient_is_its_objectives(num_ranks: int) -> None:
    for changes, (difference, largest) in zip(
        ALGORITHMS, run_on_ranks(num_ranks, distances_from_objective, ALGORITHMS)[0], strict=True
    ):
        assert largest > 1e-3 and difference < TOLERANCE * max(1.0, largest), (changes, difference, largest)


def away(model: Any) -> Any:
    """Not the policy: there is a distance at once."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    return model


def figures_of_tokens(sharing: int) -> list[list[float]]:
    """Distances of all tokens from a reference and figures of the mismatch with the rollout, each with its formula."""
    world, rollouts = connect(), make_rollouts()
    distances = {"algorithm__name": "rloo", "algorithm__kl_coefficient": 0.5, "algorithm__kl_estimator": "k1"}
    config = make_config(optimizer__zero_stage=3, optimizer__sequence_parallel=sharing, **CORRECTED, **distances)
    policy = Policy(make_model(), config, world, reference=lambda: away(make_model()))
    found = policy.reference_kl(rollouts).tolist()
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
    leave_process_group()
    return [found, wanted.tolist(), mismatch, list(map(float, figures))]


@pytest.mark.parametrize("sharing", [1, 2])
def test_distances_from_the_reference_and_the_rollout_are_of_all_tokens_before_the_update(sharing: int) -> None:
    for found, wanted, mismatch, figures in run_on_ranks(2, figures_of_tokens, sharing):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6) and max(map(abs, wanted)) > 0.5
        assert mismatch == pytest.approx(figures, rel=1e-4)


# --- repeatability, padding, the other settings ---


def vary_settings() -> dict[str, Any]:
    """Things that need no second job, on one world."""
    world = connect()
    result: dict[str, Any] = {}
    weights = {}
    for budget in (1, 48, 10_000):
        policy = make_policy(make_config(optimizer__micro_batch_tokens=budget), world)
        policy.update(make_rollouts(), make_advantages())
        weights[budget] = weights_of(policy)
        policy.close()
    policy = make_policy(make_config(), world)
    policy.update(make_rollouts(), make_advantages())
    again = weights_of(policy)
    policy.close()
    result["repeated"] = all(torch.equal(again[name], weights[48][name]) for name in again)
    result["padding"] = max(distance(weights[1], weights[48]), distance(weights[1], weights[10_000]))

    policy = make_policy(make_config(optimizer__warmup_steps=4), world)
    stats = [policy.update(make_rollouts(step), make_advantages(step)) for step in range(3)]
    result["lr"] = [each.lr for each in stats]
    policy.close()

    config = make_config(algorithm__kl_coefficient=0.5)
    policy = Policy(make_model(), config, world, reference=make_model)
    stats = [policy.update(make_rollouts(step), make_advantages(step)) for step in range(2)]
    result["kl"] = [each.kl_loss for each in stats]
    result["kl changes the update"] = distance(weights_of(policy), weights[48])
    policy.close()

    policy = make_policy(make_config(rollout__temperature=0.0, algorithm__updates_per_step=1), world, tied=True)
    stats = [policy.update(make_rollouts(), np.zeros_like(make_advantages()))]
    result["greedy loss"], result["greedy kl"] = stats[0].pg_loss, stats[0].ppo_kl
    result["tied names"] = [name for name, _ in policy.named_weights() if "head" in name or "embed" in name]
    policy.close()
    leave_process_group()
    return result


def test_repetition_padding_warmup_reference_and_ties() -> None:
    result = run_on_ranks(2, vary_settings)[0]
    assert result["repeated"] and result["padding"] < TOLERANCE
    assert result["lr"] == pytest.approx([0.5e-2, 1e-2, 1e-2])
    assert 0 < result["kl"][0] < result["kl"][1]
    assert result["kl changes the update"] > 1e-3
    assert result["greedy loss"] == 0 and result["greedy kl"] == 0
    assert result["tied names"] == ["model.embed_tokens.weight"]


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


def balanced_and_not(every_change: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What a coefficient of 0.1 adds to the gradient of an update, against transformers."""
    world, results = connect(), []
    for changes in every_change:
        gradients, losses = [], []
        for coefficient in (0.0, 0.1):
            once = {"algorithm__updates_per_step": 1, "algorithm__router_aux_coefficient": coefficient}
            policy = Policy(moe_model(), make_config(**once, **changes), world)
            captured = capture_gradients(policy)
            losses.append(policy.update(make_rollouts(), make_advantages()).router_aux_loss)
            (plan,) = policy._plan(make_rollouts(), 1)
            policy.close()
            gradients += captured
        wanted, mean = balance_by_transformers(plan)
        added = {name: (gradients[1][name] - gradients[0][name]) / 0.1 for name in wanted}
        largest = max(float(g.abs().max()) for n, g in wanted.items() if n.endswith("mlp.gate.weight"))
        results.append(
            {"gradient": distance(added, wanted), "largest": largest, "loss": losses[1] - mean, "off": losses[0]}
        )
        results[-1] |= {"micro-batches": max(len([part for part in share if part]) for share in plan)}
    leave_process_group()
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_load_balancing_loss_is_that_of_transformers_by_micro_batch(num_ranks: int) -> None:
    changes = [
        {"optimizer__zero_stage": 1},
        {"optimizer__zero_stage": 3, "optimizer__gradient_checkpointing": True},
        {"optimizer__sequence_parallel": num_ranks, "optimizer__micro_batch_tokens": 41},
    ]
    for result in run_on_ranks(num_ranks, balanced_and_not, changes)[0]:
        assert result["gradient"] < 10 * TOLERANCE < 1e-2 < result["largest"] and result["micro-batches"] > 1, result
        assert abs(result["loss"]) < 1e-5 and result["off"] == 0, result


# --- responses that were cut ---


def with_and_without_cut_responses() -> dict[str, Any]:
    """Gradients of updates in which responses are cut: all masked, and left out of the objective by hand."""
    world, result = connect(), dict[str, Any]()
    cut = {1, 4, 5, 6, 7}
    rollouts = [
        replace(rollout, finish_reason=FinishReason.LENGTH if index in cut else rollout.finish_reason)
        for index, rollout in enumerate(make_rollouts())
    ]
    ends = np.cumsum([rollout.response_tokens.size for rollout in rollouts])
    parts = np.split(make_advantages(), ends[:-1])
    kept = [index for index in range(len(rollouts)) if index not in cut]
    once = {"algorithm__updates_per_step": 1, "algorithm__entropy_coefficient": 0.3}
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        config = make_config(algorithm__aggregation=aggregation, algorithm__overlong="mask", **once)
        policy, reference = make_policy(config, world), Reference(config)
        captured = capture_gradients(policy)
        policy.update(rollouts, make_advantages())
        policy.close()
        reference.update([rollouts[index] for index in kept], np.concatenate([parts[index] for index in kept]))
        result[aggregation] = distance(captured[0], reference.gradients[0])
        result[f"{aggregation}, largest"] = max(float(g.abs().max()) for g in reference.gradients[0].values())
    policy = make_policy(make_config(algorithm__overlong="mask", **once), world)
    all_cut = [replace(rollout, finish_reason=FinishReason.LENGTH) for rollout in rollouts]
    stats = policy.update(all_cut, make_advantages())
    policy.close()
    result["of nothing"] = [stats.grad_norm, stats.pg_loss, stats.num_tokens - int(ends[-1])]
    leave_process_group()
    return result


def test_masked_responses_are_as_if_the_update_had_none_of_them() -> None:
    for result in run_on_ranks(2, with_and_without_cut_responses):
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            assert result[aggregation] < TOLERANCE < 1e-3 < result[f"{aggregation}, largest"], result
        assert result["of nothing"] == [0, 0, 0], "all that were cut are counted"


def overflow() -> str:
    world = connect()
    policy = make_policy(make_config(), world)
    advantages = make_advantages()
    # the first token of the fourth response, which belongs to the second of the two updates
    advantages[sum(rollout.response_tokens.size for rollout in make_rollouts()[:3])] = np.inf
    try:
        policy.update(make_rollouts(), advantages)
    except NotFiniteError as error:
        return str(error)
    finally:
        leave_process_group()
    return "no error"


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
    digest: str = policy.sha256()
    policy.close()
    return digest


def offload() -> None:
    """Have the optimiser's state handled as ZeRO offload does, though everything is in host memory anyway."""
    settings = distributed.engine_settings
    distributed.engine_settings = lambda config, num_ranks, _: settings(config, num_ranks, "cuda")


def spread() -> None:
    """Have ZeRO stage 3 divide all but the smallest parameters, as it does those of large models."""
    settings = distributed.engine_settings

    def with_threshold(*given: Any) -> dict[str, Any]:
        found = settings(*given)
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 200
        return found

    distributed.engine_settings = with_threshold


def save_after_two_steps(stages: list[int], folder: str, is_offloaded: bool = False) -> list[list[str]]:
    """Per stage: two steps, save, one more; hashes when saved and at the end, and the weights of the end on disk."""
    world = connect()
    if is_offloaded:
        offload()
    digests = []
    for stage in stages:
        policy = make_policy(make_config(optimizer__zero_stage=stage, optimizer__offload=is_offloaded), world)
        assert bool(policy.engine.zero_offload_optimizer()) == is_offloaded
        for step in range(2):
            policy.update(make_rollouts(step), make_advantages(step))
        whole = gathered_state(policy, world)
        if world.rank == 0:
            save_file(whole, Path(folder) / f"stage-{stage}.safetensors")
        saved = policy.sha256()
        policy.update(make_rollouts(2), make_advantages(2))
        weights = weights_of(policy)
        if world.rank == 0:
            save_file(weights, Path(folder) / f"stage-{stage}-after.safetensors")
        digests.append([saved, finish(policy)])
    leave_process_group()
    return digests


def load_in_halves(folder: str, changes: dict[str, bool]) -> list[bool]:
    """In bfloat16 at stage 3: whether each weight that was loaded is its master rounded, before any update."""
    world = connect()
    if changes:
        offload()
    spread()
    saved = load_file(Path(folder) / "stage-3.safetensors")
    config = make_config(optimizer__zero_stage=3, model__dtype="bfloat16", **changes)
    policy = make_policy(config, world)
    whole, span = (lambda names: ((name, saved[name]) for name in names)), (lambda name: saved[name].flatten())
    policy.load_state(whole, lambda name, start, stop, shape: span(name)[start:stop], 2 * NUM_UPDATES)
    weights = weights_of(policy)
    same = [torch.equal(weight, saved[f"{name}.master"].to(weight.dtype)) for name, weight in weights.items()]
    policy.close()
    leave_process_group()
    return same


def load_and_go_on(pairs: list[tuple[int, int]], folder: str, is_offloaded: bool = False) -> list[dict[str, Any]]:
    """Per (stage saved at, stage loaded at): what came back, and where the next step leads."""
    world = connect()
    if is_offloaded:
        offload()
    spread()
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
        loaded = policy.sha256()
        masters = {name: saved[f"{name}.master"] for name in weights_of(policy)}
        assert all(torch.equal(weight, masters[name]) for name, weight in weights_of(policy).items())
        again = gathered_state(policy, world)
        roundtrip = again.keys() == saved.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
        policy.update(make_rollouts(2), make_advantages(2))
        after = distance(weights_of(policy), load_file(Path(folder) / f"stage-{saved_stage}-after.safetensors"))
        steps = policy.optimizer_step_count
        results.append({"loaded": loaded, "same": roundtrip, "steps": steps, "after": after, "end": finish(policy)})
    leave_process_group()
    return results


def test_state_goes_on_at_another_rank_count_and_stage(tmp_path: Path) -> None:
    digests = dict(zip((1, 3), run_on_ranks(2, save_after_two_steps, [1, 3], str(tmp_path))[0], strict=True))
    plan = {2: [(1, 1), (3, 3), (1, 0)], 3: [(1, 3), (3, 1)]}
    for num_ranks, pairs in plan.items():
        for rank in run_on_ranks(num_ranks, load_and_go_on, pairs, str(tmp_path)):
            for (saved_stage, stage), result in zip(pairs, rank, strict=True):
                saved, end = digests[saved_stage]
                where = (num_ranks, saved_stage, stage, result)
                assert result["loaded"] == saved and result["same"] and result["steps"] == 3 * NUM_UPDATES, where
                assert result["after"] < 2e-6, where
                if num_ranks == 2 and saved_stage == stage:
                    assert result["end"] == end, "not bit-equal at the same rank count and stage"


def test_a_state_in_half_precision_is_its_masters_rounded(tmp_path: Path) -> None:
    run_on_ranks(2, save_after_two_steps, [3], str(tmp_path))
    for changes in ({}, {"optimizer__offload": "parameters"}):
        for same in run_on_ranks(2, load_in_halves, str(tmp_path), changes):
            assert len(same) > 20 and all(same)


def test_offloaded_state_resumes_bit_for_bit_and_as_without_offload(tmp_path: Path) -> None:
    """With torch's AdamW, whose count of steps is restored; and what is offloaded trains as what is not."""
    kept, moved = tmp_path / "kept", tmp_path / "moved"
    for place in (kept, moved):
        place.mkdir()
    plain = run_on_ranks(2, save_after_two_steps, [1, 3], str(kept))[0]
    digests = run_on_ranks(2, save_after_two_steps, [1, 3], str(moved), True)[0]
    for rank in run_on_ranks(2, load_and_go_on, [(1, 1), (3, 3)], str(moved), True):
        for (saved, end), result in zip(digests, rank, strict=True):
            assert result["loaded"] == saved and result["same"] and result["end"] == end, result
    assert len(plain) == len(digests)
    for stage in (1, 3):
        without, with_offload = (load_file(place / f"stage-{stage}-after.safetensors") for place in (kept, moved))
        assert distance(without, with_offload) < 2e-6


def hold_and_gather(stages: list[int]) -> list[list[Any]]:
    """Per stage: whether the shards are the state that DeepSpeed gathers, and this rank's bytes, said and held."""
    world = connect()
    results = []
    for stage in stages:
        policy = make_policy(make_config(optimizer__zero_stage=stage), world)
        before, announced = policy.sha256(), policy.num_shard_bytes
        fresh = dict(policy.state_shard())
        assert announced == sum(piece.num_bytes for piece in fresh.values())
        assert not any(piece.values.any() for name, piece in fresh.items() if not name.endswith("master"))
        assert policy.sha256() == before, "saving a fresh policy changes nothing"
        policy.update(make_rollouts(), make_advantages())
        held = sum(piece.num_bytes for _, piece in policy.state_shard())
        same = all(
            torch.equal(tensor + 0.0, policy._state._full(policy._parameters[name.rpartition(".")[0]], kind) + 0.0)
            for name, tensor in gathered_state(policy, world).items()
            for kind in [name.rpartition(".")[2]]
        )
        results.append([same, policy.num_shard_bytes, held])
        policy.close()
    leave_process_group()
    return results


def test_a_shard_is_what_the_rank_has_of_the_state_and_no_more() -> None:
    num_ranks = 3
    ranks = run_on_ranks(num_ranks, hold_and_gather, [0, 1, 3])
    whole = 3 * 4 * sum(parameter.numel() for parameter in make_model().parameters())
    for stage in range(3):
        shards = [rank[stage] for rank in ranks]
        assert all(same for same, _, _ in shards), stage
        assert [announced for _, announced, _ in shards] == [held for _, _, held in shards]
        assert sum(held for _, _, held in shards) == whole
        assert max(held for _, _, held in shards) <= whole / num_ranks * 1.1, (stage, shards)


# --- the process group ---


@pytest.mark.parametrize(("device", "parts"), [("cuda", {"offload_optimizer", "offload_param"}), ("cpu", set())])
def test_what_is_offloaded_is_in_host_memory(device: str, parts: set[str]) -> None:
    asked = ["zero_stage=3", "offload=parameters"]
    job = Path(__file__).parent.parent / "jobs" / "tiny.toml"
    config = load_config(job, [f"optimizer.{key}" for key in asked])
    zero = engine_settings(config, 2, device)["zero_optimization"]
    assert {name for name in zero if name.startswith("offload")} == parts
    assert all(zero[name]["device"] == "cpu" for name in parts)
    frozen = frozen_settings(config, 2, device)["zero_optimization"]
    assert {name for name in frozen if name.startswith("offload")} == parts - {"offload_optimizer"}
