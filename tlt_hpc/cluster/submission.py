"""What was submitted together: its members, what each asks of Slurm, and their jobs; kept as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.cluster.slurm import parse_slurm_time
from tlt_hpc.cluster.stopping import AGAIN, seconds_before_limit
from tlt_hpc.common.files import DamagedText, Moment, read_json
from tlt_hpc.config import Config, ConfigError, load_config
from tlt_hpc.storage.folder import writing_atomically

FILE = "submission.json"
SUBMITTED = Path("runs") / "submitted"
_VALUE = re.compile(r"""(?:^|,)((?:"[^"]*"|'[^']*'|\[(?:[^][]|\[[^]]*\])*\]|\{[^}]*\}|[^,])*)""")
_RANGE = re.compile(r"(\d{1,6})(?:-|:|\.\.)(\d{1,6})")


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
    num_steps: int | None = None
    """Of the run once this has finished; None for a warm-up."""
    first_step: int = 0
    """Steps that the run had when this was submitted."""
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
    request: SlurmRequest
    """What each member asks of Slurm."""
    members: tuple[SubmittedRun, ...]
    made: Moment
    after: tuple[str, ...] = ()
    """Jobs, or whole paths of submissions, that must have finished before a member starts."""

    @property
    def user(self) -> int:
        """Number of the user whose it is."""
        return self.folder.stat().st_uid

    @property
    def jobs_folder(self) -> Path:
        """Logs, batch scripts, exit statuses, and what submitit keeps of each job."""
        return self.folder / "jobs"

    def run_folder(self, member: SubmittedRun) -> Path:
        """The folder of a member's run."""
        return (self.store / member.run).resolve()

    def waits_for(self, other: Submission) -> bool:
        """Whether it starts only once another has finished, or a job of it."""
        jobs = {word for member in other.members for job in member.jobs for word in (job, job.partition("_")[0])}
        return str(other.folder) in self.after or not jobs.isdisjoint(self.after)

    def dependency_chain(self, known: Sequence[Submission]) -> list[Submission]:
        """This one, and before it those that it waits for; ``known`` are all, the oldest first."""
        chain = [self]
        for earlier in reversed([each for each in known if each.made < self.made]):
            if any(later.waits_for(earlier) for later in chain):
                chain.insert(0, earlier)
        return chain

    def find_continuation(
        self, member: SubmittedRun, known: Sequence[Submission]
    ) -> tuple[Submission, SubmittedRun] | tuple[None, None]:
        """The next of the ``known`` submissions that continues a member's run, and its member; None: there is none.

        One that waits for this one does not count: it starts where this one ends.
        """
        chain = [self]
        for later in (each for each in known if each.made > self.made):
            for same in (
                each for each in later.members if each.jobs and later.run_folder(each) == self.run_folder(member)
            ):
                if not any(map(later.waits_for, chain)):
                    return later, same
                chain.append(later)
        return None, None

    def with_jobs(self, jobs: Mapping[str, str]) -> Submission:
        """The same with one more job for each member that ``jobs`` names."""
        members = (dataclasses.replace(m, jobs=(*m.jobs, jobs[m.name])) if m.name in jobs else m for m in self.members)
        return dataclasses.replace(self, members=tuple(members))

    def member_names_of_job(self, word: str) -> set[str]:
        """The names of the members that have, or had before a resubmission, a job or array of the number ``word``."""
        return {m.name for m in self.members for job in m.jobs if word in (job, job.partition("_")[0])}

    def members_named(self, names: Collection[str]) -> list[SubmittedRun]:
        """The members of these names."""
        return [member for member in self.members if member.name in names]


def make_members(
    command: str,
    config: str,
    copy: str,
    shared: Sequence[str],
    sweeps: Sequence[str],
    own_config: Callable[[Config], Config] = lambda config: config,
) -> tuple[SubmittedRun, ...]:
    """A run of ``tlt COMMAND`` for every combination of the sweeps' values, ``section.key=A,B``; one without sweeps.

    Each is named after its own overrides unless it sets ``run.name``, and reads the ``copy`` of ``config``.
    ``own_config`` gives that of what the command runs, if it is not the run itself.

    Raises:
        ConfigError: a member's configuration is wrong, a key is swept twice, or two members would write to one folder.
    """
    keys = [sweep.partition("=")[0] for sweep in sweeps]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"--sweep {twice} is given twice; give all its values in one: {twice}=A,B")
    base = load_config(config, shared).run.name
    members = []
    for own in itertools.product(*map(expand_sweep, sweeps)):
        is_named = not own or any(override.startswith("run.name=") for override in own)
        overrides = (*shared, *own, *(() if is_named else (f"run.name={'-'.join([base, *map(override_label, own)])}",)))
        member = own_config(load_config(config, overrides))
        num_steps = None if command == "warmup" else member.run.num_steps
        arguments = (command, copy, *overrides)
        members.append(SubmittedRun(member.run.name, str(member.folder), arguments, own, num_steps))
    names = [member.name for member in members]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two members have run.name = {twice!r}; remove what stands twice, or give each a run.name")
    return tuple(members)


def expand_sweep(sweep: str) -> list[str]:
    """The overrides that ``section.key=A,B`` stands for; commas within brackets or quotes separate nothing.

    Raises:
        ConfigError: it is not of that form, or a range, which would pass as text.
    """
    key, separator, text = sweep.partition("=")
    values = [value.strip() for value in _VALUE.findall(text)]
    if not separator or not all(values):
        raise ConfigError(f"--sweep {sweep!r} is not of the form section.key=A,B, e.g. run.seed=0,1,2")
    if match := _RANGE.fullmatch(text):
        span = range(int(match[1]), int(match[2]) + 1)
        listed = ",".join(map(str, span[:3])) + ",.." * (len(span) > 3)
        raise ConfigError(f"--sweep {sweep!r}: a range is not read; write {key}={listed}")
    return [f"{key}={value}" for value in values]


def override_label(override: str) -> str:
    """A member's part of its run's name, e.g. ``seed0``."""
    key, _, value = override.partition("=")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", key.rpartition(".")[2] + value).strip("_")


def further_options(request: SlurmRequest) -> dict[str, Any]:
    """Options of sbatch by name, without those that submitit has parameters for, with signal and requeue by default.

    Raises:
        SlurmError: a time limit is not in Slurm's format.
    """
    asked = request.options
    limits = [parse_slurm_time(asked[name]) for name in ("time", "time-min") if name in asked]
    ahead = seconds_before_limit(min((limit for limit in limits if limit), default=math.inf))  # 0 requests no limit
    requeue = {"requeue": True} if request.wants_requeue is None else {}
    own = {name: value or True for name, value in asked.items() if name not in ("nodes", "ntasks-per-node")}
    return {"signal": f"USR2@{ahead:.0f}"} | requeue | own


def submitit_parameters(submission: Submission, jobs_before: Sequence[str] = ()) -> dict[str, Any]:
    """What submitit is given: the same environment and srun as in the scripts of ``sbatch/``.

    Args:
        jobs_before: that must have finished before the members start.
    """
    request, options = submission.request, further_options(submission.request)
    if jobs_before:
        waits = f"afterok:{':'.join(jobs_before)}"
        options["dependency"] = f"{options['dependency']},{waits}" if "dependency" in options else waits
    again = shlex.join(("tlt", "submit", "resubmit", str(submission.folder)))
    setup = [
        f"PROJECT={shlex.quote(str(submission.project))}",
        f"STORE={shlex.quote(str(submission.store))}",
        "set -euo pipefail",
        # for a job whose ranks end before they could write it: the same file as ``executor.run_rank``; never 0, which
        # bash also has where a signal ends it, and which the first rank writes itself
        'job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}" job="${job:-${SLURM_JOB_ID:-none}}"',
        'start="$job-start-$(printf %03d "${SLURM_RESTART_COUNT:-0}")"',
        f"job_status={shlex.quote(str(submission.jobs_folder))}/$start.status",
        """trap 'code=$?; [[ $code == 0 || -e $job_status || $job == none ]] || echo "$code" >"$job_status"' EXIT""",
        'source "$PROJECT/sbatch/env.sh"',
        '[[ ${TLT_LAUNCH:-srun} == srun ]] || die "tlt submit starts ranks by srun, and TLT_LAUNCH=$TLT_LAUNCH"',
        'cd "$STORE"',
        f"export {AGAIN}={shlex.quote(again)}",
        f"read_job {shlex.quote(submission.config)}",
        'export SUBMITIT_LOG_LEVEL=WARNING SLURM_MPI_TYPE="$TLT_SRUN_MPI"',
        'export SLURM_CPU_BIND="${TLT_CPU_BIND:-cores}" SLURM_DISTRIBUTION=block:block',  # as run_ranks does
    ]
    return {
        "job_name": submission.name,
        "nodes": request.nodes,
        "ntasks_per_node": request.ranks_per_node or 1,
        "setup": setup,
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={request.cores_per_rank}", "--output=all"],
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": options,
    }


def save(submission: Submission) -> None:
    """Write it into its folder.

    Raises:
        WriteError: no room or no permission.
    """
    submission.jobs_folder.mkdir(parents=True, exist_ok=True)
    with writing_atomically(submission.folder / FILE) as part:
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
        raise ConfigError(f"{path}: {error.strerror}; give the folder that `tlt submit` has named") from None
    except DamagedText as error:
        raise ConfigError(f"{path} is damaged or of an earlier version ({error}); submit again") from None


def load_known_submissions(beside: Path = SUBMITTED) -> list[Submission]:
    """Those of this folder's ``runs/submitted``, and those ``beside``, the oldest first; damaged ones are named."""
    found = []
    for path in sorted({path.resolve() for place in (SUBMITTED, beside) for path in place.glob(f"*/{FILE}")}):
        try:
            found.append(load(path.parent))
        except ConfigError as error:
            print(f"tlt: left out: {error}", file=sys.stderr)
    return sorted(found, key=lambda each: each.made)
