"""Prints a job's progress: a line for each step, and the progress of work that takes long."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.table import Table

from tlt_hpc.cluster.stopping import stopped_early_message
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.console import make_console
from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import Config
from tlt_hpc.look.columns import STEP_TABLE, step_cells
from tlt_hpc.look.cost import cost_of
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import CurvePoint
from tlt_hpc.storage.step_lines import Line, read_lines
from tlt_hpc.studies.compare import Comparison, equality_of
from tlt_hpc.studies.warmup.progress import Progress
from tlt_hpc.studies.warmup.texts import Texts
from tlt_hpc.studies.warmup.warm_up import WarmupResult
from tlt_hpc.train import RunResult

_PATIENCE_SECONDS, _MAX_PATIENCE_SECONDS = 4.0, 60.0
"""Silence after a line until the next line on progress; doubled with each of them, up to the maximum."""
_COLUMNS = ("step", *STEP_TABLE)


class Screen:
    """Prints lines on rank 0, which ``shows`` them."""

    def __init__(self, shows: bool) -> None:
        self.console = make_console()
        self.console.quiet = not shows
        self.names_columns = False
        """True if the names of the columns are printed above the next line."""
        self._said_at, self._patience = time.monotonic(), _PATIENCE_SECONDS

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, soft_wrap=True)
        self._said_at, self._patience = time.monotonic(), _PATIENCE_SECONDS

    def print_progress_if_due(self, text: str) -> None:
        """Print how far something has come, if nothing has been printed for a while."""
        if time.monotonic() - self._said_at >= self._patience:
            patience = min(2 * self._patience, _MAX_PATIENCE_SECONDS)
            self.say(f"  {text}")
            self._patience = patience

    def print_row(self, cells: Sequence[str], names: Sequence[str], ending: str = "") -> None:
        """Print the cells of a table below the names of its columns."""
        widths = [max(7, len(name) + 1) for name in names]
        self.say("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + ending)


def startup_times_text(began: float, stages: Mapping[str, float], end: float) -> str:
    """Return the seconds from a start to its first tokens, and the stages that took at least a tenth of it."""
    times = [began, *stages.values(), end]
    spent = (later - earlier for earlier, later in pairwise(times))
    parts = sorted(zip(("starting", *stages), spent, strict=True), key=lambda part: -part[1])
    long = [f"{name} {seconds:.1f}" for name, seconds in parts if seconds > (end - began) / 10]
    return f"first tokens {end - began:.1f} s after the start: {', '.join(long)}"


class StepReporter:
    """Shows a run: a line for each step, which ends with ``mode`` where runs take turns."""

    def __init__(self, screen: Screen, mode: str = "", stages: Mapping[str, float] | None = None) -> None:
        """``stages``: what the start has done, and when, in seconds since the epoch; told once it is over."""
        self._screen, self._mode, self._stages = screen, mode, stages
        self._is_first = True

    def show_replayed_step(self, step: int) -> None:
        """Print that a step's update was repeated from the rollout log."""
        self._screen.say(f"step {step + 1}: its update repeated from the rollout log, nothing generated again")

    def show_start(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None:
        """Print the run's folder and length, and at the first start the engine's ``memory`` of a rank in bytes."""
        note = f", resuming from step {first_step}" if first_step else ""
        steps = format_count(config.run.num_steps, "step")
        self._screen.say(f"{config.folder} ({config.speculation.mode}): {steps}{note}")
        if self._is_first:
            held = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in memory.items() if size)
            self._screen.say(f"rollout memory of a rank, MB: {held}; together {sum(memory.values()) / 1e6:,.1f}")
        self._is_first, self._screen.names_columns = False, True

    def show_rollout(self, step: int, roster: Roster) -> None:
        """Show the progress of a rollout; at the first one print the times of the start."""
        if self._stages is not None:
            self._screen.say(f"  {startup_times_text(BEAT.began, self._stages, time.time())}")
            self._stages = None
        left = sum(status.sequences_left for status in roster.statuses)
        training = sum(status.drafter_steps > 0 for status in roster.statuses)
        if not left:  # it has not begun, or ends
            return
        self._screen.print_progress_if_due(
            f"step {step + 1}: rollout, {left} left, {roster.num_busy} busy, {training} training"
        )

    def show_phase(self, step: int, name: str) -> None:
        """Show the phase of a step that has begun."""
        self._screen.print_progress_if_due(f"step {step + 1}: {name}")

    def show_step(self, line: Line) -> None:
        """Print the line of a finished step."""
        if self._screen.names_columns:
            self._screen.print_row(_COLUMNS, _COLUMNS, "  mode" if self._mode else "")
            self._screen.names_columns = False
        self._screen.print_row(step_cells(line), _COLUMNS, f"  {self._mode}" if self._mode else "")
        if line["rollout/refills"]:
            self._screen.say(
                f"{format_count(line['rollout/refills'], 'refill')}: "
                f"{format_count(line['rollout/samples'], 'response')}, {line['rollout/trained_samples']:.0f} trained "
                f"on, {line['rollout/teaching_share']:.0%} of groups informative"
            )

    def show_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the results of an evaluation after ``step`` steps."""
        core = {name: 100 * metrics[name] for name in metrics if name.startswith("val-core/")}
        told = ", ".join(f"{name.removeprefix('val-core/')} {share:.1f}" for name, share in core.items())
        self._screen.say(f"evaluated after {format_count(step, 'step')}, %: {told}")


def print_result(config: Config, result: RunResult) -> None:
    """Print the end of a run and the folder that it wrote to."""
    console = make_console()
    if cost := cost_of(RunLog(config.folder)):
        console.print(f"cost: {cost.hours_text} {cost.unit_and_rate_text}", soft_wrap=True)
    steps = format_count(result.num_steps, "step")
    if result.first_step >= config.run.num_steps:
        text = f"already finished: {steps} in {config.folder}; raise run.num_steps to continue"
    elif result.finished:
        text = f"finished: {steps}, policy {result.policy_sha256[:12]}, written to {config.folder}"
    else:
        committed = max(read_lines(RunFolder(config.folder).metrics), default=-1) + 1  # a start may have taken up fewer
        done = max(result.num_steps, committed)
        how_far = f" after {done} of {format_count(config.run.num_steps, 'step')}"
        text = stopped_early_message(result.stop_reason, how_far, config.folder)
    console.print(text, soft_wrap=True)


def print_comparison(comparison: Comparison, rows: Mapping[str, Sequence[str]], *last_lines: str) -> None:
    """The table of ``tlt compare`` and ``tlt ablate``, and whether the runs were equal."""
    console = make_console()
    table = Table(title=f"{format_count(comparison.num_steps, 'step')} on {format_count(comparison.num_ranks, 'rank')}")
    for name in ("", *comparison.runs):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    for line in (equality_of(comparison), *filter(None, last_lines), f"written to {comparison.folder}"):
        console.print(line, soft_wrap=True)


# -- tlt warmup -----------------------------------------------------------------------------------------------------

_CURVE_COLUMNS = ("updates", "tokens read", "loss", "accept length", "seconds", "left")


class WarmupScreen:
    """Shows a warm-up: a line for each validation."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._config: Config | None = None
        self._left = self._reads = ""

    def show_start(self, config: Config, texts: Texts, progress: Progress) -> None:
        """Print the warm-up's folder and its texts."""
        self._config, self._reads = config, "logged responses" if texts.are_logged else "prompts to answer"
        note = f", resuming from update {progress.updates}" if progress.updates else ""
        kept = f"{format_count(len(texts.held_out), 'prompt')} held out"
        self._screen.say(f"{config.folder}: {len(texts.training):,} {self._reads}, {kept}{note}")

    def show_capture(self, num_done: int, num_texts: int) -> None:
        """Show how many texts have been read or answered."""
        self._screen.print_progress_if_due(f"{self._reads}: {num_done:,} of {num_texts:,}")

    def show_training(self, num_documents: int, num_tokens: int) -> None:
        """Print the size of the training set, and the names of the columns."""
        self._screen.say(f"training on {format_count(num_documents, 'response')}, {format_count(num_tokens, 'token')}")
        self._screen.print_row(_CURVE_COLUMNS, _CURVE_COLUMNS)

    def show_update(self, progress: Progress) -> None:
        """Show the updates so far and the last loss."""
        assert self._config is not None
        done = progress.share_done(self._config.warmup)  # if it continues as it did, and no patience ends it
        self._left = f"{progress.seconds / done * (1.0 - done) if done else 0.0:.0f}"
        self._screen.print_progress_if_due(
            f"training: {format_count(progress.updates, 'update')}, loss {progress.losses[-1]:.3f}"
        )

    def show_validation(self, point: CurvePoint, is_best: bool) -> None:
        """Print the line of a validation."""
        loss = "-" if point.loss is None else f"{point.loss:.3f}"
        figures = f"{point.updates}", f"{point.tokens:,}", loss, f"{point.accept_length:.3f}", f"{point.seconds:.0f}"
        self._screen.print_row((*figures, self._left), _CURVE_COLUMNS, "  best" if is_best else "")


def print_warmup(result: WarmupResult, config_path: str, form: str) -> None:
    """Print the end of a warm-up, and the next command for a drafter of this form."""
    best, updates = result.progress.best, format_count(result.progress.updates, "update")
    if not result.progress.is_finished:
        text = stopped_early_message(result.reason, f" after {updates}", result.folder)
    else:
        assert best is not None
        done = "already finished" if result.was_finished else "finished"
        drafter = result.folder / "drafter"
        following = ("tlt", "train", config_path, f"drafter.form={form}", f"drafter.init={drafter}")
        text = (
            f"{done} ({result.reason}): accept length {best.accept_length:.3f} after "
            f"{format_count(best.updates, 'update')}, kept in {drafter}\nnext: {shlex.join(following)}"
        )
    make_console().print(text, soft_wrap=True)
