"""The files that hold a model's weights, or a drafter's, checked without torch: a command does it at once."""

from __future__ import annotations

import hashlib
import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from tlt_hpc.common.files import sampled_digest
from tlt_hpc.config import EMBEDDED_MODEL, UserError
from tlt_hpc.models.json_file import read_json
from tlt_hpc.models.shape import TAKE_CONFIG, ModelShape
from tlt_hpc.models.tokenizer import embedded

INDEX = "model.safetensors.index.json"
_TORCH_FILE_ERRORS = ("unable to open file", "unable to mmap", "Error closing file")
UNREADABLE = "start again once its disk works, or download it again"
_MOST_MAPPED, _MAPPED_A_FILE = 2**30, 2**26
"""Bytes that ``reading_files`` reads until it opens its files again: what was read stays mapped until then. At ZeRO
stage 3 each of a checkpoint's hundreds of files has a piece of every tensor, so more is read of more files."""
SINGLE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files that peft loads adapters from."""
DRAFTER_FILE = "drafter.safetensors"
TAKE_DRAFTER = "give the drafter folder of a run with this model"
EMBEDDING = "model.embed_tokens.weight"


@contextmanager
def opened(file: Path, remedy: str, framework: Literal["pt", "numpy"] = "pt") -> Iterator[Any]:
    """A safetensors file, opened to read its tensors as this library's.

    Raises:
        UserError: it cannot be read, or is not whole; ends with ``remedy``.
    """
    with naming_file(file, remedy), safe_open(file, framework=framework) as reader:
        yield reader


@contextmanager
def naming_file(file: Path, remedy: str) -> Iterator[None]:
    """Name a safetensors file where the library cannot read it.

    Raises:
        UserError: as within; ends with ``remedy``.
    """
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{file} is no whole safetensors file ({error}); {remedy}") from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot read {file}: {refusal(error)}; {remedy}") from None


@contextmanager
def reading_files(remedy: str) -> Iterator[Callable[[Path, str], Any]]:
    """A function that reads one tensor of a safetensors file; files stay open until the end.

    On a shared file system, to open a file for each of hundreds of tensors would take longer than to read them.

    Raises (the function):
        UserError: a file cannot be read, or is not whole; ends with ``remedy``.
    """
    readers, most = dict[Path, Any](), max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    mapped = 0

    def read(file: Path, name: str) -> Any:
        nonlocal mapped
        with naming_file(file, remedy):
            is_full = mapped >= max(_MOST_MAPPED, len(readers) * _MAPPED_A_FILE)
            if is_full or (file not in readers and len(readers) >= most):
                readers.clear()
                mapped = 0
            if file not in readers:
                readers[file] = safe_open(file, framework="pt")
            tensor = readers[file].get_tensor(name)
            mapped += tensor.nbytes
            return tensor

    try:
        yield read
    finally:
        readers.clear()


def refusal(error: OSError | RuntimeError) -> str:
    """Why the system refuses a file, as torch or safetensors have it.

    Raises:
        RuntimeError: it is another error of torch.
    """
    if isinstance(error, RuntimeError) and not str(error).startswith(_TORCH_FILE_ERRORS):
        raise error
    if isinstance(error, FileNotFoundError) and error.errno is None:  # what the library says of any that it cannot open
        return "it cannot be opened"
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).splitlines()[0]


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Refuse a folder whose weights cannot be read, before anything is started; reads the files' heads alone.

    Raises:
        ValueError: no weights, a file of them is missing or cut short, they are another model's, or beside an adapter.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"model folder {folder} has an adapter ({ADAPTER_CONFIG}), which transformers would add to the weights; "
            "move it out of the folder if it is merged into them already, or merge it first (peft's merge_and_unload)"
        )
    if torch_files(folder):
        return  # transformers reads these, which say nothing before they are read as a whole
    stored, wanted = weight_shapes(folder), [shape.vocab_size, shape.hidden_size]
    file, found = stored.get(EMBEDDING, (folder, wanted))
    if list(found) != wanted:
        raise UserError(f"{file}: {EMBEDDING!r} has shape {found}, config.json asks for {wanted}; {TAKE_CONFIG}")
    total, asked = count_weights({name: sizes for name, (_, sizes) in stored.items()}, shape), shape.num_parameters
    if total < asked:  # more of them may be of parts that are not used
        raise UserError(
            f"the weights in {folder} are {total:,} numbers, config.json asks for {asked:,}; {TAKE_CONFIG}, or "
            "download the weights again"
        )


def count_weights(sizes: Mapping[str, Sequence[int]], shape: ModelShape) -> int:
    """How many numbers a model's weights of these sizes are, to compare with ``shape.num_parameters``."""
    return sum(math.prod(each) for name, each in sizes.items() if not (shape.tied_head and name == "lm_head.weight"))


def torch_files(folder: Path) -> list[Path]:
    """The files of weights in torch's format, where a folder has no others."""
    return [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("pytorch_model*.bin"))


def weight_files(folder: Path) -> Mapping[Path, set[str] | None]:
    """The files that hold a folder's weights, with the names to take from each (None: all)."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise ValueError(
            f"model folder {folder} has no {SINGLE} and no {INDEX}; convert the weights with save_pretrained"
        )
    files: dict[Path, set[str]] = {}
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict):
        raise UserError(f"{index} has no 'weight_map'; download it again")
    for name, file in placed.items():
        files.setdefault(folder / file, set()).add(name)
    if missing := [file.name for file in sorted(files) if not file.is_file()]:
        raise ValueError(
            f"model folder {folder} lacks {missing[0]} and {len(missing) - 1} more shards that {INDEX} names; "
            "download them"
        )
    return files


def find_drafter(place: str, asked: str) -> Path:
    """The file of a drafter: of the ``drafter`` folder of a run, or ``embedded:tiny``.

    Raises:
        ValueError: there is none; ``asked`` is how the user named it.
    """
    path = (embedded("tiny_drafter") if place == EMBEDDED_MODEL else Path(place)) / DRAFTER_FILE
    if not path.is_file():
        raise ValueError(f"{asked}: no {DRAFTER_FILE} there; {TAKE_DRAFTER}")
    return path


def find_initial_drafter(place: str, asked: str) -> Path:
    """As ``find_drafter``, or the config.json of a published head.

    Raises:
        ValueError: neither is there.
    """
    folder = Path(place)
    if (folder / DRAFTER_FILE).is_file() or not (folder / "config.json").is_file():
        return find_drafter(place, asked)
    if not any((folder / name).is_file() for name in (SINGLE, INDEX, TORCH_FILE)):
        raise ValueError(
            f"{asked}: no {DRAFTER_FILE} there, and beside config.json neither {SINGLE} nor {TORCH_FILE}; download the "
            "head's weights"
        )
    return folder / "config.json"


def weight_shapes(folder: Path) -> dict[str, tuple[Path, Sequence[int]]]:
    """The file and the shape of each of a folder's weights, by its name; reads the files' heads alone.

    Raises:
        ValueError: as ``weight_files``; a file cannot be read.
    """
    found: dict[str, tuple[Path, Sequence[int]]] = {}
    for file, names in weight_files(folder).items():
        with opened(file, UNREADABLE, "numpy") as reader:
            for name in sorted(names if names is not None else reader.keys()):
                found[name] = file, reader.get_slice(name).get_shape()
    return found


def weights_digest(folder: Path) -> str:
    """A hash that tells the weights of two folders apart: of each file's, as ``sampled_digest`` has it."""
    digests = [sampled_digest(file) for file in torch_files(folder) or sorted(weight_files(folder))]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def end_token_ids(folder: Path, shape: ModelShape) -> tuple[int, ...]:
    """Ids that end a response: generation_config.json's where it names some, since chat models list more there.

    Raises:
        ValueError: neither file names one, or one that is no token's.
    """
    path = folder / "generation_config.json"
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = tuple(named) if isinstance(named, list) else shape.eos_token_ids if named is None else (named,)
    if not ids:
        raise ValueError(f"model folder {folder} names no eos_token_id; add one to its generation_config.json")
    if wrong := [token for token in ids if not isinstance(token, int) or not 0 <= token < shape.vocab_size]:
        raise UserError(
            f"model folder {folder}: eos_token_id {wrong[0]!r} is none of the model's tokens 0 to "
            f"{shape.vocab_size - 1}; fix its generation_config.json"
        )
    return ids
