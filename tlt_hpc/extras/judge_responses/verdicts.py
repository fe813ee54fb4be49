"""Prints the verdicts on given responses: texts that were read as answers, sums, the first disagreement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tlt_hpc.common.console import make_console, print_row_errors
from tlt_hpc.common.formatting import format_count
from tlt_hpc.config.data_sections import ANSWER, part_name
from tlt_hpc.data.rows import RowError
from tlt_hpc.extras.judge_responses.responses import Given
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.judge import failure_is_judgement
from tlt_hpc.rewards.scorer import Unjudged

_CELL, _WHY, _END = 40, 120, 300
"""Characters shown of an answer, of a reason, and of the end of a response."""
_SAME = 1e-6


@dataclass(frozen=True)
class Judged:
    """A response with its verdict."""

    given: Given
    kind: str
    verdict: Verdict

    @property
    def is_judged(self) -> bool:
        """True if the reward comes from the answer, and not from a failure to judge it."""
        return failure_is_judgement(self.kind, self.verdict.failure)

    @property
    def answer(self) -> float:
        """The reward without its other parts."""
        return self.verdict.parts.get(ANSWER, self.verdict.reward)

    @property
    def is_right(self) -> bool:
        """True if an evaluation counts the answer as right."""
        return self.is_judged and self.answer >= 1

    @property
    def verdict_word(self) -> str:
        """The verdict as a word: right, wrong or not judged."""
        return "right" if self.is_right else "wrong" if self.is_judged else "not judged"

    @property
    def reason(self) -> str:
        """The reason of the verdict, as far as there is one."""
        return ": ".join(filter(None, (self.verdict.failure, self.verdict.detail)))

    @property
    def disagrees(self) -> bool:
        """True if the row expects another verdict (true: right), or a number that neither reward nor answer is."""
        expected = self.given.expected
        if expected is None or isinstance(expected, bool):
            return expected is not None and expected != self.is_right
        return not any(
            math.isclose(expected, found, rel_tol=_SAME, abs_tol=_SAME) for found in (self.verdict.reward, self.answer)
        )

    def to_record(self) -> dict[str, Any]:
        """The line of ``--output``."""
        return {
            "row": self.given.where,
            "data_source": self.given.prompt.source,
            "kind": self.kind,
            "verdict": self.verdict_word,
            "reward": self.verdict.reward,
            "parts": dict(self.verdict.parts),
            "read": self.verdict.read,
            "truth": self.given.prompt.answer,
            "why": self.reason,
            "seconds": self.verdict.seconds,
            "expected": self.given.expected,
        }


@dataclass
class Group:
    """The sums of the responses of one kind and source."""

    num_right: int = 0
    num_judged: int = 0
    num_disputed: int = 0
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, each: Judged) -> None:
        """Add a response to the sums."""
        self.num_right += each.is_right
        self.num_judged += each.is_judged
        self.num_disputed += each.verdict.is_disputed
        self.rewards.append(each.verdict.reward)
        self.seconds.append(each.verdict.seconds)
        for name, value in each.verdict.parts.items():
            self.parts.setdefault(name, []).append(value)


@dataclass
class Summary:
    """The sums of all responses."""

    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    broken: list[RowError] = field(default_factory=list)
    failures: list[tuple[Any, str]] = field(default_factory=list)
    """Kind of failure, place and detail of each response that was not judged."""
    num_expected: int = 0
    num_disagreements: int = 0
    first_disagreement: Judged | None = None

    def add(self, each: Judged | RowError) -> None:
        """Add a response, or a row that cannot be used, to the sums."""
        if isinstance(each, RowError):
            self.broken.append(each)
            return
        for key in ((each.kind, each.given.prompt.source), ("all", "")):
            self.groups.setdefault(key, Group()).add(each)
        if not each.is_judged:
            self.failures.append((each.verdict.failure, f"{each.given.where}: {each.verdict.detail}"))
        self.num_expected += each.given.expected is not None
        self.num_disagreements += each.disagrees
        if each.disagrees and self.first_disagreement is None:
            self.first_disagreement = each

    @property
    def has_trouble(self) -> bool:
        """True if a row is broken, a verdict is not the one expected, or nothing could be judged."""
        everything = self.groups.get(("all", ""), Group())
        return bool(self.broken or self.num_disagreements or not everything.num_judged)


def print_rows(shown: Sequence[Judged], file: str) -> None:
    """A table of verdicts, each with what was read, what is right and why."""
    if not shown:
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    has_parts = any(each.verdict.parts for each in shown)
    for name in ("row", "verdict", "reward", "read", "truth", *(("parts",) if has_parts else ()), "why", "s"):
        is_number = name in ("reward", "s")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for each in shown:
        parts = ", ".join(f"{name} {value:.4g}" for name, value in each.verdict.parts.items())
        table.add_row(
            each.given.where.removeprefix(file).lstrip(": "),
            each.verdict_word,
            f"{each.verdict.reward:.4g}",
            _cut(each.verdict.read, _CELL) or "-",
            _cut(each.given.prompt.answer, _CELL),
            *((parts,) if has_parts else ()),
            _cut(each.reason, _WHY),
            f"{each.verdict.seconds:.3f}",
            style="" if each.is_right else "yellow" if each.is_judged else "red",
        )
    make_console().print(table, "")


def print_summary(summary: Summary, file: str) -> None:
    """Sums by kind and source, what was not judged, broken rows, and the first disagreement with the file."""
    console = make_console()
    if summary.groups:
        console.print(_table_of(summary.groups))
    if summary.failures:
        everything = summary.groups["all", ""]
        unjudged = Unjudged(len(everything.rewards), tuple(summary.failures))
        console.print(f"not judged: {unjudged.total:,}, {unjudged.explain()}", style="red", soft_wrap=True)
    print_row_errors(console, summary.broken)
    if (first := summary.first_disagreement) is not None:
        told = (
            f"{summary.num_disagreements:,} of {format_count(summary.num_expected, 'verdict')} differ from the expected"
        )
        console.print(f"{told} one; the first is {first.given.where}:", style="bold", soft_wrap=True)
        rows = {
            "expected": f"{first.given.expected}".lower(),
            "found": f"{first.verdict_word}, reward {first.verdict.reward:.4g}"
            + (f" ({first.reason})" if first.reason else ""),
            "read": _cut(first.verdict.read, _END) or "-",
            "truth": _cut(first.given.prompt.answer, _END),
            "response": ("... " if len(first.given.text) > _END else "") + first.given.text[-_END:],
        }
        for name, text in rows.items():
            console.print(f"  {name:9} " + text.strip().replace("\n", "\n" + 12 * " "), soft_wrap=True)
    elif summary.num_expected:
        console.print(f"{format_count(summary.num_expected, 'verdict')} as expected")


def _table_of(groups: dict[tuple[str, str], Group]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    everything = groups["all", ""]
    keys = [*sorted(key for key in groups if key[0] != "all"), *([("all", "")] if len(groups) > 2 else [])]
    numbers = ("rows", "right", "wrong", "not judged", "disputed", "reward", *everything.parts, "median s", "max s")
    for name in ("kind", "data_source", *numbers):
        table.add_column(name, justify="right" if name in numbers else "left")
    for kind, source in keys:
        group = groups[kind, source]
        num_rows = len(group.rewards)
        counts = (group.num_right, group.num_judged - group.num_right, num_rows - group.num_judged, group.num_disputed)
        means = (group.rewards, *(group.parts.get(name, []) for name in everything.parts))
        table.add_row(
            part_name(kind),
            source,
            *(f"{number:,}" for number in (num_rows, *counts)),
            *(f"{statistics.fmean(values):.3f}" if values else "-" for values in means),
            f"{statistics.median(group.seconds):.3f}",
            f"{max(group.seconds):.3f}",
        )
    return table


def _cut(text: str, length: int) -> str:
    """A text in one line, its end cut off where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
