"""``metrics.jsonl``: one line of JSON for each step that is committed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import LINES_BYTES, DamagedText, os_error_text, parse_json_object, read_bytes
from tlt_hpc.common.formatting import FIRST_STEP
from tlt_hpc.storage.folder import sync, writing_atomically

logger = logging.getLogger(__name__)

STEP = "training/global_step"
TEXTS = frozenset({"drafter/why"})
"""Names whose values are text; all others are numbers."""
_MAX_STEPS, _MAX_WHOLE = 10**9, 2**63
_MAX_NUMBER = 1e30
"""Largest figure: sums and axes of larger ones leave the range of a float."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class StepLines:
    """The parsed lines of a file, in the file's order."""

    numbered: tuple[tuple[int, int, Line], ...]
    """Number of the line from 1, step from 0, figures."""
    faults: tuple[tuple[int, str], ...]
    """Number of a line that a run does not write so, and why."""
    torn: tuple[int, bytes] | None
    """Number of the last line, and it, where it was cut off before its end; it commits nothing."""

    @property
    def by_step(self) -> dict[int, Line]:
        """Ascending; of a step that stands there twice, the last."""
        return dict(sorted({step: line for _, step, line in self.numbered}.items()))


def parse_line(text: bytes) -> tuple[int, Line]:
    """A line and its step, counted from 0 as everywhere in the code.

    Raises:
        DamagedText: it is no line that a run writes.
    """
    line = parse_json_object(text)
    for name, value in line.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number and not (isinstance(value, str) and name in TEXTS):
            raise DamagedText(f"{ascii(name)[1:-1]} is no number")
        if isinstance(value, int) and abs(value) > _MAX_WHOLE:
            raise DamagedText(f"{ascii(name)[1:-1]} has too many digits")
        if isinstance(value, float) and _MAX_NUMBER < abs(value) < math.inf:
            raise DamagedText(f"{ascii(name)[1:-1]} is {value:g}, which no run measures")
    number = line.get(STEP, -1)
    if not FIRST_STEP <= number < _MAX_STEPS or number != int(number):
        raise DamagedText(f"{STEP} is {'no step' if STEP in line else 'missing'}")
    return step_of(line), line


def step_of(line: Line) -> int:
    """The step of a line that a run writes."""
    return int(line[STEP]) - FIRST_STEP


def check_step_numbering(path: Path, data: bytes) -> None:
    """Refuse a file, of which ``data`` is the beginning, that counts steps from 0, as an earlier version did.

    Raises:
        UserError: each line would pass for that of the step before.
    """
    with suppress(DamagedText):
        if parse_json_object(data[: data.find(b"\n") + 1]).get(STEP) == 0:
            raise UserError(
                f"{path} is of an earlier version, which counted steps from 0: use that version for this run "
                "(environment.jsonl has its commit), or give another folder"
            )


def parse_lines(data: bytes) -> StepLines:
    """All lines of a file, or of its end, counted from 1."""
    numbered, faults, torn = list[tuple[int, int, Line]](), list[tuple[int, str]](), None
    texts = data.split(b"\n")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            numbered.append((number, *parse_line(text)))
        except DamagedText as error:
            if number == len(texts):
                torn = (number, text)
            else:
                faults.append((number, str(error)))
    return StepLines(tuple(numbered), tuple(faults), torn)


def read_lines(path: Path, first: int = 0) -> dict[int, Line]:
    """The lines by step, ascending; none where there is no file. A last line that was cut off does not count.

    Args:
        first: lines of earlier steps are not looked at, which takes long for thousands.

    Raises:
        UserError: the file cannot be read, or a line is not what a run writes.
    """
    data = _read_file_or_empty(path)
    check_step_numbering(path, data)
    found = parse_lines(_bytes_from_step(data, first))
    if found.faults:
        number, why = found.faults[0]
        raise UserError(
            f"{path}:{number} is no line that a run writes ({why}); restore it, or remove it and those after it"
        )
    if found.torn:
        logger.warning("%s:%d is cut off and not counted", path, found.torn[0])
    return found.by_step


def add_line(path: Path, line: Line, confirm: Callable[[], None] = lambda: None) -> None:
    """Commit a step, the one after the last; its line takes the place of one that it has already.

    Of the lines before, only the last is looked at: thousands of them would take longer than the step's other files.

    Args:
        confirm: raises if the step is not to be committed after all; called last, when the line is on the disk.

    Raises:
        UserError: as ``read_lines``, or later steps are committed; the file is unchanged.
        WriteError: no room or no permission; the file is unchanged.
    """
    step, data = step_of(line), _read_file_or_empty(path)
    if not _bytes_from_step(data, step):  # the last line is of a step before
        _write(path, data, [line], confirm)
        return
    lines = read_lines(path)
    if any(number > step for number in lines):
        raise UserError(
            f"{path} has lines of steps after {step + 1}, which this start has not committed: another one has; start "
            "again to resume from them"
        )
    _write(path, b"", (lines | {step: line}).values(), confirm)


def replace_line(path: Path, line: Line, confirm: Callable[[], None] = lambda: None) -> None:
    """Put a line in the place of its step's; those of other steps stay.

    Raises:
        UserError, WriteError: as ``add_line``.
    """
    _write(path, b"", (read_lines(path) | {step_of(line): line}).values(), confirm)


def drop_lines(path: Path, step: int) -> list[int]:
    """Take back the lines from ``step`` on; they are kept in a file beside: of 6, ``metrics.dropped-000007.jsonl``.

    If there is one already, the next has a number: ``metrics.dropped-000007-2.jsonl``.

    Returns their steps.

    Raises:
        WriteError: as ``add_line``.
    """
    lines = read_lines(path)
    dropped = {number: line for number, line in lines.items() if number >= step}
    if dropped:
        ends = chain([""], (f"-{number}" for number in count(2)))
        places = (path.with_name(f"{path.stem}.dropped-{step + FIRST_STEP:06d}{end}{path.suffix}") for end in ends)
        _write(next(place for place in places if not place.exists()), b"", dropped.values())
        _write(path, b"", [line for number, line in lines.items() if number < step])
    return list(dropped)


def best_evaluated_step(path: Path, steps: Iterable[int]) -> int | None:
    """The number of steps, one of ``steps``, after which the policy's evaluation was best; the later one of equals.

    The figure is the mean over the data sets of mean@N, or of the greedy accuracy if nothing was sampled. Evaluations
    on other data sets than the newest one's do not count. None: none was evaluated.

    Raises:
        UserError: as ``read_lines``.
    """
    lines, found = read_lines(path), dict[int, dict[str, float]]()
    for step in steps:
        figures = {name: value for name, value in lines.get(step - 1, {}).items() if name.startswith("val-core/")}
        sampled = {name: value for name, value in figures.items() if "/acc/mean@" in name}
        if judged := sampled or {name: value for name, value in figures.items() if name.endswith("/acc/greedy")}:
            found[step] = judged
    alike = [step for step in sorted(found) if found[step].keys() == found[max(found)].keys()]
    return max(alike, key=lambda step: (sum(found[step].values()), step), default=None)


def _read_file_or_empty(path: Path) -> bytes:
    """The whole file; empty if there is none.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return read_bytes(path, LINES_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(os_error_text(error)) from None


def _bytes_from_step(data: bytes, first: int) -> bytes:
    """The end of a file, from the line of step ``first`` on; all of it if a line there is not what a run writes."""
    end = len(data) if first and data.endswith(b"\n") else 0
    while end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        try:
            step, _ = parse_line(data[begin:end])
        except DamagedText:
            break
        if step < first:
            return data[end:]
        end = begin
    return data


def _write(path: Path, before: bytes, lines: Iterable[Line], confirm: Callable[[], None] = lambda: None) -> None:
    """Replace the file by the bytes ``before``, then these lines."""
    with writing_atomically(path) as part:
        part.write_bytes(before + b"".join(f"{json.dumps(line)}\n".encode() for line in lines))
        sync(part)
        confirm()
