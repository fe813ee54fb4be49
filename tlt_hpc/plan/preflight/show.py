"""Verdicts for people, as a table or as plain lines, and for programs, as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import ConfigError
from tlt_hpc.plan.preflight.verdict import Level, Verdict

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red", Level.SKIPPED: "dim"}


def show(verdict: Verdict) -> None:
    """Print what a check has found, before the next one begins."""
    if sys.stdout.isatty():
        TextConsole().print(_row(verdict))
    else:
        print(line_of(verdict), flush=True)


def line_of(verdict: Verdict) -> str:
    """A verdict as one plain line."""
    remedy = f"; {verdict.remedy}" if verdict.remedy else ""
    return f"{verdict.level:<8} {verdict.name:<16} {verdict.found}{remedy}"


def summary(verdicts: Sequence[Verdict], seconds: float) -> str:
    """The last line: how many of each, and what they come to."""
    counts = Counter(verdict.level for verdict in verdicts)
    numbers = ", ".join(f"{counts[level]} {_word(level, counts[level])}" for level in Level if counts[level])
    end = "the job would fail" if counts[Level.FAILURE] else "nothing stands in the job's way"
    return f"preflight: {numbers} in {seconds:.1f} s: {end}"


def _word(level: Level, count: int) -> str:
    return f"{level}s" if count > 1 and level in (Level.WARNING, Level.FAILURE) else str(level)


def write_json(path: Path, verdicts: Sequence[Verdict], status: int) -> None:
    """All that is shown, as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    tree: dict[str, Any] = {"status": status, "verdicts": [vars(verdict) for verdict in verdicts]}
    try:
        path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}; give a file in a folder that is there") from None


def _row(verdict: Verdict) -> Table:
    """A verdict in columns that are as wide for every other one."""
    row = Table.grid(padding=(0, 1))
    row.add_column(width=8)
    row.add_column(width=13)
    row.add_column(overflow="fold")
    remedy = f"\n{verdict.remedy}" if verdict.remedy else ""
    row.add_row(Text(verdict.level, _STYLES[verdict.level]), verdict.name, f"{verdict.found}{remedy}")
    return row
