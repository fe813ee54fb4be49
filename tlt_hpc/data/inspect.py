"""Counts what a data set holds: rows, lengths, duplicates, broken rows. Knows no table and no screen."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import Prompt
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.data.rows import RowError

SHOWN_ROWS = 20


@dataclass(frozen=True)
class SourceCounts:
    """The usable rows of one ``data_source``."""

    source: str
    lengths: NDArray[np.int64]
    """Tokens of the prompts [N]; zeros where there was no tokenizer."""
    num_overlong: int
    num_repeated: int
    """Rows whose prompt stands in an earlier row too."""
    num_unanswered: int
    """Rows whose answer is an empty text."""


@dataclass(frozen=True)
class Inspection:
    """What a data set holds."""

    num_rows: int
    sources: tuple[SourceCounts, ...]
    num_broken: int
    broken: tuple[RowError, ...]
    """The first of them."""


@dataclass
class _Tally:
    lengths: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def inspect(
    reader: PromptReader, max_prompt_tokens: int, watched: Callable[[range], Iterable[int]] = iter
) -> Inspection:
    """Read every row; ``watched`` may show how far it has come.

    Raises:
        ConfigError: as ``PromptReader.read``.
    """
    tallies: dict[str, _Tally] = {}
    broken: list[RowError] = []
    num_broken, seen = 0, set[bytes]()
    for index in watched(range(len(reader))):
        try:
            prompt = reader.read_unlimited(index)
        except RowError as error:
            num_broken += 1
            broken += [error] * (len(broken) < SHOWN_ROWS)
        else:
            _count(tallies.setdefault(prompt.source, _Tally()), prompt, max_prompt_tokens, seen)
    sources = tuple(_counts_of(source, tallies[source]) for source in sorted(tallies))
    return Inspection(len(reader), sources, num_broken, tuple(broken))


def _count(tally: _Tally, prompt: Prompt, max_prompt_tokens: int, seen: set[bytes]) -> None:
    mark = hashlib.blake2b(prompt.text.encode(), digest_size=12).digest()
    tally.lengths.append(len(prompt.tokens))
    tally.counts["overlong"] += len(prompt.tokens) > max_prompt_tokens
    tally.counts["repeated"] += mark in seen
    tally.counts["unanswered"] += not prompt.answer
    seen.add(mark)


def _counts_of(source: str, tally: _Tally) -> SourceCounts:
    counts, lengths = tally.counts, np.array(tally.lengths, np.int64)
    return SourceCounts(source, lengths, counts["overlong"], counts["repeated"], counts["unanswered"])
