"""Whether the copies that the ranks of a node make for a checkpoint fit into its host memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tlt_hpc.checkpoint.manifest import CheckpointError
from tlt_hpc.common.host_memory import available_bytes

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World


def check_room(world: World, num_bytes: int) -> None:
    """Refuse copies for which the ranks of a node together have no memory; collective.

    Raises:
        CheckpointError: on all ranks.
    """
    available = world.all_or_none(available_bytes)
    ranks = world.allgather((world.node, world.hostname, num_bytes, available))
    wanted: Counter[int] = Counter()
    for node, _, count, _ in ranks:
        wanted[node] += count
    for node, hostname, _, room in ranks:
        if wanted[node] > room:
            raise CheckpointError(
                f"{hostname} has {room / 1e9:.1f} GB of host memory left, and to save a checkpoint its ranks copy "
                f"{wanted[node] / 1e9:.1f} GB of training state there; ask for more memory per node, or more nodes"
            )
