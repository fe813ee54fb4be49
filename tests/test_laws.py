"""The law of what comes out, on a vocabulary of 8: the first token's and the joint one of three, for every drafter.

Adversarial drafters propose the unlikeliest tokens, always the same one, or nothing that is a number.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from tiny import CPU, generate
from transformers import Qwen2Config, Qwen2ForCausalLM

from tlt_hpc.common.records import Request, SampleKey, SamplingParams
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.shape import shape_from
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, strategy_named

V, NUM_SAMPLES, PROMPT = 8, 4000, [3, 1, 5]
CONFIG = Qwen2Config(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.5,
    tie_word_embeddings=False,
)
SHAPE = shape_from(CONFIG.to_dict(), "test")


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(4)
    made = Decoder(SHAPE, torch.float32, CPU)
    made.load(Qwen2ForCausalLM(CONFIG).state_dict().items(), 0)
    return made


@pytest.fixture(scope="module")
def law(decoder):
    """Probability of each triple of tokens after the prompt, in float64."""

    def following(tokens):
        return torch.softmax(decoder.reference_logits(torch.tensor(PROMPT + tokens), 1)[0], -1).tolist()

    first = following([])
    second = {a: following([a]) for a in range(V)}
    third = {pair: following(list(pair)) for pair in itertools.product(range(V), repeat=2)}
    triples = itertools.product(range(V), repeat=3)
    joint = {(a, b, c): first[a] * second[a][b] * third[a, b][c] for a, b, c in triples}
    entropy = -sum(p * np.log(p) for p in first)
    assert 1.0 < entropy < 2.0, "a law worth testing"
    return joint


def drafters():
    honest = Eagle(SHAPE, 0, torch.float32, CPU).state_dict()
    yield "random", honest
    yield "contrary", {name: -20 * tensor for name, tensor in honest.items()}
    yield "constant", {name: torch.zeros_like(tensor) for name, tensor in honest.items()}
    yield "not a number", {name: torch.full_like(tensor, torch.nan) for name, tensor in honest.items()}


CASES = [
    *((name, strategy) for name in dict(drafters()) for strategy in ("drafter-2", "drafter-2x3v6", "drafter-2x2v4")),
    ("random", "ngram-2"),
    ("random", "off"),
    ("random", "drafter-2x8v20a3"),
]


def draw(decoder, drafter, strategy, seed):
    """Triples of tokens under keys of this seed."""
    chosen = strategy_named(strategy)
    settings = EngineSettings(
        params=SamplingParams(3),
        num_tokens=V,
        eos_token_ids=(),
        max_live=256,
        max_prompt_tokens=4,
        tie_guard=True,
        page_size=4,
        strategies=tuple(dict.fromkeys((OFF, chosen))),
        chooser="random",
        seed=seed,
    )
    engine = RolloutEngine(decoder, settings, Eagle(SHAPE, 0, torch.float32, CPU))
    engine.load_drafter(dict(drafters())[drafter])
    prompt = np.array(PROMPT, np.int32)
    engine.calibrate([Request(SampleKey(seed, 3, 0, 0, 0), prompt)])
    got = generate(engine, [Request(SampleKey(seed, 0, 0, 0, i), prompt) for i in range(NUM_SAMPLES)])
    counts = engine.take_counts()
    assert strategy == "off" or drafter == "not a number" or counts.strategies[strategy][0] > 3
    return [tuple(rollout.response_tokens.tolist()) for rollout in got]


def chi_square(observed, law):
    """The statistic and its degrees of freedom; outcomes expected less than five times are taken together."""
    expected = {outcome: p * NUM_SAMPLES for outcome, p in law.items()}
    common = [outcome for outcome, e in expected.items() if e >= 5]
    pairs = [(observed[outcome], expected[outcome]) for outcome in common]
    rest = NUM_SAMPLES - sum(o for o, _ in pairs), NUM_SAMPLES - sum(e for _, e in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    return sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1


@pytest.mark.parametrize(("drafter", "strategy"), CASES)
def test_tokens_have_the_targets_law(decoder, law, drafter, strategy):
    triples = draw(decoder, drafter, strategy, seed=CASES.index((drafter, strategy)))
    first = Counter(triple[0] for triple in triples)
    of_first = {token: sum(p for triple, p in law.items() if triple[0] == token) for token in range(V)}
    for observed, wanted in ((first, of_first), (Counter(triples), law)):
        statistic, degrees = chi_square(observed, wanted)
        assert degrees >= 5
        # under the law this is exceeded about once in ten thousand times
        assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5, f"{statistic:.1f} at {degrees} degrees"
