"""Which prompts a step draws: a pure function of data, seed and step, whatever the ranks. Knows no model or reward."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import EMBEDDED_TASK, TASK_PREFIX, Config, ConfigError, DataSection
from tlt_hpc.data.chat import read_template
from tlt_hpc.data.curriculum import CurriculumOrder, RowFacts
from tlt_hpc.data.files import find_files, open_rows, stamp_of
from tlt_hpc.data.gcd import MAX_NUMBER, Split, draw_from_split
from tlt_hpc.data.jsonl import digest_of
from tlt_hpc.data.order import AllRows, Draws, GoodRows, shuffled
from tlt_hpc.data.reader import OverlongError, PromptReader, encode
from tlt_hpc.data.refill import Refills
from tlt_hpc.data.rows import RowError
from tlt_hpc.data.schema import difficulty_of, wanted_columns

CHECKED_ROWS = 10_000
"""Rows that are read before a run starts, those that it draws first: a second or two on one core."""
_KEPT_STEPS = 4
_REFILL_STRIDE = 4
"""Rows from one step's refills to the next's, in prompts of a step: more than a step usually draws."""

logger = logging.getLogger(__name__)


class PromptSource(Protocol):
    """Where the prompts of a step come from."""

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of a step, in draw order."""
        ...

    def refill(self, step: int, count: int) -> list[Prompt]:
        """The first ``count`` of the prompts that replace a step's dead groups: fewer are a beginning of more."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """What the prompts are made from, by name: what may not change while a run goes on. Reads all files again."""
        ...

    @property
    def warning(self) -> str:
        """What a user should know of rows that are left out, in one line; empty: nothing."""
        ...


def open_prompts(config: Config, tokenizer: Tokenizer, chat: ChatFormat | None = None) -> PromptSource:
    """The prompt source that the configuration names.

    Files that stay as they are are read and checked once in a process, whoever asks.

    Raises:
        ValueError: no such file, or a row that cannot be used, or a prompt over the limit.
    """
    if config.data.source == EMBEDDED_TASK:
        return _open_gcd(config, tokenizer)
    stamps = tuple(map(stamp_of, _files_of(config.data)))
    count = config.rollout.prompts_per_step
    return _open(config.data.model_dump_json(), config.run.seed, count, tokenizer, chat or ChatFormat(), stamps)


def open_reader(
    data: DataSection, seed: int, tokenizer: Tokenizer | None, chat: ChatFormat | None = None
) -> PromptReader:
    """The prompts of ``data`` row by row, in the order of the files: for evaluation and inspection.

    Raises:
        ConfigError: no such file, no such column, or no template.
    """
    rows = open_rows(data, seed, wanted_columns(data))
    return PromptReader(data, rows, tokenizer, read_template(data, chat or ChatFormat()))


class GcdPrompts:
    """Fresh problems of the embedded task at every step, from one of its splits."""

    warning = ""

    def __init__(self, tokenizer: Tokenizer, seed: int, prompts_per_step: int, split: Split = "train") -> None:
        self._tokenizer, self._seed, self._count, self._split = tokenizer, seed, prompts_per_step, split

    def batch(self, step: int) -> list[Prompt]:
        return self._draw(f"gcd/{self._split}/{self._seed}/{step}", self._count)

    def refill(self, step: int, count: int) -> list[Prompt]:
        return self._draw(f"gcd/{self._split}/{self._seed}/{step}/refill", count)

    def _draw(self, seed: str, count: int) -> list[Prompt]:
        source = random.Random(seed)
        problems = [draw_from_split(source, self._split) for _ in range(count)]
        return [make_prompt(self._tokenizer, p.prompt, p.answer, "gcd") for p in problems]

    def fingerprints(self) -> Mapping[str, str]:
        return {"data.source": EMBEDDED_TASK}


class FilePrompts:
    """Rows of files or of a task, every epoch in an order of its own; a step may span two epochs."""

    def __init__(self, data: DataSection, reader: PromptReader, seed: int, prompts_per_step: int) -> None:
        """Reads the rows that are drawn first.

        Raises:
            ValueError: one of them cannot be used.
        """
        self._data, self._count = data, prompts_per_step
        self._sieve = Sieve(data, reader)
        self._draws = _make_draws(data, self._sieve, seed)
        self._refills = _make_refills(data, self._sieve, self._draws, seed, prompts_per_step)
        self._reader = reader
        self._recent = lru_cache(maxsize=_KEPT_STEPS)(self._batch)
        _check_first(self._draws, self._sieve, seed)
        self.warning = self._sieve.warning

    def batch(self, step: int) -> list[Prompt]:
        return list(self._recent(step))

    def fingerprints(self) -> Mapping[str, str]:
        found = {"data.source": self._reader.rows.digest(), "chat template": self._reader.template_digest}
        if self._data.curriculum:
            found["data.curriculum"] = digest_of(Path(self._data.curriculum.rpartition(":")[0]))
        return found | {"data.overlong": self._data.overlong, "data.broken_rows": self._data.broken_rows}

    def refill(self, step: int, count: int) -> list[Prompt]:
        return list(map(self._sieve.read, self._refills.rows(step, self._rows(step), count)))

    def _batch(self, step: int) -> tuple[Prompt, ...]:
        return tuple(map(self._sieve.read, self._rows(step)))

    def _rows(self, step: int) -> list[int]:
        return self._draws.rows(step * self._count, (step + 1) * self._count)


class Sieve:
    """Keeps the rows that can be used, and counts the others; where these are not to be left out it raises."""

    def __init__(self, data: DataSection, reader: PromptReader) -> None:
        self._data, self.reader = data, reader
        self._overlong: dict[int, RowError] = {}
        self._broken: dict[int, RowError] = {}
        self._num_seen = 0

    @property
    def leaves_out(self) -> bool:
        """Whether any row may be left out."""
        return self._data.overlong == "drop" or self._data.broken_rows == "skip"

    @property
    def warning(self) -> str:
        """How many rows have been left out so far, and the first of each kind."""
        kinds = ((self._broken, "broken and skipped"), (self._overlong, "too long and dropped"))
        parts = [f"{len(rows):,} {what}, the first {_in_short(rows[min(rows)])}" for rows, what in kinds if rows]
        looked_at = f"of {self._num_seen:,} rows looked at"
        return f"data.source = {self._data.source_name!r}: {looked_at} {'; '.join(parts)}" if parts else ""

    def keeps(self, index: int) -> bool:
        """Whether a row can be used.

        Raises:
            RowError: it cannot, and is not to be left out.
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
            return self.reader.read(index)
        except OverlongError:
            raise
        except RowError as error:
            raise RowError(error.where, f"{error.reason}, or set data.broken_rows = 'skip'") from None


def _in_short(error: RowError) -> str:
    """Without the remedy."""
    return f"{error.where}: {error.reason.partition(';')[0]}"


def make_prompt(tokenizer: Tokenizer, text: str, answer: str, source: str) -> Prompt:
    """A prompt tokenized as it stands: marks such as a chat template's are in the text or nowhere."""
    return Prompt(encode(tokenizer, text), text, answer, source)


def _open_gcd(config: Config, tokenizer: Tokenizer) -> GcdPrompts:
    longest = len(encode(tokenizer, f"gcd({MAX_NUMBER},{MAX_NUMBER})="))
    if longest > config.data.max_prompt_tokens:
        raise ConfigError(
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens}, but prompts of {EMBEDDED_TASK!r} "
            f"have up to {longest} tokens; use data.max_prompt_tokens = {longest} or more"
        )
    return GcdPrompts(tokenizer, config.run.seed, config.rollout.prompts_per_step)


@lru_cache(maxsize=4)
def _open(
    settings: str, seed: int, count: int, tokenizer: Tokenizer, chat: ChatFormat, stamps: tuple[tuple[int, int], ...]
) -> FilePrompts:
    """``stamps``, of the files that are read, make a changed file another one."""
    data = DataSection.model_validate_json(settings)
    return FilePrompts(data, open_reader(data, seed, tokenizer, chat), seed, count)


def _files_of(data: DataSection) -> list[Path]:
    """All files that the prompts are made from."""
    is_task = isinstance(data.source, str) and data.source.startswith(TASK_PREFIX)
    beside = (Path(data.chat_template), Path(data.curriculum.rpartition(":")[0]))
    return [*([] if is_task else find_files(data)), *(path for path in beside if path.is_file())]


def _make_draws(data: DataSection, sieve: Sieve, seed: int) -> Draws:
    num_rows = len(sieve.reader)
    if data.curriculum:
        return _by_curriculum(data, sieve)
    if sieve.leaves_out:
        return GoodRows(num_rows, lambda epoch: shuffled(num_rows, seed, epoch), sieve.keeps, data.source_name)
    return AllRows(num_rows, lambda epoch: shuffled(num_rows, seed, epoch))


def _make_refills(data: DataSection, sieve: Sieve, draws: Draws, seed: int, count: int) -> Refills:
    """A curriculum's refills are the rows that come next in it; others are shuffled, in an order of their own."""
    num_rows = len(sieve.reader)
    if isinstance(draws, AllRows) and data.curriculum:
        return Refills(draws.num_rows, draws.order, lambda step: (step + 1) * count, lambda row: True)
    keeps, stride = sieve.keeps if sieve.leaves_out else lambda row: True, _REFILL_STRIDE * count
    return Refills(num_rows, lambda epoch: shuffled(num_rows, seed, epoch, "refill"), lambda step: stride * step, keeps)


def _by_curriculum(data: DataSection, sieve: Sieve) -> AllRows:
    """A curriculum is told of all rows that can be used, so they are all read first."""
    good = [row for row in range(len(sieve.reader)) if not sieve.leaves_out or sieve.keeps(row)]
    if not good:
        raise ConfigError(f"data.source = {data.source_name!r} has no usable row; `tlt data inspect` says why")
    order = CurriculumOrder(data.curriculum, [_facts(sieve.reader, row, place) for place, row in enumerate(good)])
    rows = np.array(good, np.int64)
    return AllRows(len(rows), lambda epoch: rows[order(epoch)])


def _facts(reader: PromptReader, index: int, place: int) -> RowFacts:
    row = reader.rows[index]
    source = row.get("data_source")
    return RowFacts(
        place, reader.rows.kind if source is None else str(source), str(row.get("ability") or ""), difficulty_of(row)
    )


def _check_first(draws: Draws, sieve: Sieve, seed: int) -> None:
    """Read the rows that are drawn first, in the order of the files where none is to be left out."""
    if isinstance(draws, GoodRows):
        draws.look_ahead(CHECKED_ROWS)
    elif not sieve.leaves_out:
        for row in sorted(set(draws.rows(0, min(len(sieve.reader), CHECKED_ROWS)))):
            sieve.read(row)
