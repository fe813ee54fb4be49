"""The energy of a node's processors and their memory: RAPL, as Linux shows it below /sys/class/powercap.

Intel's and AMD's processors alike are ``intel-rapl`` there. The counters are of the node, whoever uses it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tlt_hpc.look.energy.counter import NoCounterError

POWERCAP = Path("/sys/class/powercap")
KEEP_UP_SECONDS = 20.0
"""Between two readings, whatever the run is at: AMD's counter wraps at 65.5 kJ, which 500 W reach in 131 s."""
_JOULE = 1e6
_LONGEST = 32
"""Bytes of a number in such a file."""


@dataclass
class _Domain:
    """One counter: a processor's, or its memory's."""

    file: BinaryIO
    range: int
    """Microjoules at which it begins anew."""
    last: int
    total: int = 0
    """Microjoules since it was opened."""

    def update(self) -> None:
        now = _number(self.file)
        self.total += now - self.last + (self.range if now < self.last else 0)
        self.last = now


class Rapl:
    """All processors of this node, and their memory where it has counters; for one rank of a node.

    A thread of its own reads often enough that no counter wraps twice unseen.

    Raises:
        NoCounterError: there is none, or one of them may not be read: a part of a node is not told as the whole.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost = ""
        self._is_closed = threading.Event()
        self._domains: list[_Domain] = []
        try:
            for folder in _domain_folders():
                self._domains.append(_open(folder))
        except (OSError, ValueError) as error:
            self.close()
            raise NoCounterError(_why(error)) from None
        if not self._domains:
            raise NoCounterError(f"{POWERCAP} has no intel-rapl")
        threading.Thread(target=self._keep_up, name="energy", daemon=True).start()

    def joules(self) -> float:
        """Since it was opened.

        Raises:
            NoCounterError: a counter can be read no longer.
        """
        with self._lock:
            self._read()
            if self._lost:
                raise NoCounterError(self._lost)
            return sum(domain.total for domain in self._domains) / _JOULE

    def close(self) -> None:
        """Close the files, and end the thread."""
        self._is_closed.set()
        with self._lock:
            for domain in self._domains:
                domain.file.close()
            self._domains = []

    def _keep_up(self) -> None:
        while not self._is_closed.wait(KEEP_UP_SECONDS):
            with self._lock:
                self._read()

    def _read(self) -> None:
        """Take in all counters; what is lost stays lost, for a wrap may have gone by."""
        try:
            for domain in self._domains:
                domain.update()
        except (OSError, ValueError) as error:
            self._lost = _why(error)


def _domain_folders() -> list[Path]:
    """Those of whole processors and of memory; cores are a part of the former, ``psys`` holds them all."""
    found = sorted(POWERCAP.glob("intel-rapl:*"))
    return [folder for folder in found if (folder / "name").read_text().startswith(("package", "dram"))]


def _open(folder: Path) -> _Domain:
    file = (folder / "energy_uj").open("rb", buffering=0)
    return _Domain(file, int((folder / "max_energy_range_uj").read_text()), _number(file))


def _number(file: BinaryIO) -> int:
    return int(os.pread(file.fileno(), _LONGEST, 0))


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return f"{error.filename} may be read by root alone"
    return f"{POWERCAP}: {error.strerror if isinstance(error, OSError) and error.strerror else error}"
