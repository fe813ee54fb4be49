"""The fixture of a private Slurm, and a cache of the tests' own.

And without a GPU Triton is its interpreter for the whole process: chosen here, before anything imports it.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from interpreter import load_interpreter
from local_slurm import slurm  # noqa: F401  a fixture
from whole_run import reference_run  # noqa: F401  a fixture

from tlt_hpc.kernels import dispatch

if dispatch.has_triton() and not torch.cuda.is_available():
    load_interpreter()

settings.register_profile("without_deadline", settings.default, deadline=None)  # the machine may have other work
settings.load_profile("without_deadline")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cost profiles that a user's runs have left say nothing here, nor do the tests' profiles to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLT_CACHE", os.fspath(tmp_path_factory.mktemp("cache")))
        yield
