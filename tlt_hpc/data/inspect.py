"""Counts what a data set holds: rows, lengths, duplicates, broken rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tlt_hpc.data.reader import PromptReader
from tlt_hpc.data.rows import RowError


@dataclass
class SourceCounts:
    """The usable rows of one ``data_source``."""

    source: str
    lengths: list[int] = field(default_factory=list)
    """Tokens of each prompt; zeros without a tokenizer."""
    num_overlong: int = 0
    num_repeated: int = 0
    """Rows whose prompt is in an earlier row too."""
    num_unanswered: int = 0
    """Rows whose answer is an empty text."""
    num_unknown: int = 0
    """Rows whose prompt has characters that the tokenizer does not know."""


@dataclass(frozen=True)
class Inspection:
    """The contents of a data set."""

    num_rows: int
    sources: tuple[SourceCounts, ...]
    broken: tuple[RowError, ...]


def inspect(reader: PromptReader, max_prompt_tokens: int) -> Inspection:
    """Read every row.

    Raises:
        ConfigError: as ``PromptReader.read``.
    """
    sources: dict[str, SourceCounts] = {}
    broken, seen = list[RowError](), set[bytes]()
    for index in range(len(reader)):
        try:
            prompt = reader.read_unlimited(index)
            reader.check(index, prompt)
        except RowError as error:
            broken.append(error)
            continue
        counts = sources.setdefault(prompt.source, SourceCounts(prompt.source))
        digest = hashlib.blake2b(prompt.text.encode(), digest_size=12).digest()
        counts.lengths.append(len(prompt.tokens))
        counts.num_overlong += len(prompt.tokens) > max_prompt_tokens
        counts.num_repeated += digest in seen
        counts.num_unanswered += not prompt.answer
        counts.num_unknown += reader.is_partly_unknown(prompt)
        seen.add(digest)
    return Inspection(len(reader), tuple(sources[source] for source in sorted(sources)), tuple(broken))
