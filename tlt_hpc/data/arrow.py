"""Rows of parquet files and of Arrow files as ``datasets`` saves them, without that package: the home of pyarrow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tlt_hpc.config import ConfigError
from tlt_hpc.data.jsonl import digest_of
from tlt_hpc.data.rows import Row, RowError, first_line

_FILE_MAGIC = b"ARROW1"
"""How Arrow's file format begins; ``datasets`` writes the stream format, which has no such mark."""


class ArrowRows:
    """A table's rows, of some of the columns that ``schema`` has. Rows are counted from 0, as pandas counts them.

    Memory: a parquet file's wanted columns stand decoded in it; an Arrow file is mapped, so ranks of a node share it.
    """

    def __init__(self, path: Path, kind: str, table: pa.Table, schema: pa.Schema) -> None:
        self._path, self.kind, self.name = path, kind, str(path)
        self._columns = {name: table.column(name) for name in table.column_names}
        self._num_rows, self._schema = table.num_rows, schema

    def __len__(self) -> int:
        return int(self._num_rows)

    def __getitem__(self, index: int) -> Row:
        try:
            return {name: column[index].as_py() for name, column in self._columns.items()}
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise RowError(self.where(index), f"cannot be read ({first_line(error)}); write the file again") from None

    def where(self, index: int) -> str:
        return f"{self._path} row {index}"

    def columns(self) -> frozenset[str]:
        return _names(self._schema)

    def digest(self) -> str:
        return digest_of(self._path)


def open_parquet(path: Path, wanted: frozenset[str]) -> ArrowRows:
    """A parquet file's rows with those top-level columns of ``wanted`` that it has.

    Raises:
        ConfigError: it is no parquet file, or names a column twice.
    """
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            schema = file.schema_arrow
            names = _without_doubles(path, schema.names)
            table = file.read(columns=[name for name in names if name in wanted] or names)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"data.source: {path} cannot be read as parquet ({first_line(error)}); write or download it again"
        ) from None
    return ArrowRows(path, "parquet", table, schema)


def open_arrow(path: Path, wanted: frozenset[str]) -> ArrowRows:
    """The same for an Arrow file, in the stream or the file format.

    Raises:
        ConfigError: it is no such file, or names a column twice.
    """
    try:
        source = pa.memory_map(str(path))
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"data.source: {path} cannot be read as Arrow ({first_line(error)}); write or download it again"
        ) from None
    names = _without_doubles(path, table.column_names)
    return ArrowRows(path, "arrow", table.select([name for name in names if name in wanted] or names), table.schema)


def _without_doubles(path: Path, names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"data.source: {path} has the column {name!r} twice; rename one of them")
    return names


def _names(schema: pa.Schema) -> frozenset[str]:
    inner = {f"{field.name}.{part.name}" for field in schema if pa.types.is_struct(field.type) for part in field.type}
    return frozenset(field.name for field in schema) | inner
