"""The watch over whole runs: a hang ends with one line and continues; so does a full disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_ranks import LAUNCH_ENVIRONMENT, ROOT, mpiexec
from small_disk import fill, mounted_disk

from tlt_hpc.cluster.watch.record import read_record, status_file
from tlt_hpc.cluster.watch.watch import STALLED

pytestmark = pytest.mark.mpi

OVERRIDES = [
    "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.max_live=4",
    "checkpoint.every_steps=1",
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


def start(folder: Path, program: list[str], ranks: int, *changes: str, **environment: str) -> subprocess.Popen[str]:
    overrides = [*OVERRIDES, f"run.ranks={ranks}", f"run.folder={folder}", *changes]
    return subprocess.Popen(
        [mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", *program, "train",
         str(ROOT / "jobs" / "tiny.toml"), *overrides],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **LAUNCH_ENVIRONMENT, "PYTHONPATH": str(ROOT), "TLT_RANKS": str(ranks), **environment},
    )  # fmt: skip


def train(folder: Path, ranks: int, *changes: str, **environment: str) -> subprocess.Popen[str]:
    return start(folder, ["-m", "tlt_hpc"], ranks, *changes, **environment)


def end(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, list[str], str]:
    """Exit status, the lines that the program addresses to its user, and all that it wrote."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, [line for line in err.splitlines() if line.startswith("tlt: ")], out + err


def num_steps(folder: Path) -> int:
    path = folder / "tiny" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < last, "it never came"
        time.sleep(0.01)


def test_a_hang_ends_the_run_with_one_line_and_the_same_command_resumes(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    changes = ["run.num_steps=2", "speculation.mode=frozen"]  # so that rank 0 has nothing to do but wait
    code, lines, text = end(start(tmp_path, [str(script)], 2, *changes))
    assert code == STALLED and len(lines) == 1, text
    named = (
        r"rank 1 on \S+ is stuck in rollout of step 2 \(4 sequences left\) for \d+ s, at step "
        r"\(\S+hanging.py:\d+\); rank 0 waits in pulse \(.*?\)"
    )
    told = re.match(f"tlt: the job hangs: ({named}); stacks are in", lines[0])
    assert told, text
    assert "the same command resumes" in lines[0] and num_steps(tmp_path) == 1
    code, lines, text = end(train(tmp_path, 2, *changes))
    assert code == 0 and not lines, text
    assert f"the last start ended so: {told[1]}" in text
    assert num_steps(tmp_path) == 2
    assert {read_record(status_file(tmp_path / "tiny" / "status", rank)).ending for rank in (0, 1)} == {"finished"}


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "200m") as folder:
        yield folder


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_with_one_line_and_the_run_resumes(disk):
    process = train(disk, 2, "run.num_steps=50")
    until(lambda: num_steps(disk) >= 1, process)
    filling = fill(disk)
    code, lines, text = end(process)
    assert code == 2 and "Traceback" not in text, text
    assert lines and all(re.search("No space left on device; .*(free space|make room) there", line) for line in lines)
    filling.unlink()
    done = num_steps(disk)
    code, lines, text = end(train(disk, 2, f"run.num_steps={done + 1}"))
    assert code == 0 and not lines, text
    assert f"resuming from step {done}" in text and num_steps(disk) == done + 1
