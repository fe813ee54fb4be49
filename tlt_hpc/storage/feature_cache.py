"""The rollout cache that the drafter trains from: documents with the target's features, bounded in bytes.

One file per rank and step, one writer, closed and renamed at the release; nobody reads another rank's open file.
Features are bf16 bits [token, layer, hidden]; documents are flat with end offsets; the commit counter comes last.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.folder import RunFolder, part_of, publish
from tlt_hpc.storage.hdf5 import COMMITTED, SCHEMA, DamagedFile, h5py

logger = logging.getLogger(__name__)

CACHE_SCHEMA = 1
_CHUNK_BYTES = 1 << 20
_PENDING_BYTES = 4 << 20


@dataclass(frozen=True)
class Document:
    """Prompt and response tokens [T] with the features [n, layer, hidden] (bf16 bits) of the first n positions."""

    tokens: NDArray[np.int32]
    prompt_length: int
    features: NDArray[np.uint16]
    weight_version: int


class Documents(Protocol):
    """Documents that can be read one by one."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N]."""
        ...

    def read(self, index: int) -> Document: ...


class _Index:
    """Where the documents of a file lie."""

    def __init__(self) -> None:
        self.token_ends: list[int] = []
        self.feature_ends: list[int] = []
        self.prompt_lengths: list[int] = []

    def add(self, num_tokens: int, num_features: int, prompt_length: int) -> None:
        self.token_ends.append((self.token_ends[-1] if self.token_ends else 0) + num_tokens)
        self.feature_ends.append((self.feature_ends[-1] if self.feature_ends else 0) + num_features)
        self.prompt_lengths.append(prompt_length)

    def lengths(self) -> NDArray[np.int64]:
        ends = np.array([0, *self.token_ends], dtype=np.int64)
        return np.diff(ends) - np.array(self.prompt_lengths, dtype=np.int64)

    def tokens(self, index: int) -> slice:
        return slice(self.token_ends[index - 1] if index else 0, self.token_ends[index])

    def features(self, index: int) -> slice:
        return slice(self.feature_ends[index - 1] if index else 0, self.feature_ends[index])


class FeatureCacheWriter:
    """One rank's open file of one step; also reads back what was appended, from the same handle."""

    def __init__(self, path: Path, num_layers: int, hidden_size: int, step: int, weight_version: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._weight_version = path, weight_version
        self._file = h5py.File(part_of(path), "w")
        self._file.attrs.update({SCHEMA: CACHE_SCHEMA, "step": step, "weight_version": weight_version})
        row = (num_layers, hidden_size)
        rows = max(1, _CHUNK_BYTES // (2 * num_layers * hidden_size))
        self._features = self._file.create_dataset(
            "features", (0, *row), "u2", maxshape=(None, *row), chunks=(rows, *row), fletcher32=True
        )
        self._features.attrs["dtype"] = "bfloat16"
        self._tokens = self._file.create_dataset("tokens", (0,), "i4", maxshape=(None,), chunks=(65536,), fletcher32=True)
        self._index = _Index()
        self._pending: list[tuple[NDArray[np.int32], NDArray[np.uint16]]] = []
        self._pending_bytes = 0
        self.num_bytes = 0

    @property
    def num_documents(self) -> int:
        return len(self._index.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        return self._index.token_ends[-1] if self._index.token_ends else 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N] of what was appended."""
        return self._index.lengths()

    def append(self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16]) -> None:
        """Add a document; held in memory until a block is full, so that the decode path pays a list append."""
        self._index.add(len(tokens), len(features), prompt_length)
        self._pending.append((tokens, features))
        self._pending_bytes += features.nbytes + tokens.nbytes
        self.num_bytes += features.nbytes + tokens.nbytes
        if self._pending_bytes > _PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held in memory."""
        if self._pending:
            _extend(self._tokens, np.concatenate([tokens for tokens, _ in self._pending]))
            _extend(self._features, np.concatenate([features for _, features in self._pending]))
            self._pending, self._pending_bytes = [], 0

    def read(self, index: int) -> Document:
        """A document that was appended."""
        self.flush()
        return _read(self._tokens, self._features, self._index, index, self._weight_version)

    def close(self) -> None:
        """Commit and give the file its name."""
        self.flush()
        self._file["token_ends"] = np.array(self._index.token_ends, dtype=np.int64)
        self._file["feature_ends"] = np.array(self._index.feature_ends, dtype=np.int64)
        self._file["prompt_lengths"] = np.array(self._index.prompt_lengths, dtype=np.int64)
        self._file.flush()
        self._file.attrs[COMMITTED] = self.num_documents
        self._file.close()
        publish(self._path)


class FeatureCacheReader:
    """A closed file."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DamagedFile: not a whole file of this schema.
        """
        try:
            self._file = h5py.File(path, "r")
            self._tokens, self._features = self._file["tokens"], self._file["features"]
            self._index = _Index()
            for name in ("token_ends", "feature_ends", "prompt_lengths"):
                vars(self._index)[name].extend(self._file[name][()].tolist())
            self._weight_version = int(self._file.attrs["weight_version"])
            counts = (int(self._file.attrs[COMMITTED]), int(self._file.attrs[SCHEMA]))
        except (OSError, KeyError, RuntimeError, TypeError) as error:
            raise DamagedFile(f"{path}: {error}; delete it, it is only a cache") from error
        if counts != (len(self._index.prompt_lengths), CACHE_SCHEMA):
            raise DamagedFile(f"{path}: commit counter and schema {counts} do not fit; delete it, it is only a cache")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N]."""
        return self._index.lengths()

    def read(self, index: int) -> Document:
        """One document."""
        return _read(self._tokens, self._features, self._index, index, self._weight_version)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FeatureCacheReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FeatureCache:
    """One rank's view of the cache over steps: keeps this step and the last."""

    def __init__(self, folder: RunFolder, rank: int, num_layers: int, hidden_size: int, max_bytes: int) -> None:
        self._folder, self._rank, self._max_bytes = folder, rank, max_bytes
        self._num_layers, self._hidden_size = num_layers, hidden_size
        self._step = -1
        self._writer: FeatureCacheWriter | None = None

    def begin_step(self, step: int, weight_version: int) -> FeatureCacheWriter:
        """Open this rank's file of a step."""
        assert self._writer is None, "the last step's file is still open"
        self._step = step
        path = self._folder.feature_cache(step, self._rank)
        self._writer = FeatureCacheWriter(path, self._num_layers, self._hidden_size, step, weight_version)
        return self._writer

    def end_step(self) -> None:
        """Close and publish this rank's file, then drop its old ones."""
        assert self._writer is not None, "no file is open"
        self._writer.close()
        self._writer = None
        self._evict()

    def own_documents(self) -> Documents:
        """What this rank has appended in this step."""
        assert self._writer is not None, "no file is open"
        return self._writer

    def previous_step_files(self) -> list[Path]:
        """The closed files of the step before, of all ranks this one can see."""
        return sorted(self._folder.feature_cache(self._step - 1, 0).parent.glob("rank-*.h5"))

    def recover(self) -> int:
        """Delete this rank's half-written files of a killed run; returns how many."""
        parts = list((self._folder.path / "cache").glob(f"step-*/rank-{self._rank:04d}.h5.part"))
        for part in parts:
            part.unlink()
        return len(parts)

    def _evict(self) -> None:
        own = sorted((self._folder.path / "cache").glob(f"step-*/rank-{self._rank:04d}.h5"))
        keep = own[-2:]
        while len(keep) > 1 and sum(path.stat().st_size for path in keep) > self._max_bytes:
            keep = keep[1:]
        for path in own:
            if path not in keep:
                path.unlink()
                if not any(path.parent.iterdir()):
                    shutil.rmtree(path.parent, ignore_errors=True)


def _extend(dataset: h5py.Dataset, values: NDArray[np.generic]) -> None:
    start = len(dataset)
    dataset.resize(start + len(values), axis=0)
    dataset[start:] = values


def _read(tokens: h5py.Dataset, features: h5py.Dataset, index: _Index, i: int, weight_version: int) -> Document:
    return Document(tokens[index.tokens(i)], index.prompt_lengths[i], features[index.features(i)], weight_version)
