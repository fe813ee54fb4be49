"""Answers and verdicts: what a rank sends to its reward server and receives from it; and documents on a byte stream."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO, Any

MAX_CHARACTERS = 4_000_000
"""Longest response that a worker judges: a longer one has reward 0. 32,768 tokens make a thirtieth of it."""
MEMORY_BYTES = 2**30
"""For one response, in addition to the memory of an idle worker: beyond it the reward is 0."""
PART, WITH_PARTS = "reward/part/", "reward/with_parts"
"""Among a rank's figures: how the means of the parts of its rewards begin, and the number of rewards in these."""


class Failure(StrEnum):
    """The reason why an answer has reward 0, by its own fault or not; counted in ``reward/failed/<reason>``."""

    CPU = "cpu"
    """It took more CPU time than it may."""
    MEMORY = "memory"
    """It took more memory than it may."""
    WALL = "wall"
    """It met the far limit in seconds of the clock."""
    ASLEEP = "asleep"
    """The program hung: it used no CPU time."""
    OUTPUT = "output"
    """The program wrote more than any right answer has."""
    SIZE = "size"
    """The response is longer than ``MAX_CHARACTERS``."""
    CRASH = "crash"
    """The process that judged it, or the program, was killed by a signal."""
    ERROR = "error"
    """The user's function raised, or returned no number, or one that no reward can be."""
    UNREADABLE = "unreadable"
    """The data's answer cannot be read as its kind demands."""
    SERVER = "server"
    """The server of rewards died twice while it had nothing but this answer."""


OF_PROGRAMS = frozenset({Failure.CPU, Failure.MEMORY, Failure.ASLEEP, Failure.OUTPUT, Failure.CRASH})
"""Failures of a program that a model wrote: it is a wrong answer, and reward 0 is its judgement."""

OF_RESPONSES = OF_PROGRAMS | {Failure.SIZE}
"""Failures that a response can cause, not of functions: its answer counts 0, its other parts count."""


class JudgeError(Exception):
    """An error that keeps answers from being judged and that the user can fix; its text has the remedy."""


@dataclass(frozen=True)
class Answer:
    """A response's text, with what it is judged by: ``truth`` and ``extra`` (JSON: ``extra_info``) are the data's."""

    kind: str
    source: str
    text: str
    truth: str
    extra: str = ""
    opening: str = ""
    """The first tag of the form, where the prompt ends with it: chat templates may begin the reasoning."""
    is_finished: bool = True
    """False: the response was cut off at its largest length."""


@dataclass(frozen=True)
class Verdict:
    """A reward, and why the answer was not judged if it was not; ``detail`` is one line for the user."""

    reward: float
    failure: Failure | None = None
    detail: str = ""
    read: str = field(default="", compare=False)
    """The text that was read as the response's answer; empty: none, or the kind reads none."""
    is_disputed: bool = field(default=False, compare=False)
    """True: one comparison found it equal and the other did not, so that the reward is 0."""
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The terms that the reward was made from, by name, where ``reward.weights`` are given."""
    seconds: float = field(default=0.0, compare=False)
    """Wall-clock time that it took to judge."""

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Verdict:
        """The verdict of a dict that ``asdict`` made."""
        failure = Failure(tree["failure"]) if tree["failure"] is not None else None
        return cls(**{**tree, "reward": float(tree["reward"]), "failure": failure})


def parse_accepted_answers(truth: str) -> list[str]:
    """The answers of a row, each of which is right: those of a JSON list of texts, else the text itself."""
    if truth.startswith('["'):
        try:
            tree = json.loads(truth)
        except (ValueError, RecursionError):
            return [truth]
        if isinstance(tree, list) and all(isinstance(each, str) for each in tree):
            return tree
    return [truth]


# -- JSON documents on a byte stream between two processes, each preceded by its length -------------------------------

_LENGTH = struct.Struct("<Q")
RECEIVED_BYTES = 2**20
"""Read from a socket or pipe at once."""


def encode_frame(tree: Any) -> bytes:
    """A document with its length before it."""
    payload = json.dumps(tree).encode()
    return _LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Collects bytes as they arrive and returns whole documents."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[Any]:
        """The documents that these bytes complete."""
        self._bytes += received
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            payload = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield json.loads(payload)


def write_frame(stream: IO[bytes], tree: Any) -> None:
    """Write a document and flush."""
    stream.write(encode_frame(tree))
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next document; None at the end of the stream, or if it ends within a document."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return json.loads(payload) if len(payload) == length else None
