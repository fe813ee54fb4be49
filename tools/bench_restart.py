"""Measure the time from the kill of a rank to the first new tokens of the resumed run, and where it goes.

    python tools/bench_restart.py                            # 2 and 8 ranks, five kills each
    python tools/bench_restart.py --ranks 2 --repeats 9 --job jobs/tiny.toml

The job is started by ``tlt train``, a rank is killed in a rollout, and the same command starts it again at once. The
seconds are medians: from the kill to the end of the command, and from the next start to its first tokens, with the
stages that the run itself names. A queue's wait is not part of it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from faults import HANG_SECONDS, MARK, ROOT, num_steps, ranks_in, send

from tlt_hpc.common.errors import UserError

FIRST = "  first tokens "
"""How the line begins that a run prints at its first tokens."""
_LINES_OF_A_START = ("starting ", "  ", "step ")
_LONGEST_DELAY = 1.5
"""Seconds after a step at which a rank is killed, at most."""


class Job:
    """A run of some ranks that is killed again and again."""

    def __init__(self, job: str, ranks: int, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._command = [sys.executable, "-m", "tlt_hpc", "train", job, f"run.ranks={ranks}", f"run.folder={folder}"]
        self._command += ["run.name=run", "run.num_steps=1000000", "checkpoint.every_steps=1"]
        self._ended = 0.0

    def start(self) -> tuple[subprocess.Popen[str], list[tuple[str, float]]]:
        """Start it, or again; returns the stages until its first tokens with their seconds.

        Raises:
            UserError: it ends before.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: str(self._folder)}
        began = time.monotonic()
        process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        stages: list[tuple[str, float]] = []
        name, since, lines = "the command", began, list[str]()
        for line in process.stdout:
            lines.append(line)
            now = time.monotonic()
            if line.startswith(FIRST):
                return process, [*stages, (name, now - since)]
            if line.startswith(_LINES_OF_A_START):
                stages.append((name, now - since))
                name, since = re.sub(r" \d+.*", "", line.strip()), now
        raise UserError(f"the run ended before its first tokens: {' '.join(lines[-3:])}")

    def kill(self, process: subprocess.Popen[str], rank: int, delay: float) -> float:
        """Kill a rank so many seconds after the next step; returns the seconds until the command has ended."""
        steps, end = num_steps(self._folder) + 1, time.monotonic() + HANG_SECONDS
        while num_steps(self._folder) < steps:
            if process.poll() is not None or time.monotonic() > end:
                raise UserError(f"the run in {self._folder} made no step in {HANG_SECONDS:.0f} s")
            time.sleep(0.02)
        time.sleep(delay)
        at = time.monotonic()
        send(signal.SIGKILL, [ranks_in(self._folder)[rank]])
        process.wait(HANG_SECONDS)
        return time.monotonic() - at

    def measure(self, repeats: int, seed: int) -> None:
        """Print the medians."""
        source, ends, starts = random.Random(seed), [], []
        process, _ = self.start()
        for _ in range(repeats):
            ends.append(self.kill(process, source.randrange(self._ranks), source.uniform(0.0, _LONGEST_DELAY)))
            process, stages = self.start()
            starts.append(dict(stages))
        self.kill(process, 0, 0.0)
        totals = [sum(stages.values()) for stages in starts]
        both = [end + total for end, total in zip(ends, totals, strict=True)]
        print(
            f"{self._ranks} ranks, {repeats} kills: {median(both):.1f} s to the first new tokens ({min(both):.1f} to "
            f"{max(both):.1f}); the job's end {median(ends):.1f}, the start {median(totals):.1f}"
        )
        for name in dict.fromkeys(name for stages in starts for name in stages):
            taken = [stages[name] for stages in starts if name in stages]
            print(f"  {median(taken):6.2f}  {name}{'' if len(taken) == repeats else f' ({len(taken)} times)'}")


def main() -> int:
    """Measure with each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--job", default="jobs/tiny.toml")
    parser.add_argument("--seed", type=int, default=0, help="of the ranks that are killed")
    options = parser.parse_args()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="restart-") as folder:
            Job(options.job, ranks, Path(folder)).measure(options.repeats, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_restart", main))
