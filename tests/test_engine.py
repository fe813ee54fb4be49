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
from tlt_hpc.rollout.drafts import perturb_logits
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.strategy import OFF, Strategy, parse_strategy
from tlt_hpc.rollout.tie_guard import SAFETY

REQUESTS = gcd_requests(4, 4)
PAGES_OF_8 = page_bytes(embedded_decoder().shape, 8, torch.float32, 1)


def parse(*names):
    return [OFF, *map(parse_strategy, names)]


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


TREE, CHAIN = Strategy("drafter", 4, 2, 9), Strategy("drafter", 4)
ON_DEVICE = {"attention": "paged-kernel", "tie_guard": False}
ENGINES = {
    "one row at a time": ([OFF], {"max_live": 1}),
    "n-gram chains": ([Strategy("ngram", 3)], {"max_live": 5}),
    "small pages, prompts prefilled in parts": (
        [*parse("ngram-1", "drafter-1", "ngram-6", "drafter-9"), Strategy("drafter", 3, 4, 7, 1.5)],
        {"max_live": 7, "page_size": 4, "prefill_tokens": 3},
    ),
    "preempted": ([Strategy("drafter", 3, 2, 5), TREE, CHAIN, OFF], {"page_size": 8, "kv_bytes": PAGES_OF_8 * 40}),
    "preempted while it is prefilled": (
        [OFF], {"max_live": 6, "page_size": 4, "prefill_tokens": 1, "kv_bytes": PAGES_OF_8 * 14},
    ),
    "on a device, plain": ([OFF], ON_DEVICE),
    "on a device, all kinds": ([CHAIN, TREE, Strategy("ngram", 3), OFF], {"max_live": 5, **ON_DEVICE}),
    "on a device, preempted": (
        [TREE, Strategy("drafter", 3, 4, 7, 1.5), OFF], {"page_size": 8, "kv_bytes": PAGES_OF_8 * 35, **ON_DEVICE},
    ),
}  # fmt: skip


def count_rounds_in_flight(engine):
    """How many rounds are under way after each step to come."""
    seen, step = [], engine.step

    def counting():
        step()
        seen.append(engine._rounds.num_in_flight)

    engine.step = counting
    return seen


@pytest.mark.parametrize("name", ENGINES)
def test_text_depends_on_neither_strategy_nor_batch(name, plain):
    """Nor on when a round is read; and what is counted is what was generated."""
    strategies, options = ENGINES[name]
    engine = full_engine(strategies, **{"max_live": 16, "max_new_tokens": 80, "chooser": "random"} | options)
    in_flight = count_rounds_in_flight(engine)
    rollouts = generate(engine, list(reversed(REQUESTS)))
    assert texts(rollouts) == texts(plain.values())
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.log_probs, plain[rollout.key].log_probs, atol=2e-4, rtol=2e-4)
        assert rollout.finish_reason == plain[rollout.key].finish_reason
    assert max(in_flight) == ("device" in name), "a round is launched before the one before is read, on a device alone"
    counts, rows = engine.take_counts(), engine._rows
    assert counts.num_tokens == sum(len(rollout.response_tokens) for rollout in rollouts)
    assert counts.num_row_passes == sum(rollout.num_target_passes for rollout in rollouts)
    assert (counts.num_preempted > 0) == ("preempted" in name)
    assert engine._scheduler.pool.num_used == 0
    assert set(rows.lengths.tolist()) == set(rows.caps.tolist()) == {1}
    assert bool((engine._cache.tables == engine._cache.num_pages).all())
    engine.submit(REQUESTS)
    for _ in range(7):
        engine.step()
    engine.abort()
    engine.take_finished_rollouts()
    assert not engine.has_work
    wanted = {request.key: plain[request.key].response_tokens.tolist() for request in REQUESTS[::3]}
    assert texts(generate(engine, REQUESTS[::3])) == wanted, "with what the n-grams have learned"


def test_each_depth_of_a_draft_has_the_noise_of_its_own_position():
    """The scores that choose drafts, on the host and on a device, by their definition."""
    learned = full_engine([Strategy("drafter", 4)], max_live=3)._learned
    keys, first = [request.key for request in REQUESTS[:3]], torch.tensor([0, 4, 9])
    heats = torch.tensor([0.5, 1.0, 2.0])
    logits = torch.randn(3, 1, NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    pick = learned.make_picker(torch.tensor([words_of(key) for key in keys]), first, heats, 1.5)
    for d in range(4):
        rows = np.array([noise_of(key, start + d, NUM_TOKENS) for key, start in zip(keys, first.tolist(), strict=True)])
        scores = logits[:, 0].numpy() * 1.5 / heats[:, None].numpy() + rows
        for count in (1, 2):
            ids = pick(d, logits, count)[1].view(3, count)
            assert ids.tolist() == np.argsort(-scores, 1)[:, :count].tolist()
        on_host = perturb_logits(logits, torch.tensor(rows[:, None]), heats, 1.5)
        np.testing.assert_allclose(on_host[:, 0].numpy(), scores, rtol=1e-5, atol=1e-5)


def test_what_is_generated_ahead_alone_takes_short_steps():
    """A round that took longer than a step may gets no further rows; every response is generated all the same."""
    engine, most = make_engine(max_live=32), list[int]()
    engine.submit_ahead(gcd_requests(4, 8))
    while engine.has_ahead_work:
        most.append(engine._rows.num_live)
        engine.ahead.round_seconds = 1.0 if len(most) > 1 else 0.0
        engine.step()
    assert max(most) == 8 and len(engine.ahead.take_finished_texts()) == 32


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


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_groups_prompt_is_prefilled_once(monkeypatch):
    fed, features = [], Decoder.features
    engine = make_engine(max_live=16)
    monkeypatch.setattr(
        Decoder, "features", lambda self, tokens, *rest: (fed.append(len(tokens)), features(self, tokens, *rest))[1]
    )
    engine.submit(REQUESTS)
    engine._admit_and_prefill_chunk()
    engine._admit_and_prefill_chunk()
    longest = max(len(request.prompt_tokens) for request in REQUESTS)
    assert engine._rows.num_live == 16
    assert sum(fed) == 4 * (longest - 1), "four prompts, padded to the longest"


def test_a_budget_that_holds_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"holds 2 pages of 8 tokens, one sequence of full length takes \d+; give at"):
        make_engine(page_size=8, kv_bytes=3 * page_bytes(embedded_decoder().shape, 8, torch.float32, 0))


# -- parameters of a request ------------------------------------------------------------------------------------------


def params(**changes):
    return replace(SamplingParams(max_tokens=80), **changes)


KINDS = (
    {}, {"stop_strings": ("1,", "4;")}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}, {"max_tokens": 1},
    {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.5, "top_p": 0.95, "top_k": 9},
)  # fmt: skip


@pytest.mark.parametrize("strategies", [[OFF], [CHAIN, TREE, Strategy("ngram", 3), OFF]])
@pytest.mark.parametrize("options", [{}, ON_DEVICE], ids=["host", "device"])
def test_rows_of_many_kinds_do_not_disturb_each_other(strategies, options):
    decode = embedded_tokenizer().decode
    mixed = [replace(request, params=params(**KINDS[i % 7])) for i, request in enumerate(REQUESTS[:7])]
    engine = full_engine(strategies, max_live=4, chooser="random", detokenize=decode, **options)
    in_flight = count_rounds_in_flight(engine)
    reasons = set()
    for request, rollout in zip(mixed, generate(engine, mixed), strict=True):
        p = request.params
        wanted = canonical(request, p.max_tokens, SamplingRule(p.temperature, NUM_TOKENS, p.top_k, p.top_p))
        parts = (wanted[: i + 1] for i in range(len(wanted)))
        stopped = next((part for part in parts if any(stop in decode(part) for stop in p.stop_strings)), wanted)
        assert rollout.response_tokens.tolist() == stopped
        reasons.add(rollout.finish_reason)
    assert reasons == set(FinishReason)
    assert set(in_flight) == ({0, 1} if options else {0})


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
    table.count_nodes = lambda *counts: None
    assert texts(generate(engine, REQUESTS)) == texts(plain.values())
