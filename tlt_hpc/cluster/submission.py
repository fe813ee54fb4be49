"""What was submitted together: its members, what each asks of Slurm, and their jobs; kept as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.cluster.sweep import SweepMember
from tlt_hpc.cluster.time_limit import AGAIN
from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.config import ConfigError
from tlt_hpc.storage.folder import writing_beside

FILE = "submission.json"
SIGNAL_SECONDS = 120
"""How long before its time limit a job is told to save and stop."""
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


@dataclass(frozen=True)
class Resources:
    """What each member asks of Slurm, by the names of ``jobs/submit.py``'s options.

    Raises:
        ConfigError: a number that no job can have, or text that is no option of sbatch.
    """

    nodes: int = 1
    gpus_per_node: int = 0
    ranks_per_node: int | None = None
    cpus_per_rank: int = 1
    partition: str = ""
    account: str = ""
    time: str = "24:00:00"
    mem: str = ""
    exclusive: bool = False
    at_once: int = 256
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_rank", "at_once"):
            if (count := vars(self)[name]) is not None and count < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {count}: give 1 or more")
        if self.gpus_per_node < 0:
            raise ConfigError(f"--gpus-per-node {self.gpus_per_node}: give 0 or more")
        if not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time!r}: write it as Slurm does, e.g. 2-00:00:00 or 90 (minutes)")
        for name in ("partition", "account", "mem"):
            if not re.fullmatch(r"[^\s'\"\\]*", text := vars(self)[name]):
                raise ConfigError(f"--{name} {text!r}: leave out quotes, backslashes, blanks and line ends")
        for option in self.sbatch:
            if not re.fullmatch(r"--[a-z][a-z-]*(=\S+)?", option):
                raise ConfigError(f"{option!r} is no option of sbatch; write it with its value, e.g. --qos=long")

    @property
    def num_ranks(self) -> int:
        """Ranks of one member."""
        return self.nodes * self.num_ranks_per_node

    @property
    def num_ranks_per_node(self) -> int:
        """One for each GPU, or one, unless the user gave another number."""
        return self.ranks_per_node or self.gpus_per_node or 1

    def options(self) -> dict[str, Any]:
        """The options of sbatch by name, without those that submitit has parameters for."""
        known = {
            "account": self.account,
            "partition": self.partition,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_rank,
            "mem": self.mem,
            "time": self.time,
            "exclusive": self.exclusive,
            "requeue": True,
            "signal": f"USR2@{SIGNAL_SECONDS}",
        }
        given = (option.removeprefix("--").partition("=") for option in self.sbatch)
        return {name: value for name, value in known.items() if value} | {
            name: value if equals else True for name, equals, value in given
        }


@dataclass(frozen=True)
class SubmittedRun:
    """One run of a submission, which is a job of its own."""

    name: str
    run: str
    """The run's folder, as the configuration has it."""
    arguments: tuple[str, ...]
    """Of ``tlt``."""
    own: tuple[str, ...] = ()
    """The overrides that it does not share with all members."""
    jobs: tuple[str, ...] = ()
    """Job numbers, the newest last; ``17_3`` within an array."""


@dataclass(frozen=True)
class Submission:
    """All members; relative paths are read from ``store``."""

    folder: Path
    store: Path
    project: Path
    """The clone whose code the jobs run."""
    name: str
    config: str
    """The copy of the job file, which all members read."""
    resources: Resources
    members: tuple[SubmittedRun, ...]

    @property
    def jobs_folder(self) -> Path:
        """Logs, batch scripts, exit statuses, and what submitit keeps of each job."""
        return self.folder / "jobs"

    def with_jobs(self, jobs: Mapping[str, str]) -> Submission:
        """The same with one more job for each member that ``jobs`` names."""
        members = (dataclasses.replace(m, jobs=(*m.jobs, jobs[m.name])) if m.name in jobs else m for m in self.members)
        return dataclasses.replace(self, members=tuple(members))

    def chosen(self, names: Collection[str]) -> list[SubmittedRun]:
        """The members of these names."""
        return [member for member in self.members if member.name in names]


def members_of(config: str, members: Sequence[SweepMember]) -> tuple[SubmittedRun, ...]:
    """A submission's members, none of them submitted yet."""
    return tuple(
        SubmittedRun(member.name, str(member.config.folder), ("train", config, *member.overrides), member.own)
        for member in members
    )


def parameters(submission: Submission) -> dict[str, Any]:
    """What submitit is given: the same environment and srun as in the scripts of ``sbatch/``."""
    asked = submission.resources
    folder = shlex.quote(str(submission.folder))
    setup = [
        f"PROJECT={shlex.quote(str(submission.project))}",
        f"STORE={shlex.quote(str(submission.store))}",
        "set -euo pipefail",
        'source "$PROJECT/sbatch/env.sh"',
        'cd "$STORE"',
        f'export {AGAIN}="python $PROJECT/jobs/submit.py resubmit "{folder}',
        f"read_job {shlex.quote(submission.config)}",
        'export SUBMITIT_LOG_LEVEL=WARNING SLURM_MPI_TYPE="$TLT_SRUN_MPI"',
    ]
    return {
        "job_name": submission.name,
        "nodes": asked.nodes,
        "ntasks_per_node": asked.num_ranks_per_node,
        "array_parallelism": asked.at_once,
        "setup": setup,
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={asked.cpus_per_rank}", "--output=all"],
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": asked.options(),
    }


def save(submission: Submission) -> None:
    """Write it into its folder.

    Raises:
        WriteError: no room or no permission.
    """
    submission.jobs_folder.mkdir(parents=True, exist_ok=True)
    with writing_beside(submission.folder / FILE) as part:
        part.write_text(json.dumps(dataclasses.asdict(submission), indent=1, default=str) + "\n", encoding="utf-8")


def load(folder: Path) -> Submission:
    """What ``save`` has left there.

    Raises:
        ConfigError: there is none, or it is damaged or of an earlier version.
    """
    path = folder / FILE
    try:
        return dataclasses.replace(read_json(path, Submission), folder=folder.resolve())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the folder that submit.py has named") from None
    except DamagedText as error:
        raise ConfigError(f"{path} is damaged or of an earlier version ({error}); submit again") from None
