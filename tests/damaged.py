"""Files that lack their end, or in which a bit is flipped."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tlt_hpc.storage.hdf5 import DamagedFile


def assert_damage_is_noticed(path: Path, check: Callable[[], None], message: str) -> None:
    """Cut the file at many places, then flip a bit at 300, one after another.

    ``check`` reads the file and asserts that it has what was written. It must raise ``DamagedFile`` with ``message``
    for each cut; a flipped bit may also lie in unused space and change nothing.
    """
    check()
    whole, source, num_noticed = path.read_bytes(), random.Random(0), 0
    for length in [*range(0, 200), *range(200, len(whole), 397), *range(len(whole) - 50, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile, match=message):
            check()
    for place in source.sample(range(len(whole)), 300):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << source.randrange(8)
        path.write_bytes(flipped)
        try:
            check()
        except DamagedFile:
            num_noticed += 1
    assert num_noticed > 100
