"""TensorBoard and Weights & Biases, kept in step with ``metrics.jsonl`` through kills and resumes.

TensorBoard's event files are written again from the first step at each start. Steps given to W&B cannot be taken back:
``tracking.json`` in the run's folder has the first step that it has not been given, and the id of its run; after steps
were taken back, all are given to another run. The libraries are imported only if asked for.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.config import Config, TrackingSection, UserError
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

FINISH_SECONDS = 120.0
"""How long the end of a run waits for Weights & Biases to upload the rest."""
FAILED_FINISH_SECONDS = 5.0
"""The same if an exception ends the run, because all other ranks wait."""
_RUN_ID = "wandb_id"
_WANDB, _TENSORBOARD = "wandb", "tensorboard"
_POLL_SECONDS = 0.05

T = TypeVar("T")


class TensorBoard:
    """Event files in a folder, through torch."""

    name, remedy = _TENSORBOARD, ""

    def __init__(self, folder: Path) -> None:
        """Event files of earlier starts are removed."""
        from torch.utils.tensorboard import SummaryWriter

        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer: Any = SummaryWriter(str(folder), max_queue=1000)
        self._next = 0

    def follow(self, lines: Mapping[int, Line], num_steps: int) -> bool:
        """Show the steps below ``num_steps`` that it has not had; True."""
        for step in range(self._next, num_steps):
            for name, value in numbers_of(lines.get(step, {})).items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._next = num_steps
        return True

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, with an id that is kept in the run's folder."""

    name = _WANDB

    def __init__(self, config: Config, folder: RunFolder, lines: Mapping[int, Line], num_steps: int) -> None:
        import wandb

        self._path = folder.tracking
        self._state = self._read_state()
        # if its last step is still in the log, only that step's evaluation was interrupted, and will be completed later
        was_taken_back = self._next > num_steps and self._next - 1 not in lines
        if was_taken_back or _RUN_ID not in self._state:
            self._note({_WANDB: 0, _RUN_ID: uuid4().hex[:12]})
        mode: Any = config.tracking.wandb
        folder.path.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "tlt",
            name=os.environ.get("WANDB_NAME") or config.run.name,
            id=str(self._state[_RUN_ID]),
            resume="allow",
            mode=mode,
            dir=str(folder.path),
            config=config.model_dump(),
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                finish_timeout=FINISH_SECONDS,  # also limits what wandb does at the exit of this process
                finish_timeout_raises=True,
            ),
        )
        self.remedy = f"; `wandb sync {Path(self._run.dir).parent}` sends the rest"

    def follow(self, lines: Mapping[int, Line], num_steps: int) -> bool:
        """Show the steps below ``num_steps`` that it has not had; True."""
        for step in range(self._next, num_steps):
            self._note({_WANDB: step + 1})  # before it is sent: it cannot be replaced, so rather none than two
            if step in lines:
                self._run.log(dict(numbers_of(lines[step])), step=step, commit=True)
        return True

    def close(self, failed: bool) -> None:
        """Upload the rest; ``failed``: an exception ends the run."""
        self._run.finish(exit_code=int(failed))

    @property
    def _next(self) -> int:
        return int(self._state.get(_WANDB, 0))

    def _read_state(self) -> dict[str, Any]:
        try:
            return read_json(self._path, dict[str, int | str])
        except FileNotFoundError:
            return {}
        except DamagedText as error:
            raise UserError(f"{self._path} is damaged ({error}); remove it, and W&B gets a new run") from None

    def _note(self, change: dict[str, Any]) -> None:
        self._state |= change
        with writing_beside(self._path) as part:
            part.write_text(json.dumps(self._state) + "\n", encoding="utf-8")


class Tracking:
    """The trackers of a run; used on rank 0 only. They are opened with the first step."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Raises:
        UserError: a required package is not installed.
        """
        config.tracking.check_installed()
        self._config, self._folder = config, folder
        self._waiting = list(config.tracking.packages)
        self._trackers: list[TensorBoard | WeightsAndBiases] = []

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
        for name in self._waiting:
            tracker = _attempt(name, partial(self._open, name, lines, num_steps))
            self._trackers += [] if tracker is None else [tracker]
        self._waiting = []
        self._trackers = [
            tracker for tracker in self._trackers if _attempt(tracker.name, partial(tracker.follow, lines, num_steps))
        ]

    def close(self, seconds_left: Callable[[], float], failed: bool = False) -> bool:
        """Close all trackers while there is time left, which may shrink meanwhile; False if one did not finish.

        ``failed``: an exception ends the run.
        """
        trackers, self._trackers = self._trackers, []
        # daemons, not joined at exit: the other ranks may wait for this process to end
        threads = [
            threading.Thread(target=_attempt, args=(each.name, partial(each.close, failed)), daemon=True)
            for each in trackers
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and seconds_left() > 0:
            time.sleep(_POLL_SECONDS)
        late = [tracker for tracker, thread in zip(trackers, threads, strict=True) if thread.is_alive()]
        for tracker in late:
            logger.warning(
                "no time is left for %s to end: metrics.jsonl has every step%s", tracker.name, tracker.remedy
            )
        return not late

    def _open(self, name: str, lines: Mapping[int, Line], num_steps: int) -> TensorBoard | WeightsAndBiases:
        if name == _TENSORBOARD:
            return TensorBoard(self._folder.path / name)
        return WeightsAndBiases(self._config, self._folder, lines, num_steps)


def numbers_of(line: Line) -> dict[str, float]:
    """The numbers of a step's line."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def start_early(section: TrackingSection) -> None:
    """Start the process of Weights & Biases if it is configured: processes must be started before MPI."""
    if section.wandb == "off":
        return
    import wandb

    try:
        wandb.setup(wandb.Settings(silent=True)).ensure_service()
    except (OSError, wandb.Error) as error:
        logger.warning("wandb's own process did not start: %s", error)


def _failures_of(name: str) -> tuple[type[Exception], ...]:
    """Exceptions of a tracker that do not end the run."""
    if name == _WANDB:
        import wandb

        return (OSError, wandb.Error)
    from tensorboard.compat.tensorflow_stub.errors import OpError

    return (OSError, OpError)


def _attempt(name: str, action: Callable[[], T]) -> T | None:
    """The result of ``action``; if it fails, a warning and None."""
    try:
        return action()
    except _failures_of(name) as error:
        logger.warning(
            "%s failed (%s: %s): the run continues without it; metrics.jsonl has every step, and the next start sends "
            "the rest", name, type(error).__name__, error,
        )  # fmt: skip
        return None
