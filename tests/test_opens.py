"""At start and on resume no file is opened by all ranks: one of each node reads it, and the others are given it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import launch_ranks
import pytest
import torch
from launch_ranks import LAUNCH_ENVIRONMENT, ROOT, mpiexec, run_on_ranks
from tiny import embedded_folder

from tlt_hpc.cli import main as cli
from tlt_hpc.cli.display import Screen, StepReporter
from tlt_hpc.cluster.launcher import job_text_from_launcher, launch_environment, launched_rank
from tlt_hpc.cluster.stopping import StopFlag
from tlt_hpc.config import load_config
from tlt_hpc.models import piece
from tlt_hpc.models.piece import read_and_broadcast_all, read_and_broadcast_each
from tlt_hpc.models.tokenizer import package_asset_folder
from tlt_hpc.mpi import world as world_module
from tlt_hpc.rl import distributed
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.train import run_training

OPENED = re.compile(r'open(?:at)?\(.*?"([^"]+)", (\S+?)[,)].*= \d+$')
needs_strace = pytest.mark.skipif(
    not shutil.which("strace"), reason="no strace on PATH; install it (Debian: apt install strace)"
)
THREAD = re.compile(r"^clone.*CLONE_THREAD.*= (\d+)$")


def start_and_go_on(job: str, overrides: list[str]) -> str:
    """A run of one step, and another start that takes it up for a second."""
    options = cli.parse(["train", job, *overrides])
    config = load_config(job, overrides, job_text_from_launcher(os.environ, job))
    world = cli.connect_all_ranks(config, options, StopFlag())
    for num_steps in (1, 2):
        steps = config.run.model_copy(update={"num_steps": num_steps})
        result = run_training(config.model_copy(update={"run": steps}), world, StepReporter(Screen(False)))
    leave_process_group()
    return result.policy_sha256


def openers_of(traces: Path, below: Path) -> dict[str, set[int]]:
    """The processes that have opened each file below a folder to read it."""
    lines = {int(file.suffix[1:]): file.read_text(errors="replace").splitlines() for file in traces.iterdir()}
    started = ((int(found[1]), task) for task in lines for line in lines[task] if (found := THREAD.match(line)))
    owner = dict(started)
    found = defaultdict(set)
    for task, opens in lines.items():
        process = task
        while process in owner:
            process = owner[process]
        for path, flags in (match.groups() for line in opens if (match := OPENED.search(line))):
            if Path(path).is_relative_to(below) and "WR" not in flags and Path(path).suffix:  # no folders
                found[str(Path(path).relative_to(below))].add(process)
    return found


def place_of_files(tmp_path: Path) -> tuple[Path, list[str]]:
    """A job's file, and overrides that have a small run read all in the folder ``read``."""
    job, place = tmp_path / "job.toml", tmp_path / "read"
    shutil.copytree(embedded_folder(), place / "model")
    shutil.copytree(package_asset_folder("tiny_drafter"), place / "drafter")
    (place / "data.jsonl").write_text("".join(f'{{"prompt": "gcd({2 * n},4)=", "answer": "2"}}\n' for n in range(20)))
    shutil.copy(ROOT / "jobs" / "tiny.toml", job)
    overrides = [f"run.folder={tmp_path / 'runs'}", f"model.path={place / 'model'}"]
    overrides += [f"drafter.init={place / 'drafter'}", f"data.source={place / 'data.jsonl'}"]
    return job, [*overrides, "rollout.prompts_per_step=4", "rollout.max_new_tokens=32", "checkpoint.every_steps=1"]


@needs_strace
@pytest.mark.mpi
@pytest.mark.ci
def test_each_file_is_opened_by_one_rank_of_the_node(tmp_path: Path) -> None:
    num_ranks = 2
    job, overrides = place_of_files(tmp_path)
    traces, home, results = (tmp_path / name for name in ("traces", "home", "results"))
    for folder in (traces, home, results):
        folder.mkdir()
    trace = ["strace", "-f", "-ff", "-qq", "--seccomp-bpf", "-e", "trace=open,openat,clone,clone3"]
    ranks = ["-o", str(traces / "rank"), mpiexec(), "-n", str(num_ranks), sys.executable, "-m", "mpi4py"]
    given = json.dumps([str(job), overrides])
    program = [launch_ranks.__file__, __file__, "start_and_go_on", given, str(results)]
    # a home of its own: files below the user's would not be seen
    own = {name: value for name, value in os.environ.items() if name not in ("TLT_CACHE", "XDG_CACHE_HOME")}
    environment = launch_environment(num_ranks, {**own, **LAUNCH_ENVIRONMENT, "HOME": str(home)}, str(job))
    done = subprocess.run(
        [*trace, *ranks, *program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    readers = {path: len(processes) for path, processes in openers_of(traces, tmp_path).items()}
    read = {path: count for path, count in readers.items() if not path.startswith(("runs/tiny/cache", "results"))}
    files = ("model/model.safetensors", "model/tokenizer.json", "drafter/drafter.safetensors", "data.jsonl")
    assert {f"read/{file}" for file in files} <= set(read)
    assert sum("checkpoints/step-000001/policy" in path for path in read) == num_ranks
    assert {path: count for path, count in read.items() if count > 1} == {}
    assert "job.toml" not in read, "the launching process has read it"


# --- the node's ranks ---

HOSTS = ("localhost", "localhost", "elsewhere")
"""Of three ranks; nobody can look up the second name."""


def meet_as_nodes() -> dict[str, Any]:
    """Where a rank is, what its store and its reads were, and whether tensors of any kind arrive as they are."""
    rank = launched_rank(os.environ) or 0
    world_module.socket.gethostname = lambda: HOSTS[rank]
    served, calls, opened = list[str](), list[int](), distributed.TCPStore
    distributed.TCPStore = lambda host, *rest, **named: served.append(host) or opened(host, *rest, **named)
    world = world_module.World.connect()
    distributed.join_process_group(world, "cpu")
    total = torch.full((1,), float(rank + 1))
    torch.distributed.all_reduce(total)
    leave_process_group()
    node = world.node_group
    given = node.run_first_and_broadcast(lambda: calls.append(rank) or rank)

    def fail() -> None:
        raise ValueError(f"rank {rank} lacks it")

    with pytest.raises(ValueError, match="lacks it") as caught:
        node.run_first_and_broadcast(fail)
    place = [world.node, world.local_rank]
    return {
        "place": place, "total": total.item(), "store": served, "calls": calls, "given": given,
        "error": str(caught.value), "tensors": list(tensors_of(node)),
    }  # fmt: skip


def tensors_of(node: world_module.NodeGroup) -> set[bool]:
    """Of tensors that are sent each alone, some together, and all together: whether each is the one sent."""
    tensors = {
        "bf16": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 3),
    }
    own = tensors if node.rank == 0 else {}
    assert read_and_broadcast_all(node, lambda: None) is None
    equal = set[bool]()
    for piece.BLOCK_BYTES in (1, 30, 2**24):
        for given in (
            dict(read_and_broadcast_each(node, tensors, own.__getitem__)),
            read_and_broadcast_all(node, lambda: own),
        ):
            assert given is not None and list(given) == list(tensors)
            for name, each in tensors.items():
                equal.add(given[name].dtype == each.dtype and torch.equal(given[name], each))
    return equal


@pytest.mark.mpi
def test_ranks_on_two_hosts_find_each_other_and_the_first_of_each_reads() -> None:
    ranks = run_on_ranks(3, meet_as_nodes)
    assert [rank["place"] for rank in ranks] == [[0, 0], [0, 1], [1, 0]]
    for rank, found in enumerate(ranks):
        first = 2 * (rank // 2)
        assert found["total"] == 6 and found["tensors"] == [True]
        assert set(found["store"]) == {"localhost"}, "by name: the loopback is each host's own"
        assert found["calls"] == ([rank] if rank == first else []) and found["given"] == first
        assert found["error"] == f"rank {first} lacks it"
