"""The trackers that can follow a run, and the thread in which one is called.

Each library is imported only if it is configured.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import re
import shlex
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from typing import Any
from uuid import uuid4

from tlt_hpc.common.printable import one_line
from tlt_hpc.config import Config
from tlt_hpc.storage.folder import RunFolder

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""How long one call of a tracker may take, and how long the end of a run waits for it."""
MAX_BEHIND = 100
"""How many steps a tracker may be behind, not counting those of earlier starts."""
EXIT_SECONDS = 5.0
"""How long the exit of the process waits for a tracker that was dropped."""
_PROJECT = "tlt"

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


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases, which has a process of its own."""

    _process: Any = None

    def __init__(self, config: Config, folder: RunFolder, run_id: str) -> None:
        import wandb

        self.run_id = run_id or uuid4().hex[:12]
        mode: Any = config.tracking.wandb
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
        import wandb

        service: Any = wandb.setup(wandb.Settings(silent=True)).ensure_service()
        WeightsAndBiases._process = service._proc._process if service.owns_service else None

    @staticmethod
    def abandon() -> None:
        if WeightsAndBiases._process is not None:  # wandb waits for it at the exit, without limit and without a setting
            timer = threading.Timer(EXIT_SECONDS, WeightsAndBiases._process.kill)
            timer.daemon = True
            timer.start()

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
        # a server that does not answer is an error that names it before ANSWER_SECONDS are over
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        platform.processor()  # runs a program the first time, else at the import

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
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # trackio asks the Hub for the user's name

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": Mlflow, "trackio": Trackio
}  # fmt: skip
"""By package and key of the section ``tracking``."""
