"""The pure parts of a warm-up: held-out prompts, the order of documents, the learning rate, and when it is over."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from tlt_hpc.common.records import Prompt
from tlt_hpc.config import ConfigError, UserError, WarmupSection
from tlt_hpc.config.recipes import scheduled_rate
from tlt_hpc.drafting.offline import balanced_shards, iter_update_batches, pack_forward_passes
from tlt_hpc.drafting.pool import pack_excerpts
from tlt_hpc.storage.feature_file import Document
from tlt_hpc.storage.records import FACTS_FILE, CurvePoint, DrafterFacts, read_facts, write_json
from tlt_hpc.studies.warmup.capture import part_size
from tlt_hpc.studies.warmup.progress import Progress
from tlt_hpc.studies.warmup.texts import Texts, from_prompts

LENGTHS = [5, 1, 9, 3, 3, 30, 2, 8]
LIMITS = WarmupSection(updates=100)


def document(prompt_length: int, response_length: int, first: int = 0) -> Document:
    tokens = np.arange(first, first + prompt_length + response_length, dtype=np.int32) % 24
    features = np.random.default_rng(first).integers(0, 16000, (len(tokens) - 1, 1, 8), dtype=np.uint16)
    return Document(tokens, prompt_length, features, 0)


def texts_from(num_distinct: int) -> Texts:
    """50 training texts and at most 8 held out, of prompts that come again after ``num_distinct``."""
    batch = [Prompt(np.array([7, i % num_distinct], np.int32), str(i), "", "") for i in range(1000)]
    warmup, prompts = (
        SimpleNamespace(responses=50, validation_prompts=8),
        SimpleNamespace(draw_step_prompts=lambda step: batch),
    )
    return from_prompts(warmup, prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_distinct", "num_kept"), [(1000, 8), (40, 8), (20, 4), (7, 1), (2, 1)])
def test_no_prompt_is_trained_on_and_validated_with(num_distinct, num_kept):
    texts = texts_from(num_distinct)
    kept = {tuple(tokens) for tokens in texts.held_out}
    assert len(texts.training) == 50 and len(texts.held_out) == len(kept) == num_kept
    assert not kept & {tuple(text.prompt) for text in texts.training}
    with pytest.raises(ConfigError, match=r"no prompt is left for validation: 58 responses have 1 distinct.*more"):
        texts_from(1)


# -- the order of documents -----------------------------------------------------------------------------------------


def test_every_document_comes_once_before_any_comes_twice():
    taken = [index for batch in islice(iter_update_batches(LENGTHS, 12, 0), 40) for index in batch]
    for epoch in range(len(taken) // len(LENGTHS)):
        assert sorted(taken[epoch * len(LENGTHS) : (epoch + 1) * len(LENGTHS)]) == list(range(len(LENGTHS)))
    assert taken[:8] != taken[8:16], "each epoch has an order of its own"
    assert taken != [index for batch in islice(iter_update_batches(LENGTHS, 12, 1), 40) for index in batch]


def test_a_batch_is_full_and_not_over_its_tokens_unless_one_document_is():
    for batch, following in pairwise(islice(iter_update_batches(LENGTHS, 12, 0), 40)):
        tokens = sum(LENGTHS[index] for index in batch)
        assert tokens <= 12 or len(batch) == 1
        assert tokens + LENGTHS[following[0]] > 12


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_batch_is_sharded_whole_and_evenly(num_ranks):
    lengths = np.random.default_rng(0).integers(1, 100, 60).tolist()
    hands = balanced_shards(range(60), lengths, num_ranks)
    assert sorted(index for hand in hands for index in hand) == list(range(60))
    tokens = [sum(lengths[index] for index in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= min(max(lengths), 0.1 * sum(tokens) / num_ranks)


def test_passes_predict_each_response_token_once_within_their_size():
    documents = [document(4, 20, 0), document(50, 3, 1), document(2, 7, 2), document(6, 2, 3)]
    passes = pack_forward_passes(documents, 16)
    assert all(sum(excerpt.num_pairs for excerpt in one) <= 16 for one in passes)
    assert sum(int(pack_excerpts(one, torch.device("cpu")).counts.sum()) for one in passes) == 20 + 3 + 7 + 2
    windows = [(e.start, e.num_pairs) for one in passes for e in one if e.document is documents[1]]
    assert windows == [(48, 3)], "windows within the prompt predict nothing and are left out"


def test_the_learning_rate_climbs_and_falls_to_nothing():
    rate = partial(scheduled_rate, kind="cosine")
    assert rate(1.0, 0, 10, 0.0) == pytest.approx(0.1)
    assert rate(1.0, 9, 10, 0.0) == rate(1.0, 0, 1, 0.0) == rate(1.0, 0, 0, 0.0) == 1.0
    assert rate(2.0, 500, 10, 0.5) == pytest.approx(1.0) and rate(2.0, 500, 10, 1.5) == pytest.approx(0.0, abs=1e-12)
    rates = [rate(1.0, update, 10, update / 100) for update in range(101)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("num_texts", "num_ranks", "most"), [(3000, 2, 256), (10, 4, 256), (4096, 3, 100), (1, 8, 4)])
def test_parts_are_within_their_size_and_the_same_number_for_all(num_texts, num_ranks, most):
    size = part_size(num_texts, num_ranks, most)
    num_parts = -(-num_texts // size)
    rounds = -(-num_parts // num_ranks)
    assert 1 <= size <= most
    assert rounds == -(-num_texts // (most * num_ranks)), "no rank waits a part longer than it must"


# -- when it is over ------------------------------------------------------------------------------------------------


def at(updates: int, *accept_lengths: float) -> Progress:
    curve = tuple(CurvePoint(10 * (i + 1), 0, 0.0, 0.5, length) for i, length in enumerate(accept_lengths))
    return Progress(updates, 0, 0.0, (), curve)


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        (at(99, 1.0, 2.0), ""),
        (at(100), "warmup.updates = 100"),
        (at(50, 3.0, *[2.0] * 7), ""),
        (at(50, 3.0, *[2.0] * 8), "no new best in 8 validations"),
        (at(50, 3.0, *[2.0] * 7, 3.1), ""),
        (at(50, *[3.0] * 9), "no new best in 8 validations"),
    ],
)
def test_the_updates_or_the_patience_end_it(progress, reason):
    assert progress.end_reason(LIMITS) == reason
    assert at(50).share_done(LIMITS) == 0.5 and at(101).share_done(LIMITS) == 1.0


def test_the_best_is_the_first_of_the_highest():
    progress = at(50, 2.0, 3.5, 3.0, 3.5)
    assert progress.best is not None and progress.best.updates == 20 and progress.num_since_best == 2
    assert at(0).best is None and at(0).num_since_best == 0


def test_validation_comes_on_time_at_the_end_and_never_twice():
    assert [u for u in range(101) if Progress(u).validation_is_due(LIMITS, u > 0)] == [*range(5, 101, 5)]
    assert Progress(0).validation_is_due(LIMITS, is_trained=True), "a drafter that is trained already is validated"
    assert not Progress(10).after_validation(2.0, 1.0).validation_is_due(LIMITS, is_trained=True)
    ended = WarmupSection(updates=107)
    assert at(107).validation_is_due(ended, is_trained=True), "the last update, in between"
    assert [WarmupSection(updates=updates).validation_interval for updates in (9, 1500, 9000)] == [1, 75, 100]


def test_progress_counts_and_comes_back_equal_from_json():
    progress = (
        Progress()
        .after_update(0.25, 100, 1.5)
        .after_update(0.35, 60, 0.5)
        .after_validation(3.3, 0.25)
        .after_update(1 / 3, 70, 0.5)
    )
    assert progress.curve == (CurvePoint(2, 160, 2.25, 0.3, 3.3),)
    assert (progress.updates, progress.tokens, progress.seconds, progress.losses) == (3, 230, 2.75, (1 / 3,))
    assert TypeAdapter(Progress).validate_python(json.loads(json.dumps(asdict(progress)))) == progress


def test_facts_come_back_equal_and_broken_ones_are_named(tmp_path):
    facts = DrafterFacts(
        target="models/x", data="embedded:gcd", num_responses=3, num_tokens=100, num_updates=20,
        accept_length=3.21, strategy="drafter-5", temperature=1.0,
        num_validation_prompts=4,
        curve=(CurvePoint(10, 640, 1.25, 0.5, 2.0), CurvePoint(20, 1280, 2.5, None, 3.21)),
    )  # fmt: skip
    assert read_facts(tmp_path) is None
    write_json(tmp_path / FACTS_FILE, asdict(facts))
    assert read_facts(tmp_path) == facts
    path = tmp_path / FACTS_FILE
    path.write_text(path.read_text().replace('"num_tokens": 100', '"num_tokens": "many"'))
    with pytest.raises(UserError, match=r"facts\.json is damaged \(num_tokens.*; remove it"):
        read_facts(tmp_path)
