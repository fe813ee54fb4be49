"""Strikes one run again and again, by a seed, and holds its end against a run that was left alone. For ``faults.py``.

Everything lies in one folder: ``run`` is struck, ``results.jsonl`` gets a line for each fault, so that a campaign goes
on where it was left, and ``straight`` is the run that it is held against.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fault_rank import PLACES

from tlt_hpc.launch.local import find_mpiexec
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
LONGEST_SECONDS = 120.0
"""From a fault to the end of the job; more is a hang."""
MARK = "TLT_FAULT_CAMPAIGN"
"""Of a run's processes, in their environment."""
DISK_ROOM = 400_000
"""Bytes that a disk has left that is to run full."""
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "speculation.profile_seconds=0", "checkpoint.every_steps=3", "checkpoint.keep_responses_seconds=0.2",
    f"run.ranks={RANKS}", "run.name=run",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens to one start of the run."""

    kind: str
    """place, kill, limit (SIGUSR2 to all ranks), cancel (SIGTERM to all, SIGKILL five seconds later) or disk."""
    detail: str
    """Of a place: where, which rank, at the how-manieth coming. Else the rank."""
    after_steps: int
    """Steps to be committed before it strikes; a place strikes when it is come to."""
    seconds: float
    """After those."""


@dataclass(frozen=True)
class Result:
    """What a fault did."""

    number: int
    fault: Fault
    struck: bool
    """Whether the run was still there."""
    status: int
    steps_before: int
    steps_after: int
    seconds_to_end: float
    lost: list[str]
    """Committed lines or logs that are not what they were."""
    hung: bool

    @property
    def is_bad(self) -> bool:
        return bool(self.lost) or self.hung


def draw(source: random.Random) -> Fault:
    """One fault: every second kills a rank in a place that matters."""
    rank, steps, seconds = source.randrange(RANKS), source.randrange(3), source.uniform(0, 2)
    kind = source.choices(("place", "kill", "limit", "cancel", "disk"), (10, 4, 2, 2, 2))[0]
    place = source.choice(sorted(PLACES))
    detail = f"{place}:{rank}:{source.randrange(12)}" if kind == "place" else str(rank)
    return Fault(kind, detail, steps, seconds)


def strike_again(folder: Path, seed: int, count: int) -> int:
    """So many more faults, then the run's end; returns how many went wrong."""
    path = folder / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    first = len(path.read_text().splitlines()) if path.exists() else 0
    num_bad = 0
    for number in range(first, first + count):
        result = strike_once(folder, number, draw(random.Random(f"{seed} {number}")))
        with path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        num_bad += result.is_bad
        print(describe(result), flush=True)
    return num_bad


def describe(result: Result) -> str:
    """A line for the user."""
    end = "HUNG" if result.hung else f"status {result.status} after {result.seconds_to_end:.1f} s"
    lost = f", LOST {', '.join(result.lost)}" if result.lost else ""
    what = f"{result.fault.kind} {result.fault.detail}" if result.struck else "came too late"
    return f"{result.number:4} {what:28} {end}; steps {result.steps_before} -> {result.steps_after}{lost}"


def strike_once(folder: Path, number: int, fault: Fault) -> Result:
    """One start of the run, struck."""
    before = committed(folder)
    steps = num_steps(folder)
    with on_full_disk(folder, fault.kind == "disk") as place:
        process = start(place, steps + 4, folder / "log", {"TLT_FAULT": fault.detail} if fault.kind == "place" else {})
        struck_at = strike(process, folder, steps, fault)
        try:
            process.wait(LONGEST_SECONDS)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        seconds = time.monotonic() - struck_at
        end_all(process, folder)
    after = committed(folder)
    return Result(
        number=number,
        fault=fault,
        struck=process.returncode != 0,
        status=process.returncode,
        steps_before=steps,
        steps_after=num_steps(folder),
        seconds_to_end=seconds,
        lost=[name for name, mark in before.items() if after.get(name) != mark],
        hung=hung,
    )


def strike(process: subprocess.Popen[bytes], folder: Path, steps: int, fault: Fault) -> float:
    """Wait for the moment and strike; returns when that was, or when the run had ended."""
    end = time.monotonic() + LONGEST_SECONDS
    if fault.kind in ("place", "disk"):
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        return time.monotonic()
    while process.poll() is None and num_steps(folder) < steps + fault.after_steps and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(fault.seconds)
    ranks = ranks_in(folder)
    at = time.monotonic()
    if fault.kind == "kill":
        send(signal.SIGKILL, [ranks.get(int(fault.detail), process.pid)])  # the launcher, before there are ranks
    elif fault.kind == "limit":
        send(signal.SIGUSR2, ranks.values())
    else:
        send(signal.SIGTERM, ranks.values())
        time.sleep(5)
        send(signal.SIGKILL, ranks_in(folder).values())
    return at


def send(number: signal.Signals, processes: object) -> None:
    """A signal to each that is still there."""
    for process in list(processes):  # type: ignore[call-overload]
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def start(folder: Path, num_steps: int, log: Path, changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The run, in a session of its own; its output is added to ``log``."""
    program = [str(ROOT / "tools" / "fault_rank.py")] if changes else ["-m", "tlt_hpc"]
    command = [find_mpiexec(), "-n", str(RANKS), sys.executable, "-m", "mpi4py", *program, "train", "jobs/tiny.toml"]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TLT_RANKS": str(RANKS), MARK: str(log.parent)}
    environment = {**os.environ, **settings, **changes}
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, *SETTINGS, f"run.folder={folder}", f"run.num_steps={num_steps}"],
            cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def ranks_in(folder: Path) -> dict[int, int]:
    """rank -> process id, of the run whose log is in the folder, whatever sessions the launcher has made."""
    found, mark = {}, f"\0{MARK}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            is_rank = mark in environment and b"mpi4py" in (path / "cmdline").read_bytes()
        except OSError:
            continue
        match = re.search(rb"\0(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=(\d+)\0", environment)
        if is_rank and match:
            found[int(match[1])] = int(path.name)
    return found


def end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Leave nothing of the job behind."""
    if process.poll() is None:
        process.kill()
    send(signal.SIGKILL, ranks_in(folder).values())
    process.wait()


@contextmanager
def on_full_disk(folder: Path, is_full: bool) -> Iterator[Path]:
    """Where the run is for one start: its folder, or a copy on a disk that has hardly any room, moved back after it."""
    if not is_full:
        yield folder
        return
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    used = sum(path.stat().st_size + 4096 for path in (folder / "run").rglob("*")) if (folder / "run").exists() else 0
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + DISK_ROOM}", "tmpfs", str(disk)], check=True)
    try:
        if (folder / "run").exists():
            shutil.copytree(folder / "run", disk / "run")
        yield disk
        shutil.rmtree(folder / "run", ignore_errors=True)
        if (disk / "run").exists():
            shutil.copytree(disk / "run", folder / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def num_steps(folder: Path) -> int:
    """Steps that are committed."""
    path = RunFolder(folder / "run").metrics
    return len(path.read_text().splitlines()) if path.exists() else 0


def committed(folder: Path) -> dict[str, str]:
    """What must never be lost: the lines of metrics, and digests of the logs of their steps."""
    run, count = RunFolder(folder / "run"), num_steps(folder)
    lines = run.metrics.read_text().splitlines() if count else []
    logs = [path for step in range(count) for path in run.rollout_logs(step)]
    marks = {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in logs}
    return marks | {f"line {number}": line for number, line in enumerate(lines)}


def finish(folder: Path, num_steps: int) -> str:
    """Go on to so many steps; the policy's digest.

    Raises:
        RuntimeError: the run did not come to its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    process = start(folder, num_steps, folder / "log", {})
    if process.wait():
        raise RuntimeError(f"the run in {folder} ended with status {process.returncode}; see {folder / 'log'}")
    told = json.loads(RunFolder(folder / "run").finished.read_text())
    assert told["num_steps"] == num_steps, told
    return str(told["policy_sha256"])


def hold_against_straight(folder: Path) -> list[str]:
    """Bring the run to an end, run as many steps without a break, and name what differs."""
    steps = num_steps(folder) + 1
    struck = finish(folder, steps)
    shutil.rmtree(folder / "straight", ignore_errors=True)
    straight = finish(folder / "straight", steps)
    differing = [f"step {step}" for step in range(steps) if texts(folder, step) != texts(folder / "straight", step)]
    return differing + ([] if struck == straight else [f"policy {struck[:12]}, left alone {straight[:12]}"])


def texts(folder: Path, step: int) -> dict[object, tuple[list[int], float]]:
    """The responses of a step and their rewards, by key."""
    records = [read_step(path) for path in RunFolder(folder / "run").rollout_logs(step)]
    return {
        rollout.key: (rollout.response_tokens.tolist(), float(reward))
        for record in records
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }
