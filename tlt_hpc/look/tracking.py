"""Keeps trackers in step with ``metrics.jsonl`` through kills and resumes.

Steps that a tracker was given cannot be taken back: for each tracker ``tracking.json`` in the run's folder has the
first step that it has not been given, and the id of its run. After steps were taken back, all are given to another run.
What lies in the run's folder is written again from the first step at each start instead, because a kill takes what
the library had in memory: TensorBoard's event files, W&B's offline file, trackio's database.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from queue import Full, Queue
from typing import Any

from tlt_hpc.common.extras import load_extra
from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.common.printable import one_line
from tlt_hpc.common.words import FIRST_STEP
from tlt_hpc.config import Config, TrackingSection
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

FAILED_FINISH_SECONDS = 5.0
"""How long the end of a run waits for trackers if an exception ends it, because all other ranks wait."""
_POLL_SECONDS = 0.05


class Tracking:
    """The trackers of a run; used on rank 0 only. They are opened with the first step, each in a thread of its own."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Raises:
        UserError: a required package, or part of this one, is not installed.
        """
        config.tracking.check_installed()
        self._config, self._folder = config, folder
        self._waiting = list(config.tracking.packages)
        self._kinds = {name: tracker_of(name) for name in self._waiting}
        self._workers: dict[str, TrackerThread] = {}
        self._num_told = 0
        """Of how many steps the workers have been told."""
        self._noting = threading.Lock()
        # from here on: used by the workers
        self._trackers: dict[str, Tracker] = {}
        self._given: dict[str, int] = {}
        """By tracker, the first step that it has not been given."""
        self._state: dict[str, int | str] = {}
        """What tracking.json holds."""

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        until = time.monotonic() + (FAILED_FINISH_SECONDS if kind else ANSWER_SECONDS)
        self.close(lambda: until - time.monotonic(), failed=kind is not None)

    def follow(self, num_steps: int) -> None:
        """Give every tracker the steps below ``num_steps`` that it has not had; waits for none of them.

        A tracker that fails or does not answer causes a warning and is not used again until the next start.
        """
        if not self._waiting and not any(worker.is_waited_for() for worker in self._workers.values()):
            return
        lines = read_lines(self._folder.metrics, 0 if self._waiting else self._num_told)
        if self._waiting:
            self._state = self._read_state()
            for name in self._waiting:
                worker = self._workers[name] = TrackerThread(name)
                worker.put([partial(self._open, name, worker, lines.keys(), num_steps)])
            self._waiting = []
        new = [(step, numbers_of(lines[step])) for step in range(self._num_told, num_steps) if step in lines]
        self._num_told = num_steps
        for name, worker in self._workers.items():
            worker.put([partial(self._give, name, step, figures) for step, figures in new])

    def close(self, seconds_left: Callable[[], float], failed: bool = False) -> bool:
        """Close all trackers while there is time left, which may shrink meanwhile; False if one was dropped.

        ``failed``: an exception ends the run.
        """
        workers, self._workers = self._workers, {}
        for name, worker in workers.items():
            worker.put([partial(self._close, name, failed), worker.end])
        while any(worker.is_waited_for() for worker in workers.values()) and seconds_left() > 0:
            time.sleep(_POLL_SECONDS)
        for name, worker in workers.items():
            worker.drop("had no time left to end")
            if worker.is_dropped:
                self._kinds[name].abandon()
        return not any(worker.is_dropped for worker in workers.values())

    def _open(self, name: str, worker: TrackerThread, steps: Set[int], num_steps: int) -> None:
        run_id, given = str(self._state.get(f"{name}_id", "")), int(self._state.get(name, 0))
        # if its last step is still in the log, only that step's evaluation was interrupted, and will be completed later
        was_taken_back = given > num_steps and given - 1 not in steps
        if was_taken_back or not run_id:
            run_id, given = "", 0
            self._note(name, 0, "")  # also if it cannot be opened now: its run has steps that no longer exist
        tracker = self._trackers[name] = self._kinds[name](self._config, self._folder, run_id)
        worker.remedy = tracker.remedy
        self._note(name, 0 if tracker.gets_all else given, tracker.run_id)

    def _give(self, name: str, step: int, figures: Figures) -> None:
        if step >= self._given[name]:
            # before it is given: it cannot be replaced, so rather none than two
            self._note(name, step + 1, self._trackers[name].run_id)
            self._trackers[name].log(step + FIRST_STEP, figures)

    def _close(self, name: str, failed: bool) -> None:
        self._trackers[name].close(failed)

    def _note(self, name: str, given: int, run_id: str) -> None:
        """Record how far a tracker is, without ``run_id`` that it has no run that can be continued."""
        self._given[name] = given
        with self._noting:
            state = {key: value for key, value in self._state.items() if key not in (name, f"{name}_id")}
            state |= {name: given, f"{name}_id": run_id} if run_id else {}
            if state != self._state:
                with writing_beside(self._folder.tracking) as part:
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


def numbers_of(line: Line) -> dict[str, float]:
    """The numbers of a step's line."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def start_early(section: TrackingSection) -> None:
    """Start the processes of the configured trackers: processes must be started before MPI."""
    for name in section.packages:
        try:
            tracker_of(name).start_early()
        except Exception as error:  # noqa: BLE001 (wandb's service raises some that are not wandb.Error)
            logger.warning("%s's own process did not start: %s", name, error)


ANSWER_SECONDS = 60.0
"""How long one call of a tracker may take, and how long the end of a run waits for it."""
MAX_BEHIND = 100
"""How many steps a tracker may be behind, not counting those of earlier starts."""
EXIT_SECONDS = 5.0
"""How long the exit of the process waits for a tracker that was dropped."""
_OTHERS = "tlt_hpc.extras.trackers"

Figures = Mapping[str, float]


class TrackerThread:
    """Calls a tracker in a thread of its own: the training loop never waits for it.

    If the tracker fails, does not answer or is too slow, one warning is printed and nothing more is called.
    """

    def __init__(self, name: str) -> None:
        self.is_done = False
        """Whether nothing more will be called."""
        self.is_dropped = False
        self.remedy = ""
        """As that of the tracker."""
        self._name = name
        self._calls: Queue[Sequence[Callable[[], None]]] = Queue(MAX_BEHIND)
        self._called_at = math.inf
        """When the call began that has not returned."""
        self._dropping = threading.Lock()
        # a daemon is not joined at exit: the other ranks may wait for this process to end
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, calls: Sequence[Callable[[], None]]) -> None:
        """Have ``calls`` called in this order, after earlier ones; returns at once."""
        if self.is_waited_for() and calls:
            try:
                self._calls.put_nowait(calls)
            except Full:
                self.drop(f"is more than {MAX_BEHIND} steps behind")

    def is_waited_for(self) -> bool:
        """Whether it may still call something; not if a call takes too long, of which this warns."""
        if time.monotonic() - self._called_at > ANSWER_SECONDS:
            self.drop(f"has not answered for {ANSWER_SECONDS:.0f} s")
        return not self.is_done

    def end(self) -> None:
        """Call nothing more."""
        self.is_done = True

    def drop(self, why: str) -> None:
        """Warn and call nothing more, if that has not happened yet."""
        with self._dropping:
            if self.is_done:
                return
            self.is_done = self.is_dropped = True
        logger.warning(
            "%s %s: the run continues without it; metrics.jsonl has every step, and the next start sends the rest%s",
            self._name, why, self.remedy,
        )  # fmt: skip

    def _work(self) -> None:
        while not self.is_done:
            for call in self._calls.get():
                self._called_at = time.monotonic()
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 (libraries raise anything; the thread would end unseen)
                    self.drop(f"failed ({type(error).__name__}: {one_line(error)})")
                if self.is_done:
                    return
            self._called_at = math.inf


class Tracker(ABC):
    """A run of a tracker, which continues that of an earlier start if it is opened with its ``run_id``.

    Opened and called in a thread of its own, which may still be in a call when the process ends.
    """

    run_id = ""
    """Empty if each start makes a new run and gives it all steps."""
    gets_all = False
    """Whether it is to be given all steps again although it has a ``run_id``."""
    remedy = ""
    """What to type if it cannot be closed."""

    @abstractmethod
    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None: ...

    @staticmethod  # noqa: B027
    def start_early() -> None:
        """Do what must be done before MPI starts."""

    @staticmethod  # noqa: B027
    def abandon() -> None:
        """See to it that the library does not hold up the exit of this process for more than ``EXIT_SECONDS``."""

    @abstractmethod
    def log(self, step: int, figures: Figures) -> None:
        """Add a step, numbered from 1, each once and in ascending order."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Send the rest; ``failed``: an exception ends the run."""


class TensorBoard(Tracker):
    """Event files in the run's folder, through torch; those of earlier starts are removed."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for path in (place := folder.path / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink()
        self._writer: Any = SummaryWriter(str(place), max_queue=1000)

    def log(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def tracker_of(name: str) -> type[Tracker]:
    """The tracker of a package, which is also its key of the section ``tracking``."""
    found: type[Tracker] = TensorBoard if name == "tensorboard" else load_extra(_OTHERS).TRACKERS[name]
    return found
