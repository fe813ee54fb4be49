"""How this project uses HDF5: the only importer of h5py.

HDF5 never opens a file itself; it works through Python file objects, for two reasons. Its own driver locks files,
which fails on parallel file systems without locks. And after a failed write (disk full) its own driver cannot close
the file any more and crashes the process at exit, whereas here the failure ends as one ``WriteError``.

A bit that flips on disk is noticed: the file format chosen here carries a checksum on all metadata, and every array
carries one per chunk (fletcher32: about 6 % of the writing speed).
"""

from __future__ import annotations

import errno
import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.files import open_regular, os_error_text
from tlt_hpc.storage.folder import WriteError, writing_atomically

# HDF5 reads it once, at import. Where h5py was imported before us this comes too late and does no harm: our files go
# through Python file objects, which HDF5 does not lock whatever the setting.
os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
from h5py import Dataset as Dataset
from h5py import File as File
from h5py import Group as Group
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5z

CHUNK_BYTES = 2**20
CHUNK_CACHE_BYTES = 8 * 2**20
# Readable by every HDF5 since 1.10 (2016), and the oldest format that has a checksum on all metadata.
FORMAT = ("v110", "v110")
BFLOAT16 = "bfloat16"
_SMALL_BYTES, _MAX_RATIO = 2**28, 4096
"""The size from which on an array is checked against what is stored of it, and the largest ratio of the two."""

# What h5py, numpy and our own checks raise on a file that is not what it should be; MemoryError where it claims to have
# an array that fits no machine.
_DAMAGE = (OSError, KeyError, IndexError, RuntimeError, TypeError, ValueError, MemoryError)


class DamagedFile(ValueError):  # noqa: N818
    """A file that is truncated, corrupted, half-written or of another kind or schema; its text is one line."""


class UnreadableFile(DamagedFile):
    """A file that the system refuses to read now; its bytes may be whole."""


@dataclass(frozen=True)
class FileKind:
    """The kind that a file names in its header; ``remedy`` tells the user what to do about a damaged one."""

    name: str
    schema: int
    remedy: str


class NewFile:
    """An HDF5 file that is being written; ``root`` is its h5py file. The commit counter is written last."""

    def __init__(self, path: Path, kind: FileKind) -> None:
        self._path = path
        try:
            self._bytes = _RememberingFile(path)
        except OSError as error:
            raise WriteError(path, error) from error
        self.root = File(self._bytes, "w", libver=FORMAT, rdcc_nbytes=CHUNK_CACHE_BYTES)
        put_attributes(self.root, {"kind": kind.name, "schema": kind.schema})

    def check_writes(self) -> None:
        """Raises ``WriteError`` where any write so far did not reach the disk."""
        if self._bytes.error is not None:
            raise WriteError(self._path, self._bytes.error) from self._bytes.error

    def commit(self, count: int) -> None:
        """Write everything, then the commit counter, and close.

        Raises:
            WriteError: the disk refused; the file is closed and not valid.
        """
        self.root.flush()
        self.root.attrs["committed"] = count
        self.close()
        self.check_writes()

    def close(self) -> None:
        """Close without committing; no reader will accept the file."""
        self.root.close()
        self._bytes.close()


@contextmanager
def replacing_file(path: Path, kind: FileKind, count: int, durable: bool = False) -> Iterator[Group]:
    """A new file's root to put a whole record into: written beside, committed with ``count``, renamed to ``path``.

    Args:
        durable: wait until it would outlive the machine, too.

    Raises:
        WriteError: the disk refused; ``path`` is unchanged.
    """
    with writing_atomically(path, durable) as part:
        file = NewFile(part, kind)
        try:
            yield file.root
            file.commit(count)
        finally:
            file.close()


class CommittedFile:
    """An HDF5 file opened to read, of the right kind and schema, with a commit counter; a context manager.

    Arrays and attributes are read by their path (``rollouts/rewards``), and checked when they are read. This uses
    HDF5's own calls: h5py's take three times as long, which counts when thousands of files are read.

    Raises:
        DamagedFile: anything else than such a file.
        FileNotFoundError: no file there.
        UnreadableFile: the system refuses to read it, now or later.
    """

    def __init__(self, path: Path, kind: FileKind) -> None:
        self._path, self._kind = path, kind
        try:
            self._bytes = open_regular(path).detach()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnreadableFile(os_error_text(error)) from None
        try:
            with self.raising_damaged_file():
                self._file = File(self._bytes, "r", rdcc_nbytes=CHUNK_CACHE_BYTES)
                self._groups: dict[str, Any] = {"": self._file.id}
                self.committed = self._check_header()
        except DamagedFile:
            self._bytes.close()
            raise

    def read_array(self, name: str) -> NDArray[Any]:
        """All of an array.

        Raises:
            KeyError, OSError, ValueError: it is missing, damaged, or not stored as this project stores data.
        """
        dataset = self._open_array(name)
        array = np.empty(dataset.shape, dataset.dtype)
        if array.size:
            dataset.read(h5s.ALL, h5s.ALL, array)
        return array

    def open_dataset(self, name: str) -> Dataset:
        """An array that is read in parts; raises as ``read_array``."""
        return Dataset(self._open_array(name))

    def size(self, name: str) -> int:
        """Length of an array's first axis; raises as ``read_array``."""
        return int(self._open_array(name).shape[0])

    def read_texts(self, name: str) -> tuple[str, ...]:
        """An array of names; raises as ``read_array``."""
        return tuple(bytes(text).decode() for text in self.read_array(name))

    def read_number(self, name: str) -> float:
        """A scalar attribute of a group, or of the file itself.

        Raises:
            KeyError, OSError, TypeError: it is missing, damaged, or no number.
        """
        return float(self._read_attribute_at(name))

    def read_text(self, name: str) -> str:
        """An attribute that is a text; raises as ``read_number``."""
        return bytes(self._read_attribute_at(name)).decode()

    def read_numbers(self, place: str) -> dict[str, float]:
        """All attributes of a group; raises as ``read_number``."""
        group = self._group(place)
        found = (h5a.open(group, index=index) for index in range(h5a.get_num_attrs(group)))
        return {each.name.decode(): float(_read_attribute(each)) for each in found}

    @contextmanager
    def raising_damaged_file(self) -> Iterator[None]:
        """Turn what h5py raises on damaged data, or on a read that the system refuses, into one line."""
        try:
            yield
        except _DAMAGE as error:
            # h5py's own errors have no number, and one of its seeks to a damaged place has EINVAL
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise UnreadableFile(os_error_text(OSError(error.errno, error.strerror, str(self._path)))) from None
            lines = str(error).splitlines() or [type(error).__name__]
            reason = lines[0].strip("'\" ")
            raise DamagedFile(f"{self._path}: damaged {self._kind.name}: {reason}; {self._kind.remedy}") from error

    def close(self) -> None:
        """Close the file."""
        self._groups.clear()
        self._file.close()
        with suppress(OSError):  # it was only read, and what was read had its checksums
            self._bytes.close()

    def __enter__(self) -> CommittedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_header(self) -> int:
        """The commit counter of a file of the right kind and schema."""
        if not h5a.exists(self._file.id, b"kind") or self.read_text("kind") != self._kind.name:
            raise ValueError(f"it does not say that it is a {self._kind.name}")
        schema = int(self.read_number("schema"))
        if schema != self._kind.schema:
            raise ValueError(f"it has schema {schema} and this version reads schema {self._kind.schema}")
        if not h5a.exists(self._file.id, b"committed"):
            raise ValueError("it was never committed (its writer was killed)")
        return int(self.read_number("committed"))

    def _open_array(self, name: str) -> Any:
        dataset = self._open(name)
        _check_array(dataset, name)
        return dataset

    def _group(self, name: str) -> Any:
        """A group, opened once."""
        if name not in self._groups:
            group = self._open(name)
            if not isinstance(group, h5g.GroupID):
                raise ValueError(f"{name} is no group")
            self._groups[name] = group
        return self._groups[name]

    def _open(self, name: str) -> Any:
        """The object with this path; a link is not followed."""
        place, _, own = name.rpartition("/")
        group, key = self._group(place), own.encode()
        if group.links.get_info(key).type != h5l.TYPE_HARD:  # raises KeyError if there is none
            raise ValueError(f"{own} is a link, not data")
        return h5o.open(group, key)

    def _read_attribute_at(self, name: str) -> Any:
        place, _, own = name.rpartition("/")
        return _read_attribute(h5a.open(self._group(place), own.encode()))


class _RememberingFile(io.RawIOBase):
    """A file that remembers its first failed write and drops the later ones, so that HDF5 can always close it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb+", buffering=0)
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._remember_error():
            num_written = 0 if self.error is None else len(view)
            while num_written < len(view):  # an unbuffered write may be short
                num_written += self._file.write(view[num_written:]) or 0
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        with self._remember_error():
            self._file.truncate(size)
        return self.tell() if size is None else size

    def close(self) -> None:
        with self._remember_error():  # a network file system may report a full disk only now
            self._file.close()
        super().close()

    @contextmanager
    def _remember_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


def put_attributes(node: Group, values: Mapping[str, int | float | str]) -> None:
    """Store scalars on a group or array; text goes in at fixed length, since variable length has no checksum."""
    for name, value in values.items():
        node.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value


def put_array(group: Group, name: str, array: NDArray[Any], compression: str | None = "gzip") -> None:
    """Store an array of fixed size with a checksum; an empty one has nothing to check or compress."""
    if array.size == 0:
        group.create_dataset(name, data=array)
        return
    num_chunks = -(-len(array) // chunk_rows(array.dtype, array.shape[1:]))
    chunks = (-(-len(array) // num_chunks), *array.shape[1:])  # of equal size, so that the last is nearly full too
    group.create_dataset(name, data=array, chunks=chunks, compression=compression, fletcher32=True)


def create_growing_array(
    group: Group, name: str, dtype: np.dtype[Any], row: tuple[int, ...], max_chunk_rows: int
) -> Dataset:
    """An empty array [0, *row] that grows along its first axis, with a checksum per chunk."""
    rows = min(chunk_rows(dtype, row), max_chunk_rows)
    shape = {"shape": (0, *row), "maxshape": (None, *row), "chunks": (rows, *row)}
    return group.create_dataset(name, dtype=dtype, fletcher32=True, **shape)


def write_rows(dataset: Dataset, first: int, rows: NDArray[Any]) -> None:
    """Put rows into a growing array from ``first`` on; it grows if it is too short."""
    if first + len(rows) > len(dataset):
        dataset.resize(first + len(rows), axis=0)
    dataset[first : first + len(rows)] = rows


def chunk_rows(dtype: np.dtype[Any], row: tuple[int, ...]) -> int:
    """Rows of one chunk of at most 1 MiB (larger ones measured slower)."""
    return max(1, CHUNK_BYTES // max(1, dtype.itemsize * int(np.prod(row, dtype=np.int64))))


def _check_array(node: Any, name: str) -> None:
    """Refuse an array that is outside of the file, or that is not empty and has no checksum."""
    if not isinstance(node, h5d.DatasetID) or not (0 in node.shape or _has_checksum(node)):
        raise ValueError(f"{name} is not stored as this project stores data")
    num_bytes = math.prod(node.shape) * node.dtype.itemsize
    if num_bytes > max(_SMALL_BYTES, _MAX_RATIO * node.get_storage_size()):
        raise ValueError(f"{name} would have {num_bytes:,} bytes, of which the file holds next to none")


def _has_checksum(array: h5d.DatasetID) -> bool:
    """True if each chunk has one; an array of another file has no chunks."""
    made = array.get_create_plist()
    return made.get_layout() == h5d.CHUNKED and made.get_filter_by_id(h5z.FILTER_FLETCHER32) is not None


def _read_attribute(attribute: Any) -> Any:
    value = np.empty((), attribute.dtype)
    attribute.read(value)
    return value[()]
