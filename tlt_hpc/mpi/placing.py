"""Puts each rank on the cores near its GPU where nobody has bound it, and says where the ranks run."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from tlt_hpc.cluster.placement import (
    CPU_BIND,
    group_equal_nodes,
    may_bind,
    numa_of,
    read_seat,
    share_cores,
    warnings_of,
)
from tlt_hpc.cluster.topology import System
from tlt_hpc.common.formatting import format_count

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

logger = logging.getLogger(__name__)

_SHOWN_KINDS = 4
"""Kinds of nodes whose tables are printed; the others' are in environment.jsonl alone."""


def place_ranks(world: World, uses_gpu: bool, offloads: bool = False) -> None:
    """Bind ranks that nobody has bound, print the table and the warnings, and keep both in ``world``; collective.

    To be called before torch is imported, whose threads and memory then follow. ``offloads``: on GPUs, the optimiser
    runs on the ranks' cores.
    """
    system = System.from_environment(os.environ)
    own = read_seat(system, os.environ, world.hostname, uses_gpu)
    node = [seat for seat in world.allgather(own) if seat.hostname == world.hostname]
    numa_cores = system.numa_cores()
    shares = share_cores(node, numa_cores, system.hardware_threads_of_core)
    if shares:
        own = replace(own, best=shares[world.local_rank])
    has_all_gpus = len(node) == len(system.gpus())  # else another job may have the same cores
    if has_all_gpus and may_bind(node, shares) and os.environ.get(CPU_BIND) != "none":
        try:
            os.sched_setaffinity(0, own.best)
        except OSError as error:  # the rank is as fast as without
            logger.warning("%s does not let rank %d bind itself: %s", world.hostname, world.rank, error.strerror)
        else:
            own = replace(own, cores=own.best, numa=numa_of(own.best, numa_cores), is_self_bound=True)
    seats = world.allgather(own)
    if world.rank:
        return
    kinds = group_equal_nodes(seats)
    tables = [kind.table() for kind in kinds]
    warnings = [line for kind in kinds for line in warnings_of(kind, offloads)]
    world.placement = (*(line for table in tables for line in table), *warnings)
    if len({seat.hostname for seat in seats}) > 1 or any(seat.gpu for seat in seats):
        lines = [line for table in tables[:_SHOWN_KINDS] for line in table]
        if left := sum(len(kind.hostnames) for kind in kinds[_SHOWN_KINDS:]):
            lines.append(f"and in other ways on {format_count(left, 'node')}: environment.jsonl")
        world.print_once("\n  ".join(lines))
    for line in warnings[:_SHOWN_KINDS]:
        logger.warning("%s", line)
