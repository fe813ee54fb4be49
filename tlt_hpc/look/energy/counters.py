"""Energy counters of one node: the GPU's through NVML, and the processors' through RAPL."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

GPU, CPU = "gpu", "cpu"
"""Kinds of counters, as metrics name them."""
POWERCAP = Path("/sys/class/powercap")
KEEP_UP_SECONDS = 20.0
"""Longest time between two readings of RAPL: AMD's counter wraps at 65.5 kJ, which 500 W reach in 131 s."""
_MILLIJOULES, _MICROJOULES = 1e3, 1e6
_MAX_DIGITS = 32
"""Bytes read of a file that holds one number."""


class NoCounterError(Exception):
    """A counter cannot be read; the text gives the reason in a few words."""


class Counter(Protocol):
    """A counter of energy. Only differences between two readings are meaningful."""

    def joules(self) -> float:
        """Joules since an arbitrary moment.

        Raises:
            NoCounterError: the counter can no longer be read.
        """

    def close(self) -> None:
        """Release files, threads and libraries."""


class Nvml:
    """The counter of a whole NVIDIA GPU, by its UUID (``GPU-...``); the package ``nvidia-ml-py`` is optional.

    A MIG instance has no counter of its own. Source: ``nvmlDeviceGetTotalEnergyConsumption``, Volta and later.

    Raises:
        NoCounterError: the package or the counter is missing.
    """

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise NoCounterError("nvidia-ml-py is not installed") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoCounterError(f"NVML: {error}") from None
        try:
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            if self._is_split():
                raise NoCounterError("the GPU is split (MIG), and its counter is of all parts")
            self.joules()
        except pynvml.NVMLError as error:
            self.close()
            raise NoCounterError(f"NVML on {uuid}: {error}") from None
        except NoCounterError:
            self.close()
            raise

    def joules(self) -> float:
        """Joules since the driver was loaded.

        Raises:
            NoCounterError: the counter can no longer be read.
        """
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / _MILLIJOULES
        except self._nvml.NVMLError as error:
            raise NoCounterError(f"NVML: {error}") from None

    def close(self) -> None:
        """Release the library, which counts its users: others in this process may still use it."""
        self._nvml.nvmlShutdown()

    def _is_split(self) -> bool:
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._gpu)
        except self._nvml.NVMLError_NotSupported:  # a GPU without MIG
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)


@dataclass
class _Domain:
    """A RAPL counter, of one processor or its memory; all numbers in microjoules."""

    file: BinaryIO
    range: int
    """The counter restarts from zero here."""
    last: int
    total: int = 0
    """Since the counter was opened."""

    def update(self) -> None:
        now = _number(self.file)
        self.total += now - self.last + (self.range if now < self.last else 0)
        self.last = now


class Rapl:
    """The counters of all processors of this node, and of their memory where it has any. One rank of a node reads them.

    Linux shows both Intel's and AMD's as ``intel-rapl`` below /sys/class/powercap. They count the whole node, whoever
    uses it. A thread reads often enough that no counter wraps twice unseen.

    Raises:
        NoCounterError: there is none, or one of them cannot be read: part of a node would pass for the whole.
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
        """Joules since the counters were opened.

        Raises:
            NoCounterError: a counter can no longer be read.
        """
        with self._lock:
            self._read()
            if self._lost:
                raise NoCounterError(self._lost)
            return sum(domain.total for domain in self._domains) / _MICROJOULES

    def close(self) -> None:
        """Close the files and end the thread."""
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
        """Update all counters. A lost counter stays lost, because it may have wrapped unseen."""
        try:
            for domain in self._domains:
                domain.update()
        except (OSError, ValueError) as error:
            self._lost = _why(error)


def _domain_folders() -> list[Path]:
    """Folders of whole processors and of memory; cores are part of the former, and ``psys`` includes both."""
    found = sorted(POWERCAP.glob("intel-rapl:*"))
    return [folder for folder in found if (folder / "name").read_text().startswith(("package", "dram"))]


def _open(folder: Path) -> _Domain:
    file = (folder / "energy_uj").open("rb", buffering=0)
    return _Domain(file, int((folder / "max_energy_range_uj").read_text()), _number(file))


def _number(file: BinaryIO) -> int:
    return int(os.pread(file.fileno(), _MAX_DIGITS, 0))


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return f"{error.filename} may be read by root alone"
    return f"{POWERCAP}: {error.strerror if isinstance(error, OSError) and error.strerror else error}"
