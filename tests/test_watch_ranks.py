"""The watch over several ranks: whichever of them hangs, dies or is stopped, the job ends with the one right line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_ranks import ROOT, launch

from tlt_hpc.cluster.watch.record import read_and_clear_last_end, read_record, read_verdict, status_file
from tlt_hpc.cluster.watch.watch import STALLED

pytestmark = pytest.mark.mpi

RANKS = 3
LOOK = 0.05
LIMIT = 2.0
"""Seconds that a round of decoding may take where a rank is to be found stuck."""
PATIENCE = 60.0
"""The same elsewhere."""

# Steps as a run takes them: a rollout under a pulse in which the ranks have 10, 20 and 30 rounds to decode, then a
# collective. In step 1 rank 1 gets into trouble.
WORKING = """
import ctypes, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tlt_hpc.cluster.launcher import launched_rank
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.roster import State, Status
from tlt_hpc.mpi.world import World
from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.cluster.watch.watch import Watch
from tlt_hpc.cluster.watch.exit_monitor import ExitMonitor

folder, trouble, factor, look = Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5])

def kill_own(world):
    os.kill(os.getpid(), signal.SIGKILL)

TROUBLES = {
    "hang": lambda world: time.sleep(100),
    "library": lambda world: ctypes.PyDLL(None).sleep(100),  # holds the interpreter
    "another fails, then killed": lambda world: (time.sleep(0.3), kill_own(world)),
}

def lose_another(world):
    if trouble == "another fails, then killed" and world.rank == 2:
        BEAT.record_ending("failed: RuntimeError: Read error: Connection reset by peer")

def is_dead(process):
    # with all of its threads: any of them keeps open what the process has open
    about = Path(f"/proc/{process}")
    state = (about / "stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z" and len(list((about / "task").iterdir())) == 1

def decode(world, step, left):
    if trouble == "killed, then another fails" and world.rank == 2 and is_dead(BEAT.member.neighbours[1]):
        raise RuntimeError("garbage from a rank that is gone")
    if (step, left) == (1, 5):
        lose_another(world)
    if (world.rank, step, left) == (1, 1, 5):
        TROUBLES.get(trouble, kill_own)(world)
    time.sleep(0.005)

def roll_out(world, pulse, step):
    pulse.begin_rollout(step)
    left = 10 * (world.rank + 1)
    while not pulse.poll(Status(State.BUSY if left else State.IDLE, left, 0, 0, False)).is_over:
        if left:
            decode(world, step, left)
            left -= 1
        else:
            pulse.back_off()

def main(watch):
    world = World.connect()
    if trouble == "killed early":
        world.barrier()
        if world.rank == 0:
            kill_own(world)
        world.barrier()
    if trouble == "refused":
        BEAT.record_ending("refused")
        os._exit(2)
    BEAT.folder = folder
    world.barrier()
    pulse = Pulse(world.duplicate_comm_all_ranks())
    for step in range(3):
        BEAT.enter_step(step)
        with BEAT.in_phase(Phase.ROLLOUT):
            roll_out(world, pulse, step)
        world.allgather(step)
    pulse.close()
    world.finalise_mpi_all_ranks()
    return watch.record_exit_status(0)

rank = launched_rank(os.environ)
is_first = rank == 0 or trouble.endswith("emulated nodes")  # each of which has a first rank
with Watch(factor, rank, ExitMonitor.fork() if is_first else ExitMonitor(), look_seconds=look) as watch:
    main(watch)
"""


def work(folder: Path, trouble: str, limit: float = PATIENCE) -> tuple[int, list[str], str]:
    """Exit status, the lines of the watch, and all that the job wrote on standard error."""
    script, status = folder / "working.py", folder / "status"
    script.write_text(WORKING)
    status.mkdir(exist_ok=True)
    arguments = [str(script), str(ROOT), str(status), trouble, str(limit / 300), str(LOOK)]
    code, _, err = launch(RANKS, arguments, timeout=120)
    return code, [line for line in err.splitlines() if line.startswith("tlt: ")], err


HANGS = {
    "hang": r"rank 1 on \S+ is stuck in rollout of step 2 \(5 sequences left\) for [\d.]+ s, at "
            r"<lambda> \(\S+/working.py:\d+\); ranks 0, 2 wait in pulse \(rollout of step 2 ",
    "library": r"rank 1 on \S+ shows no sign of life \(its process runs, but its interpreter does not: a call into a "
               r"library that does not return\), last seen in rollout of step 2.*; ranks 0, 2 wait in ",
}  # fmt: skip


@pytest.mark.parametrize("trouble", HANGS)
def test_a_rank_that_holds_up_the_others_is_named(tmp_path, trouble):
    code, lines, err = work(tmp_path, trouble, LIMIT)
    assert code == STALLED, err
    assert len(lines) == 1 and re.match(f"tlt: the job hangs: {HANGS[trouble]}", lines[0]), err
    start, line = read_verdict(tmp_path / "status")
    assert line in lines[0] and start == read_record(status_file(tmp_path / "status", 0)).start
    stacks = tmp_path / "status" / "rank-0001.stacks"
    assert stacks.exists() == (trouble == "hang"), "a process that does not run cannot tell"
    assert not stacks.exists() or "decode" in stacks.read_text()
    assert read_and_clear_last_end(tmp_path / "status", "") == line


@pytest.mark.parametrize("trouble", ["killed", pytest.param("killed, on emulated nodes", marks=pytest.mark.ci)])
def test_a_rank_that_is_killed_is_named_at_once_and_by_the_next_start(tmp_path, trouble):
    """Though the launcher kills all others within milliseconds. Nodes of Slurm on one machine share a monitor."""
    code, lines, err = work(tmp_path, trouble)
    told = read_and_clear_last_end(tmp_path / "status", "")
    assert re.match(r"rank 1 on \S+ was killed or crashed, last seen in \w+ of step [12]", told), err
    assert code == 9 and lines in ([], [f"tlt: {told}; the same command resumes"]), "the launcher may drop the line"


def test_a_rank_that_is_killed_before_there_is_a_folder_is_named(tmp_path):
    for _ in range(3):  # the launcher may drop the line
        code, lines, err = work(tmp_path, "killed early")
        if lines:
            break
    named = r"tlt: rank 0 on \S+ was killed or crashed before the run's folder was claimed; the same command "
    assert code == 9 and len(lines) == 1 and re.match(named, lines[0]), err


@pytest.mark.ci
@pytest.mark.parametrize("trouble", ["another fails, then killed", "killed, then another fails"])
def test_what_another_rank_says_of_it_is_not_the_cause(tmp_path, trouble):
    """A rank may see that its neighbour is gone before the system has closed all that this had open."""
    _, _, err = work(tmp_path, trouble)
    assert re.match(
        r"rank 1 on \S+ was killed or crashed, last seen in", read_and_clear_last_end(tmp_path / "status", "")
    ), err


def test_ranks_that_say_why_they_end_are_not_called_killed(tmp_path):
    code, lines, err = work(tmp_path, "refused")
    assert code in (2, 9) and lines == [], err  # 9: of a rank that the launcher kills because another has left
