"""A run's records for other programs: CSV tables, and a trace of all ranks for Perfetto or chrome://tracing.

    python tools/export_run.py runs/tiny                       # CSV tables, and the last step's trace
    python tools/export_run.py runs/tiny --steps 4:8

Tables: ``steps`` (the lines of metrics.jsonl), ``responses``, ``micro_steps``, ``phases`` and ``rounds``, each with the
step and the rank; times are seconds since the epoch. Tokens are left out. Open the trace at https://ui.perfetto.dev:
a process for each rank. Needs neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
import numpy as np

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.printable import escape_spreadsheet_cell
from tlt_hpc.common.records import MicroStepRecord, PhaseSpan
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import GIVE_OUTPUT, check_writable
from tlt_hpc.storage.rollout_log import StepRecord, StepSummary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEY = ("seed", "stream", "draw", "sample")
_RESPONSE = ("finish_reason", "weight_version", "num_target_passes", "finished_seconds")
Part = dict[str, Any]
"""Some rows of a table: columns by name, all of one length."""


def responses_of(rank: StepRecord) -> Part:
    """The responses of a rank, without their tokens."""
    return {
        **{name: [int(vars(rollout.key)[name]) for rollout in rank.rollouts] for name in _KEY},
        **{name: [vars(rollout)[name] for rollout in rank.rollouts] for name in _RESPONSE},
        "rewards": rank.rewards,
        "advantages": rank.advantages,
        "prompt_length": [len(rollout.prompt_tokens) for rollout in rank.rollouts],
        "response_length": [len(rollout.response_tokens) for rollout in rank.rollouts],
    }


def rounds_of(rank: StepRecord) -> Part:
    """The rounds and prefill passes of a rank's engine."""
    names = np.array([*rank.strategy_names, "prefill"])
    part = dict(vars(rank.spans))
    part["strategy"] = names[part.pop("strategy_index").astype(np.int64)]
    return part


def rows_of(records: Sequence[Any], kind: type[DataclassInstance]) -> Part:
    """Records as a table."""
    return {each.name: [vars(record)[each.name] for record in records] for each in fields(kind)}


TABLES: dict[str, Callable[[StepRecord], Part]] = {
    "responses": responses_of,
    "micro_steps": lambda rank: rows_of(rank.micro_steps, MicroStepRecord),
    "phases": lambda rank: rows_of(rank.phases, PhaseSpan),
    "rounds": rounds_of,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables and the trace."""
    parser = argparse.ArgumentParser(description="Write a run's records as tables, and a trace of its ranks.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, e.g. runs/tiny, or a copy of it")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="where to write (default: RUN/export-tables)")
    parser.add_argument(
        "--steps", metavar="FIRST:LAST", help="these steps alone, from 1 (default: all; the trace: the last)"
    )
    options = parser.parse_args(arguments)
    run = RunLog(options.run)
    chosen = steps_of(run, options.steps)
    folder: Path = options.output or options.run / "export-tables"
    check_writable(folder, GIVE_OUTPUT)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("steps", *TABLES):
        path = folder / f"{name}.csv"
        num_rows = put_csv(path, line_parts(run, chosen) if name == "steps" else table_parts(run, name, chosen))
        print(f"wrote {path} ({num_rows:,} rows)")
    traced = chosen if options.steps else [step for step in [run.last_whole_step()] if step is not None]
    path = folder / "trace.json"
    put_trace(path, trace_events(run, traced))
    print(
        f"wrote {path} (step {', '.join(str(step + 1) for step in traced) or 'none'}; open it at https://ui.perfetto.dev)"
    )
    for problem in run.problems:
        print(f"left out: {problem}")


def steps_of(run: RunLog, text: str | None) -> list[int]:
    """The steps of a range such as ``4:8``; all steps by default.

    Raises:
        UserError: the range is invalid or empty.
    """
    there = sorted({*run.steps, *run.lines})
    if text is None:
        return there
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise UserError(f"--steps {text!r} is no range such as 4:8, nor a step")
    chosen = [step for step in there if int(first) <= step + 1 <= int(last or first)]
    if not chosen:
        has = f"it has {there[0] + 1} to {there[-1] + 1}" if there else "it has none"
        raise UserError(f"{run.folder.path} has no step of {text}; {has}")
    return chosen


def line_parts(run: RunLog, steps: list[int]) -> Iterator[Part]:
    """The lines of metrics.jsonl, with every name that any of them has."""
    lines = [run.lines[step] for step in steps if step in run.lines]
    yield {name: [line.get(name) for line in lines] for name in dict.fromkeys(name for line in lines for name in line)}


def table_parts(run: RunLog, table: str, steps: list[int]) -> Iterator[Part]:
    """One part for each file."""
    for step in (step for step in steps if step in run.steps):
        for rank in run.read_rank_records(step):
            part = TABLES[table](rank)
            count = len(next(iter(part.values())))
            yield {"step": np.full(count, step + 1), "rank": np.full(count, rank.rank), **part}


Event = dict[str, Any]
"""An event of Chrome's trace format; times in microseconds."""


def trace_events(run: RunLog, steps: Sequence[int]) -> Iterator[Event]:
    """Yield the events of all ranks in the given steps: a process for each rank, a track for phases, engine, drafter.

    Times count from the second of the first event.
    """
    named, zero = set[int](), None
    for step in steps:
        for summary in run.read_rank_summaries(step):
            first = min([summary.timing.start_seconds, *(phase.start_seconds for phase in summary.phases)])
            zero = float(int(first)) - 1.0 if zero is None else zero  # clocks of nodes differ a little
            if summary.rank not in named:
                named.add(summary.rank)
                name = {"name": f"rank {summary.rank}"}
                yield {"ph": "M", "pid": summary.rank, "name": "process_name", "args": name}
            yield from _rank_events(summary, zero)


def _rank_events(summary: StepSummary, zero: float) -> Iterator[Event]:
    def event(track: str, name: str, start: float, end: float, **more: Any) -> Event:
        times = {"ts": round(1e6 * (start - zero), 1), "dur": max(0.0, round(1e6 * (end - start), 1))}
        return {"ph": "X", "pid": summary.rank, "tid": track, "name": name, **times, "args": more}

    for phase in summary.phases:
        yield event("phases", phase.name, phase.start_seconds, phase.end_seconds, step=summary.step + 1)
    spans = summary.spans
    columns = (spans.strategy_index, spans.num_live, spans.num_tokens, spans.start_seconds, spans.seconds)
    for index, live, tokens, start, taken in zip(*(each.tolist() for each in columns), strict=True):
        name = summary.strategy_names[index] if index >= 0 else "prefill"
        yield event("engine", name, start, start + taken, live=live, tokens=tokens)
    for update in summary.micro_steps:
        more = {"tokens": update.num_tokens, "loss": repr(update.loss)}
        yield event("drafter", "drafter update", update.start_seconds, update.end_seconds, **more)
    for timing in (summary.timing, *summary.refills):
        yield event("waiting", "waiting for the last rank", timing.last_token_seconds, timing.release_seconds)


def put_trace(path: Path, events: Iterable[Event]) -> None:
    """Write Chrome's trace format event by event, since a few steps of many ranks have millions."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write("\n]}\n")


def put_csv(path: Path, parts: Iterator[Part]) -> int:
    """Write a table row by row; returns their number."""
    num_rows, has_head = 0, False
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for part in parts:
            if not has_head:
                writer.writerow(map(escape_spreadsheet_cell, part))
                has_head = True
            columns = (column.tolist() if isinstance(column, np.ndarray) else column for column in part.values())
            texts = [
                [escape_spreadsheet_cell(cell) if isinstance(cell, str) else cell for cell in column]
                for column in columns
            ]
            rows = list(zip(*texts, strict=True))
            writer.writerows(rows)
            num_rows += len(rows)
    return num_rows


if __name__ == "__main__":
    sys.exit(run_script("export_run", main))
