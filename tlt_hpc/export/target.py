"""The target model as an exported drafter's files describe it: its config.json and its embedding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlt_hpc.config import EMBEDDED_MODEL, UserError
from tlt_hpc.models.folder import embedded, folder_weights
from tlt_hpc.models.json_file import read_json
from tlt_hpc.models.shape import ModelShape, shape_from

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Target:
    """A model folder, and what its config.json says of it."""

    name: str
    """As the user named it."""
    folder: Path
    shape: ModelShape
    architectures: tuple[str, ...]
    dtype: torch.dtype
    """What floats of its drafter are exported in: float16 where the model is, bfloat16 otherwise."""
    token_ids: dict[str, Any]
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``: an id, ids or None."""

    @property
    def path(self) -> str:
        """What an engine is given to find it."""
        return str(self.folder) if self.name == EMBEDDED_MODEL else self.name


def read_target(name: str, asked: str) -> Target:
    """The target in a folder, or ``embedded:tiny``; ``asked`` names the setting that named it, for the error.

    Raises:
        ValueError: there is no model, or none that a drafter of ours fits.
    """
    folder = embedded("tiny") if name == EMBEDDED_MODEL else Path(name)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{asked}: no config.json there; name the target model's folder with --model")
    raw = read_json(path)
    return Target(
        name=name,
        folder=folder,
        shape=shape_from(raw, str(path)),
        architectures=tuple(raw.get("architectures") or ()),
        dtype=torch.float16 if raw.get("dtype", raw.get("torch_dtype")) == "float16" else torch.bfloat16,
        token_ids={key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def embedding_of(target: Target) -> Tensor:
    """The embedding [V, H] in the target's folder.

    Raises:
        ValueError: the folder lacks it.
    """
    for name, tensor in folder_weights(target.folder):
        if name == EMBEDDING:
            return tensor
    raise UserError(f"model folder {target.folder} has no {EMBEDDING!r}, which this format holds a copy of")
