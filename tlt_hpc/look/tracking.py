"""Keeps trackers in step with ``metrics.jsonl`` through kills and resumes.

Steps that a tracker was given cannot be taken back: for each tracker ``tracking.json`` in the run's folder has the
first step that it has not been given, and the id of its run. After steps were taken back, all are given to another run.
TensorBoard's event files are written again from the first step at each start instead.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.config import Config, TrackingSection, UserError
from tlt_hpc.look.trackers import FINISH_SECONDS, TRACKERS, Tracker
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

FAILED_FINISH_SECONDS = 5.0
"""How long the end of a run waits for trackers if an exception ends it, because all other ranks wait."""
_POLL_SECONDS = 0.05

T = TypeVar("T")


class Tracking:
    """The trackers of a run; used on rank 0 only. They are opened with the first step."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Raises:
        UserError: a required package is not installed.
        """
        config.tracking.check_installed()
        self._config, self._folder = config, folder
        self._waiting = list(config.tracking.packages)
        self._trackers: dict[str, Tracker] = {}
        self._given: dict[str, int] = {}
        """By tracker, the first step that it has not been given."""
        self._state: dict[str, int | str] = {}
        """What tracking.json holds."""

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        until = time.monotonic() + (FAILED_FINISH_SECONDS if kind else FINISH_SECONDS)
        self.close(lambda: until - time.monotonic(), failed=kind is not None)

    def follow(self, num_steps: int) -> None:
        """Give every tracker the steps below ``num_steps`` that it has not had.

        A tracker that fails causes a warning and is not used again until the next start.
        """
        if not self._waiting and not self._trackers:
            return
        lines = read_lines(self._folder.metrics)
        if self._waiting:
            self._state = self._read_state()
            for name in self._waiting:
                _attempt(name, partial(self._open, name, lines, num_steps))
            self._waiting = []
        for name in list(self._trackers):
            if not _attempt(name, partial(self._give, name, lines, num_steps)):
                del self._trackers[name]

    def close(self, seconds_left: Callable[[], float], failed: bool = False) -> bool:
        """Close all trackers while there is time left, which may shrink meanwhile; False if one did not finish.

        ``failed``: an exception ends the run.
        """
        trackers, self._trackers = self._trackers, {}
        # daemons, not joined at exit: the other ranks may wait for this process to end
        threads = {
            name: threading.Thread(target=_attempt, args=(name, partial(tracker.close, failed)), daemon=True)
            for name, tracker in trackers.items()
        }
        for thread in threads.values():
            thread.start()
        while any(thread.is_alive() for thread in threads.values()) and seconds_left() > 0:
            time.sleep(_POLL_SECONDS)
        late = [name for name, thread in threads.items() if thread.is_alive()]
        for name in late:
            remedy = trackers[name].remedy
            logger.warning("no time is left for %s to end: metrics.jsonl has every step%s", name, remedy)
        return not late

    def _open(self, name: str, lines: Mapping[int, Line], num_steps: int) -> None:
        run_id, given = str(self._state.get(f"{name}_id", "")), int(self._state.get(name, 0))
        # if its last step is still in the log, only that step's evaluation was interrupted, and will be completed later
        was_taken_back = given > num_steps and given - 1 not in lines
        if was_taken_back or not run_id:
            run_id, given = "", 0
            self._note(name, 0, "")  # also if it cannot be opened now: its run has steps that no longer exist
        self._trackers[name] = TRACKERS[name](self._config, self._folder, run_id)
        self._note(name, given, self._trackers[name].run_id)

    def _give(self, name: str, lines: Mapping[int, Line], num_steps: int) -> bool:
        tracker = self._trackers[name]
        for step in range(self._given[name], num_steps):
            # before it is given: it cannot be replaced, so rather none than two
            self._note(name, step + 1, tracker.run_id)
            if step in lines:
                tracker.log(step, numbers_of(lines[step]))
        return True

    def _note(self, name: str, given: int, run_id: str) -> None:
        """Record how far a tracker is, without ``run_id`` that it has no run that can be continued."""
        self._given[name] = given
        state = {key: value for key, value in self._state.items() if key not in (name, f"{name}_id")}
        state |= {name: given, f"{name}_id": run_id} if run_id else {}
        if state != self._state:
            with writing_beside(self._folder.tracking) as part:
                part.write_text(json.dumps(state) + "\n", encoding="utf-8")
            self._state = state

    def _read_state(self) -> dict[str, int | str]:
        path = self._folder.tracking
        try:
            return read_json(path, dict[str, int | str])
        except FileNotFoundError:
            return {}
        except DamagedText as error:
            raise UserError(f"{path} is damaged ({error}); remove it, and the trackers get new runs") from None


def numbers_of(line: Line) -> dict[str, float]:
    """The numbers of a step's line."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def start_early(section: TrackingSection) -> None:
    """Start the processes of the configured trackers: processes must be started before MPI."""
    for name in section.packages:
        try:
            TRACKERS[name].start_early()
        except TRACKERS[name].errors() as error:
            logger.warning("%s's own process did not start: %s", name, error)


def _attempt(name: str, action: Callable[[], T]) -> T | None:
    """The result of ``action``; if it fails, a warning and None."""
    try:
        return action()
    except TRACKERS[name].errors() as error:
        logger.warning(
            "%s failed (%s: %s): the run continues without it; metrics.jsonl has every step, and the next start sends "
            "the rest", name, type(error).__name__, error,
        )  # fmt: skip
        return None
