"""Runs side by side, as a table and as CSV: how far each has come, what it has reached, and what it took."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.formatting import format_table
from tlt_hpc.common.printable import escape_control_characters, escape_spreadsheet_cell
from tlt_hpc.look.columns import COLUMNS, SCORE
from tlt_hpc.look.cost import Cost, cost_of
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import change_of
from tlt_hpc.storage.folder import WriteError, writing_atomically

_OPTIONAL = ("restarts", "log")
"""Columns that are left out where no run has a value."""


class RunRow(NamedTuple):
    """A run's line; what is not known is None."""

    run: str
    state: str
    steps: int | None
    """None: it is a warm-up, which has none."""
    num_steps: int | None
    """Steps that it is to have."""
    score_first: float | None
    """Mean score of the first quarter of the steps."""
    score_last: float | None
    cost: Cost | None
    restarts: str = ""
    """Number of times that Slurm has queued its job again; empty for never."""


def read_run_row(name: str, state: str, folder: Path, until: int | None = None) -> RunRow:
    """The line of the run in a folder, in which there may be none yet; with ``until``, of its steps before that one."""
    try:
        log = RunLog(folder, until=until)
    except UserError:  # it has not written a step
        return RunRow(name, state, 0, None, None, None, None)
    if log.folder.is_warmup:
        return RunRow(name, state, None, None, None, None, None)
    change = change_of(log.metric(COLUMNS[SCORE].metric))
    first, last = (change.first, change.last) if change else (None, None)
    num_steps = log.config_int("run", "num_steps") or None
    return RunRow(name, state, len(log.lines), num_steps, first, last, cost_of(log))


def as_table(rows: Sequence[RunRow], logs: Sequence[str] = ()) -> str:
    """Aligned columns with a heading, for people; the last one names each run's log, if there are any."""
    cells = [("run", "state", "steps", "restarts", "score", "tokens", _hours_name(rows), "tokens an hour", "log")]
    for row, log in zip(rows, logs or [""] * len(rows), strict=True):
        cost, of = row.cost, f"/{row.num_steps}" if row.num_steps else ""
        cells.append((
            escape_control_characters(row.run), row.state, "" if row.steps is None else f"{row.steps}{of}",
            row.restarts, "" if row.score_last is None else f"{row.score_first:.3f} -> {row.score_last:.3f}",
            f"{cost.tokens:,}" if cost else "", cost.hours_text if cost else "",
            f"{cost.tokens_per_hour:,.0f}" if cost else "",
            log,
        ))  # fmt: skip
    shown = [column for column in zip(*cells, strict=True) if column[0] not in _OPTIONAL or any(column[1:])]
    return format_table(list(zip(*shown, strict=True)))


def as_csv(rows: Sequence[RunRow], settings: Sequence[Mapping[str, str]] = ()) -> str:
    """Comma-separated values with a heading; what a spreadsheet would take for a formula gets a quote before it.

    ``settings``: further columns of each row by name, such as what a sweep varies.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = list(dict.fromkeys(key for each in settings for key in each))
    figures: tuple[object, ...] = ("tokens", _hours_name(rows), "tokens_an_hour")
    writer.writerow(
        (
            "run",
            *map(escape_spreadsheet_cell, keys),
            "state",
            "steps",
            "num_steps",
            "score_first",
            "score_last",
            *figures,
        )
    )
    for row, own in zip(rows, settings or [{}] * len(rows), strict=True):
        cost = row.cost
        figures = (cost.tokens, cost.hours, round(cost.tokens_per_hour)) if cost else (None,) * 3
        given = (row.run, *(own.get(key, "") for key in keys))
        texts = map(escape_spreadsheet_cell, given)
        writer.writerow((*texts, row.state, row.steps, row.num_steps, row.score_first, row.score_last, *figures))
    return out.getvalue()


def write_csv(path: Path, rows: Sequence[RunRow], settings: Sequence[Mapping[str, str]] = ()) -> None:
    """Write ``as_csv`` to a file.

    Raises:
        UserError: no room or no permission.
    """
    try:
        with writing_atomically(path) as part:
            part.write_text(as_csv(rows, settings), encoding="utf-8")
    except WriteError as error:
        raise UserError(f"{error.fact}; make room there or give another --output") from None


def _hours_name(rows: Sequence[RunRow]) -> str:
    names = {row.cost.unit for row in rows if row.cost}
    return names.pop() if len(names) == 1 else "rank-hours"
