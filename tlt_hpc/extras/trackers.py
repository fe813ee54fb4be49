"""The tracker that is not TensorBoard: Weights & Biases, imported only if it is configured."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
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
    def limit_exit_delay() -> None:
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
