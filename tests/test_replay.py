"""Steps that the log has and no checkpoint: taken up as they were, and what the log lacks is generated again."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import UserError
from tlt_hpc.replay import ReplayError, check_update
from tlt_hpc.rl.policy import PolicyStats
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step, write_step
from tlt_hpc.storage.step_lines import add_line, drop_lines, read_lines

ROOT = Path(__file__).parent.parent
STEPS, SAVED = 4, 2
OVERRIDES = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=100", "rollout.max_live=4",
    "speculation.profile_seconds=0", f"run.num_steps={STEPS}", f"checkpoint.every_steps={SAVED}",
]  # fmt: skip


# -- the lines that commit a step ----------------------------------------------------------------------------------


def line(step: int, value: float = 0.0) -> dict[str, float]:
    return {"training/global_step": float(step), "value": value}


def test_a_step_that_is_committed_again_takes_back_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == {}
    for step in range(3):
        add_line(path, line(step))
    add_line(path, line(1, 5.0))
    assert read_lines(path) == {0: line(0), 1: line(1, 5.0)}


def test_dropping_lines_leaves_the_earlier_ones_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    drop_lines(path, 0)
    assert not path.exists()
    for step in range(3):
        add_line(path, line(step))
    before = path.stat().st_ino
    drop_lines(path, 3)
    assert path.stat().st_ino == before, "nothing to drop, yet written anew"
    drop_lines(path, 1)
    assert list(read_lines(path)) == [0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", '{"no": 1}', "[1]", '{"training/global_step": "x"}'])
def test_a_line_that_no_run_wrote_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read .*; mend or remove it"):
        read_lines(path)


# -- what does not fit -------------------------------------------------------------------------------------------------

STATS = PolicyStats(
    pg_loss=0.1, entropy=0.5, ppo_kl=0.0, pg_clipfrac=0.0, kl_loss=0.0, rollout_probs_diff_mean=1e-7, grad_norm=2.0,
    lr=1e-3, num_tokens=100, old_log_prob_seconds=0.0, update_seconds=1.0,
)  # fmt: skip
LINE = {
    "actor/grad_norm": 2.0, "actor/rollout_probs_diff_mean": 1e-7, "critic/score/mean": 0.5,
    "perf/total_num_tokens": 100.0,
}  # fmt: skip
REWARDS = np.array([0, 1], np.float32)


def test_an_update_whose_last_bits_differ_is_the_runs_own() -> None:
    stats = replace(STATS, grad_norm=2.001, rollout_probs_diff_mean=1e-5)
    check_update(RunFolder(Path("run")), 7, REWARDS, stats, LINE)


@pytest.mark.parametrize(
    ("changes", "rewards", "said"),
    [
        ({"grad_norm": 2.2}, REWARDS, "actor/grad_norm 2.2 where run/metrics.jsonl has 2:"),
        ({"grad_norm": float("nan")}, REWARDS, "actor/grad_norm nan"),
        ({"rollout_probs_diff_mean": 0.02}, REWARDS, "actor/rollout_probs_diff_mean 0.02"),
        ({"num_tokens": 99}, REWARDS, "perf/total_num_tokens 99"),
        ({}, np.array([1, 1], np.float32), "critic/score/mean 1"),
    ],
)
def test_another_runs_update_is_refused_with_both_values(changes: Any, rewards: Any, said: str) -> None:
    with pytest.raises(ReplayError, match=re.escape(said)) as caught:
        check_update(RunFolder(Path("run")), 7, rewards, replace(STATS, **changes), LINE)
    assert str(caught.value).startswith("step 7, repeated from run/rollouts")


# -- whole runs --------------------------------------------------------------------------------------------------------


def train(folder: Path, ranks: int = 2, status: int = 0) -> str:
    command = [sys.executable, "-m", "tlt_hpc", "train", str(ROOT / "jobs" / "tiny.toml"), *OVERRIDES]
    command += [f"run.folder={folder}", f"run.ranks={ranks}"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


@pytest.fixture
def broken(straight: Path, tmp_path: Path) -> Path:
    """The run as a kill leaves it before its last checkpoint is whole."""
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "tiny" / "checkpoints" / f"step-{STEPS:06d}")
    return tmp_path


def logs(folder: Path, step: int) -> list[tuple[Path, int]]:
    paths = RunFolder(folder / "tiny").rollout_logs(step)
    return [(path, path.stat().st_ino) for path in paths]


def policy(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointStore(folder / "tiny" / "checkpoints", keep=1).at(STEPS)
    assert len(checkpoint.names("policy")) > 200
    return {name: checkpoint.read("policy", name) for name in checkpoint.names("policy")}


def assert_same_policy(folder: Path, straight: Path) -> None:
    wanted, got = policy(straight), policy(folder)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


@pytest.mark.mpi
def test_logged_steps_end_in_the_same_policy_and_generate_nothing(straight: Path, broken: Path) -> None:
    before = [logs(broken, step) for step in range(STEPS)]
    shown = train(broken)
    for step in range(SAVED, STEPS):
        assert f"step {step}: its update repeated" in shown
    assert f"going on from step {STEPS}" in shown
    assert [logs(broken, step) for step in range(STEPS)] == before
    assert_same_policy(broken, straight)
    assert read_lines(broken / "tiny" / "metrics.jsonl") == read_lines(straight / "tiny" / "metrics.jsonl")


@pytest.mark.mpi
def test_a_damaged_log_is_named_and_its_step_generated_again(straight: Path, broken: Path) -> None:
    (kept, _), (damaged, inode) = logs(broken, 3)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    shown = train(broken)
    assert "step 2: its update repeated" in shown
    assert "step 3 is generated again" in shown and damaged.name in shown
    assert "going on from step 3" in shown
    assert dict(logs(broken, 3))[damaged] != inode
    assert_same_policy(broken, straight)
    assert len(read_lines(broken / "tiny" / "metrics.jsonl")) == STEPS
    assert kept.exists()


@pytest.mark.mpi
def test_a_step_without_its_line_was_under_way(straight: Path, broken: Path) -> None:
    drop_lines(broken / "tiny" / "metrics.jsonl", 3)
    before = logs(broken, 3)
    shown = train(broken)
    assert "going on from step 3" in shown and "is generated again" not in shown
    assert all(now != then for now, then in zip(logs(broken, 3), before, strict=True))
    assert_same_policy(broken, straight)


@pytest.mark.mpi
def test_a_missing_rank_and_other_rewards_are_not_taken_for_the_step(straight: Path, broken: Path) -> None:
    (first, _), _ = logs(broken, 2)
    record = read_step(first)
    first.unlink()
    assert "lacks responses of step 2" in train(broken)
    assert_same_policy(broken, straight)

    shutil.rmtree(broken / "tiny" / "checkpoints" / f"step-{STEPS:06d}")
    write_step(first, replace(record, rewards=1 - record.rewards))
    shown = train(broken, status=2)
    assert "score/mean" in shown and "log and checkpoint are not of one run" in shown and "Traceback" not in shown
    assert len(read_lines(broken / "tiny" / "metrics.jsonl")) == STEPS, "nothing is lost"


@pytest.mark.mpi
def test_another_number_of_ranks_takes_the_log_up_too(straight: Path, broken: Path) -> None:
    before = [logs(broken, step) for step in range(STEPS)]
    assert f"going on from step {STEPS}" in train(broken, ranks=1)
    assert [logs(broken, step) for step in range(STEPS)] == before
    wanted, got = policy(straight), policy(broken)
    for name in (name for name in wanted if name.endswith(".master")):
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5)
