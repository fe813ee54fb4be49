"""How long a run takes from its launch to the first round of decoding, by phase and number of ranks.

    python tools/bench_start.py --ranks 1,2,4,8,16                           # the embedded job
    python tools/bench_start.py --ranks 16 --repeats 1 speculation.mode=plain   # what ranks cost that only wait
    python tools/bench_start.py --ranks 4 jobs/mine.toml rollout.prompts_per_step=64

Starts the job for one step in a folder that is removed, and prints for each number of ranks the median over repeats of
the slowest rank's seconds in every phase: also how many bytes a rank gives to the collectives of all ranks until then,
in how many of them; and of the step's rollout the CPU seconds that the pulse took, against those of decoding, and what
share of a core a rank took while it had nothing left to decode. Ranks beyond the cores slow each other down.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.cluster.local import find_mpiexec, launch_environment

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = "TLT_BENCH_LAUNCHED"
FIGURES = ("MiB given", "collectives", "pulse CPU s", "of it waiting", "decode CPU s", "pulse/decode %", "waiting %")
PARTS = {
    "read_assets_once": "assets",
    "read_all_once": "drafter's weights",
    "start_model": "policy's weights",
    "join_process_group": "process group",
    "Policy": "DeepSpeed",
}
"""What session.py builds a run from, by the phase that it is."""


@dataclass
class Watch:
    """One rank's seconds by phase, and what else is counted."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=lambda: {"pulse": 0.0, "waiting": 0.0, "decode": 0.0})
    given_bytes: int = 0
    num_collectives: int = 0
    at: float = field(default_factory=time.time)
    rolling: bool = False
    decoded_at: tuple[float, float] = (0.0, 0.0)
    """Wall and CPU clock after the last round of decoding."""
    waited: tuple[float, float] = (0.0, 0.0)
    """Seconds, and CPU seconds, from then to the end of the rollout."""

    def mark(self, phase: str) -> None:
        """The time since the last mark was this phase's."""
        now = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.at
        self.at = now

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls are a phase, and what came before them the rest."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.mark("rest")
            try:
                return function(*arguments, **named)
            finally:
                self.mark(phase)

        return call

    def counted(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose CPU seconds in a rollout are added up."""

        def call(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                if self.rolling:
                    self.cpu[kind] += time.thread_time() - start
                    if kind == "decode":
                        self._decoded()
                        self.cpu["waiting"] = -self.cpu["pulse"]

        return call

    def gathers(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``World.allgather``, of which bytes and calls are counted until the first rollout."""

        def call(world: Any, item: Any) -> Any:
            if not self.rolling:
                self.given_bytes += len(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
                self.num_collectives += 1
            return function(world, item)

        return call

    def rolls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``roll_out``, until whose first round the start lasts."""

        def call(*arguments: Any) -> Any:
            self.mark("rest")
            self.rolling = True
            found = function(*arguments)
            self.rolling = False
            self.cpu["waiting"] += self.cpu["pulse"]
            wall, cpu = self.decoded_at
            self.waited = (time.perf_counter() - wall, time.process_time() - cpu)
            return found

        return call

    def _decoded(self) -> None:
        if not self.decoded_at[0]:
            self.mark("first round")
        self.decoded_at = (time.perf_counter(), time.process_time())


class Silent:
    """A reporter that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def be_rank(job: str, overrides: Sequence[str], out: str) -> None:
    """One rank: the job's first step, with its parts replaced by timed ones."""
    watch = Watch(at=float(os.environ[LAUNCHED]))
    from tlt_hpc.cli import main as cli
    from tlt_hpc.cluster.local import given_job
    from tlt_hpc.config import load_config

    config = load_config(job, overrides, given_job(os.environ, job))
    options = cli.parse(["train", job, *overrides])
    watch.mark("Python")
    from tlt_hpc import session as parts
    from tlt_hpc import train as loop
    from tlt_hpc.cluster.stopping import StopFlag
    from tlt_hpc.mpi.pulse import Pulse
    from tlt_hpc.mpi.world import World
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.rollout.engine import RolloutEngine

    watch.mark("imports")
    World.connect()
    watch.mark("MPI")
    _put(World, "allgather", watch.gathers)
    world = cli.connect(config, options, StopFlag())
    watch.mark("node check, plan")
    for name, phase in PARTS.items():
        _put(parts, name, partial(watch.timed, phase))
    _put(RolloutEngine, "calibrate", partial(watch.timed, "calibration"))
    _put(RolloutEngine, "profile", partial(watch.timed, "cost profile"))
    _put(RolloutEngine, "step", partial(watch.counted, "decode"))
    for name in ("poll", "back_off", "_advance", "_rest", "_wake"):
        _put(Pulse, name, partial(watch.counted, "pulse"))
    _put(loop, "roll_out", watch.rolls)
    loop.run(config, world, Silent())
    told: dict[str, Any] = {"seconds": watch.seconds, "cpu": watch.cpu, "waited": watch.waited}
    told |= {"bytes": watch.given_bytes, "collectives": watch.num_collectives}
    Path(out, f"{world.rank}.json").write_text(json.dumps(told))
    leave_process_group()
    world.leave()


def _put(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, wrap(vars(owner)[name]))


def start(num_ranks: int, job: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """What every rank measured of one start."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["run.num_steps=1", f"run.folder={folder}/runs", *overrides]
        program = [str(Path(__file__).resolve()), "--rank", folder, job, *own]
        environment = launch_environment(num_ranks, {**os.environ, LAUNCHED: repr(time.time())}, job)
        command = [find_mpiexec(), "-n", str(num_ranks), sys.executable, "-m", "mpi4py", *program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"bench_start: {num_ranks} ranks ended with status {done.returncode}: {done.stderr[-2000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def figures_of(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """One start in figures: of phases the slowest rank's seconds, of CPU seconds all ranks' together."""
    names = dict.fromkeys(name for rank in ranks for name in rank["seconds"])
    found = {name: max(rank["seconds"].get(name, 0.0) for rank in ranks) for name in names}
    found["to the first round"] = max(sum(rank["seconds"].values()) for rank in ranks)
    pulse, late, decode = (sum(rank["cpu"][kind] for rank in ranks) for kind in ("pulse", "waiting", "decode"))
    wall, cpu = (sum(rank["waited"][place] for rank in ranks) for place in (0, 1))
    given = max(rank["bytes"] for rank in ranks) / 2**20
    shares = (100 * pulse / decode, 100 * cpu / wall if wall else 0.0)
    values = (given, ranks[0]["collectives"], pulse, late, decode, *shares)
    return found | dict(zip(FIGURES, values, strict=True))


def main(arguments: Sequence[str]) -> None:
    """Measure, and print a table with a column for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default 1,2,4)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="starts for each, of which the median counts (default 3)"
    )
    parser.add_argument("rest", nargs="*", metavar="JOB.toml section.key=value", help="default jobs/tiny.toml")
    options = parser.parse_args(arguments)
    is_job = bool(options.rest) and "=" not in options.rest[0]
    job = options.rest[0] if is_job else str(ROOT / "jobs" / "tiny.toml")
    columns = {}
    for num_ranks in map(int, options.ranks.split(",")):
        starts = [figures_of(start(num_ranks, job, options.rest[is_job:])) for _ in range(options.repeats)]
        columns[num_ranks] = {name: statistics.median(one.get(name, 0.0) for one in starts) for name in starts[0]}
        print(f"{num_ranks} ranks: {columns[num_ranks]}", file=sys.stderr, flush=True)
    print("".join(["ranks".ljust(20), *(f"{count:>9}" for count in columns)]))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        print("".join([name.ljust(20), *(f"{column.get(name, 0.0):9.2f}" for column in columns.values())]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[3], sys.argv[4:], sys.argv[2])
    else:
        sys.exit(ending("bench_start", lambda: main(sys.argv[1:])))
