"""Several starts of one run, of one rank each, that contest its folder.

The claim and the commits are the package's own, on real files. Heartbeats are written as by the watch of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from simulated_mpi import start_ranks
from simulated_processes import RUNNING, Cluster, Process, ScheduleError
from simulated_rollout import as_rank, start_watch
from simulated_steps import line_of, train_add_line

from tlt_hpc import train
from tlt_hpc.cli import main
from tlt_hpc.cluster.watch.rank_progress import BEAT, Member
from tlt_hpc.cluster.watch.record import FINISHED, HEARTBEAT_SECONDS, write_record
from tlt_hpc.mpi.owner import QUIET_SECONDS, claim_owner
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import STEP, read_lines


class Contest:
    """The starts of a run, and who has claimed its folder."""

    def __init__(self, cluster: Cluster, plan: Any) -> None:
        self.cluster, self.num_steps = cluster, plan.rounds
        self.folder = RunFolder(cluster.folder / "run")
        self.longest_stop = cluster.random.choice((HEARTBEAT_SECONDS, 40.0))
        """Beyond ``QUIET_SECONDS`` a start that is stopped is taken for dead."""
        self.starts: list[Process] = []
        self.owner: Process | None = None
        self.claimed: dict[Process, tuple[float, float]] = {}
        """When each start began to claim the folder, and when it had it."""
        self.committed: set[int] = set()

    def begin(self, host: str) -> Process:
        process = Process(self.cluster, host, {})
        start_ranks([process], partial(as_rank, partial(self.work, f"start {len(self.starts)}")))
        self.starts.append(process)
        return process

    def work(self, start: str, process: Process) -> int:
        cluster, folder, begun = self.cluster, self.folder, self.cluster.now
        BEAT.set_member(Member(0, 1, process.host, start, {}), lambda status: None)
        folder.make_missing_folders()
        claim_owner(folder.status, start)
        before = self.owner
        is_at_work = before is not None and before.status is None and self.claimed[before][1] < begun
        if is_at_work and self.longest_stop < QUIET_SECONDS:
            raise ScheduleError(f"{start} has claimed a folder in which its owner is at work")
        self.owner, self.claimed[process] = process, (begun, cluster.now)
        record = start_watch(process, folder.status, start)
        for step in range(max(read_lines(folder.metrics), default=-1) + 1, self.num_steps):
            cluster.sleep(cluster.random.random() * 8.0)
            train.commit_step(folder, 1, step, line_of(step))
        write_record(folder.status, replace(record, ending=FINISHED))
        return 0

    def add_line(self, path: Path, line: Any, confirm: Callable[[], None]) -> None:
        process, random = RUNNING[-1].process, self.cluster.random
        if random.random() < 0.2 and process.stopped_until < self.cluster.now - 2 * HEARTBEAT_SECONDS:
            self.cluster.injected["pause between check and commit"] += 1
            process.stopped_until = self.cluster.now + random.uniform(0.0, self.longest_stop)
            self.cluster.sleep(0.0)
        train_add_line(path, line, confirm)
        self.committed.add(line[STEP] - 1)
        if not self.committed <= set(read_lines(path)):
            raise ScheduleError(f"of the committed steps {sorted(self.committed)} there are {list(read_lines(path))}")
        if self.owner is not process and self.longest_stop < QUIET_SECONDS and not self.is_at_once(process):
            raise ScheduleError(f"a start commits step {line[STEP]} in a folder that another has claimed")

    def is_at_once(self, process: Process) -> bool:
        """Whether a start began to claim the folder before this one had it: then the later of the two stays."""
        return any(
            begun <= self.claimed[process][1] for other, (begun, _) in self.claimed.items() if other is not process
        )


def fault(contest: Contest) -> None:
    cluster, random = contest.cluster, contest.cluster.random
    process, kind = random.choice(contest.starts), random.choice(("pause", "pause", "clock", "death"))
    cluster.injected[kind] += 1
    if kind == "pause" and process.stopped_until < cluster.now - 2 * HEARTBEAT_SECONDS:
        process.stopped_until = cluster.now + random.uniform(0.0, contest.longest_stop)
    elif kind == "clock":
        process.wall += random.choice((-1, 1)) * 10 ** random.uniform(0, 5)
    elif kind == "death":
        process.end(-9)


def play(cluster: Cluster, plan: Any) -> None:
    contest, random = Contest(cluster, plan), cluster.random
    with patch.object(train, "add_line", contest.add_line):
        for number in range(plan.ranks):
            when = random.choice((0.0, 1e-3, random.random() * 30.0))
            cluster.call_at(when, partial(contest.begin, random.choice(("node0", f"node{number}"))))
        for _ in range(plan.faults):
            at = int(10 ** random.uniform(0.5, 2.5))
            cluster.at_steps.append((at, lambda: contest.starts and fault(contest)))
        cluster.at_steps.sort(key=lambda each: -each[0])
        cluster.run(100_000)
        cluster.at_steps.clear()
        contest.begin("node0")
        cluster.run(200_000)
        statuses = [process.status for process in contest.starts]
        if set(statuses) - {0, -9, main.USER_ERROR} or statuses[-1]:
            raise ScheduleError(f"starts end with statuses {statuses}: {cluster.describe()}")
        if list(read_lines(contest.folder.metrics)) != list(range(plan.rounds)):
            raise ScheduleError(f"the lines of {plan.rounds} steps are {list(read_lines(contest.folder.metrics))}")
        cluster.close()
