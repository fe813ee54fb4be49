"""What a user sees while a run goes on: a live table in a terminal, one line a step elsewhere. Reads, never decides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from tlt_hpc.cluster.local import TERMINAL_VARIABLE
from tlt_hpc.common.console import TextConsole, make_bar, start_escaped
from tlt_hpc.common.words import count
from tlt_hpc.config import Config
from tlt_hpc.look.metrics import StepMetrics
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.storage.drafter_facts import CurvePoint
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.ablate.ablate import StoppedAblation
from tlt_hpc.studies.ablate.figures import AblationFigures, cells_of, verdict
from tlt_hpc.studies.compare import Comparison, ModeFigures
from tlt_hpc.studies.warmup.progress import Progress, share_done
from tlt_hpc.studies.warmup.texts import Texts
from tlt_hpc.studies.warmup.warm_up import WarmupReporter, WarmupResult
from tlt_hpc.train import Reporter, RunResult

_REFRESH_SECONDS = 0.2
_COLUMNS = ("step", "reward", "length", "max", "accept", "idle s", "harvested s", "drafter", "rollout s", "step s")


def make_console() -> Console:
    """Rank 0's console; a terminal behind the launcher's pipe is still a terminal."""
    width = os.environ.get(TERMINAL_VARIABLE)
    return TextConsole(force_terminal=True, width=int(width)) if width else TextConsole(width=120, force_terminal=False)


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
    note = f", going on from step {first_step}" if first_step else ""
    return f"{config.folder} ({config.speculation.mode}): {count(config.run.num_steps, 'step')}{note}"


class SilentReporter:
    """Shows nothing: every rank but the first."""

    def replayed(self, step: int) -> None: ...

    def started(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None: ...

    def rolling(self, step: int, roster: Roster) -> None: ...

    def phase(self, step: int, name: str) -> None: ...

    def stepped(self, summary: StepMetrics) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...


class LineReporter:
    """One line a step, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_first = True

    def replayed(self, step: int) -> None:
        self._console.print(f"step {step}: its update repeated from the rollout log, nothing generated again")

    def started(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None:
        self._console.print(run_line(config, first_step), soft_wrap=True)
        if self._is_first:
            self._console.print(memory_line(memory), soft_wrap=True)
        self._is_first = False
        self._console.print("".join(f"{name:>12}" for name in _COLUMNS))

    def rolling(self, step: int, roster: Roster) -> None: ...

    def phase(self, step: int, name: str) -> None: ...

    def stepped(self, summary: StepMetrics) -> None:
        self._console.print("".join(f"{cell:>12}" for cell in step_cells(summary)))
        if refilled := refill_line(summary):
            self._console.print(refilled)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._console.print(evaluation_line(step, metrics), soft_wrap=True)


def refill_line(summary: StepMetrics) -> str:
    """What dynamic sampling did in a step; empty where there was no refill."""
    if not summary["rollout/refills"]:
        return ""
    return (
        f"{count(summary['rollout/refills'], 'refill')}: {count(summary['rollout/samples'], 'response')}, "
        f"{summary['rollout/trained_samples']:.0f} trained on, {summary['rollout/teaching_share']:.0%} of groups teach"
    )


class LiveReporter:
    """A progress bar with the phase, and a table of the last steps."""

    _ROWS = 12

    def __init__(self, console: Console, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._has_left = False
        self._bar = make_bar(console, "phase")
        self._task = self._bar.add_task("", total=None, phase="")
        self._rows: list[tuple[str, ...]] = []
        self._is_first = True
        self._shown_at = 0.0
        self._live = Live(self._render(), console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> LiveReporter:
        start_escaped(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_left():
            self._live.stop()

    def _is_left(self) -> bool:
        """Whether what is drawn stays as it stands, as a stop was asked for: the launcher writes of that below it."""
        if self._has_left or not self._is_stopping():
            return self._has_left
        console = self._bar.console
        console.quiet = True  # a last drawing is part of the stop
        self._live.stop()
        console.quiet = False
        console.show_cursor()
        console.line()
        self._has_left = True
        return True

    def replayed(self, step: int) -> None:
        self._show(f"step {step} repeated from the rollout log")

    def started(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None:
        if self._rows:  # of the run before, which stay
            self._bar.console.print(self._table())
        self._rows = []
        self._bar.console.print(run_line(config, first_step), soft_wrap=True)
        if self._is_first:
            self._bar.console.print(memory_line(memory))
        self._is_first = False
        name = " ".join(dict.fromkeys([config.run.name, config.speculation.mode]))
        self._bar.reset(self._task, total=config.run.num_steps, completed=first_step, description=name)
        self._show("starting")

    def rolling(self, step: int, roster: Roster) -> None:
        if time.monotonic() - self._shown_at < _REFRESH_SECONDS:
            return
        left = sum(status.sequences_left for status in roster.statuses)
        training = sum(status.drafter_steps > 0 for status in roster.statuses)
        self._show(f"rollout: {left} left, {roster.num_busy} busy, {training} training")

    def phase(self, step: int, name: str) -> None:
        self._show(name)

    def stepped(self, summary: StepMetrics) -> None:
        if self._is_left():
            self._rows = [step_cells(summary)]
            self._bar.console.print(self._table())
            return
        self._rows = [*self._rows, step_cells(summary)][-self._ROWS :]
        self._bar.update(self._task, advance=1)
        self._show(refill_line(summary) or "done")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._is_left()
        self._bar.console.print(evaluation_line(step, metrics), soft_wrap=True)

    def _show(self, phase: str) -> None:
        if self._is_left():
            if not phase.startswith("rollout: "):
                self._bar.console.print(phase)
            return
        self._bar.update(self._task, phase=phase)
        self._shown_at = time.monotonic()
        self._live.update(self._render(), refresh=True)

    def _table(self) -> Table:
        table = Table(*_COLUMNS, box=None, header_style="bold", pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for row in self._rows:
            table.add_row(*row)
        return table

    def _render(self) -> Group:
        return Group(self._bar, self._table(), "")  # what a launcher writes of a Ctrl-C begins on the empty line


@contextmanager
def make_reporter(shows: bool, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[Reporter]:
    """The reporter for this rank and its output; ``is_stopping``: whether the run has been asked to stop."""
    if not shows:
        yield SilentReporter()
        return
    console = make_console()
    if not console.is_terminal:
        yield LineReporter(console)
        return
    with LiveReporter(console, is_stopping) as reporter:
        yield reporter


def print_result(config: Config, result: RunResult) -> None:
    """How a run ended and where it wrote."""
    console = make_console()
    if result.first_step >= config.run.num_steps:
        text = f"already finished: {count(result.num_steps, 'step')} in {config.folder}; raise run.num_steps to go on"
    elif result.finished:
        steps = count(result.num_steps, "step")
        text = f"finished: {steps}, policy {result.policy_sha256[:12]}, written to {config.folder}"
    else:
        committed = max(read_lines(RunFolder(config.folder).metrics), default=-1) + 1  # a start may have taken up fewer
        done = max(result.num_steps, committed)
        text = (
            f"stopped early ({result.stop_reason}) after {done} of {count(config.run.num_steps, 'step')}; "
            f"the same command goes on from {config.folder}"
        )
    console.print(text, soft_wrap=True)


def print_comparison(comparison: Comparison) -> None:
    """The table of ``tlt compare``."""
    console = make_console()
    guard = "on" if comparison.tie_guard else "off"
    table = Table(
        title=f"{count(comparison.num_steps, 'step')} on {count(comparison.num_ranks, 'rank')}, tie guard {guard}"
    )
    table.add_column("")
    for mode_name in comparison.modes:
        table.add_column(mode_name, justify="right")
    rows: dict[str, Callable[[ModeFigures], str]] = {
        "tokens": lambda m: f"{m.tokens:,}",
        "reward, mean": lambda m: f"{m.reward_mean:.4f}",
        "policy sha256": lambda m: m.policy_sha256[:12],
        "guarded near-ties": lambda m: f"{m.guarded_near_ties}",
        "accept length": lambda m: f"{m.accept_length:.3f}",
        "rollout seconds": lambda m: f"{m.rollout_seconds:.2f}",
        "step seconds": lambda m: f"{m.step_seconds:.2f}",
        "idle rank-seconds": lambda m: f"{m.idle_rank_seconds:.2f}",
        "harvested rank-seconds": lambda m: f"{m.harvested_rank_seconds:.2f}",
        "drafter steps": lambda m: f"{m.drafter_steps}",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(mode) for mode in comparison.modes.values()))
    for what in ("rollout", "step"):
        cells = [f"{comparison.speedup(mode, what):.2f}x" for mode in comparison.modes]
        table.add_row(f"{what} speed, plain = 1", *cells)
    console.print(table)
    within = f" within {comparison.policy_tolerance:.2g}" if comparison.policy_tolerance else ""
    verdict = (
        f"tokens equal: {_yes(comparison.tokens_equal)} ({comparison.mismatched_tokens} mismatched); rewards equal: "
        f"{_yes(comparison.rewards_equal)}; final policy weights equal{within}: {_yes(comparison.policy_equal)}"
    )
    if comparison.policy_tolerance:
        apart = f"{comparison.policy_difference:.2g} apart"
        verdict += f" ({apart}: algorithm.rollout_correction reads the rollout's last bits)"
    console.print(verdict, soft_wrap=True)
    console.print(f"written to {comparison.folder}", soft_wrap=True)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


# -- tlt warmup -----------------------------------------------------------------------------------------------------

_CURVE_COLUMNS = ("updates", "tokens", "loss", "accept length", "seconds")
_LINE_SECONDS = 15.0
"""Between lines on the capture, where there is no bar."""


def curve_cells(point: CurvePoint) -> tuple[str, ...]:
    """A validation's figures, in the order of the columns."""
    loss = "-" if point.loss is None else f"{point.loss:.3f}"
    return (f"{point.updates}", f"{point.tokens:,}", loss, f"{point.accept_length:.3f}", f"{point.seconds:.0f}")


def seconds_left(progress: Progress, config: Config) -> float:
    """Of the training, if it goes on as it did and no budget but the updates and tokens ends it."""
    done = share_done(progress, config.warmup)
    return progress.seconds / done * (1.0 - done) if done else 0.0


class SilentWarmupReporter:
    """Shows nothing: every rank but the first."""

    def started(self, config: Config, texts: Texts, progress: Progress) -> None: ...

    def capturing(self, num_done: int, num_texts: int, num_tokens: int) -> None: ...

    def training(self, num_documents: int, num_tokens: int) -> None: ...

    def learned(self, progress: Progress, loss: float) -> None: ...

    def validating(self) -> None: ...

    def validated(self, point: CurvePoint, is_best: bool) -> None: ...


class WarmupLines(SilentWarmupReporter):
    """One line a validation, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._config: Config | None = None
        self._left = ""
        self._shown_at = time.monotonic()
        self._reads = ""

    def started(self, config: Config, texts: Texts, progress: Progress) -> None:
        self._config, self._reads = config, _reads(texts)
        note = f", going on from update {progress.updates}" if progress.updates else ""
        kept = f"{count(len(texts.held_out), 'prompt')} held out"
        self._console.print(f"{config.folder}: {len(texts.training):,} {self._reads}, {kept}{note}", soft_wrap=True)

    def capturing(self, num_done: int, num_texts: int, num_tokens: int) -> None:
        if time.monotonic() - self._shown_at >= _LINE_SECONDS:
            self._shown_at = time.monotonic()
            self._console.print(f"{self._reads}: {num_done:,} of {num_texts:,}", soft_wrap=True)

    def training(self, num_documents: int, num_tokens: int) -> None:
        self._console.print(f"training on {count(num_documents, 'response')}, {count(num_tokens, 'token')}")
        self._console.print("".join(f"{name:>16}" for name in (*_CURVE_COLUMNS, "left")))

    def learned(self, progress: Progress, loss: float) -> None:
        assert self._config is not None
        self._left = f"{seconds_left(progress, self._config):.0f}"

    def validated(self, point: CurvePoint, is_best: bool) -> None:
        cells = (*curve_cells(point), self._left)
        self._console.print("".join(f"{cell:>16}" for cell in cells) + ("  best" if is_best else ""))


def _reads(texts: Texts) -> str:
    return "logged responses" if texts.are_logged else "prompts to answer"


class WarmupBar(SilentWarmupReporter):
    """A progress bar for the phase, and the curve so far above it."""

    def __init__(self, console: Console) -> None:
        self._bar = make_bar(console, "figures")
        self._task = self._bar.add_task("", total=None, figures="")
        self._config: Config | None = None
        self._best = "-"
        self._reads = ""

    def __enter__(self) -> WarmupBar:
        start_escaped(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, config: Config, texts: Texts, progress: Progress) -> None:
        self._config, self._reads = config, _reads(texts)
        best = progress.best
        self._best = "-" if best is None else f"{best.accept_length:.3f}"
        self._bar.console.print(f"{config.folder}: {count(len(texts.held_out), 'prompt')} held out", soft_wrap=True)

    def capturing(self, num_done: int, num_texts: int, num_tokens: int) -> None:
        figures = f"{count(num_tokens, 'token')}" if self._reads.startswith("prompts") else ""
        self._bar.update(self._task, description=self._reads, total=num_texts, completed=num_done, figures=figures)

    def training(self, num_documents: int, num_tokens: int) -> None:
        self._bar.console.print(f"training on {count(num_documents, 'response')}, {count(num_tokens, 'token')}")
        self._bar.reset(self._task, description="training", total=None, figures="")

    def learned(self, progress: Progress, loss: float) -> None:
        assert self._config is not None
        total = round(progress.updates / max(share_done(progress, self._config.warmup), 1e-9))
        figures = f"{count(progress.tokens, 'token')}, loss {loss:.3f}, accept length {self._best}"
        self._bar.update(self._task, description="training", total=total, completed=progress.updates, figures=figures)

    def validating(self) -> None:
        self._bar.update(self._task, description="validating")

    def validated(self, point: CurvePoint, is_best: bool) -> None:
        if is_best:
            self._best = f"{point.accept_length:.3f}"
        names = ", ".join(f"{name} {cell}" for name, cell in zip(_CURVE_COLUMNS, curve_cells(point), strict=True))
        self._bar.console.print(names + ("  best" if is_best else ""), soft_wrap=True)


@contextmanager
def make_warmup_reporter(shows: bool) -> Iterator[WarmupReporter]:
    """The reporter of a warm-up for this rank and its output."""
    if not shows:
        yield SilentWarmupReporter()
        return
    console = make_console()
    if not console.is_terminal:
        yield WarmupLines(console)
        return
    with WarmupBar(console) as reporter:
        yield reporter


def print_warmup(result: WarmupResult, config_path: str, form: str) -> None:
    """The curve of a warm-up, how it ended, and what to type next with a drafter of this form."""
    console, progress = make_console(), result.progress
    best = progress.best
    if progress.curve:
        table = Table(*_CURVE_COLUMNS, "", box=None, header_style="bold")
        for point in progress.curve:
            table.add_row(*curve_cells(point), "best" if point == best else "")
        console.print(table)
    if not result.finished:
        text = f"stopped early ({result.reason}) after {count(progress.updates, 'update')}; the same command goes on"
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


# -- tlt ablate -----------------------------------------------------------------------------------------------------


def print_ablation(figures: AblationFigures, written: list[Path]) -> None:
    """The table of ``tlt ablate``, whether the text was equal, and what it comes to."""
    console = make_console()
    guard = "on" if figures.tie_guard else "off"
    table = Table(title=f"{count(figures.num_steps, 'step')} on {count(figures.num_ranks, 'rank')}, tie guard {guard}")
    head, *rows = cells_of(figures)
    for name in head:
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        f"tokens equal: {_yes(figures.equal['tokens'])} ({figures.num_mismatched} mismatched); rewards equal: "
        f"{_yes(figures.equal['rewards'])}; final policy weights equal: {_yes(figures.equal['policy'])}",
        soft_wrap=True,
    )
    if verdict(figures):
        console.print(verdict(figures), soft_wrap=True)
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


def print_stopped_ablation(ending: StoppedAblation, config_path: str) -> None:
    """How to resume it."""
    folder = ending.ablation.folder
    text = f"stopped early ({ending.reason}); go on with: tlt ablate {config_path} --resume {folder}"
    make_console().print(f"{text}, and the same overrides", soft_wrap=True)
