"""What ``--fix`` does: makes missing folders and downloads the model, and reports what it could not do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

from tlt_hpc.config import EMBEDDED_MODEL, Config
from tlt_hpc.plan.preflight.machine import nearest_folder
from tlt_hpc.plan.preflight.results import Finding, failure, ok, warning

_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer*", "LICENSE*")
"""Files of a repository that a run reads, without copies of the weights in other formats."""

Fetch = Callable[[str, Path], None]


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
            snapshot_download(model_id, local_dir=folder, allow_patterns=list(_PATTERNS))
    except httpx.HTTPError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def repairs(config: Config, model_id: str, get: Fetch = fetch) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Repairs by name, to be called in this order."""
    yield "fix run folder", lambda: _make_folder(Path(config.run.folder))
    yield "fix model", lambda: _get_model(Path(config.model.path), model_id, get)
    yield "fix data", lambda: _say_of_data(config)


def _make_folder(folder: Path) -> Finding:
    if folder.is_dir():
        return ok(f"{folder} is there")
    above = nearest_folder(folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return failure(f"could not make {folder} in {above}: {error.strerror}", "set run.folder to another place")
    return ok(f"made {folder}")


def _get_model(folder: Path, model_id: str, get: Fetch) -> Finding:
    if str(folder) == EMBEDDED_MODEL or (folder / "config.json").is_file():
        return ok(f"{folder} is there")
    if not model_id:
        return warning(f"{folder} does not exist, and no model to download was given", "give --model-id OWNER/NAME")
    try:
        get(model_id, folder)
    except ValueError as error:
        return failure(f"could not fetch {model_id!r}: {_first_line(error)}", "give --model-id as OWNER/NAME")
    except OSError as error:
        return failure(
            f"could not fetch {model_id!r}: {_first_line(error)}",
            f"fetch it where there is internet: hf download {model_id} --local-dir {folder}; for a model with terms "
            "accept them and set HF_TOKEN, and make sure that HF_HUB_OFFLINE is not set",
        )
    return ok(f"fetched {model_id} to {folder}")


def _say_of_data(config: Config) -> Finding:
    """A data set is never downloaded: its source cannot be guessed."""
    return ok(f"left alone: put data.source = {config.data.source_name} there yourself if the line 'data' asks for it")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
