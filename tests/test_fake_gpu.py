"""What runs on a GPU, on one that computes nothing: no wait in a round, and no graph that would replay old values."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_world import RanksInTurn
from tiny import NUM_TOKENS, KeptFeatures, embedded_decoder, embedded_folder, gcd_requests, make_engine, random_document

from tlt_hpc.config import DrafterSection, UserError
from tlt_hpc.drafting.spot_trainer import SpotTrainer
from tlt_hpc.kernels.dispatch import has_triton
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.rollout import graph_pass
from tlt_hpc.rollout.decoding import DecodingRounds
from tlt_hpc.rollout.graph_pass import GraphPasses
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.ngram_drafts import NgramDrafts
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.rollout.target_pass import NUM_FIGURES
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
# isort: split
from fake_gpu import GPU, FakeGpu, GraphError, load_guard

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton, whose launches it counts")

CHAIN, TREE, NGRAM = Strategy("drafter", 4), Strategy("drafter", 4, 2, 9), Strategy("ngram", 3)
STRATEGIES = [CHAIN, TREE, NGRAM, OFF]
REQUESTS = gcd_requests(3, 4)


@pytest.fixture
def gpu(monkeypatch):
    """And what a round tells the host: random tokens, of which some are the last of their response."""
    source, take = random.Random(0), DecodingRounds._append_outcome

    def take_random(rounds, responses, told, log_probs):
        rows = []
        for response, row in zip(responses, told, strict=True):
            tokens = [source.randrange(2, 20) for _ in row[:-NUM_FIGURES]][:9]
            count = min(source.randrange(len(tokens)) + 1, response.params.max_tokens - response.num_response_tokens)
            rows.append([*tokens, count, max(0, count - 1), int(source.random() < 0.05), 0])
        return take(rounds, responses, rows, log_probs)

    monkeypatch.setattr(DecodingRounds, "_append_outcome", take_random)
    try:
        load_guard()
    except UserError as error:  # it says what to install
        pytest.skip(str(error))
    with FakeGpu() as fake:
        yield fake


def gpu_decoder():
    return Decoder(embedded_decoder().shape, torch.bfloat16, GPU, is_invariant=True)


def gpu_engine(strategies=STRATEGIES, form="eagle", **options):
    decoder = gpu_decoder()
    drafter = make_drafter(decoder.shape, 0, torch.bfloat16, GPU, torch.arange(3, 15) if form == "eagle3" else None)
    if form == "some tokens":
        drafter.set_draft_vocabulary(torch.arange(3, 15))
    defaults = {"max_new_tokens": 40, "max_live": 4, "page_size": 16, "stored_texts": True}
    options = {"tie_guard": False, "chooser": "random", **defaults, **options}
    return make_engine(strategies, decoder=decoder, drafter=drafter, drafter_is_trained=True, **options)


def generate(gpu, engine, requests=REQUESTS, num_steps=10**9):
    gpu.is_waiting_wrong = True
    engine.submit(requests)
    while engine.has_work and num_steps:
        engine.step()
        num_steps -= 1
    gpu.is_waiting_wrong = False
    return engine.take_finished_rollouts()


PAGES = page_bytes(embedded_decoder().shape, 16, torch.bfloat16, 1)
OPTIONS = {
    "usual": {},
    "eagle3": {"form": "eagle3"},
    "drafts among some tokens": {"form": "some tokens"},
    "preempted": {"kv_bytes": 9 * PAGES},
    "prefilled in chunks": {"prefill_tokens": 3},
    "truncated": {"rule": SamplingRule(0.7, NUM_TOKENS, top_k=9, top_p=0.9)},
}


@pytest.mark.ci
@pytest.mark.parametrize("name", OPTIONS)
def test_a_rollout_never_waits_for_the_gpu(gpu, name, monkeypatch):
    """With every kind of draft, rows that come and go, features handed over, and new weights in between.

    Nor for a graph: all are captured before the first rollout, also for rounds in which no row finds an n-gram.
    """
    engine = gpu_engine(**OPTIONS[name])
    num_graphs = engine._rounds.num_graphs
    texts = {request.key: np.arange(2, 20, dtype=np.int32) for request in REQUESTS[::3]}
    for version in (1, 2):
        engine.outbox.set_sink(kept := KeptFeatures())
        engine.set_stored_texts(texts)
        assert len(generate(gpu, engine)) == len(REQUESTS) == len(kept.firsts)
        engine.release_pages()
        with pytest.raises(GraphError, match="was given back"):
            engine._cache._keys.zero_()
        engine.load_drafter(engine.drafter.state_dict())
        engine.load_policy(read_folder_weights(embedded_folder()), version)
        monkeypatch.setattr(NgramDrafts, "_draft_chain", lambda *given: [])
    counts = engine.take_counts()
    assert all(counts.strategies[strategy.name][0] for strategy in STRATEGIES[:4]), counts.strategies
    assert (counts.num_preempted > 0) == (name == "preempted")
    generate(gpu, engine, num_steps=3)
    assert engine.abort()
    assert engine._rounds.num_graphs == num_graphs > 0


@pytest.mark.ci
@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("is_joined", [True, False])
def test_the_drafter_learns_and_is_merged_on_the_gpu(gpu, tmp_path, form, is_joined, monkeypatch):
    layers, token_ids = (1, None) if form == "eagle" else (4, torch.arange(3, 15))
    decoder, cache = gpu_decoder(), FeatureCache(RunFolder(tmp_path), 0, layers, 128, 10**9, num_ranks=1)
    trainer = SpotTrainer(decoder, cache, DrafterSection(), 0, 0, token_ids)
    writer = cache.begin_step(0, 0)
    for seed in range(4):
        document = random_document(40, 9, seed, layers)
        writer.append(document.tokens, document.prompt_length, document.features)
    trainer.begin_rollout(0)
    assert trainer.take_micro_step() and trainer.take_micro_step()
    trainer.end_rollout()
    cache.end_step()
    gpu.counts.clear()
    world, sums = RanksInTurn(1), []
    if is_joined:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
        work = SimpleNamespace(wait=lambda: None)
        monkeypatch.setattr(
            torch.distributed, "all_reduce", lambda x, async_op: sums.append((x.numel(), async_op)) or work
        )
    with trainer.merging_drafters(world):
        pass
    report = trainer.merge_report
    assert report.num_steps == 2 and len(trainer.records) == 2 and not report.is_dropped
    num_numbers = 3 * sum(parameter.numel() for parameter in trainer.trained.drafter.parameters()) + 2
    assert sums == ([(num_numbers, True)] if is_joined else [])
    assert [array.size for array in world.arrays] == ([] if is_joined else [num_numbers])
    # the two totals and the fingerprint are read in any case
    assert gpu.counts["copies between CPU and GPU"] == (2 if is_joined else 4)


# -- what must be seen ------------------------------------------------------------------------------------------------


def around(change):
    """The function, with ``change`` made to what it returns."""
    return lambda real: lambda *given, **options: change(real(*given, **options))


BREAKS = {
    "a list as index": (LiveRows, "last_tokens", around(lambda tokens: tokens[[*range(len(tokens))]])),
    "a number read back": (GraphPasses, "_log_probs", around(lambda x: x - float(x.amax()))),
    "a mask as index": (GraphPasses, "_near_ties", around(lambda near: near.clone().index_put_((near,), ~near[:1]))),
    "a copy to the CPU and back": (graph_pass, "score_tolerances", around(lambda zone: zone.cpu().to(GPU))),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_graph_cannot_hold_is_seen(gpu, name, monkeypatch):
    holder, function, change = BREAKS[name]
    monkeypatch.setattr(holder, function, change(getattr(holder, function)))
    with pytest.raises(GraphError, match="captured function"):
        gpu_engine([TREE, CHAIN], max_live=1)


STALE = {
    "a weight moved": (lambda engine: engine.decoder.layers[0].post_norm, "weight"),
    "the pages moved": (lambda engine: engine._cache, "_keys"),
    "the drafter's chances moved": (lambda engine: engine._learned.chances, "_hits"),
    "a number changed": (lambda engine: engine._noise, "vocab_size"),
}


def test_what_a_graph_would_not_notice_is_seen(gpu):
    engine = gpu_engine([TREE, CHAIN, OFF], max_live=2)
    graphs = list(engine._rounds.graphs._graphs._captured.values())

    def replay_all():
        for graph in graphs:
            graph.replay()

    for what, (holder_of, name) in STALE.items():
        holder = holder_of(engine)
        before = getattr(holder, name)
        setattr(holder, name, before - 1 if isinstance(before, int) else before.clone())
        with pytest.raises(GraphError, match="not be what was recorded"):
            replay_all()
            pytest.fail(f"{what}: not seen")
        setattr(holder, name, before)
        replay_all()
