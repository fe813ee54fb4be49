"""What a user sees while a run works: a live table in a terminal, one line a step elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.live import Live
from rich.table import Table

from tlt_hpc.cluster.local import TERMINAL_VARIABLE
from tlt_hpc.common.console import TextConsole, start_escaped
from tlt_hpc.common.words import count
from tlt_hpc.config import Config
from tlt_hpc.look.metrics import StepMetrics
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import CurvePoint
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.compare import Comparison, equality_of
from tlt_hpc.studies.warmup.progress import Progress
from tlt_hpc.studies.warmup.texts import Texts
from tlt_hpc.studies.warmup.warm_up import WarmupReporter, WarmupResult
from tlt_hpc.train import Reporter, RunResult

_REFRESH_SECONDS = 0.2
_LINE_SECONDS = 15.0
"""Between lines on how far something has come, where nothing is drawn in place."""
_COLUMNS = ("step", "reward", "length", "max", "accept", "idle s", "harvested s", "drafter", "rollout s", "step s")


def make_console(shows: bool = True) -> TextConsole:
    """Rank 0's console; a terminal behind the launcher's pipe is still one. It prints nothing unless it ``shows``."""
    width = os.environ.get(TERMINAL_VARIABLE)
    console = TextConsole(force_terminal=bool(width), width=int(width) if width else 120)
    console.quiet = not shows
    return console


class Screen:
    """Prints lines, and in a terminal shows below them what is being done now; a context manager.

    ``is_stopping``: whether a stop was asked for; the launcher then writes below what is shown, so from then on nothing
    is drawn in place.
    """

    def __init__(self, shows: bool, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.console = make_console(shows)
        self._is_stopping = is_stopping
        self._live = Live("", console=self.console, auto_refresh=False, transient=True)
        self._is_drawing = shows and self.console.is_terminal
        self._shown_at = time.monotonic()

    def __enter__(self) -> Screen:
        if self._is_drawing:
            start_escaped(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        if self.draws():
            self._live.stop()

    def draws(self) -> bool:
        """Whether something is drawn in place; ends that once a stop was asked for."""
        if self._is_drawing and self._is_stopping():
            self.console.quiet = True  # what is drawn stays as it is
            self._live.stop()
            self.console.quiet = False
            self.console.show_cursor()
            self.console.line()
            self._is_drawing = False
        return self._is_drawing

    def say(self, line: str) -> None:
        """Print a line."""
        self.draws()
        self.console.print(line, soft_wrap=True)

    def show(self, text: str, seconds: float = 0.0) -> None:
        """Show in a terminal what is being done now; nothing within ``seconds`` of the last."""
        if self.draws() and time.monotonic() - self._shown_at >= seconds:
            self._shown_at = time.monotonic()
            self._live.update(text, refresh=True)

    def show_or_say(self, text: str) -> None:
        """Show how far something has come; elsewhere than in a terminal as a line every 15 seconds."""
        if self.draws():
            self.show(text, _REFRESH_SECONDS)
        elif time.monotonic() - self._shown_at >= _LINE_SECONDS:
            self._shown_at = time.monotonic()
            self.say(text)

    def row(self, cells: Sequence[str], names: Sequence[str], ending: str = "") -> None:
        """Print the cells of a table below the names of its columns, which are narrower in a terminal."""
        widths = [max(7, len(name) + 1) if self.console.is_terminal else 12 for name in names]
        self.say("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + ending)


def step_cells(summary: StepMetrics) -> tuple[str, ...]:
    """The figures of a step, in the order of the table's columns."""
    return (
        f"{summary.step + 1}",
        f"{summary['critic/score/mean']:.3f}",
        f"{summary['response_length/mean']:.0f}",
        f"{summary['response_length/max']:.0f}",
        f"{summary['drafter/spec_decode/mean_acceptance_length']:.2f}",
        f"{summary['rollout/idle_rank_seconds']:.2f}",
        f"{summary['rollout/harvested_rank_seconds']:.2f}",
        f"{summary['drafter/version']:.0f}",
        f"{summary['rollout/seconds']:.2f}",
        f"{summary['timing_s/step']:.2f}",
    )


def memory_line(memory: Mapping[str, int]) -> str:
    """What a rank's rollout engine holds, in megabytes."""
    parts = [f"{name} {count / 1e6:,.1f}" for name, count in memory.items() if count]
    return f"rollout memory of a rank, MB: {', '.join(parts)}; together {sum(memory.values()) / 1e6:,.1f}"


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """The accuracies of an evaluation in training, in percent."""
    sets: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if name.startswith("val-core/"):
            data, _, figure = name.removeprefix("val-core/").rpartition("/acc/")
            sets.setdefault(data, []).append(f"{figure.removesuffix('/mean')} {100 * value:.1f}")
    return f"evaluated after {count(step, 'step')}, %: " + "; ".join(
        f"{name}: {', '.join(of)}" for name, of in sets.items()
    )


def run_line(config: Config, first_step: int) -> str:
    """Which run begins, and where it writes."""
    note = f", resuming from step {first_step}" if first_step else ""
    return f"{config.folder} ({config.speculation.mode}): {count(config.run.num_steps, 'step')}{note}"


class StepReporter:
    """Shows a run: a line for each step."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._is_first = True

    def replayed(self, step: int) -> None:
        self._screen.say(f"step {step + 1}: its update repeated from the rollout log, nothing generated again")

    def started(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None:
        self._screen.say(run_line(config, first_step))
        if self._is_first:
            self._screen.say(memory_line(memory))
        self._is_first = False
        self._screen.row(_COLUMNS, _COLUMNS)

    def rolling(self, step: int, roster: Roster) -> None:
        if self._screen.draws():
            left = sum(status.sequences_left for status in roster.statuses)
            training = sum(status.drafter_steps > 0 for status in roster.statuses)
            words = f"step {step + 1}: rollout, {left} left, {roster.num_busy} busy, {training} training"
            self._screen.show(words, _REFRESH_SECONDS)

    def phase(self, step: int, name: str) -> None:
        if self._screen.draws():
            self._screen.show(f"step {step + 1}: {name}")
        elif self._screen.console.is_terminal:  # a stop was asked for
            self._screen.say(name)

    def stepped(self, summary: StepMetrics) -> None:
        self._screen.row(step_cells(summary), _COLUMNS)
        if refilled := refill_line(summary):
            self._screen.say(refilled)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._screen.say(evaluation_line(step, metrics))


def refill_line(summary: StepMetrics) -> str:
    """What dynamic sampling did in a step; empty where there was no refill."""
    if not summary["rollout/refills"]:
        return ""
    return (
        f"{count(summary['rollout/refills'], 'refill')}: {count(summary['rollout/samples'], 'response')}, "
        f"{summary['rollout/trained_samples']:.0f} trained on, {summary['rollout/teaching_share']:.0%} of groups teach"
    )


@contextmanager
def make_reporter(shows: bool, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[Reporter]:
    """The reporter for this rank; ``is_stopping``: whether the run has been asked to stop."""
    with Screen(shows, is_stopping) as screen:
        yield StepReporter(screen)


def print_result(config: Config, result: RunResult) -> None:
    """How a run ended and where it wrote."""
    console = make_console()
    if result.first_step >= config.run.num_steps:
        text = (
            f"already finished: {count(result.num_steps, 'step')} in {config.folder}; raise run.num_steps to continue"
        )
    elif result.finished:
        steps = count(result.num_steps, "step")
        text = f"finished: {steps}, policy {result.policy_sha256[:12]}, written to {config.folder}"
    else:
        committed = max(read_lines(RunFolder(config.folder).metrics), default=-1) + 1  # a start may have taken up fewer
        done = max(result.num_steps, committed)
        text = (
            f"stopped early ({result.stop_reason}) after {done} of {count(config.run.num_steps, 'step')}; "
            f"the same command resumes from {config.folder}"
        )
    console.print(text, soft_wrap=True)


def print_comparison(comparison: Comparison, rows: Mapping[str, Sequence[str]], *last_lines: str) -> None:
    """The table of ``tlt compare`` and ``tlt ablate``, and whether the runs were equal."""
    console = make_console()
    guard = "on" if comparison.tie_guard else "off"
    table = Table(
        title=f"{count(comparison.num_steps, 'step')} on {count(comparison.num_ranks, 'rank')}, tie guard {guard}"
    )
    for name in ("", *comparison.runs):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    for line in (equality_of(comparison), *filter(None, last_lines), f"written to {comparison.folder}"):
        console.print(line, soft_wrap=True)


# -- tlt warmup -----------------------------------------------------------------------------------------------------

_CURVE_COLUMNS = ("updates", "tokens", "loss", "accept length", "seconds")


def curve_cells(point: CurvePoint) -> tuple[str, ...]:
    """A validation's figures, in the order of the columns."""
    loss = "-" if point.loss is None else f"{point.loss:.3f}"
    return (f"{point.updates}", f"{point.tokens:,}", loss, f"{point.accept_length:.3f}", f"{point.seconds:.0f}")


def seconds_left(progress: Progress, config: Config) -> float:
    """Of the training, if it continues as it did and no budget but the updates and tokens ends it."""
    done = progress.share_done(config.warmup)
    return progress.seconds / done * (1.0 - done) if done else 0.0


class WarmupScreen:
    """Shows a warm-up: a line for each validation."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._config: Config | None = None
        self._left = self._reads = ""

    def started(self, config: Config, texts: Texts, progress: Progress) -> None:
        self._config, self._reads = config, "logged responses" if texts.are_logged else "prompts to answer"
        note = f", resuming from update {progress.updates}" if progress.updates else ""
        kept = f"{count(len(texts.held_out), 'prompt')} held out"
        self._screen.say(f"{config.folder}: {len(texts.training):,} {self._reads}, {kept}{note}")

    def capturing(self, num_done: int, num_texts: int) -> None:
        self._screen.show_or_say(f"{self._reads}: {num_done:,} of {num_texts:,}")

    def training(self, num_documents: int, num_tokens: int) -> None:
        self._screen.say(f"training on {count(num_documents, 'response')}, {count(num_tokens, 'token')}")
        self._screen.row((*_CURVE_COLUMNS, "left"), (*_CURVE_COLUMNS, "left"))

    def learned(self, progress: Progress) -> None:
        assert self._config is not None
        self._left = f"{seconds_left(progress, self._config):.0f}"
        self._screen.show(
            f"training: {count(progress.updates, 'update')}, loss {progress.losses[-1]:.3f}", _REFRESH_SECONDS
        )

    def validated(self, point: CurvePoint, is_best: bool) -> None:
        names = (*_CURVE_COLUMNS, "left")
        self._screen.row((*curve_cells(point), self._left), names, "  best" if is_best else "")


@contextmanager
def make_warmup_reporter(shows: bool) -> Iterator[WarmupReporter]:
    """The reporter of a warm-up for this rank."""
    with Screen(shows) as screen:
        yield WarmupScreen(screen)


def print_warmup(result: WarmupResult, config_path: str, form: str) -> None:
    """The curve of a warm-up, how it ended, and what to type next with a drafter of this form."""
    console, progress = make_console(), result.progress
    best = progress.best
    if progress.curve:
        table = Table(*_CURVE_COLUMNS, "", box=None, header_style="bold")
        for point in progress.curve:
            table.add_row(*curve_cells(point), "best" if point == best else "")
        console.print(table)
    if not progress.is_finished:
        text = f"stopped early ({result.reason}) after {count(progress.updates, 'update')}; the same command resumes"
        console.print(f"{text} from {result.folder}", soft_wrap=True)
        return
    assert best is not None
    done = "already finished" if result.was_finished else "finished"
    drafter = result.folder / "drafter"
    console.print(
        f"{done} ({result.reason}): accept length {best.accept_length:.3f} after {count(best.updates, 'update')}, "
        f"kept in {drafter}\nnext: tlt train {config_path} drafter.form={form} drafter.init={drafter}",
        soft_wrap=True,
    )
