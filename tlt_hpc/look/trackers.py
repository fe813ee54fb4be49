"""Trackers, which show a run's metrics elsewhere: TensorBoard, and the thread in which a tracker is called."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from queue import Full, Queue
from typing import Any

from tlt_hpc.common.printable import one_line
from tlt_hpc.common.source import load_extra
from tlt_hpc.config import Config
from tlt_hpc.storage.folder import RunFolder

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""Seconds that one call of a tracker may take, and that the end of a run waits for it."""
MAX_BEHIND = 100
"""Steps that a tracker may be behind, not counting those of earlier starts."""
EXIT_SECONDS = 5.0
"""Seconds that the exit of the process waits for a tracker that was dropped."""

Figures = Mapping[str, float]


class TrackerThread:
    """Calls a tracker in a thread of its own: the training loop never waits for it.

    If the tracker fails, does not answer or is too slow, one warning is printed and nothing more is called.
    """

    def __init__(self, name: str) -> None:
        self.is_done = False
        """True if nothing more will be called."""
        self.is_dropped = False
        self.remedy = ""
        """``Tracker.remedy``."""
        self._name = name
        self._calls: Queue[Sequence[Callable[[], None]]] = Queue(MAX_BEHIND)
        self._called_at = math.inf
        """Time at which the call began that has not returned."""
        self._dropping = threading.Lock()
        # a daemon is not joined at exit: the other ranks may wait for this process to end
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def enqueue_calls(self, calls: Sequence[Callable[[], None]]) -> None:
        """Have ``calls`` called in this order, after earlier ones; returns at once."""
        if self.is_active_else_stop() and calls:
            try:
                self._calls.put_nowait(calls)
            except Full:
                self.warn_and_stop(f"is more than {MAX_BEHIND} steps behind")

    def is_active_else_stop(self) -> bool:
        """True if it may still call something; not if a call takes too long, of which this warns."""
        if time.monotonic() - self._called_at > ANSWER_SECONDS:
            self.warn_and_stop(f"has not answered for {ANSWER_SECONDS:.0f} s")
        return not self.is_done

    def end(self) -> None:
        """Call nothing more."""
        self.is_done = True

    def warn_and_stop(self, why: str) -> None:
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
                    self.warn_and_stop(f"failed ({type(error).__name__}: {one_line(error)})")
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
    """True if it is to be given all steps again although it has a ``run_id``."""
    remedy = ""
    """The command to type if it cannot be closed."""

    @abstractmethod
    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None: ...

    @staticmethod  # noqa: B027
    def start_early() -> None:
        """Do what must be done before MPI starts."""

    @staticmethod  # noqa: B027
    def limit_exit_delay() -> None:
        """Keep the library from delaying the exit of this process by more than ``EXIT_SECONDS``."""

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
        """Add a step's figures as scalars, and flush."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


def tracker_of(name: str) -> type[Tracker]:
    """The tracker of a package.

    Raises:
        UserError: this installation lacks the package that has it.
    """
    if name == "tensorboard":
        return TensorBoard
    found: type[Tracker] = load_extra("tlt_hpc.extras.trackers").WeightsAndBiases
    return found
