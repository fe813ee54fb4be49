"""Keeps trackers in step with ``metrics.jsonl`` through kills and resumes.

Steps that a tracker was given cannot be taken back: for each tracker ``tracking.json`` in the run's folder has the
first step that it has not been given, and the id of its run. After steps were taken back, all are given to another run.
TensorBoard's event files and W&B's offline file are written again from the first step at each start, because a kill
takes what the library had in memory.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Set
from functools import partial

from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.common.formatting import FIRST_STEP
from tlt_hpc.config import Config, RunSection
from tlt_hpc.look.trackers import ANSWER_SECONDS, Figures, Tracker, TrackerThread, tracker_of
from tlt_hpc.storage.folder import RunFolder, writing_atomically
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

FAILED_FINISH_SECONDS = 5.0
"""Seconds that the end of a run waits for trackers if an exception ends it, because all other ranks wait."""
_POLL_SECONDS = 0.05


class Tracking:
    """The trackers of a run; used on rank 0 only. They are opened with the first step, each in a thread of its own."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Raises:
        UserError: a required package, or part of this one, is not installed.
        """
        config.run.check_trackers()
        self._config, self._folder = config, folder
        self._waiting = list(config.run.tracker_packages)
        self._kinds = {name: tracker_of(name) for name in self._waiting}
        self._workers: dict[str, TrackerThread] = {}
        self._num_queued = 0
        """Steps that were handed to the workers."""
        self._noting = threading.Lock()
        # from here on: used by the workers
        self._trackers: dict[str, Tracker] = {}
        self._given: dict[str, int] = {}
        """By tracker, the first step that it has not been given."""
        self._state: dict[str, int | str] = {}
        """Content of tracking.json."""

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        until = time.monotonic() + (FAILED_FINISH_SECONDS if kind else ANSWER_SECONDS)
        self.close(lambda: until - time.monotonic(), failed=kind is not None)

    def send_new_steps(self, num_steps: int) -> None:
        """Give every tracker the steps below ``num_steps`` that it has not had; waits for none of them.

        A tracker that fails or does not answer causes a warning and is not used again until the next start.
        """
        if not self._waiting and not any(worker.is_active_else_stop() for worker in self._workers.values()):
            return
        lines = read_lines(self._folder.metrics, 0 if self._waiting else self._num_queued)
        if self._waiting:
            self._state = self._read_state()
            for name in self._waiting:
                worker = self._workers[name] = TrackerThread(name)
                worker.enqueue_calls([partial(self._open, name, worker, lines.keys(), num_steps)])
            self._waiting = []
        new = [(step, numeric_values(lines[step])) for step in range(self._num_queued, num_steps) if step in lines]
        self._num_queued = num_steps
        for name, worker in self._workers.items():
            worker.enqueue_calls([partial(self._log_step, name, step, figures) for step, figures in new])

    def close(self, seconds_left: Callable[[], float], failed: bool = False) -> bool:
        """Close all trackers while there is time left, which may shrink meanwhile; False if one was dropped.

        ``failed``: an exception ends the run.
        """
        workers, self._workers = self._workers, {}
        for name, worker in workers.items():
            worker.enqueue_calls([partial(self._close, name, failed), worker.end])
        while any(worker.is_active_else_stop() for worker in workers.values()) and seconds_left() > 0:
            time.sleep(_POLL_SECONDS)
        for name, worker in workers.items():
            worker.warn_and_stop("had no time left to end")
            if worker.is_dropped:
                self._kinds[name].limit_exit_delay()
        return not any(worker.is_dropped for worker in workers.values())

    def _open(self, name: str, worker: TrackerThread, steps: Set[int], num_steps: int) -> None:
        run_id, given = str(self._state.get(f"{name}_id", "")), int(self._state.get(name, 0))
        # if its last step is still in the log, only that step's evaluation was interrupted, and will be completed later
        was_taken_back = given > num_steps and given - 1 not in steps
        if was_taken_back or not run_id:
            run_id, given = "", 0
            self._write_position(name, 0, "")  # also if it cannot be opened now: its run has steps that no longer exist
        tracker = self._trackers[name] = self._kinds[name](self._config, self._folder, run_id)
        worker.remedy = tracker.remedy
        self._write_position(name, 0 if tracker.gets_all else given, tracker.run_id)

    def _log_step(self, name: str, step: int, figures: Figures) -> None:
        if step >= self._given[name]:
            # before it is given: it cannot be replaced, so rather none than two
            self._write_position(name, step + 1, self._trackers[name].run_id)
            self._trackers[name].log(step + FIRST_STEP, figures)

    def _close(self, name: str, failed: bool) -> None:
        self._trackers[name].close(failed)

    def _write_position(self, name: str, given: int, run_id: str) -> None:
        """Record how far a tracker is, without ``run_id`` that it has no run that can be continued."""
        self._given[name] = given
        with self._noting:
            state = {key: value for key, value in self._state.items() if key not in (name, f"{name}_id")}
            state |= {name: given, f"{name}_id": run_id} if run_id else {}
            if state != self._state:
                with writing_atomically(self._folder.tracking) as part:
                    part.write_text(json.dumps(state) + "\n", encoding="utf-8")
                self._state = state

    def _read_state(self) -> dict[str, int | str]:
        path = self._folder.tracking
        try:
            state = read_json(path, dict[str, int | str])
            for key, value in state.items():
                if isinstance(value, str) is not key.endswith("_id"):
                    raise DamagedText(f"{ascii(key)[:80]} is {ascii(value)[:80]}")
        except FileNotFoundError:
            return {}
        except (DamagedText, OSError) as error:
            logger.warning("%s cannot be used (%s): the trackers get new runs", path, error)
            return {}
        return state


def numeric_values(line: Line) -> dict[str, float]:
    """The numbers of a step's line."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def start_early(section: RunSection) -> None:
    """Start the processes of the configured trackers: processes must be started before MPI."""
    for name in section.tracker_packages:
        try:
            tracker_of(name).start_early()
        except Exception as error:  # noqa: BLE001 (wandb's service raises some that are not wandb.Error)
            logger.warning("%s's own process did not start: %s", name, error)
