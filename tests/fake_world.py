"""Worlds without MPI, for tests of code that takes a ``World``: of one rank, and of several that are threads."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from tlt_hpc.config import UserError
from tlt_hpc.mpi.world import World


class OneRank:
    """Collectives of a single rank: they return at once."""

    rank, size, hostname = 0, 1, "here"
    run_on_all_ranks, run_first_and_broadcast = World.run_on_all_ranks, World.run_first_and_broadcast

    def allgather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item


class ThreadWorld:
    """One rank of several that are threads of this process, each on a host of its own."""

    run_on_all_ranks, run_first_and_broadcast = World.run_on_all_ranks, World.run_first_and_broadcast

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.hostname, self.node_group = rank, size, f"node{rank}", OneRank()
        self.node = rank
        self._board, self._barrier = board, barrier

    def allgather(self, item: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(item)
        self._barrier.wait(60)
        items = [pickle.loads(each) for each in self._board]
        self._barrier.wait(60)
        return items

    def broadcast(self, item: Any) -> Any:
        return self.allgather(item)[0]

    def start_sum(self, array: Any) -> Any:
        total = sum(self.allgather(array))
        return SimpleNamespace(wait=lambda: total)


class RanksInTurn:
    """Ranks that post one after another, by default two: a sum is that of all posted so far."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.arrays: list[Any] = []

    def start_sum(self, array: Any) -> RanksInTurn:
        self.arrays.append(array.copy())
        return self

    def wait(self) -> Any:
        return np.sum(self.arrays, 0, dtype=np.float32)

    def allgather(self, item: Any) -> list[Any]:
        return [item] * self.size


def on_threads(size: int, function: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What ``function`` returns on each rank, or the UserError that it raised."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> Any:
        try:
            return function(ThreadWorld(rank, size, board, barrier))
        except UserError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
