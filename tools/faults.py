"""Interrupt runs by a seed, resume them, and compare their ends with runs that nobody interrupted.

    python tools/faults.py run --count 40 --folder faults   # kill -9, SIGUSR2 and SIGTERM
    python tools/faults.py run --count 40 --only ahead      # kill -9 of a rank that generates ahead
    python tools/faults.py compare --folder faults          # only the comparison

Everything is in one folder: ``VARIANT/run`` is interrupted, ``results.jsonl`` gets a line for each start (a campaign
continues when it is called again with its folder), ``VARIANT/logs`` has what each start wrote, ``VARIANT/straight`` is
the run without interruptions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from fault_rank import OF_AHEAD, OF_RANK_0, PLACES

from tlt_hpc.cluster.local import find_mpiexec
from tlt_hpc.cluster.watch.record import read_verdict
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

ROOT = Path(__file__).resolve().parent.parent
HANG_SECONDS = 240.0
"""Without a committed step, before the fault; more is a hang. The watch ends a rollout after a quarter of it."""
HANG_STATUS = 71
"""The status with which the watch ends a job that hangs."""
MAX_SECONDS = {"place": 30.0, "kill": 30.0, "limit": 120.0, "cancel": 20.0}
"""From the fault to the end of the job, by kind of fault."""
KILL_AFTER_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
LAST_WORD_SECONDS = 5.0
"""From the end of the job until all of its processes have ended."""
STARTING_SECONDS = 20.0
"""From the start of the ranks until the run is well under way."""
MARK = "TLT_FAULT_CAMPAIGN"
"""In the environment of a run's processes."""
OTHERS = ("kill", "kill", "kill", "limit", "limit", "cancel")
"""Faults in a cycle, beside one kill at every place."""
CYCLE = len(PLACES) + len(OTHERS)
RANKS = {"plain": 2, "refills": 2, "replicas": 4, "ahead": 2}
VARIANTS = {
    "plain": ["jobs/tiny.toml"],
    "refills": ["jobs/tiny.toml", "algorithm.max_refills=2"],
    "replicas": ["jobs/tiny.toml", "rollout.tensor_parallel=2"],
    "ahead": [
        "jobs/tiny_tail.toml", "rollout.prompts_per_step=1", "rollout.max_new_tokens=400", "speculation.ahead=on",
        "drafter.train=false",
    ],
}  # fmt: skip
"""The runs that are interrupted: their ranks, jobs and settings."""
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "checkpoint.every_steps=3", "checkpoint.keep_responses_seconds=0.2",
    "run.stall_factor=0.2", "run.name=run",
]  # fmt: skip
_LOST_CONNECTION = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket closed)")
"""What a rank reports of another that is gone, in the moment before it is ended, too."""


@dataclass(frozen=True)
class Fault:
    """What happens to one start of a run."""

    kind: str
    """place, kill, limit (SIGUSR2 to all ranks) or cancel (SIGTERM to all, SIGKILL ten seconds later)."""
    rank: int
    """The rank that is killed, for a place or a kill."""
    place: str = ""
    """Where a rank kills itself, as PLACE:RANK:COUNT, see ``fault_rank.py``."""
    after_steps: int = 0
    """Steps to be committed before the fault; a place needs no such time."""
    seconds: float = 0.0
    """To wait after that."""

    @property
    def kills(self) -> bool:
        """Whether exactly one rank is killed."""
        return self.kind in ("place", "kill")


@dataclass(frozen=True)
class Result:
    """What came of a fault."""

    number: int
    variant: str
    fault: Fault
    struck: bool
    """Whether the run was still there; if not, this counts as no fault."""
    status: int
    seconds_to_end: float
    wrong: list[str]
    """What the fault does not explain: lost lines or logs, a hang, ..."""


def main() -> int:
    """Run the campaign; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "compare"))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted({*PLACES, *OTHERS}), help="faults of this kind or at this place alone")
    parser.add_argument("--folder", type=Path, help="of an earlier call, to continue it (default: a new one in /tmp)")
    options = parser.parse_args()
    folder: Path = (options.folder or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    print(f"everything is kept in {folder}", flush=True)
    if options.what == "run":
        interrupt(folder, options.seed, options.count, options.only)
    differing = compare_with_straight(folder)
    print(summary(folder))
    print(f"differs from runs without interruptions in: {', '.join(differing) or 'nothing'}")
    return 1 if differing or any(result["wrong"] for result in results_in(folder)) else 0


def variant_of(number: int, name: str) -> str:
    """The run that the fault of this number is for."""
    if name in OF_AHEAD or (name in OTHERS and number % 2):
        return "ahead"
    return {3: "refills", 6: "replicas"}.get(number % 9, "plain")


def draw(seed: int, number: int, only: str | None = None) -> tuple[str, Fault]:
    """The fault of this number, and the run that it is for; each cycle has every kind and every place."""
    cycle, index = divmod(number, CYCLE)
    kinds = [*sorted(PLACES), *OTHERS]
    random.Random(f"{seed} {cycle}").shuffle(kinds)
    name, source = only or kinds[index], random.Random(f"{seed} {number} 0")
    variant = variant_of(number, name)
    rank, steps = source.randrange(RANKS[variant]), source.randrange(3)
    if name not in PLACES:
        return variant, Fault(
            name, rank, after_steps=steps, seconds=source.uniform(0, 3 if steps else STARTING_SECONDS)
        )
    rank = 0 if name in OF_RANK_0 else rank
    most = {"replay": 2, "ahead": 20}.get(name, 6)
    count = 2 * source.randrange(most) + (number if only else cycle) % 2  # even: before the function, odd: after it
    return variant, Fault("place", rank, f"{name}:{rank}:{count}")


def interrupt(folder: Path, seed: int, count: int, only: str | None = None) -> None:
    """Interrupt runs by the next numbers of the plan, until ``count`` more faults came before the run's end."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max((result["number"] + 1 for result in results_in(folder)), default=0)
    while count > 0:
        variant, fault = draw(seed, number, only)
        place = folder / variant
        place.mkdir(exist_ok=True)
        result = interrupt_once(place, number, fault)
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(result, flush=True)
        count -= result.struck
        number += 1


def results_in(folder: Path) -> list[dict[str, Any]]:
    """All results of a campaign, as written."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(folder: Path) -> str:
    """The count of all faults of a campaign."""
    results = results_in(folder)
    kinds = Counter(result["fault"]["place"].partition(":")[0] or result["fault"]["kind"]
                    for result in results if result["struck"])  # fmt: skip
    wrong = [each for result in results for each in result["wrong"]]
    lost, hung = sum(each.startswith("lost") for each in wrong), wrong.count("hung")
    return (
        f"{kinds.total()} faults ({', '.join(f'{kind} {number}' for kind, number in sorted(kinds.items()))}): "
        f"{lost} lost committed data, {hung} hung, {len(wrong) - lost - hung} otherwise wrong"
    )


# -- one fault ------------------------------------------------------------------------------------------------------


def interrupt_once(folder: Path, number: int, fault: Fault) -> Result:
    """Start the run, interrupt it, and check what it left."""
    before, steps = committed(folder), num_steps(folder)
    log, mark = folder / "logs" / f"{number:04d}", folder / "struck"
    mark.unlink(missing_ok=True)
    variables = {"TLT_FAULT": fault.place, "TLT_FAULT_MARK": str(mark)} if fault.place else {}
    process = start(folder, folder.name, steps + 4, log, variables)
    at = strike(process, folder, steps, fault)
    is_hung = at is None or not ends_within(process, at + 2 * MAX_SECONDS[fault.kind] - time.monotonic())
    seconds = time.monotonic() - (at or time.monotonic())
    end_all(process, folder)
    struck = mark.exists() if fault.place else process.returncode != 0
    after, text = committed(folder), log.read_text(errors="replace")
    if (verdict := read_verdict(RunFolder(folder / "run").status)) and verdict[1] not in text:  # mpiexec drops lines
        text += f"\ntlt: {verdict[1]}\n"
    wrong = [f"lost {name}" for name, content in before.items() if after.get(name) != content]
    wrong += find_wrong(fault, struck, process.returncode, seconds, text, is_hung)
    return Result(number, folder.name, fault, struck, process.returncode, seconds, wrong)


def strike(process: subprocess.Popen[bytes], folder: Path, steps: int, fault: Fault) -> float | None:
    """Wait for the fault's moment and cause it; returns when that was, or the run ended; None if the run hangs."""

    def is_time() -> bool:
        if fault.place:
            return (folder / "struck").exists()
        return num_steps(folder) >= steps + fault.after_steps and len(ranks_in(folder)) == RANKS[folder.name]

    if not advances_until(process, folder, is_time):
        return None
    ends_within(process, fault.seconds)
    at, ranks = time.monotonic(), ranks_in(folder)
    if fault.kind == "kill":
        send(signal.SIGKILL, [ranks[fault.rank]] if fault.rank in ranks else [])
    elif fault.kind == "limit":
        send(signal.SIGUSR2, ranks.values())
    elif fault.kind == "cancel":
        send(signal.SIGTERM, ranks.values())
        if not ends_within(process, KILL_AFTER_SECONDS):
            send(signal.SIGKILL, ranks_in(folder).values())
    return at


def advances_until(process: subprocess.Popen[bytes], folder: Path, is_time: Callable[[], bool]) -> bool:
    """Wait until it is time, or the run has ended; returns False if no step is committed for too long."""
    done, since = num_steps(folder), time.monotonic()
    while process.poll() is None and not is_time():
        if num_steps(folder) != done:
            done, since = num_steps(folder), time.monotonic()
        if time.monotonic() - since > HANG_SECONDS:
            return False
        time.sleep(0.05)
    return True


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process ends in so many seconds."""
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Send a signal to each process that still exists."""
    for process in list(processes):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def start(folder: Path, variant: str, steps: int, log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the run in a session of its own, its output in ``log``."""
    program = [str(ROOT / "tools" / "fault_rank.py")] if variables else ["-m", "tlt_hpc"]
    ranks = str(RANKS[variant])
    command = [find_mpiexec(), "-n", ranks, sys.executable, "-m", "mpi4py", *program, "train"]
    job, *own = VARIANTS[variant]
    settings = [job, *SETTINGS, *own, f"run.ranks={ranks}", f"run.folder={folder}", f"run.num_steps={steps}"]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TLT_RANKS": ranks, "COLUMNS": "300"}
    environment = {**os.environ, **fixed, MARK: str(log.parent.parent), **variables}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *settings], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def ranks_in(folder: Path) -> dict[int, int]:
    """Rank -> process id, of the folder's run; not the processes that a rank has forked."""
    found: dict[int, tuple[int, int]] = {}
    mark = f"\0{MARK}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = b"\0" + (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        match = re.search(rb"\0(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=(\d+)\0", environment)
        if match and mark in environment and b"mpi4py" in command:
            found[int(path.name)] = int(match[1]), parent
    return {rank: process for process, (rank, parent) in found.items() if parent not in found}


def end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End what still runs of a job, once the process that names a killed rank has had its time."""
    if process.poll() is None:
        process.kill()
    process.wait()
    until = time.monotonic() + LAST_WORD_SECONDS
    while ranks_in(folder) and time.monotonic() < until:
        time.sleep(0.05)
    send(signal.SIGKILL, ranks_in(folder).values())


def find_wrong(fault: Fault, struck: bool, status: int, seconds: float, log: str, is_hung: bool) -> list[str]:
    """What the fault does not explain in the end of a run, a few words each.

    Args:
        struck: the run was still there when the fault came.
        log: what this start wrote.
        is_hung: it had to be ended.
    """
    if is_hung or status == HANG_STATUS:
        return ["hung"]
    wrong = [f"ended {seconds:.0f} s after the fault"] if struck and seconds > MAX_SECONDS[fault.kind] else []
    wanted, is_over = {0}, re.search(r"^finished: ", log, re.MULTILINE)
    if struck:
        # before a run's first step, and after its last, Python handles signals by default
        is_running = re.search(r"\): \d+ steps", log) is not None and not is_over
        early = set() if is_running else {signal.SIGUSR2, signal.SIGTERM, 128 + signal.SIGTERM}
        # MPICH ends the other ranks then, and combines the bits of all their statuses
        early |= {number | signal.SIGKILL for number in early}
        wanted = {signal.SIGKILL} if fault.kills else {75, *early}
        if fault.kind == "cancel" and seconds >= KILL_AFTER_SECONDS:  # on a busy machine
            wanted.add(signal.SIGKILL)
    if status not in wanted:
        wrong.append(f"status {status}, not {' or '.join(map(str, sorted(wanted)))}")
    is_killed = struck and fault.kills
    for text in log.split("Traceback (most recent call last)")[1:]:
        if not (is_killed and _LOST_CONNECTION.search(text)):
            raised = next((line for line in text.splitlines()[1:] if line and not line.startswith((" ", "[rank"))), "")
            wrong.append(f"traceback: {raised[:200]}")
    named = set(re.findall(r"^tlt: (.*) was killed", log, re.MULTILINE)) if is_killed else set()
    have_met = "  loading libraries\n" in log  # before, no rank knows another
    is_named = any(re.fullmatch(rf"rank {fault.rank} on \S+", name) for name in named)
    if is_killed and have_met and not is_over and not is_named:
        wrong.append(f"names {', '.join(sorted(named)) or 'nobody'}, not rank {fault.rank}")
    return wrong


# -- what a run has -------------------------------------------------------------------------------------------------


def num_steps(folder: Path) -> int:
    """Return the number of committed steps."""
    path = RunFolder(folder / "run").metrics
    return path.read_bytes().count(b"\n") if path.exists() else 0


def committed(folder: Path) -> dict[str, str]:
    """What must never be lost: the lines of metrics, and digests of the logs of their steps."""
    run, count = RunFolder(folder / "run"), num_steps(folder)
    lines = run.metrics.read_text().splitlines() if count else []
    logs = [path for step in range(count) for path in run.rollout_logs(step)]
    digests = {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in logs}
    return digests | {f"line {number}": line for number, line in enumerate(lines)}


def finish(folder: Path, variant: str, steps: int) -> str:
    """Continue a run to so many steps; returns the policy's digest.

    Raises:
        RuntimeError: the run did not finish.
    """
    log = folder / "logs" / "end"
    process = start(folder, variant, steps, log, {})
    if process.wait():
        raise RuntimeError(f"the run in {folder} ended with status {process.returncode}; see {log}")
    return str(json.loads(RunFolder(folder / "run").finished.read_text())["policy_sha256"])


def compare_with_straight(folder: Path) -> list[str]:
    """Finish the runs, run the same steps without interruptions, and return what differs."""
    differing = []
    for variant in VARIANTS:
        place = folder / variant
        if steps := num_steps(place):
            digest = finish(place, variant, steps + 1)
            shutil.rmtree(place / "straight", ignore_errors=True)
            straight = finish(place / "straight", variant, steps + 1)
            names = [
                f"step {step + 1}" for step in range(steps + 1) if texts(place, step) != texts(place / "straight", step)
            ]
            names += [str(path.relative_to(place)) for path in (place / "run").rglob("*.part*")]
            names += [] if digest == straight else [f"policy {digest[:12]}, uninterrupted {straight[:12]}"]
            differing += [f"{variant}: {name}" for name in names]
    return differing


def texts(folder: Path, step: int) -> dict[object, tuple[list[int], float]]:
    """The responses of a step and their rewards, by key."""
    records = [read_step(path) for path in RunFolder(folder / "run").rollout_logs(step)]
    return {
        rollout.key: (rollout.response_tokens.tolist(), float(reward))
        for record in records
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }


if __name__ == "__main__":
    sys.exit(ending("faults", main))
