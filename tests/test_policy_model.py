"""Packed documents against transformers' own forward pass over each alone; logits in chunks against all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tlt_hpc.config import UserError
from tlt_hpc.models import policy_model
from tlt_hpc.models.linear import Linear
from tlt_hpc.models.mlp import Experts, Stack
from tlt_hpc.models.policy_model import PolicyModel

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
LENGTHS = (7, 2, 160, 31)
TEMPERATURE = 0.8


def make_model(**changes: Any) -> Any:
    torch.manual_seed(5)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **changes}))


def make_batch() -> dict[str, Any]:
    tokens = torch.randint(50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    parts = zip(ends, LENGTHS, strict=True)
    where = torch.cat([torch.arange(end - length // 2 - 1, end - 1) for end, length in parts])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {
        "tokens": tokens, "positions": positions, "lengths": LENGTHS, "where": where, "targets": tokens[where + 1],
        "temperature": TEMPERATURE,
    }  # fmt: skip


def by_document(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies at the same places, each document in a pass of its own."""
    documents = torch.split(batch["tokens"], LENGTHS)
    rows = torch.cat([(model(input_ids=d[None]).logits[0] / TEMPERATURE).log_softmax(-1) for d in documents])
    rows = rows[batch["where"]]
    return rows.gather(1, batch["targets"][:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("repeats_layers", [False, True])
def test_packed_documents_are_what_they_are_alone(repeats_layers: bool) -> None:
    model, batch = make_model().train(), make_batch()
    wanted, entropy = by_document(model, batch)
    plain = gradients(model, wanted.sum() + 0.3 * entropy.sum())
    found, found_entropy, _ = PolicyModel(model, repeats_layers)(**batch, entropy_has_gradient=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(model, found.sum() + 0.3 * found_entropy.sum()).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-4, rtol=1e-4, msg=name)
    assert max(float(g.abs().max()) for g in plain.values()) > 1


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_chunks_have_the_same_values_and_gradients(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    policy = PolicyModel(make_model(tie_word_embeddings=tied))
    whole, *_ = policy(**batch)
    wanted = gradients(policy.inner, whole.square().sum())
    monkeypatch.setattr(policy_model, "CHUNK_LOGITS", 50 * 16)
    shapes, product = [], policy_model._float32_product
    monkeypatch.setattr(
        policy_model, "_float32_product", lambda left, right: shapes.append(tuple(left.shape)) or product(left, right)
    )
    chunked, *_ = policy(**batch)
    num_chunks = len(shapes)
    torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=1e-6)
    for name, gradient in gradients(policy.inner, chunked.square().sum()).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-4, rtol=1e-4, msg=name)
    assert num_chunks == -(-len(whole) // 16) and max(rows for rows, _ in shapes[:num_chunks]) == 16
    # in the backward pass the logits again, and the weight's gradient
    assert len(shapes) == 3 * num_chunks


def test_in_bfloat16_logits_and_the_sum_of_the_heads_gradient_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer to float32 than a head that rounds its logits, and its gradient after each chunk."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*sizes, generator=generator).bfloat16() for sizes in ((600, 32), (50, 32)))
    targets = torch.randint(50, (600,), generator=generator)
    monkeypatch.setattr(policy_model, "CHUNK_LOGITS", 50 * 4)

    def of(weights: torch.Tensor, read: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights = weights.detach().requires_grad_()
        log_probs = read(weights)
        log_probs.sum().backward()
        return log_probs.detach(), weights.grad.float()

    def token_log_probs(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return (logits.float() / TEMPERATURE).log_softmax(-1).gather(1, chosen[:, None])[:, 0]

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden.split(4), targets.split(4), strict=True)
        return torch.cat([token_log_probs(part @ weights.t(), own) for part, own in parts])

    exact = of(weight.float(), lambda w: token_log_probs(hidden.float() @ w.t(), targets))
    found = of(weight, lambda w: policy_model._Read.apply(hidden, w, targets, TEMPERATURE, False)[0])
    usual = of(weight, rounded)
    distances = [[float((x - y).abs().mean()) for x, y in zip(each, exact, strict=True)] for each in (found, usual)]
    assert distances[0][0] < 1e-5 < 1e-3 < distances[1][0]
    assert 3 * distances[0][1] < distances[1][1], distances


def test_no_place_to_read_still_has_a_gradient_of_zero() -> None:
    policy, nothing = PolicyModel(make_model()), torch.zeros(0, dtype=torch.int64)
    log_probs, entropy, _ = policy(torch.tensor([1, 2]), torch.arange(2), (2,), nothing, nothing, 1.0)
    assert log_probs.shape == entropy.shape == (0,)
    assert all(not gradient.any() for gradient in gradients(policy.inner, log_probs.sum()).values())


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def moe_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    sizes = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "head_dim": 16}
    config = Qwen3MoeConfig(**SIZES, **sizes, norm_topk_prob=True, tie_word_embeddings=False)
    return Qwen3MoeForCausalLM(config).to(dtype)


def test_experts_of_equal_chances_are_chosen_alike_in_rollout_and_update() -> None:
    """With a router in bfloat16 several tokens in a hundred have a tie at the cut: the first of equals counts."""
    block = PolicyModel(moe_model(torch.bfloat16)).inner.model.layers[0].mlp
    x = torch.randn(3000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        logits, weights, experts = block.gate(x)
        decoder = Experts(
            Linear(block.gate.weight), Stack(block.experts.gate_up_proj), Stack(block.experts.down_proj), 4, True
        )
        found, own = block(x[None])[0], decoder(x)
    ranked = [sorted(range(32), key=lambda e: (-row[e], e)) for row in logits.tolist()]
    assert experts.tolist() == [row[:4] for row in ranked]
    tied = [float(row[order[3]]) == float(row[order[4]]) for row, order in zip(logits, ranked, strict=True)]
    assert sum(tied) > 40, "too few ties to test anything"
    chances = logits.float().softmax(-1).gather(1, experts)
    torch.testing.assert_close(weights.float(), chances / chances.sum(1, keepdim=True), atol=4e-3, rtol=0)
    torch.testing.assert_close(found, own, atol=2e-2 * float(own.abs().max()), rtol=0)


@pytest.mark.parametrize("repeats_layers", [False, True])
def test_the_load_balancing_loss_and_its_gradient_are_those_of_transformers(repeats_layers: bool) -> None:
    """Of documents end to end, against the same ones padded, without their padding."""
    own, plain, batch = moe_model(torch.float32).train(), moe_model(torch.float32), make_batch()
    documents = torch.split(batch["tokens"], LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in documents], batch_first=True)
    wanted = plain(input_ids=padded, attention_mask=mask, output_router_logits=True).aux_loss
    log_probs, _, found = PolicyModel(own, repeats_layers)(**batch, balances_experts=True)
    assert 4.1 < float(wanted.detach()) == pytest.approx(float(found.detach()), rel=1e-6), (
        "4 where the experts are chosen evenly"
    )
    wanted.backward()
    (found + 0.0 * log_probs.sum()).backward()
    theirs = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    assert min(float(g.abs().max()) for name, g in theirs.items() if name.endswith("mlp.gate.weight")) > 1e-2
    for name, weight in own.named_parameters():
        gradient = theirs.get(name, torch.zeros_like(weight))
        torch.testing.assert_close(weight.grad, gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_a_router_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of transformers: nothing else would tell that the update chooses experts by another rule."""
    model = moe_model(torch.float32)

    class Renamed(type(model.model.layers[1].mlp.gate)):  # type: ignore[misc]
        pass

    model.model.layers[1].mlp.gate.__class__ = Renamed
    words = r"^transformers 5\S* has a router Qwen3MoeTopKRouter in 1 of the model's 2 layers with experts, .*; install"
    with pytest.raises(UserError, match=words):
        PolicyModel(model)
