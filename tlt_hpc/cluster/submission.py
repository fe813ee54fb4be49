"""What was submitted together: its tasks, which wait for which, and the jobs that they became; kept as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlt_hpc.cluster.batch import Array, Batch, Folders
from tlt_hpc.cluster.sweep import SweepMember
from tlt_hpc.cluster.time_limit import AGAIN, LINKS_LEFT
from tlt_hpc.common.files import parse_object, read_bytes
from tlt_hpc.config import Config, ConfigError
from tlt_hpc.storage.folder import writing_beside

FILE = "submission.json"
WARMUP_SUFFIX = "-warmup"
"""What ``tlt warmup`` adds to a run's name."""

Stage = Literal["warmup", "train", "evaluate"]
STAGES: tuple[Stage, ...] = ("warmup", "train", "evaluate")
Key = tuple[Stage, int]
"""A task by its stage and its number there, which is also its index in an array."""


@dataclass(frozen=True)
class Task:
    """One ``tlt`` command that is a job of its own."""

    stage: Stage
    index: int
    member: str
    run: str
    """The folder of the run that it belongs to, as the configuration has it."""
    arguments: tuple[str, ...]
    own: tuple[str, ...] = ()
    """The overrides that its member does not share with all."""
    after: int | None = None
    """The task of the stage before that has to succeed first."""
    jobs: tuple[str, ...] = ()
    """Job numbers, the newest last; ``17_3`` within an array."""
    config: str = ""
    """The job file, as ``arguments`` name it."""

    @property
    def key(self) -> Key:
        return self.stage, self.index


@dataclass(frozen=True)
class Submission:
    """All tasks, and what each asks of Slurm; ``store`` is what relative paths are read from."""

    folder: Path
    store: Path
    batch: Batch
    tasks: tuple[Task, ...]
    at_once: int
    chain: int = 1
    """Jobs of one training that follow each other, whatever became of the one before."""
    is_local: bool = False

    @property
    def jobs_folder(self) -> Path:
        """Logs, batch scripts, and what submitit keeps of each job."""
        return self.folder / "jobs"

    def of_stage(self, stage: Stage) -> list[Task]:
        return [task for task in self.tasks if task.stage == stage]

    def with_jobs(self, jobs: dict[Key, Sequence[str]]) -> Submission:
        """The same with jobs added to tasks."""
        tasks = (dataclasses.replace(task, jobs=(*task.jobs, *jobs.get(task.key, ()))) for task in self.tasks)
        return dataclasses.replace(self, tasks=tuple(tasks))


# --- what is to be done ---


def make_tasks(
    members: Sequence[SweepMember], config: str, name: str, *, warmup: bool, evaluate: bool
) -> tuple[Task, ...]:
    """The training of every member; a warm-up before, shared by all that would warm up alike; an evaluation after.

    ``name`` is what the members would be called without their own overrides.

    Raises:
        ConfigError: there is nothing to warm up.
    """
    warmups = warmup_tasks(members, config, name) if warmup else []
    tasks = [task for task, _ in warmups]
    for index, member in enumerate(members):
        after = next((task for task, needed in warmups if index in needed), None)
        init = () if after is None else (f"drafter.init={after.run}/drafter",)
        arguments = ("train", config, *member.overrides, *init)
        run, first = str(member.config.folder), None if after is None else after.index
        tasks.append(Task("train", index, member.name, run, arguments, (*member.own, *init), first, config=config))
        if evaluate:
            saved = f"{run}/config.toml"
            judged = ("evaluate", run, saved)
            tasks.append(Task("evaluate", index, member.name, run, judged, member.own, index, config=saved))
    return tuple(sorted(tasks, key=lambda task: STAGES.index(task.stage)))


def warmup_tasks(members: Sequence[SweepMember], config: str, name: str) -> list[tuple[Task, set[int]]]:
    """The different warm-ups, each with the members that begin from it."""
    groups: dict[str, set[int]] = {}
    for index, member in enumerate(members):
        if member.config.speculation.mode == "full":
            groups.setdefault(warmup_key(member.config), set()).add(index)
    if not groups:
        raise ConfigError("--warmup: no member has a learned drafter; give speculation.mode=full, or leave it out")
    tasks = []
    for number, needed in enumerate(groups.values()):
        first = members[min(needed)]
        own = first.name if len(groups) > 1 else name
        run = first.config.folder.with_name(own + WARMUP_SUFFIX)
        arguments = ("warmup", config, *first.overrides, f"run.name={own}")
        tasks.append((Task("warmup", number, own, str(run), arguments, config=config), needed))
    return tasks


def warmup_key(config: Config) -> str:
    """What a warm-up depends on: not a run's name, seed, algorithm or optimiser."""
    tree = config.model_dump()
    return json.dumps([tree[section] for section in ("model", "data", "rollout", "drafter", "warmup")], default=str)


# --- sending it ---

Send = Callable[[Batch, Sequence[Task]], list[str]]
"""Submits tasks as one job or array; returns their job numbers."""


def send_all(submission: Submission, chosen: Collection[Key], send: Send) -> Iterator[Submission]:
    """Submit the chosen tasks, stage by stage, each waiting for what it needs of them; yields what is submitted so far.

    Tasks that wait for the same are one array. A stage's tasks keep their indices, by which ``aftercorr`` pairs them.
    Arrays of a stage share ``at_once``; where there are more of them than that, each waits for an earlier one's end.
    """
    newest: dict[Key, str] = {}
    for stage in STAGES:
        groups: dict[str, list[Task]] = {}
        for task in submission.of_stage(stage):
            if task.key in chosen:
                groups.setdefault(dependency_of(task, newest, submission), []).append(task)
        sent: list[str] = []
        for dependency, tasks in groups.items():
            cap = max(1, submission.at_once // len(groups))
            if len(sent) >= submission.at_once:
                turn = f"afterany:{sent[len(sent) - submission.at_once]}"
                dependency = f"{dependency},{turn}" if dependency else turn
            for batch in batches(submission, stage, tasks, dependency, cap):
                after = f"afterany:{newest[tasks[0].key].partition('_')[0]}" if tasks[0].key in newest else dependency
                jobs = send(dataclasses.replace(batch, dependency=after), tasks)
                newest |= {task.key: job for task, job in zip(tasks, jobs, strict=True)}
                submission = submission.with_jobs({task.key: [newest[task.key]] for task in tasks})
                yield submission
            sent.append(newest[tasks[0].key].partition("_")[0])


def dependency_of(task: Task, newest: dict[Key, str], submission: Submission) -> str:
    """What a task waits for of this submission, in sbatch's words; empty where it may start at once."""
    if task.after is None:
        return ""
    before = newest.get((STAGES[STAGES.index(task.stage) - 1], task.after))
    if before is None:
        return ""
    if task.stage == "evaluate" and "_" in before:
        return f"aftercorr:{before.partition('_')[0]}"
    return f"afterok:{before}"


def batches(submission: Submission, stage: Stage, tasks: Sequence[Task], dependency: str, cap: int) -> list[Batch]:
    """What these tasks ask of Slurm: as often as training is chained; warm-up and evaluation take one node."""
    whole = submission.batch
    is_array = len(submission.of_stage(stage)) > 1
    is_chain = stage == "train" and submission.chain > 1
    batch = dataclasses.replace(
        whole,
        name=f"{whole.name}-{stage}",
        nodes=whole.nodes if stage == "train" else 1,
        array=Array(tuple(task.index for task in tasks), cap) if is_array else None,
        log=f"{submission.jobs_folder}/{'%A_%a' if is_array else '%j'}_0_log.out",
        dependency=dependency,
        requeue=whole.requeue and not is_chain,
        before=(*whole.before, *words_for_ranks(submission, tasks)),
    )
    if not is_chain:
        return [batch]
    links = [f"export {LINKS_LEFT}={left}" for left in reversed(range(submission.chain))]
    return [dataclasses.replace(batch, before=(*batch.before, link)) for link in links]


def words_for_ranks(submission: Submission, tasks: Sequence[Task]) -> list[str]:
    """Lines of shell that tell the ranks how their job goes on, and what is in the job file that all of them have."""
    again = f'"python $PROJECT/jobs/submit.py resubmit "{shlex.quote(str(submission.folder))}'
    files = {task.config for task in tasks}
    read = [f"read_job {shlex.quote(file)}" for file in files if file and len(files) == 1]
    return [f"export {AGAIN}={again}", *read]


# --- on disk ---


def save(submission: Submission) -> None:
    """Write it into its folder.

    Raises:
        WriteError: no room or no permission.
    """
    submission.jobs_folder.mkdir(parents=True, exist_ok=True)
    tree = dataclasses.asdict(submission)
    tree |= {"folder": str(submission.folder), "store": str(submission.store)}
    with writing_beside(submission.folder / FILE) as part:
        part.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Submission:
    """What ``save`` has left there.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / FILE
    try:
        tree = parse_object(read_bytes(path))
        batch = Batch(**{**_tuples(tree["batch"]), "folders": Folders(**tree["batch"]["folders"])})
        tasks = tuple(Task(**_tuples(task)) for task in tree["tasks"])
        rest = {name: tree[name] for name in ("at_once", "chain", "is_local")}
        return Submission(folder.resolve(), Path(tree["store"]), batch, tasks, **rest)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder that submit.py has named") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); submit anew") from None


def _tuples(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}
