"""A drafter on disk: where it is, what it holds, whether it fits a model. Knows no trainer and no engine."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.folder import embedded
from tlt_hpc.models.shape import ModelShape

DRAFTER_FILE = "drafter.safetensors"
_REMEDY = "give the drafter folder of a run with this model"


def read_drafter(place: str, shape: ModelShape, asked: str) -> dict[str, Tensor]:
    """The weights of a folder's drafter under their names in the file, checked against a model's shape.

    Args:
        place: the ``drafter`` folder of a run, or ``embedded:tiny``.
        asked: how the user named it, for the error, e.g. ``--drafter runs/a/drafter``.

    Raises:
        ValueError: there is none, the file is broken, or it is of another model; the remedy comes last.
    """
    path = (embedded("tiny_drafter") if place == EMBEDDED_MODEL else Path(place)) / DRAFTER_FILE
    if not path.is_file():
        raise ValueError(f"{asked}: no {DRAFTER_FILE} there; {_REMEDY}")
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{asked}: {path} is no whole safetensors file ({error}); {_REMEDY}") from None
    weights = {}
    for name, sizes in drafter_sizes(shape).items():
        found = stored.get(f"{name}.weight")
        if found is None or found.shape != sizes:
            what = "missing" if found is None else list(found.shape)
            raise ValueError(f"{asked}: drafter tensor {name!r} is {what}, this model needs {list(sizes)}; {_REMEDY}")
        weights[f"{name}.weight"] = found
    return weights


def load_drafter(place: str, decoder: Decoder, asked: str) -> Drafter:
    """The drafter of a folder, beside a decoder and in its precision, laid out for serving.

    Raises:
        ValueError: as ``read_drafter``.
    """
    weights = read_drafter(place, decoder.shape, asked)
    drafter = Drafter(decoder.shape, 0, decoder.dtype, decoder.device).requires_grad_(False)
    drafter.load_state_dict({name.removesuffix(".weight"): tensor for name, tensor in weights.items()})
    drafter.pack()
    return drafter


def drafter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The sizes of a drafter's parameters, without making one."""
    h, i, queries = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    return {
        "fc": (h, 2 * h),
        "qkv": (queries + 2 * shape.num_kv_heads * shape.head_dim, h),
        "output": (h, queries),
        "gate_up": (2 * i, h),
        "down": (h, i),
        "post_norm": (h,),
    }
