"""Owns the checkpoints of a run on disk: named tensors and JSON in, the same out; knows no model and no optimiser.

A checkpoint is a folder ``step-000010`` of safetensors files, one writer each, and a ``state.json`` that lists them.
It is written as ``step-000010.part`` and renamed when it is whole, so a folder under its final name is complete unless
the disk has lost something.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_hpc.config import UserError
from tlt_hpc.storage.folder import share, sync

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

T = TypeVar("T")
JSON = Any
"""What ``json`` writes: dicts with string keys, lists, strings, numbers, booleans and None."""

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
NAME = re.compile(r"step-(\d{6,})")
PART = ".part"
MEBIBYTE = 2**20
MOST_BLOCKS = 32
"""Blocks of a file that its digest covers, a MiB each."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; its text is one line with the remedy."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _File(_Record):
    part: str
    name: str
    size: int
    digest: str
    tensors: list[str]


class _Manifest(_Record):
    format: Literal["tlt_hpc checkpoint"] = "tlt_hpc checkpoint"
    version: Literal[1] = 1
    step: int
    files: list[_File]
    state: dict[str, JSON]
    digest: str = ""
    """Of all the rest."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; holds no open file, so one rank may find it and broadcast it."""

    folder: Path
    step: int
    state: dict[str, JSON]
    files: Mapping[str, Mapping[str, str]]
    """part -> tensor name -> file that holds it, whichever rank wrote that."""

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors, sorted; none where the part was not saved."""
        return sorted(self.files.get(part, {}))

    def read(self, part: str, name: str) -> Tensor:
        """One whole tensor, on the CPU.

        Raises:
            CheckpointError: there is no such tensor, or its file cannot be read.
        """
        if name not in self.files.get(part, {}):
            raise CheckpointError(
                f"checkpoint {self.folder} has no tensor {name!r} in its part {part!r}: it was saved from another "
                "model or drafter; resume with the configuration that wrote it, or choose another run.name"
            )
        path = self.folder / self.files[part][name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name!r} from {path}: {error}; remove {self.folder}") from None


class CheckpointStore:
    """The checkpoints in ``folder``, of which the newest ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        assert keep >= 1, f"keep = {keep}"
        self._folder = folder
        self._keep = keep

    def save(
        self, step: int, world: World, shards: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, JSON]
    ) -> Path:
        """Write a checkpoint, and then remove those beyond ``keep``; collective.

        A step that is there in good order already is left as it is: a run's state at a step is one and the same.

        Args:
            shards: part -> tensor name -> tensor, what this rank holds of it; a tensor is held by one rank only.
            state: what rank 0 gives is kept.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: on all ranks, where one could not write; earlier checkpoints are as they were.
        """
        final = self._folder / f"step-{step:06d}"
        part = final.with_name(final.name + PART)
        is_first = world.rank == 0
        if _on_ranks(world, final, lambda: is_first and self._start(part, final))[0]:
            return final
        records = _on_ranks(world, final, lambda: _write_shards(part, shards, world.rank, world.size))
        files = [record for written in records for record in written]
        _on_ranks(world, final, lambda: self._finish(part, final, step, files, state) if is_first else None)
        if is_first:
            self._prune(step)
        return final

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint in good order, None where there is none of any kind; damaged ones are warned of.

        Reads up to 32 MiB of each file, so call it on one rank and broadcast what it returns.

        Raises:
            CheckpointError: there are checkpoints, but none in good order.
        """
        found = self._found()
        for step, folder in reversed(found):
            try:
                return _open_checkpoint(folder, step)
            except CheckpointError as error:
                logger.warning("skipping checkpoint %s: %s", folder, error)
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self._folder} is in good order: restore one of them, or "
                "remove them all to start afresh"
            )
        return None

    def _found(self) -> list[tuple[int, Path]]:
        """Step and folder of all under a final name, the newest last."""
        if not self._folder.is_dir():
            return []
        matches = ((NAME.fullmatch(path.name), path) for path in self._folder.iterdir() if path.is_dir())
        return sorted((int(match[1]), path) for match, path in matches if match)

    def _start(self, part: Path, final: Path) -> bool:
        """Make the folder to write in and clear what killed runs left; true where the checkpoint is there already."""
        if final.exists() and _in_good_order(final):
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"step-*{PART}"):
            shutil.rmtree(leftover)
        part.mkdir()
        return False

    def _finish(self, part: Path, final: Path, step: int, files: Sequence[_File], state: Mapping[str, JSON]) -> None:
        _write_manifest(part / STATE_FILE, step, files, state)
        sync(part)
        if final.exists():  # a damaged one
            final.rename(final.with_name(f"{final.name}.damaged{PART}"))
        part.rename(final)
        sync(self._folder)

    def _prune(self, step: int) -> None:
        """Remove the oldest, up to this step; a later one was passed over as damaged, and is left for its owner."""
        old = [folder for found, folder in self._found() if found <= step][: -self._keep]
        for folder in old:
            try:
                # A removal that is killed half-way must not leave a damaged checkpoint under a final name.
                shutil.rmtree(folder.rename(folder.with_name(folder.name + PART)))
            except OSError as error:
                logger.warning("cannot remove the old checkpoint %s: %s", folder, error)


def _on_ranks(world: World, final: Path, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every rank and gather the results; what fails on one rank is raised on all."""
    result: T | None = None
    failure = ""
    try:
        result = action()
    except (OSError, CheckpointError) as error:
        failure = f"rank {world.rank} on {world.hostname}: {error}"
    outcomes = world.allgather((result, failure))
    failures = [failure for _, failure in outcomes if failure]
    if failures:
        raise CheckpointError(
            f"cannot write checkpoint {final}: {failures[0]}; free space there or choose another run.folder (earlier "
            "checkpoints are untouched)"
        )
    return [cast(T, result) for result, _ in outcomes]


def _write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]], rank: int, num_ranks: int) -> list[_File]:
    """Write this rank's files, one for each part of which it holds a tensor."""
    return [
        _write_shard(folder / f"{part}-{rank:05d}-of-{num_ranks:05d}.safetensors", part, tensors)
        for part, tensors in shards.items()
        if tensors
    ]


def _write_shard(path: Path, part: str, tensors: Mapping[str, Tensor]) -> _File:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        share(path)
        sync(path)
        return _File(part=part, name=path.name, size=path.stat().st_size, digest=_digest(path), tensors=sorted(tensors))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name}: {error}") from None


def _write_manifest(path: Path, step: int, files: Sequence[_File], state: Mapping[str, JSON]) -> None:
    names = [(file.part, name) for file in files for name in file.tensors]
    assert len(names) == len(set(names)), "a tensor is held by two ranks"
    plain = json.loads(json.dumps(state, allow_nan=False))
    manifest = _Manifest(step=step, files=list(files), state=plain)
    sealed = manifest.model_copy(update={"digest": _manifest_digest(manifest)})
    path.write_text(json.dumps(sealed.model_dump(), indent=1), encoding="utf-8")
    sync(path)


def _manifest_digest(manifest: _Manifest) -> str:
    content = json.dumps(manifest.model_dump(exclude={"digest"}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _digest(path: Path) -> str:
    """Hash of a file: all of it up to 32 MiB, else 32 blocks spread evenly from the first to the last.

    To hash all of a 90 GB checkpoint would take minutes at every start, for one rank reads what all have written. What
    happens to large files in practice, a lost tail or pages never written, the size and the blocks show; every bit is
    covered where a file is small.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for offset in _block_offsets(size):
            file.seek(offset)
            digest.update(file.read(MEBIBYTE))
    return digest.hexdigest()


def _block_offsets(size: int) -> Iterator[int]:
    if size <= MOST_BLOCKS * MEBIBYTE:
        return iter(range(0, size, MEBIBYTE))
    return ((size - MEBIBYTE) * block // (MOST_BLOCKS - 1) for block in range(MOST_BLOCKS))


def _in_good_order(folder: Path) -> bool:
    try:
        _open_checkpoint(folder, int(folder.name.removeprefix("step-")))
    except CheckpointError as error:
        logger.warning("replacing checkpoint %s: %s", folder, error)
        return False
    return True


def _open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """The checkpoint in a folder, after its files have been compared with their list.

    Raises:
        CheckpointError: what is wrong with it.
    """
    manifest = _read_manifest(folder / STATE_FILE)
    if manifest.step != step:
        raise CheckpointError(f"its {STATE_FILE} is of step {manifest.step}")
    files: dict[str, dict[str, str]] = {}
    for file in manifest.files:
        _check_file(folder / file.name, file)
        files.setdefault(file.part, {}).update(dict.fromkeys(file.tensors, file.name))
    return Checkpoint(folder, step, manifest.state, files)


def _read_manifest(path: Path) -> _Manifest:
    try:
        manifest = _Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
    except ValidationError as error:
        raise CheckpointError(f"{path.name}: {error.errors()[0]['msg'].lower()}") from None
    if manifest.digest != _manifest_digest(manifest):
        raise CheckpointError(f"{path.name}: changed since it was written")
    return manifest


def _check_file(path: Path, listed: _File) -> None:
    try:
        size = path.stat().st_size
        if size != listed.size:
            raise CheckpointError(f"{path.name}: {size} bytes, of {listed.size} written")
        if _digest(path) != listed.digest:
            raise CheckpointError(f"{path.name}: changed since it was written")
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
