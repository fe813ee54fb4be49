"""The tokens that a drafter with a head of its own drafts among: those that responses are made of. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.feature_cache import Document


def count_tokens(documents: Iterable[Document], num_tokens: int) -> NDArray[np.int64]:
    """How often each of ``num_tokens`` tokens stands in the documents' responses, [num_tokens]."""
    counts = np.zeros(num_tokens, np.int64)
    for document in documents:
        counts += np.bincount(document.tokens[document.prompt_length :], minlength=num_tokens)
    return counts


def most_frequent_tokens(counts: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """The ids of the ``num`` largest of ``counts`` [V], ascending; of equal counts the lower id goes first.

    Raises:
        ValueError: ``num`` is not between 1 and V.
    """
    if not 1 <= num <= len(counts):
        raise ValueError(f"a draft vocabulary of {num} of {len(counts)} tokens; use 1 to {len(counts)}")
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:num]).astype(np.int64)
