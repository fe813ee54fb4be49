"""``tlt watch``: shows a run's state, repeatedly or once."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from tlt_hpc.cluster.status import describe_pending_job
from tlt_hpc.cluster.watch.record import HEARTBEAT_SECONDS
from tlt_hpc.common.console import TextConsole
from tlt_hpc.common.errors import UserError
from tlt_hpc.look.live.samples import read_samples_as_text
from tlt_hpc.look.live.state import RunState, ask_slurm_state, read_state
from tlt_hpc.look.live.view import render
from tlt_hpc.look.run_log import RunLog

DEAD_SECONDS = 12.0
"""A run without any heartbeat for this long counts as dead; an active rank beats every HEARTBEAT_SECONDS."""
ASK_SECONDS = 30.0
"""How often Slurm is asked for the job of a run that has stopped."""
_INTERVAL_SECONDS, _ONCE_SECONDS, _POLL_SECONDS = 2.0, HEARTBEAT_SECONDS + 3.0, 0.2


def run(options: argparse.Namespace) -> int:
    """Show a run; returns the exit status.

    Raises:
        UserError: there is no such run, or not yet.
    """
    if not options.run.exists() and (job := describe_pending_job(options.run)):
        raise UserError(f"{options.run} does not exist yet: {job}; it is made once the job's ranks have started")
    console = TextConsole()
    if options.sample is not None:
        return print_samples(console, options)
    return (
        print_screen_once(console, options)
        if options.once or not console.is_terminal
        else redraw_until_end(console, options)
    )


def print_samples(console: Console, options: argparse.Namespace) -> int:
    """Print some responses of the newest step (``--sample``); returns the exit status.

    Raises:
        UserError: as ``read_samples_as_text``.
    """
    for text in read_samples_as_text(RunLog(options.run), options.sample):
        console.print(text, soft_wrap=not console.is_terminal)
        console.print()
    return 0


def print_screen_once(console: Console, options: argparse.Namespace) -> int:
    """Print one screen after two looks, which are seconds apart unless a heartbeat is seen earlier.

    Returns the exit status.

    Raises:
        UserError: there is no run.
    """
    before = state = read_state(options.run)
    until = before.seconds + (_ONCE_SECONDS if before.records and not before.ending else 0.0)
    while not state.heartbeat_changed_since(before) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        state = read_state(options.run)
    is_alive = state.heartbeat_changed_since(before)
    if not is_alive and state.may_be_queued:
        state = replace(state, queued=ask_slurm_state(state))
    console.print(render(state, is_alive, height=console.height if console.is_terminal else 40))
    return exit_status(state, is_alive)


def redraw_until_end(console: Console, options: argparse.Namespace) -> int:
    """Redraw the screen at each look, until Ctrl-C or the end of the run: not while its job is queued again.

    Returns the exit status.

    Raises:
        UserError: there is no run.
    """
    state = read_state(options.run)
    moved_at, is_alive = state.seconds, None
    asked_at, queued = -ASK_SECONDS, None
    try:
        with Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
            while True:
                if state.may_be_queued and (state.ending or is_alive is False):
                    if state.seconds - asked_at >= ASK_SECONDS:
                        asked_at, queued = state.seconds, ask_slurm_state(state)
                    state = replace(state, queued=queued)
                else:
                    asked_at = -ASK_SECONDS
                live.update(render(state, is_alive, console.height - 1), refresh=True)
                if is_over(state, is_alive):
                    return exit_status(state, is_alive)
                time.sleep(_INTERVAL_SECONDS)
                before, state = state, read_state(options.run)
                if state.heartbeat_changed_since(before):
                    moved_at = state.seconds
                is_alive = True if moved_at == state.seconds else is_alive
                if state.seconds - moved_at >= DEAD_SECONDS:
                    is_alive = False
    except KeyboardInterrupt:  # ends the watcher only, not the job
        return 0


def is_over(state: RunState, is_alive: bool | None) -> bool:
    """True if nothing more is to come: not while Slurm has the job, or where it may have it and does not answer."""
    if state.is_finished and is_alive is False:
        return True
    has_stopped = bool(state.ending) or (is_alive is False and state.queued == "")
    return has_stopped and not state.may_be_queued


def exit_status(state: RunState, is_alive: bool | None) -> int:
    """The exit status: 0 if the run is active, has finished or was stopped normally, else 1."""
    in_order = is_alive or state.is_starting or state.is_finished or state.ending in ("finished", "stopped early")
    return 0 if in_order and not state.is_stalled else 1
