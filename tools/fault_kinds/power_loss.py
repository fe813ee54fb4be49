"""The changes that a short run makes to its files are recorded, and what a power failure can leave of them is opened.

After each change there are states with all that was done, without what was not synced, with names of files alone (or
with zeros for their bytes), with bytes alone, and at random (``disk.py``). Each is read as the next start would read
it: what was acknowledged must be there, and what was not may be lost but must not look valid. From some states the run
is resumed, and must end as the unbroken one.
"""

from __future__ import annotations

import logging
import random
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path, PurePosixPath
from typing import Any

from inspect_run import faults as faults_of_files

from fault_kinds.disk import CHOICES, Choice, Disk, Part, State, by_chance, content, everything
from fault_kinds.interception import NOT_RECORDED, Change, described, read_changes, unavailable
from fault_kinds.results import Result, Results
from fault_kinds.runs import Job, differences, forking, outcome_of, texts
from fault_kinds.system_calls import SETTINGS, STEPS
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.common.errors import UserError
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.mpi.owner import read_owner
from tlt_hpc.storage.feature_file import FeatureCacheReader
from tlt_hpc.storage.folder import PART_SUFFIX, RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_kept_responses
from tlt_hpc.storage.step_lines import parse_lines

MAY_BE_LOST = ("rollouts", "cache", "kept", "status")
"""Folders of a run whose files are acknowledged by a step's line alone, or not at all."""
ALONE = ("checkpoints", "drafter-checkpoints", "kept", "cache")
"""Those that no reader compares with other files."""


def strike(options: Namespace, results: Results) -> None:
    """Record, build, open, resume."""
    if why := unavailable():
        raise UserError(why)
    folder = results.folder
    job = forking(options.ranks, SETTINGS)
    place, changes = record(folder, job)
    trial = trial_of(folder / "trial", place, changes, options.ranks)
    trial.run(options.every, options.random, options.seed)
    for result in trial.results:
        results.add(result)
    missing = not_recorded(trial.disk, place)
    results.add(Result("recording", "files as recorded", "all", [f"not recorded: {each}" for each in missing]))
    wanted = outcome_of(place, STEPS)
    states = random.Random(options.seed).sample(trial.sample, options.resumes)
    for number, state in enumerate(states):
        again, log = folder / f"resumed-{number}", folder / "logs" / f"resumed-{number}"
        Builder(folder / f"files-{number}").build(state, again)
        status, text = job.run(again, log)
        wrong = [f"status {status}: {text[-500:]}"] if status or "Traceback" in text else []
        wrong += differences(outcome_of(again, STEPS), wanted)
        results.add(Result(f"resume {number}", "random, resumed", "right", wrong))


def record(folder: Path, job: Job) -> tuple[Path, list[Change]]:
    """A run in an empty folder, and the changes that it made there.

    Raises:
        UserError: it fails.
    """
    place, report = folder / "recorded", folder / "report.json"
    place.mkdir(parents=True)
    job.succeed(place, folder / "logs" / "recorded", described(None, [place], report))
    return place, read_changes(report)


def trial_of(folder: Path, place: Path, changes: Sequence[Change], ranks: int) -> Trial:
    """A trial of a recorded run."""
    wanted = [found for step in range(STEPS) if isinstance(found := texts(RunFolder(place / "run"), step), dict)]
    return Trial(folder, Disk(place), changes, lambda found: wrong_of(RunFolder(found / "run"), ranks, wanted))


def not_recorded(disk: Disk, place: Path) -> list[str]:
    """Files that are otherwise than the recording has them."""
    held = {name: content(part) for name, part in disk.state(everything).items() if part is not None}
    there = {f"/{path.relative_to(place)}": path.read_bytes() for path in place.rglob("*") if path.is_file()}
    there = {name: data for name, data in there.items() if not NOT_RECORDED.search(name)}
    return sorted(name for name in held.keys() | there.keys() if held.get(name) != there.get(name))


@dataclass
class Promise:
    """What a program was told to be on the disk, once the thread that renamed it has gone on to something else."""

    path: str
    thread: int
    allowed: list[State]
    """What may be there; the last of these is what was renamed."""
    is_made: bool = False


@dataclass
class Promises:
    """Those that hold at a moment."""

    disk: Disk
    may_be_lost: tuple[str, ...]
    found: dict[str, Promise] = field(default_factory=dict)

    def follow(self, change: Change) -> None:
        """Note what a change that is about to be made says of those before it; call ``made`` after it."""
        for promise in self.found.values():
            about = (promise.path, str(PurePosixPath(promise.path).parent))
            if promise.thread == change.thread and change.path not in about:
                self._keep(promise)
        if change.kind in ("rename", "unlink"):
            for path in [path for path in self.found if f"{path}/".startswith(f"{change.path}/")]:
                del self.found[path]

    def made(self, change: Change) -> None:
        """Note a file or folder that was renamed to its final name."""
        is_whole = change.kind == "rename" and change.path == f"{change.target}{PART_SUFFIX}"
        place = PurePosixPath(change.target).relative_to(self.disk.root).parts if is_whole else ()
        if not place or set(place) & {*self.may_be_lost} or change.target.endswith(".list"):
            return
        before = self.found.get(change.target)
        known = before.allowed if before else []
        self.found[change.target] = Promise(change.target, change.thread, [*known, self._below(change.target)])
        if before is not None and before.is_made:
            self.found[change.target].is_made = True

    def end(self) -> None:
        """The program has ended."""
        for promise in self.found.values():
            self._keep(promise)

    def broken(self, state: State) -> Iterator[str]:
        """The paths that a state lacks or has otherwise."""
        for path, promise in self.found.items():
            name = path.removeprefix(self.disk.root)
            there = {each.removeprefix(name): part for each, part in state.items() if f"{each}/".startswith(f"{name}/")}
            if promise.is_made and not any(_same(there, allowed) for allowed in promise.allowed):
                yield f"{name.lstrip('/')} is {'changed' if there else 'lost'}"

    def _keep(self, promise: Promise) -> None:
        promise.is_made, promise.allowed = True, promise.allowed[-1:]

    def _below(self, path: str) -> State:
        node, name = self.disk.find(path), path.removeprefix(self.disk.root)
        whole = self.disk.state(everything)
        assert node is not None
        return {each.removeprefix(name): part for each, part in whole.items() if f"{each}/".startswith(f"{name}/")}


def _same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(
        part == wanted[name] or (part and wanted[name] and content(part) == content(wanted[name] or part))
        for name, part in found.items()
    )


class Builder:
    """Puts states into folders, as links to files that are written once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, dict[Part, Path]()
        folder.mkdir(parents=True)

    def build(self, state: State, place: Path) -> None:
        """The state's files below ``place``; they are not to be written to."""
        for name, part in state.items():
            path = place / name.lstrip("/")
            if part is None:
                path.mkdir(parents=True)
                continue
            if part not in self._files:
                self._files[part] = self._folder / str(len(self._files))
                self._files[part].write_bytes(content(part))
            path.hardlink_to(self._files[part])


def wrong_of(run: RunFolder, ranks: int, wanted: list[dict[Any, Any]]) -> Iterator[str]:
    """What the next start could not use of a run's folder, or would take for valid though it is not.

    Args:
        wanted: the texts of each step.
    """
    if not run.path.exists():
        return
    if run.rollouts.exists():
        yield from faults_of_files(RunLog(run.path))
    lines = parse_lines(run.metrics.read_bytes()).by_step if run.metrics.exists() else {}
    for step in lines:
        if texts(run, step) != wanted[step] or len(run.rollout_logs(step)) != ranks:
            yield f"step {step + 1} has a line, and not its responses"
    for folder in (run.checkpoints, run.drafter_checkpoints):
        CheckpointStore(folder, keep=1).open_checkpoints_within(0, STEPS)  # warns of each that is damaged
    for path in (*run.kept.glob("step-*/rank-*.h5"), *run.cache.glob("step-*/rank-*.h5")):
        with suppress(DamagedFile):  # is not used
            if path.is_relative_to(run.kept):
                read_kept_responses(path)
            else:
                FeatureCacheReader(path).close()
    read_owner(run.status)


@dataclass
class Trial:
    """Opens the states of a recording, in a folder of its own."""

    folder: Path
    disk: Disk
    changes: Sequence[Change]
    look: Callable[[Path], Iterable[str]]
    """What is wrong with the files in a folder."""
    may_be_lost: tuple[str, ...] = MAY_BE_LOST
    results: list[Result] = field(default_factory=list)
    sample: list[State] = field(default_factory=list)
    """Those at random."""

    @property
    def wrong(self) -> list[str]:
        """What is wrong, with the change after which it is."""
        return [f"{result.name}: {each}" for result in self.results for each in result.wrong]

    def run(self, every: int = 1, num_random: int = 2, seed: int = 0, numbers: range | None = None) -> None:
        """Build and open the states after each change that is no write, and after each ``every``-th write.

        Args:
            numbers: of the changes; by default all, and the end. Given, the first wrong state is the last.
        """
        promises, seen, builder = Promises(self.disk, self.may_be_lost), set[int](), Builder(self.folder / "files")
        for number, change in enumerate([*self.changes, None]):
            if change is None:
                promises.end()
            else:
                promises.follow(change)
                has_changed = self.disk.apply(change)
                promises.made(change)
                if not has_changed or (change.kind in ("write", "truncate") and number % every):
                    continue
            if numbers is not None and number not in numbers:
                continue
            for name, choice in self._choices(num_random, f"{seed}-{number}"):
                state = self.disk.state(choice)
                wrong = [*promises.broken(state)]
                if (key := hash((frozenset(state.items()), *wrong))) in seen:
                    continue
                seen.add(key)
                if new := _unseen(state, seen):
                    wrong += self._open(new, builder)
                at = f"{change.kind} {change.path.removeprefix(self.disk.root)}" if change else "the end"
                self.results.append(
                    Result(f"{len(self.results)}: {name}, change {number} ({at})", name, "right", wrong)
                )
                if wrong and numbers is not None:
                    return
                if name == "random":
                    self.sample.append(state)

    def _choices(self, num_random: int, seed: str) -> Iterator[tuple[str, Choice]]:
        yield from CHOICES.items()
        for number in range(num_random):
            yield "random", by_chance(f"{seed}-{number}")
            yield "random, in any order", by_chance(f"{seed}-{number}", any_order=True)

    def _open(self, state: State, builder: Builder) -> list[str]:
        place, heard, logger = self.folder / "state", BufferingHandler(10**6), logging.getLogger("tlt_hpc")
        heard.setLevel(logging.WARNING)
        builder.build(state, place)
        logger.addHandler(heard)
        try:
            return [*self.look(place), *(record.getMessage() for record in heard.buffer)]
        except Exception as error:  # noqa: BLE001 (a reader that raises is what is looked for)
            return [f"{type(error).__name__}: {error}"]
        finally:
            logger.removeHandler(heard)
            shutil.rmtree(place)


def _unseen(state: State, seen: set[int]) -> State:
    """A state without the folders that are read by themselves and were read so before; nothing if all was."""
    own = {name: {path: p for path, p in state.items() if path.startswith(f"/run/{name}")} for name in ALONE}
    rest = {path: part for path, part in state.items() if not any(path in found for found in own.values())}
    new = rest, *(found for found in own.values() if hash(frozenset(found.items())) not in seen)
    is_known = len(new) == 1 and hash(frozenset(rest.items())) in seen
    seen.update(hash(frozenset(found.items())) for found in new)
    return {} if is_known else {path: part for found in new for path, part in found.items()}
