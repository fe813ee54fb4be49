"""TensorBoard and Weights & Biases. Their libraries are imported only when a tracker is created.

A tracker that cannot continue raises one of its ``failures``; the caller decides what happens to the run.
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
"""How long the end of a run waits for Weights & Biases to upload the rest."""
FAILED_FINISH_SECONDS = 5.0
"""The same if an exception ends the run, because all other ranks wait."""
_GRACE_SECONDS = 10.0
"""Additional time beyond the library's own limit."""


class Tracker(Protocol):
    """Something that shows the metrics of steps, which it gets in order."""

    name: str
    failures: tuple[type[Exception], ...]
    remedy: str
    """A command that uploads what ``close`` had no time for; empty if there is none."""

    def log(self, step: int, figures: Figures) -> None:
        """Record a step; on return a kill of this process cannot lose it."""
        ...

    def close(self, failed: bool) -> None:
        """Release files and processes in bounded time; ``failed``: an exception ends the run."""
        ...


class TensorBoard:
    """Event files in a folder, through torch."""

    name = "tensorboard"
    remedy = ""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Events of earlier files from ``first_step`` on are discarded (``purge_step``)."""
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
    """A run of Weights & Biases, with an id that is kept in the run's folder."""

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
        """Upload the rest, in bounded time even if the server does not answer."""
        seconds = FAILED_FINISH_SECONDS if failed else FINISH_SECONDS + _GRACE_SECONDS
        errors: list[Exception] = []
        # a daemon, not joined at exit: if the run has failed, the other ranks wait for this process to end
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
    """Exceptions that creating a tracker may raise, apart from user errors."""
    if name == WeightsAndBiases.name:
        import wandb

        return (OSError, wandb.Error)
    from tensorboard.compat.tensorflow_stub.errors import OpError

    return (OSError, OpError)


def start_early(section: TrackingSection) -> None:
    """Start the process of Weights & Biases if it is configured: processes must be started before MPI."""
    if section.wandb == "off":
        return
    import wandb

    try:
        wandb.setup(wandb.Settings(silent=True)).ensure_service()
    except (OSError, wandb.Error) as error:
        logger.warning("wandb's own process did not start: %s", error)
