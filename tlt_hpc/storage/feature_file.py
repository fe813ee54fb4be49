"""One file of the HDF5 rollout cache: tokens and the target's features of one rank's responses of one step.

Independent of other ranks and steps; ``feature_writer`` writes it. Schema 3 (G prompts, N responses, M extents):

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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage import hdf5

KIND = hdf5.FileKind("feature cache", schema=3, remedy="delete it; the drafter trains from the other files")


@dataclass(eq=False)
class Span:
    """``tokens`` [n] int32 and the ``rows`` [m] int64 of the file that hold their features, in ascending order.

    A prompt of P tokens has the features of its first P - 1.
    """

    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    features: NDArray[np.uint16] | None = None
    """[m, layer, hidden], until they are in the file."""
    is_kept: bool = True


@dataclass(frozen=True)
class Document:
    """A prompt and its response, ``tokens`` [T] int32, with ``features`` [T - 1, layer, hidden] uint16 (bits of bf16).

    ``features[i]`` are the target's at position i: the last token was never fed.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    features: NDArray[np.uint16]
    weight_version: int


class FeatureCacheReader:
    """A closed file.

    Raises:
        DamagedFile: truncated, corrupted, half-written, or of another schema.
        FileNotFoundError: no such file.
    """

    def __init__(self, path: Path) -> None:
        self._file = hdf5.CommittedFile(path, KIND)
        try:
            with self._file.raising_damaged_file():
                self._load_tables()
                self._check_tables()
        except hdf5.DamagedFile:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._prompt_of)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths [N]."""
        return np.diff(self._response_ends)

    @property
    def prompt_lengths(self) -> NDArray[np.int64]:
        """Prompt lengths [N]."""
        return np.diff(self._prompt_ends)[self._prompt_of]

    def read(self, index: int, start: int = 0, count: int | None = None) -> Document:
        """One document.

        With ``start`` and ``count`` the features of those positions alone are read, and the others are zeros that
        take no memory.

        Raises:
            DamagedFile: the data do not match their checksum.
        """
        assert 0 <= index < len(self)
        number = int(self._prompt_of[index])
        with self._file.raising_damaged_file():
            prompt = Span(_slice_by_ends(self._tokens[0], self._prompt_ends, number), self._feature_rows(number))
            rows = self._feature_rows(len(self._prompt_ends) - 1 + index)
            response = Span(_slice_by_ends(self._tokens[1], self._response_ends, index), rows)
            return read_document(self._features, prompt, response, self.weight_version, start, count)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @cached_property
    def _tokens(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self._file.read_array("prompt_tokens"), self._file.read_array("response_tokens")

    def _feature_rows(self, which: int) -> NDArray[np.int64]:
        """The rows of a prompt, or of response ``which`` - G."""
        pairs = _slice_by_ends(self._extents, self._extent_ends, which)
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, first + count) for first, count in pairs)])

    def _load_tables(self) -> None:
        file = self._file
        self.weight_version = int(file.read_number("weight_version"))
        self.shape = (int(file.read_number("num_layers")), int(file.read_number("hidden_size")))
        ends = ("prompt_ends", "response_ends", "extent_ends")
        self._prompt_ends, self._response_ends, self._extent_ends = (
            np.concatenate([np.zeros(1, np.int64), file.read_array(name)]) for name in ends
        )
        self._prompt_of: NDArray[np.int64] = file.read_array("prompt_of")
        self._extents: NDArray[np.int64] = file.read_array("extents")
        self._features = file.open_dataset("features")

    def _check_tables(self) -> None:
        """Compare the tables with each other and with the arrays they point into."""
        num_prompts = len(self._prompt_ends) - 1
        if {len(self), len(self._response_ends) - 1} != {self._file.committed}:
            raise ValueError(f"{len(self)} responses, but {self._file.committed} were committed")
        rows = np.concatenate([np.diff(self._prompt_ends) - 1, self.lengths])
        covered = np.add.reduceat(np.append(self._extents[:, 1], 0), self._extent_ends[:-1])
        covered[np.diff(self._extent_ends) == 0] = 0
        if not (
            np.array_equal(covered, rows)
            and self._prompt_of.max(initial=-1) < num_prompts
            and self._file.size("prompt_tokens") == self._prompt_ends[-1]
            and self._file.size("response_tokens") == self._response_ends[-1]
            and self._features.shape[1:] == self.shape
            and self._extents.sum(1).max(initial=0) <= len(self._features)
        ):
            raise ValueError("its tables, tokens and features are of different lengths")


def read_document(
    dataset: hdf5.Dataset, prompt: Span, response: Span, weight_version: int, start: int, count: int | None
) -> Document:
    """A prompt and its response, each in memory or in the file, as ``FeatureCacheReader.read``."""
    total = len(prompt.rows) + len(response.rows)
    end = total if count is None else min(total, start + count)
    features = np.zeros((total, *dataset.shape[1:]), np.uint16)
    offset = 0
    for span in (prompt, response):
        low, high = max(start, offset), min(end, offset + len(span.rows))
        if low < high:
            _read_rows(dataset, span, low - offset, features[low:high])
        offset += len(span.rows)
    return Document(np.concatenate([prompt.tokens, response.tokens]), len(prompt.tokens), features, weight_version)


def _read_rows(dataset: hdf5.Dataset, span: Span, first: int, out: NDArray[np.uint16]) -> None:
    held = span.features  # the writing thread drops its reference once they are in the file
    if held is not None:
        out[:] = held[first : first + len(out)]
        return
    rows = span.rows[first : first + len(out)]
    for run in contiguous_slices(rows):
        dataset.read_direct(out[run], np.s_[rows[run.start] : rows[run.stop - 1] + 1])


def contiguous_slices(rows: NDArray[np.int64]) -> Iterator[slice]:
    """Slices of ``rows`` [n] in which each number is the last one's successor."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    yield from (slice(start, end) for start, end in pairwise([0, *breaks.tolist(), len(rows)]) if start < end)


def _slice_by_ends(array: NDArray[Any], ends: NDArray[np.int64], index: int) -> NDArray[Any]:
    return array[ends[index] : ends[index + 1]]
