"""How the last start of a run ended, from what its ranks left in their status files."""

from __future__ import annotations

import logging
from pathlib import Path

from tlt_hpc.cluster.watch.record import (
    FINISHED,
    DamagedRecordError,
    Record,
    read_record_at,
    read_verdict,
    verdict_file,
)

logger = logging.getLogger(__name__)

_ORDERLY = (FINISHED, "stopped early")


def clear_last(folder: Path, start: str) -> str:
    """How the start before this one ended, empty if it ended in order; removes its verdict.

    For one rank of ``start``, before any of its ranks writes a record.

    Raises:
        OSError: the folder cannot be read.
    """
    records = [record for path in sorted(folder.glob("rank-*")) if (record := _read(path)) is not None]
    of_rank_0 = [record.start for record in records if record.rank == 0]
    records = [record for record in records if record.start in of_rank_0]  # a start on more ranks has left more files
    verdict = read_verdict(folder)
    verdict_file(folder).unlink(missing_ok=True)
    if not records or records[0].start == start:
        return ""
    if verdict is not None and verdict[0] == records[0].start:
        return verdict[1]
    return _end_of(records)


def warn_of_last(folder: Path, start: str) -> None:
    """Warn once how the start before this one ended, if it did not end in order.

    Raises:
        OSError: as ``clear_last``.
    """
    last = clear_last(folder, start)
    if last:
        logger.warning("the last start ended so: %s", last)


def _end_of(records: list[Record]) -> str:
    failed = [record for record in records if record.ending and record.ending not in _ORDERLY]
    if failed:
        return f"{failed[0].name} {failed[0].ending} (in {failed[0].place})"
    silent = [record for record in records if not record.ending]
    if not silent or len(silent) < len(records):  # if one ended in order, the launcher ended the others
        return ""
    hosts = ", ".join(dict.fromkeys(record.host for record in silent))
    first = silent[0]
    return f"all {len(silent)} ranks on {hosts} ended without a word, rank {first.rank} last seen in {first.place}"


def _read(path: Path) -> Record | None:
    if path.suffix:  # stacks
        return None
    try:
        return read_record_at(path)
    except DamagedRecordError:  # nobody needs the file any more
        return None
