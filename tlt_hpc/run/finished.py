"""A finished run records that it has finished, so that its next start ends before it loads a model."""

from __future__ import annotations

from dataclasses import asdict

from tlt_hpc.common.words import count
from tlt_hpc.config import Config, load_saved_config
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import FinishedRecord, read_finished, write_json


def record_finished(config: Config, num_steps: int, policy_sha256: str) -> None:
    """Record in the run's folder that it has finished; for rank 0.

    Raises:
        WriteError: no room or no permission.
    """
    write_json(RunFolder(config.folder).finished, asdict(FinishedRecord(num_steps, policy_sha256)))


def finished_message(config: Config) -> str:
    """The message for a user who starts a finished run again with the same configuration; else empty.

    A run that is to be extended or evaluated differently has another configuration.

    Raises:
        UserError: what the run has left is damaged.
    """
    folder = RunFolder(config.folder)
    word = read_finished(folder.finished)
    if word is None or not folder.config.is_file():
        return ""
    if word.num_steps < config.run.num_steps or load_saved_config(folder.config) != config:
        return ""
    steps, digest = count(word.num_steps, "step"), word.policy_sha256[:12]
    return f"already finished: {steps} in {config.folder}, policy {digest}; raise run.num_steps to continue"
