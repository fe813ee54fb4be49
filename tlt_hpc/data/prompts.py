"""Draws the prompts of a step: a pure function of data, seed and step, whatever the ranks."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common import formatting
from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import EMBEDDED_TASK, Config, ConfigError, DataSection
from tlt_hpc.data.reader import OverlongError, PromptCheck, PromptReader, encode

CHECKED_ROWS = 10_000
"""Rows that are read before a run starts, those that it draws first: a second or two on one core."""
_TICK_ROWS = 1000
_REFILL_STRIDE = 4
"""Rows from one step's refills to the next's, in prompts of a step: more than a step usually draws."""


class PromptSource(Protocol):
    """A source of the prompts of a step."""

    def draw_step_prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step, in draw order."""
        ...

    def draw_refill_prompts(self, step: int, count: int) -> list[Prompt]:
        """The first ``count`` of the prompts that replace a step's zero-variance groups; fewer are the beginning of
        more."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """Hashes, by name, of the data, which may not change within a run. Reads all files again."""
        ...

    @property
    def warning(self) -> str:
        """A line about rows that are left out, not fully read, without their first token or a right answer, and about
        the chat template; empty: none. Reads all rows if too long ones are dropped."""
        ...


def open_prompts(
    config: Config, tokenizer: Tokenizer, chat: ChatFormat | None = None, check: PromptCheck = lambda _: ""
) -> PromptSource:
    """The prompt source that the configuration names; the rows drawn first are checked.

    Raises:
        ValueError: no such file, or a row that cannot be used, or a prompt over the limit.
    """
    count, limit = config.rollout.prompts_per_step, config.data.max_prompt_tokens
    if config.data.source != EMBEDDED_TASK:
        reader = PromptReader(config.data, tokenizer, chat, check)
        return FilePrompts(config.data, reader, config.run.seed, count)
    longest = len(encode(tokenizer, f"gcd({MAX_NUMBER},{MAX_NUMBER})="))
    if longest > limit:
        raise ConfigError(
            f"data.max_prompt_tokens = {limit}, but prompts of {EMBEDDED_TASK!r} "
            f"have up to {longest} tokens; use data.max_prompt_tokens = {longest} or more"
        )
    return GcdPrompts(tokenizer, config.run.seed, count)


class GcdPrompts:
    """Fresh problems of the embedded task at every step, from its split for training."""

    warning = ""

    def __init__(self, tokenizer: Tokenizer, seed: int, prompts_per_step: int) -> None:
        self._tokenizer, self._seed, self._count = tokenizer, seed, prompts_per_step

    def draw_step_prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step, in draw order."""
        return self._draw(f"gcd/train/{self._seed}/{step}", self._count)

    def draw_refill_prompts(self, step: int, count: int) -> list[Prompt]:
        """The first ``count`` prompts that replace a step's groups without variance."""
        return self._draw(f"gcd/train/{self._seed}/{step}/refill", count)

    def fingerprints(self) -> Mapping[str, str]:
        """The name of the task, whose problems no file can change."""
        return {"data.source": EMBEDDED_TASK}

    def _draw(self, seed: str, count: int) -> list[Prompt]:
        source = random.Random(seed)
        problems = (draw_from_split(source, "train") for _ in range(count))
        return [make_prompt(self._tokenizer, p.prompt, p.answer, "gcd") for p in problems]


class FilePrompts:
    """Rows of files, every epoch in an order of its own; a step may span two epochs."""

    def __init__(self, data: DataSection, reader: PromptReader, seed: int, prompts_per_step: int) -> None:
        """Reads the first rows of the order; where too long prompts are dropped, the first draw reads all rows.

        Raises:
            ValueError: one of them cannot be used.
        """
        self._data, self._reader, self._seed, self._count = data, reader, seed, prompts_per_step
        passed_over = (OverlongError,) if data.overlong == "drop" else ()
        self._checked, self._unknown = (
            sorted(shuffled_row_order(len(reader), seed, 0)[:CHECKED_ROWS].tolist()),
            list[int](),
        )
        problems = list[str]()
        for row in self._checked:
            with suppress(*passed_over):
                prompt = reader.read(row)
                problems.append(reader.find_row_problem(row, prompt))
                if reader.has_unknown_characters(prompt):
                    self._unknown.append(row)
        self._never_right = never_right_warning(reader.source, problems)

    @property
    def warning(self) -> str:
        """A line about rows, as ``PromptSource.warning``; empty: none."""
        unknown = ""
        if self._unknown:
            unknown = (
                f"{self._reader.source}: the model's tokenizer does not know some characters in "
                f"{len(self._unknown):,} of {len(self._checked):,} prompts, the first "
                f"{self._reader.rows.row_location(self._unknown[0])}, and the model does not see them"
            )
        unbegun = ""
        if start := self._reader.missing_start_token(self._checked[0]):
            unbegun = (
                f"{self._reader.source}: prompts do not begin with {start!r}, which the model's "
                "tokenizer puts before every text (docs/data.md)"
            )
        few, num_kept = "", int(self._kept_rows_and_warning[0].sum())
        if num_kept < self._count:
            few = (
                f"data.source = {self._data.source_name!r}: {formatting.format_count(num_kept, 'prompt')}, and a step "
                f"takes rollout.prompts_per_step = {self._count}, so that it has the same prompt more than once"
            )
        return "; ".join(
            filter(
                None, (few, unknown, unbegun, self._never_right, self._reader.warning, self._kept_rows_and_warning[1])
            )
        )

    def draw_step_prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step, in draw order.

        Raises:
            RowError: a row that was not checked before cannot be used.
        """
        return list(map(self._reader.read, self._step_rows(step)))

    def draw_refill_prompts(self, step: int, count: int) -> list[Prompt]:
        """The first ``count`` prompts that replace a step's groups without variance."""
        return list(map(self._reader.read, self._row_refills.rows(step, self._step_rows(step), count)))

    def fingerprints(self) -> Mapping[str, str]:
        """Hashes, by name, of the data; reads all files."""
        return {
            "data.source": self._reader.rows.digest(),
            "chat template": self._reader.template_digest,
            "data.overlong": self._data.overlong,
        }

    @cached_property
    def _kept_rows_and_warning(self) -> tuple[NDArray[np.bool_], str]:
        return kept_rows(self._data, self._reader)

    @cached_property
    def _row_draws(self) -> Draws:
        return Draws(self._kept_rows_and_warning[0], self._seed)

    @cached_property
    def _row_refills(self) -> Refills:
        return Refills(self._kept_rows_and_warning[0], self._seed, _REFILL_STRIDE * self._count)

    def _step_rows(self, step: int) -> list[int]:
        return self._row_draws.rows(step * self._count, (step + 1) * self._count)


class SharedPrompts:
    """A ``PromptSource`` that one rank of a node reads for all; its reading methods are collective on the node.

    Args:
        source: None on all ranks but the node's first.
        once: calls a function on the node's first rank and returns its result on all of them.
    """

    def __init__(self, source: PromptSource | None, once: Callable[[Callable[[], list[Prompt]]], list[Prompt]]) -> None:
        self._source, self._once = source, once

    def draw_step_prompts(self, step: int) -> list[Prompt]:
        """Collective on the node: the prompts of a step, in draw order."""
        return self._once(lambda: self._own_source.draw_step_prompts(step))

    def draw_refill_prompts(self, step: int, count: int) -> list[Prompt]:
        """Collective on the node: the first ``count`` prompts that replace a step's groups without variance."""
        return self._once(lambda: self._own_source.draw_refill_prompts(step, count))

    def fingerprints(self) -> Mapping[str, str]:
        """Hashes, by name, of the data; on a node's first rank alone, such as rank 0."""
        return self._own_source.fingerprints()

    @property
    def warning(self) -> str:
        """A line about rows, as ``PromptSource.warning``; on a node's first rank alone."""
        return self._own_source.warning

    @property
    def _own_source(self) -> PromptSource:
        assert self._source is not None, "only a node's first rank reads"
        return self._source


def kept_rows(data: DataSection, reader: PromptReader) -> tuple[NDArray[np.bool_], str]:
    """A mask [N] of the rows that are used, and a line about the others; reads all rows if long prompts are dropped.

    Raises:
        ConfigError: no row is left.
        RowError: a row is broken.
    """
    is_kept, dropped = np.ones(len(reader), np.bool_), list[OverlongError]()
    for row in range(len(reader)) if data.overlong == "drop" else ():
        if row % _TICK_ROWS == 0:
            BEAT.tick()
        try:
            reader.read(row)
        except OverlongError as error:
            is_kept[row] = False
            dropped.append(error)
    if not is_kept.any():
        raise ConfigError(f"{reader.source} has no usable row", "raise data.max_prompt_tokens")
    if not dropped:
        return is_kept, ""
    return is_kept, (
        f"{reader.source}: {len(dropped):,} of {len(reader):,} prompts are too long and dropped, the first "
        f"{dropped[0].message_without_remedy}"
    )


def never_right_warning(source: str, problems: Sequence[str]) -> str:
    """A line about rows to which no response can be right, by what is wrong with each; empty: there are none.

    Raises:
        ConfigError: all rows are such.
    """
    found = list(filter(None, problems))
    if not found:
        return ""
    line = f"{source}: no response can be right for {len(found):,} of {len(problems):,} rows, the first "
    if len(found) == len(problems):
        raise ConfigError(f"{line}{found[0]}; correct the data, reward.default, reward.by_source or data.answer_key")
    return line + found[0]


def make_prompt(tokenizer: Tokenizer, text: str, answer: str, source: str) -> Prompt:
    """A prompt tokenized as it is: marks such as a chat template's are in the text or nowhere."""
    return Prompt(encode(tokenizer, text), text, answer, source)


# -- the row of each draw ----------------------------------------------------------------------------------------------
#
# A pure function of seed and draw, the same on every rank and at every start. The step is the cursor: draw n of step s
# is number s x prompts_per_step + n, and no state has to be saved.

Indices = NDArray[np.int64]


def shuffled_row_order(num_rows: int, seed: int, epoch: int, kind: str = "epoch") -> Indices:
    """A permutation [N]: rows sorted by a hash of (seed, epoch, row), SplitMix64's finaliser (Steele et al., 2014).

    A shuffle by hand, since libraries may change theirs from version to version.
    """
    start = int.from_bytes(hashlib.sha256(f"{kind}/{seed}/{epoch}".encode()).digest()[:8], "little")
    z = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


class Draws:
    """The rows of a run's draws: every epoch has each row of ``is_kept`` [N] once."""

    def __init__(self, is_kept: NDArray[np.bool_], seed: int) -> None:
        self._is_kept, self._num_kept, self._seed = is_kept, int(is_kept.sum()), seed
        self._epoch = lru_cache(maxsize=2)(self._shuffle)  # a step may span two epochs

    def rows(self, start: int, stop: int) -> list[int]:
        """The rows of the draws ``start`` to ``stop``."""
        places = (divmod(number, self._num_kept) for number in range(start, stop))
        return [int(self._epoch(epoch)[place]) for epoch, place in places]

    def _shuffle(self, epoch: int) -> Indices:
        order = shuffled_row_order(len(self._is_kept), self._seed, epoch)
        return order[self._is_kept[order]]


class Refills:
    """Rows that replace a step's zero-variance groups, in an order of their own; none twice in a step if avoidable.

    Step s begins at place s x ``stride``, counted over all epochs.
    """

    def __init__(self, is_kept: NDArray[np.bool_], seed: int, stride: int) -> None:
        self._order = lru_cache(maxsize=2)(partial(shuffled_row_order, len(is_kept), seed, kind="refill"))
        self._is_kept, self._stride = is_kept, stride

    def rows(self, step: int, own: Collection[int], count: int) -> list[int]:
        """The step's first ``count`` rows; fewer are the beginning of more. ``own`` are rows of the step itself."""
        taken, found = set(own), list[int]()
        start, num_rows = step * self._stride, len(self._is_kept)
        # twice as many places as rows: the rest of one epoch, and a whole one, which has every row
        for number in range(start, start + 2 * num_rows):
            if len(found) == count:
                break
            epoch, place = divmod(number, num_rows)
            row = int(self._order(epoch)[place])
            if row not in taken and self._is_kept[row]:
                taken.add(row)
                found.append(row)
        # all of the data is in the step already: its rows come again, in order
        again = [*found, *own]
        return (again * (count // len(again) + 1))[:count]


# -- the embedded task: greatest common divisors by written-out subtraction -------------------------------------------
#
# A problem is ``gcd(196,364)=``; a full answer is ``<think>196,364;196,168;28,168;...;28,28</think>\\boxed{28}``. The
# number of written subtractions varies with the quotients of Euclid's algorithm, which gives response lengths a natural
# long tail. Problems are split by a hash of their text, so that no split ever sees another's.

Split = Literal["supervised", "train", "evaluation"]

MAX_NUMBER = 399
MAX_DIVISOR = 24
LONG_TAIL_SHARE = 0.3
MAX_WORKING_TOKENS = 480


@dataclass(frozen=True)
class GcdProblem:
    """A pair of positive integers whose greatest common divisor is asked for."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The text that a model is fed."""
        return f"gcd({self.a},{self.b})="

    @property
    def answer(self) -> str:
        """The greatest common divisor, in decimal digits."""
        return str(math.gcd(self.a, self.b))

    @property
    def split(self) -> Split:
        """The split this problem belongs to: 60 % supervised, 30 % train, 10 % evaluation, by hash of its text."""
        bucket = int.from_bytes(hashlib.sha256(self.prompt.encode()).digest()[:4], "little") % 10
        if bucket < 6:
            return "supervised"
        return "train" if bucket < 9 else "evaluation"

    def subtractions(self) -> list[tuple[int, int]]:
        """Pairs from the problem down to (g, g), one subtraction of the smaller from the larger at a time."""
        a, b = self.a, self.b
        pairs = [(a, b)]
        while a != b:
            a, b = (a - b, b) if a > b else (a, b - a)
            pairs.append((a, b))
        return pairs


def num_working_tokens(pairs: list[tuple[int, int]]) -> int:
    """Tokens of a written working: digits, one comma a pair, one semicolon between pairs."""
    return sum(len(str(a)) + len(str(b)) + 2 for a, b in pairs) - 1


def draw_problem(random_source: random.Random) -> GcdProblem:
    """One problem: a coprime pair scaled by a divisor in 1..24; 30 % have one log-uniform number."""
    while True:
        divisor = random_source.randint(1, MAX_DIVISOR)
        limit = MAX_NUMBER // divisor
        first = random_source.randint(1, limit)
        if random_source.random() < LONG_TAIL_SHARE:
            second = max(1, round(math.exp(random_source.uniform(0.0, math.log(limit)))))
        else:
            second = random_source.randint(1, limit)
        if math.gcd(first, second) != 1 or first == second:
            continue
        if random_source.random() < 0.5:
            first, second = second, first
        problem = GcdProblem(first * divisor, second * divisor)
        if num_working_tokens(problem.subtractions()) <= MAX_WORKING_TOKENS:
            return problem


def draw_from_split(random_source: random.Random, split: Split) -> GcdProblem:
    """One problem of the given split."""
    while True:
        problem = draw_problem(random_source)
        if problem.split == split:
            return problem
