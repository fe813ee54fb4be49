"""The engine's promise: given the weights, a response depends on its key alone. And what a response is."""

import itertools

import numpy as np
import pytest
import torch
from tiny import CPU, EOS, NUM_TOKENS, embedded_decoder, gcd_requests, generate, make_engine, texts

from tlt_hpc.models.drafter import Drafter
from tlt_hpc.records import FinishReason
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.noise import gumbel_rows, noise_key
from tlt_hpc.rollout.sampling import SamplingRule, choose
from tlt_hpc.rollout.strategy import OFF, Strategy, strategies_of

REQUESTS = gcd_requests(4, 4)


def untrained_drafter(seed=0):
    return Drafter(embedded_decoder().shape, seed, torch.float32, CPU)


def full_engine(strategies, **options) -> RolloutEngine:
    engine = make_engine(strategies, drafter=untrained_drafter(), **options)
    engine.drafter_ready = True
    return engine


def canonical(request, max_new_tokens, rule):
    """A response by the definition: float64 logits of the sequence alone, one token at a time."""
    decoder, tokens = embedded_decoder(), request.prompt_tokens.tolist()
    words = torch.tensor([noise_key(request.key)])
    response = []
    while len(response) < max_new_tokens and response[-1:] != [EOS]:
        logits = decoder.reference_logits(torch.tensor(tokens + response), 1)[0]
        noise = gumbel_rows(words, torch.tensor([[len(response)]]), NUM_TOKENS)[0, 0]
        response.append(int(choose(logits, noise.double(), rule, 0.0).token))
    return response


@pytest.mark.parametrize(
    "rule",
    [
        SamplingRule(1.0, NUM_TOKENS),
        SamplingRule(0.0, NUM_TOKENS),
        SamplingRule(1.2, NUM_TOKENS, top_k=4, top_p=0.9, min_p=0.01),
    ],
    ids=["temperature-1", "greedy", "truncated"],
)
def test_responses_are_the_canonical_ones(rule):
    requests = REQUESTS[::5]
    got = texts(generate(full_engine(strategies_of("full", (2, 4)), rule=rule, max_new_tokens=60), requests))
    for request in requests:
        assert got[request.key] == canonical(request, 60, rule)


ENGINES = {
    "one row at a time": lambda: make_engine(max_live=1),
    "three rows, refilled": lambda: make_engine(max_live=3),
    "n-gram chains": lambda: make_engine([Strategy("ngram", 3)], max_live=5),
    "untrained drafter chains": lambda: full_engine([Strategy("drafter", 4)], max_live=6),
    "all strategies, switching": lambda: full_engine(strategies_of("full", (1, 3, 6)), max_live=7, epsilon=1.0),
    "deep chains at the cap": lambda: full_engine([Strategy("drafter", 9), Strategy("ngram", 9), OFF], epsilon=1.0),
}


@pytest.mark.parametrize("name", ENGINES)
def test_text_depends_on_neither_strategy_nor_batch(name):
    plain = texts(generate(make_engine(max_live=16), REQUESTS))
    engine = ENGINES[name]()
    assert texts(generate(engine, list(reversed(REQUESTS)))) == plain
    assert texts(generate(engine, REQUESTS)) == plain, "a second rollout, with what the first taught the n-grams"


def test_speculation_really_happens_and_saves_passes():
    engine = make_engine([Strategy("ngram", 4)])
    generate(engine, REQUESTS)
    again = generate(engine, REQUESTS)
    counts = engine.take_counts()
    assert counts.num_tokens / counts.num_row_passes > 1.3
    assert sum(r.num_target_passes for r in again) < 0.7 * sum(len(r.response_tokens) for r in again)


def test_the_guard_decides_every_token_when_its_zone_is_all():
    """With an infinite zone of doubt each token takes the float64 path, and the text is still the same."""
    plain = texts(generate(make_engine(max_new_tokens=40), REQUESTS[:4]))
    engine = make_engine([Strategy("ngram", 3)], max_new_tokens=40)
    engine._guard.logit_tolerance = float("inf")
    rollouts = generate(engine, REQUESTS[:4])
    assert texts(rollouts) == plain
    assert engine.take_counts().num_guarded >= sum(len(r.response_tokens) for r in rollouts)


def test_the_guard_corrects_a_wrong_fast_path():
    """Logits shaken within the zone flip near-ties without the guard, and none with it."""
    plain = texts(generate(make_engine(), REQUESTS))

    def shaken(tie_guard):
        engine = make_engine(tie_guard=tie_guard)
        engine._guard.logit_tolerance = 0.5
        generator, logits = torch.Generator().manual_seed(0), engine.decoder.logits
        engine.decoder = ShakenDecoder(
            engine.decoder, lambda h: logits(h) + torch.rand(h.shape[0], 24, generator=generator) * 0.1
        )
        engine._guard._check = lambda error: None
        return texts(generate(engine, REQUESTS))

    assert shaken(tie_guard=False) != plain
    assert shaken(tie_guard=True) == plain


class ShakenDecoder:
    """A decoder whose fast logits are off."""

    def __init__(self, decoder, logits):
        self._decoder, self.logits = decoder, logits

    def __getattr__(self, name):
        return getattr(self._decoder, name)


def test_a_canonical_pass_that_finds_the_error_too_large_raises_the_tolerance():
    engine = make_engine()
    guard, before = engine._guard, engine._guard.tolerance
    prefix = torch.from_numpy(REQUESTS[0].prompt_tokens).long()
    exact = embedded_decoder().reference_logits(prefix, 1)[0]
    guard.decide(prefix, torch.zeros(NUM_TOKENS), exact.float())
    assert (guard.tolerance, guard.num_raised) == (before, 0)
    guard.decide(prefix, torch.zeros(NUM_TOKENS), exact.float() + before)
    assert guard.tolerance == pytest.approx(20 * before, rel=1e-3)
    assert guard.num_raised == 1


def test_what_a_rollout_records():
    engine = full_engine(strategies_of("full", (3,)), max_new_tokens=60, epsilon=1.0)
    rollouts = generate(engine, REQUESTS)
    assert [r.key for r in rollouts] == sorted(request.key for request in REQUESTS)
    for rollout in rollouts:
        tokens = rollout.response_tokens.tolist()
        assert EOS not in tokens[:-1], "nothing may follow the end token, even inside an accepted block"
        assert rollout.finish_reason == (FinishReason.EOS if tokens[-1] == EOS else FinishReason.LENGTH)
        assert len(tokens) <= 60
        assert (rollout.finish_reason == FinishReason.LENGTH) == (len(tokens) == 60 and tokens[-1] != EOS)
        whole = torch.tensor([*rollout.prompt_tokens.tolist(), *tokens])
        logits = embedded_decoder().reference_logits(whole, len(tokens) + 1)[:-1]
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        np.testing.assert_allclose(rollout.log_probs, wanted.numpy(), atol=2e-4)
    assert {r.finish_reason for r in rollouts} == {FinishReason.EOS, FinishReason.LENGTH}


def test_features_are_the_targets_at_the_same_positions():
    kept = {}
    engine = full_engine(strategies_of("full", (3,)), epsilon=1.0, max_live=5)
    engine.feature_sink = lambda tokens, prompt_length, features: kept.update(
        {tuple(tokens.tolist()): (prompt_length, features)}
    )
    for rollout in generate(engine, REQUESTS):
        whole = [*rollout.prompt_tokens.tolist(), *rollout.response_tokens.tolist()]
        prompt_length, features = kept[tuple(whole)]
        assert prompt_length == len(rollout.prompt_tokens)
        assert features.shape == (len(whole) - 1, 1, 128)
        tokens = torch.tensor(whole[:-1])
        decoder = embedded_decoder()
        from tlt_hpc.rollout.kv_cache import KVCache

        positions = torch.arange(len(tokens)).unsqueeze(0)
        cache = KVCache(decoder.shape, 1, len(tokens), torch.float32, CPU)
        wanted = decoder.hidden(tokens, positions.flatten(), cache.attend(positions))
        got = torch.from_numpy(features[:, 0]).view(torch.bfloat16).float()
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_caps_of_one_and_two_tokens(max_new_tokens):
    engine = full_engine(strategies_of("full", (4,)), max_new_tokens=max_new_tokens, epsilon=1.0)
    longer = texts(generate(make_engine(max_new_tokens=10), REQUESTS))
    for key, tokens in texts(generate(engine, REQUESTS)).items():
        assert tokens == longer[key][:max_new_tokens]


def test_no_requests_and_bad_prompts():
    engine = make_engine()
    assert not engine.has_work
    assert engine.collect() == []
    request = REQUESTS[0]
    for length in (0, 17):
        bad = type(request)(request.key, np.zeros(length, np.int32))
        with pytest.raises(ValueError, match=f"has {length} tokens; the engine takes 1 to 16"):
            engine.submit([bad])


def test_abort_leaves_a_usable_engine():
    plain = texts(generate(make_engine(), REQUESTS))
    engine = full_engine(strategies_of("full", (3,)), max_live=5, epsilon=1.0)
    engine.submit(REQUESTS)
    for _ in range(7):
        engine.step()
    engine.abort()
    assert not engine.has_work
    engine.collect()
    assert texts(generate(engine, REQUESTS)) == plain


def test_first_tokens_have_the_policys_distribution():
    """Chi-square of the first token and of the first two, with a drafter proposing, over many samples of one prompt."""
    requests = gcd_requests(1, 3000, seed=5)
    rule = SamplingRule(1.0, NUM_TOKENS)
    engine = full_engine([Strategy("drafter", 2)], max_live=100, max_new_tokens=2, rule=rule)
    got = [tuple(tokens) for tokens in texts(generate(engine, requests)).values()]
    prompt = requests[0].prompt_tokens.tolist()
    law = {}
    first = torch.softmax(embedded_decoder().reference_logits(torch.tensor(prompt), 1)[0, :NUM_TOKENS], -1)
    for a in range(NUM_TOKENS):
        if a == EOS:
            law[(a,)] = float(first[a])
            continue
        second = torch.softmax(embedded_decoder().reference_logits(torch.tensor([*prompt, a]), 1)[0, :NUM_TOKENS], -1)
        law.update({(a, b): float(first[a] * second[b]) for b in range(NUM_TOKENS)})
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    common = [outcome for outcome, p in law.items() if p * len(got) >= 5]
    observed = [got.count(outcome) for outcome in common]
    expected = [law[outcome] * len(got) for outcome in common]
    rest = len(got) - sum(observed), len(got) - sum(expected)
    pairs = [*zip(observed, expected, strict=True), *([rest] if rest[1] >= 5 else [])]
    chi_square = sum((o - e) ** 2 / e for o, e in pairs)
    degrees = len(pairs) - 1
    assert degrees >= 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5, f"{chi_square} at {degrees} degrees"


def test_the_chooser_leaves_what_does_not_pay():
    from tlt_hpc.rollout.strategy import StrategyChooser

    arms = strategies_of("full", (2, 4))
    chooser = StrategyChooser(arms, epsilon=0.0, window=32, seed=0)
    seconds = {
        OFF: 1.0,
        Strategy("ngram", 2): 1.5,
        Strategy("ngram", 4): 2.0,
        Strategy("drafter", 2): 1.4,
        Strategy("drafter", 4): 1.6,
    }
    accept = {
        OFF: 1.0,
        Strategy("ngram", 2): 1.2,
        Strategy("ngram", 4): 1.3,
        Strategy("drafter", 2): 2.0,
        Strategy("drafter", 4): 3.0,
    }
    chosen = []
    for _ in range(40):
        strategy = chooser.choose(4, arms)
        chosen.append(strategy)
        chooser.observe(strategy, 4, round(4 * accept[strategy]), seconds[strategy])
    assert set(chosen[:5]) == set(arms)
    assert set(chosen[5:]) == {Strategy("drafter", 4)}
    for _ in range(40):  # the drafter turns bad: it is left once its rounds show it
        strategy = chooser.choose(4, arms)
        chooser.observe(strategy, 4, 4, seconds[strategy])
    assert chooser.choose(4, arms) == OFF
    assert sum(tokens for _, tokens in chooser.totals().values()) == sum(round(4 * accept[s]) for s in chosen) + 4 * 40


def test_strategies_of_a_mode():
    assert strategies_of("plain", (2, 4)) == (OFF,)
    assert [s.name for s in strategies_of("full", (4, 2))] == ["off", "ngram-2", "ngram-4", "drafter-2", "drafter-4"]
    assert len(set(itertools.chain(strategies_of("full", (2,)), strategies_of("ngram", (2,))))) == 3
