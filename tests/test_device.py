"""One GPU for each rank of a node, as the launcher names them; and the node's folder for caches."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from launch_ranks import run_python

from tlt_hpc.cluster import device
from tlt_hpc.cluster.caches import FOLDER, make_node_cache
from tlt_hpc.config import UserError
from tlt_hpc.mpi import ending
from tlt_hpc.rl import distributed
from tlt_hpc.run import session as job

STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", **STEP, "SLURM_LOCALID": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f1, GPU-2c0", **STEP, "SLURM_LOCALID": "1"}, "GPU-2c0"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-11ab,MIG-22cd", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "MIG-11ab"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "MPI_LOCALRANKID": "1"}, "1"),
        # mpiexec in an allocation: all ranks see the number of the one task that started them
        ({"CUDA_VISIBLE_DEVICES": "0,1", **STEP, "SLURM_LOCALID": "0", "MPI_LOCALRANKID": "1"}, "1"),
        # Slurm has assigned one each already
        ({"CUDA_VISIBLE_DEVICES": "3", **STEP, "SLURM_LOCALID": "3"}, "3"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", **STEP, "SLURM_LOCALID": "3", "TLT_SHARE_GPUS": "1"}, "1"),
    ],
)
def test_a_rank_is_left_with_one_gpu(environment, own):
    assert device.restrict_to_one_gpu(environment, 0) == own
    assert environment["CUDA_VISIBLE_DEVICES"] == environment[job.GIVEN_GPU] == own


NOTHING_SAID = (
    {},
    {"CUDA_VISIBLE_DEVICES": "NoDevFiles", **STEP, "SLURM_LOCALID": "0"},
    {"CUDA_VISIBLE_DEVICES": "0,1"},
    {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_LOCALID": "0"},  # a batch script, outside any step
    {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_ID": "4294967290", "SLURM_LOCALID": "0"},  # a shell of salloc
)


def test_where_nothing_is_said_nothing_is_changed():
    for given in NOTHING_SAID:
        environment = dict(given)
        assert device.restrict_to_one_gpu(environment, 0) is None and environment == given


def test_more_ranks_than_gpus_is_one_line_with_the_remedy():
    with pytest.raises(
        UserError, match=r"has 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\) and more than 2.*--ntasks-per-node=2"
    ):
        device.restrict_to_one_gpu({"CUDA_VISIBLE_DEVICES": "0,1", **STEP, "SLURM_LOCALID": "2"}, 0)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        ([("n1", None), ("n1", None)], "gloo"),
        ([("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-c")], "nccl"),
        ([("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-c"), ("n2", "GPU-c")], "gloo"),
        ([("n1", "GPU-0"), ("n2", "GPU-0")], "nccl"),  # ids that are no node's own
    ],
)
def test_ranks_that_share_a_gpu_sum_by_gloo_as_nccl_refuses_them(gpus, backend):
    assert distributed.choose_backend(gpus) == backend


def test_a_gpus_products_repeat_unless_the_user_says_how():
    for own in (None, ":4096:8", ":16:8"):
        environment = {} if own is None else {device.WORKSPACES: own}
        device.set_cublas_workspaces(environment)
        assert environment == {device.WORKSPACES: own or ":4096:8"}
    with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG=:4096:2 makes runs differ: unset it, or set it to"):
        device.set_cublas_workspaces({device.WORKSPACES: ":4096:2"})


def test_a_rank_prepares_its_products_before_it_uses_its_gpu(monkeypatch):
    monkeypatch.delenv(device.WORKSPACES, raising=False)
    found = []
    for name, value in {"is_available": lambda: True, "device_count": lambda: 2}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: found.append(os.environ.get(device.WORKSPACES)))
    world = SimpleNamespace(rank=1, local_rank=1, hostname="n1")
    config = SimpleNamespace(model=SimpleNamespace(device="auto"))
    assert job.choose_device(config.model, world) == torch.device("cuda", 1) and found == [":4096:8"]


def test_the_command_takes_a_gpu_and_says_which(tmp_path):
    """With a torch that has none of it, the job ends in one line before it has loaded a model."""
    environment = {"CUDA_VISIBLE_DEVICES": "5,7", "PMI_RANK": "0", "MPI_LOCALRANKID": "1", "TLT_RANKS": "1"}
    done = run_python("-m", "tlt_hpc", "train", "jobs/tiny.toml", f"run.folder={tmp_path}", **environment)
    assert "uses GPU 7" in done.stdout
    assert "has no CUDA device that torch sees" in done.stderr
    assert done.returncode == 2


# --- the folder for caches ---


@pytest.fixture
def registered(monkeypatch):
    """What is to be called at the end of this process."""
    calls = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: calls.append(call))
    return calls


def test_the_folder_is_made_for_this_user_alone_and_removed_at_any_end(tmp_path, registered, monkeypatch):
    folder = tmp_path / "disk" / "tlt-me-7-0"
    make_node_cache({FOLDER: str(folder)})
    assert folder.stat().st_mode & 0o777 == 0o700
    make_node_cache({FOLDER: str(folder)})  # the node's next rank
    assert [call[1] for call in registered] == [folder]
    make_node_cache({})
    monkeypatch.setattr(ending, "MPI", SimpleNamespace(Is_initialized=lambda: False))
    assert not ending.all_ranks_arrive(0.0) and not folder.exists(), "ranks end so without Python's exit functions"


def test_folders_of_the_jobs_earlier_starts_are_removed(tmp_path, registered):
    for name in ("tlt-me-7-0", "tlt-me-7-1", "tlt-me-6-0"):
        (tmp_path / name / "triton").mkdir(parents=True)
    make_node_cache({FOLDER: str(tmp_path / "tlt-me-7-2")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tlt-me-6-0", "tlt-me-7-2"]


def test_a_folder_that_cannot_be_had_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for place, why in (("file", "name another disk"), ("file/below", "name another disk"), ("link", "not this user's")):
        with pytest.raises(UserError, match=rf"cannot keep caches in .*{why}"):
            make_node_cache({FOLDER: str(tmp_path / place)})
