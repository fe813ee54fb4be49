"""JSON documents on a byte stream between two processes, each preceded by its length."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


def pack(tree: Any) -> bytes:
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
    stream.write(pack(tree))
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next document; None at the end of the stream, or if it ends within a document."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return json.loads(payload) if len(payload) == length else None
