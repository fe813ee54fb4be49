"""Texts generated ahead: their cursors, that as drafts they change no text, and that they leave the step's counts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_device_rounds import tiny_drafter_state
from test_engine import PAGES_OF_8, full_engine
from tiny import KeptFeatures, embedded_folder, embedded_tokenizer, gcd_requests, generate, make_engine, texts

from tlt_hpc.common.records import SampleKey, Stream
from tlt_hpc.drafting.tail_plan import ACCEPT_LENGTH, SEQUENCES, STORED_ACCEPTED, STORED_TOKENS, TailPlan
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.rl.ahead_generation import longest_ahead_texts, order_to_generate_ahead
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.stored_text import SURE, StoredText
from tlt_hpc.rollout.strategy import OFF, Strategy

# -- the cursor -------------------------------------------------------------------------------------------------------

TEXT = list(range(100, 160))


def drafts_after(*parts: list[int], stored: list[int] = TEXT) -> list[int]:
    """Drafts for a response that has got these tokens, round by round."""
    cursor, text = StoredText(stored), [7, 7]
    cursor.follow_response(text, 2, 99)
    for part in parts:
        text += part
        cursor.follow_response(text, 2, 99)
    return cursor.next_drafts(99)


def test_a_cursor_follows_its_response_and_finds_it_again():
    assert drafts_after() == TEXT and drafts_after(TEXT[:9], TEXT[9:30]) == TEXT[30:]
    assert drafts_after(TEXT[:10], [1]) == [] == drafts_after(TEXT[:10], [1], TEXT[11:14])
    for changed, at in (([1], 11), ([1, 2, 3], 10), ([], 25)):  # a token replaced, some inserted, a stretch left out
        assert drafts_after(TEXT[:10], changed, TEXT[at : at + 4]) == TEXT[at + 4 : at + 12], "not sure yet"
        assert drafts_after(TEXT[:10], changed, TEXT[at : at + SURE]) == TEXT[at + SURE :]
    assert drafts_after(TEXT) == drafts_after(TEXT[:-2]) == drafts_after(TEXT, [3, 4]) == drafts_after(stored=[]) == []
    twice = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 9, 8, 7]
    assert drafts_after([0, *twice[1:5]], stored=twice)[:2] == [6, 7]
    assert drafts_after([*twice[:8], 0, *twice[9:13]], stored=twice) == [9, 8, 7], "the place nearest to where it was"
    assert drafts_after([1, 1, 1, 1, 1, 8, 9, 1, 2, 3, 4], stored=twice) == [9, 8, 7], "or with the most before it"


def test_a_text_that_repeats_itself_is_not_searched_whole(monkeypatch):
    """Of 20,000 places at which the last tokens stand, those nearby are compared: all of them would take 0.2 s."""
    compared, num_equal = [], StoredText._num_equal_tokens
    monkeypatch.setattr(StoredText, "_num_equal_tokens", lambda *given: (compared.append(1), num_equal(*given))[1])
    assert drafts_after([5] * 9000, [7], [5] * 20, stored=[5] * 20_000)[:3] == [5, 5, 5]
    assert 0 < len(compared) <= 200


@given(st.lists(st.integers(0, 2), max_size=60), st.data())
@settings(max_examples=200, deadline=None)
def test_drafts_go_on_where_the_last_tokens_stand(stored, data):
    edit = st.tuples(st.integers(0, 59), st.integers(0, 3), st.lists(st.integers(0, 2), max_size=5))
    text = list(stored)
    for at, removed, added in data.draw(st.lists(edit, max_size=5)):
        text[at : at + removed] = added
    cursor, start = StoredText(stored), 3
    whole, room = [9] * start + text, data.draw(st.integers(1, 40))
    for end in sorted(data.draw(st.sets(st.integers(0, len(text))))):
        so_far = whole[: start + end]
        cursor.follow_response(so_far, start, room)
        count = cursor.num_drafts
        drafts = cursor.next_drafts(room)
        assert len(drafts) == count <= room and count not in (1, 2)
        last, places = so_far[start:][-4:], range(len(stored) - count + 1)
        assert not count or any(stored[i : i + count] == drafts and stored[:i][-4:] == last for i in places)
        if stored[:end] == text[:end]:
            left = min(len(stored) - end, room)
            assert count == (left if left > 2 else 0)


# -- the engine -------------------------------------------------------------------------------------------------------

OWN, NEXT, REFILL = gcd_requests(4, 4), gcd_requests(4, 4, step=1), gcd_requests(2, 4, step=2)
USUAL = [Strategy("drafter", 4), Strategy("drafter", 4, 2, 9), Strategy("ngram", 3), OFF]


def other_weights(scale: float):
    source = torch.Generator().manual_seed(0)
    for name, weight in read_folder_weights(embedded_folder()):
        yield name, weight + scale * torch.randn(weight.shape, generator=source) * weight.abs().mean()


def ahead_engine(**options) -> RolloutEngine:
    defaults = {"max_new_tokens": 80, "max_live": 6, "chooser": "random", "detokenize": embedded_tokenizer().decode}
    engine = full_engine(USUAL, stored_texts=True, **defaults | options)
    engine.load_drafter(tiny_drafter_state())
    scheduler, follow = engine._scheduler, engine._scheduler.follow_stored_texts

    def checked():
        assert not (scheduler.has_stored and engine._rounds.num_in_flight), "cursors need the texts"
        return follow()

    scheduler.follow_stored_texts = checked
    return engine


def of_many_kinds(requests):
    """Some with a rule of their own, or a stop string."""
    kinds = [{}, {"stop_strings": ("1,", "4;")}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}]
    base = make_engine(max_new_tokens=80).settings.params
    return [replace(r, params=replace(base, **kinds[i % len(kinds)])) for i, r in enumerate(requests)]


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.ci), True], ids=["alike", "of many kinds"]
)
def world(request):
    """Requests, their responses by plain decoding, and those of the first ones under other weights."""
    make = of_many_kinds if request.param else list
    sets = [make(requests) for requests in (OWN, NEXT, REFILL)]
    engine = full_engine([OFF], max_new_tokens=80, detokenize=embedded_tokenizer().decode)
    engine.outbox.set_sink(kept := KeptFeatures())
    plain = [{r.key: r for r in generate(engine, requests)} for requests in sets]
    engine.outbox.set_sink(None)
    engine.load_policy(other_weights(0.2), 1)
    stored = {key: np.array(text, np.int32) for key, text in texts(generate(engine, sets[0] + sets[2])).items()}
    return sets, plain, dict(list(stored.items())[: -len(stored) // 4]), kept


WAYS = {
    "host": {},
    "host, preempted, prefilled in parts": {"page_size": 8, "kv_bytes": PAGES_OF_8 * 40, "prefill_tokens": 3},
    "device": {"attention": "paged-kernel"},
    "device, preempted": {"attention": "paged-kernel", "page_size": 8, "kv_bytes": PAGES_OF_8 * 40},
    "device, rounds read late": {"attention": "paged-kernel", "tie_guard": False, "max_live": 10},
}


@pytest.mark.parametrize("way", WAYS)
def test_neither_stored_texts_nor_work_ahead_change_a_text(way, world):
    (own, following, refill), (plain, of_next, of_refill), stored, _ = world
    engine = ahead_engine(**WAYS[way])
    if "late" in way:  # a round in which a graph is captured is not counted, and there are many graphs here
        for truncates in (True, False):
            engine._rounds.graphs.capture(truncates)
        num_graphs = engine._rounds.num_graphs
    engine.outbox.set_sink(kept := KeptFeatures())
    engine.set_stored_texts(stored)
    engine.submit_ahead(following)
    for _ in range(12):  # one that waited, before its own requests came
        engine.step()
    assert engine.has_ahead_work
    rollouts, tallies, num_ahead = [], [], 0
    for requests, wanted in ((own, plain), (refill, of_refill)):
        engine.submit(requests[::-1])
        while engine.has_work:
            engine.step()
        found, counts = engine.take_finished_rollouts(), engine.take_counts()
        assert texts(found) == texts(wanted.values())
        for rollout in found:
            np.testing.assert_allclose(rollout.log_probs, wanted[rollout.key].log_probs, atol=2e-4, rtol=2e-4)
            assert rollout.finish_reason == wanted[rollout.key].finish_reason
        tokens, rounds = sum(len(rollout.response_tokens) for rollout in found), counts.spans.strategy_index >= 0
        assert counts.num_tokens == counts.spans.num_tokens[rounds].sum() == tokens
        assert counts.num_row_passes == sum(r.num_target_passes for r in found) <= counts.spans.num_live[rounds].sum()
        # rounds in which a graph was captured tell nothing of their strategy
        assert sum(n for _, n in counts.strategies.values()) in ([tokens] if "host" in way else range(1, tokens + 1))
        tallies.append((counts.num_stored_accepted, counts.num_stored))
        num_ahead += counts.num_ahead
        rollouts += found
        for _ in range(12):  # while other ranks generate; a refill puts it aside
            engine.step()
    accepted, verified = np.sum(tallies, 0)
    assert 0.2 * verified < accepted <= verified, tallies
    assert num_ahead > 0 and not engine.has_work
    while engine.has_ahead_work:
        engine.step()
    num_ahead += engine.take_counts().num_ahead
    generated = engine.ahead.take_finished_texts()
    assert {key: text.tolist() for key, text in generated.items()} == texts(of_next.values())
    assert num_ahead >= sum(map(len, generated.values()))
    assert (
        not engine.finished_rollouts and not engine.ahead.take_finished_texts() and engine._scheduler.pool.num_used == 0
    )
    assert "late" not in way or engine._rounds.num_graphs == num_graphs, "a graph was captured during the rollout"
    whole = {(*r.prompt_tokens.tolist(), *r.response_tokens.tolist()) for r in rollouts}
    assert set(kept.whole) == whole, "features of the step's own responses alone"


def test_features_of_wide_passes_and_new_weights_in_the_middle(world):
    (own, following, _), (_, of_next, _), stored, expected = world
    engine = ahead_engine(max_live=8)
    engine.outbox.set_sink(kept := KeptFeatures())
    engine.set_stored_texts(stored)
    generate(engine, own)
    for text, (_, features) in kept.whole.items():
        found, wanted = (torch.from_numpy(f).view(torch.bfloat16).float() for f in (features, expected.whole[text][1]))
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)
    engine.submit_ahead(following)
    for _ in range(6):
        engine.step()
    engine.abort()
    engine.ahead.end_and_keep_texts()
    engine.load_policy(read_folder_weights(embedded_folder()), 2)
    begun = engine.ahead.take_finished_texts()
    assert any(len(text) < len(of_next[key].response_tokens) for key, text in begun.items())
    for key, text in begun.items():
        assert text.tolist() == of_next[key].response_tokens[: len(text)].tolist()
    engine.set_stored_texts(begun)
    assert texts(generate(engine, following)) == texts(of_next.values())


# -- the order ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 9), st.data())
def test_an_idle_rank_begins_at_a_place_of_its_own_in_busy_shards(count, size, data):
    shards = [[(rank, i) for i in range(size)] for rank in range(count)]
    busy = data.draw(st.sets(st.integers(0, count - 1)))
    orders = {rank: order_to_generate_ahead(rank, shards, busy) for rank in range(count)}
    for rank, order in orders.items():
        assert sorted(order) == sorted(one for shard in {rank, *busy} for one in shards[shard])
    for shard in busy:
        starts = [
            next(i for other, i in orders[rank] if other == shard) for rank in range(count) if rank != shard and size
        ]
        assert len(set(starts)) == min(len(starts), size)


@given(st.integers(2, 6), st.integers(0, 12), st.data())
def test_all_shards_are_covered_alike(count, size, data):
    """If all ranks but one are idle, of each shard about as many responses are among the first ones."""
    shards, slow = [[(rank, i) for i in range(size)] for rank in range(count)], data.draw(st.integers(0, count - 1))
    orders = [order_to_generate_ahead(rank, shards, {slow}) for rank in range(count) if rank != slow]
    share = data.draw(st.floats(0, 1))
    first = [one for order in orders for one in order[: round(share * size * count / (count - 1))]]
    covered = [sum(rank == shard for rank, _ in set(first)) for shard in range(count)]
    assert max(covered) - min(covered) < count, covered


def test_each_replica_gets_its_texts_and_of_several_the_longest():
    keys = [SampleKey(0, Stream.TRAIN, 1, 0, sample) for sample in range(4)]
    ranks = [
        {key: np.arange(length, dtype=np.int32) for key, length in zip(keys, lengths, strict=True) if length}
        for lengths in ((5, 0, 2, 1), (3, 0, 7, 0), (4, 6, 1, 0))
    ]
    found = longest_ahead_texts(ranks, {keys[0], keys[1], keys[2]}.__contains__)
    assert {key: len(text) for key, text in found.items()} == {keys[0]: 5, keys[1]: 6, keys[2]: 7}


# -- what the tail is used for ----------------------------------------------------------------------------------------


def line(length: float = 2.0, sequences: float = 99.0, tokens: float = 0.0, accepted: float = 0.0) -> dict[str, float]:
    return {ACCEPT_LENGTH: length, SEQUENCES: sequences, STORED_TOKENS: tokens, STORED_ACCEPTED: accepted}


def uses(plan: TailPlan, lines) -> str:
    """What follows each line: t, the drafter is trained; a, responses are generated ahead; -, neither."""
    found = ""
    for one in lines:
        plan.add_step_metrics(one)
        use = plan.choose_idle_work()
        assert not (use.ahead and use.trains)
        found += "a" if use.ahead else "t" if use.trains else "-"
    return found


def test_what_idle_ranks_do():
    for trains, use in ((True, "t"), (False, "-")):
        plan = TailPlan(trains, "off")
        assert uses(plan, [line()] * 9) == use * 9
    assert uses(TailPlan(False, "auto"), [line()] * 9) == "a" * 9
    growing = [line(2 * 1.02**i * (1 + 0.02 * (-1) ** i)) for i in range(20)]
    assert uses(TailPlan(True, "auto"), growing) == "t" * 20, "training pays"
    wild = [line(3 - 0.12 * i + 0.35 * (-1) ** i) for i in range(14)]
    assert uses(TailPlan(True, "auto"), wild) == "t" * 14, "an error of more than 1 % a step decides nothing"
    perhaps = [line(2 * (1 + 0.006 * i) * (1 + 0.02 * (-1) ** i)) for i in range(7)]
    assert uses(TailPlan(True, "auto"), perhaps) == "t" * 7, "0.25 % a step, but 0.8 % with the error"
    slower = [line(2.97 * 1.004**i) for i in range(20)]
    assert uses(TailPlan(True, "auto"), growing + slower)[20:].endswith("a"), "it pays no longer"
    plan = TailPlan(True, "auto")
    assert uses(plan, [line(3.0)] * 6) == "ttttta" and plan.choose_idle_work().why == "generated ahead"
    assert uses(plan, [line(3.0)] * 8) == "a" * 8
    assert uses(plan, [line(2.7)] * 6).endswith("t"), "the drafter falls behind: it is trained again"
    noisy = TailPlan(True, "auto")
    assert uses(noisy, [line(3.0)] * 6).endswith("a")
    assert uses(noisy, [line(3.0 + math.sin(10 * i) * (i < 6) + 0.7 * math.sin(7 * i)) for i in range(12)]) == "a" * 12
    unused = uses(TailPlan(True, "auto"), [line(sequences=3.0)] * 12)
    assert unused[:6] == "t" * 6 and set(unused[7:]) == {"a", "t"}, "nothing is known of the drafter: in turn"
    useless = [line(tokens=100.0, accepted=20.0) for _ in range(4)] + [line()] * 9
    assert uses(TailPlan(False, "auto"), useless)[:11] == "aa" + "-" * 8 + "a"
    assert "a" not in uses(TailPlan(True, "auto"), useless[:10]), "what a pause leaves is for training"
    useful = [line(tokens=100.0, accepted=40.0)] * 12
    assert uses(TailPlan(False, "auto"), useful) == uses(TailPlan(False, "on"), useless)[:12] == "a" * 12
