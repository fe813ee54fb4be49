"""A whole job on simulated ranks, from start to start until it has finished: steps, checkpoints, stops, requeues.

The loop of train.py, its saves, votes and commits, the claim of the folder and the requests to Slurm are the package's
own, on real files. What a step computes is not.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from simulated_mpi import start_ranks
from simulated_processes import Cluster, Process, ScheduleError
from simulated_rollout import SIGNALS, Engine, as_rank, begin, end_all, same, start_watch
from simulated_steps import NUM_WEIGHTS, Policy, Spot, parts

from tlt_hpc import train
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli import main, rank_commands
from tlt_hpc.cluster.slurm import SlurmError
from tlt_hpc.cluster.stopping import END_SECONDS, Stop, start_time_limit_timers
from tlt_hpc.cluster.watch.rank_progress import BEAT, Member
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.run.job import Drafting
from tlt_hpc.run.kept_responses import describe_progress
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import read_lines

NO_FAULTS_AFTER = 8
"""Starts of a job after which nothing disturbs it any more."""
MOST_STARTS = 14


class Slurm:
    """The controller, as far as a job asks it; it does not always answer."""

    def __init__(self, cluster: Cluster, fails: float) -> None:
        self._cluster, self._fails = cluster, fails
        self.state, self.restarts, self.ends_at, self.preempted = "RUNNING", 0, 1e9, False
        self.on_requeue: Callable[[], None] = lambda: None

    def __call__(self, command: str, *asked: str) -> str:
        self._cluster.sleep(self._cluster.random.random() * 0.05)
        fails = self._cluster.random.random() < self._fails
        if "requeue" in asked:
            if self.state == "PENDING" or (fails and self._cluster.random.random() < 0.5):
                raise SlurmError("it is busy")
            self.state = "PENDING"
            self.on_requeue()
        if fails:
            raise SlurmError("it is busy")
        if command == "squeue":
            left = int(max(0, self.ends_at - self._cluster.now))
            return f"{left // 60}:{left % 60:02d}"
        preempted = "PreemptTime=2026-01-01" if self.preempted else "PreemptTime=None"
        return f"JobId=17 JobState={self.state} Restarts={self.restarts} {preempted}"


class Driver:
    """Starts a job, and starts it again when all ranks have ended, until it has finished."""

    def __init__(self, cluster: Cluster, plan: Any) -> None:
        self.cluster, self.plan, random = cluster, plan, cluster.random
        self.has_slurm = random.random() < 0.7
        self.seconds = random.choice((1e9, 1e9, 60.0, 100.0, 300.0)) if self.has_slurm else 1e9
        self.drafts = random.random() < 0.5
        self.every, self.hosts = random.choice((1, 2, 5)), random.choice((1, 2))
        self.job, self.starts, self.faults = 17, 0, plan.faults
        self.processes: list[Process] = []
        self.slurm = cluster.slurm = Slurm(cluster, random.choice((0.0, 0.3)) if self.has_slurm else 0.0)
        self.slurm.on_requeue = lambda: self.kill_all(2.0)
        self.folder = RunFolder(cluster.folder / "run")
        self.is_over = False

    def start(self) -> None:
        cluster, random = self.cluster, self.cluster.random
        self.starts += 1
        if self.starts > MOST_STARTS:
            raise ScheduleError(f"not finished after {MOST_STARTS} starts: {cluster.committed} steps")
        size = self.plan.ranks if random.random() < 0.7 else random.randint(1, self.plan.ranks)
        environment = {"START": str(self.starts)}
        quiet = self.starts > NO_FAULTS_AFTER
        self.slurm.state, self.slurm.preempted = "RUNNING", False
        self.slurm.ends_at = cluster.now + (1e9 if quiet else self.seconds)
        if self.has_slurm:
            environment |= {"SLURM_JOB_ID": str(self.job), "SLURM_RESTART_COUNT": str(self.slurm.restarts)}
        first = self.starts % self.hosts
        self.processes = [Process(cluster, f"node{first + rank // 2}", environment) for rank in range(size)]
        start_ranks(self.processes, partial(as_rank, self.work), self.ended)
        if self.slurm.ends_at < 1e8:
            start = self.starts
            cluster.call_at(self.slurm.ends_at, lambda: self.starts == start and self.signal_all("SIGTERM", 30.0))
        if self.faults and not quiet:
            self.faults -= 1
            step = cluster.steps + int(size * 10 ** random.uniform(1.0, 3.2))
            cluster.at_steps.append((step, self.fault))

    def fault(self) -> None:
        cluster, random = self.cluster, self.cluster.random
        kinds = ["pause", "clock", "death", "death", "SIGTERM", "SIGUSR2", "SIGINT", *["preemption"] * self.has_slurm]
        kind = random.choice(kinds)
        cluster.injected[kind] += 1
        process = random.choice(self.processes)
        if kind == "pause":
            process.stopped_until = cluster.now + 10 ** random.uniform(-2, 1.5)
        elif kind == "clock":
            process.wall += random.choice((-1, 1)) * 10 ** random.uniform(0, 5)
        elif kind == "death":
            process.end(-9)
        elif kind == "preemption":
            self.slurm.preempted = True
            self.signal_all("SIGTERM", 30.0)
        else:
            self.signal_all(kind, 30.0 if kind == "SIGTERM" else None)
        if self.faults and random.random() < 0.3:  # another one soon after
            self.faults -= 1
            cluster.at_steps.append((cluster.steps + int(10 ** random.uniform(0, 2)), self.fault))

    def signal_all(self, name: str, kill_after: float | None) -> None:
        now, random = self.cluster.now, self.cluster.random
        for process in self.processes:
            self.cluster.call_at(now + random.random() ** 2, partial(process.signal, signal.Signals[name].value))
            if kill_after is not None:
                self.cluster.call_at(now + kill_after, partial(process.end, -9))

    def kill_all(self, within: float) -> None:
        for process in self.processes:
            self.cluster.call_at(self.cluster.now + self.cluster.random.random() * within, partial(process.end, -9))

    def ended(self, process: Process) -> None:
        end_all(self.cluster, self.processes, process)
        if process in self.processes and all(each.status is not None for each in self.processes) and not self.is_over:
            self.check_statuses([each.status for each in self.processes])
            if {each.status for each in self.processes} == {0}:
                self.is_over = True
                return
            if self.slurm.state == "PENDING" or self.slurm.preempted:
                self.slurm.restarts += 1
            else:  # the user submits again
                self.job, self.slurm.restarts = self.job + 1, 0
            self.cluster.call_at(self.cluster.now + 1.0, self.start)

    def check_statuses(self, statuses: list[int | None]) -> None:
        """As docs/resume.md has them; a rank that is killed, or ends early, has the launcher kill the others."""
        known = {0, rank_commands.STOPPED_EARLY, -9, main.INTERRUPTED, 128 + signal.SIGINT, 128 + signal.SIGTERM}
        words = set(statuses) - {-9}
        early = {128 + signal.SIGINT, 128 + signal.SIGTERM}  # of ranks that did not answer yet, which end at once
        if (len(words) > 1 and not words <= early) or not words <= known:
            raise ScheduleError(f"start {self.starts} ends with statuses {statuses}")
        stops = {SIGNALS[number] for process in self.processes for number in process.signalled}
        asked = self.cluster.queued.count(str(self.starts))
        if words == {rank_commands.STOPPED_EARLY}:
            agreed = self.cluster.seen.get(("stopped", str(self.starts)))
            by_timer = agreed is Stop.KILL and self.cluster.now > self.slurm.ends_at - END_SECONDS
            if asked != (agreed is Stop.TIME) and not (asked == 1 and by_timer):
                raise ScheduleError(f"start {self.starts}, ended by {agreed!r}, asks {asked} times to be queued again")
            if not stops and self.slurm.ends_at > 1e8:
                raise ScheduleError(f"start {self.starts} ends early, and nobody asked")

    def work(self, process: Process) -> int:
        """One rank of one start, as ``run_as_rank`` and ``train`` of the command line run it."""
        cluster, plan, folder, start = self.cluster, self.plan, self.folder, process.environ["START"]
        config = SimpleNamespace(
            folder=folder.path, run=SimpleNamespace(num_steps=plan.rounds, seed=0),
            checkpoint=SimpleNamespace(every_steps=self.every),
            speculation=SimpleNamespace(trains_drafter=True), rollout=SimpleNamespace(group_size=1),
            evaluation=SimpleNamespace(every_steps=0),
        )  # fmt: skip
        progress = partial(describe_progress, config)
        world = begin(
            process,
            lambda flag: start_time_limit_timers(flag, process.environ, process.comm.rank, folder.path, progress),
        )
        BEAT.set_member(Member(world.rank, world.size, process.host, start, {}), lambda status: None)

        def claim() -> None:
            folder.make_missing_folders()
            claim_owner(folder.status, start)

        world.run_first_and_broadcast(claim)
        if world.rank == 0:
            start_watch(process, folder.status, start)
        pulse, engine = Pulse(world.duplicate_comm_all_ranks(), 50e-3), Engine(cluster, 0.3, None)
        engine.chooser = SimpleNamespace(acceptance=SimpleNamespace(state=dict, load_state=lambda state: None))
        engine.release_pages = lambda: None
        cache = SimpleNamespace(tolerating_write_errors=nullcontext, end_step=lambda: None, abandon_step=lambda: None)
        drafting = (
            Drafting(cache, Spot(), None, CheckpointStore(folder.drafter_checkpoints, 2)) if self.drafts else None
        )
        job = SimpleNamespace(
            world=world, pulse=pulse, engine=engine, folder=folder, config=config, drafting=drafting, start=start,
            load_engine_drafter=lambda: None,
            replica=SimpleNamespace(size=1, number=world.rank, mark=None), policy=Policy(world.rank, world.size),
            checkpoints=CheckpointStore(folder.checkpoints, 2), load_policy=lambda step: cluster.sleep(1e-3),
            prompts=None, own_replica_requests=list, calibrate=lambda *_: None,
            tail_plan=SimpleNamespace(add_step_metrics=lambda line: None),
            decoder=SimpleNamespace(device=torch.device("cpu"), shape=None), tokenizer=None,
            mismatch=SimpleNamespace(warning_for_step=lambda *_: ""),
        )  # fmt: skip
        reporter = SimpleNamespace(
            show_replayed_step=lambda step: None,
            show_start=lambda *_: None,
            show_step=lambda line: None,
            show_phase=lambda *_: None,
        )
        engine.memory_table = dict
        *_, result = train.take_steps(job, None, reporter)
        same(cluster, ("result", start), result.num_steps)
        pulse.close()
        status = 0
        if not result.finished:
            vote = world.agree_to_stop

            def agree() -> Stop:
                agreed = vote()
                same(cluster, ("stopped", start), agreed)
                return agreed

            world.agree_to_stop = agree
            status = rank_commands.requeue_stopped_job(world, folder.path, progress)
        world.finalise_mpi_all_ranks()
        return status


def play(cluster: Cluster, plan: Any) -> None:
    cluster.committed = cluster.adding = 0
    cluster.queued = []
    driver = Driver(cluster, plan)
    with parts():
        cluster.call_at(0.0, driver.start)
        cluster.run(2_000_000)
        if not driver.is_over:
            raise ScheduleError(f"the job never ends: {cluster.describe()}")
        check_end(driver.folder, plan.rounds)
        cluster.close()


def check_end(folder: RunFolder, num_steps: int) -> None:
    """What a finished run leaves: the lines of all steps, and a checkpoint of the last."""
    if list(read_lines(folder.metrics)) != list(range(num_steps)):
        raise ScheduleError(f"a finished run of {num_steps} steps has the lines of {list(read_lines(folder.metrics))}")
    found = CheckpointStore(folder.checkpoints, 1).open_newest()
    wanted = [num_steps] * NUM_WEIGHTS
    if found is None or found.step != num_steps or found.read_tensor("policy", "weights").tolist() != wanted:
        raise ScheduleError(f"a finished run of {num_steps} steps has the checkpoint {found}")
