"""When Python's garbage collector runs: not while libraries are imported, and never over what they leave."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside, nothing is collected, and what is imported is excluded from all later collections.

    Almost all that an import makes stays. Collections would take a fifth of the import's time, and each later one a
    third of a second: in the middle of a rollout all ranks would wait for it. Use it before there is a model: an engine
    that is reachable from an excluded object would never be collected. Not to be nested.
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if len(sys.modules) > before:
            gc.freeze()
