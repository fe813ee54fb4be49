"""Keeps the trackers in step with ``metrics.jsonl``, whatever is killed, resumed or taken back. Knows no library.

``tracking.json`` in the run's folder says from which step on each tracker is still to be told, so one that failed, or
was switched on late, catches up at the next start, and no step shows twice. Steps count as taken back where the log
lacks what was told. The last step's line may be given an evaluation's figures after it was told: at each start
TensorBoard is told it again, W&B cannot be.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from uuid import uuid4

from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.config import Config, UserError
from tlt_hpc.config.tracking import asked_for, check_installed
from tlt_hpc.look.tracking.trackers import (
    Figures,
    TensorBoard,
    Tracker,
    WeightsAndBiases,
    failures_of,
)
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RUN_ID = "wandb_id"
_LOOK_SECONDS = 0.05


class Tracking:
    """The trackers of a run; on rank 0 alone."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Nothing is opened before the first step is told.

        Raises:
            UserError: a package that is asked for is not installed.
        """
        check_installed(config.tracking)
        self._config, self._folder = config, folder
        self._waiting = list(asked_for(config.tracking))
        self._trackers: list[Tracker] = []

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def follow(self, num_steps: int) -> None:
        """Tell every tracker what it has not been told of the first ``num_steps`` steps, as the log has them.

        A tracker that fails is warned of and told no more until the next start.
        """
        if not self._waiting and not self._trackers:
            return
        lines = read_lines(self._folder.metrics)
        waiting, self._waiting = self._waiting, []
        for name in waiting:
            opened = _attempt(name, failures_of(name), lambda name=name: self._open(name, num_steps, lines))  # type: ignore[misc]
            self._trackers += [] if opened is None else [opened]
        self._trackers = [tracker for tracker in self._trackers if self._tell(tracker, lines, num_steps)]

    def close(self, failed: bool = False) -> None:
        """Let go of all trackers; ``failed`` where an exception ends the run."""
        for tracker in self._trackers:
            self._close(tracker, failed)
        self._trackers = []

    def close_within(self, seconds_left: Callable[[], float]) -> bool:
        """The same as long as there is time, which may become less meanwhile; False where one did not end by then."""
        trackers, self._trackers = self._trackers, []
        threads = [threading.Thread(target=self._close, args=(tracker, False), daemon=True) for tracker in trackers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and seconds_left() > 0:
            time.sleep(_LOOK_SECONDS)
        late = [tracker for tracker, thread in zip(trackers, threads, strict=True) if thread.is_alive()]
        for tracker in late:
            logger.warning(
                "no time is left for %s to end: metrics.jsonl has every step%s", tracker.name,
                f"; {tracker.remedy}" if tracker.remedy else "",
            )  # fmt: skip
        return not late

    def _close(self, tracker: Tracker, failed: bool) -> None:
        _attempt(tracker.name, tracker.failures, lambda: tracker.close(failed))

    def _tell(self, tracker: Tracker, lines: dict[int, Line], num_steps: int) -> bool:
        """Tell a tracker; False where it failed."""

        def tell() -> bool:
            for step in range(self._next(tracker.name), num_steps):
                if tracker.name == WeightsAndBiases.name:  # it cannot take a step back: better none than twice
                    self._note({tracker.name: step + 1})
                if step in lines:
                    tracker.log(step, figures_of(lines[step]))
                if tracker.name != WeightsAndBiases.name:
                    self._note({tracker.name: step + 1})
            return True

        return bool(_attempt(tracker.name, tracker.failures, tell))

    def _open(self, name: str, num_steps: int, lines: dict[int, Line]) -> Tracker:
        is_ahead = self._next(name) > num_steps
        # otherwise all that was told still stands, but the last step's evaluation has been stopped: it goes on later
        taken_back = is_ahead and self._next(name) - 1 not in lines
        if name == TensorBoard.name:
            if taken_back or not is_ahead:
                # with the last one again: its line may have been given an evaluation's figures since
                self._note({name: max(0, min(self._next(name), num_steps) - 1)})
            return TensorBoard(self._folder.path / name, self._next(name))
        if taken_back or _RUN_ID not in self._state():
            self._note({name: 0, _RUN_ID: uuid4().hex[:12]})
        return WeightsAndBiases(self._config, self._folder.path, str(self._state()[_RUN_ID]))

    @property
    def _path(self) -> Path:
        return self._folder.tracking

    def _state(self) -> dict[str, Any]:
        try:
            return read_json(self._path, dict[str, int | str])
        except FileNotFoundError:
            return {}
        except DamagedText as error:
            raise UserError(f"{self._path} is damaged ({error}); remove it, and the trackers are told anew") from None

    def _next(self, name: str) -> int:
        return int(self._state().get(name, 0))

    def _note(self, change: dict[str, Any]) -> None:
        with writing_beside(self._path) as part:
            part.write_text(json.dumps({**self._state(), **change}) + "\n", encoding="utf-8")


def figures_of(line: Line) -> Figures:
    """What of a step's line is a number."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def _attempt(name: str, failures: tuple[type[Exception], ...], action: Callable[[], T]) -> T | None:
    """What the action returns; where it fails a warning, and None."""
    try:
        return action()
    except failures as error:
        logger.warning(
            "%s failed (%s: %s): the run goes on without it; metrics.jsonl has every step, and the next start tells "
            "it what it missed", name, type(error).__name__, error,
        )  # fmt: skip
        return None
