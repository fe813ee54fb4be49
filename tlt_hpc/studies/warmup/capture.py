"""First phase of a warm-up: the target's features of all training texts, in parts that are sharded over the replicas.

A part is decoded from scratch by one engine, whatever came before it, and its file appears whole or not at all: so a
part that a killed rank began is made again bit for bit, by any rank. Of the ranks that decode together the first writes
it. If a replica's budget of bytes runs out, the parts that it made are all there will be: that follows from their
files, and once training has begun from a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.mpi.roster import Roster
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
_LIST_FILE = "parts.json"


class CaptureReporter(Protocol):
    """Who shows this phase."""

    def capturing(self, num_done: int, num_texts: int, num_tokens: int) -> None: ...


@dataclass(frozen=True)
class CapturePart:
    """Texts ``start`` .. ``end - 1`` of the training texts, and where their features are."""

    index: int
    start: int
    end: int
    folder: RunFolder

    @property
    def file(self) -> Path:
        return self.folder.feature_cache(0, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of its file; 0 without one."""
        return self.file.stat().st_size if self.file.exists() else 0


@BEAT.within(Phase.ROLLOUT)
def capture(warmup: Warmup, reporter: CaptureReporter) -> bool:
    """Make what is missing of the features, a part of each replica at a time; False if a stop vote came first.

    Collective.
    """
    world, replica = warmup.world, warmup.replica
    every, are_fixed = parts_of(warmup)
    own = every[replica.number :: replica.count]
    num_texts, num_tokens = len(warmup.texts.training), 0
    while True:
        # files are looked for by the first rank of each replica, which writes them
        missing = world.allgather(missing_parts(warmup, own, are_fixed))[:: replica.size]
        if not any(missing):
            return True
        num_waiting = sum(part.end - part.start for part in chain.from_iterable(parts[1:] for parts in missing))

        def shown(roster: Roster, num_waiting: int = num_waiting, before: int = num_tokens) -> None:
            if world.rank == 0 and roster.round:
                left = num_waiting + sum(status.sequences_left for status in roster.statuses)
                tokens = before + sum(status.tokens for status in roster.statuses)
                reporter.capturing(num_texts - left, num_texts, tokens)

        part = next(iter(missing[replica.number]), None)
        roster = capture_part(warmup, part, own, shown)
        if roster.stopping:
            return False
        num_tokens += sum(status.tokens for status in roster.statuses)


def capture_part(
    warmup: Warmup, part: CapturePart | None, own: Sequence[CapturePart], shown: Callable[[Roster], None]
) -> Roster:
    """Make a part's features, or wait without one for the other replicas; returns the last roster. Collective."""
    texts = warmup.texts.training[part.start : part.end] if part else ()
    engine = warmup.make_engine(settings_of(warmup, texts), warmup.served)
    requests = requests_of(texts, part.start, warmup.config.run.seed) if part else []
    cache = None
    if part is not None:
        engine.calibrate(requests[:1])
        if warmup.replica.index == 0:
            cache = begin_file(warmup, part, own)
            sink: FeatureSink = cache.begin_step(0, warmup.decoder.version).append
            engine.feature_sink = naming_responses(sink, texts) if warmup.texts.are_logged else sink
    roster = warmup.generate(engine, requests, shown=shown)
    has_finished = engine.abort() == 0
    if cache is not None and has_finished:
        cache.end_step()
    elif cache is not None:
        cache.abandon_step()
    return roster


def parts_of(warmup: Warmup) -> tuple[list[CapturePart], bool]:
    """The parts of the training texts, the same on every rank, and whether they are those that training began on.

    Before that they are all that there can be, the same at every start. Collective.
    """
    num_texts = len(warmup.texts.training)
    size, fixed = warmup.world.once(lambda: (_part_size(warmup, num_texts), _fixed_parts(warmup)))
    found = [
        CapturePart(index, start, min(start + size, num_texts), RunFolder(warmup.features / f"part-{index:05d}"))
        for index, start in enumerate(range(0, num_texts, size))
    ]
    return [part for part in found if fixed is None or part.index in fixed], fixed is not None


def fix_parts(warmup: Warmup, made: Sequence[CapturePart]) -> None:
    """Let every later start train on these, whatever its ranks and their bytes would hold; on rank 0.

    Raises:
        WriteError: the disk refused.
    """
    write_json(warmup.features / _LIST_FILE, {"parts": [each.index for each in made]})


def _fixed_parts(warmup: Warmup) -> set[int] | None:
    path = warmup.features / _LIST_FILE
    return set(json.loads(path.read_text(encoding="utf-8"))["parts"]) if path.is_file() else None


def _part_size(warmup: Warmup, num_texts: int) -> int:
    """What the first start decided: later ones may have another number of ranks."""
    path = warmup.features / _SIZE_FILE
    if path.is_file():
        return int(json.loads(path.read_text(encoding="utf-8"))["size"])
    size = part_size(num_texts, warmup.replica.count, _MAX_FILLINGS * warmup.config.rollout.max_live)
    write_json(path, {"size": size})
    return size


def part_size(num_texts: int, num_replicas: int, most: int) -> int:
    """Texts of a part: ``most`` at most, and such that every replica has as many parts."""
    rounds = -(-num_texts // (num_replicas * most))
    return -(-num_texts // (num_replicas * rounds))


def begin_file(warmup: Warmup, part: CapturePart, own: Sequence[CapturePart]) -> FeatureCache:
    """The cache that a part's features go to, within what the replica's parts before it left of its bytes.

    Those after it had the same room, and a part that is made again must come to the same bits.
    """
    used = sum(other.num_bytes for other in own if other.index < part.index)
    room = max(1, max_bytes(warmup) - used)
    size, num_features = warmup.decoder.shape.hidden_size, warmup.served.num_features
    # a cache has half of its bytes for one step, and this one has no other
    cache = FeatureCache(part.folder, 0, num_features, size, 2 * room, num_ranks=1)
    cache.remove_parts()
    return cache


def max_bytes(warmup: Warmup) -> int:
    """A replica's budget of bytes for features."""
    return warmup.config.drafter.cache_bytes * warmup.replica.size


def settings_of(warmup: Warmup, texts: Sequence[Text]) -> EngineSettings:
    """One strategy: what is chosen by measured times would not be chosen again by a second try."""
    base = replace(warmup.settings(), tie_guard=False, strategies=(OFF,))
    if not warmup.texts.are_logged:
        return base
    longest = max((text.num_tokens for text in texts), default=1)
    return replace(base, params=SamplingParams(1, temperature=0.0), max_prompt_tokens=longest)


def missing_parts(warmup: Warmup, own: Sequence[CapturePart], are_fixed: bool) -> list[CapturePart]:
    """A replica's parts to make, except those after which another would not fit its budget of bytes."""
    missing, sizes = [], [0]
    for part in own:
        if not are_fixed and max_bytes(warmup) - sum(sizes) < max(sizes):
            break
        if part.num_bytes:
            sizes.append(part.num_bytes)
        else:
            missing.append(part)
    return missing


def requests_of(texts: Sequence[Text], start: int, seed: int) -> list[Request]:
    """The texts as the engine takes them: a prompt to answer, or a text to read but for its last token.

    Texts that are alike up to there are read once.
    """
    requests, read = [], set[bytes]()
    for draw, text in enumerate(texts, start):
        tokens = text.prompt if text.response is None else np.concatenate([text.prompt, text.response[:-1]])
        if text.response is None or tokens.tobytes() not in read:
            read.add(tokens.tobytes())
            requests.append(Request(SampleKey(seed, Stream.WARMUP, 0, draw, 0), tokens))
    return requests


def naming_responses(sink: FeatureSink, texts: Sequence[Text]) -> FeatureSink:
    """A sink of texts that were read as prompts, which puts right where the response begins and what its last token is.

    The engine reads all of a text but the last token, and samples that: the features are those of the text.
    """
    known: dict[bytes, list[Text]] = {}
    for text in texts:
        assert text.response is not None
        known.setdefault(np.concatenate([text.prompt, text.response[:-1]]).tobytes(), []).append(text)

    def put(tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int) -> None:
        assert first == 0, "a text is read once"
        for text in known.pop(tokens[:prompt_length].tobytes()):
            assert text.response is not None
            sink(np.concatenate([text.prompt, text.response]), len(text.prompt), features, 0)

    return put
