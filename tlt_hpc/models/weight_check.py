"""Whether a folder's weights are those of its config.json: read from the heads of its files, before anything starts.

transformers skips names that it does not know and adds or removes prefixes, and the decoder does neither: what the two
would read differently is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tlt_hpc.config import UserError
from tlt_hpc.models.shape import TAKE_CONFIG, ModelShape
from tlt_hpc.models.weight_files import (
    ADAPTER_CONFIG,
    EMBEDDING,
    StoredTensor,
    expert_places,
    is_fused_expert_name,
    read_headers,
    torch_files,
)

HEAD = "lm_head.weight"
_DTYPES = "F64", "F32", "F16", "BF16"
_CHUNK = 2**24
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|weight_scale(_inv)?|weight_packed|weight_shape|input_scale|SCB|absmax|quant_map)\b"
)
_UNQUANTISED = "give the folder of the model that is not quantised"
_REASONS = (
    (r"^(module|_orig_mod|_fsdp_wrapped_module)\.", "it was saved from inside a wrapper",
     "save the model that is inside with its save_pretrained"),
    (r"lora_|\.base_layer\.|^base_model\.model\.", "it has adapters that are not merged",
     "merge them first (peft's merge_and_unload) and save the model"),
    (r"(^|\.)(v_head|value_head|score|classifier)\.", "it has a head for values, rewards or classes",
     "save the language model without that head"),
    (r"language_model\.|^(model\.)?(visual|vision\w*|audio\w*|multi_modal_projector)\.",
     "it is of a model that reads more than text", "save its language model alone"),
)  # fmt: skip
"""Names that others write, why, and what helps."""


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Refuse a folder whose weights cannot be read, or are not those that its config.json asks for.

    Reads the heads of files alone, and embedding and head where one model has both tied and stored.

    Raises:
        ValueError: no weights, or a file of them is missing or cut short; a name, size or type is another one; a tied
            head is not the embedding; an adapter is beside them.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"model folder {folder} has an adapter ({ADAPTER_CONFIG}), which transformers would add to the weights; "
            "move it out of the folder if it is merged into them already, or merge it first (peft's merge_and_unload)"
        )
    if torch_files(folder):
        return  # transformers reads these, which say nothing before they are read as a whole
    stored = read_headers(folder)
    _check_quantised(stored, lambda name, _: _QUANTISED.search(name) is not None)
    origin = str(next((found.file for found in stored.values()), folder))
    check_sizes({name: found.sizes for name, found in stored.items()}, shape, origin)
    _check_quantised(stored, lambda _, found: found.dtype not in _DTYPES)  # after names that are no weight's
    if shape.tied_head and HEAD in stored and not _are_same(stored[HEAD], stored[EMBEDDING]):
        head, embedding = stored[HEAD].dtype, stored[EMBEDDING].dtype
        what = "is not the embedding" if head == embedding else f"in {head}, not in the embedding's {embedding}"
        raise UserError(
            f"model folder {folder}: config.json ties the head to the embedding, and {HEAD!r} is stored and {what}; "
            "set tie_word_embeddings = false there if the head was trained apart, or remove that tensor"
        )


def _check_quantised(stored: Mapping[str, StoredTensor], is_quantised: Callable[[str, StoredTensor], bool]) -> None:
    for name, found in stored.items():
        if is_quantised(name, found):
            raise UserError(f"{found.file}: {name!r}, stored as {found.dtype}, is of quantised weights; {_UNQUANTISED}")


def check_sizes(stored: Mapping[str, Sequence[int]], shape: ModelShape, origin: str) -> None:
    """Refuse other names or sizes of weights than a model of this shape has; ``origin`` names them in the error.

    Raises:
        UserError: with the first of them and the remedy.
    """
    wanted, found = weight_sizes(shape), dict[str, tuple[int, ...]]()
    for name, sizes in stored.items():
        if is_fused_expert_name(name) and len(sizes) == 3:  # one for all experts, as transformers has them in memory
            found.update((own, size) for own, (_, size) in expert_places(name, sizes).items())
        else:
            found[name] = tuple(sizes)
    for name in found:
        if name not in wanted and not (name == HEAD and shape.tied_head):
            why, remedy = _mismatch_reason(name, wanted, shape)
            raise UserError(f"{origin}: {name!r} is no weight of this model of type {shape.family} ({why})", remedy)
    if HEAD in wanted.keys() - found.keys():
        raise UserError(
            f"{origin}: there is no {HEAD!r}, and config.json does not tie the head to the embedding",
            "set tie_word_embeddings = true there if the model has one for both, or download the weights again",
        )
    if missing := sorted(wanted.keys() - found.keys()):
        raise UserError(
            f"{origin}: {missing[0]!r} and {len(missing) - 1} more weights that config.json asks for are missing",
            f"{TAKE_CONFIG}, or download the weights again",
        )
    wanted[HEAD] = wanted[EMBEDDING]
    for name, sizes in found.items():
        if sizes != wanted[name]:
            raise UserError(
                f"{origin}: {name!r} has shape {list(sizes)}, config.json asks for {list(wanted[name])}", TAKE_CONFIG
            )


def weight_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The sizes of a model's weights by their Hugging Face names, with a tensor for each expert."""
    wide = (shape.vocab_size, shape.hidden_size)
    head = {} if shape.tied_head else {HEAD: wide}
    layer = dict(_layer_sizes(shape))
    layers = {f"model.layers.{i}.{name}": sizes for i in range(shape.num_layers) for name, sizes in layer.items()}
    return {EMBEDDING: wide, "model.norm.weight": (shape.hidden_size,), **head, **layers}


def _layer_sizes(s: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, queries, keys = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if s.output_norms else []
    yield from ((f"{norm}.weight", (h,)) for norm in norms)
    for name, rows in {"q": queries, "k": keys, "v": keys}.items():
        yield f"self_attn.{name}_proj.weight", (rows, h)
        if s.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
        if s.head_norm and name != "v":
            yield f"self_attn.{name}_norm.weight", (s.head_dim,)
    yield "self_attn.o_proj.weight", (h, queries)
    if s.output_bias:
        yield "self_attn.o_proj.bias", (h,)
    mlps = [f"mlp.experts.{number}" for number in range(s.num_experts)] or ["mlp"]
    inner = s.expert_size if s.num_experts else s.intermediate_size
    for mlp in mlps:
        yield from ((f"{mlp}.{part}_proj.weight", (inner, h)) for part in ("gate", "up"))
        yield f"{mlp}.down_proj.weight", (h, inner)
    if s.num_experts:
        yield "mlp.gate.weight", (s.num_experts, h)


def _mismatch_reason(name: str, wanted: Mapping[str, object], shape: ModelShape) -> tuple[str, str]:
    """Why a file may hold a name that the model has not, and the remedy."""
    for pattern, why, remedy in _REASONS:
        if re.search(pattern, name):
            return why, remedy
    if f"model.{name}" in wanted:
        return "the prefix 'model.' is missing", "load it with AutoModelForCausalLM and save it with save_pretrained"
    if (layer := re.match(r"model\.layers\.(\d+)\.", name)) and int(layer[1]) >= shape.num_layers:
        return f"config.json has num_hidden_layers = {shape.num_layers}", TAKE_CONFIG
    return "config.json asks for no such tensor", TAKE_CONFIG


def _are_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same bytes, which are read piece by piece."""
    if one.dtype != other.dtype or one.sizes != other.sizes:
        return False
    with one.file.open("rb") as ours, other.file.open("rb") as theirs:
        ours.seek(one.start)
        theirs.seek(other.start)
        lengths = [_CHUNK] * ((one.end - one.start) // _CHUNK) + [(one.end - one.start) % _CHUNK]
        return all(ours.read(length) == theirs.read(length) for length in lengths)
