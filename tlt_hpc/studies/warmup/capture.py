"""First phase of a warm-up: the target's features of all training texts, in parts that are sharded over the replicas.

Each part is decoded from scratch and its file appears only when it is complete, so a part that a killed rank began is
made again bit for bit, by any rank. Of the ranks that decode together the first writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.feature_outbox import FeatureSink
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import write_json
from tlt_hpc.studies.warmup.parts import Warmup
from tlt_hpc.studies.warmup.texts import Text

_MAX_FILLINGS = 4
"""Responses of a part, in fillings of the engine: its tail leaves rows empty, and a kill costs a part."""
_SIZE_FILE = "part_size.json"


@dataclass(frozen=True)
class CapturePart:
    """Some of the training texts, the first of them number ``start``, and where their features are written."""

    start: int
    texts: tuple[Text, ...]
    folder: RunFolder

    @property
    def num_bytes(self) -> int:
        """Bytes of its file; 0 without one."""
        file = self.folder.feature_cache(0, 0)
        return file.stat().st_size if file.exists() else 0


@BEAT.in_phase(Phase.ROLLOUT)
def capture_features_all_ranks(warmup: Warmup, shown: Callable[[int, int], None]) -> bool:
    """Write the missing parts, one of each replica at a time, until all ranks' bytes for features are used. Collective.

    Returns False if a stop vote came first.

    Args:
        shown: called on rank 0 with the numbers of texts that are done and of all.
    """
    parts, num_replicas = agree_on_capture_parts(warmup), warmup.replica.count
    engine = warmup.make_engine(capture_settings(warmup), warmup.engine_drafter)
    warmup.calibrate_with_own_keys(engine, capture_requests(parts[0], warmup.config.run.seed)[:1])
    max_bytes, used, largest = warmup.config.drafter.cache_bytes * warmup.world.size, 0, 0
    for first in range(0, len(parts), num_replicas):
        block = parts[first : first + num_replicas]
        num_bytes = capture_block(warmup, engine, block, (max_bytes - used) // num_replicas, shown)
        if num_bytes is None:
            return False
        used, largest = used + num_bytes, max(largest, num_bytes)
        if used + largest > max_bytes:  # no room for as much again
            break
    return True


def capture_block(
    warmup: Warmup,
    engine: RolloutEngine,
    block: Sequence[CapturePart],
    max_bytes: int,
    shown: Callable[[int, int], None],
) -> int | None:
    """Write what is missing of one part for each replica, of ``max_bytes`` each at most. Collective.

    Returns the bytes of all of them; None if a stop vote came first.
    """
    world, replica = warmup.world, warmup.replica
    own = block[replica.number] if replica.number < len(block) else None

    def find_sizes() -> list[int]:  # each file is looked for by the first rank of its replica, which writes it
        return world.allgather(own.num_bytes if own else 0)[:: replica.size][: len(block)]

    def on_round(roster: Roster) -> None:
        if world.rank == 0 and roster.round:
            end = block[-1].start + len(block[-1].texts)
            shown(end - sum(status.sequences_left for status in roster.statuses), len(warmup.texts.training))

    sizes = find_sizes()
    if all(sizes):
        return sum(sizes)
    part = own if own and not sizes[replica.number] else None
    cache = begin_file(warmup, engine, part, max_bytes) if part and replica.index == 0 else None
    requests = capture_requests(part, warmup.config.run.seed) if part else []
    roster = warmup.generate(engine, requests, shown=on_round)
    has_finished = engine.abort() == 0
    engine.take_finished_rollouts()
    engine.outbox.set_sink(None)
    if cache is not None and has_finished:
        cache.end_step(durable=True)  # a later start takes it as it is
    elif cache is not None:
        cache.abandon_step()
    return None if roster.has_stop_vote else sum(find_sizes())


def begin_file(warmup: Warmup, engine: RolloutEngine, part: CapturePart, max_bytes: int) -> FeatureCache:
    """Open the file of a part, direct the engine's features to it, and return its cache."""
    # a cache has half of its bytes for one step, and this one has no other
    shape = warmup.engine_drafter.num_features, warmup.decoder.shape.hidden_size
    cache = FeatureCache(part.folder, 0, *shape, max(2, 2 * max_bytes), num_ranks=1)
    cache.remove_parts()
    sink: FeatureSink = cache.begin_step(0, warmup.decoder.version).append
    engine.outbox.set_sink(correcting_sink(sink, part.texts) if warmup.texts.are_logged else sink)
    return cache


def agree_on_capture_parts(warmup: Warmup) -> list[CapturePart]:
    """Return the parts of the training texts, the same on every rank and at every start. Collective; rank 0 writes."""
    texts = warmup.texts.training
    size = warmup.world.run_first_and_broadcast(lambda: _read_or_write_part_size(warmup, len(texts)))
    return [
        CapturePart(start, texts[start : start + size], RunFolder(warmup.features_folder / f"part-{start // size:05d}"))
        for start in range(0, len(texts), size)
    ]


def _read_or_write_part_size(warmup: Warmup, num_texts: int) -> int:
    """Return the size that the first start decided: later ones may have another number of ranks."""
    path = warmup.features_folder / _SIZE_FILE
    if path.is_file():
        return int(json.loads(path.read_text(encoding="utf-8"))["size"])
    size = part_size(num_texts, warmup.replica.count, _MAX_FILLINGS * warmup.config.rollout.max_live)
    write_json(path, {"size": size})
    return size


def part_size(num_texts: int, num_replicas: int, most: int) -> int:
    """Return the texts of a part: ``most`` at most, and such that every replica has as many parts."""
    rounds = -(-num_texts // (num_replicas * most))
    return -(-num_texts // (num_replicas * rounds))


def capture_settings(warmup: Warmup) -> EngineSettings:
    """Return an engine's settings with one strategy: a choice by measured times would differ at a second try."""
    base = replace(warmup.engine_settings(), tie_guard=False, strategies=(OFF,))
    if not warmup.texts.are_logged:
        return base
    longest = max(len(text.tokens) for text in warmup.texts.training)
    return replace(base, params=SamplingParams(1, temperature=0.0), max_prompt_tokens=longest)


def capture_requests(part: CapturePart, seed: int) -> list[Request]:
    """Return the engine's requests for a part's texts: a prompt to answer, or a text to read but for its last token.

    Texts that are alike up to there are read once.
    """
    requests, read = [], set[bytes]()
    for draw, text in enumerate(part.texts, part.start):
        if text.response is None or text.tokens.tobytes() not in read:
            read.add(text.tokens.tobytes())
            requests.append(Request(SampleKey(seed, Stream.WARMUP, 0, draw, 0), text.tokens))
    return requests


def correcting_sink(sink: FeatureSink, texts: Sequence[Text]) -> FeatureSink:
    """Return a sink of texts read as prompts, which corrects where the response begins and what its last token is.

    The engine reads all of a text but the last token, and samples that: the features are those of the text.
    """
    known: dict[bytes, list[Text]] = {}
    for text in texts:
        known.setdefault(text.tokens.tobytes(), []).append(text)

    def put(tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int) -> None:
        assert first == 0, "a text is read once"
        for text in known.pop(tokens[:prompt_length].tobytes()):
            assert text.response is not None
            sink(np.concatenate([text.prompt, text.response]), len(text.prompt), features, 0)

    return put
