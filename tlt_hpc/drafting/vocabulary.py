"""The tokens to draft among: the most frequent ones. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def count_tokens(texts: Iterable[NDArray[np.int32]], num_tokens: int) -> NDArray[np.int64]:
    """How often each of ``num_tokens`` tokens occurs in texts [T]: [num_tokens]."""
    counts = np.zeros(num_tokens, np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=num_tokens)[:num_tokens]
    return counts


def most_frequent_tokens(counts: NDArray[np.int64], num: int, always: Sequence[int] = ()) -> NDArray[np.int64]:
    """The ``num`` most frequent ids (all where there are fewer) and those of ``always`` among them, ascending.

    An id of ``always`` that is not counted is none of the tokenizer's: a model may name such an end token.
    Where counts are equal, as of all that never occurred, lower ids come first: in a vocabulary of merged pairs these
    are the merges made first, of what is frequent in text at large.
    """
    ranked, first = counts.astype(np.float64), [token for token in set(always) if token < len(counts)]
    ranked[first] = np.inf
    order = np.argsort(-ranked, kind="stable")
    return np.sort(order[: max(num, len(first))])
