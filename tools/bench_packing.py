"""How many samples a second the drafter learns from, packed without padding against padded to the longest.

    OMP_NUM_THREADS=1 python tools/bench_packing.py                 # lengths of the embedded model's responses
    OMP_NUM_THREADS=1 python tools/bench_packing.py --form eagle3

Both ways take the same documents, the same loss and the same update, in interleaved pairs; a padded micro-step is made
of rows of one length, as a batch of a tensor is, and its padding counts in no mean. The losses are compared as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import EMBEDDED_MODEL, DrafterSection
from tlt_hpc.data.gcd import draw_from_split
from tlt_hpc.drafting.loss import LossSettings, drafter_loss
from tlt_hpc.drafting.packing import PackedBatch, pack, whole
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.folder import find_model, folder_weights, load_tokenizer
from tlt_hpc.models.layers import Attend
from tlt_hpc.models.shape import read_shape
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.storage.documents import Document

CPU = torch.device("cpu")
NUM_TOKENS = 20
"""Of the embedded model's vocabulary, that its tokenizer knows."""


def roll_out(decoder: Decoder, num: int) -> list[tuple[np.ndarray, int]]:
    """Tokens and prompt length of ``num`` responses of the embedded model, at temperature 1."""
    tokenizer, source = load_tokenizer(find_model(EMBEDDED_MODEL)), random.Random("packing")
    requests = []
    for draw in range(num):
        ids = tokenizer.encode(draw_from_split(source, "supervised").prompt).ids
        requests.append(Request(SampleKey(0, Stream.TRAIN, 0, draw, 0), np.array(ids, np.int32)))
    settings = EngineSettings(SamplingParams(512), NUM_TOKENS, (1,), 64, 16, tie_guard=False, strategies=(OFF,))
    engine = RolloutEngine(decoder, settings)
    engine.submit(requests)
    while engine.has_work:
        engine.step()
    return [(np.concatenate([r.prompt_tokens, r.response_tokens]), len(r.prompt_tokens)) for r in engine.collect()]


def with_features(texts: Sequence[tuple[np.ndarray, int]], decoder: Decoder, num_layers: int) -> list[Document]:
    """Documents of these texts with random features: what they say costs nothing."""
    source = np.random.default_rng(0)
    size = decoder.shape.hidden_size
    bits = [source.standard_normal((len(tokens) - 1, num_layers, size), np.float32) for tokens, _ in texts]
    as_bf16 = [torch.from_numpy(values).bfloat16().view(torch.uint16).numpy() for values in bits]
    return [Document(tokens, prompt, f, 0) for (tokens, prompt), f in zip(texts, as_bf16, strict=True)]


def padded(batch: PackedBatch) -> PackedBatch:
    """The same documents as rows of the longest one's length; what is padded predicts nothing."""
    longest, rows = max(batch.lengths), len(batch.lengths)
    inside = torch.arange(longest).unsqueeze(0) < torch.tensor(batch.lengths).unsqueeze(1)

    def spread(values: Tensor) -> Tensor:
        out = values.new_zeros(rows, longest, *values.shape[1:])
        out[inside] = values
        return out.flatten(0, 1)

    documents = torch.arange(rows).repeat_interleave(longest)
    positions = torch.arange(longest).repeat(rows)
    return replace(
        batch,
        next_tokens=spread(batch.next_tokens),
        features=spread(batch.features),
        wanted=spread(batch.wanted),
        positions=positions,
        documents=documents,
        counts=spread(batch.counts),
        lengths=(longest,) * rows,
    )


def attend_rows(num_rows: int) -> Attend:
    """Causal attention of rows of one length, all in one call."""

    def attend(layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        key, value = key_value.chunk(2, 1)
        q, k, v = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(query), -1)

    return attend


def padded_loss(drafter: Drafter, batch: PackedBatch, decoder: Decoder, settings: LossSettings) -> Tensor:
    """The first step's loss of a padded batch, written for rows of one length."""
    embedded = F.embedding(batch.next_tokens, decoder.embedding)
    attend = attend_rows(len(batch.lengths))
    states = drafter(embedded, drafter.fuse(batch.features), batch.positions, attend)[batch.counts]
    wanted = batch.wanted[batch.counts]
    target = F.linear(wanted, decoder.head)
    if drafter.token_ids is None:
        token = F.cross_entropy(F.linear(states, decoder.head), target.softmax(-1))
        return settings.feature_weight * F.smooth_l1_loss(states, wanted) + settings.token_weight * token
    return F.cross_entropy(drafter.logits(states), target[:, drafter.token_ids].softmax(-1))


def timed(drafter: Drafter, loss_of: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward pass, and the loss."""
    drafter.zero_grad()
    start = time.perf_counter()
    loss = loss_of()
    loss.backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of a packed micro-step (default 2048)")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs of micro-steps (default 15)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = find_model(EMBEDDED_MODEL)
    decoder = Decoder(read_shape(folder), torch.float32, CPU)
    decoder.load(folder_weights(folder), 0)
    ids = torch.arange(NUM_TOKENS) if arguments.form == "eagle3" else None
    drafter = make_drafter(decoder.shape, 0, torch.float32, CPU, ids)
    documents = with_features(roll_out(decoder, arguments.responses), decoder, drafter.num_features)
    settings = replace(LossSettings.of(DrafterSection(form=arguments.form)), num_steps=1)
    lengths = [len(document.tokens) for document in documents]
    print(
        f"{len(lengths)} responses with prompts: median {statistics.median(lengths):.0f}, longest {max(lengths)} tokens"
    )
    source, rates = random.Random(0), list[tuple[float, float]]()
    for pair in range(arguments.pairs + 1):
        source.shuffle(documents)
        ends = np.cumsum([len(document.tokens) - 2 for document in documents])
        chosen = documents[: int(np.searchsorted(ends, arguments.tokens, side="right"))]
        batch = pack([whole(document) for document in chosen], CPU)
        rows = padded(batch)
        policy = decoder.embedding, decoder.head
        mine, loss = timed(drafter, partial(drafter_loss, drafter, batch, *policy, settings))
        theirs, other = timed(drafter, partial(padded_loss, drafter, rows, decoder, settings))
        assert abs(loss - other) < 1e-4, f"{loss} packed, {other} padded"
        if pair:  # the first warms up
            rates.append((len(chosen) / mine, len(chosen) / theirs))
    packed, others = (statistics.median(rate[i] for rate in rates) for i in (0, 1))
    ratio = statistics.median(a / b for a, b in rates)
    print(f"{arguments.form}: packed {packed:.0f}, padded {others:.0f} samples/s; {ratio:.2f} times (median of pairs)")


if __name__ == "__main__":
    sys.exit(ending("bench_packing", main))
