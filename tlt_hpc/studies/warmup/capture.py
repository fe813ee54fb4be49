"""First phase of a warm-up: the target's features of all training texts, in parts that the replicas take in turn.

A part is decoded from scratch by one engine, whatever came before it, and its file appears whole or not at all: so a
part that a killed rank began is made again bit for bit, by any rank. Of the ranks that decode together the first writes
it. Where the bytes of a replica run out, the parts that it made are all there will be: that follows from their files,
and once training has begun from a list of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.leaving import FeatureSink
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.session import generate, make_engine, make_pulse
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.studies.warmup.parts import Parts
from tlt_hpc.studies.warmup.texts import Text

_MOST_FILLINGS = 4
"""Responses of a part, in fillings of the engine: its tail leaves rows empty, and a kill costs a part."""
_SIZE_FILE = "part_size.json"
_LIST_FILE = "parts.json"


class CaptureReporter(Protocol):
    """Who shows this phase."""

    def capturing(self, num_done: int, num_texts: int, num_tokens: int) -> None: ...


@dataclass(frozen=True)
class Part:
    """Texts ``start`` .. ``end - 1`` of the training texts, and where their features are."""

    index: int
    start: int
    end: int
    folder: RunFolder

    @property
    def file(self) -> Path:
        return self.folder.feature_cache(0, 0)


@BEAT.within(Phase.ROLLOUT)
def capture(parts: Parts, reporter: CaptureReporter) -> bool:
    """Make what is missing of the features; False where a stop vote came first. Collective."""
    all_parts, are_fixed = parts_of(parts)

    def shown(roster: Roster) -> None:
        if parts.world.rank == 0 and roster.round:
            _report(roster, len(parts.texts.training), reporter)

    with closing(make_pulse(parts.world, parts.replica, lambda: work.text_mark)) as pulse:
        work = CaptureWork(parts, all_parts, are_fixed, pulse)
        roster = generate(pulse, work, 0, shown)
    work.abandon()
    return not roster.stopping


def _report(roster: Roster, num_texts: int, reporter: CaptureReporter) -> None:
    left = sum(status.sequences_left for status in roster.statuses)
    reporter.capturing(num_texts - left, num_texts, sum(status.tokens for status in roster.statuses))


def parts_of(parts: Parts) -> tuple[list[Part], bool]:
    """The parts of the training texts, the same on every rank, and whether they are those that training began on.

    Before that they are all that there can be, the same at every start. Collective.
    """
    num_texts = len(parts.texts.training)
    size, fixed = parts.world.once(lambda: (_part_size(parts, num_texts), _fixed_parts(parts)))
    found = [
        Part(index, start, min(start + size, num_texts), RunFolder(parts.features / f"part-{index:05d}"))
        for index, start in enumerate(range(0, num_texts, size))
    ]
    return [part for part in found if fixed is None or part.index in fixed], fixed is not None


def fix_parts(parts: Parts, made: Sequence[Part]) -> None:
    """Let every later start train on these, whatever its ranks and their bytes would hold; on rank 0.

    Raises:
        WriteError: the disk refused.
    """
    with writing_beside(parts.features / _LIST_FILE) as part:
        part.write_text(json.dumps({"parts": [each.index for each in made]}) + "\n", encoding="utf-8")


def _fixed_parts(parts: Parts) -> set[int] | None:
    path = parts.features / _LIST_FILE
    return set(json.loads(path.read_text(encoding="utf-8"))["parts"]) if path.is_file() else None


def _part_size(parts: Parts, num_texts: int) -> int:
    """What the first start decided: later ones may have another number of ranks."""
    path = parts.features / _SIZE_FILE
    if path.is_file():
        return int(json.loads(path.read_text(encoding="utf-8"))["size"])
    size = part_size(num_texts, parts.replica.count, _MOST_FILLINGS * parts.settings.max_live)
    with writing_beside(path) as part:
        part.write_text(json.dumps({"size": size}) + "\n", encoding="utf-8")
    return size


def part_size(num_texts: int, num_replicas: int, most: int) -> int:
    """Texts of a part: ``most`` at most, and such that every replica has as many parts."""
    rounds = -(-num_texts // (num_replicas * most))
    return -(-num_texts // (num_replicas * rounds))


class CaptureWork:
    """The parts of this rank's replica, one after another."""

    def __init__(self, parts: Parts, all_parts: Sequence[Part], are_fixed: bool, pulse: Pulse) -> None:
        self._pulse = pulse
        self._parts, self._texts, self._replica = parts, parts.texts, parts.replica
        self._own, self._are_fixed = all_parts[parts.replica.number :: parts.replica.count], are_fixed
        self._num_bytes = parts.config.drafter.cache_bytes * parts.replica.size
        self._left = self._missing()
        self._num_tokens = 0
        self._open: tuple[FeatureCache | None, RolloutEngine] | None = None

    @property
    def has_work(self) -> bool:
        """Whether parts are left to make."""
        return self._open is not None or bool(self._left)

    def on_idle(self, roster: Roster) -> bool:
        """Nothing is done while other ranks generate."""
        return False

    def status(self) -> Status:
        """What this rank tells the others."""
        waiting = sum(part.end - part.start for part in self._left)
        left, tokens = waiting, self._num_tokens
        if self._open is not None:
            _, engine = self._open
            left, tokens = left + engine.num_unfinished, tokens + engine.num_tokens
        return Status(State.BUSY if self.has_work else State.IDLE, left, tokens, 0, self._parts.world.stop_requested)

    @property
    def text_mark(self) -> int:
        """The checksum of the text of the part under way; 0 without one."""
        return 0 if self._open is None else self._open[1].text_mark

    def step(self) -> None:
        """One round of decoding; begins and ends parts."""
        with self._pulse.progressing():
            self._step()

    def _step(self) -> None:
        if self._open is None:
            self._begin(self._left.pop(0))
        assert self._open is not None
        cache, engine = self._open
        engine.step()
        if not engine.has_work:
            if cache is not None:
                cache.end_step()
            self._num_tokens += engine.num_tokens
            self._open = None
            self._left = self._missing()

    def abandon(self) -> None:
        """Leave the part that is under way."""
        if self._open is not None:
            cache, engine = self._open
            engine.abort()
            if cache is not None:
                cache.abandon_step()
            self._open = None

    def _begin(self, part: Part) -> None:
        texts = self._texts.training[part.start : part.end]
        requests = requests_of(texts, part.start, self._parts.config.run.seed)
        engine = make_engine(self._parts.decoder, self._settings(texts), self._parts.served, self._replica)
        engine.calibrate(requests[:1])
        cache = self._begin_file(part) if self._replica.index == 0 else None
        if cache is not None:
            sink: FeatureSink = cache.begin_step(0, self._parts.decoder.version).append
            engine.feature_sink = naming_responses(sink, texts) if self._texts.are_logged else sink
        engine.submit(requests)
        self._open = cache, engine

    def _begin_file(self, part: Part) -> FeatureCache:
        size = self._parts.decoder.shape.hidden_size
        # a cache has half of its bytes for one step, and this one has no other
        cache = FeatureCache(part.folder, 0, self._parts.served.num_features, size, 2 * self._room(part), num_ranks=1)
        cache.recover()
        return cache

    def _settings(self, texts: Sequence[Text]) -> EngineSettings:
        """One strategy: what is chosen by the clock would not be chosen again by a second try."""
        base = replace(self._parts.settings, tie_guard=False, strategies=(OFF,))
        if not self._texts.are_logged:
            return base
        longest = max(text.num_tokens for text in texts)
        return replace(base, params=SamplingParams(1, temperature=0.0), max_prompt_tokens=longest)

    def _missing(self) -> list[Part]:
        """Own parts to make, as the replica's first rank finds them; collective over it."""
        found = self._found_missing() if self._replica.index == 0 else []
        numbers = [self._own.index(part) for part in found]
        count = self._replica.agree(len(numbers))
        return [self._own[self._replica.agree(numbers[i] if numbers else 0)] for i in range(count)]

    def _found_missing(self) -> list[Part]:
        """Own parts to make, but for those after which another would not fit the replica's budget of bytes."""
        missing, sizes = [], [0]
        for part in self._own:
            if not self._are_fixed and self._num_bytes - sum(sizes) < max(sizes):
                break
            if part.file.exists():
                sizes.append(part.file.stat().st_size)
            else:
                missing.append(part)
        return missing

    def _room(self, part: Part) -> int:
        """What the own parts before this one leave: those after it had the same, and it is to come to the same bits."""
        before = (other.file for other in self._own if other.index < part.index)
        used = sum(file.stat().st_size for file in before if file.exists())
        return max(1, self._num_bytes - used)


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
