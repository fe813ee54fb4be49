"""Interrupt runs by a seed, resume them, and compare their ends with runs that nobody interrupted.

    python tools/faults.py run --count 40 --folder faults   # kill -9, SIGUSR2, SIGTERM and full disks
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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from fault_plan import RANKS, VARIANTS, Fault, draw, variant_of
from fault_verdict import KILL_AFTER_SECONDS, MAX_SECONDS, find_wrong, wrong_tracebacks

from tlt_hpc.cluster.local import find_mpiexec
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

ROOT = Path(__file__).resolve().parent.parent
HANG_SECONDS = 240.0
"""Without a committed step, before the fault; more is a hang. The watch ends a rollout after a quarter of it."""
LEAVING_SECONDS = 15.0
"""For what a job has started beside its ranks to end after them."""
MARK = "TLT_FAULT_CAMPAIGN"
"""In the environment of a run's processes."""
SETTINGS = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=4",
    "speculation.profile_seconds=0", "checkpoint.every_steps=3", "checkpoint.keep_responses_seconds=0.2",
    "run.stall_factor=0.2", "run.name=run",
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What came of a fault."""

    number: int
    variant: str
    fault: Fault
    struck: bool
    """Whether the run was still there; if not, this counts as no fault."""
    status: int
    steps_before: int
    steps_after: int
    seconds_to_end: float
    wrong: list[str]
    """What the fault does not explain: lost lines or logs, a hang, ..."""

    def __str__(self) -> str:
        what = f"{self.fault.kind} {self.fault.detail}" if self.struck else f"{self.fault.name} came too late"
        wrong = f"; WRONG: {'; '.join(self.wrong)}" if self.wrong else ""
        end = f"status {self.status} after {self.seconds_to_end:.1f} s"
        return (
            f"{self.number:4} {self.variant:8} {what:24} {end}; steps {self.steps_before} -> {self.steps_after}{wrong}"
        )


def main() -> int:
    """Run the campaign; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "compare"))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of an earlier call, to continue it (default: a new one in /tmp)")
    options = parser.parse_args()
    folder: Path = (options.folder or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    print(f"everything is kept in {folder}", flush=True)
    if options.what == "run":
        interrupt(folder, options.seed, options.count)
    differing = compare_with_straight(folder)
    print(summary(folder))
    print(f"differs from runs without interruptions in: {', '.join(differing) or 'nothing'}")
    return 1 if differing or any(result["wrong"] for result in results_in(folder)) else 0


def interrupt(folder: Path, seed: int, count: int) -> None:
    """Interrupt runs by the next numbers of the plan, until ``count`` more faults came before the run's end."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max((result["number"] + 1 for result in results_in(folder)), default=0)
    while count > 0:
        place = folder / variant_of(number)
        place.mkdir(exist_ok=True)
        result = interrupt_once(place, number, draw(seed, number))
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
    kinds = Counter(Fault(**result["fault"]).name for result in results if result["struck"])
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
    variables = {"TLT_FAULT": fault.detail, "TLT_FAULT_MARK": str(mark)} if fault.kind == "place" else {}
    with on_full_disk(folder, int(fault.detail) if fault.kind == "disk" else None) as place:
        process = start(place, folder.name, steps + 4, log, variables)
        at = strike(process, folder, place, steps, fault)
        is_hung = at is None or not ends_within(process, at + 2 * MAX_SECONDS[fault.kind] - time.monotonic())
        seconds = time.monotonic() - (at or time.monotonic())
        left = end_all(process, folder)
    struck = mark.exists() if fault.kind == "place" else process.returncode != 0
    after, text = committed(folder), log.read_text(errors="replace")
    wrong = [f"lost {name}" for name, content in before.items() if after.get(name) != content]
    wrong += find_wrong(fault, struck, process.returncode, seconds, text, (steps, num_steps(folder)), is_hung)
    if left and not is_hung:
        wrong.append(f"left behind: {', '.join(left)}")
    steps_after = num_steps(folder)
    return Result(number, folder.name, fault, struck, process.returncode, steps, steps_after, seconds, wrong)


def strike(process: subprocess.Popen[bytes], folder: Path, place: Path, steps: int, fault: Fault) -> float | None:
    """Wait for the fault's moment and cause it; returns when that was, or the run ended; None if the run hangs."""
    wanted = range(RANKS[folder.name]) if fault.rank is None else [fault.rank]

    def is_time() -> bool:
        if fault.kind == "place":
            return (folder / "struck").exists()
        if fault.kind == "disk":
            return shutil.disk_usage(place).free == 0
        return num_steps(folder) >= steps + fault.after_steps and ranks_in(folder).keys() >= set(wanted)

    if not advances_until(process, place, is_time):
        return None
    if fault.kind not in ("place", "disk"):
        ends_within(process, fault.seconds)
    at, ranks = time.monotonic(), ranks_in(folder)
    if fault.kind == "kill":
        send(signal.SIGKILL, [process for rank, process in ranks.items() if rank == fault.rank])
    elif fault.kind == "limit":
        send(signal.SIGUSR2, ranks.values())
    elif fault.kind == "cancel":
        send(signal.SIGTERM, ranks.values())
        if not ends_within(process, KILL_AFTER_SECONDS):
            send(signal.SIGKILL, ranks_in(folder).values())
    return at


def advances_until(process: subprocess.Popen[bytes], place: Path, is_time: Callable[[], bool]) -> bool:
    """Wait until it is time, or the run has ended; returns False if no step is committed for too long."""
    done, since = num_steps(place), time.monotonic()
    while process.poll() is None and not is_time():
        if num_steps(place) != done:
            done, since = num_steps(place), time.monotonic()
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


def start(folder: Path, variant: str, steps: int, log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the run in a session of its own, its output in ``log``."""
    program = [str(ROOT / "tools" / "fault_rank.py")] if variables else ["-m", "tlt_hpc"]
    ranks = str(RANKS[variant])
    command = [find_mpiexec(), "-n", ranks, sys.executable, "-m", "mpi4py", *program, "train", "jobs/tiny.toml"]
    settings = [*SETTINGS, *VARIANTS[variant], f"run.ranks={ranks}", f"run.folder={folder}", f"run.num_steps={steps}"]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TLT_RANKS": ranks, "COLUMNS": "300"}
    environment = {**os.environ, **fixed, MARK: str(log.parent.parent), **variables}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *settings], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def processes_in(folder: Path) -> dict[int, tuple[bytes, bytes]]:
    """Process id -> environment and command, of all that the folder's run has started, in any session."""
    found, mark = {}, f"\0{MARK}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = b"\0" + (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if mark in environment:
            found[int(path.name)] = environment, command
    return found


def ranks_in(folder: Path) -> dict[int, int]:
    """Rank -> process id."""
    found = {}
    for process, (environment, command) in processes_in(folder).items():
        match = re.search(rb"\0(?:PMI_RANK|OMPI_COMM_WORLD_RANK)=(\d+)\0", environment)
        if match and b"mpi4py" in command:
            found[int(match[1])] = process
    return found


def end_all(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """End everything that the job started; returns the commands of what did not end by itself."""
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
def on_full_disk(folder: Path, free_bytes: int | None) -> Iterator[Path]:
    """Yield where the run is for one start: its folder, or a copy on a disk with few free bytes, copied back later."""
    if free_bytes is None:
        yield folder
        return
    run, disk, page = folder / "run", folder / "disk", os.sysconf("SC_PAGESIZE")
    run.mkdir(exist_ok=True)
    disk.mkdir(exist_ok=True)
    used = sum(-(-path.stat().st_size // page) * page for path in run.rglob("*"))
    size = f"size={used + free_bytes + page}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
    try:
        shutil.copytree(run, disk / "run")
        yield disk
        shutil.rmtree(run)
        shutil.copytree(disk / "run", run)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


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
        RuntimeError: the run did not finish, or wrote a traceback.
    """
    log = folder / "logs" / "end"
    process = start(folder, variant, steps, log, {})
    if process.wait() or wrong_tracebacks(log.read_text(errors="replace"), has_lost_rank=False):
        raise RuntimeError(f"the run in {folder} ended with status {process.returncode}; see {log}")
    finished = json.loads(RunFolder(folder / "run").finished.read_text())
    assert finished["num_steps"] == steps, finished
    return str(finished["policy_sha256"])


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
                f"step {step}" for step in range(steps + 1) if texts(place, step) != texts(place / "straight", step)
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
