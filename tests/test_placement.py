"""Where ranks run: what the system's files say of a node, the table, its warnings, and ranks that bind themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_world import ThreadWorld, on_threads

from tlt_hpc.cluster import caches, placement
from tlt_hpc.cluster.network import (
    ChosenNetwork,
    enable_nccl_log,
    parse_log,
    read_and_remove_nccl_log,
    slow_network_warning,
)
from tlt_hpc.cluster.placement import Seat, group_equal_nodes, may_bind, read_seat, share_cores, warnings_of
from tlt_hpc.cluster.topology import ROOT, System, format_cores, own_gpu, parse_cores
from tlt_hpc.mpi import placing
from tlt_hpc.rl.distributed import gather_and_print_network


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
            self.write(f"sys/devices/system/node/node{node}/cpulist", cores)
        cores = sorted(core for text in self.numa.values() for core in parse_cores(text))
        self.write("sys/devices/system/cpu/online", format_cores(cores))
        for core in cores if self.threads else ():
            threads = f"{core % self.threads},{core % self.threads + self.threads}"
            self.write(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", threads)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def link(self, path: str, address: str, numa: int, bridges: str) -> None:
        """A device on the bus, and the link to it; ``bridges``: what stands above it."""
        self.write(f"sys/devices/{bridges}/{address}/numa_node", str(numa))
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(self.root / "sys/devices" / bridges / address)

    def nvidia(self, minor: int, address: str, numa: int, bridges: str, allowed: bool = True) -> None:
        self.link(f"sys/bus/pci/devices/{address}", address, numa, bridges)
        self.write(
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 150\nGPU UUID: \t GPU-{minor:08x}-1a2b\n"
            f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}",
        )
        if allowed:
            self.write(f"dev/nvidia{minor}", "")

    def card(self, kind: str, address: str, numa: int, bridges: str, state: str = "") -> None:
        """A network card; ``kind`` ends with its name."""
        self.link(f"sys/class/{kind}/device", address, numa, bridges)
        if state:
            self.write(f"sys/class/{kind}/ports/1/state", state)


def hgx(root: Path) -> FakeNode:
    """Two processors of 16 cores with two threads each, four GPUs on each, and a card beside each GPU."""
    node = FakeNode(root, {0: "0-15,32-47", 1: "16-31,48-63"}, threads=32)
    for place in range(8):
        numa, switch = place // 4, f"pci0000:{place + 1}0/0000:{place + 1}0:01.0"
        node.nvidia(place, f"0000:{place + 1}b:00.0", numa, switch)
        node.card(f"infiniband/mlx5_{place}", f"0000:{place + 1}c:00.0", numa, switch, "4: ACTIVE")
    node.card("infiniband/mlx5_8", "0000:ee:00.0", 0, "pci0000:e0", "1: DOWN")
    return node


def lumi(root: Path) -> FakeNode:
    """Four NUMA nodes of 16 cores; the GPUs 0 and 1 are on node 3, 2 and 3 on 1, 4 and 5 on 0, 6 and 7 on 2."""
    node = FakeNode(root, {number: f"{16 * number}-{16 * number + 15}" for number in range(4)})
    for place, numa in enumerate((3, 1, 0, 2)):
        bus = f"pci0000:{0xC0 + 8 * place:x}"
        for address in (f"0000:{0xC1 + 8 * place:x}:00.0", f"0000:{0xC6 + 8 * place:x}:00.0"):
            node.link(f"sys/bus/pci/drivers/amdgpu/{address}", address, numa, bus)
        node.card(f"net/hsn{place}", f"0000:{0xC2 + 8 * place:x}:00.0", numa, bus)
    return node


@pytest.fixture
def seats_on(monkeypatch):
    """What ranks of a node read that may run on these cores, one GPU each."""

    def read(node: FakeNode, cores: Sequence[str], threads: int = 1, host: str = "n1") -> list[Seat]:
        found = []
        for rank, text in enumerate(cores):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, text=text: parse_cores(text))
            environment = {"CUDA_VISIBLE_DEVICES": str(rank), "OMP_NUM_THREADS": str(threads)}
            found.append(read_seat(node.system, environment, host, True))
        shares = share_cores(found, node.system.numa_cores(), node.system.hardware_threads_of_core)
        return [replace(seat, best=best) for seat, best in zip(found, shares, strict=True)] if shares else found

    return read


# --- what the files say ---


def test_lists_of_cores_are_read_and_written():
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11} and format_cores({11, 10, 8, 2, 1, 0}) == "0-2,8,10-11"
    assert parse_cores("") == parse_cores("none") == parse_cores("1-2-3") == frozenset() and format_cores(()) == ""


def test_a_rank_s_gpu_is_the_one_that_its_number_or_id_names(tmp_path):
    system = hgx(tmp_path).system
    gpus = system.gpus()
    assert [card.name for card in system.network_cards()] == [f"mlx5_{place}" for place in range(8)], (
        "one that is down is none"
    )
    for text, number in {"3": 3, "GPU-00000005-1a2b": 5, "GPU-00000006": 6}.items():
        assert own_gpu(gpus, {"CUDA_VISIBLE_DEVICES": text}).name == f"0000:{number + 1}b:00.0", text
    assert own_gpu(gpus, {"ROCR_VISIBLE_DEVICES": "2"}) == gpus[2] and own_gpu(gpus, {}) is None
    for text in ("MIG-1234", "9", "", "NoDevFiles", "2,3"):
        assert own_gpu(gpus, {"ROCR_VISIBLE_DEVICES": text}) is None, "which of them is not said"


def test_numbers_of_gpus_count_those_that_the_job_may_open(tmp_path):
    """Slurm counts a job's devices from 0 where it keeps others from it, and the driver lists all the same."""
    node = FakeNode(tmp_path, {0: "0-3", 1: "4-7"})
    for minor in range(4):
        node.nvidia(minor, f"0000:{minor}a:00.0", minor // 2, f"pci0000:{minor}0", allowed=minor > 1)
    assert own_gpu(node.system.gpus(), {"CUDA_VISIBLE_DEVICES": "0"}).name == "0000:2a:00.0"


def test_cores_that_belong_to_their_gpus_give_a_table_and_no_warning(tmp_path, seats_on):
    cores = [f"{4 * rank}-{4 * rank + 3},{32 + 4 * rank}-{35 + 4 * rank}" for rank in range(8)]
    (kind,) = group_equal_nodes(seats_on(hgx(tmp_path), cores, threads=8))
    assert warnings_of(kind) == []
    assert kind.table()[:3] + kind.table()[-1:] == [
        "ranks on n1:",
        "  rank  GPU           cores        NUMA  GPU's  network card",
        "  0     0000:1b:00.0  0-3,32-35    0     0      mlx5_0",
        "  7     0000:8b:00.0  28-31,60-63  1     1      mlx5_7",
    ]
    assert kind.seats[4].best == parse_cores(cores[4]), "the share has both threads of each core"


def test_lumi_s_gpus_are_found_far_from_consecutive_cores_and_the_masks_help(tmp_path, seats_on):
    node = lumi(tmp_path)
    (kind,) = group_equal_nodes(seats_on(node, [f"{8 * rank + 1}-{8 * rank + 7}" for rank in range(8)]))
    (line,) = warnings_of(kind)
    assert line.startswith("ranks 0-1,4-7 on n1: no core is near the GPU; export TLT_CPU_BIND=mask_cpu:0x")
    masks = [int(mask, 16) for mask in line.partition("mask_cpu:")[2].split()[0].split(",")]
    remedy = [format_cores(core for core in range(64) if mask >> core & 1) for mask in masks]
    assert remedy == ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]
    (kind,) = group_equal_nodes(seats_on(node, remedy))
    assert warnings_of(kind) == []
    assert [row.split()[-2:] for row in kind.table()[2::2]] == [[str(n), f"hsn{i}"] for i, n in enumerate((3, 1, 0, 2))]
    (kind,) = group_equal_nodes(seats_on(node, ["0-3", "4-7"]))
    assert "no core is near the GPU; ask for whole nodes" in warnings_of(kind)[0]


@pytest.mark.parametrize(
    ("cores", "threads", "said", "offloaded"),
    [
        (["0", "0"], 1, "all 2 ranks on n1 run on core 0 of 64", 0),
        (["0-7", "4-15"], 1, "ranks 0-1 on n1 share cores", 8),
        (["0-15,32-47", "0-15,32-47"], 20, "ranks 0-1 on n1 share cores", 0),
        (["0-15,32-47", "0-15,32-47"], 16, "", 0),
        (["0-7", "8-23"], 1, "rank 1 on n1: cores are of several NUMA nodes", 8),
        (["0-3", "4-7"], 8, "ranks 0-1 on n1 may use 4 cores for 8 threads", 0),
        (["0-63"], 32, "", 0),  # a rank alone has the whole node
        (["0-7", "8-15"], 1, "", 8),
        (["0-7,32-39", "8-15,40-47"], 8, "", 0),  # both threads of each of eight cores
        (["0-31", "0-31"], 4, "ranks 0-1 on n1: cores are of several NUMA nodes", 16),
    ],
)
def test_each_mistake_is_named(cores, threads, said, offloaded, tmp_path, seats_on):
    """``offloaded``: cores that the optimiser of an offloaded update leaves idle."""
    (kind,) = group_equal_nodes(seats_on(hgx(tmp_path), cores, threads))
    found = warnings_of(kind)
    assert [line[: len(said)] for line in found] == [said] * bool(said)
    more = warnings_of(kind, offloads=True)
    idle = f"ranks 0-1 on n1: the optimiser (optimizer.offload) uses {threads} thread{'s' * (threads > 1)} on "
    remedy = f"set OMP_NUM_THREADS={offloaded} (TLT_THREADS={offloaded} with sbatch/env.sh)"
    assert [line for line in more if "optimiser" in line] == [f"{idle}{offloaded} cores; {remedy}"] * bool(offloaded)


def test_where_little_is_known_little_is_said(tmp_path, seats_on):
    for node in (FakeNode(tmp_path / "laptop", {0: "0-7"}), FakeNode(tmp_path / "nothing", {})):
        seats = seats_on(node, ["0-7", "0-7"])
        assert not may_bind(seats, [seat.best for seat in seats]) and not seats[0].gpu
        assert warnings_of(group_equal_nodes(seats)[0]) == []
    node = FakeNode(tmp_path / "one", {0: "0-7"})  # is near to GPUs that do not say where they are
    for minor in range(2):
        node.nvidia(minor, f"0000:0{minor}:00.0", -1, "pci0000:00")
    seats = seats_on(node, ["0-7", "0-7"], threads=4)
    assert [format_cores(seat.best) for seat in seats] == ["0-3", "4-7"]
    assert may_bind(seats, [seat.best for seat in seats]) and seats[0].gpu_numa == 0
    node = FakeNode(tmp_path / "no files", {})
    for minor in (1, 2):
        node.nvidia(minor - 1, f"0000:0{minor}:00.0", 1, "pci0000:00")
    (kind,) = group_equal_nodes(seats_on(node, ["0-3", "4-7"]))
    assert warnings_of(kind) == [] and kind.table()[2] == "  0     0000:01:00.0  0-3    -     1      -"


def test_nodes_that_are_alike_are_shown_once(tmp_path, seats_on):
    node, usual, far = lumi(tmp_path), ["48-55", "56-63"], ["0-7", "8-15"]
    seats = [seat for n in range(64) for seat in seats_on(node, far if n == 9 else usual, host=f"n{n}")]
    kinds = group_equal_nodes(seats)
    assert [kind.name for kind in kinds] == ["n0 and 62 nodes alike", "n9"] and kinds[1].ranks == (18, 19)
    assert [len(warnings_of(kind)) for kind in kinds] == [0, 1] and "ranks 18-19 on n9" in warnings_of(kinds[1])[0]


# --- ranks that bind themselves ---


def test_only_ranks_that_nobody_has_bound_bind_themselves(tmp_path, seats_on):
    node = lumi(tmp_path)
    for cores, threads, expected in (
        (["0-63"] * 8, 8, True),
        (["0-63"] * 8, 9, False),  # the share has too few cores
        (["0-63"], 1, False),
        (["0-31", "32-63"], 1, False),
    ):
        seats = seats_on(node, cores, threads)
        assert may_bind(seats, [seat.best for seat in seats]) is expected, (cores, threads)


class Ranks(ThreadWorld):
    """Ranks of one node."""

    def __init__(self, rank: int, size: int, *shared: Any) -> None:
        super().__init__(rank, size, *shared)
        self.hostname, self.local_rank, self.placement = "n1", rank, ()
        self.said: list[str] = []

    def print_once(self, words: str) -> None:
        self.said += [words] * (self.rank == 0)


@pytest.fixture
def on_lumi(tmp_path, monkeypatch):
    lumi(tmp_path)
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setattr("fake_world.ThreadWorld", Ranks)


@pytest.mark.parametrize("bind", ["cores", "none"])
def test_a_start_binds_its_ranks_and_shows_them(bind, on_lumi, monkeypatch, caplog):
    bound: dict[int, str] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: parse_cores("0-63"))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.update({min(cores): format_cores(cores)}))
    monkeypatch.setenv(placement.CPU_BIND, bind)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    own = threading.local()

    def read(system, environment, *rest):
        return read_seat(system, {**environment, "ROCR_VISIBLE_DEVICES": own.number}, *rest)

    monkeypatch.setattr(placing, "read_seat", read)

    def place(world: Ranks) -> Ranks:
        own.number = str(world.rank)
        placing.place_ranks(world, True)
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


def test_ranks_without_a_gpu_on_one_node_print_nothing(on_lumi, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("a rank without a GPU binds itself"))

    def place(world: Ranks) -> list[str]:
        placing.place_ranks(world, False)
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
n0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
"""
OLD_OFI_LOG = """\
x3005:2125:2125 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 2 nics)
x3005:2125:2125 [0] NCCL INFO Using network AWS Libfabric
"""
NEW_OFI_LOG = """\
nid1:70:71 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
nid1:70:71 [0] NCCL INFO Using network Libfabric
"""
EFA_LOG = "a:1:1 [0] NCCL INFO NET/OFI Selected Provider is efa\na:1:1 [0] NCCL INFO Using network AWS Libfabric\n"
NETWORKS = {
    IB_LOG: "IB (mlx5_0, mlx5_1)", SOCKET_LOG: "Socket (eth0, eth1)", OLD_OFI_LOG: "AWS Libfabric (2 x cxi)",
    NEW_OFI_LOG: "Libfabric (4 x cxi)", EFA_LOG: "AWS Libfabric (1 x efa)", "": "unknown",
}  # fmt: skip
IB, SLOW = ChosenNetwork("IBext_v8"), ChosenNetwork("Socket", ("eth0",))


def test_the_network_is_read_from_nccl_s_log():
    assert {log: parse_log(log).description for log in NETWORKS} == NETWORKS


def test_a_slow_network_is_a_warning():
    assert slow_network_warning({"n1": IB}, ["mlx5_0"]) == slow_network_warning({"n1": SLOW}, []) == ""
    assert "by sockets, though there are hsn0, hsn1" in slow_network_warning({"n1": SLOW}, ["hsn0", "hsn1"])
    assert "Socket (eth0) on n2, where most nodes have IBext_v8" in slow_network_warning(
        {"n1": IB, "n2": SLOW, "n3": IB}, []
    )


def test_nccl_s_log_is_the_run_s_own_and_goes_and_one_of_the_user_s_is_left_to_him(tmp_path):
    environment = {caches.FOLDER: str(tmp_path)}
    path = enable_nccl_log(environment)
    assert path.parent == tmp_path and environment["NCCL_DEBUG_FILE"] == str(path)
    assert environment["NCCL_DEBUG"] == "INFO" and environment["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    path.write_text(IB_LOG)
    assert read_and_remove_nccl_log(path, environment).name == "IB"
    assert list(tmp_path.iterdir()) == [] and environment == {caches.FOLDER: str(tmp_path)}
    own = {"NCCL_DEBUG": "WARN"}
    assert enable_nccl_log(own) is None and own == {"NCCL_DEBUG": "WARN"}


def test_rank_0_says_the_network_once(on_lumi, tmp_path, caplog):
    def meet(world: Ranks) -> list[str]:
        world.hostname = f"n{world.rank // 2}"
        log = tmp_path / f"{world.rank}"
        if world.rank % 2 == 0:
            log.write_text(SOCKET_LOG)
        gather_and_print_network(world, None if world.rank % 2 else log)
        return world.said

    assert on_threads(4, meet) == [["network     Socket (eth0, eth1)"], [], [], []]
    (record,) = caplog.records
    assert record.getMessage().startswith("NCCL communicates by sockets, though there are hsn0, hsn1, hsn2, hsn3: ")


# --- caches in memory ---


def test_caches_that_take_memory_are_named(tmp_path):
    node = FakeNode(tmp_path / "root", {})
    cache = tmp_path / "disk" / "tlt-me-7-0"
    cache.mkdir(parents=True)
    environment = {ROOT: str(node.root), caches.FOLDER: str(cache)}
    node.write("proc/mounts", f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/disk tmpfs rw 0 0")
    line = caches.memory_cache_warning(environment)
    assert line.startswith(f"caches in {cache} take memory: {tmp_path}/disk on ") and " GB free; " in line
    assert caches.memory_cache_warning({ROOT: str(node.root)}) == ""
    node.write("proc/mounts", f"/dev/nvme0 {tmp_path}/disk xfs rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0")
    assert (
        caches.memory_cache_warning(environment)
        == caches.memory_cache_warning({**environment, ROOT: str(tmp_path / "none")})
        == ""
    )
    node.write("proc/mounts", f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/my\\040disk tmpfs rw 0 0")
    found = node.system.find_mount(tmp_path / "my disk" / "x")
    assert (found.point, found.kind) == (f"{tmp_path}/my disk", "tmpfs"), "as the kernel writes it"
