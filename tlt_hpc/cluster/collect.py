"""The results of a submission's runs in one table: what each was, how far it came, and its figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt_hpc.cluster.status import MemberStatus, in_columns, run_lines
from tlt_hpc.cluster.submission import Submission
from tlt_hpc.common.files import LINES_BYTES, DamagedText, parse_json, read_bytes, told
from tlt_hpc.config import UserError
from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.storage.step_lines import Line

LAST = 10
"""Steps that the mean reward is taken over: one step's is noisy."""
_MEANS = {
    f"reward, last {LAST}": ("critic/rewards/mean", LAST),
    "length": ("response_length/mean", LAST),
    "accept length": ("drafter/spec_decode/mean_acceptance_length", LAST),
    "tokens/s": ("perf/throughput", 0),
    "s/step": ("timing_s/step", 0),
}
"""Columns: the figure, and over how many of the last steps its mean is taken (0: all)."""

Row = dict[str, Any]


def collect(submission: Submission, statuses: Sequence[MemberStatus]) -> list[Row]:
    """A row for each member, in order; None where a run has no such figure.

    Raises:
        UserError: a run's files are damaged.
    """
    rows = [
        {"member": status.member.name, **dict(override.partition("=")[::2] for override in status.member.own)}
        | {"state": status.state, "steps": status.steps}
        | figures(run_lines(submission, status.member))
        | evaluation(submission.store / status.member.run / "evaluations.jsonl")
        for status in statuses
    ]
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def figures(lines: Mapping[int, Line]) -> Row:
    """Means over a run's steps."""
    rows = list(lines.values())
    values = {name: [row[key] for row in rows[-last:] if key in row] for name, (key, last) in _MEANS.items()}
    return {name: fmean(found) if found else None for name, found in values.items()}


def evaluation(path: Path) -> Row:
    """The figures of a run's newest evaluation, under verl's names; none where there is none.

    Raises:
        UserError: the file is damaged.
    """
    try:
        newest = parse_json(read_bytes(path, LINES_BYTES).rstrip().rpartition(b"\n")[2], dict[str, Any])
        return {key: value for key, value in newest.items() if key.startswith("val-core/")}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(told(error)) from None
    except DamagedText as error:
        raise UserError(f"{path} is damaged ({error}); fix or remove it, and collect again") from None


def write_results(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Write them as CSV and JSON into the submission's folder; returns the files.

    Raises:
        WriteError: no room or no permission.
    """
    as_csv, as_json = folder / "results.csv", folder / "results.json"
    with writing_beside(as_csv) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with writing_beside(as_json) as part:
        part.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")
    return [as_csv, as_json]


def results_table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    return in_columns(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
