"""Shared fixtures. Without a GPU Triton is its interpreter for the whole process: chosen before anything imports it."""

import torch
from hypothesis import settings
from interpreter import load_interpreter
from local_slurm import slurm  # noqa: F401  a fixture
from preflight_place import place  # noqa: F401  a fixture
from shell_slurm import cluster  # noqa: F401  a fixture
from whole_run import reference_run  # noqa: F401  a fixture

from tlt_hpc.kernels import dispatch

if dispatch.has_triton() and not torch.cuda.is_available():
    load_interpreter()

settings.register_profile("without_deadline", settings.default, deadline=None)  # the machine may have other work
settings.load_profile("without_deadline")
