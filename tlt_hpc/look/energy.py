"""Measures the energy of steps on one rank: its GPU through NVML, its node's processors through RAPL.

If one node or GPU lacks a kind of counter, no rank reports that kind: part of a run would be mistaken for the whole.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

PREFIX = "energy/"
GPU, CPU = "gpu", "cpu"
"""Kinds of counters, as metrics name them."""
POWERCAP = Path("/sys/class/powercap")
KEEP_UP_SECONDS = 20.0
"""Longest time between two readings of RAPL: AMD's counter wraps at 65.5 kJ, which 500 W reach in 131 s."""

logger = logging.getLogger(__name__)


class NoCounterError(Exception):
    """A counter cannot be read; the text gives the reason in a few words."""


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
        is_split = False
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            with suppress(pynvml.NVMLError_NotSupported):  # a GPU without MIG
                is_split = pynvml.nvmlDeviceGetMigMode(self._gpu)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        except pynvml.NVMLError as error:
            raise NoCounterError(f"NVML on {uuid}: {error}") from None
        if is_split:
            raise NoCounterError("the GPU is split (MIG), and its counter is of all parts")
        self.joules()

    def joules(self) -> float:
        """Joules since the driver was loaded.

        Raises:
            NoCounterError: the counter can no longer be read.
        """
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / 1e3
        except self._nvml.NVMLError as error:
            raise NoCounterError(f"NVML: {error}") from None

    def close(self) -> None:
        """Release the library, which counts its users: others in this process may still use it."""
        self._nvml.nvmlShutdown()


class Rapl:
    """The counters of all processors of this node, and of their memory if it has any. One rank of a node reads them.

    Linux shows both Intel's and AMD's as ``intel-rapl`` below /sys/class/powercap. They count the whole node, whoever
    uses it. A thread reads often enough that no counter wraps twice unseen.

    Raises:
        NoCounterError: there is none, or one of them cannot be read: part of a node would be mistaken for the whole.
    """

    def __init__(self) -> None:
        self._lock, self._is_closed, self._total = threading.Lock(), threading.Event(), 0
        with _reading():
            # whole processors and memory: cores are part of the former, and ``psys`` includes both
            names = {zone: (zone / "name").read_text() for zone in sorted(POWERCAP.glob("intel-rapl:*"))}
            zones = [zone for zone, name in names.items() if name.startswith(("package", "dram"))]
            self._ranges = {zone / "energy_uj": _number(zone / "max_energy_range_uj") for zone in zones}
            self._last = {path: _number(path) for path in self._ranges}
        if not zones:
            raise NoCounterError(f"{POWERCAP} has no intel-rapl")
        threading.Thread(target=self._keep_up, name="energy", daemon=True).start()

    def joules(self) -> float:
        """Joules since the counters were opened.

        Raises:
            NoCounterError: a counter can no longer be read.
        """
        with self._lock, _reading():
            for path, last in self._last.items():
                now = self._last[path] = _number(path)
                self._total += now - last + (self._ranges[path] if now < last else 0)
            return self._total / 1e6

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def _keep_up(self) -> None:
        while not self._is_closed.wait(KEEP_UP_SECONDS):
            with suppress(NoCounterError):  # the next step warns of it
                self.joules()


def _number(path: Path) -> int:
    return int(path.read_text())


@contextmanager
def _reading() -> Iterator[None]:
    """Name what cannot be read.

    Raises:
        NoCounterError: a file is missing, protected or not a number.
    """
    try:
        yield
    except PermissionError as error:
        raise NoCounterError(f"{error.filename} may be read by root alone") from None
    except (OSError, ValueError) as error:
        raise NoCounterError(f"{POWERCAP}: {error}") from None


@dataclass(frozen=True)
class EnergyReach:
    """The counters that a rank can read; all ranks exchange these."""

    hostname: str
    gpu: str = ""
    """UUID of the rank's GPU; empty without one."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Kind of counter -> why it cannot be read."""


class EnergyMeter:
    """A rank's counters: its GPU's, and on the first rank of a node those of the processors."""

    def __init__(self, hostname: str, gpu: str, is_first_of_node: bool) -> None:
        makers: dict[str, Callable[[], Nvml | Rapl]] = {CPU: Rapl} if is_first_of_node else {}
        if gpu:
            makers[GPU] = partial(Nvml, gpu)
        self._counters = dict[str, Nvml | Rapl]()
        self._kinds, self._lost = list[str](), set[str]()
        self._readings = list[dict[str, float]]()
        lacking = dict[str, str]()
        for kind, make in makers.items():
            try:
                self._counters[kind] = make()
            except NoCounterError as error:
                lacking[kind] = str(error)
        self.reach = EnergyReach(hostname, gpu, lacking)

    def agree(self, ranks: Sequence[EnergyReach], rank: int) -> dict[str, str]:
        """Use only the counters that all ranks can read.

        GPUs are included only if every rank uses one; the first of several ranks that share a GPU reads it.

        Args:
            ranks: the counters that each rank can read, by rank.
            rank: this one.

        Returns:
            kind of counter -> empty if it is used, else a reason; equal on all ranks.
        """
        reasons = {kind: "" for kind in (GPU, CPU) if kind == CPU or all(one.gpu for one in ranks)}
        for one in reversed(ranks):
            reasons |= {kind: f"{one.hostname}: {why}" for kind, why in one.lacking.items() if kind in reasons}
        self._kinds = [kind for kind, reason in reasons.items() if not reason]
        own = ranks[rank]
        is_shared = any((one.hostname, one.gpu) == (own.hostname, own.gpu) for one in ranks[:rank])
        for kind in [*self._counters]:
            if kind not in self._kinds or (kind == GPU and is_shared):
                self._counters.pop(kind).close()
        return reasons

    def begin_step(self) -> None:
        """A step and its rollout begin."""
        self._readings = [self._read()]

    def end_rollout(self) -> None:
        """The rollout is over on all ranks."""
        self._readings.append(self._read())

    def end_step(self) -> dict[str, float]:
        """This rank's joules of the step, to be summed over the ranks; all ranks have the same keys.

        NaN after a counter was lost, so that the sum is NaN, too.
        """
        begin, rollout, end = (*self._readings, self._read())
        taken = dict[str, float]()
        for kind in self._kinds:
            for name, reading in ((f"{kind}_joules", end), (f"rollout_{kind}_joules", rollout)):
                joules = reading.get(kind, 0.0) - begin.get(kind, 0.0)
                is_lost = kind in self._lost or (kind in self._counters and joules <= 0)  # its driver was restarted
                taken[f"{PREFIX}{name}"] = math.nan if is_lost else joules  # 0: another rank reads this counter
        return taken

    def close(self) -> None:
        """Close the counters."""
        while self._counters:
            self._counters.popitem()[1].close()

    def _read(self) -> dict[str, float]:
        """Joules by kind. A counter that cannot be read is lost for good, because it may have wrapped unseen."""
        values = dict[str, float]()
        for kind, counter in [*self._counters.items()]:
            try:
                values[kind] = counter.joules()
            except NoCounterError as error:
                logger.warning("energy is not recorded from here on: %s", error)
                self._lost.add(kind)
                self._counters.pop(kind).close()
        return values
