"""A rank of ``tlt`` whose changes to files are recorded in their order, with every byte that it writes.

The process beside the rank (``system_call_rank.py``) sees each call before the kernel makes it, and reads what is to be
written from the rank's memory. Started by ``power_loss.py`` as ``python -m mpi4py tools/power_loss_rank.py train ...``.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from system_call_rank import PWRITE, WRITE, Call, Fault, Interceptor, described, split

TRUNCATE = 77
_CHANGES = ("openat", "write", "fsync", "rename", "unlink", "mkdir", "truncate")
NOT_RECORDED = re.compile(r"/status/rank-\d+(\.stacks)?$|/shared-\w+$")
"""What says that a rank is alive, and the probe of a shared folder: of no use to a later start."""


@dataclass(frozen=True)
class Change:
    """A call that may change files; one that fails changes nothing when it is repeated either."""

    time: float
    thread: int
    kind: str
    """Of ``CALLS``."""
    path: str
    target: str = ""
    """Of a rename."""
    flags: int = 0
    """Of an openat."""
    offset: int | None = None
    """Of a write or truncate; None: the end of the file."""
    data: bytes = b""


class Recording(Fault):
    """No fault: all calls that change files are seen."""

    @property
    def kinds(self) -> list[str]:
        return [*_CHANGES]


class Recorder(Interceptor):
    """Adds each change to the report, and lets the kernel make it."""

    def _answer(self, call: Call) -> tuple[int, int, int]:
        kind, how = self._kinds[call.number]
        path = call.path(how)
        is_ours = path.startswith(self._roots) and Path(f"/proc/{self._rank}/task/{call.thread}").exists()
        if is_ours and not NOT_RECORDED.search(path):
            with self._report.with_suffix(f".{self._rank}").open("ab") as file:
                facts = {"kind": kind, "path": path, **self._more(call, kind)}
                pickle.dump({"time": time.monotonic(), "thread": call.thread, **facts}, file)
        return super()._answer(call)

    def _more(self, call: Call, kind: str) -> dict[str, Any]:
        if kind == "openat":
            return {"flags": call.arguments[2]}
        if kind == "rename":
            at = call.number != 82  # the two others name the folders as well
            second = Call(call.key, call.thread, call.number, call.arguments[2:] if at else call.arguments[1:])
            return {"target": second.path("at" if at else "path")}
        if kind == "truncate":
            return {"offset": call.arguments[1]}
        return self._written(call) if kind == "write" else {}

    def _written(self, call: Call) -> dict[str, Any]:
        facts = dict(
            line.split(":") for line in Path(f"/proc/{call.thread}/fdinfo/{call.file}").read_text().splitlines()[:2]
        )
        offset = None if int(facts["flags"], 8) & os.O_APPEND else int(facts["pos"])
        _, place, size, given = call.arguments[:4]
        pieces = [(place, size)]
        if call.number == PWRITE:
            offset = given
        elif call.number != WRITE:
            pieces = list(struct.iter_unpack("QQ", call.memory(place, 16 * size)))
        data = b"".join(call.memory(*piece) for piece in pieces)
        assert len(data) == sum(length for _, length in pieces), "all that is written is in the rank's memory"
        return {"offset": offset, "data": data}


def read_changes(report: Path) -> list[Change]:
    """The changes of all ranks that have recorded for this report, in their order."""
    found = list[Change]()
    for path in report.parent.glob(f"{report.stem}.*[0-9]"):
        with path.open("rb") as file:
            size = path.stat().st_size
            while file.tell() < size:
                found.append(Change(**pickle.load(file)))
    return sorted(found, key=lambda change: change.time)


if __name__ == "__main__":
    from tlt_hpc.cli.main import main

    _, folders, place = described()
    split(Recording("step"), folders, place, Recorder)
    sys.exit(main())
