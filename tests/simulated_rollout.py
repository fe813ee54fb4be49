"""Rollouts of simulated ranks: pulse, roster, progress threads, replicas, draft-ahead, and the votes between them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simulated_mpi import start_ranks
from simulated_processes import Cluster, Process, ScheduleError

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli import main
from tlt_hpc.cluster.stopping import Stop, StopFlag
from tlt_hpc.cluster.watch.record import HEARTBEAT_SECONDS, Record, write_record
from tlt_hpc.config import UserError
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.replica import Replica, ReplicaPulse
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.ahead_generation import AheadGeneration
from tlt_hpc.run import rollout_loop
from tlt_hpc.run.saving import agree_to_continue
from tlt_hpc.run.session import Session
from tlt_hpc.storage.folder import WriteError

SIGNALS = {signal.SIGTERM: Stop.KILL, signal.SIGUSR2: Stop.TIME, signal.SIGINT: Stop.ASKED}


class Engine:
    """Decodes nothing, for as many rounds as it is asked to; agrees with its replica as the engine does."""

    def __init__(self, cluster: Cluster, seconds: float, agree: Any) -> None:
        self._cluster, self._seconds, self._agree = cluster, seconds, agree
        self.left: list[int] = []
        self.ahead = SimpleNamespace(waiting=[], end_and_keep_texts=lambda: None)
        self.finished_rollouts: list[int] = []
        self.num_tokens = self.text_mark = 0
        self.may_prefill = False
        self.at_end = lambda: None

    has_work = property(lambda self: bool(self.left))
    has_ahead_work = property(lambda self: bool(self.ahead.waiting))
    num_unfinished = property(lambda self: len(self.left))

    def submit(self, rounds: list[int]) -> None:
        self.left += rounds
        self.may_prefill = bool(rounds)
        if not rounds:
            self.at_end()

    def submit_ahead(self, rounds: list[int]) -> None:
        self.ahead.waiting += rounds

    def step(self) -> None:
        self.num_tokens += 1
        if self._agree and self.num_tokens % 3:
            self._agree(self.num_tokens)
        self._cluster.sleep(self._seconds * self._cluster.random.random())
        work, self.may_prefill = self.left or self.ahead.waiting, False
        if work:
            work[0] -= 1
            if work[0] <= 0:
                work.pop(0)
                self.finished_rollouts.append(self.num_tokens)
                if work is self.left and not work:
                    self.at_end()

    def abort(self) -> None:
        self.left.clear()
        self.ahead.waiting.clear()


class Scorer:
    """Judges slowly, until it is told to stop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._num_scored = cluster, 0

    def has_unscored(self, finished: list[int]) -> bool:
        return self._num_scored < len(finished)

    def score_while_waiting(self, finished: list[int], is_over: Any) -> None:
        while self._num_scored < len(finished) and not is_over():
            self._cluster.sleep(2e-3)
            self._num_scored += 1


class Spot:
    """Takes micro-steps that train nothing and end at the release."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.records: list[int] = []

    def take_micro_step(self, is_over: Any) -> bool:
        for _ in range(self._cluster.random.randint(1, 20)):
            if is_over():
                return True
            self._cluster.sleep(1e-3)
        self.records.append(1)
        return self._cluster.random.random() < 0.9


def same(cluster: Cluster, key: Any, value: Any) -> None:
    """What every rank must see alike."""
    if cluster.seen.setdefault(key, value) != value:
        raise ScheduleError(f"{key}: {value} on one rank, {cluster.seen[key]} on another")


def agree(world: World, key: Any) -> Stop:
    """A vote, whose result is alike on all ranks, and as urgent as every signal of this rank before it."""
    cluster = world.process.cluster
    own = max((SIGNALS[number] for number in world.process.signalled), default=Stop.NONE)
    agreed = world.agree_to_stop()
    same(cluster, ("vote", key), agreed)
    if agreed < own:
        raise ScheduleError(f"vote {key} is {agreed!r} where rank {world.rank} had been sent {own!r}")
    if world.flag.kind < agreed:
        raise ScheduleError(f"vote {key} is {agreed!r}, and the flag of rank {world.rank} {world.flag.kind!r}")
    return agreed


def begin(process: Process, know: Callable[[StopFlag], None] = lambda flag: None) -> World:
    """What ``main`` and ``connect_all_ranks`` of the command line do, without their checks."""
    flag = StopFlag()
    flag.install_signal_handlers()
    know(flag)
    world = World(process.comm, flag)
    world.process = process
    world.answer_signals()
    return world


def as_rank(work: Callable[[Process], int], process: Process) -> int:
    """A rank's exit status; what ends it early is handled as ``run_as_rank`` of the command line does."""
    try:
        return work(process)
    except (UserError, WriteError) as error:
        return main.end_ranks_with_error(main.to_user_error(error), process.comm.rank)
    except KeyboardInterrupt:
        process.cluster.injected["second Ctrl-C"] += 1
        return main.end_ranks_with_error(UserError("interrupted"), process.comm.rank, main.INTERRUPTED)


def play(cluster: Cluster, plan: Any) -> None:
    random = cluster.random
    tensor_parallel = random.choice([n for n in (1, 1, 1, 2, 3, 4) if plan.ranks % n == 0]) if plan.ranks <= 24 else 1
    longest = random.choice((1, 2, 4, 12)) if plan.ranks <= 24 else 2
    shape = SimpleNamespace(
        tensor_parallel=tensor_parallel, rollouts=plan.rounds, seconds=random.choice((1e-4, 1e-3, 5e-3)),
        busy=random.choice((0.0, 50e-3)), trains=random.random() < 0.4, ahead=random.random() < 0.4,
        unused=random.randint(1, plan.ranks),  # drawn so that seeds keep their schedules
        work=[[[random.randint(1, longest) for _ in range(random.choice((0, 1, 1, 3)))]
               for _ in range(plan.ranks // tensor_parallel)] for _ in range(plan.rounds)],
    )  # fmt: skip
    environment = random.choice(({}, {"SLURM_JOB_ID": "17"}))
    processes = [Process(cluster, f"node{rank // 4}", environment) for rank in range(plan.ranks)]
    start_ranks(processes, partial(as_rank, partial(roll, cluster, shape)), partial(end_all, cluster, processes))
    inject(cluster, plan, processes)
    cluster.run(40_000 + 12_000 * plan.ranks)
    left = [rank for rank, process in enumerate(processes) if process.status is None]
    if left:
        raise ScheduleError(f"ranks {left[:8]} never end: {cluster.describe()}")
    statuses = {process.status for process in processes}
    allowed = {0} | ({-9} if cluster.injected["death"] else set())
    if cluster.injected["second Ctrl-C"]:
        allowed |= {main.INTERRUPTED, -9}
    if cluster.injected["signal before the ranks answer"]:
        allowed |= {128 + signal.SIGINT, 128 + signal.SIGTERM, -9}
    if statuses - allowed:
        raise ScheduleError(f"ranks end with statuses {statuses}")


def start_watch(process: Process, status: Path, start: str) -> Record:
    """Have a rank 0 write its heartbeat; its record."""
    record = Record(start, 0, process.host, process.pid, 0, "rollout", 0, "", 0, "", 0, 0, 0, 0, 0.0)

    def beat() -> None:
        for number in itertools.count():
            write_record(status, replace(record, heartbeat=number))
            process.cluster.sleep(HEARTBEAT_SECONDS)

    process.spawn(beat)
    return record


def end_all(cluster: Cluster, processes: list[Process], ended: Process) -> None:
    """The launcher: a rank that ends with a status other than 0 ends the others, which takes a while."""
    if ended.status:
        for process in processes:
            if process.status is None:
                cluster.call_at(cluster.now + cluster.random.random() ** 4 * 5, partial(process.end, -9))


def inject(cluster: Cluster, plan: Any, processes: list[Process]) -> None:
    """Faults at random moments, counted in steps of the scheduler."""
    random = cluster.random
    for _ in range(plan.faults):
        step = int(len(processes) * 10 ** random.uniform(0, 2.5))
        kind = random.choice(("pause", "pause", "signal", "signal", "clock", "death"))
        cluster.at_steps.append((step, partial(fault, cluster, kind, processes)))
    cluster.at_steps.sort(key=lambda each: -each[0])


def fault(cluster: Cluster, kind: str, processes: list[Process]) -> None:
    random = cluster.random
    process = random.choice(processes)
    if process.status is not None:
        return
    if kind == "pause":
        process.stopped_until = cluster.now + 10 ** random.uniform(-4, -0.3)
    elif kind == "clock":
        for each in processes:
            if each.host == process.host:
                each.wall += random.choice((-1, 1)) * 10 ** random.uniform(-1, 5)
    elif kind == "death":
        process.end(-9)
    else:
        kind = random.choice(("SIGTERM", "SIGUSR2", "SIGINT"))
        sent = processes if random.random() < 0.6 else [process]
        for each in sent:
            cluster.call_at(cluster.now + random.random() ** 3 * 0.1, partial(each.signal, signal.Signals[kind].value))
    cluster.injected[kind] += 1


def roll(cluster: Cluster, shape: Any, process: Process) -> int:
    """One rank: rollouts until all are done or a stop is agreed on."""
    world = begin(process)
    replica = Replica(world, shape.tensor_parallel)
    comm = world.duplicate_comm_all_ranks()
    pulse = ReplicaPulse(comm, replica, shape.busy) if replica.size > 1 else Pulse(comm, shape.busy)
    engine = Engine(cluster, shape.seconds, replica.broadcast_from_first_rank if replica.size > 1 else None)
    spot, use = Spot(cluster), SimpleNamespace(trains=shape.trains, ahead=shape.ahead)
    job = SimpleNamespace(
        world=world, replica=replica, pulse=pulse, engine=engine, checkpoints=CheckpointStore(cluster.folder, 1),
        drafting=SimpleNamespace(spot=spot) if shape.trains else None,
    )  # fmt: skip
    stop = Stop.NONE
    for epoch in range(shape.rollouts):
        own = max((SIGNALS[number] for number in process.signalled), default=Stop.NONE)
        goes_on = agree_to_continue(world, job.checkpoints)
        same(cluster, ("continues", epoch), goes_on)
        if not goes_on:
            break
        if own:
            raise ScheduleError(f"rank {world.rank} was sent {own!r}, and rollout {epoch} begins")
        spot.records.clear()
        requests = list(shape.work[epoch][replica.number])
        ahead = AheadGeneration(engine, replica, pulse, shape.work[epoch] if use.ahead else [])
        roster = generate(cluster, job, epoch, requests, Scorer(cluster), use, ahead)
        engine.abort()
        ahead.end_idle_span()
        if roster.has_stop_vote:
            stop = agree(world, ("rollout", epoch))
            if not stop:
                raise ScheduleError(f"rollout {epoch} was stopped, and no rank wants to stop")
            break
    agreed = agree(world, "last")
    if agreed < stop:
        raise ScheduleError(f"{stop!r} was agreed on, later {agreed!r}")
    pulse.close()
    world.finalise_mpi_all_ranks()
    return 0


def generate(
    cluster: Cluster, job: Any, epoch: Any, requests: list[int], scorer: Scorer, use: Any, ahead: AheadGeneration
) -> Any:
    """``Session.generate`` as ``generate_until_all_finish`` calls it, and what rosters must hold."""
    rank, engine, counts = job.world.rank, job.engine, job.pulse._comm.group.counts
    posted = cluster.seen.setdefault(("posted", epoch), {})
    rounds = [0]
    number = epoch[1] if isinstance(epoch, tuple) else epoch

    def look(roster: Any) -> None:
        if roster.round:
            same(cluster, (epoch, roster.round), roster.records.tobytes())
        if roster.epoch != number or roster.round < rounds[0]:
            raise ScheduleError(f"rank {rank} sees round {roster.round} of {roster.epoch} after {rounds[0]} of {epoch}")
        rounds[0] = roster.round

    def at_end() -> None:
        posted[rank] = counts[rank]

    engine.at_end = at_end
    before = counts[rank]
    roster = Session.generate(
        job, engine, requests,
        on_idle=lambda roster: rollout_loop.train_or_generate_ahead(job, scorer, use, ahead, roster),
        status=lambda: rollout_loop.rank_status(engine, job.world, job.drafting, ahead), shown=look, epoch=number,
    )  # fmt: skip
    look(roster)
    same(cluster, ("last round", epoch), roster.round)
    if counts[rank] - before != roster.round:
        raise ScheduleError(f"rank {rank} has posted {counts[rank] - before} rounds, and leaves with {roster.round}")
    if any(status.tokens for other, status in enumerate(roster.statuses) if other % job.replica.size):
        raise ScheduleError(f"the tokens of a replica are counted more than once: {roster.statuses}")
    if not roster.is_over:
        raise ScheduleError(f"rank {rank} leaves rollout {epoch} before it is over")
    if not roster.has_stop_vote and (engine.left or len(posted) < job.world.size):
        raise ScheduleError(f"rank {rank} leaves rollout {epoch} while {job.world.size - len(posted)} ranks decode")
    if not roster.has_stop_vote and counts[rank] > max(posted.values()) + 1:
        raise ScheduleError(f"rollout {epoch} ends {counts[rank] - max(posted.values())} rounds after its last token")
    return roster
