"""The EAGLE-3 form: its features, its vocabulary, the same text; and training that looks ahead, against plain loops."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_world import RanksInTurn
from tiny import (
    CPU,
    NUM_TOKENS,
    KeptFeatures,
    embedded_decoder,
    embedded_folder,
    gcd_requests,
    generate,
    make_engine,
    random_document,
    texts,
    to_floats,
)
from transformers import AutoModelForCausalLM

from tlt_hpc.config import DrafterSection
from tlt_hpc.drafting import loss as loss_module
from tlt_hpc.drafting.loss import LossSettings, drafter_loss
from tlt_hpc.drafting.pool import pack_excerpts, whole_document_excerpt
from tlt_hpc.drafting.spot_trainer import SpotTrainer
from tlt_hpc.models import documents as documents_module
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.eagle import Eagle, Eagle3
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.run.session import count_tokens, most_frequent_tokens
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder

REQUESTS = gcd_requests(4, 4)
IDS = torch.tensor([1, *range(3, 17)])
SETTINGS = {
    "one step": LossSettings(0.7, 0.3),
    "ahead": LossSettings(0.7, 0.3, num_steps=4, decay=0.5),
    "past every end": LossSettings(num_steps=99, decay=0.9),
}


def gradients(drafter):
    out = torch.cat([p.grad.flatten() for p in drafter.parameters()])
    drafter.zero_grad()
    return out


def eagle3(seed=0, ids=IDS):
    return Eagle3(embedded_decoder().shape, seed, torch.float32, CPU, ids)


def make(form):
    return Eagle(embedded_decoder().shape, 0, torch.float32, CPU) if form == "eagle" else eagle3()


def engine_of(strategies, drafter=None, **options):
    return make_engine(strategies, drafter=drafter or eagle3(), drafter_is_trained=True, max_new_tokens=60, **options)


# --- drafting ---


CHAIN, TREE = Strategy("drafter", 4), Strategy("drafter", 3, 3, 7)


@pytest.mark.parametrize("attention", ["pages", "paged-kernel"])
def test_the_text_is_that_of_plain_decoding(attention):
    engine = engine_of([CHAIN, TREE, OFF], attention=attention, chooser="random", max_live=6, page_size=8)
    assert texts(generate(engine, REQUESTS)) == texts(generate(make_engine(max_new_tokens=60), REQUESTS))


def test_features_are_what_enters_three_layers_and_the_last_hidden_state():
    engine = engine_of([CHAIN, TREE, OFF], chooser="random", max_live=5, page_size=8)
    kept = KeptFeatures()
    engine.outbox.set_sink(kept)
    rollouts = generate(engine, REQUESTS)
    model = AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32, local_files_only=True).eval()
    assert len(kept.whole) == len({(*r.prompt_tokens.tolist(), *r.response_tokens.tolist()) for r in rollouts})
    for tokens, (_, features) in kept.whole.items():
        assert features.shape == (len(tokens) - 1, 4, 128)
        with torch.inference_mode():
            out = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        wanted = torch.stack([*(out.hidden_states[layer][0] for layer in (2, 4, 5)), out.last_hidden_state[0]], 1)
        torch.testing.assert_close(to_floats(features), wanted, rtol=2**-7, atol=5e-3)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([1, 2]), "drafts 2 tokens, a strategy branches 3 times"),
        (torch.tensor([1, 2, 3, NUM_TOKENS]), f"drafts token {NUM_TOKENS}, and the vocabulary has ids 0 to 19"),
    ],
)
def test_vocabularies_that_cannot_work(ids, words):
    with pytest.raises(ValueError, match=words):
        engine_of([TREE], eagle3(ids=ids))


# --- the loss ---


def documents_of(form):
    sizes = [(30, 9), (7, 4), (61, 2), (3, 1), (150, 140), (2, 1), (12, 1)]
    return [random_document(*size, i, 4 if form == "eagle3" else 1) for i, size in enumerate(sizes)]


def pair_loss(drafter, state, wanted, settings):
    """Of one path at one step, by the papers' formulas."""
    head = embedded_decoder().head
    p = torch.softmax(head @ wanted, 0)
    if drafter.token_ids is None:
        q = torch.softmax(head @ state, 0)
    else:
        normed = F.rms_norm(state, (128,), drafter.final_norm, drafter.shape.norm_epsilon)
        q = torch.softmax(drafter.head @ normed, 0)
        p = p[drafter.token_ids]  # what lies outside cannot be drafted, and weighs nothing
    cross = -(p * q.log()).sum()
    if drafter.token_ids is not None:
        return cross
    difference = (state - wanted).abs()
    smooth = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean()
    return settings.feature_weight * smooth + settings.token_weight * cross


def losses_by_definition(drafter, document, settings):
    """Per step the losses of one document's paths, each path rolled out alone over a growing sequence."""
    h = to_floats(document.features)
    tokens, n = torch.from_numpy(document.tokens).long(), len(h) - 1
    embedded = F.embedding(tokens[1 : n + 1], embedded_decoder().embedding)
    fused = drafter.fuse(h[:n].flatten(1))
    found = [[] for _ in range(settings.num_steps)]
    for start in range(max(0, document.prompt_length - 2), n):
        states = fused[: start + 1]
        for step in range(min(settings.num_steps, n - start)):
            length = start + step + 1
            out = drafter(embedded[:length], states, torch.arange(length), attend_documents(None))[-1:]
            found[step].append(pair_loss(drafter, out[0], h[start + step + 1, -1], settings))
            states = torch.cat([states, out])
    return found


def by_definition(drafter, documents, settings):
    """The mean over all documents' paths of their steps' losses, weighted by the step."""
    each = [losses_by_definition(drafter, document, settings) for document in documents]
    steps = [list(itertools.chain.from_iterable(step)) for step in zip(*each, strict=True)]
    return sum(settings.decay**i * sum(losses) for i, losses in enumerate(steps)) / len(steps[0])


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "in chunks"])
@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", SETTINGS)
def test_packed_loss_and_gradient_are_those_of_paths_rolled_out_one_by_one(name, form, chunked, monkeypatch):
    settings = SETTINGS[name]
    if chunked:
        monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 24 * 5)
        monkeypatch.setattr(documents_module, "MAX_SCORES", 4 * 40)
    drafter, decoder = make(form), embedded_decoder()
    documents = documents_of(form)
    if settings.num_steps > 9:
        documents = [document for document in documents if len(document.tokens) < 20]
    packed = drafter_loss(
        drafter,
        pack_excerpts([whole_document_excerpt(d) for d in documents], CPU),
        decoder.embedding,
        decoder.head,
        settings,
    )
    packed.backward()
    got = gradients(drafter)
    alone = by_definition(drafter, documents, settings)
    alone.backward()
    assert packed.item() == pytest.approx(alone.item(), abs=1e-5)
    torch.testing.assert_close(got, gradients(drafter), atol=1e-5, rtol=1e-4)


# --- training ---


def make_trainer(tmp_path, **settings):
    cache = FeatureCache(RunFolder(tmp_path), 0, 4, 128, 10**9, num_ranks=1)
    options = DrafterSection(**{"form": "eagle3", "learning_rate": 3e-3, **settings})
    return SpotTrainer(embedded_decoder(), cache, options, 0, 0, torch.arange(NUM_TOKENS)), cache


def trainer_of_a_document(tmp_path, **settings):
    trainer, cache = make_trainer(tmp_path, **settings)
    document = random_document(40, 5, 0, 4)
    cache.begin_step(0, 0).append(document.tokens, document.prompt_length, document.features)
    return trainer


def test_an_untrained_one_begins_with_the_policys_head_as_it_is_then(tmp_path):
    trainer = trainer_of_a_document(tmp_path)
    before = trainer.trained.drafter.head.detach().clone()
    trainer.begin_rollout(0)
    decoder = embedded_decoder()
    assert not torch.equal(before, trainer.trained.drafter.head)
    assert torch.equal(trainer.trained.drafter.head, decoder.head[:NUM_TOKENS])
    assert torch.equal(trainer.trained.drafter.final_norm, decoder.final_norm.weight)
    assert trainer.take_micro_step()
    with torch.no_grad():
        trainer.trained.drafter.head.zero_()
    trainer.begin_rollout(1)
    assert not trainer.trained.drafter.head.any(), "what has learned keeps its own"


def test_a_micro_step_without_room_is_dropped_and_the_next_are_half_as_long(tmp_path, monkeypatch, caplog):
    trainer = trainer_of_a_document(tmp_path, micro_step_tokens=2048)
    trainer.begin_rollout(0)
    before = trainer.trained.fingerprint()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("tlt_hpc.drafting.spot_trainer.drafter_loss", fail)
        for _ in range(3):
            assert trainer.take_micro_step()
        with pytest.raises(torch.OutOfMemoryError):
            trainer.take_micro_step()
    assert trainer.trained.fingerprint() == before
    assert trainer.records == []
    assert "at most 256 tokens" in caplog.text
    assert trainer.take_micro_step()
    assert trainer.trained.num_steps == 1


def test_its_vocabulary_is_part_of_its_state_and_of_no_merge(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    ids = torch.tensor([0, *range(2, 21)])
    other = SpotTrainer(embedded_decoder(), trainer._cache, trainer._settings, 1, 0, ids)
    other.trained.load_state(trainer.trained.host_state_copy())
    assert torch.equal(other.trained.drafter.token_ids, torch.arange(NUM_TOKENS))
    assert other.trained.fingerprint() == trainer.trained.fingerprint()
    other.begin_rollout(0)
    with other.merging_drafters(world := RanksInTurn()):
        pass
    assert world.arrays[0].size == 2 + sum(3 * parameter.numel() for parameter in other.trained.drafter.parameters())
    fewer = SpotTrainer(embedded_decoder(), trainer._cache, trainer._settings, 1, 0, ids[:5])
    with pytest.raises(ValueError, match=r"'head\.weight': \[20, 128\], this model needs \[5, 128\]"):
        fewer.trained.copy_weights_from(trainer.trained.host_state_copy())


# --- the configuration ---


def test_a_vocabulary_is_made_of_the_most_frequent_tokens():
    counts = count_tokens([np.array([3, 3, 3, 1], np.int32), np.array([7, 7, 1, 9], np.int32)], 9)
    assert counts.tolist() == [0, 2, 0, 3, 0, 0, 0, 2, 0]
    assert most_frequent_tokens(counts, 3).tolist() == [1, 3, 7]
    assert most_frequent_tokens(counts, 5).tolist() == [0, 1, 2, 3, 7], "then the lowest ids"
    assert most_frequent_tokens(counts, 3, always=[8]).tolist() == [1, 3, 8]
    assert most_frequent_tokens(counts, 3, always=[8, 9]).tolist() == [1, 3, 8], "9 is no token of the tokenizer"
    assert most_frequent_tokens(counts, 99).tolist() == list(range(9))
