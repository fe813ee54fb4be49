"""The energy of one NVIDIA GPU, from its driver through NVML; the package ``nvidia-ml-py`` is optional."""

from __future__ import annotations

from typing import Any

from tlt_hpc.look.energy.counter import NoCounterError

_JOULE = 1e3
"""NVML counts millijoules, since the driver was loaded."""


class Nvml:
    """The GPU of that UUID (``GPU-...``), whole: a MIG instance has no counter of its own.

    Source: ``nvmlDeviceGetTotalEnergyConsumption``, Volta and later.

    Raises:
        NoCounterError: the package or the counter is not there.
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
        """Since the driver was loaded.

        Raises:
            NoCounterError: it can be read no longer.
        """
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) / _JOULE
        except self._nvml.NVMLError as error:
            raise NoCounterError(f"NVML: {error}") from None

    def close(self) -> None:
        """Let the library go; others of this process may still use it, since it counts."""
        self._nvml.nvmlShutdown()

    def _is_split(self) -> bool:
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._gpu)
        except self._nvml.NVMLError_NotSupported:  # a GPU without MIG
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)
