"""Runs that are interrupted at a moment, resumed, and compared at the end with runs that nobody interrupted.

A rank is killed at a place in the code (``fault_rank.py``) or after a time, or all ranks get SIGUSR2 or SIGTERM.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fault_rank import OF_AHEAD, OF_RANK_0, PLACES

from fault_kinds.results import Result, Results
from fault_kinds.runs import (
    HANG_STATUS,
    Job,
    advances_until,
    differences,
    ends_within,
    num_steps,
    outcome_of,
    ranks_in,
    send,
)
from tlt_hpc.cluster.watch.record import read_verdict
from tlt_hpc.extras.rehearse.rehearse import read_step_digests
from tlt_hpc.storage.folder import RunFolder

MAX_SECONDS = {"place": 30.0, "kill": 30.0, "limit": 120.0, "cancel": 20.0}
"""From the fault to the end of the job, by kind of fault."""
KILL_AFTER_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
LAST_WORD_SECONDS = 5.0
"""From the end of the job until all of its processes have ended."""
STARTING_SECONDS = 20.0
"""From the start of the ranks until the run is well under way."""
OTHERS = ("kill", "kill", "kill", "limit", "limit", "cancel")
"""Faults in a cycle, beside one kill at every place."""
CYCLE = len(PLACES) + len(OTHERS)
SETTINGS = (
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "checkpoint.every_steps=3", "run.stall_factor=0.2",
)  # fmt: skip
_AHEAD = (
    "rollout.prompts_per_step=1", "rollout.max_new_tokens=400", "speculation.ahead=on", "speculation.mode=frozen",
)  # fmt: skip
JOBS = {
    "plain": Job(2, ("jobs/tiny.toml", *SETTINGS)),
    "refills": Job(2, ("jobs/tiny.toml", *SETTINGS, "algorithm.max_refills=2")),
    "replicas": Job(4, ("jobs/tiny.toml", *SETTINGS, "rollout.tensor_parallel=2")),
    "ahead": Job(2, ("jobs/tiny_tail.toml", *SETTINGS, *_AHEAD)),
}
"""The runs that are interrupted."""
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


def strike(options: Namespace, results: Results) -> None:
    """Interrupt runs by the next numbers of the plan, until so many more faults came before the run's end."""
    number, left = 1 + max(map(int, filter(str.isdecimal, results.found)), default=-1), options.count
    while left > 0:
        variant, fault = draw(options.seed, number)
        result = interrupt(results.folder / variant, number, fault)
        results.add(result)
        print(f"{number}: {variant}, {fault}: {result.outcome}", flush=True)
        left -= result.outcome == "struck"
        number += 1
    compare_with_straight(results)


def draw(seed: int, number: int) -> tuple[str, Fault]:
    """The fault of this number, and the run that it is for; each cycle has every kind and every place."""
    cycle, index = divmod(number, CYCLE)
    kinds = [*sorted(PLACES), *OTHERS]
    random.Random(f"{seed} {cycle}").shuffle(kinds)
    name, source = kinds[index], random.Random(f"{seed} {number} 0")
    variant = {3: "refills", 6: "replicas"}.get(number % 9, "plain")
    if name == OF_AHEAD or (name in OTHERS and number % 2):
        variant = "ahead"
    rank, steps = source.randrange(JOBS[variant].ranks), source.randrange(3)
    if name not in PLACES:
        seconds = source.uniform(0, 3 if steps else STARTING_SECONDS)
        return variant, Fault(name, rank, after_steps=steps, seconds=seconds)
    rank = 0 if name in OF_RANK_0 else rank
    most = {"replay": 2, "ahead": 20}.get(name, 6)
    count = 2 * source.randrange(most) + cycle % 2  # even: before the function, odd: after it
    return variant, Fault("place", rank, f"{name}:{rank}:{count}")


# -- one fault ------------------------------------------------------------------------------------------------------


def interrupt(folder: Path, number: int, fault: Fault) -> Result:
    """Start the run, interrupt it, and check what it left; a fault that came after its end is too late."""
    run, steps = RunFolder(folder / "run"), num_steps(folder)
    before = read_step_digests(run)
    log, mark = folder / "logs" / f"{number:04d}", folder / "struck"
    mark.unlink(missing_ok=True)
    variables = {"TLT_FAULT": fault.place, "TLT_FAULT_MARK": str(mark)} if fault.place else None
    process = JOBS[folder.name].start(folder, log, variables, f"run.num_steps={steps + 4}")
    at = cause(process, folder, steps, fault)
    is_hung = at is None or not ends_within(process, at + 2 * MAX_SECONDS[fault.kind] - time.monotonic())
    seconds = time.monotonic() - (at or time.monotonic())
    end_all(process, folder)
    struck = mark.exists() if fault.place else process.returncode != 0
    after, text = read_step_digests(run), log.read_text(errors="replace")
    if (verdict := read_verdict(run.status)) and verdict[1] not in text:  # mpiexec drops lines
        text += f"\ntlt: {verdict[1]}\n"
    wrong = [f"lost step {int(step) + 1}" for step, digest in before.items() if after.get(step) != digest]
    wrong += find_wrong(fault, struck, process.returncode, seconds, text, is_hung)
    row = fault.place.partition(":")[0] or fault.kind
    details = {"variant": folder.name, **asdict(fault), "status": process.returncode, "seconds_to_end": seconds}
    return Result(str(number), row, "struck" if struck else "too late", wrong, details)


def cause(process: subprocess.Popen[bytes], folder: Path, steps: int, fault: Fault) -> float | None:
    """Wait for the fault's moment and cause it; returns when that was, or the run ended; None if the run hangs."""

    def is_time() -> bool:
        if fault.place:
            return (folder / "struck").exists()
        return num_steps(folder) >= steps + fault.after_steps and len(ranks_in(folder)) == JOBS[folder.name].ranks

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


def compare_with_straight(results: Results) -> None:
    """Finish the runs, run the same steps without interruptions, and note what differs."""
    for variant, job in JOBS.items():
        place = results.folder / variant
        if steps := num_steps(place):
            found = list[dict[str, Any]]()
            for again in (place, place / "straight"):
                shutil.rmtree(place / "straight", ignore_errors=True)
                job.succeed(again, place / "logs" / "end", None, f"run.num_steps={steps + 1}")
                found.append(outcome_of(again, steps + 1))
            wrong = differences(*found)
            wrong += [f"left {path.relative_to(place)}" for path in (place / "run").rglob("*.part*")]
            results.add(Result(variant, "the same run, uninterrupted", "equal", wrong))
