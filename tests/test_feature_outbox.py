"""Features on their way from the pages to the cache: the target's own, in token order, a prompt's only once a rank."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from test_device_rounds import device_engine
from test_engine import PAGES_OF_8, full_engine, parse
from tiny import KeptFeatures, embedded_decoder, embedded_folder, gcd_requests, generate, to_floats
from torch import Tensor

from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.rollout import feature_outbox
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.rollout.transfer import PendingHostCopy
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.feature_file import FeatureCacheReader
from tlt_hpc.storage.folder import RunFolder

REQUESTS = gcd_requests(5, 4, step=3)
STRATEGIES = parse("ngram-3", "drafter-3", "drafter-4x2v6", "drafter-3x2v5")
WAYS = {
    "whole groups": (full_engine, {}, slice(0, 12)),
    "preempted": (full_engine, {"page_size": 8, "kv_bytes": PAGES_OF_8 * 40}, slice(None)),
    "on a device, preempted": (device_engine, {"page_size": 8, "kv_bytes": PAGES_OF_8 * 40}, slice(None)),
}


def teacher_forced(tokens: np.ndarray) -> Tensor:
    """The target's hidden states [T - 1, H] by one plain pass over a document."""
    decoder, fed = embedded_decoder(), torch.from_numpy(tokens[:-1]).long()
    return decoder.hidden_states(fed, torch.arange(len(fed)), attend_documents(None))


@pytest.mark.parametrize("way", WAYS)
def test_what_the_cache_holds_is_what_a_pass_over_the_text_gives(tmp_path, way, monkeypatch):
    monkeypatch.setattr(feature_outbox, "_POSITIONS", 13)
    make, options, shard = WAYS[way]
    requests = REQUESTS[shard]
    engine = make(STRATEGIES, **{"max_live": 10, "chooser": "random", "seed": 5, **options})
    engine.load_policy(read_folder_weights(embedded_folder()), 17)
    cache = FeatureCache(RunFolder(tmp_path), 0, 1, 128, 10**9, num_ranks=1)
    engine.outbox.set_sink(cache.begin_step(3, engine.decoder.version).append)
    rollouts = [np.concatenate([r.prompt_tokens, r.response_tokens]).tolist() for r in generate(engine, requests)]
    counts = engine.take_counts()
    assert (counts.num_preempted > 0) == ("preempted" in way)
    assert sum(rounds for name, (rounds, _) in counts.strategies.items() if name != "off") > 10
    cache.end_step()
    with closing(FeatureCacheReader(RunFolder(tmp_path).feature_cache(3, 0))) as reader:
        documents = [reader.read(index) for index in range(len(reader))]
    assert sorted(document.tokens.tolist() for document in documents) == sorted(rollouts)
    prompts = [request.prompt_tokens.tolist() for request in requests]
    for document in documents:
        assert document.weight_version == 17
        assert document.tokens[: document.prompt_length].tolist() in prompts
        wanted = teacher_forced(document.tokens)
        torch.testing.assert_close(to_floats(document.features[:, 0]), wanted, rtol=2**-7, atol=1e-3)


def test_a_prompts_features_are_copied_and_handed_over_once(monkeypatch):
    copied = []

    def counting(x, is_own):
        copied.append(len(x))
        return PendingHostCopy(x, is_own)

    monkeypatch.setattr(feature_outbox, "PendingHostCopy", counting)
    monkeypatch.setattr(feature_outbox, "_POSITIONS", 20)
    engine = full_engine([OFF], max_live=6)
    engine.outbox.set_sink(kept := KeptFeatures())
    for turn in ("first", "other weights", "another sink"):
        kept.firsts.clear()
        if turn == "other weights":
            engine.load_policy(read_folder_weights(embedded_folder()), 1)
        if turn == "another sink":
            engine.outbox.set_sink(kept := KeptFeatures())
        rollouts = generate(engine, REQUESTS)
        prompts = {tuple(request.prompt_tokens.tolist()) for request in REQUESTS}
        assert sorted(prompt for prompt, first in kept.firsts if first == 0) == sorted(prompts)
        assert all(first == len(prompt) - 1 for prompt, first in kept.firsts if first)
        num_rows = sum(len(prompt) - 1 for prompt in prompts) + sum(len(r.response_tokens) for r in rollouts)
        assert sum(copied) == num_rows and max(copied) == 20
        copied.clear()
