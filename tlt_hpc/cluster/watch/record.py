"""What the ranks of a start leave in the run's folder: a status file each, one verdict, and so how the start ended.

A status file has one record of fixed size, written in place, so that a reader never sees half of one. It is readable
text: a checksum, then JSON, padded with blanks.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tlt_hpc.common.files import DamagedText, adding_path_to_errors, open_regular, parse_json, read_text

SIZE = 2048
"""Bytes of a record: less than a page, so a reader never sees a part of a write."""
HEARTBEAT_SECONDS = 5.0
"""How often a rank writes its record while its phase and state do not change."""
_LONGEST_TEXT, _LONGEST_ENDING = 120, 400
"""Characters; an error's text begins with a path of the library's source, and says only then what happened."""
Count = Annotated[int, Field(ge=-1, le=2**53)]
Seconds = Annotated[float, Field(ge=-1, le=2**53)]
VERDICT = "verdict.txt"
FINISHED = "finished"
"""The ending of a rank that has done all of its work."""
_ORDERLY = (FINISHED, "stopped early")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Status of a rank, written by itself."""

    start: str
    rank: Count
    host: str
    pid: Count
    heartbeat: Count
    """Looks of the watch so far; stops if the process is dead or stopped."""
    phase: str
    step: Count | None
    """From 1."""
    part: str
    part_number: Count
    waiting: str
    """The collective that it waits in; empty while it does work of its own."""
    number: Count
    progress: Count
    still: Count
    """Looks for which its counter has not moved."""
    limit: Count
    """Looks after which it counts as stalled in this phase; 0: never."""
    seconds: Seconds
    """``still`` in seconds during which this process was running."""
    sequences_left: Count = -1
    """Of this rank's own responses, in a rollout; -1 elsewhere."""
    where: str = ""
    """Function and line of the main thread, once it has stalled."""
    ending: str = ""
    """How the rank ended, if it could say so; empty while it runs and after it was killed."""

    @property
    def stalled(self) -> bool:
        """True if it has made no progress for longer than its phase allows."""
        return not self.ending and 0 < self.limit <= self.still

    @property
    def phase_and_step_text(self) -> str:
        """Phase, step and part in words."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.phase}{step}{f' ({self.part})' if self.part else ''}"

    @property
    def name(self) -> str:
        """Rank and host in words."""
        return f"rank {self.rank} on {self.host}"


def status_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's record."""
    return folder / f"rank-{rank:04d}"


def stacks_file(folder: Path, rank: int) -> Path:
    """Return the path of the stacks that a stalled rank writes."""
    return folder / f"rank-{rank:04d}.stacks"


def verdict_file(folder: Path) -> Path:
    """The file of the one line that says why a start of the job was ended."""
    return folder / VERDICT


def encode(record: Record) -> bytes:
    """The record in ``SIZE`` bytes."""
    short = replace(
        record,
        part=_bounded_ascii(record.part, _LONGEST_TEXT),
        where=_bounded_ascii(record.where, _LONGEST_TEXT),
        ending=_bounded_ascii(record.ending, _LONGEST_ENDING),
    )
    text = json.dumps(asdict(short), separators=(",", ":")).encode()
    line = f"{zlib.crc32(text):08x} ".encode() + text
    assert len(line) < SIZE, f"a record of {len(line)} bytes"
    return line.ljust(SIZE - 1) + b"\n"


def _bounded_ascii(text: str, longest: int) -> str:
    """ASCII of bounded length."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:longest])


def decode(data: bytes) -> Record:
    """The record that a status file holds.

    Raises:
        DamagedText: it is torn, damaged, or of another version.
    """
    crc, _, text = data.rstrip().partition(b" ")
    if len(data) != SIZE or crc != f"{zlib.crc32(text):08x}".encode():
        raise DamagedText(f"{len(data)} bytes that are no status record")
    try:
        return parse_json(text, Record)
    except DamagedText as error:
        raise DamagedText(f"a status record of another version ({error})") from None


def write_record(folder: Path, record: Record) -> None:
    """Write a rank's record in place: opened and closed each time, which is when NFS sends it.

    Raises:
        OSError: the disk refused, or the folder is gone.
    """
    descriptor = os.open(status_file(folder, record.rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(descriptor, encode(record), 0)
    finally:
        os.close(descriptor)


def read_record(path: Path) -> Record:
    """The record of a status file.

    Raises:
        OSError: there is none, or it cannot be read.
        DamagedText: the file holds none.
    """
    with adding_path_to_errors(path), open_regular(path) as file:
        return decode(file.read(SIZE + 1))


def read_records(folder: Path, *ignored: type[OSError]) -> list[Record]:
    """The records of a folder by rank, without those that are damaged or fail with an error ``ignored``.

    Raises:
        OSError: one cannot be read.
    """
    found = []
    for path in sorted(folder.glob("rank-*")):
        with suppress(DamagedText, *ignored):
            found += [] if path.suffix else [read_record(path)]  # others are stacks
    return found


def write_verdict_if_first(folder: Path, start: str, line: str) -> bool:
    """Write the one line that ends a start; False if another rank has written one already.

    Raises:
        OSError: it cannot be written.
    """
    path = verdict_file(folder)
    part = path.with_name(f"{VERDICT}-{start}-{os.getpid()}")
    part.write_text(f"{start} {line}\n", encoding="utf-8")
    try:
        os.link(part, path)  # of several ranks one succeeds, on NFS too
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def read_verdict(folder: Path) -> tuple[str, str] | None:
    """The start that was ended, and why; None if there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        start, _, line = read_text(verdict_file(folder)).strip().partition(" ")
    except FileNotFoundError:
        return None
    return start, line


def read_and_clear_last_end(folder: Path, start: str) -> str:
    """Read how the start before this one ended, empty if it ended in order, and remove its verdict.

    For one rank of ``start``, before any of its ranks writes a record.

    Raises:
        OSError: the folder cannot be read.
    """
    records = read_records(folder)
    of_rank_0 = [record.start for record in records if record.rank == 0]
    records = [record for record in records if record.start in of_rank_0]  # a start on more ranks has left more files
    verdict = read_verdict(folder)
    verdict_file(folder).unlink(missing_ok=True)
    if not records or records[0].start == start:
        return ""
    if verdict is not None and verdict[0] == records[0].start:
        return verdict[1]
    return _describe_failed_end(records)


def warn_and_clear_last_end(folder: Path, start: str) -> None:
    """Warn once how the start before this one ended, if it did not end in order.

    Raises:
        OSError: as ``read_and_clear_last_end``.
    """
    last = read_and_clear_last_end(folder, start)
    if last:
        logger.warning("the last start ended so: %s", last)


def _describe_failed_end(records: list[Record]) -> str:
    failed = [record for record in records if record.ending and record.ending not in _ORDERLY]
    if failed:
        return f"{failed[0].name} {failed[0].ending} (in {failed[0].phase_and_step_text})"
    silent = [record for record in records if not record.ending]
    if not silent or len(silent) < len(records):  # if one ended in order, the launcher ended the others
        return ""
    hosts = ", ".join(dict.fromkeys(record.host for record in silent))
    rank, place = silent[0].rank, silent[0].phase_and_step_text
    return f"all {len(silent)} ranks on {hosts} ended without a word, rank {rank} last seen in {place}"
