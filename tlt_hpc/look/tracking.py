"""Keeps TensorBoard and Weights & Biases in step with ``metrics.jsonl`` through kills and resumes.

``tracking.json`` in the run's folder has the first step that each tracker has not been given. A tracker that failed, or
was switched on late, catches up at the next start, and no step appears twice. Steps that the log no longer has were
taken back. The line of the last step may get evaluation metrics after it was tracked: TensorBoard gets it again at each
start, which W&B does not support.
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
from tlt_hpc.look.trackers import (
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
    """The trackers of a run; used on rank 0 only."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Trackers are opened with the first step.

        Raises:
            UserError: a required package is not installed.
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
        """Give every tracker the steps below ``num_steps`` that it has not had.

        A tracker that fails causes a warning and is not used again until the next start.
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
        """Close all trackers; ``failed``: an exception ends the run."""
        for tracker in self._trackers:
            self._close(tracker, failed)
        self._trackers = []

    def close_within(self, seconds_left: Callable[[], float]) -> bool:
        """Close all trackers while there is time left, which may shrink meanwhile; False if one did not finish."""
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
        """Give a tracker its missing steps; False if it failed."""

        def tell() -> bool:
            for step in range(self._next(tracker.name), num_steps):
                if tracker.name == WeightsAndBiases.name:  # it cannot replace a step: better none than two
                    self._note({tracker.name: step + 1})
                if step in lines:
                    tracker.log(step, figures_of(lines[step]))
                if tracker.name != WeightsAndBiases.name:
                    self._note({tracker.name: step + 1})
            return True

        return bool(_attempt(tracker.name, tracker.failures, tell))

    def _open(self, name: str, num_steps: int, lines: dict[int, Line]) -> Tracker:
        is_ahead = self._next(name) > num_steps
        # if its last step is still in the log, only that step's evaluation was interrupted, and will be completed later
        taken_back = is_ahead and self._next(name) - 1 not in lines
        if name == TensorBoard.name:
            if taken_back or not is_ahead:
                # repeat the last step: its line may have got evaluation metrics since
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
    """The numbers of a step's line."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def _attempt(name: str, failures: tuple[type[Exception], ...], action: Callable[[], T]) -> T | None:
    """The result of ``action``; if it fails, a warning and None."""
    try:
        return action()
    except failures as error:
        logger.warning(
            "%s failed (%s: %s): the run goes on without it; metrics.jsonl has every step, and the next start tells "
            "it what it missed", name, type(error).__name__, error,
        )  # fmt: skip
        return None
