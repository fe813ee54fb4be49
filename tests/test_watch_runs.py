"""The watch over whole runs: a hang ends with one line and continues; bad disks end clearly, pauses are sat out."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_ranks import LAUNCH_ENVIRONMENT, ROOT, mpiexec

from tlt_hpc.cluster.watch.record import read_record
from tlt_hpc.cluster.watch.watch import STALLED

pytestmark = pytest.mark.mpi

OVERRIDES = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=100", "rollout.max_live=4",
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
from tlt_hpc.cluster.watch.record import read_record

steps, true_take, true_step = [0], run.take_step, RolloutEngine.step

def take_step(job, step, *rest, **named):
    steps[0] = step * job.world.rank
    return true_take(job, step, *rest, **named)

def others_wait():
    other = read_record(BEAT.folder, 0)
    return (other.step, other.sequences_left) == (1, 0)

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


def test_a_hang_ends_the_run_with_one_line_and_the_same_command_goes_on(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    changes = ["run.num_steps=2", "drafter.train=false"]  # so that rank 0 has nothing to do but wait
    code, lines, text = end(start(tmp_path, [str(script)], 2, *changes))
    assert code == STALLED and len(lines) == 1, text
    named = (
        r"rank 1 on \S+ is stuck in rollout of step 1 \(8 sequences left\) for \d+ s, at step "
        r"\(\S+hanging.py:\d+\); rank 0 waits in pulse \(.*?\)"
    )
    told = re.match(f"tlt: the job hangs: ({named}); stacks are in", lines[0])
    assert told, text
    assert "the same command resumes" in lines[0] and num_steps(tmp_path) == 1
    code, lines, text = end(train(tmp_path, 2, *changes))
    assert code == 0 and not lines, text
    assert f"the last start ended so: {told[1]}" in text
    assert num_steps(tmp_path) == 2
    assert {read_record(tmp_path / "tiny" / "status", rank).ending for rank in (0, 1)} == {"finished"}


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system that a test may fill or close."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"only root may mount a disk: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def goes_on(folder: Path, ranks: int, steps: int, done: int) -> None:
    code, lines, text = end(train(folder, ranks, f"run.num_steps={steps}"))
    assert code == 0 and not lines, text
    assert f"resuming from step {done}" in text and num_steps(folder) == steps


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_with_one_line_and_it_goes_on(disk):
    process = train(disk, 2, "run.num_steps=50")
    until(lambda: num_steps(disk) >= 1, process)
    with pytest.raises(OSError, match="No space"), (disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    code, lines, text = end(process)
    assert code == 2 and "Traceback" not in text, text
    assert lines and all(re.search("No space left on device; .*(free space|make room) there", line) for line in lines)
    (disk / "filling").unlink()
    done = num_steps(disk)
    goes_on(disk, 2, done + 1, done)


@pytest.mark.slow
def test_a_disk_that_turns_read_only_ends_the_run_with_one_line_and_it_goes_on(disk):
    process = train(disk, 2, "run.num_steps=50")
    until(lambda: num_steps(disk) >= 1, process)
    remount = ["mount", "-o", "remount,ro", str(disk)]  # refused while a file is open for writing
    until(lambda: not subprocess.run(remount, capture_output=True, check=False).returncode, process)
    code, lines, text = end(process)
    assert code == 2 and "Traceback" not in text, text
    assert lines and all("Read-only file system" in line for line in lines), text
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    done = num_steps(disk)
    goes_on(disk, 2, done + 1, done)


@pytest.mark.slow
def test_a_run_whose_folder_is_deleted_ends_with_one_line(tmp_path):
    process = train(tmp_path, 2, "run.num_steps=50")
    until(lambda: num_steps(tmp_path) >= 1, process)
    (tmp_path / "tiny").rename(tmp_path / "gone")
    code, lines, text = end(process)
    assert code == 2 and "Traceback" not in text, text
    assert re.search(
        r"owner is gone or damaged: .* put it back in place of what is left of .*, and start again", lines[-1]
    )
    shutil.rmtree(tmp_path / "tiny", ignore_errors=True)
    (tmp_path / "gone").rename(tmp_path / "tiny")
    done = num_steps(tmp_path)
    goes_on(tmp_path, 2, done + 1, done)


SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* Every write, flush and rename below SLOW_FOLDER takes SLOW_MICROSECONDS longer. */
static void slow(void) { usleep(atoi(getenv("SLOW_MICROSECONDS"))); }
static int is_there(const char *path) { return strstr(path, getenv("SLOW_FOLDER")) != NULL; }
static void slow_file(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0) { path[n] = 0; if (is_there(path)) slow(); }
}
#define REAL(name, type) ((type)dlsym(RTLD_NEXT, name))
ssize_t write(int fd, const void *b, size_t n) { slow_file(fd);
    return REAL("write", ssize_t (*)(int, const void *, size_t))(fd, b, n); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { slow_file(fd);
    return REAL("pwrite64", ssize_t (*)(int, const void *, size_t, off64_t))(fd, b, n, o); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { slow_file(fd);
    return REAL("pwrite", ssize_t (*)(int, const void *, size_t, off_t))(fd, b, n, o); }
int fsync(int fd) { slow_file(fd); return REAL("fsync", int (*)(int))(fd); }
int rename(const char *a, const char *b) { if (is_there(b)) slow();
    return REAL("rename", int (*)(const char *, const char *))(a, b); }
"""


@pytest.mark.slow
def test_a_slow_file_system_is_waited_for(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the slow file system with")
    (tmp_path / "slow.c").write_text(SLOW)
    library = tmp_path / "slow.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "slow.c", "-ldl"], check=True)
    folder = tmp_path / "runs"
    slow = {"LD_PRELOAD": str(library), "SLOW_FOLDER": str(folder), "SLOW_MICROSECONDS": "100000"}
    code, lines, text = end(train(folder, 2, "run.num_steps=2", "run.stall_factor=0.05", **slow), 280)
    assert code == 0 and not lines, text
    rows = [json.loads(line) for line in (folder / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_a_minute_rides_through(tmp_path):
    process = train(tmp_path, 2, "run.num_steps=4")
    until(lambda: num_steps(tmp_path) >= 1, process)
    stopped = read_record(tmp_path / "tiny" / "status", 1).pid
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(60)
    os.kill(stopped, signal.SIGCONT)
    code, lines, text = end(process)
    assert code == 0 and not lines, text
    assert num_steps(tmp_path) == 4
