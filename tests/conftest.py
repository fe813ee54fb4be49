"""The fixture of a private Slurm. And without a GPU Triton is its interpreter for the whole process: chosen
here, before anything imports it.
"""

import torch
from local_slurm import slurm  # noqa: F401  a fixture

from tlt_hpc.kernels import dispatch

if dispatch.has_triton() and not torch.cuda.is_available():
    dispatch.load_interpreter()
