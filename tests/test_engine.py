"""The engine's promise: given the weights, a response depends on its key alone. And what a response is."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from by_definition import choice_of, noise_of, words_of
from tiny import (
    CPU,
    EOS,
    NUM_TOKENS,
    embedded_decoder,
    embedded_folder,
    embedded_tokenizer,
    gcd_requests,
    generate,
    make_engine,
    texts,
)
from transformers import AutoModelForCausalLM

from tlt_hpc.common.records import FinishReason, SamplingParams
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.rollout.drafts import perturbed
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.guard import SAFETY
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.stops import StopStrings
from tlt_hpc.rollout.strategy import OFF, Strategy, strategy_named

REQUESTS = gcd_requests(4, 4)
PAGES_OF_8 = page_bytes(embedded_decoder().shape, 8, torch.float32, 1)


def parse(*names):
    return [OFF, *map(strategy_named, names)]


def untrained_drafter(seed=0):
    return Eagle(embedded_decoder().shape, seed, torch.float32, CPU)


def full_engine(strategies, **options) -> RolloutEngine:
    return make_engine(strategies, **{"drafter": untrained_drafter(), "drafter_is_trained": True} | options)


@cache
def exact_model():
    """The embedded model as transformers computes it, in float64."""
    return AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float64).eval()


@torch.inference_mode()
def canonical(request, max_new_tokens, rule):
    """A response by the definition: float64 logits of the sequence alone, one token at a time; no code under test."""
    tokens, response = request.prompt_tokens.tolist(), []
    while len(response) < max_new_tokens and response[-1:] != [EOS]:
        logits = exact_model()(torch.tensor([tokens + response])).logits[0, -1]
        noise = noise_of(request.key, len(response), NUM_TOKENS)
        response.append(choice_of(logits, noise, rule))
    return response


@pytest.fixture(scope="module")
def plain():
    """Each request's response, without speculation."""
    return {rollout.key: rollout for rollout in generate(make_engine(max_new_tokens=80), REQUESTS)}


PINNED = {
    SamplingRule(1.0, NUM_TOKENS): (
        "<think>135,99;36,99;36,63;36,27;9,27;9,18;9,9</think>",
        "<think></think>\\boxed{5}<eos>",
    ),
    SamplingRule(0.7, NUM_TOKENS, top_p=0.8): (
        "<think>135,99;36,99;36,63;36,27;9,27;9,18;9,9</think>",
        "<think>375,130;245,130;115,130;115,15;100,15;8",
    ),
    SamplingRule(1.5, NUM_TOKENS, top_k=4): (
        "<think>135,99;36,99;36,17;19,17;2,17;2,1;1,1</think>\\boxed{",
        "<think></think>\\boxed{5}<eos>",
    ),
}


@pytest.mark.parametrize("rule", PINNED, ids=str)
def test_the_text_of_a_seed_stays_what_it_is(rule):
    """A version that gives other tokens to these keys gives other runs to every seed."""
    found = texts(generate(make_engine(rule=rule, max_new_tokens=40), REQUESTS[::8]))
    decode = embedded_tokenizer().decode
    assert tuple(decode(found[r.key], skip_special_tokens=False) for r in REQUESTS[::8]) == PINNED[rule]


def test_what_a_rollout_records(plain):
    for request in REQUESTS[::5]:
        assert plain[request.key].response_tokens.tolist() == canonical(request, 80, SamplingRule(1.0, NUM_TOKENS))
    assert list(plain) == sorted(request.key for request in REQUESTS)
    for rollout in plain.values():
        tokens = rollout.response_tokens.tolist()
        assert rollout.finish_reason == (FinishReason.EOS if tokens[-1] == EOS else FinishReason.LENGTH)
        assert (rollout.finish_reason == FinishReason.LENGTH) == (len(tokens) == 80 and tokens[-1] != EOS)
        whole = torch.tensor([*rollout.prompt_tokens.tolist(), *tokens])
        logits = exact_model()(whole[None]).logits[0, -len(tokens) - 1 : -1, :NUM_TOKENS].detach()
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        np.testing.assert_allclose(rollout.log_probs, wanted.numpy(), atol=2e-4)
    assert {r.finish_reason for r in plain.values()} == {FinishReason.EOS, FinishReason.LENGTH}


ENGINES = {
    "one row at a time": lambda **more: make_engine(max_live=1, **more),
    "n-gram chains": lambda **more: make_engine([Strategy("ngram", 3)], max_live=5, **more),
    "untrained drafter chains, in other rows": lambda **more: full_engine([Strategy("drafter", 4)], max_live=6, **more),
    "all strategies, small pages, prompts prefilled in parts": lambda **more: full_engine(
        [*parse("ngram-1", "drafter-1", "ngram-6", "drafter-9"), Strategy("drafter", 3, 4, 7, 1.5)],
        max_live=7, chooser="random", page_size=4, prefill_tokens=3, **more,
    ),
    "trees and chains, few pages, preempted": lambda **more: full_engine(
        [Strategy("drafter", 3, 2, 5), Strategy("drafter", 4, 2, 9), Strategy("drafter", 3), OFF],
        max_live=16, chooser="random", page_size=8, kv_bytes=PAGES_OF_8 * 40, **more,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_text_depends_on_neither_strategy_nor_batch(name, plain):
    engine = ENGINES[name](max_new_tokens=80)
    assert texts(generate(engine, list(reversed(REQUESTS)))) == texts(plain.values())
    assert (engine.take_counts().num_preempted > 0) == ("preempted" in name)
    assert engine._scheduler.pool.num_used == 0
    engine.submit(REQUESTS)
    for _ in range(7):
        engine.step()
    engine.abort()
    engine.collect()
    assert not engine.has_work
    assert texts(generate(engine, REQUESTS)) == texts(plain.values()), "with what the n-grams have learned"


def test_a_prompt_that_is_being_prefilled_gives_way_to_older_rows(plain):
    engine = make_engine(max_live=6, page_size=4, prefill_tokens=1, kv_bytes=PAGES_OF_8 * 14, max_new_tokens=80)
    scheduler, given_way = engine._scheduler, 0
    engine.submit(REQUESTS)
    while engine.has_work:
        before = {sequence.order for sequence in scheduler.prefilling}
        engine.step()
        waiting = {sequence.order for sequence in scheduler.waiting}
        given_way += len(before & waiting)
        assert not waiting & {sequence.order for sequence in [*scheduler.prefilling, *scheduler.rows.responses]}
    assert given_way, "no prompt gave way"
    assert texts(engine.collect()) == texts(plain.values())


@pytest.mark.parametrize("strategy", [Strategy("drafter", 4), Strategy("drafter", 4, 2, 8)])
def test_each_depth_of_a_draft_has_the_noise_of_its_own_position(strategy):
    """Noise that outweighs all logits: the first path of the drafts is what it says, on the host and on a device."""
    engine = full_engine([strategy], max_live=3)
    engine.submit(REQUESTS[:3])
    engine._prefill()
    engine._prefill()
    said = torch.tensor([[5, 9, 2, 7], [3, 3, 12, 4], [8, 6, 15, 11]])
    noise = torch.zeros(3, 5, NUM_TOKENS)
    noise[:, :4].scatter_(2, said.unsqueeze(2), 1e4)
    drafts = engine._learned.propose(engine._rows, engine._scheduler.layout, noise, strategy).drafts
    for row, wanted in enumerate(said.tolist()):
        tokens = drafts.tokens[row].tolist()
        parents = [0, *range(len(tokens) - 1)] if drafts.parents is None else drafts.parents[row].tolist()
        path = 0
        for token in wanted:
            (path,) = (i for i in range(1, len(tokens)) if parents[i] == path and tokens[i] == token)
    keys = [request.key for request in REQUESTS[:3]]
    words, first = torch.tensor([words_of(key) for key in keys]), torch.tensor([0, 4, 9])
    heats, logits = (
        torch.tensor([0.5, 1.0, 2.0]),
        torch.randn(3, 1, NUM_TOKENS, generator=torch.Generator().manual_seed(1)),
    )
    pick = engine._learned.picker(words, first, heats, 1.5)
    for d in range(4):
        rows = np.array([noise_of(key, start + d, NUM_TOKENS) for key, start in zip(keys, first.tolist(), strict=True)])
        scores = logits[:, 0].numpy() * 1.5 / heats[:, None].numpy() + rows
        for count in (1, 2):
            ids = pick(d, logits, count)[1].view(3, count)
            assert ids.tolist() == np.argsort(-scores, 1)[:, :count].tolist()
        on_host = perturbed(logits, torch.tensor(rows[:, None]), heats, 1.5)
        np.testing.assert_allclose(on_host[:, 0].numpy(), scores, rtol=1e-5, atol=1e-5)


def test_what_is_generated_ahead_alone_takes_short_steps():
    """A round that took longer than a step may gets no further rows; every response is generated all the same."""
    engine, most = make_engine(max_live=32), list[int]()
    engine.submit_ahead(gcd_requests(4, 8))
    while engine.has_ahead:
        most.append(engine._rows.num_live)
        engine.ahead.round_seconds = 1.0 if len(most) > 1 else 0.0
        engine.step()
    assert max(most) == 8 and len(engine.ahead.take()) == 32


def test_the_guard_decides_every_token_when_its_zone_is_all(plain):
    """With an infinite zone of doubt each token takes the float64 path, and the text is still the same."""
    engine = make_engine([Strategy("ngram", 3)], max_new_tokens=80)
    engine._guard.logit_tolerance = float("inf")
    rollouts = generate(engine, REQUESTS[:2])
    assert texts(rollouts) == {request.key: plain[request.key].response_tokens.tolist() for request in REQUESTS[:2]}
    assert engine.take_counts().num_guarded >= sum(len(r.response_tokens) for r in rollouts)


def test_the_guard_corrects_a_wrong_fast_path(monkeypatch, plain):
    """Shaken logits flip near-ties without the guard, and none with the tolerance that its probe finds for them."""
    logits = Decoder.logits

    def shaken(tie_guard):
        generator = torch.Generator().manual_seed(0)
        monkeypatch.setattr(
            Decoder,
            "logits",
            lambda self, hidden: logits(self, hidden) + torch.rand(len(hidden), 24, generator=generator) * 0.5,
        )
        engine = make_engine(tie_guard=tie_guard, max_new_tokens=80)
        assert engine._guard.logit_tolerance == pytest.approx(SAFETY * 0.5 * tie_guard, rel=0.01)
        got = texts(generate(engine, REQUESTS))
        assert engine._guard.num_raised == 0
        return got

    assert shaken(tie_guard=False) != texts(plain.values())
    assert shaken(tie_guard=True) == texts(plain.values())


def test_a_canonical_pass_that_finds_the_error_too_large_raises_the_tolerance():
    engine = make_engine()
    guard, before, rule = engine._guard, engine._guard.logit_tolerance, SamplingRule(1.0, NUM_TOKENS)
    prefix = torch.from_numpy(REQUESTS[0].prompt_tokens).long()
    exact = embedded_decoder().reference_logits(prefix, 1)[0]
    guard.decide(prefix, torch.zeros(NUM_TOKENS), exact.float(), rule)
    assert (guard.logit_tolerance, guard.num_raised) == (before, 0)
    guard.decide(prefix, torch.zeros(NUM_TOKENS), exact.float() + before, rule)
    assert guard.logit_tolerance == pytest.approx(SAFETY * before, rel=1e-2)
    assert guard.num_raised == 1
    assert guard.tolerance(SamplingRule(0.5, NUM_TOKENS)) == 2 * guard.tolerance(rule)
    assert guard.tolerance(SamplingRule(0.0, NUM_TOKENS)) == guard.logit_tolerance
    hot = guard.tolerance(SamplingRule(1e4, NUM_TOKENS))
    assert hot >= 4 * torch.finfo(torch.float32).eps * 16, "scores around 16 are themselves rounded"


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_groups_prompt_is_prefilled_once(monkeypatch):
    fed = []
    features = Decoder.features
    monkeypatch.setattr(
        Decoder, "features", lambda self, tokens, *rest: (fed.append(len(tokens)), features(self, tokens, *rest))[1]
    )
    engine = make_engine(max_live=16)
    fed.clear()
    engine.submit(REQUESTS)
    engine._prefill()
    engine._prefill()
    prompts = {request.prompt_tokens.tobytes(): len(request.prompt_tokens) for request in REQUESTS}
    assert engine._rows.num_live == 16
    assert sum(fed) == 4 * (max(prompts.values()) - 1), "four prompts, padded to the longest"


def test_a_budget_that_holds_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"holds 2 pages of 8 tokens, one sequence of full length takes \d+; give at"):
        make_engine(page_size=8, kv_bytes=3 * page_bytes(embedded_decoder().shape, 8, torch.float32, 0))


# -- parameters of a request ------------------------------------------------------------------------------------------


def params(**changes):
    return replace(SamplingParams(max_tokens=80), **changes)


@pytest.mark.parametrize("strategies", [(OFF,), (Strategy("drafter", 4, 2, 8), Strategy("ngram", 3))])
def test_rows_of_many_rules_do_not_disturb_each_other(strategies):
    rules = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.8}]
    rules += [{"top_p": 0.9, "temperature": 1.5}]
    mixed = [replace(request, params=params(**rules[i % 5])) for i, request in enumerate(REQUESTS[:5])]
    got = texts(generate(full_engine(list(strategies), max_live=16, chooser="random"), mixed))
    for request in mixed:
        p = request.params
        rule = SamplingRule(p.temperature, NUM_TOKENS, p.top_k, p.top_p)
        assert got[request.key] == canonical(request, 80, rule)


@pytest.mark.parametrize("strategy", [OFF, Strategy("drafter", 4, 2, 8), Strategy("ngram", 3)])
def test_caps_and_stop_strings(strategy, plain):
    short = next(r for r in plain.values() if len(r.response_tokens) < 30)
    request = next(r for r in REQUESTS if r.key == short.key)
    whole, decode = short.response_tokens.tolist(), embedded_tokenizer().decode
    engine = full_engine([strategy], detokenize=decode)

    def answer(**changes):
        return generate(engine, [replace(request, params=params(**changes))])[0]

    assert answer(max_tokens=1).response_tokens.tolist() == whole[:1]
    for first in range(2, 10):  # at any place within the tokens of a round
        text = decode(whole[first : first + 3])
        stopped = answer(stop_strings=("never there", text))
        cut = next(i for i in range(len(whole)) if text in decode(whole[: i + 1]))
        assert (stopped.response_tokens.tolist(), stopped.finish_reason) == (whole[: cut + 1], FinishReason.STOP)
        assert len(stopped.log_probs) == cut + 1


def test_stop_strings_are_looked_for_without_a_copy_of_the_text(monkeypatch):
    """At 128 responses of 20,000 tokens the copies took longer than the round itself."""
    engine, given, first_stop = make_engine(detokenize=embedded_tokenizer().decode), [], StopStrings.first_stop
    monkeypatch.setattr(
        StopStrings,
        "first_stop",
        lambda self, tokens, *rest: (given.append(id(tokens)), first_stop(self, tokens, *rest))[1],
    )
    engine.submit([replace(request, params=params(stop_strings=("zz",))) for request in REQUESTS[:4]])
    own = {id(response.text) for response in engine._scheduler.waiting}
    while engine.has_work:
        engine.step()
    assert given and set(given) <= own


def test_requests_that_an_engine_was_not_made_for():
    engine = make_engine()
    for length in (0, 17):
        bad = replace(REQUESTS[0], prompt_tokens=np.zeros(length, np.int32))
        with pytest.raises(ValueError, match=f"has {length} tokens; the engine takes 1 to 16"):
            engine.submit([REQUESTS[1], bad])
    for most in (0, 161):
        with pytest.raises(ValueError, match=f"max_tokens = {most}; the engine was made for responses of 1 to 160"):
            engine.submit([REQUESTS[1], replace(REQUESTS[0], params=params(max_tokens=most))])
    with pytest.raises(ValueError, match="has a token outside 0 to 23"):
        engine.submit([replace(REQUESTS[0], prompt_tokens=np.array([24], np.int32))])
    assert not engine.has_work, "the good request is not queued either"


def test_chances_that_have_run_out_of_digits_orphan_no_node(plain):
    """Where a child's chance equals its parent's, the parent still comes first."""
    engine = full_engine([Strategy("drafter", 4, 4, 20)], max_live=16, max_new_tokens=80)
    table = engine._learned.chances
    table._guess.fill_(0.0)
    table._hits.fill_(7e-43)
    table._visits.fill_(1000.0)
    table.observe = lambda *counts: None
    assert texts(generate(engine, REQUESTS)) == texts(plain.values())
