"""The one way to read a file that a run, or another program, has written: regular, of bounded size, of known content.

A path may lead to a FIFO, which would wait for ever, or to a device, which may have no end; JSON may be of any depth
and type. Each of these is an error of one line here, and not of the code that uses what was read.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import io
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le

DOCUMENT_BYTES = 2**24
"""The most that a document of JSON may have."""
TOML_BYTES = 2**21
"""The most that a document of TOML may have, which takes longer to read."""
_MEBIBYTE = 2**20
_MAX_BLOCKS = 32
"""Blocks of a file that ``sampled_digest`` covers, a MiB each."""
LINES_BYTES = 2**29
"""The most that a file may have that grows by a line a step."""
_CONVERT = "convert it: iconv -t UTF-8 -f"
_DEEP = "nested too deep; flatten it"
_LARGE = "an integer of thousands of digits; use a smaller one"
_REMEDIES = {
    errno.EACCES: "make sure that you may read it, and the folders that it is in",
    errno.EPERM: "make sure that you may read it, and the folders that it is in",
    errno.ELOOP: "a link on the way leads back to itself: remove that link",
    errno.ENOTDIR: "a file is where a folder should be: move that file away",
    errno.EISDIR: "a folder is where a file should be: move that folder away",
    errno.ENAMETOOLONG: "use shorter names",
    errno.EINVAL: "move it away",
    errno.EFBIG: "move it away",
    errno.EIO: "the disk or the file server has failed; start again once it works",
    errno.ESTALE: "the file server no longer has it; start again",
    errno.EROFS: "the file system may only be read; choose another place",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or ask for a larger quota",
}

_STARTS = (
    (b"\x1f\x8b", "compressed by gzip; decompress it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; decompress it with unzstd"),
    (b"\xfd7zXZ", "compressed by xz; decompress it with unxz"),
    (b"BZh91AY&SY", "compressed by bzip2; decompress it with bunzip2"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"PAR1", "a parquet file; name it .parquet"),
    (b"ARROW1", "an Arrow file; name it .arrow"),
    (codecs.BOM_UTF32_LE, f"UTF-32 text; {_CONVERT} UTF-32"),  # before that of UTF-16, which it begins with
    (codecs.BOM_UTF32_BE, f"UTF-32 text; {_CONVERT} UTF-32"),
    (codecs.BOM_UTF16_LE, f"UTF-16 text; {_CONVERT} UTF-16"),
    (codecs.BOM_UTF16_BE, f"UTF-16 text; {_CONVERT} UTF-16"),
)
_ZEROS = {"x0x0": "UTF-16LE", "0x0x": "UTF-16BE", "x000": "UTF-32LE", "000x": "UTF-32BE"}
"""Encodings by which of the first four bytes are zero, where the text begins with ASCII and has no byte order mark."""

Count = Annotated[int, Ge(0), Le(2**53)]
"""A number of things."""
Moment = Annotated[float, Ge(0.0), Le(1e11)]
"""Seconds since the epoch."""

T = TypeVar("T")


class DamagedText(ValueError):  # noqa: N818
    """A text that does not hold what it should; its own text says why in one line, without the file's name."""


class NotTomlError(DamagedText):
    """A text that cannot be parsed as TOML at all."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file to read; a link is followed.

    Raises:
        OSError: there is none, or it cannot be read, or it is anything else.
    """
    _check_regular(path, path.stat())  # before it is opened: some devices do something when they are
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return io.BufferedReader(io.FileIO(descriptor, "rb"))


def read_bytes(path: Path, most: int = DOCUMENT_BYTES) -> bytes:
    """All of a regular file.

    Raises:
        OSError: as ``open_regular``, or it has more than ``most`` bytes.
    """
    with adding_path_to_errors(path), open_regular(path) as file:  # a close may fail, too
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)  # some file systems tell a size of 0
    if max(size, len(data)) > most:
        raise OSError(
            errno.EFBIG, f"it has {max(size, len(data)):,} bytes, and such a file {most:,} at most", str(path)
        )
    return data


def read_last_lines(path: Path, num_bytes: int) -> bytes:
    """The whole lines among the last ``num_bytes`` of a regular file.

    Raises:
        OSError: as ``open_regular``.
    """
    with adding_path_to_errors(path), open_regular(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
        file.seek(start)
        data = file.read(num_bytes)
    return data.partition(b"\n")[2] if start else data


@contextmanager
def adding_path_to_errors(path: Path) -> Iterator[None]:
    """Add the path to errors of reading, which the system reports without it.

    Raises:
        OSError: as within, with the path.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_text(path: Path, most: int = DOCUMENT_BYTES) -> str:
    """The same as text, in which bytes that are no UTF-8 are replaced.

    Raises:
        OSError: as ``read_bytes``.
    """
    return read_bytes(path, most).decode("utf-8", errors="replace")


def read_json(path: Path, kind: type[T], most: int = DOCUMENT_BYTES) -> T:
    """A document of JSON.

    Raises:
        OSError: as ``read_bytes``.
        DamagedText: it is no JSON, or not of that kind.
    """
    return parse_json(read_bytes(path, most), kind)


def parse_json(data: bytes, kind: type[T]) -> T:
    """Parse JSON into a value of ``kind``; keys that it does not know are left out.

    Raises:
        DamagedText: as ``read_json``.
    """
    # takes longer to import than all else here, and not every reader needs it
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:80]
        message = first["msg"][0].lower() + first["msg"][1:]
        raise DamagedText(f"{ascii(place)[1:-1]}: {message}" if place else message) from None


def parse_json_object(data: bytes) -> dict[str, Any]:
    """An object of JSON whose values are looked at by the caller.

    Raises:
        DamagedText: it is no JSON, or no object.
    """
    try:
        found = json.loads(decode_utf8(data))
    except RecursionError:
        raise DamagedText("it is nested too deep") from None
    except DamagedText:
        raise
    except ValueError as error:  # no JSON, or a number of thousands of digits
        raise DamagedText(str(error).splitlines()[0][:200]) from None
    if not isinstance(found, dict):
        raise DamagedText("it is no object")
    return found


def detect_other_format(start: bytes) -> str:
    """The format of a file that begins so and is not UTF-8 text, with what converts it; empty if it may be UTF-8."""
    found = next((name for first, name in _STARTS if start.startswith(first)), "")
    encoding = _ZEROS.get("".join("x" if byte else "0" for byte in start[:4]))
    return found or (f"{encoding} text; {_CONVERT} {encoding}" if encoding else "")


def decode_utf8(data: bytes) -> str:
    """The text of UTF-8, without a byte order mark.

    Raises:
        DamagedText: it is in another encoding, or no text.
    """
    if other := detect_other_format(data):
        raise DamagedText(f"it is {other}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise DamagedText(f"{byte} is not UTF-8; if the file is Latin-1, {_CONVERT} LATIN1") from None


def read_toml(path: Path) -> dict[str, Any]:
    """A document of TOML.

    Raises:
        OSError: as ``read_bytes``.
        DamagedText: it is no TOML.
    """
    return parse_toml(read_bytes(path, TOML_BYTES))


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse the bytes of a TOML file.

    Raises:
        DamagedText: as ``parse_toml_text``.
    """
    return parse_toml_text(decode_utf8(data))


def parse_toml_text(text: str) -> dict[str, Any]:
    """Parse a text as TOML.

    Raises:
        NotTomlError: it is no TOML.
        DamagedText: it is nested too deep, or has an integer that Python does not read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise DamagedText(_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        raise NotTomlError(str(error).splitlines()[0][:200]) from None
    except ValueError:  # Python reads no decimal integer of over 4300 digits
        raise DamagedText(_LARGE) from None


def has_remedy(error: OSError) -> bool:
    """Return True if ``os_error_text`` has a remedy: a path or its file system is the cause, not a program."""
    return error.filename is not None and error.errno in _REMEDIES


def os_error_text(error: OSError) -> str:
    """A system error in one line: the path, the cause, and a remedy if there is one."""
    cause = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "")
    words = f"{cause}; {remedy}" if remedy else cause
    return words if error.filename is None else f"{os.fsdecode(error.filename)}: {words}"


def _check_regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def sampled_digest(path: Path) -> str:
    """Hash of a file: all of it up to 32 MiB, else 32 blocks spread evenly from the first to the last.

    To hash all of a 90 GB checkpoint would take minutes at every start, for one rank reads what all have written. What
    happens to large files in practice, a lost tail or pages never written, the size and the blocks show; every bit is
    covered where a file is small.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open_regular(path) as file:
        for offset in _block_offsets(size):
            file.seek(offset)
            digest.update(file.read(_MEBIBYTE))
    return digest.hexdigest()


def _block_offsets(size: int) -> Iterator[int]:
    if size <= _MAX_BLOCKS * _MEBIBYTE:
        return iter(range(0, size, _MEBIBYTE))
    return ((size - _MEBIBYTE) * block // (_MAX_BLOCKS - 1) for block in range(_MAX_BLOCKS))
