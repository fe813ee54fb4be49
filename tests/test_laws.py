"""The law of what comes out, on a vocabulary of 8: the joint one of three tokens, for every kind of drafter, and for
truncations at other temperatures than 1; and what truncation does to an update.

Adversarial drafters propose the unlikeliest tokens, always the same one, or nothing that is a number.
"""

from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from by_definition import law_of
from launch_ranks import ROOT
from tiny import CPU, generate
from transformers import Qwen2Config, Qwen2ForCausalLM

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import Request, SampleKey, SamplingParams
from tlt_hpc.config import load_config, truncation_warning
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.shape import shape_from
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, parse_strategy

V, NUM_SAMPLES, PROMPT = 8, 4000, [3, 1, 5]
CONFIG = Qwen2Config(
    vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.5, tie_word_embeddings=False,
)  # fmt: skip
SHAPE = shape_from(CONFIG.to_dict(), "test")
PLAIN = SamplingRule(1.0, V)


@cache
def model():
    torch.manual_seed(4)
    return Qwen2ForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def decoder():
    made = Decoder(SHAPE, torch.float32, CPU)
    made.load_weights(model().state_dict().items(), 0)
    return made


@cache
@torch.inference_mode()
def triples_law(rule):
    """Probability of each triple of tokens after the prompt under a rule, by its definition and transformers' logits in
    float64.
    """
    exact = deepcopy(model()).double()
    chances = {(): 1.0}
    for _ in range(3):
        chances = {
            (*tokens, token): chance * p
            for tokens, chance in chances.items()
            for token, p in enumerate(law_of(exact(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1], rule))
            if p > 0
        }
    return chances


CASES = [
    (PLAIN, "random", "ngram-2", {}),
    (PLAIN, "random", "drafter-2x8v20a3", {}),
    (PLAIN, "contrary", "drafter-2x2v4", {}),
    (PLAIN, "constant", "drafter-2", {}),
    (PLAIN, "not a number", "drafter-2x3v6", {}),
    (SamplingRule(0.7, V, top_p=0.8), "random", "drafter-2x3v6", {"attention": "paged-kernel", "tie_guard": False}),
    (SamplingRule(1.6, V, top_k=4), "random", "drafter-2x3v6", {"attention": "paged-kernel", "tie_guard": False}),
    (SamplingRule(1.6, V, top_p=0.8), "random", "drafter-2x3v6", {}),
]
WEIGHTS = {
    "random": lambda x: x,
    "contrary": lambda x: -20 * x,
    "constant": torch.zeros_like,
    "not a number": lambda x: torch.full_like(x, torch.nan),
}


def draw(decoder, seed, rule, drafter, strategy, options):
    """Triples of tokens under keys of this seed."""
    settings = EngineSettings(
        params=SamplingParams(3, rule.temperature, rule.top_k, rule.top_p), num_tokens=V, eos_token_ids=(),
        max_live=256, max_prompt_tokens=4, page_size=4, strategies=(OFF, parse_strategy(strategy)),
        chooser="random", seed=seed, **{"tie_guard": True} | options,
    )  # fmt: skip
    own = Eagle(SHAPE, 0, torch.float32, CPU)
    engine, prompt = RolloutEngine(decoder, settings, own), np.array(PROMPT, np.int32)
    engine.load_drafter({name: WEIGHTS[drafter](tensor) for name, tensor in own.state_dict().items()})
    engine.calibrate([Request(SampleKey(seed, 3, 0, 0, 0), prompt)])
    got = generate(engine, [Request(SampleKey(seed, 0, 0, 0, i), prompt) for i in range(NUM_SAMPLES)])
    assert drafter == "not a number" or engine.take_counts().strategies[strategy][0] > 3
    return Counter(tuple(rollout.response_tokens.tolist()) for rollout in got)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_have_the_law_of_their_rule(decoder, case):
    """By chi-square, which is wrong about once in ten thousand times; the keys are fixed: what passes once passes
    always. Outcomes that are expected less than five times are taken together.
    """
    law, observed = triples_law(case[0]), draw(decoder, CASES.index(case), *case)
    assert set(observed) <= set(law), "a token that the rule does not keep"
    expected = {triple: p * NUM_SAMPLES for triple, p in law.items()}
    pairs = [(observed[triple], count) for triple, count in expected.items() if count >= 5]
    rest = NUM_SAMPLES - sum(o for o, _ in pairs), NUM_SAMPLES - sum(e for _, e in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    statistic, degrees = sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5 + 4, f"{statistic:.1f} at {degrees} degrees"
    assert degrees >= 3, "a law worth testing"


# -- truncated rollouts: an update scores the whole softmax; by enumeration of all responses ------------------------


def gradients(rule: SamplingRule) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The mean reward's gradient under a rule's law, the mean of the trainer's estimate of it, and the mean of minus
    the logarithm of the kept mass, per token.

    A response is worth 1 if its tokens add up to an even number. Which tokens are kept does not change with a step.
    """
    policy, law = model(), triples_law(rule)
    rewards = {tokens: float(sum(tokens) % 2 == 0) for tokens in law}
    baseline = sum(p * rewards[tokens] for tokens, p in law.items())
    logits = policy(torch.tensor([[*PROMPT, *tokens[:2]] for tokens in law])).logits[:, len(PROMPT) - 1 :]
    exact, estimate, lost = torch.zeros(()), torch.zeros(()), 0.0
    for row, (tokens, p) in zip((logits / rule.temperature).log_softmax(-1), law.items(), strict=True):
        full = torch.stack([row[i, token] for i, token in enumerate(tokens)]).sum()
        kept = [sorted({other[i] for other in law if other[:i] == tokens[:i]}) for i in range(3)]
        mass = torch.stack([row[i, among].logsumexp(0) for i, among in enumerate(kept)]).sum()
        weight = p * (rewards[tokens] - baseline)
        exact, estimate, lost = exact + weight * (full - mass), estimate + weight * full, lost - p * mass.item() / 3
    parameters = list(policy.parameters())
    of_exact, of_estimate = (
        torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters, retain_graph=True)])
        for value in (exact, estimate)
    )
    return of_exact, of_estimate, lost


@pytest.mark.parametrize(
    ("rule", "distance", "error"),
    [
        (SamplingRule(1.0, V), 0.0, 0.0),
        (SamplingRule(1.0, V, top_p=0.99), 0.006, 0.007),
        (SamplingRule(1.0, V, top_p=0.95), 0.035, 0.029),
        (SamplingRule(1.0, V, top_p=0.8), 0.140, 0.107),
        (SamplingRule(1.0, V, top_k=4), 0.067, 0.028),
    ],
    ids=str,
)
def test_the_bias_that_the_page_states(rule: SamplingRule, distance: float, error: float) -> None:
    """The figures of docs/train.md; the distance is KL(sampled || scored) in nats a token."""
    exact, estimate, lost = gradients(rule)
    assert lost == pytest.approx(distance, abs=1e-3)
    assert float((estimate - exact).norm() / exact.norm()) == pytest.approx(error, abs=2e-3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ""),
        (["rollout.temperature=0.7"], ""),
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9: responses"),
        (["rollout.top_k=20", "rollout.top_p=0.8"], "rollout.top_k = 20 and rollout.top_p = 0.8: responses"),
        (["rollout.temperature=0", "rollout.top_p=0.9", "algorithm.name=reinforce++"], ""),
    ],
)
def test_a_start_says_that_the_gradient_is_biased(overrides: list[str], said: str) -> None:
    found = truncation_warning(load_config(ROOT / "jobs" / "tiny.toml", overrides).rollout)
    assert found.startswith(said) and bool(found) == bool(said) and "\n" not in found


def test_the_warning_is_printed_at_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["train", str(ROOT / "jobs" / "tiny.toml"), f"run.folder={tmp_path}", "--dry-run"]
    assert main([*job, "rollout.top_p=0.9"]) == 0
    said = "rollout.top_p = 0.9: responses come from a truncated distribution"
    assert capsys.readouterr().out.count(f"warning     {said}") == 1
