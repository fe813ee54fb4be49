"""The trackers that can follow a run. Each library is imported only if it is configured."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from tlt_hpc.config import Config
from tlt_hpc.storage.folder import RunFolder

FINISH_SECONDS = 120.0
"""How long the end of a run waits for a tracker to send the rest."""
_PROJECT = "tlt"

Errors = tuple[type[Exception], ...]
Figures = Mapping[str, float]


class Tracker(ABC):
    """A run of a tracker, which continues that of an earlier start if it is opened with its ``run_id``."""

    run_id = ""
    """Empty if each start writes all steps again."""
    remedy = ""
    """What to type if there is no time to close it."""

    @abstractmethod
    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None: ...

    @staticmethod  # noqa: B027
    def start_early() -> None:
        """Do what must be done before MPI starts."""

    @staticmethod
    @abstractmethod
    def errors() -> Errors:
        """Exceptions that do not end the run."""

    @abstractmethod
    def log(self, step: int, figures: Figures) -> None:
        """Add a step, each once and in ascending order."""

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

    @staticmethod
    def errors() -> Errors:
        from tensorboard.compat.tensorflow_stub.errors import OpError

        return (OSError, OpError)

    def log(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, which has a process of its own."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        import wandb

        self.run_id = run_id or uuid4().hex[:12]
        mode: Any = config.tracking.wandb
        folder.path.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=os.environ.get("WANDB_NAME") or config.run.name,
            id=self.run_id,
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

    @staticmethod
    def start_early() -> None:
        import wandb

        wandb.setup(wandb.Settings(silent=True)).ensure_service()

    @staticmethod
    def errors() -> Errors:
        return (Exception,)  # its service raises some that are not wandb.Error

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step, commit=True)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow(Tracker):
    """A run of MLflow in the run's folder, or on the server that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        self.start_early()
        from mlflow import MlflowClient
        from mlflow.entities import Param

        place = os.environ.get("MLFLOW_TRACKING_URI") or str((folder.path / "mlruns").absolute())
        self._client = MlflowClient(place, registry_uri=place)
        if run_id:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self.run_id = self._client.create_run(number, run_name=config.run.name).info.run_id
        settings = {f"{section}.{key}": value for section, keys in config.model_dump().items()
                    for key, value in keys.items()}  # fmt: skip
        self._client.log_batch(self.run_id, params=[Param(key, str(value)) for key, value in settings.items()])

    @staticmethod
    def start_early() -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it opens the network, at the import already
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
        # all ranks wait while a server does not answer
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        platform.processor()  # runs a program the first time, else at the import

    @staticmethod
    def errors() -> Errors:
        from mlflow.exceptions import MlflowException

        return (OSError, MlflowException)

    def log(self, step: int, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self.run_id,  # mlflow refuses other characters, such as that of mean@8
            [Metric(re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name), value, now, step) for name, value in figures.items()],
        )

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class Trackio(Tracker):
    """A run of trackio in a local database in the run's folder; nothing is sent anywhere."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        self.start_early()
        os.environ["TRACKIO_DIR"] = str((folder.path / "trackio").absolute())  # read at the import
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(name, None)
        import trackio
        from trackio import context_vars

        with redirect_stdout(StringIO()):
            self._run: Any = trackio.init(
                project=_PROJECT,
                name=config.run.name,
                config=config.model_dump(),
                resume="allow" if run_id else "never",
                auto_log_gpu=False,
                auto_log_cpu=False,
                embed=False,
            )
        context_vars.current_run.set(None)  # else it is finished once more at the exit of this process
        if run_id:  # on network file systems trackio does not find the run again by its name
            self._run.id = run_id
        self.run_id = self._run.id

    @staticmethod
    def start_early() -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trackio asks the Hub for the user's name

    @staticmethod
    def errors() -> Errors:
        return (OSError, sqlite3.Error)

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": Mlflow, "trackio": Trackio
}  # fmt: skip
"""By package and key of the section ``tracking``."""
