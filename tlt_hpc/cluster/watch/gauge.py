"""Counts for how many looks the main thread's counters have stood still; knows neither files nor other ranks."""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path

from tlt_hpc.cluster.watch.beat import LIMIT_SECONDS, Beat, Member
from tlt_hpc.cluster.watch.record import Record


class Gauge:
    """Looks at a beat, ``look_seconds`` apart as far as this process runs; ``factor`` stretches the limits, 0: none."""

    def __init__(self, beat: Beat, factor: float, look_seconds: float) -> None:
        self._beat, self._factor, self._look_seconds = beat, factor, look_seconds
        self._progress = self._rounds = -1
        self._looks = self._still = self._unheard = 0

    def look(self) -> None:
        """One more look."""
        beat = self._beat
        progress, rounds = beat.progress + beat.written * beat.is_asking, beat.rounds
        self._looks += 1
        self._still = self._still + 1 if progress == self._progress else 0
        # a rank that trains in the tail moves for as long as another has stopped
        self._unheard = self._unheard + 1 if beat.in_pulse and rounds == self._rounds else 0
        self._progress, self._rounds = progress, rounds

    def record(self, member: Member, ending: str = "") -> Record:
        """What to tell of this rank now."""
        beat, limit = self._beat, self._limit()
        waiting, still = beat.waiting, self._still
        if 0 < limit <= self._unheard and self._still < self._unheard // 2:  # moves, and no other is heard of
            waiting, still = ("pulse", beat.rounds + 1), self._unheard
        left = beat.sequences_left
        record = Record(
            start=member.start,
            rank=member.rank,
            host=member.host,
            pid=os.getpid(),
            heartbeat=self._looks,
            phase=beat.phase.value,
            step=beat.step,
            part=beat.part or ("" if left is None else f"{left} sequences left"),
            part_number=beat.part_number,
            waiting=waiting[0] if waiting else "",
            number=waiting[1] if waiting else 0,
            progress=self._progress,
            still=still,
            limit=limit,
            seconds=round(still * self._look_seconds, 3),
            sequences_left=-1 if left is None else left,
            ending=ending or beat.ending,
        )
        return record.at(main_thread_is_at()) if record.stalled else record

    def _limit(self) -> int:
        """Looks; two at least, for the first of a phase may come right before its first tick."""
        if not self._factor:
            return 0
        return max(2, math.ceil(LIMIT_SECONDS[self._beat.phase] * self._factor / self._look_seconds))


def main_thread_is_at() -> str:
    """Function, file and line that the main thread is in."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"
