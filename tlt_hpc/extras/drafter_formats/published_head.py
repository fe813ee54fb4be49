"""Reads a published EAGLE or EAGLE-3 head as a drafter's tensors, and refuses one that would draft otherwise here.

The layer is under ``midlayer.`` (EAGLE-3) or ``layers.0.`` (EAGLE, and EAGLE-3 of vLLM's speculators). Loaders of
engines skip or leave random what they do not know; here the names must be complete, and known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tlt_hpc.config import UserError
from tlt_hpc.extras.drafter_formats.published_config import (
    HeadConfig,
    head_target_text,
    parse_head_config,
    refusal_error,
)
from tlt_hpc.models.drafter import TOKEN_IDS, differing_layer_settings
from tlt_hpc.models.folder import num_used_tokens
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.models.tokenizer import load_tokenizer, read_json
from tlt_hpc.models.weight_files import EMBEDDING, TORCH_FILE, UNREADABLE, open_safetensors, read_headers, weight_files

_LAYER = "layers.0."
_QUERY, _KEY, _VALUE = (f"{_LAYER}self_attn.{part}_proj" for part in "qkv")
_OUTPUT = f"{_LAYER}self_attn.o_proj"
_GATE, _UP, _DOWN = (f"{_LAYER}mlp.{part}_proj" for part in ("gate", "up", "down"))
# what it is here -> the weights of a file whose rows it has, in this order
_EAGLE = {
    "fc": ("fc",),
    "qkv": (_QUERY, _KEY, _VALUE),
    "output": (_OUTPUT,),
    "gate_up": (_GATE, _UP),
    "down": (_DOWN,),
    "post_norm": (f"{_LAYER}post_attention_layernorm",),
}
_EAGLE3 = _EAGLE | {
    "input_norm": (f"{_LAYER}input_layernorm",),
    "hidden_norm": (f"{_LAYER}hidden_norm",),
    "final_norm": ("norm",),
    "head": ("lm_head",),
}
_EMBEDDED = "embed_tokens.weight"
_IGNORED = {"verifier_lm_head.weight", "verifier_norm.weight"}
"""What speculators keeps for its training: the target's."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SAMPLED_ROWS = 64


def read_head(folder: Path, model: Path, target: ModelShape, asked: str) -> dict[str, Tensor]:
    """The tensors of a head, with names and shapes as ``read_drafter`` gives them, checked against its target.

    Args:
        asked: how the user named it, for the error.

    Raises:
        UserError: it is another model's, of an architecture or with a setting that drafters here do not have, or
            broken; one line with the remedy.
    """
    try:
        config = read_json(folder / "config.json")
        with _open_weights(folder) as stored:
            if "fc.weight" not in stored:
                architectures = config.get("architectures")
                raise refusal_error(
                    f"it is no EAGLE head: architectures = {architectures!r:.80}, and no tensor 'fc.weight'"
                )
            head = parse_head_config(config, target, model.name)
            tensors = _without_padding(_load_head_tensors(stored, head), num_used_tokens(load_tokenizer(model), target))
            if _EMBEDDED in stored:
                _check_embedding(
                    stored[_EMBEDDED], model, f"{head_target_text(config)}, and the target is {model.name}"
                )
        return tensors | _layer_settings(head, target, tensors)
    except UserError as error:
        raise UserError(f"{asked}: {error}") from None


@contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """What can be sliced into a tensor, by name: without ``model.``, and the layer's as ``layers.0.``."""
    with ExitStack() as files:
        found = dict[str, Any]()
        if (file := folder / TORCH_FILE).is_file() and not any(folder.glob("*.safetensors")):
            found = _load_torch_file(file)
        else:
            for file in weight_files(folder):
                reader = files.enter_context(open_safetensors(file, UNREADABLE))
                found |= {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
        yield {name.removeprefix("model.").replace("midlayer.", _LAYER): tensor for name, tensor in found.items()}


def _load_torch_file(file: Path) -> dict[str, Any]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of a damaged file, one in the old format, or one that asks for code to be run
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot read {file} as weights alone ({text:.120}); convert it to safetensors") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UserError(f"{file} holds more than named tensors; convert it to safetensors")
    return found


def _load_head_tensors(stored: Mapping[str, Any], head: HeadConfig) -> dict[str, Tensor]:
    """A head's weights under their names here, and its vocabulary."""
    sizes = {name: tuple(x.shape if isinstance(x, Tensor) else x.get_shape()) for name, x in stored.items()}
    width = head.shape.hidden_size
    is_eagle3 = sizes["fc.weight"] == (width, 3 * width)
    parts = _EAGLE3 if is_eagle3 else _EAGLE
    if not is_eagle3 and sizes["fc.weight"] != (width, 2 * width):
        raise refusal_error(f"'fc.weight' has shape {list(sizes['fc.weight'])}, which neither EAGLE nor EAGLE-3 has")
    _check_names(stored, sizes, parts)
    for name, size in _expected_sizes(head, sizes, parts).items():
        if sizes.get(name, size) != size:
            raise refusal_error(f"{name!r} has shape {list(sizes[name])}, its config.json asks for {list(size)}")
        if name in stored and (dtype := stored[name][:1].dtype) not in _DTYPES:
            raise refusal_error(f"{name!r} is stored as {dtype}, which is not supported")
    tensors = {f"{part}.weight": torch.cat([stored[f"{name}.weight"][:] for name in parts[part]]) for part in parts}
    if is_eagle3:
        tensors[TOKEN_IDS] = _token_ids(stored, len(tensors["head.weight"]), head.shape.vocab_size)
    elif "fc.bias" in stored and stored["fc.bias"][:].any():
        tensors["fc_bias.weight"] = stored["fc.bias"][:]
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise refusal_error(f"{name.removesuffix('.weight')!r} holds values that are no numbers")
    return tensors


def _check_names(
    stored: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]], parts: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse missing tensors, unknown ones, and biases that are not zero."""
    names, is_eagle3 = {f"{name}.weight" for part in parts.values() for name in part}, parts is _EAGLE3
    if missing := sorted(names - stored.keys()):
        raise refusal_error(f"it has no tensor {missing[0]!r}")
    rows = {name for name in stored if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in names}
    rows |= {"d2t", "t2d"} & stored.keys() if is_eagle3 else set()
    if unknown := sorted(stored.keys() - names - rows - _IGNORED - {_EMBEDDED}):
        raise refusal_error(f"it has a tensor {unknown[0]!r}, and its layer here none of that name")
    for name in sorted(rows):
        if len(sizes[name]) != 1:
            raise refusal_error(f"{name!r} has shape {list(sizes[name])}, and it must be a row")
        if name.endswith(".bias") and (is_eagle3 or name != "fc.bias") and stored[name][:].any():
            raise refusal_error(f"{name!r} is not zero, and its layer here has no such bias")


def _expected_sizes(
    head: HeadConfig, sizes: Mapping[str, tuple[int, ...]], parts: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[int, ...]]:
    """The sizes of a head's weights, by its config.json; where that does not say how many tokens it drafts, any."""
    own, h, inner = head.shape, head.shape.hidden_size, head.shape.intermediate_size
    queries, keys = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    read = 2 * h if parts is _EAGLE3 else h
    wanted = {
        "fc": sizes["fc.weight"],
        **{_QUERY: (queries, read), _KEY: (keys, read), _VALUE: (keys, read), _OUTPUT: (h, queries)},
        **{_GATE: (inner, h), _UP: (inner, h), _DOWN: (h, inner)},
        "lm_head": (head.num_drafted or sizes.get("lm_head.weight", (0,))[0], h),
    }
    names = (name for part in parts.values() for name in part)
    more = {_EMBEDDED: (own.vocab_size, h), "fc.bias": (h,)}
    return {f"{name}.weight": wanted.get(name, (h,)) for name in names} | more


def _token_ids(stored: Mapping[str, Any], num_drafted: int, num_tokens: int) -> Tensor:
    """The target's tokens [W] that a head drafts among: ``d2t`` are their offsets from 0, 1, 2, ...; without, all.

    Raises:
        UserError: they do not ascend or are none of the target's, or ``t2d`` says otherwise.
    """
    if "d2t" not in stored and num_drafted != num_tokens:
        raise refusal_error(f"'lm_head.weight' has {num_drafted} rows for {num_tokens} tokens, and no 'd2t' says which")
    offsets = stored["d2t"][:] if "d2t" in stored else torch.zeros(num_drafted, dtype=torch.int64)
    if len(offsets) != num_drafted or offsets.is_floating_point():
        raise refusal_error(f"'d2t' has {len(offsets)} of {offsets.dtype}, and 'lm_head.weight' {num_drafted} rows")
    ids: Tensor = torch.arange(num_drafted) + offsets.long()
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= num_tokens or not bool((ids.diff() > 0).all()):
        raise refusal_error(f"'d2t' does not lead to ascending ids of the target's {num_tokens} tokens")
    if "t2d" in stored:
        drafted = stored["t2d"][:]
        if len(drafted) != num_tokens or not torch.equal(drafted.nonzero().flatten(), ids):
            raise refusal_error("'t2d' does not name the tokens that 'd2t' leads to")
    return ids


def _without_padding(tensors: dict[str, Tensor], num_used: int) -> dict[str, Tensor]:
    """Without the rows of its head for ids that no token has: a vocabulary may be padded, and all of it be drafted."""
    if TOKEN_IDS not in tensors:
        return tensors
    has_token = tensors[TOKEN_IDS] < num_used
    return tensors | {name: tensors[name][has_token] for name in ("head.weight", TOKEN_IDS)}


def _layer_settings(head: HeadConfig, target: ModelShape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How its layer differs from the target's, as it is stored."""
    switches = {
        "norm_before_residual": TOKEN_IDS in tensors and head.norm_before_residual,
        "fc_bias": "fc_bias.weight" in tensors,
    }
    try:
        return differing_layer_settings(target, head.shape, **switches).to_tensors()
    except ValidationError as error:
        first = error.errors()[0]
        raise refusal_error(f"{'.'.join(map(str, first['loc']))} = {first['input']!r:.80}: {first['msg']}") from None


def _check_embedding(own: Any, model: Path, pair: str) -> None:
    """Compare rows of a head's embedding with the target's, in the head's precision."""
    heads = read_headers(model) if any(model.glob("*.safetensors")) else {}
    if EMBEDDING not in heads:
        return  # the model is a file of torch, which only transformers reads; or it is broken, which its loading tells
    with open_safetensors(heads[EMBEDDING].file, UNREADABLE) as reader:
        targets = reader.get_slice(EMBEDDING)
        for row in sorted(set(torch.linspace(0, heads[EMBEDDING].sizes[0] - 1, _SAMPLED_ROWS).long().tolist())):
            mine, theirs = own[row : row + 1], targets[row : row + 1]
            # once more rounded, where the head was stored in another precision than its target
            if not torch.allclose(theirs.to(mine.dtype).float(), mine.float(), rtol=2**-7, atol=1e-6):
                raise refusal_error(f"row {row} of 'embed_tokens.weight' is not the target's: {pair}")
