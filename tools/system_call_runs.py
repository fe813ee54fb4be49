"""Runs of ``system_call_faults.py``: with a fault and resumed, and what is wrong with their ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from inspect_run import faults as faults_of_files
from system_call_rank import CALLS, Fault, Report

from tlt_hpc.checkpoint.manifest import CheckpointError, open_checkpoint
from tlt_hpc.checkpoint.save import found_in
from tlt_hpc.cluster.local import find_mpiexec
from tlt_hpc.common.errors import UserError
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import read_lines

ROOT = Path(__file__).resolve().parent.parent
STARTS = {"start": "empty", "resume": "killed", "step": "saved", "checkpoint": "saved", "watch": "saved"}
"""Part of a run -> in what state its folder is before: empty, killed in the last step, or saved before it."""
WINDOWS = {"start": "resume"}
"""What the process beside the rank calls a part, where that is another name."""
STEPS = 4
SETTINGS = [
    "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=100", "rollout.max_live=4",
    "checkpoint.every_steps=2", "checkpoint.keep=1", "checkpoint.keep_responses_seconds=0", "run.name=run",
    "run.stall_factor=0.1", f"run.num_steps={STEPS}",
]  # fmt: skip
HANG_SECONDS = 180.0
_END = re.compile(r"^tlt: (?!.*(; the run continues|was killed or crashed, last seen in))", re.MULTILINE)
"""The line that says why a run ends; beside it the others tell of a rank that could not write its status."""
_WARNING = re.compile(r"^\[rank \d+\] WARNING (?!tlt_hpc.cluster.watch.record)|^tlt: ", re.MULTILINE)
_TRACE = re.compile(r"Traceback \(most recent|^Exception (ignored )?in|Fatal Python error", re.MULTILINE)
_REMADE = re.compile(r"^(cache/|kept|status/|shared-|environment)")
"""What a run may lack or have more of at its end after a fault."""
_TIMED = re.compile(r"(cache|kept|rollouts|status)/|metrics|environment")
"""Files whose bytes tell times, which differ from run to run."""
_DAMAGE = re.compile(r"(?!.*cluster\.watch\.last: ).*(damaged|skipping checkpoint|(is|are) generated again)")
"""A line of a start: an earlier one has left a file under its final name that was not whole; not its last words."""


@dataclass(frozen=True)
class Case:
    """A fault in a run of so many ranks; ``part`` as in ``STARTS``."""

    part: str
    ranks: int
    fault: Fault

    @property
    def name(self) -> str:
        fault = self.fault
        how = f"{fault.error}{'-on' if fault.stays else ''}"
        return f"{self.ranks}-{fault.rank}-{self.part}-{fault.call}-{fault.number:04d}-{how}"

    @property
    def must_tell(self) -> bool:
        """Whether no run may continue without a word; of a node's status files one rank alone warns.

        Of several ranks another may have made the folder.
        """
        is_lost = self.fault.error != "short" or self.fault.stays
        calls = ("write", "fsync", "rename", *(["mkdir"] if self.ranks == 1 else []))
        return is_lost and self.part != "watch" and self.fault.call in calls


@dataclass(frozen=True)
class Result:
    """What came of a case."""

    name: str
    file: str
    """Whose call failed, within the run's folder; empty: the call was not made."""
    status: int
    said: str
    """The first line of the run about it."""
    wrong: list[str]
    """What must not be, a few words each."""

    @property
    def outcome(self) -> str:
        if not self.file:
            return "not reached"
        if self.wrong:
            return "wrong"
        return "ended" if self.status else "continued, told" if self.said else "continued"


class Campaign:
    """Runs cases in a folder; ``launcher`` starts a rank that has its imports."""

    def __init__(self, folder: Path, launcher: list[str]) -> None:
        self.folder, self._launcher = folder, launcher
        self._references: dict[int, dict[str, Any]] = {}
        self._files: dict[str, set[str]] = {}
        """State of a folder before a run -> the files that it has after a run without a fault."""
        self._resumed: set[tuple[Any, ...]] = set()
        """What runs ended from that were resumed, and ended as they must."""
        self._calls: dict[str, dict[str, list[str]]] = {}
        """The same -> the files of the calls of that run, by part and kind of call."""

    def prepare(self, ranks: int, rank: int, states: Iterable[str]) -> None:
        """Make the unbroken run, the folders that cases begin with, and from each a run without a fault.

        Args:
            rank: whose calls are counted.
            states: of ``STARTS``, those that are needed.

        Raises:
            UserError: a run without a fault fails.
        """
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        if not (whole := self._start(ranks, "whole")).exists():
            self._succeed(ranks, whole)
        self._references[ranks] = self._found(whole)
        for name in sorted(set(states)):
            if not (start := self._start(ranks, name)).exists():
                self._make(ranks, name, start)
            place = self.folder / "places" / f"{ranks}-{rank}-{name}"
            status, text, report = self._attempt(place, ranks, name, Fault("step", rank=rank))
            if status:
                raise UserError(f"the run without a fault in {place} ended with status {status}: {text[-500:]}")
            self._files[name], self._calls[name] = files_of(place), report.files
            shutil.rmtree(place)

    def _make(self, ranks: int, name: str, start: Path) -> None:
        (start / "run").mkdir(parents=True)
        if name == "saved":
            self._succeed(ranks, start, f"run.num_steps={STEPS - 1}", "checkpoint.every_steps=1")
        if name == "killed":
            mark = self.folder / "mark"
            fault = {"TLT_FAULT": f"commit:0:{2 * (STEPS - 1)}", "TLT_FAULT_MARK": str(mark)}
            _, text = self.run(ranks, start, "tools/fault_rank.py", fault)
            if not mark.exists():
                raise UserError(f"the run in {start} was not killed: {text[-500:]}")

    def count(self, part: str) -> dict[str, list[str]]:
        """The files of each kind of call of a part, in order, in the run without a fault."""
        calls = self._calls[STARTS[part]]
        return {call: calls.get(f"{WINDOWS.get(part, part)} {call}", []) for call in CALLS}

    def judge(self, case: Case) -> Result:
        """Run a case, resume it, and check both ends; its folder is kept if anything is wrong.

        A folder in the same state as that of an earlier case is not resumed again; its files are checked all the same.
        """
        place = self.folder / "places" / case.name
        status, text, report = self._attempt(place, case.ranks, STARTS[case.part], case.fault)
        wrong = self.wrong_end(case, place, status, text) if report.struck or status else []
        wrong += ["ended, though no call had failed"] if status and not report.struck else []
        if report.struck and status:
            alike = case.ranks, STARTS[case.part], _WARNING.search(text) is None, state_of(place)
            if alike not in self._resumed:
                again, told = self.run(case.ranks, place, "-m tlt_hpc")
                wrong += [f"resume: {each}" for each in self.wrong_end(case, place, again, told, text)]
                wrong += [f"resume ended with status {again}"] if again else []
                wrong += [f"resume: {line}" for line in told.splitlines() if _DAMAGE.match(line)]
                (self.folder / "logs" / f"{case.name}.resumed").write_text(told)
                if not wrong:
                    self._resumed.add(alike)
        said = next((line for line in text.splitlines() if _WARNING.match(line)), "")
        if report.struck and not said and case.must_tell:
            wrong.append("untold")
        if not wrong:
            shutil.rmtree(place)
        file = re.sub(r"^.*/run(/|$)", "", report.struck) or ("." if report.struck else "")
        return Result(case.name, file, status, said.replace(str(place), ""), wrong)

    def _attempt(self, place: Path, ranks: int, state: str, fault: Fault) -> tuple[int, str, Report]:
        """Status and output of the run with the fault, and what the process beside the rank saw."""
        shutil.rmtree(place, ignore_errors=True)  # of a campaign that was ended
        shutil.copytree(self._start(ranks, state), place)
        report = self.folder / "logs" / f"{place.name}.json"
        report.unlink(missing_ok=True)
        roots = [str(place), str(ROOT / "tlt_hpc" / "models" / "assets"), str(ROOT / "jobs")]
        told = json.dumps(
            {
                "fault": asdict(replace(fault, part=WINDOWS.get(fault.part, fault.part))),
                "roots": roots,
                "report": str(report),
            }
        )
        status, text = self.run(ranks, place, "tools/system_call_rank.py", {"TLT_SYSTEM_CALL": told})
        (self.folder / "logs" / place.name).write_text(text)
        return status, text, Report(**json.loads(report.read_text())) if report.exists() else Report()

    def wrong_end(self, case: Case, place: Path, status: int, text: str, before: str = "") -> list[str]:
        """What must not be of a run that has ended; ``before``: what an earlier start has said."""
        wrong = ["traceback"] if _TRACE.search(text) else []
        if status in (71, -signal.SIGKILL):
            return [*wrong, "hung"]
        if (place / "run" / "rollouts").exists():
            wrong += [f"not sound: {fault}" for fault in faults_of_files(RunLog(place / "run"))]
        run = RunFolder(place / "run")
        for step, folder in [*found_in(run.checkpoints), *found_in(run.drafter_checkpoints)]:
            try:
                open_checkpoint(folder, step)
            except CheckpointError as error:
                wrong.append(f"damaged under its final name: {folder.name}: {error}")
        if not committed(self._start(case.ranks, STARTS[case.part])) <= committed(place):
            wrong.append("lost a committed step")
        if any(run.path.glob("metrics.dropped-*")):
            wrong.append("generated a committed step again")  # no case damages a file that was whole
        wanted, found = self._references[case.ranks], self._found(place)
        if status:
            lines = len(_END.findall(text))
            wrong += [
                f"differs in {name}"
                for name, each in found.items()
                if name.startswith("texts") and (isinstance(each, str) or wanted[name] | each != wanted[name])
            ]  # a step that is not committed may lack the logs of a rank
            return wrong if lines == 1 else [*wrong, f"{lines} lines"]
        wrong += [f"differs in {name}" for name in wanted if found.get(name) != wanted[name]]
        other = {name for name in self._files[STARTS[case.part]] ^ files_of(place) if not _REMADE.match(name)}
        other |= {name for name in files_of(place) if name.endswith(".part")}
        is_told = _WARNING.search(before + text) is not None
        return wrong + ([f"other files, untold: {sorted(other)}"] if other and not is_told else [])

    def _found(self, place: Path) -> dict[str, Any]:
        """What two runs of the same job have in common at their ends."""
        run = RunFolder(place / "run")
        found: dict[str, Any] = {f"texts of step {step + 1}": texts(run, step) for step in range(STEPS)}
        found["committed steps"] = committed(place)
        found["policy"] = run.finished.exists() and json.loads(run.finished.read_text())["policy_sha256"]
        saved = run.checkpoints / f"step-{STEPS:06d}"
        return found | {path.name: path.read_bytes() for path in saved.glob("policy-*")}

    def _start(self, ranks: int, name: str) -> Path:
        return self.folder / "starts" / f"{ranks}-{name}"

    def _succeed(self, ranks: int, place: Path, *settings: str) -> None:
        status, text = self.run(ranks, place, "-m tlt_hpc", {}, *settings)
        if status:
            raise UserError(f"the run without a fault in {place} ended with status {status}: {text[-500:]}")

    def run(
        self, ranks: int, place: Path, program: str, variables: dict[str, str] | None = None, *settings: str
    ) -> tuple[int, str]:
        """Exit status and output of a start of the run in ``place``; a hang is ended."""
        launched = ranks > 1 or "fault_rank" in program  # which asks the launcher for its rank
        command = [*([find_mpiexec(), "-n", str(ranks)] if launched else []), *self._launcher, *program.split()]
        command += ["train", "jobs/tiny.toml", *SETTINGS, f"run.ranks={ranks}", f"run.folder={place}", *settings]
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TLT_RANKS": str(ranks), "COLUMNS": "300"}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **fixed, **(variables or {})}, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            with suppress(subprocess.TimeoutExpired):
                process.wait(HANG_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            return process.returncode, output.read().decode(errors="replace")


def committed(place: Path) -> set[int]:
    """The steps whose lines a run has; none if it has a line that cannot be read."""
    try:
        return set(read_lines(RunFolder(place / "run").metrics))
    except UserError:
        return set()


def files_of(place: Path) -> set[str]:
    """The names of a run's files."""
    return {str(path.relative_to(place / "run")) for path in (place / "run").rglob("*") if path.is_file()}


def state_of(place: Path) -> frozenset[tuple[str, str]]:
    """What a run's folder holds: all names, and of each file the bytes, or the number of lines if it tells times."""
    state: set[tuple[str, str]] = set()
    for path in (place / "run").rglob("*"):
        name = str(path.relative_to(place / "run"))
        data = path.read_bytes() if path.is_file() else b""
        if not _TIMED.match(name):
            state.add((name, hashlib.sha256(data).hexdigest()))
        elif path.suffix == ".jsonl":
            *lines, rest = data.split(b"\n")
            state.add((name, f"{len(lines)} lines, {len(rest)} bytes of another"))
        else:
            state.add((name, "something" if data else "nothing"))
    return frozenset(state)


def texts(run: RunFolder, step: int) -> dict[object, tuple[list[int], float]] | str:
    """The responses of a step and their rewards, by key, or why they cannot be read."""
    try:
        records = [read_step(path) for path in run.rollout_logs(step)]
    except DamagedFile as error:
        return str(error)
    return {
        rollout.key: (rollout.response_tokens.tolist(), float(reward))
        for record in records
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }
