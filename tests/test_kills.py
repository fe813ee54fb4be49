"""kill -9 of one rank of a whole run, at named places: it continues, and ends with the policy of an unbroken run."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from launch_ranks import forked, mpiexec

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

pytestmark = [pytest.mark.mpi, pytest.mark.ci]

ROOT = Path(__file__).parent.parent
RANKS = 2
OVERRIDES = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "checkpoint.every_steps=1", f"run.ranks={RANKS}",
]  # fmt: skip

# A rank that kills itself the first time, from step 1 on, that it comes to the place named in the environment; where
# that is "writing", while the checkpoint after the first step is written, beside the rollout of the next.
DYING = """
import os, signal, sys
from tlt_hpc.cli import main as cli
from tlt_hpc.resume import replay
from tlt_hpc import train as run
from tlt_hpc.checkpoint import save
from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.mpi.world import World

PLACE, RANK = os.environ["DIE_AT"], int(os.environ["DIE_RANK"])
steps = [0]

def die_there(place, rank):
    if place == PLACE and rank in (RANK, None) and steps[0] >= 1:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(owner, name, place, rank_of):
    true = getattr(owner, name)
    def call(*arguments):
        result = true(*arguments)
        die_there(place, rank_of(*arguments))
        return result
    setattr(owner, name, call)

true_write = save.write_file
def write_file(path, tensors):
    true_write(path, tensors[: len(tensors) // 2])  # half of it reaches the disk
    if path.parent.parent.name == "drafter-checkpoints":
        if path.parent.name.startswith("step-000002"):
            die_there("saving alone", int(path.name.split("-")[1]))
        return true_write(path, tensors)
    if path.parent.name.startswith("step-000001"):
        steps[0] = 1
        die_there("writing", int(path.name.split("-")[1]))
    true_write(path, tensors)
save.write_file = write_file

true_step = run.take_step
def take_step(job, step, *others, **named):
    steps[0] = step
    return true_step(job, step, *others, **named)
run.take_step = take_step

true_write_step = run.write_step
def write_step(path, record):
    if record.rank != RANK:  # the one that dies has written its log, the other not yet
        import time
        time.sleep(1 if PLACE == "logged" and steps[0] >= 1 else 0)
    true_write_step(path, record)
    die_there("logged", record.rank)
run.write_step = write_step

def replaying(config, policy, *_):
    steps[0] = 1
    return World.connect().rank

dying(replay, "update_policy", "replaying", replaying)
dying(run, "drop_foreign_logs", "committing", lambda job, *_: None)
dying(SpotTrainer, "micro_step", "training", lambda trainer, *_: None)
dying(run, "start_merge", "merging", lambda job, *_: job.world.rank)
sys.exit(cli.main())
"""


def arguments(folder: Path, num_steps: int, *changes: str) -> list[str]:
    overrides = [*OVERRIDES, f"run.num_steps={num_steps}", f"run.folder={folder}", *changes]
    return ["train", str(ROOT / "jobs" / "tiny.toml"), *overrides]


def run_ranks(program: list[str], changes: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output."""
    command = [mpiexec(), "-n", str(RANKS), *forked(), *program]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **own, **(changes or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def finish(folder: Path, num_steps: int, *changes: str) -> None:
    """Continue to the end, from where the last kill left it: nothing that was committed is generated again."""
    committed, logs = num_steps_done(folder), committed_logs(folder)
    status, out = run_ranks(["-m", "tlt_hpc", *arguments(folder, num_steps, *changes)])
    assert status == 0, out
    assert committed == 0 or f"resuming from step {committed}" in out, out
    assert logs.items() <= committed_logs(folder).items()


def committed_logs(folder: Path) -> dict[str, int]:
    """The rollout logs of the steps that are done, with their inodes: a file that is written again has another."""
    run = RunFolder(folder / "tiny")
    paths = [path for step in range(num_steps_done(folder)) for path in run.rollout_logs(step)]
    assert len(paths) == RANKS * num_steps_done(folder)
    return {str(path): path.stat().st_ino for path in paths}


def num_steps_done(folder: Path) -> int:
    path = folder / "tiny" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def final_policy(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointStore(folder / "tiny" / "checkpoints", keep=2).at(step)
    assert len(checkpoint.names("policy")) > 200, "master weights and both moments of every parameter"
    return {name: checkpoint.read("policy", name) for name in checkpoint.names("policy")}


def assert_same_end(folder: Path, straight: Path, num_steps: int) -> None:
    wanted, got = final_policy(straight, num_steps), final_policy(folder, num_steps)
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    rows = [json.loads(line) for line in (folder / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == list(range(num_steps))
    undisturbed = [json.loads(line) for line in (straight / "tiny" / "metrics.jsonl").read_text().splitlines()]
    trained = [row["drafter/version"] for row in (rows[-1], undisturbed[num_steps - 1])]
    assert max(trained) > 0, "a drafter was trained in the tails; of so few steps' one may find none long enough"
    assert not list((folder / "tiny" / "checkpoints").glob("*.part"))


def die(folder: Path, place: str, rank: int, num_steps: int, *changes: str) -> None:
    """Run until a rank has killed itself at the place."""
    script = folder / "dying.py"
    script.write_text(DYING)
    where = {"DIE_AT": place, "DIE_RANK": str(rank)}
    status, out = run_ranks([str(script), *arguments(folder, num_steps, *changes)], where)
    assert status not in (0, 75) and "Traceback" not in out, f"nobody died at {place!r}\n{out}"


@pytest.mark.parametrize(
    "places",
    [
        ("writing", "logged"),
        pytest.param(("training", "merging"), marks=pytest.mark.slow),
        pytest.param(("writing", "replaying", "committing"), marks=pytest.mark.slow),
    ],
)
def test_killed_at_a_place_it_ends_as_if_it_had_not_been(reference_run, tmp_path, places):
    source, broken = random.Random(4), tmp_path
    for place in places:
        die(broken, place, source.randrange(RANKS), 2)
        assert num_steps_done(broken) == 1, "the step under way is what was lost"
    finish(broken, 2)
    assert_same_end(broken, reference_run, 2)


def test_killed_between_two_checkpoints_the_drafter_keeps_what_it_learned(tmp_path):
    rare, num_steps, kept = "checkpoint.every_steps=4", 4, 0
    for seed in range(4):  # until the first step has a tail that is long enough for an update, which the clock decides
        folder, own = tmp_path / str(seed), f"run.seed={seed}"
        folder.mkdir()
        die(folder, "saving alone", 1, num_steps, rare, own)
        assert num_steps_done(folder) == 2 and not list((folder / "tiny" / "checkpoints").glob("step-*"))
        run = RunFolder(folder / "tiny")
        alone = CheckpointStore(run.drafter_checkpoints, keep=2).within(0, 9)
        assert list(alone) == [1], "the one of step 2 was being written"
        kept = int(alone[1].read("drafter", "num_steps"))
        if kept:
            break
    again = sum(len(read_step(path).micro_steps) for path in run.rollout_logs(1))
    finish(folder, num_steps, rare, own)
    end = CheckpointStore(run.checkpoints, keep=2).at(num_steps)
    later = [json.loads(line)["drafter/steps"] for line in run.metrics.read_text().splitlines()][2:]
    learned = int(end.read("drafter", "num_steps"))
    # a merge counts the micro-steps of the rank with the most: half of all at least
    assert kept > 0 and learned >= kept + again / RANKS + sum(later) / RANKS, (kept, again, later, learned)
