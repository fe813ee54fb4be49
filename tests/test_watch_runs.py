"""The watch over whole runs: a hang ends with one line, and the same command continues."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_ranks import ROOT, forked, launch

from tlt_hpc.cluster.watch.record import read_record, status_file
from tlt_hpc.cluster.watch.watch import STALLED

pytestmark = pytest.mark.mpi

OVERRIDES = [
    "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.max_live=4",
    "checkpoint.every_steps=1", "run.ranks=2", "run.num_steps=2",
    "speculation.mode=frozen",  # so that rank 0 has nothing to do but wait
]  # fmt: skip

# Rank 1's decoder never returns from a round of step 1, begun when rank 0 has told that it waits for it. Only this
# round has a limit of seconds.
HANGING = """
import sys, time
from tlt_hpc.cli import main as cli
from tlt_hpc import train as run
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.cluster.watch.beat import BEAT, LIMIT_SECONDS, Phase
from tlt_hpc.cluster.watch.record import read_record, status_file

steps, true_take, true_step = [0], run.take_step, RolloutEngine.step

def take_step(job, step, *rest, **named):
    steps[0] = step * job.world.rank
    return true_take(job, step, *rest, **named)

def others_wait():
    other = read_record(status_file(BEAT.folder, 0))
    return (other.step, other.sequences_left) == (2, 0)  # a record counts steps from 1

def step(self):
    while steps[0] == 1:
        time.sleep(0.1)
        if LIMIT_SECONDS[Phase.ROLLOUT] > 4 and others_wait():
            LIMIT_SECONDS[Phase.ROLLOUT] = 4
        if LIMIT_SECONDS[Phase.ROLLOUT] > 4:
            BEAT.tick()
    return true_step(self)

run.take_step, RolloutEngine.step = take_step, step
sys.exit(cli.main())
"""


def train(folder: Path, program: list[str], *changes: str) -> tuple[int, list[str], str]:
    """Exit status, the lines that the program addresses to its user, and all that it wrote."""
    code, out, err = launch(
        2, [*program, "train", str(ROOT / "jobs" / "tiny.toml"), *OVERRIDES, f"run.folder={folder}", *changes], 120,
        forked(),
    )  # fmt: skip
    return code, [line for line in err.splitlines() if line.startswith("tlt: ")], out + err


def num_steps(folder: Path) -> int:
    return len((folder / "tiny" / "metrics.jsonl").read_text().splitlines())


def test_a_hang_ends_the_run_with_one_line_and_the_same_command_resumes(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    code, lines, text = train(tmp_path, [str(script)])
    assert code == STALLED and len(lines) == 1, text
    named = (
        r"rank 1 on \S+ is stuck in rollout of step 2 \(4 sequences left\) for \d+ s, at step "
        r"\(\S+hanging.py:\d+\); rank 0 waits in pulse \(.*?\)"
    )
    told = re.match(f"tlt: the job hangs: ({named}); stacks are in", lines[0])
    assert told, text
    assert "the same command resumes" in lines[0] and num_steps(tmp_path) == 1
    code, lines, text = train(tmp_path, ["-m", "tlt_hpc"])
    assert code == 0 and not lines, text
    assert f"the last start ended so: {told[1]}" in text
    assert num_steps(tmp_path) == 2
    assert {read_record(status_file(tmp_path / "tiny" / "status", rank)).ending for rank in (0, 1)} == {"finished"}
