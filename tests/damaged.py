"""Files that lack their end, or in which a bit is flipped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path


def truncations(path: Path) -> Iterator[int]:
    """Cut the file at many places, one after another; yields the lengths."""
    whole = path.read_bytes()
    for length in [*range(0, 200), *range(200, len(whole), 397), *range(len(whole) - 50, len(whole))]:
        path.write_bytes(whole[:length])
        yield length


def flips(path: Path, count: int = 300) -> Iterator[int]:
    """Flip a bit at ``count`` places, one after another, the others as they were; yields the places."""
    whole, source = path.read_bytes(), random.Random(0)
    for place in source.sample(range(len(whole)), count):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        yield place
