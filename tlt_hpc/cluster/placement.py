"""Whether ranks, GPUs, cores and network cards belong together: a table for each kind of node, and warnings.

All functions but ``read_seat`` are pure. A rank's GPU is found by its PCI address, and the cores near it by the GPU's
NUMA node: the numbers of GPUs follow neither (LUMI).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlt_hpc.cluster.topology import UNKNOWN, System, format_cores, nearest_card, own_gpu
from tlt_hpc.common.formatting import format_count, format_table

CPU_BIND = "TLT_CPU_BIND"
"""srun's ``--cpu-bind``, of ``sbatch/env.sh``; "none" keeps ranks from binding themselves as well."""
_HEAD = ("rank", "GPU", "cores", "NUMA", "GPU's", "network card")
_NOT_KNOWN = "-"


@dataclass(frozen=True)
class Seat:
    """The host, cores, GPU and network card of one rank; all ranks gather these."""

    hostname: str
    cores: frozenset[int]
    """That it may run on."""
    numa: tuple[int, ...]
    """NUMA nodes of its cores; empty where the system does not say."""
    num_node_cores: int
    """Of the whole node."""
    threads: int
    """OMP_NUM_THREADS."""
    gpu: str = ""
    """PCI address; empty without a GPU, or where it is not known which."""
    gpu_numa: int = UNKNOWN
    card: str = ""
    """The nearest network card."""
    best: frozenset[int] = frozenset()
    """Its part of the node's cores near its GPU (``share_cores``); empty where it cannot be said."""
    is_self_bound: bool = False
    num_physical: int = 0
    """Physical cores among its cores; 0: not known."""

    @property
    def is_far(self) -> bool:
        """True if none of its cores is near its GPU."""
        return self.gpu_numa != UNKNOWN and bool(self.numa) and self.gpu_numa not in self.numa


def read_seat(system: System, environment: Mapping[str, str], hostname: str, uses_gpu: bool) -> Seat:
    """Read the seat of this process from the system's files."""
    numa_cores, cores = system.numa_cores(), frozenset(os.sched_getaffinity(0))
    gpu = own_gpu(system.gpus(), environment) if uses_gpu else None
    numa = numa_of(cores, numa_cores)
    gpu_numa = UNKNOWN if gpu is None else gpu.numa
    if gpu is not None and gpu_numa == UNKNOWN and len(numa_cores) == 1:
        gpu_numa = next(iter(numa_cores))
    card = nearest_card(system.network_cards(), gpu_numa if gpu else next(iter(numa), UNKNOWN), gpu.bus if gpu else ())
    threads = environment.get("OMP_NUM_THREADS", "1").split(",")[0]
    return Seat(
        hostname=hostname,
        cores=cores,
        numa=numa,
        num_node_cores=len(system.online_cores() | cores),
        threads=int(threads) if threads.isdecimal() else 1,
        gpu=gpu.name if gpu else "",
        gpu_numa=gpu_numa,
        card=card.name if card else "",
        num_physical=len({system.hardware_threads_of_core(core) for core in cores}),
    )


def numa_of(cores: frozenset[int], numa_cores: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """The NUMA nodes that cores are on."""
    return tuple(node for node, own in numa_cores.items() if own & cores)


# --- which cores each rank should have ---


def share_cores(
    seats: Sequence[Seat], numa_cores: Mapping[int, frozenset[int]], siblings: Callable[[int], frozenset[int]]
) -> list[frozenset[int]]:
    """For each rank of a node its part of the cores near its GPU; empty where it cannot be said.

    Only cores that one of the ranks may run on are used. Ranks of a NUMA node get equally many physical cores, with
    all their hardware threads.

    Args:
        seats: of all ranks of the node.
        siblings: the hardware threads of a core's physical core.
    """
    allowed = frozenset[int]().union(*(seat.cores for seat in seats))
    ranks_by_numa: dict[int, list[int]] = {}
    for rank, seat in enumerate(seats):
        ranks_by_numa.setdefault(seat.gpu_numa, []).append(rank)
    shares = dict[int, frozenset[int]]()
    for node, ranks in ranks_by_numa.items():
        near = numa_cores.get(node, frozenset()) & allowed
        physical = sorted({siblings(core) & near for core in near}, key=min)
        each = len(physical) // len(ranks)
        if not each:
            return []
        for place, rank in enumerate(ranks):
            shares[rank] = frozenset[int]().union(*physical[place * each : (place + 1) * each])
    return [shares[rank] for rank in range(len(seats))]


def may_bind(seats: Sequence[Seat], shares: Sequence[frozenset[int]]) -> bool:
    """Return True if the ranks of a node bind themselves to their shares: nobody has bound them, and none loses by it.

    Ranks without GPUs have no shares, and are left as they are: on a laptop the system moves them better.
    """
    is_unbound = len(seats) > 1 and len({seat.cores for seat in seats}) == 1
    has_room = all(len(share) >= seat.threads for seat, share in zip(seats, shares, strict=False))
    return bool(shares) and is_unbound and has_room


# --- what the user sees ---


@dataclass(frozen=True)
class NodeLayout:
    """Nodes whose ranks run alike."""

    hostnames: tuple[str, ...]
    ranks: tuple[int, ...]
    """Of the first of these nodes."""
    seats: tuple[Seat, ...]

    @property
    def name(self) -> str:
        """The first host and how many others are alike."""
        others = len(self.hostnames) - 1
        return self.hostnames[0] + (f" and {format_count(others, 'node')} alike" if others else "")

    def table(self) -> list[str]:
        """A line on the nodes, one of headings, and one for each rank of a node."""
        rows = [_HEAD, *(_row(rank, seat) for rank, seat in zip(self.ranks, self.seats, strict=True))]
        bound = ", each bound by itself to cores near its GPU" if self.seats[0].is_self_bound else ""
        return [f"ranks on {self.name}{bound}:", *(f"  {line}" for line in format_table(rows).splitlines())]


def _row(rank: int, seat: Seat) -> tuple[str, ...]:
    numa = format_cores(seat.numa), "" if seat.gpu_numa == UNKNOWN else str(seat.gpu_numa)
    return str(rank), *(text or _NOT_KNOWN for text in (seat.gpu, format_cores(seat.cores), *numa, seat.card))


def group_equal_nodes(seats: Sequence[Seat]) -> list[NodeLayout]:
    """The kinds of nodes, in the order of their first ranks.

    Args:
        seats: of all ranks, in order.
    """
    nodes: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        nodes.setdefault(seat.hostname, []).append(rank)
    alike: dict[tuple[object, ...], list[str]] = {}
    for hostname, ranks in nodes.items():
        layout = tuple((*_row(0, seats[rank]), seats[rank].threads, seats[rank].best) for rank in ranks)
        alike.setdefault(layout, []).append(hostname)
    return [
        NodeLayout(tuple(hosts), tuple(ranks := nodes[hosts[0]]), tuple(seats[rank] for rank in ranks))
        for hosts in alike.values()
    ]


def warnings_of(kind: NodeLayout, offloads: bool = False) -> list[str]:
    """One line, with the remedy, for each thing that makes the ranks of these nodes slow.

    ``offloads``: the optimiser runs on the ranks' cores.
    """
    seats, where = kind.seats, f"on {kind.name}"
    cores = frozenset[int]().union(*(seat.cores for seat in seats))
    if len(seats) > 1 and len(cores) == 1 and seats[0].num_node_cores > 1:
        return [
            f"all {len(seats)} ranks {where} run on core {min(cores)} of {seats[0].num_node_cores}; start them with "
            "srun --cpus-per-task=N --cpu-bind=cores, or mpirun --bind-to none"
        ]
    found = []
    if ranks := _ranks_sharing_cores(seats):
        remedy = "give each its own: srun --cpu-bind=cores --cpus-per-task=N, as sbatch/env.sh does"
        found.append(f"{_format_rank_names(kind, ranks)} {where} share cores; {remedy}")
    if ranks := [rank for rank, seat in enumerate(seats) if seat.is_far]:
        found.append(
            f"{_format_rank_names(kind, ranks)} {where}: no core is near the GPU; {core_binding_remedy(seats)}"
        )
    is_placed = len(seats) > 1 and (len({seat.cores for seat in seats}) > 1 or any(seat.gpu for seat in seats))
    if ranks := [rank for rank, seat in enumerate(seats) if is_placed and len(seat.numa) > 1 and not seat.is_far]:
        found.append(
            f"{_format_rank_names(kind, ranks)} {where}: cores are of several NUMA nodes; {core_binding_remedy(seats)}"
        )
    if ranks := [rank for rank, seat in enumerate(seats) if seat.threads > len(seat.cores)]:
        few, threads = len(seats[ranks[0]].cores), seats[ranks[0]].threads
        found.append(
            f"{_format_rank_names(kind, ranks)} {where} may use {format_count(few, 'core')} for {threads} threads "
            f"(OMP_NUM_THREADS); ask for --cpus-per-task={threads}, or set {_threads_setting_text(few)}"
        )
    together = Counter(seat.cores for seat in seats)
    own = [seat.num_physical // together[seat.cores] for seat in seats]
    if ranks := [rank for rank, seat in enumerate(seats) if offloads and own[rank] > seat.threads]:
        most, few = own[ranks[0]], seats[ranks[0]].threads
        what = f"the optimiser (optimizer.offload) uses {format_count(few, 'thread')} on {format_count(most, 'core')}"
        found.append(f"{_format_rank_names(kind, ranks)} {where}: {what}; set {_threads_setting_text(most)}")
    return found


def _threads_setting_text(number: int) -> str:
    return f"OMP_NUM_THREADS={number} (TLT_THREADS={number} with sbatch/env.sh)"


def _ranks_sharing_cores(seats: Sequence[Seat]) -> list[int]:
    """Ranks that share cores with another and lose by it: not where the system may move all of them everywhere."""
    together = Counter(seat.cores for seat in seats)
    if len(together) == 1:
        is_crowded = any(seat.gpu for seat in seats) and len(seats[0].cores) < sum(seat.threads for seat in seats)
        return list(range(len(seats))) if is_crowded and len(seats) > 1 else []
    users = Counter(core for seat in seats for core in seat.cores)
    return [rank for rank, seat in enumerate(seats) if any(users[core] > 1 for core in seat.cores)]


def core_binding_remedy(seats: Sequence[Seat]) -> str:
    """Return the user's remedy that gives the ranks of a node cores near their GPUs."""
    if not all(seat.best for seat in seats):
        return "ask for whole nodes (--exclusive), so that the cores near each GPU are the job's"
    masks = ",".join(f"{sum(1 << core for core in seat.best):#x}" for seat in seats)
    return f"export {CPU_BIND}=mask_cpu:{masks} before sbatch (srun --cpu-bind)"


def _format_rank_names(kind: NodeLayout, places: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3,8``."""
    ranks = [kind.ranks[place] for place in places]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {format_cores(ranks)}"
