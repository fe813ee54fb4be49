"""Ranks, waiting collectives and the stop flag, on real MPI jobs; MPI is never initialised in the test process."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_ranks import ROOT, run_on_ranks

from tlt_hpc.cluster.stopping import Stop
from tlt_hpc.config import ConfigError, UserError
from tlt_hpc.data.reader import OverlongError
from tlt_hpc.data.rows import RowError
from tlt_hpc.mpi import world as world_module
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.world import (
    LaunchError,
    World,
    as_sendable_error,
    check_rank_count,
    check_thread_level,
    node_and_local_rank,
)
from tlt_hpc.storage.folder import WriteError


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# --- pure ---


def test_place_counts_nodes_and_ranks_of_a_node() -> None:
    hostnames = ["b", "b", "a", "b", "a"]
    assert [node_and_local_rank(hostnames, rank) for rank in range(5)] == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]


def test_a_launcher_that_does_not_fit_is_one_line_with_the_remedy() -> None:
    for environment in ({}, {"TLT_RANKS": "2"}, {"SLURM_NTASKS": "2"}, {"TLT_RANKS": "2", "SLURM_NTASKS": "8"}):
        check_rank_count(2, environment)
    for variable in ("TLT_RANKS", "SLURM_NTASKS"):
        with pytest.raises(LaunchError, match=f"MPI sees 1 rank where {variable}=4: .*srun --mpi=.*mpiexec") as caught:
            check_rank_count(1, {variable: "4"})
        assert "\n" not in str(caught.value)
    check_thread_level(3, "MPICH Version: 5")
    with pytest.raises(LaunchError, match="'MPICH Version: 5'; load an MPI that is built with thread support"):
        check_thread_level(2, "MPICH Version: 5\nmore")


def test_every_error_for_a_user_can_be_sent_to_other_ranks() -> None:
    """Some are made from more than their text."""
    for path in (ROOT / "tlt_hpc").rglob("*.py"):
        if re.search(r"^class \w+\((UserError|\w+Error)\)", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    kinds = [UserError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        error = kind.__new__(kind)
        error.args = ("row 3: why",)
        sent = pickle.loads(pickle.dumps(as_sendable_error(error)))
        assert isinstance(sent, UserError) and str(sent) == "row 3: why", kind
    assert {RowError, OverlongError, ConfigError} <= set(kinds)
    assert type(as_sendable_error(ConfigError("a"))) is ConfigError


# --- several ranks ---

FAILING_RANKS = (0, 1)
VOTER = 2


def named_memory() -> list[str]:
    """Files of the library's own in memory that would stay behind if this rank were killed now."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/mpich" in line and not line.endswith("(deleted)")]


def contribution(rank: int, dtype: str, length: int) -> np.ndarray:
    values = np.random.default_rng(rank).normal(scale=1000, size=(length, 2))
    return values.astype(dtype).T  # not C-contiguous


def sum_arrays(world: World, dtype: str, length: int) -> str:
    """The digest of a sum, which must be that of the values and leave them as they are, waited for or started."""
    own = contribution(world.rank, dtype, length)
    before, pending = digest(own), world.start_sum(own)
    assert not np.shares_memory(pending.sent, own)
    total = world.sum_over_ranks(own)
    assert digest(pending.wait()) == digest(pending.wait()) == digest(total) and digest(own) == before
    expected = sum(contribution(rank, dtype, length).astype(np.float64) for rank in range(world.size))
    assert total.shape == own.shape and total.dtype == dtype and np.allclose(total, expected, rtol=1e-5, atol=1e-2)
    return digest(total)


def exchange_objects(world: World) -> None:
    items = [{"rank": rank, "long": "ab" * (1000 * rank**2)} for rank in range(world.size)]
    assert world.allgather(items[world.rank]) == items
    assert [world.broadcast(items[world.rank], root) for root in range(world.size)] == items


class CountedComm:
    """A communicator that notes the bytes of each sum."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.num_bytes = comm, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Iallreduce(self, sent: np.ndarray, received: np.ndarray, op: Any) -> Any:  # noqa: N802 (mpi4py's name)
        self.num_bytes.append(sent.nbytes)
        return self._comm.Iallreduce(sent, received, op)


def forget_sums(world: World) -> bool:
    """Whether memory that is allocated next is left alone by sums that nobody waits for."""
    time.sleep(0.2 * world.rank)  # the later rank finds the earlier one's sums under way
    for _ in range(20):
        world.start_sum(np.ones(100_000))
    reused = [np.full(100_000, 7.0) for _ in range(60)]  # would lie where freed buffers had been
    world.sum_over_ranks(np.ones(1))
    world.barrier()
    return all((array == 7.0).all() for array in reused)


def fail_on(world: World, failing: int) -> list[str]:
    """What ``run_on_all_ranks`` and ``run_first_and_broadcast`` return or raise here when rank ``failing`` fails."""

    def write() -> int:
        if world.rank == failing:
            raise WriteError(Path("log.h5"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return world.rank

    def refuse() -> int:
        if world.rank == failing:
            raise ConfigError(f"refused by rank {world.rank}")
        return world.rank

    outcomes = []
    for run in (world.run_on_all_ranks, world.run_first_and_broadcast):
        for work in (write, refuse, lambda: 10 + world.rank):
            try:
                outcomes.append(str(run(work)))
            except UserError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def vote(world: World) -> list[Any]:
    before = bool(world.agree_to_stop())
    if world.rank == VOTER:
        world.flag.request(Stop.ASKED, "SIGTERM")
        world.flag.request(Stop.ASKED, "a later reason")
    return [before, world.agree_to_stop() is Stop.ASKED, world.stop_requested, world.flag.reason]


def use_world() -> dict[str, Any]:
    world = World.connect()
    exchange_objects(world)
    sums = [sum_arrays(world, *kind) for kind in (("float32", 20_003), ("float64", 5), ("int64", 1000))]
    world_module.MOST_BYTES, world_module.BLOCK_BYTES = 4096, 500  # from here on all goes in blocks
    exchange_objects(world)
    comm = world._comm
    world._comm = counted = CountedComm(comm)  # type: ignore[assignment]
    pending = world.start_sum(contribution(world.rank, "float32", 20_003))
    in_blocks = digest(pending.wait())
    assert all(request == MPI.REQUEST_NULL for request in pending.requests)
    world._comm = comm
    found = {
        "place": [world.rank, world.size, world.node, world.local_rank], "sums": sums, "in blocks": in_blocks,
        "bytes": [sum(counted.num_bytes), max(counted.num_bytes)], "memory": named_memory(),
        "buffers": forget_sums(world), "failures": [fail_on(world, failing) for failing in FAILING_RANKS],
        "vote": vote(world),
    }  # fmt: skip
    world.finalise_mpi_all_ranks()
    return found


@pytest.mark.mpi
def test_a_world_of_three_ranks() -> None:
    """Objects and sums arrive whole and with the same bits on all; an error or a stop of one rank is that of all."""
    ranks = run_on_ranks(3, use_world)
    full = "UserError: cannot write log.h5: No space left on device; nothing was changed: make room there"
    for number, rank in enumerate(ranks):
        assert rank["place"] == [number, 3, 0, number]
        assert rank["sums"] == ranks[0]["sums"] and rank["in blocks"] == rank["sums"][0]
        assert rank["bytes"] == [20_003 * 2 * 4, 4096], "libraries older than MPI 4 count elements in a C int"
        assert rank["memory"] == [] and rank["buffers"]
        for failing, (write, refuse, nothing, *once) in zip(FAILING_RANKS, rank["failures"], strict=True):
            assert write.startswith(full) and refuse == f"ConfigError: refused by rank {failing}"
            assert nothing == str(10 + number)
            if failing == 0:
                assert once[0].startswith(full) and once[1:] == ["ConfigError: refused by rank 0", "10"]
            else:
                assert once == ["0", "0", "10"], "rank 1 does not run the work of rank 0"
        assert rank["vote"] == [False, True, True, "SIGTERM" if number == VOTER else f"rank {VOTER}: SIGTERM"]


def raise_on(rank: int) -> None:
    world = World.connect()
    if world.rank == rank:
        raise ZeroDivisionError("the rank that fails")
    world.barrier()


@pytest.mark.mpi
def test_a_rank_that_raises_ends_the_job_with_its_traceback() -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)ended with status [1-9].*in raise_on.*ZeroDivisionError: the rank that fails"
    ):
        run_on_ranks(4, raise_on, 2, own=True)
