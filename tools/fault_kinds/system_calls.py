"""Every system call of a short run fails in turn; the run is resumed, and its end compared with an unbroken one's.

A case is the Nth call of a kind, on the run's own files, the model's or the job's, in one part of a run: a ``start`` in
an empty folder, a ``resume`` with a step to repeat, one ``step``, the ``checkpoint`` after it, and the ``watch`` over
the rank. It fails once or from then on, or a write is cut short, once or on a disk that is full from then on
(``interception.py``). ``--only`` is a pattern of cases, as RANKS-RANK-PART-CALL-NUMBER-ERROR, e.g.
"checkpoint-(fsync|rename).*EIO".
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
from argparse import Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inspect_run import faults as faults_of_files

from fault_kinds.interception import CALLS, CallFault, Report, described, unavailable
from fault_kinds.results import Result, Results
from fault_kinds.runs import HANG_STATUS, ROOT, Job, differences, forking, lines_of, outcome_of
from tlt_hpc.checkpoint.manifest import CheckpointError, open_checkpoint
from tlt_hpc.checkpoint.save import list_checkpoints
from tlt_hpc.common.errors import UserError
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder

STARTS = {"start": "empty", "resume": "killed", "step": "saved", "checkpoint": "saved", "watch": "saved"}
"""Part of a run -> in what state its folder is before: empty, killed in the last step, or saved before it."""
WINDOWS = {"start": "resume"}
"""What the process beside the rank calls a part, where that is another name."""
STEPS = 4
SETTINGS = (
    "jobs/tiny.toml", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=100",
    "rollout.max_live=4", "checkpoint.every_steps=2", "checkpoint.keep=1",
    "run.stall_factor=0.1", f"run.num_steps={STEPS}",
)  # fmt: skip
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "short")
ERRORS_OF = {"write": ERRORS, **dict.fromkeys(("mmap", "read", "chmod"), ERRORS[:1])}
"""The errors that kinds of calls can meet; all others: those but the last."""
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
    fault: CallFault

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


def strike(options: Namespace, results: Results) -> None:
    """Run all cases that the options ask for."""
    if why := unavailable():
        raise UserError(why)
    with ThreadPoolExecutor(options.jobs) as runs:
        campaign = Campaign(results.folder, forking(options.ranks, SETTINGS))
        campaign.prepare(options.rank, STARTS.values())
        cases = [case for case in cases_of(campaign, options.rank, options.alike) if case.name not in results.found]
        cases = [case for case in cases if re.search(options.only or "", case.name)]
        if options.count:
            cases = random.Random(options.seed).sample(cases, min(options.count, len(cases)))
        print(f"{len(cases)} cases", flush=True)
        for result in runs.map(campaign.judge, cases):
            results.add(result)


def cases_of(campaign: Campaign, rank: int, alike: int) -> Iterator[Case]:
    """All cases of a rank, after a line for each part; ``alike``: at most so many on the same file (0: all)."""
    for part in STARTS:
        files = campaign.count(part)
        print(f"{part}: {', '.join(f'{len(found)} {call}' for call, found in files.items())}", flush=True)
        for call in CALLS:
            numbers = [n for file in dict.fromkeys(files[call]) for n in few(files[call], file, alike)]
            for number in sorted(numbers):
                for error in ERRORS_OF.get(call, ERRORS[:-1]):
                    for stays in (False, True):
                        yield Case(part, campaign.job.ranks, CallFault(part, call, number, error, stays, rank))


def few(files: list[str], file: str, most: int) -> list[int]:
    """The numbers of the calls on a file, at most so many (0: all), the first and the last among them."""
    found = [number for number, each in enumerate(files, 1) if each == file]
    if not most or len(found) <= most:
        return found
    return sorted({found[round(place * (len(found) - 1) / max(1, most - 1))] for place in range(most)})


class Campaign:
    """Runs cases in a folder."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self._reference: dict[str, Any] = {}
        self._files: dict[str, set[str]] = {}
        """State of a folder before a run -> the files that it has after a run without a fault."""
        self._calls: dict[str, dict[str, list[str]]] = {}
        """The same -> the files of the calls of that run, by part and kind of call."""
        self._resumed: set[tuple[Any, ...]] = set()
        """What runs ended from that were resumed, and ended as they must."""

    def prepare(self, rank: int, states: Iterable[str]) -> None:
        """Make the unbroken run, the folders that cases begin with, and from each a run without a fault.

        Args:
            rank: whose calls are counted.
            states: of ``STARTS``, those that are needed.

        Raises:
            UserError: a run without a fault fails.
        """
        for name in ["whole", *sorted(set(states))]:
            if not (start := self._start(name)).exists():
                self._make(name, start)
        self._reference = outcome_of(self._start("whole"), STEPS)
        for name in sorted(set(states)):
            place = self.folder / "places" / f"{self.job.ranks}-{rank}-{name}"
            status, text, report = self._attempt(place, name, CallFault("step", rank=rank))
            if status:
                raise UserError(f"the run without a fault in {place} ended with status {status}: {text[-500:]}")
            self._files[name], self._calls[name] = files_of(place), report.files
            shutil.rmtree(place)

    def _make(self, name: str, start: Path) -> None:
        (start / "run").mkdir(parents=True)
        log, mark = self._log(name), self.folder / "mark"
        if name == "whole":
            self.job.succeed(start, log)
        if name == "saved":
            self.job.succeed(start, log, None, f"run.num_steps={STEPS - 1}", "checkpoint.every_steps=1")
        if name == "killed":
            fault = {"TLT_FAULT": f"commit:0:{2 * (STEPS - 1)}", "TLT_FAULT_MARK": str(mark)}
            _, text = self.job.run(start, log, fault)
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
        status, text, report = self._attempt(place, STARTS[case.part], case.fault)
        wrong = self.wrong_end(case, place, status, text) if report.struck or status else []
        wrong += ["ended, though no call had failed"] if status and not report.struck else []
        if report.struck and status:
            alike = STARTS[case.part], _WARNING.search(text) is None, state_of(place)
            if alike not in self._resumed:
                again, told = self.job.run(place, self._log(f"{case.name}.resumed"))
                wrong += [f"resume: {each}" for each in self.wrong_end(case, place, again, told, text)]
                wrong += [f"resume ended with status {again}"] if again else []
                wrong += [f"resume: {line}" for line in told.splitlines() if _DAMAGE.match(line)]
                if not wrong:
                    self._resumed.add(alike)
        said = next((line for line in text.splitlines() if _WARNING.match(line)), "")
        if report.struck and not said and case.must_tell:
            wrong.append("untold")
        if not wrong:
            shutil.rmtree(place)
        outcome = "ended" if status else "continued, told" if said else "continued"
        file = re.sub(r"^.*/run(/|$)", "", report.struck) or "."
        details = {"status": status, "said": said.replace(str(place), ""), "file": file if report.struck else ""}
        row = f"{case.part}, {case.ranks} rank{'s' * (case.ranks != 1)}, {case.fault.call}"
        return Result(case.name, row, outcome if report.struck else "not reached", wrong, details)

    def _attempt(self, place: Path, state: str, fault: CallFault) -> tuple[int, str, Report]:
        """Status and output of the run with the fault, and what the process beside the rank saw."""
        shutil.rmtree(place, ignore_errors=True)  # of a campaign that was ended
        shutil.copytree(self._start(state), place)
        report = self._log(f"{place.name}.json")
        report.unlink(missing_ok=True)
        fault = replace(fault, part=WINDOWS.get(fault.part, fault.part))
        roots = [place, ROOT / "tlt_hpc" / "models" / "assets", ROOT / "jobs"]
        status, text = self.job.run(place, self._log(place.name), described(fault, roots, report))
        return status, text, Report(**json.loads(report.read_text())) if report.exists() else Report()

    def wrong_end(self, case: Case, place: Path, status: int, text: str, before: str = "") -> list[str]:
        """What must not be of a run that has ended; ``before``: what an earlier start has said."""
        wrong = ["traceback"] if _TRACE.search(text) else []
        if status in (HANG_STATUS, -signal.SIGKILL):
            return [*wrong, "hung"]
        if (place / "run" / "rollouts").exists():
            wrong += [f"not sound: {fault}" for fault in faults_of_files(RunLog(place / "run"))]
        run = RunFolder(place / "run")
        for step, folder in [*list_checkpoints(run.checkpoints), *list_checkpoints(run.drafter_checkpoints)]:
            try:
                open_checkpoint(folder, step)
            except CheckpointError as error:
                wrong.append(f"damaged under its final name: {folder.name}: {error}")
        if not lines_of(self._start(STARTS[case.part])) <= lines_of(place):
            wrong.append("lost a committed step")
        if any(run.path.glob("metrics.dropped-*")):
            wrong.append("generated a committed step again")  # no case damages a file that was whole
        wanted, found = self._reference, outcome_of(place, STEPS)
        if status:
            lines = len(_END.findall(text))
            wrong += [
                f"differs in {name}"
                for name, each in found.items()
                if name.startswith("texts") and (isinstance(each, str) or wanted[name] | each != wanted[name])
            ]  # a step that is not committed may lack the logs of a rank
            return wrong if lines == 1 else [*wrong, f"{lines} lines"]
        wrong += differences(found, wanted)
        other = {name for name in self._files[STARTS[case.part]] ^ files_of(place) if not _REMADE.match(name)}
        other |= {name for name in files_of(place) if name.endswith(".part")}
        is_told = _WARNING.search(before + text) is not None
        return wrong + ([f"other files, untold: {sorted(other)}"] if other and not is_told else [])

    def _start(self, name: str) -> Path:
        return self.folder / "starts" / f"{self.job.ranks}-{name}"

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / name


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
