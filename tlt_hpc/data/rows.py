"""Rows of .jsonl, parquet and Arrow files, each read when it is asked for; broken ones are named by file and line."""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tlt_hpc.common.files import DamagedText, detect_other_format, parse_json_object
from tlt_hpc.config import ConfigError, UserError

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]

_MAX_LINE_BYTES = 2**26
"""Unit tests of a row may have megabytes; a prompt has kilobytes."""


class RowError(UserError):
    """A row that cannot be used; its text names the row and the reason in one line."""

    def __init__(self, where: str, reason: str, *remedy: str) -> None:
        super().__init__(f"{where}: {reason}", *remedy)


class Rows(Protocol):
    """Rows by index. ``rows[i]`` raises ``RowError`` if the row cannot be read."""

    kind: str
    """``data_source`` of rows that name none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def row_location(self, index: int) -> str:
        """The file and line, or row, as a message names it."""
        ...

    def digest(self) -> str:
        """A hash of all that the rows are read from; reads it all."""
        ...


class JsonlRows:
    """A file of one JSON object a line; blank lines are skipped. Memory: 16 bytes a row.

    Raises:
        ConfigError: it cannot be read; ``key`` is what named it.
    """

    kind = "jsonl"

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._starts, self._numbers = array("q"), array("q")
        end = 0
        try:
            self._file = path.open("rb")
            if other := detect_other_format(os.pread(self._file.fileno(), 8, 0)):
                raise ConfigError(*f"{key}: {path} is {other}".split("; ", 1))
            for number, line in enumerate(iter(lambda: self._file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > _MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{key}: {path}:{number}: over {_MAX_LINE_BYTES} bytes", "give one JSON object a line"
                    )
                if line.strip():
                    self._starts.append(end)
                    self._numbers.append(number)
                end += len(line)
        except OSError as error:
            raise ConfigError(f"{key}: {path}: {error.strerror}", "make sure that you may read it") from None
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        start, end = self._starts[index], self._starts[index + 1]
        try:
            return parse_json_object(os.pread(self._file.fileno(), end - start, start).rstrip())
        except DamagedText as error:
            raise RowError(
                self.row_location(index), f"no JSON object ({error}); each line must be one: fix or remove it"
            ) from None

    def row_location(self, index: int) -> str:
        """The file and line, as a message names them."""
        return f"{self._path}:{self._numbers[index]}"

    def digest(self) -> str:
        """The SHA-256 of the file; reads it all."""
        return digest_of(self._path)


class ArrowRows:
    """Rows of a parquet file, or of an Arrow file as ``datasets`` saves it, counted from 0.

    Of the file's top-level columns only those in ``wanted`` are read, if it has any of them. Memory: a parquet file's
    columns are decoded in memory; an Arrow file is mapped, so the ranks of a node share it.

    Raises:
        ConfigError: it is no such file, or two columns have one name; ``key`` is what named it.
    """

    def __init__(self, path: Path, wanted: frozenset[str], key: str) -> None:
        import pyarrow as pa

        self._path, self.kind = path, path.suffix[1:]
        try:
            table = (_read_parquet if self.kind == "parquet" else _read_arrow)(path, wanted)
            self._columns = {name: table.column(name) for name in table.column_names}
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ConfigError(
                f"{key}: {path} cannot be read as {self.kind} ({first_line(error)})", "write or download it again"
            ) from None
        self._num_rows = table.num_rows

    def __len__(self) -> int:
        return int(self._num_rows)

    def __getitem__(self, index: int) -> Row:
        try:
            return {name: column[index].as_py() for name, column in self._columns.items()}
        except ValueError as error:  # pyarrow's errors, and text that is no UTF-8
            raise RowError(
                self.row_location(index), f"cannot be read ({first_line(error)}); write the file again"
            ) from None

    def row_location(self, index: int) -> str:
        """The file and row, as a message names them."""
        return f"{self._path} row {index}"

    def digest(self) -> str:
        """The SHA-256 of the file; reads it all."""
        return digest_of(self._path)


class JoinedRows:
    """The rows of several files, one file after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = [part for part in parts if len(part)] or parts[:1]
        self._ends = list(accumulate(map(len, self._parts)))
        self.kind = self._parts[0].kind

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, within = self._locate_row(index)
        return part[within]

    def row_location(self, index: int) -> str:
        """The file and line, or row, as a message names them."""
        part, within = self._locate_row(index)
        return part.row_location(within)

    def digest(self) -> str:
        """The SHA-256 of each file, joined by "+"; reads all files."""
        return "+".join(part.digest() for part in self._parts)

    def _locate_row(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of another library's error."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _read_parquet(path: Path, wanted: frozenset[str]) -> pa.Table:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, memory_map=True) as file:
        return file.read(columns=_chosen_columns(file.schema_arrow, wanted))


def _read_arrow(path: Path, wanted: frozenset[str]) -> pa.Table:
    """Read the stream format, which ``datasets`` writes, or the file format."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()
    return table.select(_chosen_columns(table.schema, wanted))


def _chosen_columns(schema: pa.Schema, wanted: frozenset[str]) -> list[str]:
    return [name for name in schema.names if name in wanted] or schema.names
