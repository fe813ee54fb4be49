"""Replays a whole cluster from a seed: the package's own coordination code on simulated ranks, with faults.

    python tests/simulated_cluster.py --seeds 0:1000000 --processes 2
    python tests/simulated_cluster.py --seed 4711 --ranks 2 --faults 1      # one schedule, smaller than its seed says

A schedule that fails is printed with its seed, and with the smallest schedule found that fails as well.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
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
SHRINK_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """One schedule. What is not here follows from the seed, and differs with ``salt``."""

    seed: int
    scenario: str
    ranks: int
    rounds: int
    """Rollouts, or steps of a job."""
    faults: int
    salt: int = 0

    @property
    def command(self) -> str:
        """What runs this schedule again."""
        words = [
            f"--{name} {value}" for name, value in asdict(self).items() if value != getattr(plan_of(self.seed), name)
        ]
        return " ".join(["python tests/simulated_cluster.py --seed", str(self.seed), *words])


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
    random = Random(f"{plan.seed} {plan.salt}")
    cluster = Cluster(
        f"{plan.seed} {plan.salt} of {plan.ranks}",
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


def smaller(plan: Plan) -> Iterator[Plan]:
    """Schedules with fewer ranks, rounds or faults than one that failed, the smallest first."""
    least = 1 if plan.scenario == "job" else 2
    for name, lowest in (("ranks", least), ("rounds", 1), ("faults", 0)):
        value = getattr(plan, name)
        for less in sorted({lowest, (lowest + value) // 2, value - 1}):
            if lowest <= less < value:
                yield from (replace(plan, salt=salt, **{name: less}) for salt in range(25))


def shrink(plan: Plan) -> Plan:
    """The smallest schedule found in a minute that fails too, whatever its error is."""
    end = time.monotonic() + SHRINK_SECONDS
    while found := next((less for less in smaller(plan) if time.monotonic() < end and error_of(less)), None):
        plan = found
    return plan


def run_seeds(seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """How many schedules of each scenario were run, and what to say of those that failed."""
    logging.disable(logging.CRITICAL)
    ran, failures = Counter[str](), []
    with simulated():
        for plan in map(plan_of, seeds):
            ran[plan.scenario] += 1
            if error := error_of(plan):
                least = shrink(plan)
                failures.append(f"{least.command}\n    {error_of(least)}\n    (seed {plan.seed}: {error})")
    logging.disable(logging.NOTSET)
    return ran, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:2000", help="FIRST:LAST, without LAST itself")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help=f"only each N-th seed; {LARGE}: those of large sizes")
    parser.add_argument("--seed", type=int, help="one schedule alone")
    for name in ("ranks", "rounds", "faults", "salt"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    if options.seed is not None:
        given = {f.name: value for f in fields(Plan) if (value := getattr(options, f.name, None)) is not None}
        with simulated():
            play(replace(plan_of(options.seed), **given))
        return 0
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
