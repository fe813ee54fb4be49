"""What watching costs a job: its steps with `tlt watch` beside it over those without, and a watcher's processor time.

    python tools/bench_watch.py --pairs 3 --watchers 4

Each pair trains the same steps twice, watched and alone, in turns. The watchers share the job's cores, which is the
worst case: on a cluster they run on a login node.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split


ROOT = Path(__file__).resolve().parent.parent
TLT = [sys.executable, "-m", "tlt_hpc"]
TICKS = os.sysconf("SC_CLK_TCK")
_BEGINNING = 4
"""Steps beside which the watchers start, which takes half a second of a core each."""


def main() -> None:
    """Run the pairs and print what was measured."""
    parser = argparse.ArgumentParser(description="What tlt watch costs the job that it watches.")
    parser.add_argument("--pairs", type=int, default=3, help="default 3")
    parser.add_argument("--watchers", type=int, default=4, help="default 4")
    parser.add_argument("--steps", type=int, default=16, help="of each run; the first four are left out (default 16)")
    options = parser.parse_args()
    ratios, shares = [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            seconds = {}
            for watched in (True, False) if pair % 2 else (False, True):
                run = Path(folder) / f"{'watched' if watched else 'alone'}-{pair}"
                seconds[watched], share = train(run, options.steps, options.watchers if watched else 0)
                shares += [share] if watched else []
            ratios.append(seconds[True] / seconds[False])
            print(
                f"pair {pair + 1}: median step {seconds[False]:.3f} s alone, {seconds[True]:.3f} s watched", flush=True
            )
    told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"{options.watchers} watchers: steps take {statistics.median(ratios):.3f} times as long (pairs: {told})")
    print(f"a watcher takes {statistics.median(shares):.2%} of a core while it follows")


def train(run: Path, num_steps: int, num_watchers: int) -> tuple[float, float]:
    """Median seconds of a step after the first few, while watchers start; a watcher's share of a core from then on."""
    command = [
        "train",
        "jobs/tiny.toml",
        f"run.name={run.name}",
        f"run.folder={run.parent}",
        f"run.num_steps={num_steps}",
    ]
    job = subprocess.Popen([*TLT, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(run / "metrics.jsonl", job)
    watchers = [start_watcher(run) for _ in range(num_watchers)]
    share = follow(job, watchers)
    if job.returncode != 0:
        raise SystemExit(f"bench_watch: the run ended with status {job.returncode}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["timing_s/step"] for line in lines[_BEGINNING:]), share


def wait_for(path: Path, job: subprocess.Popen[bytes]) -> None:
    while not (path.is_file() and path.stat().st_size):
        if job.poll() is not None:
            raise SystemExit(f"bench_watch: the run ended with status {job.returncode} before its first step")
        time.sleep(0.05)


def start_watcher(run: Path) -> tuple[int, int]:
    """Its process and its terminal: without one it would look once and end."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [*TLT, "watch", str(run)])
    return process, terminal


def follow(job: subprocess.Popen[bytes], watchers: list[tuple[int, int]]) -> float:
    """Until the job ends; a watcher's mean share of a core, its start left out."""
    began = {process: (time.monotonic() + 5.0, 0.0) for process, _ in watchers}
    used = dict.fromkeys(began, 0.0)
    terminals = [terminal for _, terminal in watchers]
    while job.poll() is None:
        if not terminals:
            time.sleep(0.1)
            continue
        for terminal in select.select(terminals, [], [], 0.2)[0]:
            if not read(terminal):
                terminals.remove(terminal)
        for process, (since, before) in began.items():
            now = processor_seconds(process)
            if time.monotonic() < since:
                began[process] = (since, now)
            else:
                used[process] = (now - before) / (time.monotonic() - since + 1e-9)
    for process, terminal in watchers:
        while read(terminal):
            pass
        os.waitpid(process, 0)
        os.close(terminal)
    return statistics.mean(used.values()) if used else 0.0


def read(terminal: int) -> bytes:
    """What a watcher has drawn; nothing once it has ended."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # how a terminal says that its process has gone
        return b""


def processor_seconds(process: int) -> float:
    """User and system time so far; a process that has ended keeps what it had when it was last asked."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    sys.exit(ending("bench_watch", main))
