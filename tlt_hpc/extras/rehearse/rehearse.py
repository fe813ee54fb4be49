"""``tlt rehearse``: starts a run's ranks with a fault, waits for their end, sees what is left, and starts them again.

One process without MPI; in a Slurm job it runs in the batch script (``sbatch/rehearse.sh``), whose last fault is the
job's own time limit. What was done is in the rehearsal's folder, so that a job that Slurm has queued again continues.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tlt_hpc.cluster.launcher import PYTHON, find_mpiexec, launch_environment
from tlt_hpc.cluster.stopping import STOPPED_EARLY
from tlt_hpc.common.formatting import format_count, format_table
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.extras.rehearse.faults import BEGUN, STRUCK, VARIABLE, Order
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_record, write_json
from tlt_hpc.storage.step_lines import read_lines

SHORT_TOKENS = 256
STALL_FACTOR = 0.15
"""A rank that hangs in a rollout is found after one and a half minutes."""
MAX_SECONDS = 3600.0
"""A start that lasts longer, outside of a Slurm job, is ended, and the rehearsal with it."""
MAX_STARTS = 12
"""Starts of a job that Slurm queues again and again, because its time is too short for the next fault."""
LAST_STEPS = 2
"""Steps of the start after the last fault."""
SLOW_SECONDS = 60.0
"""For the other ranks to end once one was killed."""
STATE = "rehearsal.json"
_RUN_RANKS = "BASH_FUNC_run_ranks%%"
"""In the environment of a program that a batch script starts after ``export -f run_ranks``."""
_OVER_TIME = r"^stopped early|is (not )?queued again"
_RESUMING = re.compile(r"resuming from step (\d+)")


@dataclass(frozen=True)
class Fault:
    """A fault, and by what line the run tells of it, at its end or in its next start."""

    words: str
    said: str


KINDS: Mapping[str, Fault] = {
    "kill": Fault("rank killed (SIGKILL)", r"was killed or crashed"),
    "hang": Fault("rank hangs", r"the job hangs"),
    "disk": Fault("disk full for a rank", r"cannot write "),
    "limit": Fault("time limit", r"^stopped early"),
}
"""In the order of the rehearsal."""


@dataclass(frozen=True)
class Start:
    """One start of the run, as its end left it."""

    fault: str
    """Empty: the last start, which ends by itself."""
    struck: bool
    status: int
    """Exit status of the launcher; -1 where Slurm has ended the job with it."""
    seconds: float
    """From the fault to the end of all ranks."""
    until_rollout: float
    """From the start to the first round of a rollout."""
    lost: list[int]
    """Steps that were committed before, and whose line or logs are not as they were."""


@dataclass(frozen=True)
class Rehearsed:
    """The starts that have been rehearsed so far."""

    starts: list[Start] = field(default_factory=list)
    committed: dict[str, str] = field(default_factory=dict)
    """Step -> digest of its line and its logs, as of the last end."""

    def next_fault(self, num_ranks: int) -> str:
        """The first fault that has not struck; empty: the start that ends by itself."""
        done = {start.fault for start in self.starts if start.struck}
        # who hangs alone is named by nobody: its own watch hangs with it
        return next((kind for kind in KINDS if kind not in done and (num_ranks > 1 or kind != "hang")), "")

    @property
    def is_over(self) -> bool:
        """True if the last start was the one without a fault."""
        return bool(self.starts) and not self.starts[-1].fault


@dataclass(frozen=True)
class Rehearsal:
    """The settings that all starts have in common."""

    place: Path
    job: str
    overrides: Sequence[str]
    num_ranks: int

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.place / "run")

    @property
    def in_job(self) -> bool:
        """True if the batch script of a Slurm job starts the ranks."""
        return _RUN_RANKS in os.environ

    def marks_folder(self, number: int) -> Path:
        """The folder in which a start's ranks mark what they reach."""
        return self.place / f"start-{number}"

    def log_path(self, number: int) -> Path:
        """The file of a start's output."""
        return self.place / f"start-{number}.log"

    def is_over_time(self, number: int) -> bool:
        """True if the end of the job's time has ended a start."""
        return self.in_job and any(re.search(_OVER_TIME, line) for line in self.read_log_lines(number))

    def read_log_lines(self, number: int) -> list[str]:
        """The lines that a start printed; none if there is no such start."""
        if not self.log_path(number).exists():
            return []
        text = self.log_path(number).read_text(encoding="utf-8", errors="replace")
        return [line.strip() for line in text.splitlines()]


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tlt rehearse``."""
    command.add_argument("config", metavar="CONFIG.toml", help="the run, e.g. jobs/qwen7b.toml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="the same as for tlt train")


def run(options: argparse.Namespace) -> int:
    """Rehearse, and print what was lost; returns the exit status: 1 if anything was, 75 before the job's next start.

    Raises:
        ValueError: the job is wrong, the folder has a finished rehearsal, or a run ended before its fault.
    """
    rehearsal = prepare_rehearsal(options)
    path = rehearsal.place / STATE
    state = read_record(path, Rehearsed, f"remove {rehearsal.place}") or Rehearsed()
    if state.is_over:
        raise ConfigError(f"{rehearsal.place} has a finished rehearsal; remove it, or give another run.name")
    if len(state.starts) >= MAX_STARTS:
        raise UserError(
            f"{rehearsal.place}: {MAX_STARTS} starts were too short for all faults; give the job more --time"
        )
    print(f"rehearsal in {rehearsal.place}, {format_count(rehearsal.num_ranks, 'rank')}", flush=True)
    if rehearsal.num_ranks == 1:
        print("one rank: no hang is tried, as no other rank would see it")
    if rehearsal.log_path(len(state.starts)).exists():  # the job's end has ended this program with its ranks
        state = with_ended_start(rehearsal, state, -1)
        write_json(path, asdict(state))
    while not state.is_over:
        fault, number = state.next_fault(rehearsal.num_ranks), len(state.starts)
        wait = "; the watch finds it after one to two minutes" if fault == "hang" else ""
        print(f"start {number + 1}: {KINDS[fault].words if fault else 'to its end'}{wait}", flush=True)
        state = with_ended_start(rehearsal, state, run_ranks(rehearsal, fault, number))
        write_json(path, asdict(state))
        if fault and not state.starts[-1].struck and rehearsal.is_over_time(number):
            print("the job's time ended before that; queued again, or submitted again with more --time, it continues")
            return STOPPED_EARLY
        if fault and not state.starts[-1].struck:
            raise UserError(f"the run ended before its fault; see the end of {rehearsal.log_path(number)}")
        if fault == "limit" and rehearsal.in_job:
            print("the job's time is over; once Slurm has queued it again, or it is submitted again, it continues")
            return STOPPED_EARLY
        if not fault and state.starts[-1].status:
            raise UserError(f"the run could not be resumed to its end; see the end of {rehearsal.log_path(number)}")
    return report_losses(rehearsal, state)


def prepare_rehearsal(options: argparse.Namespace) -> Rehearsal:
    """The user's job, made short: few tokens, frequent checkpoints, hangs found early, in a folder of its own.

    Raises:
        ValueError: the configuration is wrong.
    """
    asked = load_config(options.config, options.overrides)
    tokens = min(asked.rollout.max_new_tokens, max(SHORT_TOKENS, 2 * asked.algorithm.overlong_buffer))
    place = asked.folder.with_name(f"{asked.folder.name}-rehearsal")
    overrides = [
        f"rollout.max_new_tokens={tokens}", "checkpoint.every_steps=2", f"run.stall_factor={STALL_FACTOR}",
        "evaluation.every_steps=0", "run.trackers=[]", "optimizer.schedule=constant",
        *options.overrides, f"run.folder={place}", "run.name=run", "run.num_steps=100000",
    ]  # fmt: skip
    num_ranks = load_config(options.config, overrides).run.ranks
    if _RUN_RANKS in os.environ:
        num_ranks = int(os.environ["SLURM_NTASKS"])
    place.mkdir(parents=True, exist_ok=True)
    return Rehearsal(place, options.config, overrides, num_ranks)


def run_ranks(rehearsal: Rehearsal, fault: str, number: int) -> int:
    """Run the ranks until all have ended, with a fault or to the end of the run; returns the launcher's status.

    Raises:
        UserError: they do not end.
    """
    marks, log = rehearsal.marks_folder(number), rehearsal.log_path(number)
    marks.mkdir(exist_ok=True)
    (marks / "fault").write_text(fault, encoding="utf-8")
    asked = "" if fault == "limit" and rehearsal.in_job else fault  # Slurm sends its own signal
    order = Order(asked, min(1, rehearsal.num_ranks - 1), marks)
    steps = [] if fault else [f"run.num_steps={len(read_lines(rehearsal.folder.metrics)) + LAST_STEPS}"]
    words = ["train", rehearsal.job, *rehearsal.overrides, *steps]
    ranks = [*PYTHON, "mpi4py", "-m", "tlt_hpc.extras.rehearse.rehearsed_rank", *words]
    # in a job srun starts them, and a site may have no mpiexec
    by_srun = ["bash", "-c", 'run_ranks "$@"', "run_ranks"]
    environment = launch_environment(rehearsal.num_ranks, os.environ, rehearsal.job) | {VARIABLE: str(order)}
    if not rehearsal.in_job:  # a job that this runs in by chance must not be queued again, nor start the ranks
        environment = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    launcher = by_srun if rehearsal.in_job else [find_mpiexec(environment), "-n", str(rehearsal.num_ranks)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*launcher, *ranks], env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=not rehearsal.in_job,
        )  # fmt: skip
        try:
            return process.wait(None if rehearsal.in_job else MAX_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"the ranks did not end within {MAX_SECONDS:g} s; see {log}") from None
        finally:
            if not rehearsal.in_job:  # there, the end of the job ends them
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def with_ended_start(rehearsal: Rehearsal, state: Rehearsed, status: int) -> Rehearsed:
    """The state with the start that has ended."""
    number = len(state.starts)
    marks, log = rehearsal.marks_folder(number), rehearsal.log_path(number)
    fault = (marks / "fault").read_text(encoding="utf-8")
    begun, struck = (_time_of(marks / name) for name in (BEGUN, STRUCK))
    launched, ended = (marks / "fault").stat().st_mtime, log.stat().st_mtime
    if fault == "limit" and rehearsal.is_over_time(number):
        struck = struck or ended
    now = read_step_digests(rehearsal.folder)
    own = Start(
        fault=fault,
        struck=struck is not None,
        status=status,
        seconds=max(0.0, ended - (struck or ended)),
        until_rollout=(begun or ended) - launched,
        lost=sorted(int(step) for step, digest in state.committed.items() if now.get(step) != digest),
    )
    return Rehearsed([*state.starts, own], now)


def read_step_digests(folder: RunFolder) -> dict[str, str]:
    """A digest of each committed step: of its line and of all ranks' logs.

    Raises:
        UserError: as ``read_lines``.
    """
    found = {}
    for step, line in read_lines(folder.metrics).items():
        digest = hashlib.sha256(repr(sorted(line.items())).encode())
        for path in folder.rollout_logs(step):
            digest.update(path.read_bytes())
        found[str(step)] = digest.hexdigest()
    return found


def report_losses(rehearsal: Rehearsal, state: Rehearsed) -> int:
    """Print what each fault cost, what the run said of it, and what the site did otherwise; the exit status.

    1 if anything was lost, or if a run that a fault struck did not report it or ended as if it had succeeded.
    """
    rows = [("fault", "ended after", "generates again after", "resumed from step", "lost")]
    told, is_unsaid = [], False
    for number, (start, after) in enumerate(zip(state.starts, state.starts[1:], strict=False)):
        logs = sorted(
            [*rehearsal.read_log_lines(number), *rehearsal.read_log_lines(number + 1)],
            key=lambda line: line[:4] != "tlt:",
        )
        resumed = next(
            (match[1] for line in rehearsal.read_log_lines(number + 1) if (match := _RESUMING.search(line))), "1"
        )
        lost = f"steps {', '.join(str(step + 1) for step in after.lost)}" if after.lost else "nothing"
        times = f"{start.seconds:.1f} s", f"{after.until_rollout:.1f} s"
        rows.append((KINDS[start.fault].words, *times, resumed, lost))
        said = next((line for line in logs if re.search(KINDS[start.fault].said, line)), "")
        by_slurm = rehearsal.in_job and start.fault == "limit"  # which may come in the middle of an update
        is_unsaid |= start.struck and not by_slurm and not (said and start.status)
        status = f" (exit status {start.status})" if not said or not start.status else ""
        told.append(f"{KINDS[start.fault].words}: {said or 'the run did not report it'}{status}")
    print(format_table(rows), "", *told, "", *site_differences(rehearsal, state), sep="\n")
    print(f"everything is in {rehearsal.place}; remove it when you have read it")
    return int(is_unsaid or any(start.lost for start in state.starts))


def site_differences(rehearsal: Rehearsal, state: Rehearsed) -> Iterator[str]:
    """The behaviour of the site that differs from what the run needs, a line each; one line if there is none."""
    found = list[str]()
    for number, start in enumerate(state.starts):
        if start.fault == "kill" and start.seconds > SLOW_SECONDS:
            found.append(f"the other ranks of one that was killed ran for {start.seconds:.0f} s more")
        if start.fault != "limit" or not rehearsal.in_job:
            continue
        lines = rehearsal.read_log_lines(number)
        stopped = next((line for line in lines if re.search(KINDS["limit"].said, line)), "")
        if not stopped:
            found.append(
                "the run was in the middle of an update at the end of its time; SIGUSR2 earlier (--signal) helps"
            )
        elif "SIGUSR2" not in stopped:
            found.append("SIGUSR2 did not arrive before the end: the run stopped by the time that squeue gives")
        if not any("is queued again" in line for line in lines):
            found += [f"no requeue: {line}" for line in lines if "not queued again" in line] or ["no requeue"]
    yield from (f"the site: {line}" for line in found)
    if not found:
        yield (
            "the site: nothing was otherwise"
            if rehearsal.in_job
            else "not started by sbatch/rehearse.sh: Slurm's signal and requeue were not tried"
        )


def _time_of(mark: Path) -> float | None:
    return mark.stat().st_mtime if mark.exists() else None
