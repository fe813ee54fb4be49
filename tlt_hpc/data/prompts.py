"""Which prompts a step draws: a pure function of data, seed and step, whatever the ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import EMBEDDED_TASK, Config, ConfigError, DataSection
from tlt_hpc.data.gcd import MAX_NUMBER, Split, draw_from_split
from tlt_hpc.data.order import Draws, Refills
from tlt_hpc.data.reader import OverlongError, PromptReader, encode
from tlt_hpc.data.rows import RowError

CHECKED_ROWS = 10_000
"""Rows that are read before a run starts, those that it draws first: a second or two on one core."""
_NUM_CACHED_STEPS = 4
_REFILL_STRIDE = 4
"""Rows from one step's refills to the next's, in prompts of a step: more than a step usually draws."""


class PromptSource(Protocol):
    """Where the prompts of a step come from."""

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, in draw order."""
        ...

    def refill(self, step: int, count: int) -> list[Prompt]:
        """The first ``count`` of the prompts that replace a step's zero-variance groups; fewer are the beginning of
        more."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """Hashes of what the prompts are made from, by name: it may not change within a run. Reads all files again."""
        ...

    @property
    def warning(self) -> str:
        """What a user should know of rows that are left out, in one line; empty: nothing."""
        ...


def open_prompts(config: Config, tokenizer: Tokenizer, chat: ChatFormat | None = None) -> PromptSource:
    """The prompt source that the configuration names.

    Raises:
        ValueError: no such file, or a row that cannot be used, or a prompt over the limit.
    """
    count, limit = config.rollout.prompts_per_step, config.data.max_prompt_tokens
    if config.data.source != EMBEDDED_TASK:
        return FilePrompts(
            config.data, PromptReader(config.data, config.run.seed, tokenizer, chat), config.run.seed, count
        )
    longest = len(encode(tokenizer, f"gcd({MAX_NUMBER},{MAX_NUMBER})="))
    if longest > limit:
        raise ConfigError(
            f"data.max_prompt_tokens = {limit}, but prompts of {EMBEDDED_TASK!r} "
            f"have up to {longest} tokens; use data.max_prompt_tokens = {longest} or more"
        )
    return GcdPrompts(tokenizer, config.run.seed, count)


class GcdPrompts:
    """Fresh problems of the embedded task at every step, from one of its splits."""

    warning = ""

    def __init__(self, tokenizer: Tokenizer, seed: int, prompts_per_step: int, split: Split = "train") -> None:
        self._tokenizer, self._seed, self._count, self._split = tokenizer, seed, prompts_per_step, split

    def batch(self, step: int) -> list[Prompt]:
        return self._draw(f"gcd/{self._split}/{self._seed}/{step}", self._count)

    def refill(self, step: int, count: int) -> list[Prompt]:
        return self._draw(f"gcd/{self._split}/{self._seed}/{step}/refill", count)

    def fingerprints(self) -> Mapping[str, str]:
        return {"data.source": EMBEDDED_TASK}

    def _draw(self, seed: str, count: int) -> list[Prompt]:
        source = random.Random(seed)
        problems = [draw_from_split(source, self._split) for _ in range(count)]
        return [make_prompt(self._tokenizer, p.prompt, p.answer, "gcd") for p in problems]


class FilePrompts:
    """Rows of files or of a task, every epoch in an order of its own; a step may span two epochs."""

    def __init__(self, data: DataSection, reader: PromptReader, seed: int, prompts_per_step: int) -> None:
        """Reads the rows that are drawn first.

        Raises:
            ValueError: one of them cannot be used.
        """
        self._data, self._reader, self._count = data, reader, prompts_per_step
        self._filter = RowFilter(data, reader)
        keeps = self._filter.keeps if self._filter.leaves_out else None
        self._draws = Draws(len(reader), seed, keeps, data.source_name)
        self._refills = Refills(len(reader), seed, _REFILL_STRIDE * prompts_per_step, keeps)
        self._recent = lru_cache(maxsize=_NUM_CACHED_STEPS)(self._batch)
        self._draws.look_ahead(CHECKED_ROWS)
        if keeps is None:
            for row in sorted(set(self._draws.rows(0, min(len(reader), CHECKED_ROWS)))):
                self._filter.read(row)
        self.warning = self._filter.warning

    def batch(self, step: int) -> list[Prompt]:
        return list(self._recent(step))

    def refill(self, step: int, count: int) -> list[Prompt]:
        return list(map(self._filter.read, self._refills.rows(step, self._rows(step), count)))

    def fingerprints(self) -> Mapping[str, str]:
        return {
            "data.source": self._reader.rows.digest(),
            "chat template": self._reader.template_digest,
            "data.overlong": self._data.overlong,
            "data.broken_rows": self._data.broken_rows,
        }

    def _batch(self, step: int) -> tuple[Prompt, ...]:
        return tuple(map(self._filter.read, self._rows(step)))

    def _rows(self, step: int) -> list[int]:
        return self._draws.rows(step * self._count, (step + 1) * self._count)


class SharedPrompts:
    """A ``PromptSource`` that one rank of a node reads for all; ``batch`` and ``refill`` are collective over the node.

    Args:
        source: None on all ranks but the node's first.
        once: calls a function on the node's first rank and returns its result on all of them.
    """

    def __init__(self, source: PromptSource | None, warning: str, once: Callable[[Callable[[], Any]], Any]) -> None:
        self._source, self._once, self.warning = source, once, warning

    def batch(self, step: int) -> list[Prompt]:
        prompts: list[Prompt] = self._once(lambda: self._own.batch(step))
        return prompts

    def refill(self, step: int, count: int) -> list[Prompt]:
        prompts: list[Prompt] = self._once(lambda: self._own.refill(step, count))
        return prompts

    def fingerprints(self) -> Mapping[str, str]:
        """On a node's first rank alone, such as rank 0."""
        return self._own.fingerprints()

    @property
    def _own(self) -> PromptSource:
        assert self._source is not None, "only a node's first rank reads"
        return self._source


class RowFilter:
    """Keeps the rows that can be used, and counts the others; raises for those that the data may not leave out."""

    def __init__(self, data: DataSection, reader: PromptReader) -> None:
        self._data, self._reader = data, reader
        self._overlong: dict[int, RowError] = {}
        self._broken: dict[int, RowError] = {}
        self._num_seen = 0

    @property
    def leaves_out(self) -> bool:
        """Whether any row may be left out."""
        return self._data.overlong == "drop" or self._data.broken_rows == "skip"

    @property
    def warning(self) -> str:
        """How many rows have been left out so far, and the first of each kind, without the remedy; empty: none."""
        kinds = ((self._broken, "broken and skipped"), (self._overlong, "too long and dropped"))
        parts = []
        for rows, what in kinds:
            if rows:
                first = rows[min(rows)]
                parts.append(f"{len(rows):,} {what}, the first {first.where}: {first.reason.partition(';')[0]}")
        looked_at = f"of {self._num_seen:,} rows looked at"
        return f"data.source = {self._data.source_name!r}: {looked_at} {'; '.join(parts)}" if parts else ""

    def keeps(self, index: int) -> bool:
        """Whether a row can be used.

        Raises:
            RowError: it cannot, and may not be left out.
        """
        self._num_seen += 1
        try:
            self.read(index)
        except OverlongError as error:
            if self._data.overlong == "error":
                raise
            self._overlong[index] = error
        except RowError as error:
            if self._data.broken_rows == "error":
                raise
            self._broken[index] = error
        else:
            return True
        return False

    def read(self, index: int) -> Prompt:
        """A row's prompt.

        Raises:
            RowError: as ``PromptReader.read``, with what else would help.
        """
        try:
            return self._reader.read(index)
        except OverlongError:
            raise
        except RowError as error:
            raise RowError(error.where, f"{error.reason}, or set data.broken_rows = 'skip'") from None


def make_prompt(tokenizer: Tokenizer, text: str, answer: str, source: str) -> Prompt:
    """A prompt tokenized as it is: marks such as a chat template's are in the text or nowhere."""
    return Prompt(encode(tokenizer, text), text, answer, source)
