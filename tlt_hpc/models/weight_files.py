"""The files that hold a model's weights, or a drafter's, checked without torch: a command does it at once."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from tlt_hpc.common.files import sampled_digest
from tlt_hpc.config import EMBEDDED_MODEL, UserError
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.models.tokenizer import package_asset_folder, read_json

INDEX = "model.safetensors.index.json"
_TORCH_FILE_ERRORS = ("unable to open file", "unable to mmap", "Error closing file")
UNREADABLE = "start again once its disk works, or download it again"
_MOST_MAPPED, _MAPPED_A_FILE = 2**30, 2**26
"""Bytes that ``opening_safetensors`` reads until it opens its files again: what was read stays mapped until then. At
ZeRO stage 3 each of a checkpoint's hundreds of files has a piece of every tensor, so more is read of more files."""
SINGLE, TORCH_FILE = "model.safetensors", "pytorch_model.bin"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files that peft loads adapters from."""
DRAFTER_FILE = "drafter.safetensors"
TAKE_DRAFTER = "give the drafter folder of a run with this model"
EMBEDDING = "model.embed_tokens.weight"


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    file: Path
    dtype: str
    """As the file has it, e.g. ``BF16``."""
    sizes: tuple[int, ...]
    start: int
    """Of its bytes in the file, and of what comes after them."""
    end: int


@contextmanager
def open_safetensors(file: Path, remedy: str, framework: Literal["pt", "numpy"] = "pt") -> Iterator[Any]:
    """A safetensors file, opened to read its tensors as this library's.

    Raises:
        UserError: it cannot be read, or is not whole; ends with ``remedy``.
    """
    with naming_file_in_errors(file, remedy), safe_open(file, framework=framework) as reader:
        yield reader


@contextmanager
def naming_file_in_errors(file: Path, remedy: str) -> Iterator[None]:
    """Name a safetensors file where the library cannot read it.

    Raises:
        UserError: as within; ends with ``remedy``.
    """
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{file} is no whole safetensors file ({error}); {remedy}") from None
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot read {file}: {refusal_reason(error)}; {remedy}") from None


@contextmanager
def opening_safetensors(remedy: str) -> Iterator[Callable[[Path, str], Any]]:
    """A function that reads one tensor of a safetensors file; files stay open until the end.

    On a shared file system, to open a file for each of hundreds of tensors would take longer than to read them.

    Raises (the function):
        UserError: a file cannot be read, or is not whole; ends with ``remedy``.
    """
    readers, most = dict[Path, Any](), max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    mapped = 0

    def read(file: Path, name: str) -> Any:
        nonlocal mapped
        with naming_file_in_errors(file, remedy):
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


def refusal_reason(error: OSError | RuntimeError) -> str:
    """The system's reason for refusing a file, from an error of torch or safetensors.

    Raises:
        RuntimeError: it is another error of torch.
    """
    if isinstance(error, RuntimeError) and not str(error).startswith(_TORCH_FILE_ERRORS):
        raise error
    if isinstance(error, FileNotFoundError) and error.errno is None:  # what the library says of any that it cannot open
        return "it cannot be opened"
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).splitlines()[0]


def torch_files(folder: Path) -> list[Path]:
    """The files of weights in torch's format, where a folder has no others."""
    return [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("pytorch_model*.bin"))


def weight_files(folder: Path) -> Mapping[Path, set[str] | None]:
    """The files that hold a folder's weights, with the names to take from each (None: all).

    Raises:
        ValueError: the folder has no weights, lacks a file of its index, or has a damaged index.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise ValueError(
            f"model folder {folder} has no {SINGLE} and no {INDEX}; convert the weights with save_pretrained"
        )
    files: dict[Path, set[str]] = {}
    content = read_json(index)
    placed = content.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise UserError(f"{index} has no 'weight_map'; download it again")
    for name, file in placed.items():
        files.setdefault(folder / file, set()).add(name)
    if missing := [file.name for file in sorted(files) if not file.is_file()]:
        raise ValueError(
            f"model folder {folder} lacks {missing[0]} and {len(missing) - 1} more shards that {INDEX} names; "
            "download them"
        )
    if not isinstance(content.get("metadata"), dict):
        raise UserError(f"{index} has no 'metadata', which transformers reads; download it again, or add it: {{}}")
    return files


def find_drafter(place: str, asked: str) -> Path:
    """The file of a drafter: of the ``drafter`` folder of a run, or ``embedded:tiny``.

    Raises:
        ValueError: there is none; ``asked`` is how the user named it.
    """
    path = (package_asset_folder("tiny_drafter") if place == EMBEDDED_MODEL else Path(place)) / DRAFTER_FILE
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


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The metadata of each weight by its name, from the headers of a folder's safetensors files.

    Raises:
        ValueError: as ``weight_files``; a file cannot be read or lacks what the index places there; two hold a name.
    """
    found = dict[str, StoredTensor]()
    for file, names in weight_files(folder).items():
        here = _read_header(file)
        if lacking := sorted((names or set()) - here.keys()):
            raise UserError(f"{file} lacks {lacking[0]!r}, which {INDEX} places there; download that file again")
        if twice := sorted(here.keys() & found.keys()):
            raise UserError(
                f"{found[twice[0]].file} and {file} both hold {twice[0]!r}; download the weights again, into an empty "
                "folder"
            )
        found |= here
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with (
        open_safetensors(file, UNREADABLE, "numpy"),
        file.open("rb") as stream,
    ):  # the library has seen that it is whole
        size = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(size))
    return {
        name: StoredTensor(
            file, each["dtype"], tuple(each["shape"]), *(8 + size + place for place in each["data_offsets"])
        )
        for name, each in entries.items()
        # files of older transformers also hold the rotary frequencies, which config.json gives
        if name != "__metadata__" and not name.endswith(".inv_freq")
    }


def weights_digest(folder: Path) -> str:
    """A hash that tells the weights of two folders apart: of each file's, as ``sampled_digest`` has it.

    Raises:
        ValueError: as ``weight_files``.
    """
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


if TYPE_CHECKING:
    from torch import Tensor

# -- experts: a tensor for each, as in files, or one for all, as in transformers --------------------------------------

_FUSED = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
"""Tensors [E, N, K] of all experts, and the matrices of an expert that lie one above the other in its part."""


class Place(NamedTuple):
    """The place of a weight in a tensor of all experts: of the expert ``number``, part ``part`` of ``num_parts``."""

    name: str
    number: int
    part: int
    num_parts: int

    def view_in(self, tensor: Tensor) -> Tensor:
        """A view of the weight [N / num_parts, K] in the tensor of all experts [E, N, K]."""
        return tensor[self.number].chunk(self.num_parts)[self.part]


def is_fused_expert_name(name: str) -> bool:
    """True if the tensor of transformers with this name holds the matrices of all experts."""
    return name.endswith(tuple(_FUSED))


def split_fused_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights with a tensor for each expert, views [N / num_parts, K] of those for all [E, N, K]."""
    for name, tensor in weights:
        if is_fused_expert_name(name):
            yield from ((own, place.view_in(tensor)) for own, (place, _) in expert_places(name, tensor.shape).items())
        else:
            yield name, tensor


def expert_places(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Place, tuple[int, int]]]:
    """The weights in a tensor of all experts [E, N, K] by their names in a file: where each is, and its shape."""
    kinds = next(kinds for fused, kinds in _FUSED.items() if name.endswith(fused))
    (count, rows, columns), stem = shape, name.rpartition(".")[0]
    return {
        f"{stem}.{number}.{kind}.weight": (Place(name, number, part, len(kinds)), (rows // len(kinds), columns))
        for number in range(count)
        for part, kind in enumerate(kinds)
    }
