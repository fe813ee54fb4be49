"""What a run that has finished leaves for its next start to see at once, before ranks, models and MPI."""

from __future__ import annotations

import json

from tlt_hpc.config import Config, UserError, load_saved_config
from tlt_hpc.storage.folder import RunFolder, writing_beside
from tlt_hpc.words import count


def note_finished(config: Config, num_steps: int, policy_sha256: str) -> None:
    """Leave the word in the run's folder; for rank 0.

    Raises:
        WriteError: no room or no permission.
    """
    with writing_beside(RunFolder(config.folder).finished) as part:
        part.write_text(json.dumps({"num_steps": num_steps, "policy_sha256": policy_sha256}) + "\n", encoding="utf-8")


def told_finished(config: Config) -> str:
    """The line for a user who starts a run that has finished, with the very configuration that it has; else empty.

    Of a run that goes on, or is to be evaluated otherwise, the configuration has changed.

    Raises:
        UserError: what the run has left is damaged.
    """
    folder = RunFolder(config.folder)
    if not folder.finished.is_file() or not folder.config.is_file():
        return ""
    try:
        told = json.loads(folder.finished.read_text(encoding="utf-8"))
        num_steps, digest = int(told["num_steps"]), str(told["policy_sha256"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder.finished} is damaged ({error}); remove it, and the run looks for itself") from None
    if num_steps < config.run.num_steps or load_saved_config(folder.config) != config:
        return ""
    steps = count(num_steps, "step")
    return f"already finished: {steps} in {config.folder}, policy {digest[:12]}; raise run.num_steps to go on"
