"""Gives each rank of a node a GPU of its own, and prepares its libraries, before anything asks CUDA what there is. Does
not import torch.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, MutableMapping

from tlt_hpc.cluster.launcher import local_rank
from tlt_hpc.config import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED = "TLT_SHARE_GPUS"
"""Set to 1 it lets ranks share a GPU, as small models can."""
GIVEN = "TLT_GPU"
"""Where a rank that was left with one GPU finds its name; session.py reads it."""
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""With these workspaces cuBLAS gives the same bits every time (NVIDIA, cuBLAS, "Results reproducibility")."""
_NONE = ("", "NoDevFiles", "-1")
"""What stands there where a job has no GPU."""

logger = logging.getLogger(__name__)


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that the launcher lets this rank see, as it names them: numbers, or ids of GPUs or of MIG instances."""
    text = environment.get(VISIBLE, "").strip()
    return [] if text in _NONE else [device.strip() for device in text.split(",")]


def restrict_to_one_gpu(environment: MutableMapping[str, str], rank: int) -> str | None:
    """Let this rank see one GPU alone, and return its name; None where nothing is said of GPUs.

    One that is the only one is kept: Slurm may have assigned them by itself (``--gpus-per-task``, ``--gpu-bind``).

    Raises:
        UserError: the node has more ranks than GPUs.
    """
    devices, local = visible_devices(environment), local_rank(environment)
    if not devices or (local is None and len(devices) > 1):
        return None
    own = devices[0] if len(devices) == 1 else devices[_gpu_index(local or 0, devices, environment)]
    environment[VISIBLE] = environment[GIVEN] = own
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # numbers as the system and nvidia-smi have them
    logger.info("rank %d on %s uses GPU %s of %s", rank, socket.gethostname(), own, ",".join(devices))
    return own


def set_cublas_workspaces(environment: MutableMapping[str, str]) -> None:
    """Have cuBLAS give the same bits every time; before its first product, as it reads the environment once.

    Raises:
        UserError: the user has set workspaces with which it does not; the policy's update would fail.
    """
    if (found := environment.setdefault(WORKSPACES, _FIXED[0])) not in _FIXED:
        raise UserError(f"{WORKSPACES}={found} makes runs differ: unset it, or set it to {' or '.join(_FIXED)}")


def _gpu_index(local: int, devices: list[str], environment: Mapping[str, str]) -> int:
    if local >= len(devices) and environment.get(SHARED) != "1":
        raise UserError(
            f"{socket.gethostname()} has {len(devices)} GPUs ({VISIBLE}={','.join(devices)}) and more than {local} "
            f"ranks; start one rank for each GPU (--ntasks-per-node={len(devices)}), give model.device=cpu, or set "
            f"{SHARED}=1 to have ranks share them"
        )
    return local % len(devices)
