"""How this project uses HDF5: the only importer of h5py. Knows files, checksums and bf16; nothing of what is stored.

HDF5 never opens a file itself; it works through Python file objects, for two reasons. Its own driver locks files,
which fails on parallel file systems without locks. And after a failed write (disk full) its own driver cannot close
the file any more and crashes the process at exit, whereas here the failure ends as one ``WriteError``.

A bit that flips on disk is noticed: the file format chosen here carries a checksum on all metadata, and every array
carries one per chunk (fletcher32: about 6 % of the writing speed).
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.files import open_regular, told
from tlt_hpc.storage.folder import WriteError, writing_beside

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
_MOST_DEPTH = 4
_SMALL_BYTES, _MOST_RATIO = 2**28, 4096
"""An array may be larger than the first only where it is stored in more than one of so many of its bytes."""

# What h5py, numpy and our own checks raise on a file that is not what it should be; MemoryError where it claims to have
# an array that fits no machine.
_DAMAGE = (OSError, KeyError, IndexError, RuntimeError, TypeError, ValueError, MemoryError)


class DamagedFile(ValueError):  # noqa: N818
    """A file that is truncated, corrupted, half-written or of another kind or schema; its text is one line."""


@dataclass(frozen=True)
class FileKind:
    """What a file says it is; ``remedy`` tells the user what to do about a damaged one."""

    name: str
    schema: int
    remedy: str


class NewFile:
    """An HDF5 file that is being written; ``root`` is its h5py file. The commit counter is the last thing written."""

    def __init__(self, path: Path, kind: FileKind) -> None:
        self._path = path
        try:
            self._bytes = _RememberingFile(path)
        except OSError as error:
            raise WriteError(path, error) from error
        self.root = File(self._bytes, "w", libver=FORMAT, rdcc_nbytes=CHUNK_CACHE_BYTES)
        put_attributes(self.root, {"kind": kind.name, "schema": kind.schema})

    def check(self) -> None:
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
        self.check()

    def close(self) -> None:
        """Close without committing; no reader will accept the file."""
        self.root.close()
        self._bytes.close()


@contextmanager
def replacing(path: Path, kind: FileKind, count: int, durable: bool = False) -> Iterator[Group]:
    """A new file's root to put a whole record into: written beside, committed with ``count``, renamed to ``path``.

    Args:
        durable: wait until it would outlive the machine, too.

    Raises:
        WriteError: the disk refused; ``path`` is as before.
    """
    with writing_beside(path, durable) as part:
        file = NewFile(part, kind)
        try:
            yield file.root
            file.commit(count)
        finally:
            file.close()


class CommittedFile:
    """An HDF5 file opened to read, of the right kind and schema, with a commit counter; a context manager.

    Args:
        in_parts: leave it to ``array`` to look at what is read: much faster where that is little.

    Raises:
        DamagedFile: anything else than such a file.
        FileNotFoundError: no file there.
    """

    def __init__(self, path: Path, kind: FileKind, in_parts: bool = False) -> None:
        self._path, self._kind = path, kind
        try:
            self._bytes = open_regular(path).detach()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DamagedFile(told(error)) from None
        try:
            with self.naming_damage():
                self.root = File(self._bytes, "r", rdcc_nbytes=CHUNK_CACHE_BYTES)
                self._groups: dict[str, Any] = {"": self.root.id}
                self.committed = _check_header(self.root, kind)
                if not in_parts:
                    _check_own(self.root.id)
        except DamagedFile:
            self._bytes.close()
            raise

    def has(self, name: str) -> bool:
        """Whether there is a group or array of such a path."""
        place, _, own = name.rpartition("/")
        return (not place or self.has(place)) and bool(self._place(place).links.exists(own.encode()))

    def array(self, name: str) -> NDArray[Any]:
        """All of an array, by its path.

        By HDF5's own calls, here and below: h5py's take three times as long, which counts where thousands of files are
        read.

        Raises:
            KeyError, OSError, ValueError: it is missing, damaged, or not stored as this project stores data.
        """
        dataset = self._open(name)
        if not isinstance(dataset, h5d.DatasetID):
            raise ValueError(f"{name} is no array")
        _check_array(dataset, name)
        array = np.empty(dataset.shape, dataset.dtype)
        if array.size:
            dataset.read(h5s.ALL, h5s.ALL, array)
        return array

    def names(self, place: str = "") -> list[str]:
        """What a group holds, the file itself without one.

        Raises:
            KeyError, OSError, ValueError: it is missing, damaged, or no group.
        """
        group = self._place(place)
        if place and not isinstance(group, h5g.GroupID):
            raise ValueError(f"{place} is no group")
        return [name.decode() for name in group]

    def size(self, name: str) -> int:
        """Of an array's first axis."""
        return int(self._open(name).shape[0])

    def number(self, name: str) -> float:
        """A scalar attribute of a group, by its path; one of the file itself has no group.

        Raises:
            KeyError, OSError, TypeError: it is missing, damaged, or no number.
        """
        place, own = _split(name)
        return float(_attribute(self._place(place), own))

    def has_number(self, name: str) -> bool:
        """Whether there is such an attribute."""
        place, own = _split(name)
        return (not place or self.has(place)) and bool(h5a.exists(self._place(place), own.encode()))

    def check_numbers(self, place: str) -> None:
        """Read all attributes of a group.

        Raises:
            OSError, TypeError: one is damaged.
        """
        group = self._place(place)
        for index in range(h5a.get_num_attrs(group)):
            _read_attribute(h5a.open(group, index=index))

    def _place(self, name: str) -> Any:
        """A group, opened once."""
        if name not in self._groups:
            self._groups[name] = self._open(name)
        return self._groups[name]

    def _open(self, name: str) -> Any:
        place, _, own = name.rpartition("/")
        return _member(self._place(place), own.encode())

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turn what h5py raises on damaged data into one ``DamagedFile`` line."""
        try:
            yield
        except _DAMAGE as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = lines[0].strip("'\" ")
            raise DamagedFile(f"{self._path}: damaged {self._kind.name}: {reason}; {self._kind.remedy}") from error

    def close(self) -> None:
        self._groups.clear()
        self.root.close()
        self._bytes.close()

    def __enter__(self) -> CommittedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


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
        with self._remembering():
            num_written = 0 if self.error is None else len(view)
            while num_written < len(view):  # an unbuffered write may be short
                num_written += self._file.write(view[num_written:]) or 0
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        with self._remembering():
            self._file.truncate(size)
        return self.tell() if size is None else size

    def close(self) -> None:
        with self._remembering():  # a network file system may report a full disk only now
            self._file.close()
        super().close()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


def put_attributes(node: Group, values: Mapping[str, int | float | str]) -> None:
    """Store scalars on a group or array; text goes in at fixed length, since variable length has no checksum."""
    for name, value in values.items():
        node.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value


def get_text(node: Group, name: str) -> str:
    """A text that ``put_attributes`` stored."""
    return bytes(node.attrs[name]).decode()


def put_array(group: Group, name: str, array: NDArray[Any], compression: str | None = "gzip") -> None:
    """Store an array of fixed size with a checksum; an empty one has nothing to check or compress."""
    if array.size == 0:
        group.create_dataset(name, data=array)
        return
    num_chunks = -(-len(array) // chunk_rows(array.dtype, array.shape[1:]))
    chunks = (-(-len(array) // num_chunks), *array.shape[1:])  # of equal size, so that the last is nearly full too
    group.create_dataset(name, data=array, chunks=chunks, compression=compression, fletcher32=True)


def growing_array(
    group: Group,
    name: str,
    dtype: np.dtype[Any],
    row: tuple[int, ...],
    max_chunk_rows: int | None = None,
    compression: str = "none",
) -> Dataset:
    """An empty array [0, *row] that grows along its first axis, with a checksum per chunk.

    ``compression`` is one of ``filters_of``'s.
    """
    rows = min(chunk_rows(dtype, row), max_chunk_rows or 2**31)
    shape = {"shape": (0, *row), "maxshape": (None, *row), "chunks": (rows, *row)}
    return group.create_dataset(name, dtype=dtype, fletcher32=True, **shape, **filters_of(compression))


def filters_of(compression: str) -> dict[str, Any]:
    """What h5py needs to know to write or read an array with that compression; all shuffle bytes or bits first.

    ``none``, ``lzf``, ``gzip``, ``zstd``, ``bitshuffle-lz4``, ``bitshuffle-zstd`` and ``blosc2-CODEC-SHUFFLE`` with
    lz4 or zstd, and byte or bit. All but the first three come from hdf5plugin, which is loaded here at its first use:
    it takes as long as h5py itself.
    """
    if compression == "none":
        return {}
    if compression in ("lzf", "gzip"):
        return {"shuffle": True, "compression": compression, "compression_opts": 1 if compression == "gzip" else None}
    import hdf5plugin

    family, _, rest = compression.partition("-")
    if family == "zstd":
        return {"shuffle": True, **hdf5plugin.Zstd(clevel=1)}
    if family == "bitshuffle":
        return dict(hdf5plugin.Bitshuffle(cname=rest, **({"clevel": 1} if rest == "zstd" else {})))
    codec, _, shuffle = rest.partition("-")
    shuffles = {"byte": hdf5plugin.Blosc2.SHUFFLE, "bit": hdf5plugin.Blosc2.BITSHUFFLE}
    return dict(hdf5plugin.Blosc2(cname=codec, clevel=1, filters=shuffles[shuffle]))


def write_rows(dataset: Dataset, first: int, rows: NDArray[Any]) -> None:
    """Put rows into a growing array from ``first`` on; it grows where it is too short."""
    if first + len(rows) > len(dataset):
        dataset.resize(first + len(rows), axis=0)
    dataset[first : first + len(rows)] = rows


def read_rows(dataset: Dataset, first: int, out: NDArray[Any]) -> None:
    """Rows ``first`` .. ``first + len(out) - 1`` into ``out``, which is contiguous."""
    if len(out):
        dataset.read_direct(out, np.s_[first : first + len(out)])


def chunk_rows(dtype: np.dtype[Any], row: tuple[int, ...]) -> int:
    """Rows of one chunk of at most 1 MiB (larger ones measured slower)."""
    return max(1, CHUNK_BYTES // max(1, dtype.itemsize * int(np.prod(row, dtype=np.int64))))


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 rounded to the nearest bf16 (ties to even), as the bf16's bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    # Rounding could carry a NaN's mantissa into infinity: keep its upper bits and set the quiet bit.
    return np.where(np.isnan(values), upper | np.uint32(0x40), rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _check_own(group: Any, depth: int = 0) -> None:
    """Refuse what leads out of the file, or is in it without a checksum: neither is of this project's writing."""
    if depth > _MOST_DEPTH:  # a group that is its own member, as likely as not
        raise ValueError("it has groups within groups beyond what this project writes")
    for name in group:
        node = _member(group, name)
        if isinstance(node, h5g.GroupID):
            _check_own(node, depth + 1)
        else:
            _check_array(node, name.decode())


def _member(group: Any, name: bytes) -> Any:
    """What a group has under a name, opened; a link is not followed."""
    kind = group.links.get_info(name).type  # or there is none, which it says
    if kind != h5l.TYPE_HARD:
        where = group.links.get_val(name)
        text = b" ".join(where) if isinstance(where, tuple) else where
        raise ValueError(f"{name.decode()} is a link to {text.decode(errors='replace')}, not data")
    return h5o.open(group, name)


def _check_array(node: Any, name: str) -> None:
    """Refuse an array that lies outside of the file, or that has no checksum though there is something in it."""
    if isinstance(node, h5d.DatasetID):
        made = node.get_create_plist()
        if made.get_layout() == h5d.CHUNKED:  # which no external or virtual one has
            is_own = made.get_filter_by_id(h5z.FILTER_FLETCHER32) is not None or 0 in node.shape
        else:
            is_own = 0 in node.shape and made.get_layout() != h5d.VIRTUAL and not made.get_external_count()
        num_bytes = math.prod(node.shape) * node.dtype.itemsize
        if is_own and num_bytes > max(_SMALL_BYTES, _MOST_RATIO * node.get_storage_size()):
            raise ValueError(f"{name} would have {num_bytes:,} bytes, of which the file holds next to none")
        if is_own:
            return
    raise ValueError(f"{name} is not stored as this project stores data")


def _check_header(root: File, kind: FileKind) -> int:
    if not h5a.exists(root.id, b"kind") or bytes(_attribute(root.id, "kind")).decode() != kind.name:
        raise ValueError(f"it does not say that it is a {kind.name}")
    schema = int(_attribute(root.id, "schema"))
    if schema != kind.schema:
        raise ValueError(f"it has schema {schema} and this version reads schema {kind.schema}")
    if not h5a.exists(root.id, b"committed"):
        raise ValueError("it was never committed (its writer was killed)")
    return int(_attribute(root.id, "committed"))


def _split(name: str) -> tuple[str, str]:
    """An attribute's group and its own name, in which there may be more strokes."""
    place, stroke, own = name.partition("/")
    return (place, own) if stroke else ("", name)


def _attribute(place: Any, name: str) -> Any:
    """A scalar one, by HDF5's own calls."""
    return _read_attribute(h5a.open(place, name.encode()))


def _read_attribute(attribute: Any) -> Any:
    value = np.empty((), attribute.dtype)
    attribute.read(value)
    return value[()]
