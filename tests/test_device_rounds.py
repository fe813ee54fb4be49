"""Rounds that are launched before the one before is read: the same texts, no waits, graphs that are shared."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from test_engine import CHAIN, TREE, count_rounds_in_flight, full_engine, untrained_drafter
from tiny import (
    CPU,
    embedded_decoder,
    embedded_folder,
    gcd_requests,
    generate,
    make_engine,
    texts,
)

from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.tokenizer import package_asset_folder
from tlt_hpc.rollout import drafts
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.strategy import OFF, Strategy

REQUESTS, NGRAM = gcd_requests(4, 4), Strategy("ngram", 3)


def device_engine(strategies, **options):
    options = {"max_new_tokens": 60, "chooser": "random", "tie_guard": False} | options
    return full_engine(strategies, attention="paged-kernel", **options)


@pytest.fixture(scope="module")
def plain():
    return {rollout.key: rollout for rollout in generate(make_engine(max_new_tokens=60), REQUESTS)}


@pytest.mark.parametrize("make", [device_engine, full_engine])
def test_a_backlog_is_read_in_passes_of_bounded_size(make, plain, monkeypatch):
    """And what the drafter then proposes is accepted as often as after one pass over everything."""
    found, sizes, read_at = [], [], LearnedDrafts._run_at_positions

    def spied(learned, rows, which, layout, at):
        sizes.append(at.shape)
        return read_at(learned, rows, which, layout, at)

    monkeypatch.setattr(LearnedDrafts, "_run_at_positions", spied)
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


def tiny_drafter_state():
    state = load_file(package_asset_folder("tiny_drafter") / "drafter.safetensors")
    return {name: state[f"{name}.weight"] for name, _ in untrained_drafter().named_parameters()}


@pytest.mark.parametrize("make", [device_engine, full_engine])
def test_drafts_among_some_tokens_read_a_part_of_the_head(make, plain):
    """Of the policy as it is now; the text is the same, and most of the drafts that can be right still are."""
    accepted = []
    for ids in (None, torch.tensor([0, *range(2, 20)]), torch.arange(2, 5)):
        drafter = make_drafter(embedded_decoder().shape, 0, torch.float32, CPU)
        if ids is not None:
            drafter.set_draft_vocabulary(ids)
        engine = make([CHAIN, TREE], drafter=drafter, max_new_tokens=60)
        engine.load_drafter(tiny_drafter_state())
        assert texts(generate(engine, REQUESTS)) == texts(plain.values())
        counts = engine.take_counts()
        accepted.append(counts.num_tokens / counts.num_row_passes)
        if ids is not None:
            head = dict(read_folder_weights(embedded_folder()))["model.embed_tokens.weight"]
            assert torch.equal(engine._learned._head.weight, head[ids])
            engine.load_policy(((name, 2.0 * weight) for name, weight in read_folder_weights(embedded_folder())), 1)
            assert torch.equal(engine._learned._head.weight, 2.0 * head[ids])
            engine.load_policy(read_folder_weights(embedded_folder()), 0)
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
        engine._finish_launched_rounds()
        rows, learned, everyone = engine._rows, engine._learned, tuple(range(engine._rows.num_live))
        states = learned.run_on_unread_positions(rows, everyone, engine._scheduler.layout_of_rows(everyone))
        for response, state in zip(rows.responses, states, strict=False):
            text, positions = torch.tensor(response.text), torch.arange(len(response.text) - 1)
            features = decoder.hidden_states(text[:-1], positions, attend)
            wanted = drafter(decoder.embedding[text[1:]], features, positions, attend)[-1]
            torch.testing.assert_close(state, wanted, atol=1e-4, rtol=1e-4)
    counts = engine.take_counts()
    assert 1.2 * counts.num_row_passes < counts.num_tokens < 4 * counts.num_row_passes, "some drafts were accepted"


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


@pytest.mark.parametrize("strategies", [pytest.param([CHAIN], marks=pytest.mark.ci), [TREE, NGRAM]])
def test_the_guard_undoes_a_round_with_a_near_tie(strategies, plain):
    """A zone of doubt so wide that many tokens are in it: each must be what the canonical pass says."""
    engine = device_engine(strategies, tie_guard=True, max_live=6)
    engine._guard.logit_tolerance = 3.0
    overlaps = count_rounds_in_flight(engine)
    rollouts = generate(engine, REQUESTS)
    assert texts(rollouts) == texts(plain.values())
    assert engine.take_counts().num_guarded > 50
    assert max(overlaps) == 0, "the guard must look at a round before the next one"
    for rollout in rollouts:
        wanted = torch.from_numpy(plain[rollout.key].log_probs)
        torch.testing.assert_close(torch.from_numpy(rollout.log_probs), wanted, atol=2e-4, rtol=2e-4)
