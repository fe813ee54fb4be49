"""``metrics.jsonl``: one line of JSON for each step that is committed. Knows no figure but the step's number."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tlt_hpc.errors import UserError
from tlt_hpc.storage.folder import writing_beside

logger = logging.getLogger(__name__)

STEP = "training/global_step"

Line = Mapping[str, Any]


def read_lines(path: Path) -> dict[int, Line]:
    """The lines by step, ascending; none where there is no file. A last line that was cut off does not count.

    Raises:
        UserError: a line is not what a run writes.
    """
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows: dict[int, Line] = {}
    for number, line in enumerate(lines, 1):
        try:
            if line:
                row = json.loads(line)
                rows[int(row[STEP])] = row
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):  # cut off before its end, so it commits nothing
                logger.warning("%s:%d is cut off and not counted", path, number)
                continue
            raise UserError(
                f"{path}:{number} is no line that a run writes ({error}); restore it, or remove it and those after it"
            ) from None
    return dict(sorted(rows.items()))


def add_line(path: Path, line: Line) -> None:
    """Commit a step; lines of it and of later ones give way.

    Raises:
        WriteError: no room or no permission; the file is as before.
    """
    _write(path, [*_before(path, int(line[STEP])), line])


def drop_lines(path: Path, step: int) -> list[int]:
    """Take back the lines from ``step`` on; they are kept in a file beside, ``metrics.dropped-000007.jsonl``.

    Returns their steps.

    Raises:
        WriteError: as ``add_line``.
    """
    kept = _before(path, step)
    dropped = [line for number, line in read_lines(path).items() if number >= step]
    if dropped:
        _write(path.with_name(f"{path.stem}.dropped-{step:06d}{path.suffix}"), dropped)
        _write(path, kept)
    return [int(line[STEP]) for line in dropped]


def _before(path: Path, step: int) -> list[Line]:
    return [line for number, line in read_lines(path).items() if number < step]


def _write(path: Path, lines: Iterable[Line]) -> None:
    with writing_beside(path) as part:
        part.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
