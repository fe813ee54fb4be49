"""The HDF5 rollout cache that the drafter trains from: tokens and the target's features, bounded in bytes.

Knows nothing of drafters or ranks' states. One file per rank and step; only its writer reads it while it is open.
The cache can be made again, so a file is renamed at the release without waiting for the disk: after a power failure a
file may be damaged, which its checksums show. Schema 1 (N documents; a document is a prompt with its response):

    /            attributes kind, schema, step, weight_version, num_layers, hidden_size, committed
    tokens       [sum T] int32: prompt, then response;  token_ends [N] int64;  prompt_lengths [N] int64
    features     [sum n, layer, hidden] uint16, the bits of bf16 (attribute dtype = "bfloat16"): the target's features
                 at positions 0..n-1 of each document, n <= T;  feature_ends [N] int64

``committed`` is the number of documents and is written last; a file without it is not data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage import hdf5
from tlt_hpc.storage.folder import RunFolder, make_folder, part_of, publish, rank_of

KIND = hdf5.FileKind("feature cache", schema=1, remedy="delete it; the drafter trains from the other files")
BUFFER_BYTES = 32 * 2**20

_log = logging.getLogger(__name__)
_UINT16 = np.dtype(np.uint16)
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class Document:
    """A prompt and its response, ``tokens`` [T] int32, with ``features`` [n, layer, hidden] uint16 (bits of bf16).

    ``features[i]`` are the target's at position i; n <= T.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    features: NDArray[np.uint16]
    weight_version: int

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.features.nbytes


class Documents(Protocol):
    """What the drafter's buffer reads from: a closed file, or the own open one."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N]; reads no features."""

    def read(self, index: int) -> Document:
        """One document.

        Raises:
            DamagedFile: the file's data do not match their checksum.
        """


class FeatureCacheWriter:
    """One rank's open file of one step; not valid for any other reader until ``close``.

    Appends go to memory and reach the file in blocks of ``buffer_bytes``: a killed writer's file is dropped whole, so
    writing earlier would keep nothing more. With ``max_bytes``, documents that no longer fit are refused and counted.
    """

    def __init__(
        self,
        path: Path,
        num_layers: int,
        hidden_size: int,
        step: int,
        weight_version: int,
        max_bytes: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.path, self.step, self.weight_version = path, step, weight_version
        self.num_bytes = self.num_tokens = self.num_refused = 0
        self._row = (num_layers, hidden_size)
        self._max_bytes, self._buffer_bytes = max_bytes, buffer_bytes
        self._pending: list[Document] = []
        self._num_pending_bytes = 0
        self._token_ends, self._feature_ends, self._prompt_lengths = [0], [0], list[int]()
        make_folder(path.parent)
        self._file = hdf5.NewFile(part_of(path), KIND)
        attributes = {"step": step, "weight_version": weight_version, "num_layers": num_layers}
        hdf5.put_attributes(self._file.root, {**attributes, "hidden_size": hidden_size})

    @property
    def num_documents(self) -> int:
        return len(self._prompt_lengths)

    def append(self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16]) -> None:
        """Add a document; the arrays are copied, so the caller may reuse its own.

        ``tokens`` [T] int32 prompt and response; ``features`` [n, layer, hidden] uint16 at positions 0..n-1, n <= T.

        Raises:
            WriteError: a block did not reach the disk; the file can only be abandoned.
        """
        assert tokens.dtype == np.int32 and features.dtype == np.uint16
        assert features.shape[1:] == self._row, f"features are [n, {self._row[0]}, {self._row[1]}]"
        assert 0 <= prompt_length <= len(tokens) and len(features) <= len(tokens)
        if self._max_bytes is not None and self.num_bytes + tokens.nbytes + features.nbytes > self._max_bytes:
            self._refuse()
            return
        self._count(Document(tokens.copy(), prompt_length, features.copy(), self.weight_version))
        if self._num_pending_bytes >= self._buffer_bytes:
            self.flush()

    def documents(self) -> OpenDocuments:
        """What was appended so far, read from memory and this handle; usable until the file is closed."""
        return OpenDocuments(self, self.num_documents)

    def read(self, index: int) -> Document:
        """The document of that index, flushed or not."""
        num_stored = self.num_documents - len(self._pending)
        if index >= num_stored:
            return self._pending[index - num_stored]
        ends = (self._token_ends[index : index + 2], self._feature_ends[index : index + 2])
        return _slice(self._file.root, ends, self._prompt_lengths[index], self.weight_version)

    def response_lengths(self, count: int) -> NDArray[np.int64]:
        """Response lengths [count] of the first documents."""
        return np.diff(self._token_ends[: count + 1]) - np.array(self._prompt_lengths[:count], dtype=np.int64)

    def flush(self) -> None:
        """Move what is pending to the file; worth calling while the rank is idle, so that ``close`` is short.

        Raises:
            WriteError: the disk refused; the file can only be abandoned.
        """
        if not self._pending:
            return
        self._make_arrays()
        root = self._file.root
        hdf5.extend_array(root["tokens"], np.concatenate([document.tokens for document in self._pending]))
        hdf5.extend_array(root["features"], np.concatenate([document.features for document in self._pending]))
        self._file.check()
        self._pending.clear()
        self._num_pending_bytes = 0

    def close(self) -> None:
        """Write what is pending and the offsets, commit, close, rename.

        Raises:
            WriteError: the disk refused; nothing is published and the part is removed.
        """
        try:
            self.flush()
            self._make_arrays()
            hdf5.put_array(self._file.root, "token_ends", np.array(self._token_ends[1:], np.int64), None)
            hdf5.put_array(self._file.root, "feature_ends", np.array(self._feature_ends[1:], np.int64), None)
            hdf5.put_array(self._file.root, "prompt_lengths", np.array(self._prompt_lengths, np.int64), None)
            self._file.commit(self.num_documents)
            publish(self.path, durable=False)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without publishing and remove the part; does nothing after ``close``."""
        self._file.close()
        part_of(self.path).unlink(missing_ok=True)

    def _refuse(self) -> None:
        if self.num_refused == 0:
            _log.warning(
                "%s: full at drafter.cache_bytes = %d; raise it to keep this step's further documents",
                self.path,
                self._max_bytes,
            )
        self.num_refused += 1

    def _count(self, document: Document) -> None:
        self._pending.append(document)
        self._num_pending_bytes += document.num_bytes
        self.num_bytes += document.num_bytes
        self.num_tokens += len(document.tokens)
        self._token_ends.append(self._token_ends[-1] + len(document.tokens))
        self._feature_ends.append(self._feature_ends[-1] + len(document.features))
        self._prompt_lengths.append(document.prompt_length)

    def _make_arrays(self) -> None:
        """Create the arrays at the first block, when it is known whether a whole chunk will be filled."""
        root = self._file.root
        if "tokens" in root:
            return
        # A small file does not reserve whole chunks; one that fills its buffer gets chunks of full size.
        rows = max(64, sum(len(document.tokens) for document in self._pending))
        hdf5.growing_array(root, "tokens", _INT32, (), rows)
        features = hdf5.growing_array(root, "features", _UINT16, self._row, rows)
        hdf5.put_attributes(features, {"dtype": hdf5.BFLOAT16})


class OpenDocuments:
    """The documents that the own open file held at one moment; a ``Documents``."""

    def __init__(self, writer: FeatureCacheWriter, count: int) -> None:
        self._writer, self._count = writer, count

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._writer.response_lengths(self._count)

    def read(self, index: int) -> Document:
        assert 0 <= index < self._count
        return self._writer.read(index)


class FeatureCacheReader:
    """A closed file; a ``Documents`` and a context manager.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = hdf5.CommittedFile(path, KIND)
        try:
            with self._file.naming_damage():
                self._load_offsets()
        except hdf5.DamagedFile:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._token_ends) - self._prompt_lengths

    @property
    def num_tokens(self) -> int:
        return int(self._token_ends[-1])

    def read(self, index: int) -> Document:
        assert 0 <= index < len(self)
        ends = (self._token_ends[index : index + 2].tolist(), self._feature_ends[index : index + 2].tolist())
        with self._file.naming_damage():
            return _slice(self._file.root, ends, int(self._prompt_lengths[index]), self.weight_version)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FeatureCacheReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _load_offsets(self) -> None:
        root = self._file.root
        self.step, self.weight_version = int(root.attrs["step"]), int(root.attrs["weight_version"])
        self.num_layers, self.hidden_size = int(root.attrs["num_layers"]), int(root.attrs["hidden_size"])
        self._token_ends = _with_zero(root["token_ends"][:])
        self._feature_ends = _with_zero(root["feature_ends"][:])
        self._prompt_lengths: NDArray[np.int64] = root["prompt_lengths"][:]
        counts = (len(self._prompt_lengths), len(self._token_ends) - 1, len(self._feature_ends) - 1)
        if counts != (self._file.committed,) * 3:
            raise ValueError(
                f"{counts} prompt lengths and offsets, but {self._file.committed} documents were committed"
            )
        held, due = (len(root["tokens"]), len(root["features"])), (self._token_ends[-1], self._feature_ends[-1])
        if held != due or root["features"].shape[1:] != (self.num_layers, self.hidden_size):
            raise ValueError(f"{held} tokens and features, but {due[0], due[1]} were committed")


class FeatureCache:
    """One rank's view of the cache over the steps: its open file, everybody's closed ones, and what to drop.

    A rank owns the files of its own number and, where ``num_ranks`` is given, those that an earlier run with more
    ranks left (rank q's go to rank q % num_ranks); it never touches another rank's.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        num_layers: int,
        hidden_size: int,
        max_bytes: int,
        num_ranks: int | None = None,
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._num_layers, self._hidden_size, self._max_bytes = num_layers, hidden_size, max_bytes
        self._writer: FeatureCacheWriter | None = None
        self._step = -1
        self._checked: dict[Path, bool] = {}

    def begin_step(self, step: int, weight_version: int) -> FeatureCacheWriter:
        """Open this rank's file of a step; own files of later steps, left by a run that was rewound, go.

        Raises:
            WriteError: the disk refused.
        """
        assert self._writer is None, "the step before has ended"
        self._step = step
        self._checked.clear()
        self._drop(later for later in self._folder.cache_steps() if later > step)
        path = self._folder.feature_cache(step, self._rank)
        self._writer = FeatureCacheWriter(
            path, self._num_layers, self._hidden_size, step, weight_version, self._max_bytes
        )
        return self._writer

    def end_step(self) -> None:
        """Close and rename the open file; then drop own steps, oldest first, but this and the last, and what is over
        ``max_bytes``; this step always stays.

        Raises:
            WriteError: the disk refused; the step's file is not published.
        """
        assert self._writer is not None, "a step has begun"
        writer, self._writer = self._writer, None
        writer.close()
        steps = [step for step in self._folder.cache_steps() if step < self._step]
        self._drop(step for step in steps if step < self._step - 1)
        if self.num_bytes > self._max_bytes:
            self._drop(steps)

    def abandon_step(self) -> None:
        """Drop the open file, where there is one, unpublished (the run stops inside a rollout)."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def own_documents(self) -> OpenDocuments:
        """This step's documents so far, from the own open file."""
        assert self._writer is not None, "a step has begun"
        return self._writer.documents()

    def previous_step_files(self) -> list[Path]:
        """Closed files of the step before this one, of all ranks that this one can see, ordered by rank.

        Files that are damaged or of another feature shape are left out, with one warning each.
        """
        return [path for path in self._folder.feature_caches(self._step - 1) if self._is_usable(path)]

    def recover(self) -> int:
        """At start: delete own half-written files, warn of own damaged ones; returns how many were deleted."""
        parts = [path for path in self._folder.cache_parts() if self._owns(path)]
        for path in parts:
            path.unlink()
        for step in self._folder.cache_steps():
            for path in self._own_files(step):
                self._is_usable(path)
        return len(parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of own closed files on disk."""
        return sum(path.stat().st_size for step in self._folder.cache_steps() for path in self._own_files(step))

    def _owns(self, path: Path) -> bool:
        rank = rank_of(path)
        return (rank if self._num_ranks is None else rank % self._num_ranks) == self._rank

    def _own_files(self, step: int) -> list[Path]:
        return [path for path in self._folder.feature_caches(step) if self._owns(path)]

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            for path in self._own_files(step):
                path.unlink()
            self._folder.remove_cache_step(step)

    def _is_usable(self, path: Path) -> bool:
        if path not in self._checked:
            self._checked[path] = _fits(path, (self._num_layers, self._hidden_size))
        return self._checked[path]


def _fits(path: Path, shape: tuple[int, int]) -> bool:
    try:
        with FeatureCacheReader(path) as reader:
            found = (reader.num_layers, reader.hidden_size)
    except hdf5.DamagedFile as error:
        _log.warning("%s", error)
        return False
    except FileNotFoundError:  # its owner dropped it between the listing and now
        return False
    if found != shape:
        _log.warning("%s: features [layer, hidden] = %s, but this run has %s; not used", path, found, shape)
    return found == shape


def _with_zero(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), ends])


def _slice(root: hdf5.File, ends: tuple[list[int], list[int]], prompt_length: int, weight_version: int) -> Document:
    (token_start, token_end), (feature_start, feature_end) = ends
    tokens: NDArray[Any] = root["tokens"][token_start:token_end]
    features: NDArray[Any] = root["features"][feature_start:feature_end]
    return Document(tokens, prompt_length, features, weight_version)
