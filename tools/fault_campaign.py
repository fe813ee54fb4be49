"""Strikes runs again and again, by a seed, and holds their ends against runs that were left alone. For ``faults.py``.

Everything lies in one folder: ``VARIANT/run`` is struck, ``results.jsonl`` gets a line for each start, so that a
campaign goes on where it was left, ``VARIANT/logs`` has what each start wrote, and ``VARIANT/straight`` is the run that
it is held against.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fault_plan import VARIANTS, Fault, draw, variant_of
from fault_verdict import KILL_AFTER_SECONDS, MOST_SECONDS, find_wrong, wrong_tracebacks

from tlt_hpc.cluster.local import find_mpiexec
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

ROOT = Path(__file__).resolve().parent.parent
STANDSTILL_SECONDS = 240.0
"""Without a committed step, before a fault has struck; more is a hang. The watch ends a rollout after a quarter."""
LEAVING_SECONDS = 15.0
"""For what a job has started beside its ranks to end after them."""
MOST_ATTEMPTS = 8
TO_BE_REPLAYED = Fault("place", "committed:0:2", 0, 0.0)
"""Leaves one step or two that no checkpoint has."""
MARK = "TLT_FAULT_CAMPAIGN"
"""Of a run's processes, in their environment."""
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "speculation.profile_seconds=0", "checkpoint.every_steps=3", "checkpoint.keep_responses_seconds=0.2",
    "run.stall_factor=0.2", "run.name=run",
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a fault did."""

    number: int
    attempt: int
    variant: str
    fault: Fault
    struck: bool
    """Whether the run was still there; else this counts as no fault."""
    status: int
    steps_before: int
    steps_after: int
    seconds_to_end: float
    wrong: list[str]
    """What the fault does not explain: committed lines or logs that are not what they were, a hang, ..."""
    done: bool = False
    """Whether its number in the plan has been struck with this; else it is struck again."""


def strike_again(folder: Path, seed: int, count: int) -> None:
    """So many more numbers of the plan, each on the run whose turn it is."""
    folder.mkdir(parents=True, exist_ok=True)
    first = max((result["number"] + 1 for result in results_in(folder) if result["done"]), default=0)
    for number in range(first, first + count):
        for attempt in range(MOST_ATTEMPTS):
            place, fault = folder / variant_of(number), draw(seed, number, attempt)
            place.mkdir(exist_ok=True)
            done = fault.name != "replay" or is_ahead(place)
            result = strike_once(place, number, attempt, fault if done else TO_BE_REPLAYED)
            result = replace(result, done=done and result.struck)
            with (folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            print(describe(result), flush=True)
            if result.done:
                break
        else:
            raise RuntimeError(f"fault {number} came after the run's end {MOST_ATTEMPTS} times; see {folder}")


def is_ahead(folder: Path) -> bool:
    """Whether steps are committed that no checkpoint has, for the next start to replay."""
    saved = [int(path.name.split("-")[1]) for path in RunFolder(folder / "run").checkpoints.glob("step-??????")]
    return num_steps(folder) > max(saved, default=0)


def results_in(folder: Path) -> list[dict[str, Any]]:
    """What is written of a campaign."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def describe(result: Result) -> str:
    """A line for the user."""
    fault = result.fault
    what = f"{fault.kind} {fault.detail}" if result.struck else f"{fault.name} came too late"
    wrong = f"; WRONG: {'; '.join(result.wrong)}" if result.wrong else ""
    return (
        f"{result.number:4} {result.variant:8} {what:24} status {result.status} after {result.seconds_to_end:.1f} s; "
        f"steps {result.steps_before} -> {result.steps_after}{wrong}"
    )


def standing(folder: Path) -> str:
    """The count of all faults of a campaign."""
    told = results_in(folder)
    struck = [result for result in told if result["struck"]]
    words = [word for result in told for word in result["wrong"]]
    kinds = Counter(Fault(**result["fault"]).name for result in struck)
    lost, hung = sum(word.startswith("lost") for word in words), words.count("hung")
    return (
        f"{len(struck)} faults stand ({', '.join(f'{kind} {number}' for kind, number in sorted(kinds.items()))}): "
        f"{lost} lost committed data, {hung} hung, {len(words) - lost - hung} otherwise wrong"
    )


def strike_once(folder: Path, number: int, attempt: int, fault: Fault) -> Result:
    """One start of the run, struck."""
    before, steps = committed(folder), num_steps(folder)
    log = folder / "logs" / f"{number:04d}-{attempt}"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    struck_mark = folder / "struck"
    struck_mark.unlink(missing_ok=True)
    changes = {"TLT_FAULT": fault.detail, "TLT_FAULT_MARK": str(struck_mark)} if fault.kind == "place" else {}
    room = int(fault.detail) if fault.kind == "disk" else None
    with on_full_disk(folder, room) as place:
        process = start(place, folder.name, steps + 4, log, changes)
        at = strike(process, folder, place, steps, fault)
        is_hung = at is None or not ended_within(process, at + 2 * MOST_SECONDS[fault.kind] - time.monotonic())
        seconds = time.monotonic() - (at or time.monotonic())
        left = end_all(process, folder)
    struck = struck_mark.exists() if fault.kind == "place" else process.returncode != 0
    after, text = committed(folder), log.read_text(errors="replace")
    wrong = [f"lost {name}" for name, mark in before.items() if after.get(name) != mark]
    wrong += find_wrong(fault, struck, process.returncode, seconds, text, (steps, num_steps(folder)), is_hung)
    if left and not is_hung:
        wrong.append(f"left behind: {', '.join(left)}")
    return Result(
        number=number,
        attempt=attempt,
        variant=folder.name,
        fault=fault,
        struck=struck,
        status=process.returncode,
        steps_before=steps,
        steps_after=num_steps(folder),
        seconds_to_end=seconds,
        wrong=wrong,
    )


def strike(process: subprocess.Popen[bytes], folder: Path, place: Path, steps: int, fault: Fault) -> float | None:
    """Wait for the moment and strike; returns when that was, or when the run had ended; None where it hangs."""
    wanted = range(VARIANTS[folder.name].ranks) if fault.rank is None else [fault.rank]

    def is_time() -> bool:
        if fault.kind == "place":
            return (folder / "struck").exists()
        if fault.kind == "disk":
            return shutil.disk_usage(place).free == 0
        done = num_steps(folder) >= steps + fault.after_steps
        return done and all(rank in ranks_in(folder) for rank in wanted)

    if not stands_or_ends(process, place, is_time):
        return None
    if fault.kind not in ("place", "disk"):
        ended_within(process, fault.seconds)
    at, ranks = time.monotonic(), ranks_in(folder)
    if fault.kind == "kill":
        send(signal.SIGKILL, [ranks[fault.rank]] if fault.rank in ranks else [])
    elif fault.kind == "limit":
        send(signal.SIGUSR2, ranks.values())
    elif fault.kind == "cancel":
        send(signal.SIGTERM, ranks.values())
        if not ended_within(process, KILL_AFTER_SECONDS):
            send(signal.SIGKILL, ranks_in(folder).values())
    return at


def stands_or_ends(process: subprocess.Popen[bytes], place: Path, is_time: Callable[[], bool]) -> bool:
    """Wait until it is time, or the run has ended; False where it has hung for too long."""
    done, since = num_steps(place), time.monotonic()
    while process.poll() is None and not is_time():
        if num_steps(place) != done:
            done, since = num_steps(place), time.monotonic()
        if time.monotonic() - since > STANDSTILL_SECONDS:
            return False
        time.sleep(0.05)
    return True


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends in so many seconds."""
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """A signal to each that is still there."""
    for process in list(processes):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def start(folder: Path, variant: str, num_steps: int, log: Path, changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The run, in a session of its own, its output in ``log``."""
    program = [str(ROOT / "tools" / "fault_rank.py")] if changes else ["-m", "tlt_hpc"]
    ranks = str(VARIANTS[variant].ranks)
    command = [find_mpiexec(), "-n", ranks, sys.executable, "-m", "mpi4py", *program, "train", "jobs/tiny.toml"]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TLT_RANKS": ranks, "COLUMNS": "300"}
    environment = {**os.environ, **settings, MARK: str(log.parent.parent), **changes}
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, *SETTINGS, *VARIANTS[variant].settings,
             f"run.ranks={ranks}", f"run.folder={folder}", f"run.num_steps={num_steps}"],
            cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def processes_in(folder: Path) -> dict[int, tuple[bytes, bytes]]:
    """Process id -> environment and command, of all that the folder's run has started, in whatever session."""
    found, mark = {}, f"\0{MARK}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = b"\0" + (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if mark in environment:
            found[int(path.name)] = environment, command
    return found


def ranks_in(folder: Path) -> dict[int, int]:
    """rank -> process id."""
    found = {}
    for process, (environment, command) in processes_in(folder).items():
        match = re.search(rb"\0(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=(\d+)\0", environment)
        if match and b"mpi4py" in command:
            found[int(match[1])] = process
    return found


def end_all(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Leave nothing of the job behind; returns what did not leave by itself."""
    if process.poll() is None:
        process.kill()
        send(signal.SIGKILL, ranks_in(folder).values())
    process.wait()
    end = time.monotonic() + LEAVING_SECONDS
    while (left := processes_in(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    send(signal.SIGKILL, left)
    return [command.replace(b"\0", b" ").decode(errors="replace").strip()[:100] for _, command in left.values()]


@contextmanager
def on_full_disk(folder: Path, room: int | None) -> Iterator[Path]:
    """Where the run is for one start: its folder, or a copy on a disk with ``room`` bytes left, moved back after it."""
    if room is None:
        yield folder
        return
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    page = os.sysconf("SC_PAGESIZE")
    files = [path.stat().st_size for path in (folder / "run").rglob("*")] if (folder / "run").exists() else []
    used = sum(-(-size // page) * page for size in files)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + room + page}", "tmpfs", str(disk)], check=True)
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
    return path.read_bytes().count(b"\n") if path.exists() else 0


def committed(folder: Path) -> dict[str, str]:
    """What must never be lost: the lines of metrics, and digests of the logs of their steps."""
    run, count = RunFolder(folder / "run"), num_steps(folder)
    lines = run.metrics.read_text().splitlines() if count else []
    logs = [path for step in range(count) for path in run.rollout_logs(step)]
    marks = {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in logs}
    return marks | {f"line {number}": line for number, line in enumerate(lines)}


def finish(folder: Path, variant: str, num_steps: int) -> str:
    """Go on to so many steps; the policy's digest.

    Raises:
        RuntimeError: the run did not come to its end, or wrote a traceback on the way.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    log = folder / "logs" / "end"
    log.unlink(missing_ok=True)
    process = start(folder, variant, num_steps, log, {})
    if process.wait() or wrong_tracebacks(log.read_text(errors="replace"), by_loss=False):
        raise RuntimeError(f"the run in {folder} ended with status {process.returncode}; see {log}")
    told = json.loads(RunFolder(folder / "run").finished.read_text())
    assert told["num_steps"] == num_steps, told
    return str(told["policy_sha256"])


def hold_against_straight(folder: Path) -> list[str]:
    """Bring the runs to an end, run as many steps of each without a break, and name what differs."""
    differing = []
    for variant in VARIANTS:
        if num_steps(folder / variant):
            differing += [f"{variant}: {name}" for name in differing_of(folder / variant)]
    return differing


def differing_of(folder: Path) -> list[str]:
    """What a variant's run has that its counterpart has not, or otherwise."""
    steps = num_steps(folder) + 1
    struck = finish(folder, folder.name, steps)
    parts = [str(path.relative_to(folder)) for path in (folder / "run").rglob("*.part*")]
    shutil.rmtree(folder / "straight", ignore_errors=True)
    straight = finish(folder / "straight", folder.name, steps)
    differing = [f"step {step}" for step in range(steps) if texts(folder, step) != texts(folder / "straight", step)]
    return differing + parts + ([] if struck == straight else [f"policy {struck[:12]}, left alone {straight[:12]}"])


def texts(folder: Path, step: int) -> dict[object, tuple[list[int], float]]:
    """The responses of a step and their rewards, by key."""
    records = [read_step(path) for path in RunFolder(folder / "run").rollout_logs(step)]
    return {
        rollout.key: (rollout.response_tokens.tolist(), float(reward))
        for record in records
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }
