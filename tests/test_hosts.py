"""Ranks on hosts of different names, as on several nodes: each in a name space of its own, with names that resolve."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_on_ranks

NEW_MOUNTS, NEW_NAMES = 0x00020000, 0x04000000
RECURSIVE, PRIVATE, BIND = 0x4000, 0x40000, 0x1000
HOSTS = {"tlt-host-a": "127.0.0.2", "tlt-host-b": "127.0.0.3"}
RANKS = ("tlt-host-a", "tlt-host-a", "tlt-host-b")


def call(name: str, *arguments: Any) -> None:
    """A call of the system.

    Raises:
        OSError: it fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def move_to(host: str, hosts: Path) -> None:
    """Have this process see ``host`` as its host's name, and ``hosts`` as /etc/hosts, and no other process."""
    call("unshare", NEW_NAMES | NEW_MOUNTS)
    socket.sethostname(host)
    call("mount", b"none", b"/", None, ctypes.c_ulong(RECURSIVE | PRIVATE), None)
    call("mount", str(hosts).encode(), b"/etc/hosts", None, ctypes.c_ulong(BIND), None)


def meet(hosts: str) -> dict[str, Any]:
    from tlt_hpc.cluster.launcher import launched_rank

    host = RANKS[launched_rank(os.environ) or 0]
    move_to(host, Path(hosts))

    import torch

    from tlt_hpc.models.piece import read_all_once
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl import distributed

    served: list[str] = []
    opened, reads = distributed.TCPStore, []

    def spy(host: str, *arguments: Any, **options: Any) -> Any:
        served.append(host)
        return opened(host, *arguments, **options)

    distributed.TCPStore = spy  # type: ignore[misc,assignment]
    world = World.connect()
    distributed.join_process_group(world, "cpu")
    total = torch.full((1,), float(world.rank + 1))
    torch.distributed.all_reduce(total)
    read_all_once(world.node_group, lambda: reads.append(world.rank))
    place = [world.hostname, world.node, world.local_rank]
    distributed.leave_process_group()
    return {"place": place, "total": total.item(), "store": served, "reads": reads}


def may_rename() -> bool:
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode


pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not may_rename(), reason="a process may not have a host name of its own here: run as root"),
]


def test_ranks_on_two_hosts_find_each_other_and_read_once_a_host(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"  # stands for /etc/hosts
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS.items()))
    ranks = run_on_ranks(3, meet, str(hosts))
    places = [["tlt-host-a", 0, 0], ["tlt-host-a", 0, 1], ["tlt-host-b", 1, 0]]
    assert [rank["place"] for rank in ranks] == places
    assert [rank["total"] for rank in ranks] == [6.0] * 3
    assert {tuple(rank["store"]) for rank in ranks} == {("tlt-host-a",)}, "by name: the loopback is each host's own"
    assert [rank["reads"] for rank in ranks] == [[0], [], [2]]
