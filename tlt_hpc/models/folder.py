"""Hugging Face model folders: where they are, their tokenizer and weights; the one place that imports transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer

from tlt_hpc.common.host_memory import without_garbage_collection
from tlt_hpc.config import UserError
from tlt_hpc.models.piece import Cut, ReadCut, broadcast_on_node, read_and_broadcast_parts
from tlt_hpc.models.shape import TAKE_CONFIG, ModelShape
from tlt_hpc.models.weight_files import INDEX, UNREADABLE, open_safetensors, refusal_reason, weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from tlt_hpc.mpi.world import NodeGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def decoding_dtype(name: str, device: torch.device, shape: ModelShape) -> torch.dtype:
    """The precision that rollouts compute in, of a model in this one: on a CPU float32, whatever the weights have.

    bfloat16 saves no time on most CPUs, and its rounding would decide between tokens. A mixture of experts has float64
    there: the last bits of float32 differ between passes, and would now and then choose another expert.
    """
    if device.type != "cpu":
        return DTYPES[name]
    return torch.float64 if shape.num_experts else torch.float32


def num_used_tokens(tokenizer: Tokenizer, shape: ModelShape) -> int:
    """The vocabulary without padding rows: one more than the highest id that the tokenizer knows."""
    return min(shape.vocab_size, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)


def load_policy_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The trainable transformers model of a folder, from local files only.

    Raises:
        UserError: a file cannot be read, a weight that config.json asks for is not there in its shape, or a tied head
            is not the embedding.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with naming_folder_in_errors(folder):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=read_config(folder),
            dtype=DTYPES[dtype],
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    # transformers warns of these, and begins with random numbers
    if random := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise UserError(
            f"model folder {folder} does not hold {random[0]!r} and {len(random) - 1} more weights in the shapes that "
            f"config.json asks for; {TAKE_CONFIG}, or download the weights again"
        )
    # transformers leaves two that differ apart, and the decoder would still have one
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if model.config.tie_word_embeddings and head is not embedding:
        raise UserError(
            f"model folder {folder}: config.json has tie_word_embeddings = true, and 'lm_head.weight' is not the "
            "embedding; set it to false there if the head was trained apart, or remove that tensor"
        )
    return model  # type: ignore[no-any-return]


@contextmanager
def naming_folder_in_errors(folder: Path) -> Iterator[None]:
    """Name a model's folder where a library cannot read one of its files.

    Raises:
        UserError: as within.
    """
    try:
        yield
    except StrictDataclassError as error:
        said = " ".join(str(error).split())
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {said:.300}; {TAKE_CONFIG}") from None
    except SafetensorError as error:
        raise UserError(f"a file of {folder} is no whole safetensors file ({error}); {UNREADABLE}") from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot read the model in {folder}: {refusal_reason(error)}; {UNREADABLE}") from None


def import_transformers(with_adapters: bool) -> None:
    """Import what transformers' models are built on, and peft: this takes seconds, spent before any rank waits."""
    with without_garbage_collection():
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: F401

        if with_adapters:
            import peft  # noqa: F401


def load_policy_all_ranks(
    folder: Path, dtype: str, device: torch.device, is_sharded: bool, rank: int, node: NodeGroup
) -> PreTrainedModel:
    """The initial policy: on the device, or, if rank 0's is sharded, on the host and empty on other ranks.

    Of a node's ranks one reads, and gives the others its tensors one at a time; collective over the node.

    Raises:
        UserError: as ``load_policy_model`` and ``read_config``.
    """
    config = node.run_first_and_broadcast(lambda: read_config(folder))
    reads = rank == 0 if is_sharded else node.rank == 0
    model = load_policy_model(folder, dtype) if reads else empty_policy_model(config, dtype)
    if is_sharded:
        return model
    broadcast_on_node(node, (tensor.data for tensor in (*model.parameters(), *model.buffers())))
    return model.to(device)  # type: ignore[arg-type]


def read_config(folder: Path) -> PretrainedConfig:
    """transformers' reading of a folder's config.json, without dropout: an update would not see what was sampled.

    Raises:
        UserError: transformers cannot read it.
    """
    from transformers import AutoConfig

    with naming_folder_in_errors(folder):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, (int, float)):
            setattr(config, name, 0.0)
    return config


def empty_policy_model(config: PretrainedConfig, dtype: str) -> PreTrainedModel:
    """An uninitialised model of a configuration, for a rank that is given its weights and buffers.

    Its memory is only promised by the system, until it is written to.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model.eval()


def read_folder_weights(
    folder: Path, cuts: Mapping[str, Cut] | None = None, node: NodeGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a folder's safetensors files, one at a time, under its Hugging Face name, in its stored shape.

    Collective over the ``node``, whose first rank reads.

    ``cuts``: the part to take of those that it names; a rank by itself brings nothing else of them to memory.

    Raises:
        ValueError: the folder has no safetensors file, or lacks a shard or a tensor that its index names; a tensor is
            not of the sizes that it is cut from.
    """
    for name, read in read_and_broadcast_parts(node, folder_readers(folder)):
        yield name, read(cuts.get(name) if cuts else None)


def folder_readers(folder: Path) -> Iterator[tuple[str, ReadCut]]:
    """``read_folder_weights``, each as a function that reads it, or a cut of it, until the next is asked for.

    Raises:
        ValueError: as ``read_folder_weights``.
    """
    for file, names in weight_files(folder).items():
        with open_safetensors(file, UNREADABLE) as reader:
            stored = list(reader.keys())
            if lacking := sorted((names or set()) - set(stored)):
                raise ValueError(f"{file} lacks {lacking[0]!r}, which {INDEX} places there; download that file again")
            for name in stored:
                # files of older transformers also hold the rotary frequencies, which config.json gives
                if (names is None or name in names) and not name.endswith(".inv_freq"):
                    yield name, partial(_read_cut, reader, name)


def _read_cut(reader: Any, name: str, cut: Cut | None) -> torch.Tensor:
    if cut is not None:
        stored = reader.get_slice(name)
        cut.check(name, stored.get_shape())
        if cut.slices:
            part: torch.Tensor = stored[cut.slices]
            return part
    whole: torch.Tensor = reader.get_tensor(name)
    return whole
