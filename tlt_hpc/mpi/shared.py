"""Owns what the ranks of a node share beside MPI: a table in memory, and bells that wake who sleeps beside it."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Records = NDArray[np.int64]

WORD_BYTES = 8
_FOLDER = Path("/dev/shm")
_SPREAD, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)


class SharedRows:
    """Rows of a table in memory that processes share, each written by one of them and read by all.

    Nothing orders one process's writes for another on some processors, so a row carries the number of its round and a
    sum over all of it, and is there once both are right.
    """

    def __init__(self, memory: mmap.mmap, start: int, num_rows: int, num_fields: int) -> None:
        self._width = num_fields + 2
        words = num_rows * self._width
        self._rows = np.frombuffer(memory, np.int64, words, start).reshape(num_rows, self._width)
        # odd, so that each field's every bit counts, and large, so that no two fields' changes cancel
        self._weights = (np.arange(1, num_fields + 2, dtype=np.uint64) * _SPREAD | _ODD).view(np.int64)
        self._words = self._rows.reshape(-1).data.cast("B").cast("q")
        self._asked_for = self._num_there = 0

    @staticmethod
    def num_bytes(num_rows: int, num_fields: int) -> int:
        """What such a table takes."""
        return num_rows * (num_fields + 2) * WORD_BYTES

    def write(self, first: int, turn: int, records: Records) -> None:
        """Put the records [N, F] of a round into the rows from ``first`` on."""
        rows = np.empty((len(records), self._width), np.int64)
        rows[:, 0], rows[:, 1:-1] = turn, records
        np.matmul(rows[:, :-1], self._weights, out=rows[:, -1])
        self._rows[first : first + len(records)] = rows

    def are_numbered(self, turn: int) -> bool:
        """Whether all rows bear the number of a round: cheap, and no promise of what else is in them."""
        words, width, num_rows = self._words, self._width, len(self._rows)
        if turn != self._asked_for:
            self._asked_for, self._num_there = turn, 0
        while self._num_there < num_rows:  # most looks end at the row that the last one ended at
            if words[self._num_there * width] != turn:
                return False
            self._num_there += 1
        return True

    def read(self, turn: int) -> Records | None:
        """A copy of the records [N, F] of a round; None until all are there."""
        if not self.are_numbered(turn):
            return None
        rows = self._rows.copy()
        if np.count_nonzero(rows[:, :-1] @ self._weights != rows[:, -1]):
            return None
        return rows[:, 1:-1]


class Bells:
    """One bell for each of the node's ranks, which any of them may ring and its owner sleeps beside.

    Nobody rings for a rank that is awake. Between a sleeper's last look and its sleep a bell may go unheard where a
    processor delays its writes, so that a sleep has an end of its own.

    Args:
        memory: begins with a word for each rank, zero to begin with.
        name: of all the bells, and of nobody else's.
    """

    def __init__(self, memory: mmap.mmap, index: int, num_ranks: int, name: str) -> None:
        self._asleep = memoryview(memory)[: num_ranks * WORD_BYTES].cast("q")
        self._index = index
        self._fence = threading.Lock()
        self._addresses = [f"\0{name}-{number}" for number in range(num_ranks)]
        self._own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._own.bind(self._addresses[index])
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """What they take of the memory."""
        return num_ranks * WORD_BYTES

    def announce(self) -> None:
        """This rank is about to sleep: it looks once more, then calls ``sleep``."""
        self._asleep[self._index] = 1
        self.order_memory()

    def sleep(self, seconds: float) -> None:
        """Until somebody rings, or for so long."""
        if self._poll.poll(1e3 * seconds):
            with contextlib.suppress(BlockingIOError):
                self._own.recv(1)  # one of perhaps several: the next sleep is short then
        self.awake()

    def awake(self) -> None:
        """Nobody needs to ring any more."""
        self._asleep[self._index] = 0

    def ring(self, ranks: Sequence[int]) -> None:
        """Wake those of the node's ranks that are asleep."""
        self.order_memory()
        for rank in ranks:
            if self._asleep[rank]:
                try:
                    self._own.sendto(b"\0", self._addresses[rank])
                except (BlockingIOError, ConnectionRefusedError):  # it has not heard the last ones yet, or has left
                    continue

    def order_memory(self) -> None:
        """Have what was written before seen by the others before this process reads on.

        A lock is a full fence on x86; elsewhere a wake-up may be lost, which costs a sleep's length
        (``SLEEP_SECONDS``).
        """
        with self._fence:
            pass

    def ring_own(self) -> None:
        """Wake another thread of this process, and whoever sleeps here next."""
        with contextlib.suppress(BlockingIOError):  # it has rung already
            self._own.sendto(b"\0", self._addresses[self._index])

    def is_heard(self, rank: int) -> bool:
        """Whether a rank's bell is in this process's reach."""
        try:
            self._own.sendto(b"\0", self._addresses[rank])
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def make_shared(num_bytes: int) -> tuple[str, str]:
    """Path of a new file of zeros in memory, or why there is none."""
    folder = _FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(prefix="tlt-pulse-", dir=folder, delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk shows as SIGBUS at the first write
            except OSError:
                Path(file.name).unlink()
                raise
    except OSError as error:
        return "", f"{folder}: {error.strerror}"
    return file.name, ""


def open_shared(path: str, num_bytes: int) -> tuple[mmap.mmap | None, str]:
    """The file's memory, or why it cannot be had: ranks in containers of their own share no folder."""
    try:
        handle = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(handle, num_bytes), ""
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        return None, f"{path}: {error}"


def forget_names(maps: Path = Path("/proc/self/maps")) -> None:
    """Remove the names of the MPI library's own memory, once all ranks of the node have it: for one of them.

    MPICH removes them as MPI is finalised, so that each rank that was killed would leave megabytes behind.
    """
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    for path in {line.split(maxsplit=5)[5] for line in lines if f" {_FOLDER}/mpich_shm_" in line}:
        Path(path).unlink(missing_ok=True)


def open_bells(memory: mmap.mmap, index: int, num_ranks: int, name: str) -> tuple[Bells | None, str]:
    """``Bells``, or why there are none."""
    try:
        return Bells(memory, index, num_ranks, name), ""
    except OSError as error:
        return None, f"{name}: {error}"
