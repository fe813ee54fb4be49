"""A drafter on disk: where it is, what it holds, whether it fits a model. Knows no trainer and no engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tlt_hpc.common.source import load_extra
from tlt_hpc.config import ConfigError, UserError
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import AS_TARGET, SETTINGS, Drafter, DraftLayer, Form, drafter_shape, parse_layer_settings
from tlt_hpc.models.drafter import TOKEN_IDS as TOKEN_IDS
from tlt_hpc.models.eagle import Eagle, Eagle3
from tlt_hpc.models.piece import read_and_broadcast_all
from tlt_hpc.models.shape import ModelShape, check_eagle3_layers
from tlt_hpc.models.weight_files import DRAFTER_FILE as DRAFTER_FILE
from tlt_hpc.models.weight_files import TAKE_DRAFTER, find_drafter, find_initial_drafter, open_safetensors
from tlt_hpc.storage.folder import writing_atomically

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import NodeGroup

_NO_WEIGHTS = (TOKEN_IDS, SETTINGS)


def read_drafter(place: str, shape: ModelShape, asked: str) -> dict[str, Tensor]:
    """The weights of a folder's drafter under their names in the file, checked against a model's shape.

    Args:
        place: the ``drafter`` folder of a run, or ``embedded:tiny``.
        asked: how the user named it, for the error, e.g. ``--drafter runs/a/drafter``.

    Returns:
        Tensors of the shapes of ``drafter_sizes``, or with a vocabulary of its own of ``eagle3_sizes``, under the
        names of ``tensor_name_in_file``; and what ``DraftLayer.to_tensors`` gives.

    Raises:
        ValueError: there is none, the file is broken, or it is of another model; the remedy comes last.
    """
    path = find_drafter(place, asked)
    try:
        with open_safetensors(path, TAKE_DRAFTER) as reader:
            stored = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except UserError as error:
        raise UserError(f"{asked}: {error}") from None
    if TOKEN_IDS in stored:
        check_eagle3_layers(shape, asked)
    return {
        tensor_name_in_file(name): tensor for name, tensor in select_and_check_tensors(stored, shape, asked).items()
    }


def select_and_check_tensors(stored: Mapping[str, Tensor], shape: ModelShape, asked: str) -> dict[str, Tensor]:
    """The drafter's tensors among those of a file, of the shapes of ``drafter_sizes`` or ``eagle3_sizes``, by name.

    Raises:
        UserError: one is missing, or belongs to another model; or its vocabulary is not part of the target's.
    """
    own, ids = parse_layer_settings(stored, asked), stored.get(TOKEN_IDS)
    if own.norm_before_residual if ids is None else own.fc_bias:
        raise UserError(f"{asked}: {SETTINGS!r} is of another form than the tensors; {TAKE_DRAFTER}")
    sizes = drafter_sizes(shape, own) if ids is None else eagle3_sizes(shape, ids.numel(), own)
    for name, size in sizes.items():
        found = stored.get(tensor_name_in_file(name))
        if found is None or found.shape != size:
            what = "missing" if found is None else list(found.shape)
            raise UserError(
                f"{asked}: drafter tensor {name!r} is {what}, this model needs {list(size)}; {TAKE_DRAFTER}"
            )
    if ids is not None:
        ascends = ids.dtype == torch.int64 and bool((ids.diff() > 0).all())
        if not ascends or not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= shape.vocab_size:
            raise UserError(
                f"{asked}: {TOKEN_IDS!r} must be int64 ids of the target's {shape.vocab_size} tokens, each above the "
                f"one before; {TAKE_DRAFTER}"
            )
    return {name: stored[tensor_name_in_file(name)] for name in sizes} | own.to_tensors()


def write_drafter(folder: Path, state: dict[str, Tensor]) -> None:
    """Write a folder's drafter whole or not at all; names and shapes as ``read_drafter`` gives them.

    Raises:
        WriteError: the disk refused; the one before stays.
    """
    with writing_atomically(folder / DRAFTER_FILE) as part:
        try:
            save_file(state, part)
        except SafetensorError as error:  # has what the system said as text alone
            number = re.search(r"\(os error (\d+)\)", str(error))
            cause = OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
            raise cause from None


def tensor_name_in_file(name: str) -> str:
    """The name of a drafter's tensor in a file; its vocabulary and its settings are no weights."""
    return name if name in _NO_WEIGHTS else f"{name}.weight"


def is_inference_tensor(name: str) -> bool:
    """True if drafting needs the tensor of this name in a file or checkpoint; false if only training does."""
    return name.endswith(".weight") or name in _NO_WEIGHTS


def load_drafter(place: str, decoder: Decoder, asked: str, node: NodeGroup | None = None) -> Drafter:
    """The drafter of a folder, beside a decoder and in its precision, laid out for serving.

    Collective over the ``node``, whose first rank reads.

    Raises:
        ValueError: as ``read_drafter``.
    """
    weights = read_and_broadcast_all(node, lambda: read_drafter(place, decoder.shape, asked))
    assert weights is not None
    return inference_drafter(weights, decoder)


def inference_drafter(weights: dict[str, Tensor], decoder: Decoder) -> Drafter:
    """A drafter with ``weights``, as ``read_drafter`` gives them, in the decoder's precision and split as it is."""
    own = parse_layer_settings(weights)
    drafter = make_drafter(decoder.shape, 0, decoder.dtype, decoder.device, weights.get(TOKEN_IDS), own)
    if decoder.sharding.size > 1:
        drafter.set_sharding(decoder.sharding)
    drafter.requires_grad_(False)
    drafter.load_state_dict({n.removesuffix(".weight"): tensor for n, tensor in weights.items() if n != SETTINGS})
    drafter.pack_weights()
    return drafter


def make_drafter(
    target: ModelShape,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    token_ids: Tensor | None = None,
    own: DraftLayer = AS_TARGET,
) -> Drafter:
    """A drafter with random weights: of the EAGLE-3 form where it has a vocabulary of its own [W], else of EAGLE's."""
    if token_ids is None:
        return Eagle(target, seed, dtype, device, own)
    return Eagle3(target, seed, dtype, device, token_ids, own)


def drafter_sizes(target: ModelShape, own: DraftLayer = AS_TARGET) -> dict[str, tuple[int, ...]]:
    """The sizes of an EAGLE drafter's parameters, without making one."""
    shape = drafter_shape(target, own)
    h, i, queries = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    return {
        "fc": (h, 2 * h),
        "qkv": (queries + 2 * shape.num_kv_heads * shape.head_dim, h),
        "output": (h, queries),
        "gate_up": (2 * i, h),
        "down": (h, i),
        "post_norm": (h,),
        **({"fc_bias": (h,)} if own.fc_bias else {}),
    }


def eagle3_sizes(target: ModelShape, num_drafted: int, own: DraftLayer = AS_TARGET) -> dict[str, tuple[int, ...]]:
    """The sizes of an EAGLE-3 drafter's tensors, for a vocabulary of ``num_drafted`` tokens."""
    h, sizes = target.hidden_size, drafter_sizes(target, own)
    norms = dict.fromkeys(("input_norm", "hidden_norm", "post_norm", "final_norm"), (h,))
    del sizes["post_norm"]
    sizes |= {"fc": (h, 3 * h), "qkv": (sizes["qkv"][0], 2 * h)}
    return {**sizes, **norms, "head": (num_drafted, h), TOKEN_IDS: (num_drafted,)}


def read_drafter_of_init(init: str, form: Form, shape: ModelShape, model: Path) -> dict[str, Tensor] | None:
    """The tensors that ``drafter.init`` names, as ``read_drafter``; None for a random start.

    Args:
        model: the folder of the target, with whose embedding a published head's is compared.

    Raises:
        ConfigError: there are none, or they are of another model or form.
    """
    if init == "random":
        return None
    asked = f"drafter.init = {init!r}"
    try:
        is_own = find_initial_drafter(init, asked).name == DRAFTER_FILE
        weights = read_drafter(init, shape, asked) if is_own else _read_head(Path(init), model, shape, asked)
        if TOKEN_IDS in weights:
            check_eagle3_layers(shape, asked)
    except ValueError as error:
        raise ConfigError(f"{error} or 'random'") from None
    found = "eagle3" if TOKEN_IDS in weights else "eagle"
    if found != form:
        raise ConfigError(
            f"{asked} is of the form {found!r}; set drafter.form = {found!r}, or drafter.init to 'random' or to what "
            f"tlt warmup makes with drafter.form={form}"
        )
    return weights


def _read_head(folder: Path, model: Path, shape: ModelShape, asked: str) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_extra("tlt_hpc.extras.drafter_formats.published_head").read_head(
        folder, model, shape, asked
    )
    return weights
