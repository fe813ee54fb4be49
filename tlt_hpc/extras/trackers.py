"""Trackers other than TensorBoard: Weights & Biases, MLflow, trackio.

Each library is imported only if it is configured.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from tlt_hpc.config import Config
from tlt_hpc.look.trackers import ANSWER_SECONDS, EXIT_SECONDS, Figures, Tracker
from tlt_hpc.storage.folder import RunFolder

_PROJECT = "tlt"


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, which has a process of its own."""

    _process: Any = None

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        import wandb

        self.run_id = run_id or uuid4().hex[:12]
        mode: Any = "offline" if "wandb-offline" in config.run.trackers else "online"
        folder.path.mkdir(parents=True, exist_ok=True)
        # a killed start's offline file lacks steps that wandb had in memory, and cannot be continued
        old = list((folder.path / "wandb").glob(f"offline-run-*-{self.run_id}"))
        self.gets_all = mode == "offline" or bool(old)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=os.environ.get("WANDB_NAME") or config.run.name,
            id=self.run_id,
            resume=None if self.gets_all else "allow",  # None: what W&B has under this id is replaced
            mode=mode,
            dir=str(folder.path),
            config=config.model_dump(),
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=True,
                finish_timeout=ANSWER_SECONDS,  # also limits what wandb does at the exit of this process
                finish_timeout_raises=True,
            ),
        )
        own = Path(self._run.dir).parent
        for path in old:
            if path.name != own.name:
                shutil.rmtree(path, ignore_errors=True)  # a file that is still open on NFS goes at the next start
        self.remedy = f"; `wandb sync {shlex.quote(str(own))}` sends what it has"

    @staticmethod
    def start_early() -> None:
        """Start the process of Weights & Biases."""
        import wandb

        service: Any = wandb.setup(wandb.Settings(silent=True)).ensure_service()
        WeightsAndBiases._process = service._proc._process if service.owns_service else None

    @staticmethod
    def abandon() -> None:
        """Have the process killed after ``EXIT_SECONDS``."""
        if WeightsAndBiases._process is not None:  # wandb waits for it at the exit, without limit and without a setting
            timer = threading.Timer(EXIT_SECONDS, WeightsAndBiases._process.kill)
            timer.daemon = True
            timer.start()

    def log(self, step: int, figures: Figures) -> None:
        """Add a step's figures."""
        self._run.log(dict(figures), step=step, commit=True)

    def close(self, failed: bool) -> None:
        """Send the rest, with the exit code 1 if the run failed."""
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
        """Set the variables by which MLflow sends no telemetry and retries no call for long."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it opens the network, at the import already
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
        # a server that does not answer is an error that names it before ANSWER_SECONDS are over
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        platform.processor()  # runs a program the first time, else at the import

    def log(self, step: int, figures: Figures) -> None:
        """Add a step's figures."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self.run_id,  # mlflow refuses other characters, such as that of mean@8
            [Metric(re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name), value, now, step) for name, value in figures.items()],
        )

    def close(self, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class Trackio(Tracker):
    """A run of trackio in a local database in the run's folder, written again at each start; nothing is sent."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        self.start_early()
        os.environ["TRACKIO_DIR"] = str((folder.path / "trackio").absolute())  # read at the import
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(name, None)
        for path in (folder.path / "trackio").glob(f"{_PROJECT}.db*"):
            path.unlink()
        import trackio
        from trackio import run, utils

        for module in (trackio, run, utils):  # it has no option for silence, and sys.stdout is that of all threads
            vars(module)["print"] = lambda *_, **__: None
        self._run: Any = trackio.init(
            project=_PROJECT,
            name=config.run.name,
            config=config.model_dump(),
            resume="never",
            auto_log_gpu=False,
            auto_log_cpu=False,
            embed=False,
        )

    @staticmethod
    def start_early() -> None:
        """Set the variable by which trackio opens no network."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trackio asks the Hub for the user's name

    def log(self, step: int, figures: Figures) -> None:
        """Add a step's figures."""
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        """Finish the run."""
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"wandb": WeightsAndBiases, "mlflow": Mlflow, "trackio": Trackio}
"""By the package that each needs."""
