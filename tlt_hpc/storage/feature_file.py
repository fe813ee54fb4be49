"""One file of the HDF5 rollout cache: tokens and the target's features of one rank's responses of one step.

Independent of other ranks and steps; ``feature_writer`` writes it. Schema 2 (G prompts, N responses, M extents):

    /                attributes kind, schema, step, weight_version, num_layers, hidden_size, compression, committed
    features         [rows, layer, hidden] uint16, the bits of bf16 (attribute dtype = "bfloat16")
    prompt_tokens    [sum P] int32;  prompt_ends [G] int64:    a prompt of P tokens has P - 1 rows of features
    response_tokens  [sum R] int32;  response_ends [N] int64:  a response of R tokens has R rows
    prompt_of        [N] int64: which prompt a response belongs to; a prompt is stored once, whatever has followed it
    extents          [M, 2] int64: first row and number of rows;  extent_ends [G + N] int64: the prompts', then the
                     responses'; the rows of one, extent after extent, are in the order of its positions

A prompt's rows, then its response's, are the features of positions 0 .. P + R - 2. Rows of what was evicted are used
again, so a response may lie in several extents, and rows that no extent names hold nothing.

``committed`` is the number of responses and is written last; a file without it is not data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage import hdf5
from tlt_hpc.storage.documents import Document
from tlt_hpc.storage.row_space import Extent

KIND = hdf5.FileKind("feature cache", schema=2, remedy="delete it; the drafter trains from the other files")

ReadRows = Callable[[int, NDArray[np.uint16]], None]
"""read(first, out): rows from ``first`` on into ``out``."""


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
                self._load_tables()
                self._check_tables()
        except hdf5.DamagedFile:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._prompt_of)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._response_ends)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        return np.diff(self._prompt_ends)[self._prompt_of]

    @property
    def num_tokens(self) -> int:
        """Of prompts and responses, a shared prompt counted once."""
        return int(self._prompt_ends[-1] + self._response_ends[-1])

    def read(self, index: int, start: int = 0, count: int | None = None) -> Document:
        assert 0 <= index < len(self)
        prompt = int(self._prompt_of[index])
        with self._file.naming_damage():
            prompt_tokens = _part(self._tokens[0], self._prompt_ends, prompt)
            tokens = np.concatenate([prompt_tokens, _part(self._tokens[1], self._response_ends, index)])
            parts = [
                (len(prompt_tokens) - 1, self._rows_of(prompt)),
                (len(tokens) - len(prompt_tokens), self._rows_of(len(self._prompt_ends) - 1 + index)),
            ]
            features = window(parts, (self.num_layers, self.hidden_size), start, count)
        return Document(tokens, len(prompt_tokens), features, self.weight_version)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FeatureCacheReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @cached_property
    def _tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self._file.array("prompt_tokens"), self._file.array("response_tokens")

    @cached_property
    def _features(self) -> hdf5.Dataset:
        return self._file.dataset("features")

    def _rows_of(self, which: int) -> ReadRows:
        """How to read the rows of a prompt, or of response ``which`` - G."""
        pairs = _part(self._extents, self._extent_ends, which).tolist()
        return partial(read_extents, self._features, [Extent(*pair) for pair in pairs])

    def _load_tables(self) -> None:
        file = self._file
        self.step, self.weight_version = int(file.number("step")), int(file.number("weight_version"))
        self.num_layers, self.hidden_size = int(file.number("num_layers")), int(file.number("hidden_size"))
        if (compression := file.text("compression")) not in ("none", "lzf", "gzip"):
            raise ValueError(f"it is compressed by {compression}, which an earlier version could read")
        ends = ("prompt_ends", "response_ends", "extent_ends")
        self._prompt_ends, self._response_ends, self._extent_ends = (
            np.concatenate([np.zeros(1, np.int64), file.array(name)]) for name in ends
        )
        self._prompt_of: NDArray[np.int64] = file.array("prompt_of")
        self._extents: NDArray[np.int64] = file.array("extents")

    def _check_tables(self) -> None:
        """Hold the tables against each other and the arrays they point into."""
        num_prompts = len(self._prompt_ends) - 1
        if {len(self), len(self._response_ends) - 1} != {self._file.committed}:
            raise ValueError(f"{len(self)} responses, but {self._file.committed} were committed")
        if len(self._extent_ends) - 1 != num_prompts + len(self):
            raise ValueError(f"{len(self._extent_ends) - 1} extents for {num_prompts} prompts, {len(self)} responses")
        if self._prompt_of.max(initial=-1) >= num_prompts:
            raise ValueError(f"a response to prompt {self._prompt_of.max()} of {num_prompts}")
        held = (self._file.size("prompt_tokens"), self._file.size("response_tokens"))
        due = (self._prompt_ends[-1], self._response_ends[-1])
        if held != due or self._features.shape[1:] != (self.num_layers, self.hidden_size):
            raise ValueError(f"{held} tokens, but {due} were committed")
        rows = np.concatenate([np.diff(self._prompt_ends) - 1, self.lengths])
        covered = np.add.reduceat(np.append(self._extents[:, 1], 0), self._extent_ends[:-1])
        covered[np.diff(self._extent_ends) == 0] = 0
        last = self._extents.sum(1).max(initial=0)
        if not np.array_equal(covered, rows) or last > len(self._features):
            raise ValueError("its extents do not cover its tokens")


def window(
    parts: Sequence[tuple[int, ReadRows]], row: tuple[int, int], start: int, count: int | None
) -> NDArray[np.uint16]:
    """The features of a document [all rows, *row], given its parts one after another: how many rows each, and how to
    read them. Only the ``count`` from ``start`` on are read; the others are zeros.
    """
    total = sum(num_rows for num_rows, _ in parts)
    end = total if count is None else min(total, start + count)
    out = np.zeros((total, *row), np.uint16)
    offset = 0
    for num_rows, read in parts:
        low, high = max(start, offset), min(end, offset + num_rows)
        if low < high:
            read(low - offset, out[low:high])
        offset += num_rows
    return out


def read_extents(features: hdf5.Dataset, extents: Iterable[Extent], first: int, out: NDArray[np.uint16]) -> None:
    """Rows ``first`` .. of those that the extents name, one after another, into ``out``."""
    num_read = 0
    for extent in extents:
        skipped = min(first, extent.count)
        count = min(extent.count - skipped, len(out) - num_read)
        hdf5.read_rows(features, extent.first + skipped, out[num_read : num_read + count])
        first, num_read = first - skipped, num_read + count


def _part(array: NDArray[np.generic], ends: NDArray[np.int64], index: int) -> NDArray[np.generic]:
    return array[ends[index] : ends[index + 1]]
