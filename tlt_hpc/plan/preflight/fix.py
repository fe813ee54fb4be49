"""What ``--fix`` does: downloads the model."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from pathlib import Path

from tlt_hpc.config import EMBEDDED_MODEL, Config
from tlt_hpc.plan.preflight.results import Finding, failure, ok, warning

_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer*", "LICENSE*"]
"""Files of a repository that a run reads, without copies of the weights in other formats."""


def fetch(model_id: str, folder: Path) -> None:
    """Download a model's repository from the hub into a folder; an interrupted download is resumed.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: no network, no such repository, or no permission to read it.
        ValueError: not the name of a repository.
    """
    import httpx
    from huggingface_hub import snapshot_download

    try:
        with redirect_stderr(sys.__stderr__):  # its progress bars use escape sequences
            snapshot_download(model_id, local_dir=folder, allow_patterns=_PATTERNS)
    except httpx.HTTPError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def get_model(config: Config, model_id: str) -> Finding:
    """Download the model if it is not there."""
    folder = Path(config.model.path)
    if str(folder) == EMBEDDED_MODEL or (folder / "config.json").is_file():
        return ok(f"{folder} is there")
    if not model_id:
        return warning(f"{folder} does not exist, and no model to download was given", "give --model-id OWNER/NAME")
    try:
        fetch(model_id, folder)
    except (OSError, ValueError) as error:
        return failure(
            f"could not fetch {model_id!r}: {_first_line(error)}",
            f"give --model-id as OWNER/NAME; else fetch it where there is internet: hf download {model_id} --local-dir "
            f"{folder}; for a model with terms accept them and set HF_TOKEN, and unset HF_HUB_OFFLINE",
        )
    return ok(f"fetched {model_id} to {folder}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
