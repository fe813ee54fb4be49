"""The list that makes files a checkpoint: which file holds which piece of which tensor, and digests of them all.

``state.json``, version 3:

    format, version  "tlt_hpc checkpoint", 3
    step             steps that are done
    files            a list: part, name, size in bytes, digest: sha256 of size and content (all of it up to 32 MiB, else
                     32 blocks of 1 MiB spread evenly)
    tensors          by part and name: shape, and the lists files (numbers in the list above, from 0) and stops
    state            optimizer_steps, strategies (what the chooser has counted, by source of drafts), seed; between
                     checkpoints strategies alone
    digest           sha256 of all the rest

The elements of a flattened tensor up to ``stops[0]`` are in file ``files[0]``, those from there to ``stops[1]`` in
``files[1]``, and so on. A file holds a whole tensor under its name, and a piece under ``name[start:stop]``.

The policy's tensors have the names of the Hugging Face model with ``.master`` (fp32 weights), ``.exp_avg`` and
``.exp_avg_sq`` (Adam's moments) behind them. The drafter's have ``.weight`` (what the engine drafts with: the average),
``.trained`` (what training continues with; without an average it is ``.weight``), the moments, and two counters,
``num_steps`` and ``num_averaged``. An EAGLE-3 drafter also has ``token_ids``, its vocabulary, and one that began as a
published head ``settings`` (bytes of JSON) where its layer differs from the model's. ``drafter/drafter.safetensors``
has the same, whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from tlt_hpc.common.files import LINES_BYTES, adding_path_to_errors, os_error_text, read_bytes, sampled_digest
from tlt_hpc.config import UserError
from tlt_hpc.models.piece import Cut
from tlt_hpc.models.weight_files import opening_safetensors
from tlt_hpc.storage.folder import sync

JSON = Any
"""What ``json`` writes: dicts with string keys, lists, strings, numbers, booleans and None."""

STATE_FILE = "state.json"
VERSION: Literal[3] = 3
CHECKED_AT_ONCE = 8
"""Files whose digests are compared at a time: a parallel file system gives one reader a fraction of its bandwidth."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; its text is one line with the remedy."""


class OtherVersionError(CheckpointError):
    """A checkpoint that another version of this program can read: it is not damaged."""


class UnreadableCheckpointError(UserError):
    """A checkpoint that the disk refuses to read now: it need not be damaged."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Stored(NamedTuple):
    """A piece of a tensor in a file: the elements ``start`` to ``stop`` of ``shape``, counted flat."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if the piece is the whole tensor."""
        return self.stop - self.start == math.prod(self.shape)

    @property
    def safetensors_key(self) -> str:
        """Its name in the safetensors file."""
        return self.name if self.is_whole else f"{self.name}[{self.start}:{self.stop}]"


class FlatRange(NamedTuple):
    """The elements ``start`` to ``stop`` of a tensor that must have this shape, counted flat."""

    start: int
    stop: int
    shape: tuple[int, ...]


class File(_Record):
    """A file of a checkpoint."""

    part: str
    name: Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")]
    size: int
    digest: str


class ListedFile(File):
    """A file and what it holds, as the rank that wrote it tells rank 0."""

    tensors: list[tuple[str, tuple[int, ...], int, int]]
    """The values of each ``Stored``: pydantic reads plain tuples in half the time."""


class Placed(_Record):
    """The files of a tensor's elements: those up to ``stops[i]``, counted flat, are in file number ``files[i]``.

    Every rank may hold a piece of every tensor: a record of each piece would take 190 MB for a 70B model on 512 ranks.
    """

    shape: tuple[int, ...]
    files: list[int]
    stops: list[int]

    def covers_all_elements(self, num_files: int) -> bool:
        """Return True if the pieces are in files that there are, and together have all elements."""
        bounds, are_there = [0, *self.stops], all(0 <= file < num_files for file in self.files)
        whole = (
            bounds == sorted(bounds) and self.stops[-1:] == [math.prod(self.shape)] and min(self.shape, default=0) >= 0
        )
        return whole and are_there and len(self.files) == len(self.stops)

    def iter_file_pieces(self, span: FlatRange | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield file, start and stop of each piece, in order; of a range, those that have some of its elements."""
        for file, start, stop in zip(self.files, [0, *self.stops[:-1]], self.stops, strict=True):
            if span is None or (start < span.stop and stop > span.start):
                yield file, start, stop


class _Manifest(_Record):
    format: Literal["tlt_hpc checkpoint"] = "tlt_hpc checkpoint"
    version: Literal[3] = VERSION
    step: int
    files: list[File]
    tensors: dict[str, dict[str, Placed]]
    """part -> name of a tensor -> its files."""
    state: dict[str, JSON]
    digest: str = ""
    """sha256 of all the rest."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; holds no open file, so one rank may find it and broadcast it."""

    folder: Path
    step: int
    state: dict[str, JSON]
    files: Sequence[str]
    tensors: Mapping[str, Mapping[str, Placed]]
    """part -> name of a tensor -> which of the files have it, whichever ranks wrote them."""

    def tensor_names(self, part: str) -> list[str]:
        """Return the names of a part's tensors, sorted; none where the part was not saved."""
        return sorted(self.tensors.get(part, {}))

    def read_tensor(self, part: str, name: str, cut: Cut | None = None) -> Tensor:
        """Read one tensor, whole or a block of it, to the CPU.

        Raises:
            CheckpointError, ValueError: as ``open_tensor_reader``.
        """
        with self.open_tensor_reader(part) as read:
            return read(name, cut)

    @contextmanager
    def open_tensor_reader(self, part: str) -> Iterator[Callable[..., Tensor]]:
        """A function that reads one tensor of a part; files stay open until the end.

        It reads all of the tensor, a block of it (``cut``), or the elements of a ``FlatRange``, for which it opens only
        the files that have some of them.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
            ValueError: it is not of the sizes that it is cut from.
        """
        remedy = f"start again once its disk works, or remove {self.folder} if it is damaged"

        def read(name: str, cut: Cut | None = None, span: FlatRange | None = None) -> Tensor:
            if name not in self.tensors.get(part, {}):
                raise CheckpointError(
                    f"checkpoint {self.folder} has no tensor {name!r} in its part {part!r}: it was saved from another "
                    "model or drafter; resume with the configuration that wrote it, or choose another run.name"
                )
            placed = self.tensors[part][name]
            if span is not None and placed.shape != span.shape:
                raise CheckpointError(
                    f"checkpoint {self.folder} has {name!r} with shape {list(placed.shape)}, the model with "
                    f"{list(span.shape)}: resume with the model that wrote it, or choose another run.name"
                )
            values, starts = list[Tensor](), list[int]()
            for file, start, stop in placed.iter_file_pieces(span):
                stored = Stored(name, placed.shape, start, stop)
                try:
                    value = read_piece(self.folder / self.files[file], stored.safetensors_key)
                except UserError as error:
                    raise CheckpointError(f"{name!r}: {error}") from None
                wanted = placed.shape if stored.is_whole else (stop - start,)
                if tuple(value.shape) != wanted or (values and value.dtype != values[0].dtype):
                    raise CheckpointError(
                        f"{self.folder / self.files[file]} has another {stored.safetensors_key!r} "
                        f"than {STATE_FILE} says; {remedy}"
                    )
                values.append(value)
                starts.append(start)
            if span is not None:
                parts = zip(values, starts, strict=True)
                return torch.cat([part.flatten()[max(span.start - at, 0) : span.stop - at] for part, at in parts])
            tensor = values[0] if len(values) == 1 else torch.cat(values).view(placed.shape)
            return tensor if cut is None else cut.cut_from(name, tensor)

        with opening_safetensors(remedy) as read_piece:
            yield read


def write_manifest(path: Path, step: int, listed: Sequence[ListedFile], state: Mapping[str, JSON]) -> None:
    """Write the list of a checkpoint's files, durably.

    Raises:
        CheckpointError: they do not hold each element of each tensor once.
    """
    files = [File(**file.model_dump(exclude={"tensors"})) for file in listed]
    manifest = _Manifest(step=step, files=files, tensors=_tensor_locations(listed), state=dict(state))
    sealed = manifest.model_copy(update={"digest": _manifest_digest(manifest)})
    path.write_text(json.dumps(sealed.model_dump()), encoding="utf-8")
    sync(path)


def open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Compare the files in a folder with their list, and return the checkpoint that they are.

    Raises:
        CheckpointError: what is wrong with it.
        OtherVersionError: another version of this program wrote it.
        UnreadableCheckpointError: the disk refuses to read a file that is there.
    """
    manifest = _read_manifest(folder / STATE_FILE)
    if manifest.step != step:
        raise CheckpointError(f"its {STATE_FILE} is of step {manifest.step}")
    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        for _ in pool.map(lambda file: _check_file_digest(folder / file.name, file), manifest.files):
            pass  # raises the first error, in the files' order
    return Checkpoint(folder, step, manifest.state, [file.name for file in manifest.files], manifest.tensors)


def _tensor_locations(listed: Sequence[ListedFile]) -> dict[str, dict[str, Placed]]:
    """Return the files of every tensor, by part and name."""
    found: dict[str, dict[str, list[tuple[int, int, int, tuple[int, ...]]]]] = {}
    for number, file in enumerate(listed):
        pieces = found.setdefault(file.part, defaultdict(list))
        for name, shape, start, stop in file.tensors:
            pieces[name].append((start, stop, number, shape))
    return {
        part: {name: _sort_and_check_pieces(name, each) for name, each in pieces.items()}
        for part, pieces in found.items()
    }


def _sort_and_check_pieces(name: str, pieces: list[tuple[int, int, int, tuple[int, ...]]]) -> Placed:
    starts, stops, files, shapes = zip(*sorted(pieces), strict=True)
    if [*starts, math.prod(shapes[0])] != [0, *stops] or len({*shapes}) > 1:
        raise CheckpointError(f"the ranks together hold other elements of {name} than each once: {starts}, {stops}")
    return Placed(shape=shapes[0], files=list(files), stops=list(stops))


def _manifest_digest(manifest: _Manifest) -> str:
    content = json.dumps(manifest.model_dump(exclude={"digest"}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _read_manifest(path: Path) -> _Manifest:
    try:
        manifest = _Manifest.model_validate_json(read_bytes(path, LINES_BYTES))
    except OSError as error:
        raise _checkpoint_read_error(path, error) from None
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("version",):
            raise OtherVersionError(
                f"checkpoint {path.parent} is of version {str(first['input'])[:9]!r}, this program reads {VERSION}: "
                "use the commit that wrote it, which the run's environment.jsonl names"
            ) from None
        raise CheckpointError(f"{path.name}: {first['msg'].lower()}") from None
    if manifest.digest != _manifest_digest(manifest):
        raise CheckpointError(f"{path.name}: changed since it was written")
    for name, placed in ((name, each) for part in manifest.tensors.values() for name, each in part.items()):
        if not placed.covers_all_elements(len(manifest.files)):
            raise CheckpointError(f"{path.name}: does not say where {name} is")
    return manifest


def _check_file_digest(path: Path, listed: File) -> None:
    try:
        size = path.stat().st_size
        if size != listed.size:
            raise CheckpointError(f"{path.name}: {size} bytes, of {listed.size} written")
        with adding_path_to_errors(path):
            digest = sampled_digest(path)
        if digest != listed.digest:
            raise CheckpointError(f"{path.name}: changed since it was written")
    except OSError as error:
        raise _checkpoint_read_error(path, error) from None


def _checkpoint_read_error(path: Path, error: OSError) -> UserError:
    """The error of a file that cannot be read: it is missing or something else, or the disk fails now."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP):
        return CheckpointError(f"{path.name}: {error.strerror}")
    return UnreadableCheckpointError(f"{os_error_text(error)}; nothing was changed")
