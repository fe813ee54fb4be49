"""One tracker each: what it needs, how it is told of a step. Libraries are imported only when one is made.

A tracker raises one of its ``failures`` where it cannot go on; whoever uses it decides what becomes of the run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tlt_hpc.config import Config, TrackingSection

Figures = Mapping[str, float]

logger = logging.getLogger(__name__)

FINISH_SECONDS = 120.0
"""How long the end of a run waits for Weights & Biases to take what is left."""
FAILED_FINISH_SECONDS = 5.0
"""The same where an exception ends it: all other ranks wait."""
_GRACE_SECONDS = 10.0
"""What the library is given beyond its own time limit."""


class Tracker(Protocol):
    """Who is told of steps, in their order."""

    name: str
    failures: tuple[type[Exception], ...]
    remedy: str
    """What brings home that which ``close`` had no time for; empty where there is nothing of the kind."""

    def log(self, step: int, figures: Figures) -> None:
        """Tell of a step; returns once a kill of this process loses nothing of it."""
        ...

    def close(self, failed: bool) -> None:
        """Let go of files and processes, within a time that has an end; ``failed`` where an exception ends the run."""
        ...


class TensorBoard:
    """Event files in a folder, through torch."""

    name = "tensorboard"
    remedy = ""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Earlier files' events from ``first_step`` on no longer count (``purge_step``)."""
        from tensorboard.compat.tensorflow_stub.errors import OpError
        from torch.utils.tensorboard import SummaryWriter

        self.failures: tuple[type[Exception], ...] = (OSError, OpError)
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step, max_queue=1000)

    def log(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, known by an id that stays with the folder."""

    name = "wandb"

    def __init__(self, config: Config, folder: Path, run_id: str) -> None:
        import wandb

        self.failures: tuple[type[Exception], ...] = (OSError, wandb.Error)
        section = config.tracking
        mode: Any = section.wandb
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "tlt",
            name=os.environ.get("WANDB_NAME") or config.run.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=config.model_dump(),
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                finish_timeout=FINISH_SECONDS,  # binds what wandb does at the exit of this process, too
                finish_timeout_raises=True,
            ),
        )
        self.remedy = f"`wandb sync {Path(self._run.dir).parent}` sends the rest"

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step, commit=True)

    def close(self, failed: bool) -> None:
        """Send what is left; a server that is away holds nobody up for longer than there is time for it."""
        seconds = FAILED_FINISH_SECONDS if failed else FINISH_SECONDS + _GRACE_SECONDS
        errors: list[Exception] = []
        # not joined at exit: where the run has failed, other ranks wait for this one's end
        thread = threading.Thread(target=self._finish, args=(int(failed), errors), name="wandb-finish", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive() or any(isinstance(error, TimeoutError) for error in errors):
            logger.warning(
                "wandb has not sent the whole run: its server did not take it in time; %s",
                self.remedy,
            )
        elif errors:
            raise errors[0]

    def _finish(self, exit_code: int, errors: list[Exception]) -> None:
        try:
            self._run.finish(exit_code=exit_code)
        except self.failures as error:
            errors.append(error)


def failures_of(name: str) -> tuple[type[Exception], ...]:
    """What making a tracker may raise beside a user's mistake."""
    if name == WeightsAndBiases.name:
        import wandb

        return (OSError, wandb.Error)
    from tensorboard.compat.tensorflow_stub.errors import OpError

    return (OSError, OpError)


def start_early(section: TrackingSection) -> None:
    """Start the process that Weights & Biases works in, where it is asked for: before MPI, as all processes."""
    if section.wandb == "off":
        return
    import wandb

    try:
        wandb.setup(wandb.Settings(silent=True)).ensure_service()
    except (OSError, wandb.Error) as error:
        logger.warning("wandb's own process did not start: %s", error)
