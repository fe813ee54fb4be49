"""kill -9 of one rank of a whole run, at named places: it continues, and ends with the policy of an unbroken run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from launch_ranks import ROOT, forked, mpiexec

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.storage.folder import RunFolder

pytestmark = [pytest.mark.mpi, pytest.mark.ci]

RANKS, STEPS = 2, 2
OVERRIDES = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "checkpoint.every_steps=1", f"run.ranks={RANKS}", f"run.num_steps={STEPS}",
]  # fmt: skip


def run_ranks(program: list[str], folder: Path, **changes: str) -> tuple[int, str]:
    """Exit status and output."""
    arguments = ["train", str(ROOT / "jobs" / "tiny.toml"), *OVERRIDES, f"run.folder={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changes}
    done = subprocess.run(
        [mpiexec(), "-n", str(RANKS), *forked(), *program, *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def committed_logs(folder: Path) -> dict[str, int]:
    """The rollout logs of the steps that are done, with their inodes: a file that is written again has another."""
    run = RunFolder(folder / "tiny")
    num_steps = len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0
    return {str(path): path.stat().st_ino for step in range(num_steps) for path in run.rollout_logs(step)}


def policy_after(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointStore(folder / "tiny" / "checkpoints", keep=2).open_step(step)
    assert len(checkpoint.tensor_names("policy")) > 200, "master weights and both moments of every parameter"
    return {name: checkpoint.read_tensor("policy", name) for name in checkpoint.tensor_names("policy")}


@pytest.mark.parametrize(
    ("faults", "committed"),
    [
        # before the second file of the first save; after the log of the second step; before its line
        (("checkpoint:1:2", "log:0:1", "commit:0:0"), 1),
        pytest.param(("merge:1:2", "update:0:0", "checkpoint:0:0", "replay:1:1"), 2, marks=pytest.mark.slow),
    ],
)
def test_killed_at_a_place_it_ends_as_if_it_had_not_been(reference_run, tmp_path, faults, committed):
    mark = tmp_path / "mark"
    for fault in faults:
        logs = committed_logs(tmp_path)
        program = [str(ROOT / "tools" / "fault_rank.py")]
        status, out = run_ranks(program, tmp_path, TLT_FAULT=fault, TLT_FAULT_MARK=str(mark))
        assert status not in (0, 75) and mark.exists() and "Traceback" not in out, f"nobody died at {fault!r}\n{out}"
        assert logs.items() <= committed_logs(tmp_path).items(), "a committed step was generated again"
        mark.unlink()
    logs = committed_logs(tmp_path)
    assert len(logs) == committed * RANKS
    status, out = run_ranks(["-m", "tlt_hpc"], tmp_path)
    assert status == 0 and f"resuming from step {committed}" in out, out
    assert logs.items() <= committed_logs(tmp_path).items()
    wanted, got = policy_after(reference_run, STEPS), policy_after(tmp_path, STEPS)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert not list((tmp_path / "tiny" / "checkpoints").glob("*.part"))
