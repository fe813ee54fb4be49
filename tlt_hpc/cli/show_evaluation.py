"""Prints an evaluation: its progress, and the table at its end. It decides nothing."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from tlt_hpc.cli.display import Screen
from tlt_hpc.cluster.stopping import stopped_early_message
from tlt_hpc.common.console import make_console
from tlt_hpc.common.formatting import format_count
from tlt_hpc.evaluate.evaluate import EvaluationResult
from tlt_hpc.evaluate.metrics import Estimate, SetFigures
from tlt_hpc.evaluate.tally import Results
from tlt_hpc.mpi.roster import Roster


class EvaluationScreen:
    """Shows how far an evaluation has come."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._total = screen, 0

    def show_start(self, name: str, folder: Path, num_responses: int, num_done: int, warning: str) -> None:
        """Print the data set, the number of its responses and those that are there already."""
        self._total = num_responses
        note = f", {num_done:,} of them there already" if num_done else ""
        self._screen.say(f"{name}: {format_count(num_responses, 'response')}{note}; {folder}")
        if warning:
            self._screen.say(f"warning: {warning}")

    def show_progress(self, roster: Roster) -> None:
        """Show how many responses and tokens have been generated."""
        if roster.round:
            done = self._total - sum(status.sequences_left for status in roster.statuses)
            tokens = sum(status.tokens for status in roster.statuses)
            self._screen.print_progress_if_due(
                f"responses: {done:,} of {self._total:,}, {format_count(tokens, 'token')}"
            )


def print_evaluation(result: EvaluationResult) -> None:
    """The table of an evaluation, or how to continue with it."""
    console = make_console()
    if result.results is None:
        how_far = f", {format_count(result.num_left, 'response')} left"
        console.print(stopped_early_message(result.reason, how_far, result.folder), soft_wrap=True)
        return
    console.print(accuracy_table(result.name, result.results))
    done = "finished" if result.num_generated else "already finished"
    tokens = format_count(result.results.num_tokens, "token")
    console.print(
        f"{done}: {format_count(result.results.num_responses, 'response')}, {tokens}, "
        f"accept length {result.results.accept_length:.2f}; written to {result.folder}",
        soft_wrap=True,
    )
    if result.results.failures:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(result.results.failures.items()))
        console.print(f"not judged, and wrong therefore: {counts}", soft_wrap=True)


def accuracy_table(name: str, results: Results) -> Table:
    """Accuracies in percent with their standard errors over prompts, a row for each set and source."""
    table = Table(title=f"{name}: accuracy in %, ± standard error over prompts", box=None, header_style="bold")
    table.add_column("data")
    rows = {group: accuracy_cells(figures) for group, figures in results.figures.items()}
    columns = [column for column in next(iter(rows.values())) if any(row[column] for row in rows.values())]
    for column in columns:
        table.add_column(column, justify="right")
    for group, row in rows.items():
        table.add_row(group, *(row[column] or "-" for column in columns))
    return table


def accuracy_cells(figures: SetFigures) -> dict[str, str]:
    """A row by its columns; empty where there is no such figure."""
    unanswered = figures.unanswered_share
    return {
        "prompts": f"{figures.num_prompts:,}",
        "greedy": _percent(figures.greedy),
        f"mean@{figures.num_samples}": _percent(figures.mean),
        **{f"pass@{k}": _percent(value) for k, value in figures.pass_at.items()},
        f"maj@{figures.num_samples}": _percent(figures.majority),
        "length": f"{figures.mean_length:,.0f}",
        "cut %": f"{100 * figures.cut_share:.1f}",
        "none %": "" if unanswered is None else f"{100 * unanswered:.1f}",
    }


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    error = "" if estimate.standard_error is None else f"±{100 * estimate.standard_error:.1f}"
    return f"{100 * estimate.value:.1f}{error}"
