"""What the pulse takes of the ranks' cores, and how late it releases them: ranks whose decoding is made up.

    python tools/bench_pulse.py --ranks 16                     # more ranks than cores
    python tools/bench_pulse.py --ranks 2,4,8,16 --round-ms 20

Every rank does rounds of work that take a fixed time of its core and turn its caches over, as many as its longest
response has tokens (log-normal), and then waits for the others, as a rank of a rollout without a drafter does. Told for
each number of ranks, over all ranks and rollouts: CPU seconds of the pulse in percent of the work's, by ranks that work
and by ranks that wait; looks; rounds of the pulse; and the milliseconds from the last rank's last round of work to each
rank's release, median and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np

from tlt_hpc.cluster.local import find_mpiexec, launch_environment

TURNED_OVER_BYTES = 2**22
SIGMA = 0.6
"""Of the logarithm of a rank's rounds: the longest of 16 has about three times the median's."""


class Work:
    """Rounds of a fixed time of this rank's core."""

    def __init__(self, round_seconds: float) -> None:
        self._round_seconds = round_seconds
        self._buffer = np.zeros(TURNED_OVER_BYTES // 8)
        self.cpu_seconds = 0.0

    def round(self) -> None:
        start = time.thread_time()
        while (now := time.thread_time()) < start + self._round_seconds:
            self._buffer += 1.0
        self.cpu_seconds += now - start


def be_rank(folder: str, num_rollouts: int, num_rounds: float, round_seconds: float, is_flat: bool) -> None:
    """One rank, which writes what it measured."""
    from tlt_hpc.mpi.exchange import FlatExchange, open_exchange
    from tlt_hpc.mpi.pulse import BUSY_SECONDS, RECORD_FIELDS, Pulse
    from tlt_hpc.mpi.roster import State, Status
    from tlt_hpc.mpi.world import World

    world = World.connect()
    num_fields = len(RECORD_FIELDS)
    exchange = FlatExchange(world.private_comm(), num_fields) if is_flat else open_exchange(world, num_fields)
    pulse, work = Pulse(exchange, busy_seconds=BUSY_SECONDS), Work(round_seconds)
    random = np.random.default_rng([1, world.rank])
    cpu, looks, waited, late = {"busy": 0.0, "idle": 0.0}, {"busy": 0, "idle": 0}, 0.0, list[float]()
    for epoch in range(num_rollouts):
        left = max(1, int(num_rounds * random.lognormal(0.0, SIGMA)))
        world.barrier()
        pulse.begin(epoch)
        finished = time.time()
        while True:
            kind = "busy" if left else "idle"
            start = time.thread_time()
            over = pulse.poll(Status(State.BUSY if left else State.IDLE, left, 0, 0)).over
            if not left and not over:
                pulse.back_off()
            cpu[kind] += time.thread_time() - start
            looks[kind] += 1
            if over:
                break
            if left:
                work.round()
                left -= 1
                finished = time.time()
        released = time.time()
        waited += released - finished
        late.append(1e3 * (released - max(world.allgather(finished))))
    pulse.close()
    found = {"cpu": cpu, "looks": looks, "waited": waited, "late": late, "work": work.cpu_seconds}
    Path(folder, f"{world.rank}.json").write_text(json.dumps({**found, "rounds": pulse.num_rounds}))
    world.leave()


def measure(num_ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """One job's figures."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(options.rollouts), str(options.rounds), str(options.round_ms / 1e3), "flat" * options.flat]
        program = [str(Path(__file__).resolve()), "--rank", folder, *given]
        command = [find_mpiexec(), "-n", str(num_ranks), sys.executable, "-m", "mpi4py", *program]
        start = time.perf_counter()
        environment = launch_environment(num_ranks, os.environ, "")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"bench_pulse: {num_ranks} ranks ended with status {done.returncode}: {done.stderr[-2000:]}")
        took = time.perf_counter() - start
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {**figures_of(ranks), "s in all": took}


def figures_of(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of all ranks together."""
    work = sum(rank["work"] for rank in ranks)
    busy, idle = (sum(rank["cpu"][kind] for rank in ranks) for kind in ("busy", "idle"))
    busy_looks, idle_looks = (sum(rank["looks"][kind] for rank in ranks) for kind in ("busy", "idle"))
    late = [each for rank in ranks for each in rank["late"]]
    return {
        "pulse/work %": 100 * (busy + idle) / work,
        "of it busy %": 100 * busy / work,
        "of it waiting %": 100 * idle / work,
        "busy look us": 1e6 * busy / busy_looks,
        "waiting look us": 1e6 * idle / idle_looks,
        "waiting looks/s": idle_looks / sum(rank["waited"] for rank in ranks),
        "work CPU s": work,
        "rounds": ranks[0]["rounds"],
        "release ms median": statistics.median(late),
        "release ms worst": max(late),
    }


def main(arguments: Sequence[str]) -> None:
    """Measure, and print a table with a column for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16", help="numbers of ranks (default 2,4,8,16)")
    parser.add_argument("--repeats", type=int, default=3, help="jobs for each, of which the median counts (default 3)")
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts a job (default 4)")
    parser.add_argument("--rounds", type=float, default=60, help="median of a rank's rounds of work (default 60)")
    parser.add_argument("--round-ms", type=float, default=3.0, help="of a core, for a round of work (default 3)")
    parser.add_argument("--flat", action="store_true", help="by MPI alone, as where ranks share no memory")
    options = parser.parse_args(arguments)
    columns = {}
    for num_ranks in map(int, options.ranks.split(",")):
        jobs = [measure(num_ranks, options) for _ in range(options.repeats)]
        columns[num_ranks] = {name: statistics.median(job[name] for job in jobs) for name in jobs[0]}
    print("".join(["ranks".ljust(20), *(f"{count:>9}" for count in columns)]))
    for name in next(iter(columns.values())):
        print("".join([name.ljust(20), *(f"{column[name]:9.2f}" for column in columns.values())]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]), bool(sys.argv[6]))
    else:
        sys.exit(ending("bench_pulse", lambda: main(sys.argv[1:])))
