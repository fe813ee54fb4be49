"""The engine's promise: given the weights, a response depends on its key alone. And what a response is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import (
    CPU,
    EOS,
    NUM_TOKENS,
    KeptFeatures,
    embedded_decoder,
    embedded_folder,
    embedded_tokenizer,
    gcd_requests,
    generate,
    make_engine,
    texts,
)

from tlt_hpc.common.records import FinishReason, SamplingParams
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.guard import SAFETY
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.noise import gumbel_rows, noise_key
from tlt_hpc.rollout.sampling import SamplingRule, choose
from tlt_hpc.rollout.strategy import OFF, Strategy, strategy_named

REQUESTS = gcd_requests(4, 4)
PAGES_OF_8 = page_bytes(embedded_decoder().shape, 8, torch.float32, 1)


def parse(*names):
    return [OFF, *map(strategy_named, names)]


def untrained_drafter(seed=0):
    return Eagle(embedded_decoder().shape, seed, torch.float32, CPU)


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
    got = texts(
        generate(
            full_engine(parse("ngram-2", "ngram-4", "drafter-2", "drafter-4"), rule=rule, max_new_tokens=60), requests
        )
    )
    for request in requests:
        assert got[request.key] == canonical(request, 60, rule)


ENGINES = {
    "one row at a time": lambda: make_engine(max_live=1),
    "three rows, refilled": lambda: make_engine(max_live=3),
    "n-gram chains": lambda: make_engine([Strategy("ngram", 3)], max_live=5),
    "untrained drafter chains": lambda: full_engine([Strategy("drafter", 4)], max_live=6),
    "all strategies, switching": lambda: full_engine(
        parse("ngram-1", "drafter-1", "ngram-3", "drafter-3", "ngram-6", "drafter-6"), max_live=7, chooser="random"
    ),
    "trees": lambda: full_engine([Strategy("drafter", 4, 2, 9)], max_live=6),
    "bushy trees and chains": lambda: full_engine(
        [Strategy("drafter", 3, 4, 7, 1.5), Strategy("drafter", 4, 2, 6), Strategy("drafter", 3), OFF],
        max_live=9,
        chooser="random",
    ),
    "small pages, shared prompts": lambda: full_engine(
        [Strategy("drafter", 3, 2, 5), Strategy("ngram", 3), OFF], max_live=12, chooser="random", page_size=4
    ),
    "few pages, preempted": lambda: full_engine(
        [Strategy("drafter", 3, 2, 5), OFF], max_live=16, chooser="random", page_size=8, kv_bytes=PAGES_OF_8 * 40
    ),
    "prefilled three tokens at a time": lambda: full_engine(
        [Strategy("drafter", 3), OFF], max_live=5, chooser="random", prefill_tokens=3
    ),
    "deep chains at the cap": lambda: full_engine(
        [Strategy("drafter", 9), Strategy("ngram", 9), OFF], chooser="random"
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_text_depends_on_neither_strategy_nor_batch(name):
    plain = texts(generate(make_engine(max_live=16), REQUESTS))
    engine = ENGINES[name]()
    assert texts(generate(engine, list(reversed(REQUESTS)))) == plain
    assert texts(generate(engine, REQUESTS)) == plain, "a second rollout, with what the first taught the n-grams"


def test_the_guard_decides_every_token_when_its_zone_is_all():
    """With an infinite zone of doubt each token takes the float64 path, and the text is still the same."""
    plain = texts(generate(make_engine(max_new_tokens=40), REQUESTS[:4]))
    engine = make_engine([Strategy("ngram", 3)], max_new_tokens=40)
    engine._guard.logit_tolerance = float("inf")
    rollouts = generate(engine, REQUESTS[:4])
    assert texts(rollouts) == plain
    assert engine.take_counts().num_guarded >= sum(len(r.response_tokens) for r in rollouts)


def test_the_guard_corrects_a_wrong_fast_path(monkeypatch):
    """Shaken logits flip near-ties without the guard, and none with the tolerance that its probe finds for them."""
    plain = texts(generate(make_engine(), REQUESTS))
    logits = Decoder.logits

    def shaken(tie_guard):
        generator = torch.Generator().manual_seed(0)
        monkeypatch.setattr(
            Decoder,
            "logits",
            lambda self, hidden, widen=True: (
                logits(self, hidden, widen) + torch.rand(len(hidden), 24, generator=generator) * 0.5
            ),
        )
        engine = make_engine(tie_guard=tie_guard)
        assert engine._guard.logit_tolerance == pytest.approx(SAFETY * 0.5 * tie_guard, rel=0.01)
        got = texts(generate(engine, REQUESTS))
        assert engine._guard.num_raised == 0
        return got

    assert shaken(tie_guard=False) != plain
    assert shaken(tie_guard=True) == plain


def test_a_canonical_pass_that_finds_the_error_too_large_raises_the_tolerance():
    engine = make_engine()
    guard, before, rule = engine._guard, engine._guard.logit_tolerance, SamplingRule(1.0, NUM_TOKENS)
    prefix = torch.from_numpy(REQUESTS[0].prompt_tokens).long()
    exact = embedded_decoder().reference_logits(prefix, 1)[0]
    guard.decide(prefix, torch.zeros(NUM_TOKENS), exact.float(), rule, None)
    assert (guard.logit_tolerance, guard.num_raised) == (before, 0)
    guard.decide(prefix, torch.zeros(NUM_TOKENS), exact.float() + before, rule, None)
    assert guard.logit_tolerance == pytest.approx(SAFETY * before, rel=1e-2)
    assert guard.num_raised == 1
    assert guard.tolerance(SamplingRule(0.5, NUM_TOKENS)) == 2 * guard.tolerance(rule)
    assert guard.tolerance(SamplingRule(0.0, NUM_TOKENS)) == guard.logit_tolerance
    hot = guard.tolerance(SamplingRule(1e4, NUM_TOKENS))
    assert hot >= 4 * torch.finfo(torch.float32).eps * 16, "scores around 16 are themselves rounded"


def test_what_a_rollout_records():
    engine = full_engine(parse("ngram-3", "drafter-3"), max_new_tokens=60, chooser="random")
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
    engine = full_engine(parse("ngram-3", "drafter-3"), chooser="random", max_live=5)
    engine.feature_sink = kept = KeptFeatures()
    for rollout in generate(engine, REQUESTS):
        whole = [*rollout.prompt_tokens.tolist(), *rollout.response_tokens.tolist()]
        prompt_length, features = kept.whole[tuple(whole)]
        assert prompt_length == len(rollout.prompt_tokens)
        assert features.shape == (len(whole) - 1, 1, 128)
        tokens = torch.tensor(whole[:-1])
        decoder = embedded_decoder()
        wanted = decoder.hidden(tokens, torch.arange(len(tokens)), attend_documents(None))
        got = torch.from_numpy(features[:, 0]).view(torch.bfloat16).float()
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3)


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
    engine = full_engine(parse("ngram-3", "drafter-3"), max_live=5, chooser="random")
    engine.submit(REQUESTS)
    for _ in range(7):
        engine.step()
    engine.abort()
    assert not engine.has_work
    engine.collect()
    assert texts(generate(engine, REQUESTS)) == plain


# -- memory -----------------------------------------------------------------------------------------------------------


def test_preemption_happens_and_every_page_comes_back():
    engine = full_engine([Strategy("drafter", 3), OFF], max_live=16, page_size=8, kv_bytes=PAGES_OF_8 * 40)
    generate(engine, REQUESTS)
    assert engine.take_counts().num_preempted > 0
    assert engine._scheduler.pool.num_used == 0


def test_a_groups_prompt_is_prefilled_once(monkeypatch):
    fed = []
    features = Decoder.features
    monkeypatch.setattr(
        Decoder, "features", lambda self, tokens, *rest: (fed.append(len(tokens)), features(self, tokens, *rest))[1]
    )
    engine = make_engine(max_live=16)
    fed.clear()
    engine.submit(REQUESTS)
    engine._fill()
    engine._fill()
    prompts = {request.prompt_tokens.tobytes(): len(request.prompt_tokens) for request in REQUESTS}
    assert engine._rows.num_live == 16
    assert sum(fed) == 4 * (max(prompts.values()) - 1), "four prompts, padded to the longest"


def test_shared_pages_are_held_once():
    engine = make_engine(max_live=16, page_size=4)
    engine.submit(REQUESTS)
    engine._fill()
    engine._fill()
    lengths = [len(request.prompt_tokens) for request in REQUESTS]
    apart = sum(-(-length // 4) for length in lengths)
    saved = sum((length - 1) // 4 for i, length in enumerate(lengths) if i % 4)
    assert engine._scheduler.pool.num_used == apart - saved


def test_a_budget_that_holds_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"holds 2 pages of 8 tokens, one sequence of full length takes \d+; give at"):
        make_engine(page_size=8, kv_bytes=3 * page_bytes(embedded_decoder().shape, 8, torch.float32, 0))


def test_the_memory_table_names_what_is_held():
    engine = full_engine([Strategy("drafter", 3), OFF], page_size=8, kv_bytes=PAGES_OF_8 * 40)
    table = engine.memory_table()
    assert table["keys, values, features"] == PAGES_OF_8 * 40
    assert table["weights"] == sum(t.nbytes for _, t in folder_weights(embedded_folder())) * 2, "the file is in fp16"
    assert table["drafter"] == sum(p.nbytes for p in untrained_drafter().parameters())


# -- parameters of a request ------------------------------------------------------------------------------------------


def params(**changes):
    return replace(SamplingParams(max_tokens=60), **changes)


def run_with(request, strategies=(OFF,), **changes):
    engine = full_engine(list(strategies), detokenize=embedded_tokenizer().decode)
    return generate(engine, [replace(request, params=params(**changes))])[0]


@pytest.mark.parametrize("strategies", [(OFF,), (Strategy("drafter", 4, 2, 8),), (Strategy("ngram", 3), OFF)])
def test_rows_of_many_rules_do_not_disturb_each_other(strategies):
    rules = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 1.5},
    ]
    mixed = [replace(request, params=params(**rules[i % 5])) for i, request in enumerate(REQUESTS)]
    got = texts(generate(full_engine(list(strategies), max_live=16), mixed))
    for request in mixed:
        p = request.params
        rule = SamplingRule(p.temperature, NUM_TOKENS, p.top_k, p.top_p, p.min_p)
        assert got[request.key] == canonical(request, 60, rule)


def test_zero_and_one_token():
    nothing = run_with(REQUESTS[0], max_tokens=0)
    assert (len(nothing.response_tokens), nothing.finish_reason) == (0, FinishReason.LENGTH)
    one = run_with(REQUESTS[0], max_tokens=1)
    assert one.response_tokens.tolist() == run_with(REQUESTS[0]).response_tokens[:1].tolist()


@pytest.mark.parametrize("strategy", [OFF, Strategy("drafter", 4, 2, 8), Strategy("ngram", 3)])
def test_no_end_before_the_least_length(strategy):
    short = next(r for r in generate(make_engine(max_new_tokens=60), REQUESTS) if len(r.response_tokens) < 30)
    request = next(r for r in REQUESTS if r.key == short.key)
    length = len(short.response_tokens)
    longer = run_with(request, [strategy], min_tokens=length + 3)
    assert EOS not in longer.response_tokens[: length + 3].tolist()
    assert longer.response_tokens[: length - 1].tolist() == short.response_tokens[:-1].tolist()
    assert len(longer.response_tokens) > length + 3
    enough = run_with(request, [strategy], min_tokens=length - 1)
    assert enough.response_tokens.tolist() == short.response_tokens.tolist()


@pytest.mark.parametrize("strategy", [OFF, Strategy("drafter", 6), Strategy("drafter", 4, 2, 8)])
def test_stop_strings(strategy):
    request = REQUESTS[0]
    whole = run_with(request).response_tokens.tolist()
    decode = embedded_tokenizer().decode
    text = decode(whole[5:8])
    stopped = run_with(request, [strategy], stop_strings=("never there", text))
    cut = next(i for i in range(len(whole)) if text in decode(whole[: i + 1]))
    assert (stopped.response_tokens.tolist(), stopped.finish_reason) == (whole[: cut + 1], FinishReason.STOP)
    assert len(stopped.log_probs) == cut + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0; use 0 or more"),
        ({"top_p": 0.0}, "top_p = 0.0; use above 0"),
        ({"min_p": 1.0}, "min_p = 1.0; use"),
        ({"top_k": -1}, "top_k = -1; use"),
        ({"min_tokens": 61}, "min_tokens = 61; use 0 to max_tokens = 60"),
        ({"max_tokens": 500}, "do not fit a pool of .* raise rollout.max_new_tokens"),
        ({"stop_strings": ("",)}, "stop string"),
    ],
)
def test_impossible_parameters_are_one_line(changes, message):
    engine = make_engine(detokenize=embedded_tokenizer().decode)
    with pytest.raises(ValueError, match=message):
        engine.submit([REQUESTS[1], replace(REQUESTS[0], params=params(**changes))])
    assert not engine.has_work, "the other request is not queued either"


# -- the drafter changes ----------------------------------------------------------------------------------------------


def test_a_drafter_of_nan_is_rested_counted_and_harmless():
    plain = texts(generate(make_engine(), REQUESTS))
    for strategy in (Strategy("drafter", 3), Strategy("drafter", 3, 2, 6)):
        engine = full_engine([strategy, OFF], chooser="random")
        good = {name: tensor.clone() for name, tensor in engine.drafter.state_dict().items()}
        engine.load_drafter({name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()})
        assert texts(generate(engine, REQUESTS)) == plain
        assert engine.take_counts().num_drafter_faults == 1, "after the first it is not asked again"
        engine.load_drafter(good)
        assert texts(generate(engine, REQUESTS)) == plain
        counts = engine.take_counts()
        assert (counts.num_drafter_faults, counts.strategies[strategy.name][0] > 0) == (0, True)


def test_a_drafter_swapped_in_the_middle_changes_no_text():
    plain = texts(generate(make_engine(), REQUESTS))
    engine = full_engine([Strategy("drafter", 3), Strategy("drafter", 3, 2, 6)], max_live=5, chooser="random")
    engine.submit(REQUESTS)
    for seed in range(1, 4):
        for _ in range(5):
            engine.step()
        engine.load_drafter(untrained_drafter(seed).state_dict())
    assert texts(generate(engine, [])) == plain


def test_measuring_costs_leaves_no_trace():
    plain = texts(generate(make_engine(), REQUESTS))
    strategies = [OFF, Strategy("drafter", 3), Strategy("drafter", 3, 2, 6), Strategy("ngram", 3)]
    engine = full_engine(strategies, max_live=6)
    costs = engine.profile(REQUESTS[:2], 0.5)
    assert all(costs.seconds(one, batch) > 0 for one in strategies for batch in (1, 6))
    assert costs.covers(strategies, 6)
    assert engine._scheduler.pool.num_used == 0
    assert texts(generate(engine, REQUESTS)) == plain


def test_a_strategy_without_its_drafter_is_refused():
    with pytest.raises(ValueError, match="drafter-2 needs a drafter"):
        make_engine([Strategy("drafter", 2)])


def test_chances_that_have_run_out_of_digits_orphan_no_node():
    """Where a child's chance equals its parent's, the parent still comes first."""
    plain = texts(generate(make_engine(), REQUESTS))
    engine = full_engine([Strategy("drafter", 4, 4, 20)], max_live=16)
    table = engine._learned.chances
    table._guess.fill_(0.0)
    table._hits.fill_(7e-43)
    table._visits.fill_(1000.0)
    table.observe = lambda *counts: None
    assert texts(generate(engine, REQUESTS)) == plain


def test_the_guard_must_be_calibrated():
    engine = make_engine()
    engine._guard.logit_tolerance = 0.0
    with pytest.raises(AssertionError, match="calibrate"):
        engine.submit(REQUESTS)
