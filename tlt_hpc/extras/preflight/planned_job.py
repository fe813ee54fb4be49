"""The job that is checked: its configuration and request, and what several checks read of them, each thing once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.config import Config
from tlt_hpc.extras.preflight.results import Skip

if TYPE_CHECKING:
    from tlt_hpc.models.shape import ModelShape
    from tlt_hpc.plan.memory.plan import MemoryPlan
    from tlt_hpc.plan.memory.situation import DeviceType


GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder if NVIDIA's driver has found GPUs."""


@dataclass(frozen=True)
class PlannedJob:
    """A job, as far as it can be read. A property that is not available raises a ``Skip`` that says why."""

    loaded: Config | None
    """None: the configuration has mistakes."""
    request: SlurmRequest
    gpu_bytes: int | None = None
    """Memory of each GPU of the job, if it was given."""

    @property
    def config(self) -> Config:
        if self.loaded is None:
            raise Skip("the configuration has mistakes")
        return self.loaded

    @property
    def asks_slurm(self) -> bool:
        """Whether a batch script was given."""
        return bool(self.request.arguments)

    @property
    def ranks_per_node(self) -> int:
        """As requested; without a script the configuration's own."""
        return self.request.ranks_per_node or (1 if self.asks_slurm else self.config.run.ranks)

    @property
    def num_ranks(self) -> int:
        return self.request.nodes * self.ranks_per_node

    @property
    def needs_gpu(self) -> bool:
        return self.loaded is not None and self.loaded.model.device == "cuda"

    @property
    def uses_gpu(self) -> bool:
        """Whether the job runs on GPUs: it says so, or uses what it finds and some are requested or are here."""
        found = bool(self.request.gpus_per_node) or (not self.asks_slurm and GPUS.is_dir())
        return self.needs_gpu or (self.config.model.device == "auto" and found)

    @cached_property
    def model_folder(self) -> Path:
        from tlt_hpc.models.tokenizer import find_model

        try:
            return find_model(self.config.model.path)
        except ValueError:  # the check of the model says so
            raise Skip(f"there is no model in {self.config.model.path}") from None

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape, or if it is not there yet, the known one of its name."""
        from tlt_hpc.plan.memory.shapes import find_shape

        try:
            return find_shape(self.config.model.path, None)
        except ValueError:
            raise Skip(f"the sizes of {self.config.model.path} are not known") from None

    @cached_property
    def plan(self) -> MemoryPlan:
        """The memory that the job takes."""
        from tlt_hpc.plan.memory.phases import plan_memory
        from tlt_hpc.plan.memory.situation import Situation

        device: DeviceType = "cuda" if self.uses_gpu else "cpu"
        return plan_memory(Situation(self.config, self.shape, self.num_ranks, self.ranks_per_node, device))
