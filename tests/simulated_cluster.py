"""Replays a whole cluster from a seed: the package's own coordination code on simulated ranks, with faults.

python tests/simulated_cluster.py --seeds 0:1000000 --processes 2
python tests/simulated_cluster.py --seeds 4711:4712                     # one schedule
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import simulated_job
import simulated_owners
import simulated_rollout
from simulated_modules import simulated
from simulated_processes import RUNNING, Cluster

from tlt_hpc.mpi import progress

SCENARIOS = {"rollout": simulated_rollout.play, "job": simulated_job.play, "owners": simulated_owners.play}
MOST_RANKS = 512
LARGE = 1900
"""Each so many seeds one has many ranks."""
CHUNK = 9500
"""Seeds of a process at a time; ``LARGE`` divides it."""


@dataclass(frozen=True)
class Plan:
    """One schedule. What is not here follows from the seed."""

    seed: int
    scenario: str
    ranks: int
    rounds: int
    """Rollouts, or steps of a job."""
    faults: int


def plan_of(seed: int) -> Plan:
    """The schedule of a seed: each ``LARGE``-th has one of the sizes from 2 to 512 in turn, the others are small."""
    random = Random(f"plan {seed}")
    faults = random.choice((0, 1, 1, 2, 3, 5))
    if seed % LARGE == 0:
        return Plan(seed, "rollout", 2 + seed // LARGE % (MOST_RANKS - 1), 1, faults)
    scenario = random.choices(("rollout", "job", "owners"), (94, 4, 2))[0]
    if scenario == "rollout":
        return Plan(seed, scenario, min(2 + int(random.expovariate(0.8)), 24), random.choice((1, 1, 1, 2, 3)), faults)
    if scenario == "job":
        return Plan(seed, scenario, random.choice((1, 2, 2, 2, 3, 3, 4, 6)), random.randint(1, 5), faults)
    return Plan(seed, scenario, random.choice((2, 2, 3)), random.randint(1, 6), faults)


def play(plan: Plan) -> Cluster:
    """Run one schedule; raises what does not hold."""
    random = Random(f"{plan.seed} 0")
    cluster = Cluster(
        f"{plan.seed} 0 of {plan.ranks}",
        lines=plan.ranks <= 6 and random.random() < 0.03,
        weak=random.random() < 0.4,
        jitter=random.choice((1e-6, 2e-5, 1e-3)),
    )
    RUNNING.append(cluster)
    progress.MAX_PAUSE_SECONDS = 4e-3 if plan.scenario == "rollout" else 0.2
    with TemporaryDirectory(prefix="simulated-", dir="/dev/shm") as folder:
        cluster.folder = Path(folder)
        try:
            SCENARIOS[plan.scenario](cluster, plan)
        finally:
            cluster.close()
            RUNNING.pop()
    return cluster


def error_of(plan: Plan) -> str:
    """What does not hold in a schedule, in one line; empty if all does."""
    try:
        play(plan)
    except Exception as error:  # noqa: BLE001  (any error in a simulated process is a finding)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return ""


def run_seeds(seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """How many schedules of each scenario were run, and what to say of those that failed."""
    logging.disable(logging.CRITICAL)
    ran, failures = Counter[str](), []
    with simulated():
        for plan in map(plan_of, seeds):
            ran[plan.scenario] += 1
            if error := error_of(plan):
                failures.append(f"{plan}: {error}")
    logging.disable(logging.NOTSET)
    return ran, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:2000", help="FIRST:LAST, without LAST itself")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help=f"only each N-th seed; {LARGE}: those of large sizes")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    parts = [range(start, min(start + CHUNK, last), options.every) for start in range(first, last, CHUNK)]
    total, has_failed = Counter[str](), False
    with ProcessPoolExecutor(options.processes, initializer=gc.freeze) as pool:
        for ran, failures in pool.map(run_seeds, parts):
            total += ran
            has_failed |= bool(failures)
            print("\n".join([*failures, f"{total.total()} schedules: {dict(total)}"]), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
