"""Rows of a .jsonl file: where each line begins is found in one pass, a line is parsed when it is asked for."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config import ConfigError
from tlt_hpc.data.rows import Row, RowError, nested_columns

_CHUNK_BYTES = 1 << 24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE, _BRACE = 10, ord("{")
_MOST_BYTES = 2**26
"""Of a line: a row's unit tests may have megabytes, a prompt has kilobytes."""
_LOOKED_AT = 100
"""Rows among which the first good one tells the columns."""


class JsonlRows:
    """A file of one JSON object a line; blank lines are no rows. Memory: 24 bytes a row."""

    kind = "jsonl"

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        try:
            self._file = path.open("rb")
            self._starts, self._lengths, self._numbers = _find_lines(path)
        except OSError as error:
            raise ConfigError(f"data.source: {path}: {error.strerror}; mend its permissions or give another") from None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        return parse_object(self._line(index), self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"

    def columns(self) -> frozenset[str]:
        """Raises ``ConfigError`` where none of the first rows can be read."""
        first: RowError | None = None
        for index in range(min(len(self), _LOOKED_AT)):
            try:
                return nested_columns(self[index])
            except RowError as error:
                first = first or error
        if first is not None:
            raise ConfigError(f"data.source: {first}")
        return frozenset()

    def digest(self) -> str:
        return digest_of(self._path)

    def _line(self, index: int) -> bytes:
        if (size := int(self._lengths[index])) > _MOST_BYTES:
            raise RowError(self.where(index), f"{size} bytes, and at most {_MOST_BYTES} are read; remove the row")
        return os.pread(self._file.fileno(), int(self._lengths[index]), int(self._starts[index]))


def parse_object(line: bytes, where: str) -> Row:
    """One line's JSON object.

    Raises:
        RowError: it is none, or names a key twice.
    """
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise RowError(where, f"not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise RowError(where, f"not JSON ({error.msg}); each line must be one JSON object") from None
    except _DoubleKeyError as error:
        raise RowError(where, f"has the key {error.key!r} twice; keep one of them") from None
    except ValueError:  # beyond Python's limit of 4300 digits
        raise RowError(where, "has an integer of too many digits; make it a text") from None
    except RecursionError:
        raise RowError(where, "JSON nested too deep; each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise RowError(where, f"JSON but no object ({line[:20]!r}); each line must be one JSON object")
    return row


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _DoubleKeyError(ValueError):
    def __init__(self, key: str) -> None:
        self.key = key


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DoubleKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def _find_lines(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Start, length (both in bytes) and number from 1 [N] of the lines that are not blank.

    Only the newline ends a line: U+2028 may stand inside a JSON text.
    """
    if not path.stat().st_size:
        return (np.empty(0, np.int64),) * 3
    text = np.memmap(path, np.uint8, "r")
    parts = (text[start : start + _CHUNK_BYTES] for start in range(0, len(text), _CHUNK_BYTES))
    newlines = [np.flatnonzero(part == _NEWLINE) + i * _CHUNK_BYTES for i, part in enumerate(parts)]
    ends = np.append(np.concatenate(newlines), len(text))
    starts = np.append(0, ends[:-1] + 1)
    if text[:3].tobytes() == _BYTE_ORDER_MARK:
        starts[0] = 3
    blank = starts >= ends
    for line in np.flatnonzero(~blank & (text[np.minimum(starts, len(text) - 1)] != _BRACE)):
        blank[line] = not text[starts[line] : ends[line]].tobytes().strip()
    kept = np.flatnonzero(~blank)
    return starts[kept], (ends - starts)[kept], kept + 1
