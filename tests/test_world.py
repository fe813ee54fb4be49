"""Ranks, waiting collectives and the stop flag, on real MPI jobs; MPI is never initialised in the test process."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from tlt_hpc.mpi.world import LaunchError, World, check_rank_count, check_thread_level, place, to_send
from tlt_hpc.run.session import Session
from tlt_hpc.storage.folder import WriteError


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


# --- pure ---


def test_place_counts_nodes_and_ranks_of_a_node() -> None:
    hostnames = ["b", "b", "a", "b", "a"]
    assert [place(hostnames, rank) for rank in range(5)] == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]


def test_a_wrong_rank_count_names_both_counts_and_the_remedy() -> None:
    for environment in ({}, {"TLT_RANKS": "2"}, {"SLURM_NTASKS": "2"}, {"TLT_RANKS": "2", "SLURM_NTASKS": "8"}):
        check_rank_count(2, environment)
    for variable in ("TLT_RANKS", "SLURM_NTASKS"):
        with pytest.raises(LaunchError, match=f"MPI sees 1 rank where {variable}=4: .*srun --mpi=.*mpiexec") as caught:
            check_rank_count(1, {variable: "4"})
        assert "\n" not in str(caught.value)


def test_a_lower_thread_level_is_refused() -> None:
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
        sent = pickle.loads(pickle.dumps(to_send(error)))
        assert isinstance(sent, UserError) and str(sent) == "row 3: why", kind
    assert {RowError, OverlongError, ConfigError} <= set(kinds)
    assert type(to_send(ConfigError("a"))) is ConfigError


# --- one process ---


def start_python(program: str, **environment: str) -> subprocess.Popen[str]:
    surroundings = {k: v for k, v in os.environ.items() if k not in ("TLT_RANKS", "SLURM_NTASKS")}
    return subprocess.Popen(
        [sys.executable, "-m", "mpi4py", "-c", program],
        cwd=ROOT,
        env={**surroundings, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.mpi
def test_a_plain_python_is_a_world_of_one() -> None:
    program = "from tlt_hpc.mpi.world import World; w = World.connect(); print(w.rank, w.size, w.allgather('a'))"
    stdout, stderr = start_python(program).communicate(timeout=60)
    assert stdout.split("\n")[0] == "0 1 ['a']", stderr


def test_importing_the_world_starts_no_mpi() -> None:
    modules = "tlt_hpc.mpi.library as library, tlt_hpc.mpi.pulse, tlt_hpc.mpi.world"
    program = f"import sys, {modules}; sys.exit(library.MPI.Is_initialized())"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


WAIT_FOR_STOP = """
import sys, time
from tlt_hpc.cluster import stopping
from tlt_hpc.mpi.world import World
world = World.connect()
world.answer_signals()
stopping.SAME_KEYSTROKE_SECONDS = {together}
print("ready", flush=True)
try:
    while not world.stop_requested:
        time.sleep(0.01)
    print(world.flag.reason, flush=True)
    sys.stdin.readline()
    print("kept running", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_sets_the_stop_flag_and_nothing_else(number: signal.Signals) -> None:
    process = start_python(WAIT_FOR_STOP.format(together=1.0))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    stdout, stderr = process.communicate("\n", timeout=60)
    assert (process.returncode, stdout) == (0, f"{number.name}\nkept running\n"), stderr


@pytest.mark.mpi
@pytest.mark.parametrize(("together", "last_line"), [(1000.0, "kept running"), (0.0, "interrupted")])
def test_a_second_ctrl_c_interrupts_but_its_echo_does_not(together: float, last_line: str) -> None:
    process = start_python(WAIT_FOR_STOP.format(together=together))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n", "the first one was seen"
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate("\n", timeout=60)
    assert stdout == f"{last_line}\n"


# --- several ranks ---


def named_memory() -> list[str]:
    """Files of the library's own in memory that would stay behind if this rank were killed now."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/mpich" in line and not line.endswith("(deleted)")]


def contribution(rank: int, dtype: str, length: int) -> np.ndarray:
    values = np.random.default_rng(rank).normal(scale=1000, size=(length, 2))
    return values.astype(dtype).T  # not C-contiguous


def sum_arrays(world: World, dtype: str, length: int) -> list[Any]:
    own = contribution(world.rank, dtype, length)
    own_digest = digest(own)
    pending = [world.start_sum(own) for _ in range(2)]
    assert not any(np.shares_memory(p.sent, own) for p in pending)
    total = world.sum(own)
    assert all(digest(p.wait()) == digest(total) and p.wait().dtype == dtype for p in pending)
    assert digest(own) == own_digest, "what is summed is a copy"
    expected = sum(contribution(rank, dtype, length).astype(np.float64) for rank in range(world.size))
    assert total.shape == own.shape and np.allclose(total, expected, rtol=1e-5, atol=1e-2)
    return [dtype, digest(total)]


def use_collectives(most_bytes: int, block_bytes: int) -> dict[str, Any]:
    world_module.MOST_BYTES, world_module.BLOCK_BYTES = most_bytes, block_bytes
    world = World.connect()

    def item(rank: int) -> dict[str, Any]:
        return {"rank": rank, "long": "ab" * (1000 * rank**2), "array": list(range(rank))}

    expected = [item(rank) for rank in range(world.size)]
    assert world.allgather(item(world.rank)) == expected
    assert [world.broadcast(item(world.rank), root) for root in range(world.size)] == expected
    world.barrier()
    kinds = (("float32", 20_003), ("float64", 5), ("int64", 1000))
    place = {name: getattr(world, name) for name in ("rank", "size", "node", "local_rank")}
    return {**place, "sums": [sum_arrays(world, *kind) for kind in kinds], "memory": named_memory()}


@pytest.mark.mpi
@pytest.mark.parametrize(("num_ranks", "most_bytes", "block_bytes"), [(1, 2**30, 2**26), (3, 700, 500)])
def test_collectives(num_ranks: int, most_bytes: int, block_bytes: int) -> None:
    """Every rank knows its place, objects arrive whole in order, sums are the same bits, a kill leaves no memory."""
    ranks = run_on_ranks(num_ranks, use_collectives, most_bytes, block_bytes)
    first = ranks[0]["sums"]
    for number, rank in enumerate(ranks):
        sums, memory = rank.pop("sums"), rank.pop("memory")
        assert sums == first and memory == []
        assert rank == {"rank": number, "size": num_ranks, "node": 0, "local_rank": number}


class CountedComm:
    """A communicator that notes the bytes of each sum."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.num_bytes = comm, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Iallreduce(self, sent: np.ndarray, received: np.ndarray, op: Any) -> Any:  # noqa: N802 (mpi4py's name)
        assert sent.nbytes == received.nbytes
        self.num_bytes.append(sent.nbytes)
        return self._comm.Iallreduce(sent, received, op)


def sum_in_blocks(most_bytes: int) -> dict[str, Any]:
    world = World.connect()
    own = contribution(world.rank, "float32", 5_000)
    whole = digest(world.sum(own))
    world_module.MOST_BYTES = most_bytes
    world._comm = counted = CountedComm(world._comm)  # type: ignore[assignment]
    time.sleep(0.2 * world.rank)  # the later rank finds the earlier one's blocks under way
    pending = world.start_sum(own)
    world.start_sum(np.ones(100_000, np.float32))  # nobody waits, so nobody but the world holds the buffers
    total = pending.wait()
    done = all(request == MPI.REQUEST_NULL for request in pending.requests)
    return {"num_bytes": counted.num_bytes[:11], "equal": digest(total) == whole, "done": done}


@pytest.mark.mpi
def test_a_large_sum_goes_in_blocks_of_the_same_bits() -> None:
    """Libraries older than MPI 4 count elements in a C int."""
    assert (
        run_on_ranks(2, sum_in_blocks, 4096)
        == [{"num_bytes": [4096] * 9 + [3136, 4096], "equal": True, "done": True}] * 2
    )


def forget_sums(most_bytes: int) -> bool:
    world_module.MOST_BYTES = most_bytes
    world = World.connect()
    time.sleep(0.3 * world.rank)  # the later rank finds the earlier one's sums under way
    for _ in range(20):
        world.start_sum(np.ones(100_000))  # nobody waits, so nobody but the world holds the buffers
    reused = [np.full(100_000, 7.0) for _ in range(60)]  # would lie where freed buffers had been
    world.sum(np.ones(1))
    world.barrier()
    return all((array == 7.0).all() for array in reused)


@pytest.mark.mpi
def test_a_forgotten_sum_keeps_its_buffers() -> None:
    assert run_on_ranks(2, forget_sums, 100_000) == [True, True]


def vote(voter: int | None) -> list[Any]:
    world = World.connect()
    before = bool(world.agree_to_stop())
    if world.rank == voter:
        world.flag.request(Stop.ASKED, "SIGTERM")
        world.flag.request(Stop.ASKED, "a later reason")
    agreed = world.agree_to_stop()
    return [before, agreed is Stop.ASKED, world.stop_requested, world.flag.reason]


@pytest.mark.mpi
def test_one_ranks_stop_flag_stops_all() -> None:
    others = [False, True, True, "rank 2: SIGTERM"]
    assert run_on_ranks(3, vote, 2) == [others, others, [False, True, True, "SIGTERM"]]


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


# --- work that must succeed on all ranks, or on rank 0 ---


def fail_on_one_rank(failing: int) -> list[str]:
    """What ``all_or_none`` and ``once`` return or raise on this rank when rank ``failing`` fails in its work."""
    world = World.connect()
    full = WriteError(Path("log.h5"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def write() -> int:
        if world.rank == failing:
            raise full
        return world.rank

    def refuse() -> int:
        if world.rank == failing:
            raise ConfigError(f"refused by rank {world.rank}")
        return world.rank

    outcomes = []
    for run in (world.all_or_none, world.once):
        for work in (write, refuse, lambda: 10 + world.rank):
            try:
                outcomes.append(str(run(work)))
            except UserError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    world.leave()
    return outcomes


@pytest.mark.mpi
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_is_raised_on_all(failing: int) -> None:
    full = "UserError: cannot write log.h5: No space left on device; nothing was changed: make room there"
    by_rank = run_on_ranks(2, fail_on_one_rank, failing)
    for rank, (write, refuse, nothing, *once) in enumerate(by_rank):
        assert write.startswith(full) and refuse == f"ConfigError: refused by rank {failing}"
        assert nothing == str(10 + rank)
        if failing == 0:
            assert once[0].startswith(full) and once[1:] == ["ConfigError: refused by rank 0", "10"]
        else:
            assert once == ["0", "0", "10"], "rank 1 does not run the work of rank 0"


def test_calibration_says_what_it_does_and_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took 155 s for SmolLM2 on two busy cores; the line at its start alone looks like a hang."""
    monkeypatch.setattr(world_module, "_LONG_SECONDS", 0.05)
    world: Any = SimpleNamespace(rank=0, stages={})
    world.say, world.saying = partial(World.say, world), partial(World.saying, world)
    settings = SimpleNamespace(tie_guard=True, params=SimpleNamespace(max_tokens=256))
    for seconds in (0.1, 0.0):
        engine: Any = SimpleNamespace(settings=settings, calibrate=lambda _, seconds=seconds: time.sleep(seconds))
        Session.calibrate_on(SimpleNamespace(world=world), engine, [None, None])  # type: ignore[arg-type, list-item]
    assert capsys.readouterr().out == (
        "  calibrating the rollout engine on 2 responses of at most 256 tokens, which are discarded\n"
        "  calibrating the rollout engine took 0 s\n"
    )
