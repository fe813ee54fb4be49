"""Where ranks run: what the system's files say of a node, the table, its warnings, and ranks that bind themselves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_world import ThreadWorld, on_threads
from local_slurm import LocalSlurm

from tlt_hpc.cluster import caches, placement
from tlt_hpc.cluster.network import ChosenNetwork, parse_log, read_log, refuse_network, start_log, warning_of
from tlt_hpc.cluster.placement import Seat, kinds_of, may_bind, read_seat, share_cores, warnings_of
from tlt_hpc.cluster.topology import ROOT, System, format_cores, own_gpu, parse_cores
from tlt_hpc.config import UserError
from tlt_hpc.mpi import placing
from tlt_hpc.rl.distributed import name_network


@dataclass
class FakeNode:
    """Files of a node below a folder, as the kernel and the drivers write them."""

    root: Path
    numa: Mapping[int, str]
    """NUMA node -> its list of cores."""
    threads: int = 0
    """How far a core's second hardware thread is from it; 0: there are none."""
    system: System = field(init=False)

    def __post_init__(self) -> None:
        self.system = System(self.root)
        for node, cores in self.numa.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", f"{cores}\n")
        cores = sorted(core for text in self.numa.values() for core in parse_cores(text))
        self.write("sys/devices/system/cpu/online", f"{format_cores(cores)}\n")
        for core in cores if self.threads else ():
            first = core % self.threads
            self.write(
                f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{first},{first + self.threads}\n"
            )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def pci(self, address: str, numa: int, bridges: str) -> Path:
        """A device on the bus; ``bridges``: what stands above it."""
        folder = self.root / "sys/devices" / bridges / address
        self.write(f"sys/devices/{bridges}/{address}/numa_node", f"{numa}\n")
        link = self.root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def nvidia(self, minor: int, address: str, numa: int, bridges: str, allowed: bool = True) -> None:
        self.pci(address, numa, bridges)
        self.write(
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 150\nGPU UUID: \t GPU-{minor:08x}-1a2b\n"
            f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}\n",
        )
        if allowed:
            self.write(f"dev/nvidia{minor}", "")

    def amd(self, address: str, numa: int, bridges: str) -> None:
        link = self.root / "sys/bus/pci/drivers/amdgpu" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.pci(address, numa, bridges))

    def card(self, kind: str, name: str, address: str, numa: int, bridges: str, state: str = "") -> None:
        folder = self.root / "sys/class" / kind / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(self.pci(address, numa, bridges))
        if state:
            self.write(f"sys/class/{kind}/{name}/ports/1/state", f"{state}\n")


def hgx(root: Path) -> FakeNode:
    """Two processors of 16 cores with two threads each, four GPUs on each, and a card beside each GPU."""
    node = FakeNode(root, {0: "0-15,32-47", 1: "16-31,48-63"}, threads=32)
    for place in range(8):
        numa, switch = place // 4, f"pci0000:{place + 1}0/0000:{place + 1}0:01.0"
        node.nvidia(place, f"0000:{place + 1}b:00.0", numa, switch)
        node.card("infiniband", f"mlx5_{place}", f"0000:{place + 1}c:00.0", numa, switch, "4: ACTIVE")
    node.card("infiniband", "mlx5_8", "0000:ee:00.0", 0, "pci0000:e0", "1: DOWN")
    return node


def lumi(root: Path) -> FakeNode:
    """Four NUMA nodes of 16 cores; the GPUs 0 and 1 are on node 3, 2 and 3 on 1, 4 and 5 on 0, 6 and 7 on 2."""
    node = FakeNode(root, {number: f"{16 * number}-{16 * number + 15}" for number in range(4)})
    for place, numa in enumerate((3, 1, 0, 2)):
        for address in (f"0000:{0xC1 + 8 * place:x}:00.0", f"0000:{0xC6 + 8 * place:x}:00.0"):
            node.amd(address, numa, f"pci0000:{0xC0 + 8 * place:x}")
        node.card("net", f"hsn{place}", f"0000:{0xC2 + 8 * place:x}:00.0", numa, f"pci0000:{0xC0 + 8 * place:x}")
    return node


def seats_on(
    node: FakeNode, cores: Sequence[str], monkeypatch: pytest.MonkeyPatch, threads: int = 1, host: str = "n1"
) -> list[Seat]:
    """What ranks of a node read that may run on these cores, one GPU each."""
    found = []
    for rank, text in enumerate(cores):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, text=text: parse_cores(text))
        environment = {"CUDA_VISIBLE_DEVICES": str(rank), "OMP_NUM_THREADS": str(threads)}
        found.append(read_seat(node.system, environment, host, True))
    shares = share_cores(found, node.system.numa_cores(), node.system.siblings)
    return [replace(seat, best=best) for seat, best in zip(found, shares, strict=True)] if shares else found


# --- what the files say ---


def test_lists_of_cores_are_read_and_written() -> None:
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11} and format_cores({11, 10, 8, 2, 1, 0}) == "0-2,8,10-11"
    assert parse_cores("") == parse_cores("none") == parse_cores("1-2-3") == frozenset() and format_cores(()) == ""


def test_a_rank_s_gpu_is_the_one_that_its_number_or_id_names(tmp_path: Path) -> None:
    system = hgx(tmp_path).system
    gpus = system.gpus()
    assert [card.name for card in system.cards()] == [f"mlx5_{place}" for place in range(8)], "one that is down is none"
    named = {
        "3": 3,
        "GPU-00000005-1a2b": 5,
        "GPU-00000006": 6,
        "MIG-1234": None,
        "9": None,
        "": None,
        "NoDevFiles": None,
    }
    for text, number in named.items():
        own = own_gpu(gpus, {"CUDA_VISIBLE_DEVICES": text})
        assert (own and own.name) == (None if number is None else f"0000:{number + 1}b:00.0"), text
    assert own_gpu(gpus, {"ROCR_VISIBLE_DEVICES": "2"}) == gpus[2] and own_gpu(gpus, {}) is None
    assert own_gpu(gpus, {"ROCR_VISIBLE_DEVICES": "2,3"}) is None, "which of them is not said"


def test_numbers_of_gpus_count_those_that_the_job_may_open(tmp_path: Path) -> None:
    """Slurm counts a job's devices from 0 where it keeps others from it, and the driver lists all the same."""
    node = FakeNode(tmp_path, {0: "0-3", 1: "4-7"})
    for minor in range(4):
        node.nvidia(minor, f"0000:{minor}a:00.0", minor // 2, f"pci0000:{minor}0", allowed=minor > 1)
    assert own_gpu(node.system.gpus(), {"CUDA_VISIBLE_DEVICES": "0"}).name == "0000:2a:00.0"  # type: ignore[union-attr]


def test_cores_that_belong_to_their_gpus_give_a_table_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = [f"{4 * rank}-{4 * rank + 3},{32 + 4 * rank}-{35 + 4 * rank}" for rank in range(8)]
    (kind,) = kinds_of(seats_on(hgx(tmp_path), cores, monkeypatch, threads=8))
    assert warnings_of(kind) == []
    assert kind.table()[:3] + kind.table()[-1:] == [
        "ranks on n1:",
        "  rank  GPU           cores        NUMA  GPU's  network card",
        "  0     0000:1b:00.0  0-3,32-35    0     0      mlx5_0",
        "  7     0000:8b:00.0  28-31,60-63  1     1      mlx5_7",
    ]
    assert kind.seats[4].best == parse_cores(cores[4]), "the share has both threads of each core"


def test_lumi_s_gpus_are_found_far_from_consecutive_cores_and_the_masks_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = lumi(tmp_path)
    consecutive = [f"{8 * rank + 1}-{8 * rank + 7}" for rank in range(8)]
    (kind,) = kinds_of(seats_on(node, consecutive, monkeypatch))
    (line,) = warnings_of(kind)
    assert line.startswith("ranks 0-1,4-7 on n1: no core is near the GPU; export TLT_CPU_BIND=mask_cpu:0x")
    masks = [int(mask, 16) for mask in line.partition("mask_cpu:")[2].split()[0].split(",")]
    remedy = [format_cores(core for core in range(64) if mask >> core & 1) for mask in masks]
    assert remedy == ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]
    (kind,) = kinds_of(seats_on(node, remedy, monkeypatch))
    assert warnings_of(kind) == []
    assert [row.split()[-2:] for row in kind.table()[2::2]] == [
        ["3", "hsn0"],
        ["1", "hsn1"],
        ["0", "hsn2"],
        ["2", "hsn3"],
    ]


def test_without_whole_nodes_no_masks_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kind,) = kinds_of(seats_on(lumi(tmp_path), ["0-3", "4-7"], monkeypatch))
    assert "no core is near the GPU; ask for whole nodes" in warnings_of(kind)[0]


@pytest.mark.parametrize(
    ("cores", "threads", "said"),
    [
        (["0", "0"], 1, ["all 2 ranks on n1 run on core 0 of 64"]),
        (["0-7", "4-15"], 1, ["ranks 0-1 on n1 share cores"]),
        (["0-15,32-47", "0-15,32-47"], 20, ["ranks 0-1 on n1 share cores"]),
        (["0-15,32-47", "0-15,32-47"], 16, []),
        (["0-7", "8-23"], 1, ["rank 1 on n1: cores are of several NUMA nodes"]),
        (["0-3", "4-7"], 8, ["ranks 0-1 on n1 may use 4 cores for 8 threads"]),
        (["0-63"], 1, []),  # a rank alone has the whole node
    ],
)
def test_each_mistake_is_named(
    cores: list[str], threads: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind,) = kinds_of(seats_on(hgx(tmp_path), cores, monkeypatch, threads))
    found = warnings_of(kind)
    assert [line[: len(start)] for line, start in zip(found, said, strict=True)] == said


@pytest.mark.parametrize(
    ("cores", "threads", "said"),
    [
        (["0-7", "8-15"], 1, "ranks 0-1 on n1: the optimiser (optimizer.offload) uses 1 thread on 8 cores; "),
        (["0-7,32-39", "8-15,40-47"], 8, ""),  # both threads of each of eight cores
        (["0-31", "0-31"], 4, "ranks 0-1 on n1: the optimiser (optimizer.offload) uses 4 threads on 16 cores; "),
        (["0-7", "8-15"], 8, ""),
    ],
)
def test_cores_that_an_offloaded_optimiser_leaves_idle_are_named(
    cores: list[str], threads: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind,) = kinds_of(seats_on(hgx(tmp_path), cores, monkeypatch, threads))
    without, found = warnings_of(kind), warnings_of(kind, offloads=True)
    assert [line.partition("set ")[0] for line in found] == [
        *(line.partition("set ")[0] for line in without), *([said] if said else [])
    ]  # fmt: skip
    number = said.split()[-2] if said else ""
    remedy = f"; set OMP_NUM_THREADS={number} (TLT_THREADS={number} with sbatch/env.sh)"
    assert not said or found[-1].endswith(remedy)


def test_a_laptop_has_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (FakeNode(tmp_path / "laptop", {0: "0-7"}), FakeNode(tmp_path / "nothing", {})):
        seats = seats_on(node, ["0-7", "0-7"], monkeypatch)
        assert not may_bind(seats, [seat.best for seat in seats]) and not seats[0].gpu
        assert warnings_of(kinds_of(seats)[0]) == []


def test_one_numa_node_is_near_to_a_gpu_that_does_not_say_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(tmp_path, {0: "0-7"})
    for minor in range(2):
        node.nvidia(minor, f"0000:0{minor}:00.0", -1, "pci0000:00")
    seats = seats_on(node, ["0-7", "0-7"], monkeypatch, threads=4)
    assert [format_cores(seat.best) for seat in seats] == ["0-3", "4-7"]
    assert may_bind(seats, [seat.best for seat in seats]) and seats[0].gpu_numa == 0


def test_without_files_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(tmp_path, {})
    node.nvidia(0, "0000:01:00.0", 1, "pci0000:00")
    node.nvidia(1, "0000:02:00.0", 1, "pci0000:00")
    (kind,) = kinds_of(seats_on(node, ["0-3", "4-7"], monkeypatch))
    assert warnings_of(kind) == [] and kind.table()[2] == "  0     0000:01:00.0  0-3    -     1      -"


def test_nodes_that_are_alike_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, far = lumi(tmp_path), ["0-7", "8-15"]
    usual = [f"{48 + 8 * rank}-{55 + 8 * rank}" for rank in range(2)]
    seats = list[Seat]()
    for number in range(64):
        seats += seats_on(node, far if number == 9 else usual, monkeypatch, host=f"n{number}")
    kinds = kinds_of(seats)
    assert [kind.name for kind in kinds] == ["n0 and 62 nodes alike", "n9"] and kinds[1].ranks == (18, 19)
    assert [len(warnings_of(kind)) for kind in kinds] == [0, 1] and "ranks 18-19 on n9" in warnings_of(kinds[1])[0]


# --- ranks that bind themselves ---


def test_only_ranks_that_nobody_has_bound_bind_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = lumi(tmp_path)
    for cores, threads, expected in (
        (["0-63"] * 8, 8, True),
        (["0-63"] * 8, 9, False),  # the share has too few cores
        (["0-63"], 1, False),
        (["0-31", "32-63"], 1, False),
    ):
        seats = seats_on(node, cores, monkeypatch, threads)
        assert may_bind(seats, [seat.best for seat in seats]) is expected, (cores, threads)


class Ranks(ThreadWorld):
    """Ranks of one node."""

    def __init__(self, rank: int, size: int, *shared: Any) -> None:
        super().__init__(rank, size, *shared)
        self.hostname, self.local_rank, self.placement = "n1", rank, ()
        self.said: list[str] = []

    def say(self, words: str) -> None:
        self.said += [words] * (self.rank == 0)


@pytest.mark.parametrize("bind", ["cores", "none"])
def test_a_start_binds_its_ranks_and_shows_them(
    bind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lumi(tmp_path)
    bound: dict[int, str] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: parse_cores("0-63"))
    monkeypatch.setattr(
        placing.os, "sched_setaffinity", lambda _, cores: bound.update({min(cores): format_cores(cores)})
    )
    monkeypatch.setattr("fake_world.ThreadWorld", Ranks)
    for name, value in ((ROOT, str(tmp_path)), (placement.CPU_BIND, bind), ("OMP_NUM_THREADS", "7")):
        monkeypatch.setenv(name, value)
    seen = placing.read_seat

    def read(system: System, environment: Mapping[str, str], *rest: Any) -> Seat:
        return seen(system, {**environment, "ROCR_VISIBLE_DEVICES": own.number}, *rest)

    monkeypatch.setattr(placing, "read_seat", read)
    own = threading.local()

    def place(world: Ranks) -> Ranks:
        own.number = str(world.rank)
        placing.place_ranks(world, True)  # type: ignore[arg-type]
        return world

    worlds = on_threads(8, place)
    shares = ["48-55", "56-63", "16-23", "24-31", "0-7", "8-15", "32-39", "40-47"]
    if bind == "none":
        assert bound == {}
        assert "ranks 0-7 on n1: cores are of several NUMA nodes; export TLT_CPU_BIND=mask_cpu:0xff0" in caplog.text
        return
    assert sorted(bound.values()) == sorted(shares)
    assert [row.split()[2] for row in worlds[0].said[0].splitlines()[2:]] == shares
    assert worlds[0].placement[0] == "ranks on n1, each bound by itself to cores near its GPU:" and not caplog.text
    assert {world.placement for world in worlds[1:]} == {()}


def test_ranks_without_a_gpu_on_one_node_print_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lumi(tmp_path)
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setattr("fake_world.ThreadWorld", Ranks)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("a rank without a GPU binds itself"))

    def place(world: Ranks) -> list[str]:
        placing.place_ranks(world, False)  # type: ignore[arg-type]
        return world.said

    assert on_threads(2, place) == [[], []]


# --- the network ---

IB_LOG = """\
hostA:12345:12345 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
hostA:12345:12345 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
hostA:12345:12345 [0] NCCL INFO Using network IB
hostA:12345:12345 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
SOCKET_LOG = """\
n0:152:386 [0] NCCL INFO NET/IB : No device found.
n0:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
n0:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0> [1]eth1:fe80::1%eth1<0>
n0:152:386 [0] NCCL INFO Initialized NET plugin Socket
n0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
n0:152:386 [0] NCCL INFO Using network Socket
"""
OLD_OFI_LOG = """\
x3005:2125:2125 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v6)
x3005:2125:2125 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 2 nics)
x3005:2125:2125 [0] NCCL INFO Using network AWS Libfabric
"""
NEW_OFI_LOG = """\
nid1:70:71 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
nid1:70:71 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
nid1:70:71 [0] NCCL INFO Using network Libfabric
"""
EFA_LOG = "a:1:1 [0] NCCL INFO NET/OFI Selected Provider is efa\na:1:1 [0] NCCL INFO Using network AWS Libfabric\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (IB_LOG, "IB (mlx5_0, mlx5_1)"),
        (SOCKET_LOG, "Socket (eth0, eth1)"),
        (OLD_OFI_LOG, "AWS Libfabric (2 x cxi)"),
        (NEW_OFI_LOG, "Libfabric (4 x cxi)"),
        (EFA_LOG, "AWS Libfabric (1 x efa)"),
        ("", "unknown"),
    ],
)
def test_the_network_is_read_from_nccl_s_log(log: str, words: str) -> None:
    assert parse_log(log).words == words


def test_a_required_network_is_named_by_how_it_begins() -> None:
    ib, ofi, slow = ChosenNetwork("IBext_v8"), ChosenNetwork("AWS Libfabric"), ChosenNetwork("Socket", ("eth0",))
    assert (
        ib.fits("IB")
        and ib.fits("ib")
        and ofi.fits("OFI")
        and ofi.fits("AWS")
        and ChosenNetwork("Libfabric").fits("OFI")
    )
    assert not (slow.fits("IB") or ib.fits("OFI") or ChosenNetwork("").fits("IB"))
    assert refuse_network({"n1": ib, "n2": ib}, "IB") == refuse_network({"n1": slow}, "") == ""
    line = refuse_network({"n1": ib, "n2": slow, "n3": slow}, "IB")
    assert line.startswith("NCCL chose the network Socket (eth0) on n2 and 1 node more, and TLT_NETWORK requires IB; ")


def test_a_slow_network_is_a_warning() -> None:
    slow, ib = ChosenNetwork("Socket", ("eth0",)), ChosenNetwork("IB")
    assert warning_of({"n1": ib}, ["mlx5_0"]) == warning_of({"n1": slow}, []) == ""
    assert "by sockets, though there are hsn0, hsn1" in warning_of({"n1": slow}, ["hsn0", "hsn1"])
    assert "Socket (eth0) on n2, where most nodes have IB" in warning_of({"n1": ib, "n2": slow, "n3": ib}, [])


def test_nccl_s_log_is_the_run_s_own_and_goes(tmp_path: Path) -> None:
    environment = {caches.FOLDER: str(tmp_path), "TLT_NETWORK": "IB"}
    path = start_log(environment)
    assert path is not None and path.parent == tmp_path and environment["NCCL_DEBUG_FILE"] == str(path)
    assert environment["NCCL_DEBUG"] == "INFO" and environment["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    path.write_text(IB_LOG)
    assert read_log(path, environment).name == "IB"
    assert list(tmp_path.iterdir()) == [] and environment == {caches.FOLDER: str(tmp_path), "TLT_NETWORK": "IB"}


def test_a_log_of_the_user_s_is_left_to_him() -> None:
    own = {"NCCL_DEBUG": "WARN", "TLT_NETWORK": ""}
    assert start_log(own) is None and own == {"NCCL_DEBUG": "WARN", "TLT_NETWORK": ""}
    with pytest.raises(UserError, match="TLT_NETWORK=IB cannot be checked where NCCL_DEBUG is set"):
        start_log({"NCCL_DEBUG": "WARN", "TLT_NETWORK": "IB"})


@pytest.mark.parametrize("required", ["", "IB"])
def test_ranks_say_the_network_once_or_end_together(
    required: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lumi(tmp_path)
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv("TLT_NETWORK", required)
    monkeypatch.setattr("fake_world.ThreadWorld", Ranks)

    def meet(world: Ranks) -> list[str]:
        world.hostname = f"n{world.rank // 2}"
        log = tmp_path / f"{world.rank}"
        if world.rank % 2 == 0:
            log.write_text(SOCKET_LOG)
        name_network(world, None if world.rank % 2 else log)  # type: ignore[arg-type]
        return world.said

    found = on_threads(4, meet)
    if required:
        assert {str(error) for error in found} == {
            refuse_network({f"n{n}": parse_log(SOCKET_LOG) for n in (0, 1)}, "IB")
        }
    else:
        assert found == [["network     Socket (eth0, eth1)"], [], [], []]
        assert [record.getMessage()[:72] for record in caplog.records] == [
            "NCCL communicates by sockets, though there are hsn0, hsn1, hsn2, hsn3: t"
        ]


# --- caches in memory ---


def test_caches_that_take_memory_are_named(tmp_path: Path) -> None:
    node = FakeNode(tmp_path / "root", {})
    cache = tmp_path / "disk" / "tlt-me-7-0"
    cache.mkdir(parents=True)
    environment = {ROOT: str(node.root), caches.FOLDER: str(cache)}
    node.write("proc/mounts", f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/disk tmpfs rw 0 0\n")
    line = caches.in_memory(environment)
    assert line.startswith(f"caches in {cache} take memory: {tmp_path}/disk on ") and " GB free; " in line
    assert caches.in_memory({ROOT: str(node.root)}) == ""
    node.write("proc/mounts", f"/dev/nvme0 {tmp_path}/disk xfs rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert caches.in_memory(environment) == caches.in_memory({**environment, ROOT: str(tmp_path / "none")}) == ""
    node.write("proc/mounts", f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/my\\040disk tmpfs rw 0 0\n")
    found = node.system.mount(tmp_path / "my disk" / "x")
    assert (found.point, found.kind) == (f"{tmp_path}/my disk", "tmpfs"), "as the kernel writes it"


# --- a real Slurm ---

START = """
import os
from tlt_hpc.cluster.device import take_device
from tlt_hpc.mpi.placing import place_ranks
from tlt_hpc.mpi.world import World
take_device(os.environ, 0)
place_ranks(World.connect(), True)
"""


@pytest.mark.slurm
@pytest.mark.mpi
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("is_bound", [True, False])
def test_under_slurm_each_rank_shows_its_own_cores(is_bound: bool, slurm: LocalSlurm, tmp_path: Path) -> None:
    """Two ranks, the GPU of each near the other's core if they are bound; else each binds itself to the near one."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    node = FakeNode(tmp_path, {0: str(first), 1: str(second)})
    node.nvidia(0, "0000:1b:00.0", 1, "pci0000:10")
    node.nvidia(1, "0000:9b:00.0", 0, "pci0000:90")
    cores = f"$(( SLURM_LOCALID ? {second} : {first} ))" if is_bound else f"{first},{second}"
    options = ("--mpi=pmi2", "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--mem=1000")
    start = ("bash", "-c", f'exec taskset -c {cores} python -m mpi4py -c "$START"')
    head, _, *rows = slurm.run("srun", *options, *start, START=START, TLT_SYSTEM_ROOT=str(tmp_path)).splitlines()
    by_itself = "" if is_bound else ", each bound by itself to cores near its GPU"
    assert head.strip() == f"ranks on {socket.gethostname()}{by_itself}:"
    seen = [(first, "0"), (second, "1")] if is_bound else [(second, "1"), (first, "0")]
    assert [row.split() for row in rows] == [
        ["0", "0000:1b:00.0", str(seen[0][0]), seen[0][1], "1", "-"],
        ["1", "0000:9b:00.0", str(seen[1][0]), seen[1][1], "0", "-"],
    ]
