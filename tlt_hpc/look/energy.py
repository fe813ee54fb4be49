"""Measures the energy of steps on one rank: its GPU's, through NVML.

If one GPU lacks a counter, no rank reports any: part of a run would be mistaken for the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PREFIX = "energy/"

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


@dataclass(frozen=True)
class EnergyReach:
    """The counter that a rank can read; all ranks exchange these."""

    hostname: str
    gpu: str = ""
    """UUID of the rank's GPU; empty without one."""
    lacking: str = ""
    """Why its counter cannot be read; empty if it can."""


class EnergyMeter:
    """The counter of a rank's GPU, if it has one."""

    def __init__(self, hostname: str, gpu: str) -> None:
        self._counter: Nvml | None = None
        self._readings = list[float]()
        self._is_used, self._is_lost, lacking = False, False, ""
        if gpu:
            try:
                self._counter = Nvml(gpu)
            except NoCounterError as error:
                lacking = str(error)
        self.reach = EnergyReach(hostname, gpu, lacking)

    def agree(self, ranks: Sequence[EnergyReach], rank: int) -> dict[str, str]:
        """Use the counters only if all ranks can read theirs; the first of several ranks that share a GPU reads it.

        Args:
            ranks: the counters that each rank can read, by rank.
            rank: this one.

        Returns:
            ``gpu`` -> empty if the counters are used, else a reason; nothing if not every rank uses a GPU. The same on
            all ranks.
        """
        have_gpus, own = all(one.gpu for one in ranks), ranks[rank]
        reason = next((f"{one.hostname}: {one.lacking}" for one in ranks if one.lacking), "")
        self._is_used = have_gpus and not reason
        is_shared = any((one.hostname, one.gpu) == (own.hostname, own.gpu) for one in ranks[:rank])
        if not self._is_used or is_shared:
            self.close()
        return {"gpu": reason} if have_gpus else {}

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
        taken = {"gpu_joules": end - begin, "rollout_gpu_joules": rollout - begin}
        was_reset = self._counter is not None and min(taken.values()) <= 0  # its driver was restarted
        values = {f"{PREFIX}{name}": math.nan if was_reset else joules for name, joules in taken.items()}
        return values if self._is_used else {}

    def close(self) -> None:
        """Close the counter."""
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    def _read(self) -> float:
        """Joules so far; 0 if another rank reads the counter, and NaN for good once it could not be read."""
        if self._counter is not None:
            try:
                return self._counter.joules()
            except NoCounterError as error:
                logger.warning("energy is not recorded from here on: %s", error)
                self._is_lost = True
                self.close()
        return math.nan if self._is_lost else 0.0
