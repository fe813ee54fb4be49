"""Renders a run's state for a screen of at least 80 by 24 characters."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tlt_hpc.cluster.status import resubmit_command
from tlt_hpc.cluster.watch.record import Record
from tlt_hpc.common.formatting import FIRST_STEP, format_count
from tlt_hpc.common.printable import escape_control_characters
from tlt_hpc.look.columns import STEP_TABLE, step_cells
from tlt_hpc.look.live.state import RunState
from tlt_hpc.look.text_format import format_seconds
from tlt_hpc.storage.step_lines import Line

_MIN_RANKS, _MAX_RANKS = 2, 8
_MIN_STEPS = 3
_OTHER_LINES = 12
"""Lines for the head, bars, cost, time limit, table headings, blank lines, and a final message of two lines."""
_MAX_PROBLEMS = 2


def render(state: RunState, is_alive: bool | None, height: int = 24) -> Group:
    """The whole screen, at most ``height`` lines; ``is_alive`` is None after only one look."""
    ranks = rank_rows(state.records, min(_MAX_RANKS, max(_MIN_RANKS, height - _OTHER_LINES - _MIN_STEPS)))
    num_steps = max(_MIN_STEPS, height - _OTHER_LINES - len(ranks))
    parts: list[RenderableType] = [
        render_header(state),
        render_run_progress(state),
        step_line(state),
        *cost_lines(state),
    ]
    parts += [limit_line(state), Text()]
    problems = [*state.log.problems, *state.status_problems][:_MAX_PROBLEMS]
    parts += [Text(f"left out: {problem}", "yellow") for problem in problems]
    parts += [rank_table(ranks), Text()] if ranks else []
    if state.log.lines:
        parts += [steps_table(list(state.log.lines.values())[-num_steps:]), Text()]
    return Group(*parts, render_status_line(state, is_alive))


def render_header(state: RunState) -> Text:
    """Name, mode, ranks and owner of the run."""
    hosts = len({record.host for record in state.records})
    where = (
        f"{format_count(len(state.records), 'rank')} on {format_count(hosts, 'node')}"
        if state.records
        else "no rank yet"
    )
    name = str(state.log.setting("run", "name") or state.log.name)
    text = Text.assemble(
        (escape_control_characters(name), "bold"), f"  {', '.join(filter(None, [state.log.speculation_mode, where]))}"
    )
    text.append(f"  ({state.owner})" if state.owner else "", "dim")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def render_run_progress(state: RunState) -> Table:
    """Steps done and the remaining time; of a warm-up, updates until its last validation."""
    if state.log.folder.is_warmup:
        return warmup_bar(state)
    total, done = state.num_steps, state.num_done
    words = f"{done} of {format_count(total, 'step')}"
    if (left := state.seconds_to_go) is not None and done < total and not state.ending:
        words += f", about {_format_duration(left)} to go"
    return render_progress_bar(total, done, words)


def warmup_bar(state: RunState) -> Table:
    """A warm-up's updates, as of its last validation, and how well the best drafter drafts."""
    facts, total = state.drafter, state.log.config_int("warmup", "updates")
    if facts is None:
        return render_progress_bar(total, 0, "warm-up: not validated yet")
    done = facts.curve[-1].updates if facts.curve else facts.num_updates
    return render_progress_bar(
        total, done, f"warm-up: {done} of {format_count(total, 'update')}, accept length {facts.accept_length:.3f}"
    )


def cost_lines(state: RunState) -> Iterator[Text]:
    """A line with the cost of the run so far, if it is known."""
    if cost := state.cost:
        yield Text(f"about {cost.hours_text} {cost.unit_and_rate_text}", no_wrap=True, overflow="ellipsis")


def render_progress_bar(total: int, done: int, words: str) -> Table:
    """A progress bar with text beside it."""
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total, done, width=16), Text(words, no_wrap=True, overflow="ellipsis"))
    return row


def limit_line(state: RunState) -> Text:
    """The time until the allocation ends, and whether the next job resumes the run."""
    if state.ends_at is None or state.ending:
        return Text()
    left, to_go = state.ends_at - time.time(), state.seconds_to_go
    is_continued = to_go is not None and to_go > left
    words = f"time limit in {_format_duration(max(0.0, left))}" + ", then the next job resumes" * is_continued
    return Text(words, "yellow" if is_continued else "")


def step_line(state: RunState) -> Table | Text:
    """Progress of the current step."""
    if not state.records or state.ending:
        return Text()
    if not (left := state.unfinished_by_replica):
        phases = Counter(record.phase for record in state.records)
        return Text(", ".join(f"{name}: {format_count(num, 'rank')}" for name, num in phases.most_common()))
    total = max(state.num_responses, sum(left))
    of = "rank" if state.tensor_parallel == 1 else "replica"
    words = f"step {state.records[0].step or FIRST_STEP}: {sum(left)} of {format_count(total, 'response')} to go, "
    words += f"{sum(one > 0 for one in left)} of {format_count(len(left), of)} decoding"
    return render_progress_bar(total, total - sum(left), words)


def rank_rows(records: Sequence[Record], most: int) -> list[tuple[str, str, str, str]]:
    """Rank, node, phase and progress; if not all ranks fit, those that are furthest behind."""
    shown = list(records)
    if len(shown) > most:
        shown = sorted(shown, key=lambda record: (-record.still, -record.sequences_left, record.rank))[: most - 1]
        shown.sort(key=lambda record: record.rank)
    rows = [(str(one.rank), one.host, "" if one.ending else one.phase, rank_activity_text(one)) for one in shown]
    if len(shown) < len(records):
        rows.append((f"+{len(records) - len(shown)}", "", "", "others, none of them further behind"))
    return rows


def rank_activity_text(record: Record) -> str:
    """The activity of a rank in a few words."""
    if record.ending:
        return f"ended: {record.ending}"
    if record.stalled:
        return f"no progress for {_format_duration(record.seconds)}" + (
            f" in {record.waiting}" if record.waiting else ""
        )
    if record.phase == "rollout" and record.sequences_left == 0:
        return "share done: trains the drafter or waits"
    return record.part or (f"waits in {record.waiting}" if record.waiting else "")


def rank_table(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """The table of ranks: rank, node, phase and progress of each row."""
    table = Table("rank", "node", "phase", "", box=None, header_style="bold", pad_edge=False)
    table.columns[0].justify = "right"
    table.columns[1].max_width = 16
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        style = "red" if row[3].startswith("no progress") else "green" if "trains the drafter" in row[3] else ""
        table.add_row(*row, style=style)
    return table


def steps_table(lines: Iterable[Line]) -> Table:
    """The job's progress table, of the last committed steps."""
    table = Table("step", *STEP_TABLE, box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for line in lines:
        table.add_row(*step_cells(line))
    return table


def render_status_line(state: RunState, is_alive: bool | None) -> Text:
    """A line that says whether the run is active, has ended or hangs, and what to do."""
    if state.ending == "finished" or (state.is_finished and not is_alive):
        folder, form = state.log.folder.path / "drafter", state.log.setting("drafter", "form")
        drafter = f"finished; train with drafter.form={form} {shlex.quote(f'drafter.init={folder}')}"
        report = "finished; tlt report on this folder says what it learned and gained"
        return Text(escape_control_characters(drafter) if state.log.folder.is_warmup else report, "bold green")
    again = resubmit_command(state.log.folder.path, state.job) if state.job else ""
    command = f"`{again}`" if again else "the same command"
    resume = f"{command} resumes it"
    if state.queued:
        resume = f"job {state.job} is {state.queued}, and resumes it"
    elif state.may_be_queued:
        resume = f"if Slurm has queued it again (job {state.job}), it resumes by itself, else by {command}"
    if state.ending:
        return Text(f"ended: {state.ending}; {resume}", "yellow")
    if state.is_stalled:
        return Text(state.verdict or "a rank hangs; the job ends itself soon, with a line that names it", "red")
    if is_alive is False and state.records:
        verdict = f": {state.verdict}" if state.verdict else ""
        return Text(f"no rank gives a sign of life{verdict}; {resume}", "red")
    if state.is_starting:
        return Text("a start has begun, and no rank has reported yet", "green")
    if not state.records:
        words = "nobody is at work here, unless a start has just begun; start it with the command that made this folder"
        return Text(words, "yellow")
    return Text("running" if is_alive else "", "green")


def _format_duration(value: float) -> str:
    """A duration in whole seconds, or in minutes and hours."""
    return f"{value:.0f} s" if value < 100 else format_seconds(value)
