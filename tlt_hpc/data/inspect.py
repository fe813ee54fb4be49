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
    never_right: list[str] = field(default_factory=list)
    """Rows to which no response can be right, each with its place and what is wrong."""


@dataclass(frozen=True)
class Inspection:
    """The contents of a data set."""

    num_rows: int
    sources: tuple[SourceCounts, ...]
    broken: tuple[RowError, ...]

    @property
    def is_of_use(self) -> bool:
        """True if no row is broken, and a response to some row can be right."""
        num_right = sum(len(counts.lengths) - len(counts.never_right) for counts in self.sources)
        return num_right > 0 and not self.broken


def inspect_data_set(reader: PromptReader, max_prompt_tokens: int) -> Inspection:
    """Read every row.

    Raises:
        ConfigError: as ``PromptReader.read``.
    """
    sources: dict[str, SourceCounts] = {}
    broken, seen = list[RowError](), set[bytes]()
    for index in range(len(reader)):
        try:
            prompt = reader.read_unlimited(index)
            problem = reader.find_row_problem(index, prompt)
        except RowError as error:
            broken.append(error)
            continue
        counts = sources.setdefault(prompt.source, SourceCounts(prompt.source))
        digest = hashlib.blake2b(prompt.text.encode(), digest_size=12).digest()
        counts.lengths.append(len(prompt.tokens))
        counts.num_overlong += len(prompt.tokens) > max_prompt_tokens
        counts.num_repeated += digest in seen
        counts.num_unanswered += not prompt.answer
        counts.num_unknown += reader.has_unknown_characters(prompt)
        counts.never_right += [problem] * bool(problem)
        seen.add(digest)
    return Inspection(len(reader), tuple(sources[source] for source in sorted(sources)), tuple(broken))
