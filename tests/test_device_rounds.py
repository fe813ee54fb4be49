"""Rounds that are launched before the one before is read: the same texts, no waits, graphs that are shared."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_engine import full_engine, untrained_drafter
from tiny import (
    CPU,
    embedded_decoder,
    embedded_folder,
    embedded_tokenizer,
    gcd_requests,
    generate,
    make_engine,
    texts,
)

from tlt_hpc.common.records import FinishReason
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.sharding import Sharding
from tlt_hpc.models.tokenizer import embedded
from tlt_hpc.rollout import drafts
from tlt_hpc.rollout.device_rounds import DeviceRounds
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.graph_round import batch_buckets
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.strategy import OFF, Strategy

REQUESTS = gcd_requests(4, 4)
PAGES_OF_8 = page_bytes(embedded_decoder().shape, 8, torch.float32, 1)
CHAIN, TREE = Strategy("drafter", 4), Strategy("drafter", 4, 2, 9)
NGRAM = Strategy("ngram", 3)


def device_engine(strategies, **options):
    options = {"max_new_tokens": 60, "chooser": "random", "tie_guard": False} | options
    return full_engine(strategies, attention="paged-kernel", **options)


def spy_on_overlaps(engine):
    """How many rounds were under way after each step."""
    seen, step = [], engine.step

    def spied():
        step()
        seen.append(engine._rounds.num_in_flight)

    engine.step = spied
    return seen


@pytest.fixture(scope="module")
def plain():
    return {rollout.key: rollout for rollout in generate(make_engine(max_new_tokens=60), REQUESTS)}


ENGINES = {
    "plain": ([OFF], {}),
    "chains, untrained": ([CHAIN, Strategy("drafter", 8)], {"max_live": 3, "page_size": 4}),
    "all kinds, prefilled three at a time": ([CHAIN, TREE, NGRAM, OFF], {"max_live": 5, "prefill_tokens": 3}),
    "trees, shared prompts": ([TREE, Strategy("drafter", 3, 4, 7, 1.5)], {"max_live": 12, "page_size": 4}),
    "preempted": ([TREE, OFF], {"page_size": 8, "kv_bytes": PAGES_OF_8 * 25}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_round_read_late_changes_nothing(name, plain):
    strategies, options = ENGINES[name]
    engine = device_engine(strategies, **options)
    if "untrained" not in name:
        engine.load_drafter(tiny_drafter_state())
    overlaps = spy_on_overlaps(engine)
    rollouts = generate(engine, list(reversed(REQUESTS)))
    assert texts(rollouts) == texts(plain.values())
    for rollout in rollouts:
        wanted = torch.from_numpy(plain[rollout.key].log_probs)
        torch.testing.assert_close(torch.from_numpy(rollout.log_probs), wanted, atol=2e-4, rtol=2e-4)
        assert rollout.finish_reason == plain[rollout.key].finish_reason
    assert max(overlaps) == 1, "no round was launched before the one before was read"
    counts = engine.take_counts()
    assert counts.num_tokens == sum(len(rollout.response_tokens) for rollout in rollouts)
    assert counts.num_row_passes == sum(rollout.num_target_passes for rollout in rollouts)
    assert (counts.num_preempted > 0) == (name == "preempted")
    assert engine._scheduler.pool.num_used == 0
    assert set(engine._rows.lengths.tolist()) == set(engine._rows.caps.tolist()) == {1}
    assert bool((engine._cache.tables == engine._cache.num_pages).all())


@pytest.mark.parametrize("make", [device_engine, full_engine])
def test_a_backlog_is_read_in_passes_of_bounded_size(make, plain, monkeypatch):
    """And what the drafter then proposes is accepted as often as after one pass over everything."""
    found, sizes, read_at = [], [], LearnedDrafts._read_at

    def spied(learned, rows, which, layout, at):
        sizes.append(at.shape)
        return read_at(learned, rows, which, layout, at)

    monkeypatch.setattr(LearnedDrafts, "_read_at", spied)
    for bound in (4096, 12):
        monkeypatch.setattr(drafts, "_CATCH_UP_TOKENS", bound)
        sizes.clear()
        engine = make([CHAIN, NGRAM, OFF], max_live=8, max_new_tokens=60, chooser="random")
        engine.load_drafter(tiny_drafter_state())
        assert texts(generate(engine, REQUESTS)) == texts(plain.values())
        found.append(engine.take_counts().strategies[CHAIN.name])
        assert max(rows * width for rows, width in sizes) <= bound
        assert bound == 12 or max(width for _, width in sizes) > 8, "nothing is left to read in parts"
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [device_engine, full_engine])
def test_a_new_row_is_read_without_the_others(make, plain, monkeypatch):
    """Each further row of a batch would multiply what the drafter reads of a prompt, or of a preempted text."""
    monkeypatch.setattr(drafts, "_LATE", 5)
    engine = make([CHAIN], max_live=16, max_new_tokens=60, chooser="random")
    sizes, read_at = [], LearnedDrafts._read_at
    engine.load_drafter(tiny_drafter_state())
    engine.submit(REQUESTS[:12])
    for _ in range(4):
        engine.step()
    num_live = engine._rows.num_live
    monkeypatch.setattr(LearnedDrafts, "_read_at", lambda *given: (sizes.append(given[-1].shape), read_at(*given))[1])
    engine.submit(REQUESTS[12:13])
    engine.step()
    assert num_live > 8 and sizes[0][0] == 1 and sizes[0][1] > 5, "the new row alone"
    assert all(rows > num_live and width <= 5 for rows, width in sizes[1:])
    while engine.has_work:
        engine.step()
    assert texts(engine.collect()) == texts(plain[request.key] for request in REQUESTS[:13])


def tiny_drafter_state():
    state = load_file(embedded("tiny_drafter") / "drafter.safetensors")
    return {name: state[f"{name}.weight"] for name, _ in untrained_drafter().named_parameters()}


@pytest.mark.parametrize("make", [device_engine, full_engine])
def test_drafts_among_some_tokens_read_a_part_of_the_head(make, plain):
    """Of the policy as it is now; the text is the same, and most of the drafts that can be right still are."""
    accepted = []
    for ids in (None, torch.tensor([0, *range(2, 20)]), torch.arange(2, 5)):
        drafter = make_drafter(embedded_decoder().shape, 0, torch.float32, CPU)
        if ids is not None:
            drafter.draft_among(ids)
        engine = make([CHAIN, TREE], drafter=drafter, max_new_tokens=60)
        engine.load_drafter(tiny_drafter_state())
        assert texts(generate(engine, REQUESTS)) == texts(plain.values())
        counts = engine.take_counts()
        accepted.append(counts.num_tokens / counts.num_row_passes)
        if ids is not None:
            head = dict(folder_weights(embedded_folder()))["model.embed_tokens.weight"]
            assert torch.equal(engine._learned._head.weight, head[ids])
            engine.load_policy(((name, 2.0 * weight) for name, weight in folder_weights(embedded_folder())), 1)
            assert torch.equal(engine._learned._head.weight, 2.0 * head[ids])
            engine.load_policy(folder_weights(embedded_folder()), 0)
            assert engine.memory_table()["drafts' part of the head"] == engine._learned._head.weight.nbytes
    assert accepted[1] > 0.9 * accepted[0] > 1.1 * accepted[2] > 1.1


@pytest.mark.parametrize("make", [device_engine, full_engine])
@torch.inference_mode()
def test_what_the_drafter_has_read_is_one_pass_over_the_text(make):
    """Of true features alone: what it made of drafts, accepted or not, is read again where they stood."""
    engine = make([CHAIN, TREE, OFF], chooser="random", eos_token_ids=())
    decoder, drafter = embedded_decoder(), untrained_drafter()
    engine.load_drafter(tiny_drafter_state())
    drafter.load_state_dict(tiny_drafter_state())
    attend = attend_documents(None)
    engine.submit(REQUESTS[:5])
    for _ in range(8):
        for _ in range(3):
            engine.step()
        engine._settle()
        rows, learned = engine._rows, engine._learned
        states = learned.catch_up(rows, rows.num_live, engine._scheduler.layout)
        for response, state in zip(rows.responses, states, strict=False):
            text, positions = torch.tensor(response.text), torch.arange(len(response.text) - 1)
            features = decoder.hidden(text[:-1], positions, attend)
            wanted = drafter(decoder.embedding[text[1:]], features, positions, attend)[-1]
            torch.testing.assert_close(state, wanted, atol=1e-4, rtol=1e-4)
    counts = engine.take_counts()
    assert 1.2 * counts.num_row_passes < counts.num_tokens < 4 * counts.num_row_passes, "some drafts were accepted"


def test_requests_of_all_kinds_in_one_batch():
    """Truncated rules have graphs of their own, stop strings cut what came too late."""
    decode = embedded_tokenizer().decode
    base = make_engine(max_new_tokens=60, detokenize=decode)
    shown = decode(texts(generate(base, REQUESTS[3:4]))[REQUESTS[3].key][4:7])
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 3},
        {"stop_strings": (shown,)},
        {"temperature": 1.4},
        {"max_tokens": 1},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_p": 0.95, "top_k": 9},
    ]
    mixed = [
        replace(request, params=replace(base.settings.params, **kinds[i % len(kinds)]))
        for i, request in enumerate(REQUESTS)
    ]
    wanted = generate(base, mixed)
    assert {rollout.finish_reason for rollout in wanted} == set(FinishReason)
    for strategies in ([OFF], [CHAIN, TREE, NGRAM, OFF]):
        engine = device_engine(strategies, max_live=4, detokenize=decode)
        overlaps = spy_on_overlaps(engine)
        got = generate(engine, mixed)
        assert texts(got) == texts(wanted)
        assert [r.finish_reason for r in got] == [r.finish_reason for r in wanted]
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-4, rtol=2e-4)
        assert {0, 1} == set(overlaps)
        forms = {key[2] for key in engine._rounds._graphs._graphs._captured if key[0] == "verify"}
        assert {form.truncates for form in forms} == {True, False}


@pytest.mark.parametrize("make", [device_engine, full_engine])
def test_swaps_aborts_and_broken_drafters_are_harmless(make, plain):
    """On a device all between a launch and its reading; a drafter of NaN rests, is counted, and teaches nothing."""
    engine, late = make([CHAIN, TREE, OFF], max_live=6, max_new_tokens=60, chooser="random"), make is device_engine
    visits = engine._learned.chances._visits
    good = {name: tensor.clone() for name, tensor in engine.drafter.state_dict().items()}
    engine.load_drafter({name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()})
    assert texts(generate(engine, REQUESTS)) == texts(plain.values())
    faults = engine.take_counts().num_drafter_faults
    assert 1 <= faults <= 1 + late, "asked no more after the first, when a round may be under way"
    assert float(visits.sum()) == 0
    engine.load_drafter(good)
    engine.submit(REQUESTS)
    for turn in range(1, 4):
        for _ in range(4):
            engine.step()
        assert not late or engine._rounds.num_in_flight, "nothing to be disturbed"
        engine.load_drafter(untrained_drafter(turn).state_dict())
    assert texts(generate(engine, [])) == texts(plain.values())
    counts = engine.take_counts()
    assert counts.num_drafter_faults == 0 and all(counts.strategies[each.name][0] for each in (CHAIN, TREE))
    assert 50 < float(visits.sum()) < 1e5, "old counts fade"
    engine.submit(REQUESTS)
    engine.step()
    engine.step()
    assert (engine.abort(), engine.has_work) == (len(REQUESTS), False)
    assert texts(generate(engine, REQUESTS)) == texts(plain.values())


@pytest.mark.parametrize("strategies", [[CHAIN], [TREE, NGRAM]])
def test_the_guard_undoes_a_round_with_a_near_tie(strategies, plain):
    """A zone of doubt so wide that many tokens are in it: each must be what the canonical pass says."""
    engine = device_engine(strategies, tie_guard=True, max_live=6)
    engine._guard.logit_tolerance = 3.0
    overlaps = spy_on_overlaps(engine)
    rollouts = generate(engine, REQUESTS)
    assert texts(rollouts) == texts(plain.values())
    assert engine.take_counts().num_guarded > 50
    assert max(overlaps) == 0, "the guard must look at a round before the next one"
    for rollout in rollouts:
        wanted = torch.from_numpy(plain[rollout.key].log_probs)
        torch.testing.assert_close(torch.from_numpy(rollout.log_probs), wanted, atol=2e-4, rtol=2e-4)


def test_graphs_are_few_and_shared(plain, caplog):
    engine = device_engine([CHAIN, replace(CHAIN, sharpness=2.0), TREE, OFF], max_live=20)
    rounds = engine._rounds
    assert isinstance(rounds, DeviceRounds)
    assert batch_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert batch_buckets(8) == [1, 2, 4, 8]
    assert batch_buckets(40) == [1, 2, 4, 8, 16, 32, 40]
    with caplog.at_level(logging.INFO):
        rounds.capture(truncates=False)
    assert "graphs captured in" in caplog.text
    num_graphs = len(rounds._graphs)
    # drafts of three strategies; targets of widths 1 and 5 as chains, of 10 as a tree
    assert num_graphs == 6 * (3 + 3)
    assert texts(generate(engine, REQUESTS)) == texts(plain.values())
    assert len(rounds._graphs) == num_graphs, "a graph was missing"


def addresses(holder, seen):
    """The addresses of all tensors that an object holds, however deep, by path."""
    found = {}
    if id(holder) in seen:
        return found
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        return {"": holder.data_ptr()}
    if isinstance(holder, (list, tuple)):
        parts = list(enumerate(holder))
    elif isinstance(holder, dict):
        parts = list(holder.items())
    elif type(holder).__module__.startswith("tlt_hpc"):
        slots = [name for name in getattr(type(holder), "__slots__", ()) if hasattr(holder, name)]
        parts = [*getattr(holder, "__dict__", {}).items(), *((name, getattr(holder, name)) for name in slots)]
    else:
        return found
    for name, part in parts:
        found |= {f"{name}.{rest}": at for rest, at in addresses(part, seen).items()}
    return found


def engine_of_a_replica(size, form):
    """What the first of ``size`` ranks that decode together has; without the others its text means nothing."""
    sharding = Sharding(0, size)
    token_ids = None if form == "eagle" else torch.arange(3, 15)
    decoder = Decoder(embedded_decoder().shape, torch.float32, CPU, sharding)
    drafter = make_drafter(decoder.shape, 0, torch.float32, CPU, token_ids if form == "eagle3" else None)
    if form == "eagle, some tokens":
        drafter.draft_among(token_ids)
    if size > 1:
        drafter.split(sharding)
    return device_engine([CHAIN, TREE, OFF], decoder=decoder, drafter=drafter, max_live=5, page_size=8)


@pytest.mark.parametrize(("size", "form"), [(1, "eagle"), (1, "eagle, some tokens"), (2, "eagle3")])
def test_nothing_that_graphs_read_moves(size, form):
    """Weights, drafters, draft vocabularies, rows and pages come and go; graphs have recorded where they stood."""
    engine = engine_of_a_replica(size, form)

    def places():
        parts = (engine._rows, engine._noise, engine._cache, engine._learned, engine._rounds._graphs._target.decoder)
        graphs = engine._rounds._graphs
        held = addresses((*parts, graphs.tolerance), set())
        # what is derived for CPUs is made again at each load; on a GPU nothing is
        derived = ("_blocked", "_scaled", "_floor")
        return {path: at for path, at in held.items() if not any(name in path for name in derived)}

    before = places()
    assert len(before) > 40 and any("_packed.layer.mlp.down." in path for path in before)
    generate(engine, REQUESTS[::2])
    engine.load_policy(folder_weights(embedded_folder()), 1)
    other = make_drafter(engine.decoder.shape, 1, torch.float32, CPU, engine.drafter.token_ids)
    engine.load_drafter(other.state_dict())
    generate(engine, REQUESTS[::2])
    after = places()
    assert {path for path in before if after.get(path) != before[path]} == set()
