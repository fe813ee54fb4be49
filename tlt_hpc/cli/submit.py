"""``tlt submit JOB``: checks a run, or a sweep of runs, and submits it to Slurm as one array.

Every member is checked before any is submitted, gets its own ``run.name`` and runs ``tlt train`` on all its ranks.
Relative paths in a configuration are read from where this is called.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import tlt_hpc
from tlt_hpc.cli.plans import command_config, finished_message
from tlt_hpc.cluster.executor import batch_script, submit_jobs
from tlt_hpc.cluster.request import (
    COUNTS,
    SlurmRequest,
    num_gpus,
    parse_sbatch_options,
    read_script_options,
    sbatch_arguments,
)
from tlt_hpc.cluster.slurm import SlurmError, ask_slurm, read_queue
from tlt_hpc.cluster.status import FINISHED, read_statuses
from tlt_hpc.cluster.submission import (
    FILE,
    SUBMITTED,
    Submission,
    SubmittedRun,
    further_options,
    load,
    load_known_submissions,
    make_members,
    save,
    submitit_parameters,
)
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.source import load_extra
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.look.run_table import read_run_row

_OF_THIS_MACHINE = ("rewards", "memory", "disk", "run folder", "torch", "mpi", "ranks talk")
"""Checks of preflight whose failure may mean only that a login node is no compute node."""
_OWN_OPTIONS = (
    *("job-name", "output", "error", "open-mode", "array"),
    *("parsable", "quiet", "test-only", "wait", "wrap", "help", "usage", "version"),
)
"""Options of sbatch that a submission sets itself, or after which sbatch would not name the job."""
_SHOWN = {
    "nodes": "nodes", "gpus-per-node": "gpus-per-node", "ntasks-per-node": "ranks-per-node",
    "cpus-per-task": "cpus-per-rank", "partition": "partition", "account": "account", "time": "time", "mem": "mem",
}  # fmt: skip
"""sbatch's options that are also options of ``tlt submit``, and their names there."""
_DEFAULTS = {"nodes": "1", "cpus-per-task": "1", "time": "24:00:00"}
_SIGNAL = "USR2@120"
"""The signal of the batch scripts; a submission chooses its own by its time limit."""


def submission_folder(word: str) -> Path:
    """The folder of a submission that is given by its path, or by its name in ``runs/submitted``."""
    named = SUBMITTED / word
    return named if (named / FILE).exists() and not (Path(word) / FILE).exists() else Path(word)


def relative_to_cwd(folder: Path) -> Path:
    """A folder as a user would type it here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def run_submit(options: argparse.Namespace) -> int:
    """Check every member, then submit them all, or print what would be submitted.

    Raises:
        ValueError: of the first member that would fail.
    """
    options.after = [word if is_job(word) else str(submission_folder(word)) for word in options.after]
    submission = make_submission(options)
    for member in submission.members:
        check_member(options.config, member, submission.request.num_ranks)
    if options.command_of_job == "train":
        refuse_finished(options.config, submission)
    before = find_jobs_to_wait_for(options.after, is_first=True)
    refuse_second_starts(submission, set(before))
    print_submission(submission, submission.members, before)
    if not options.no_preflight:
        preflight(options.config, submission, before, options.gpu_memory)
    if options.dry_run:
        print("nothing was submitted (--dry-run)")
        return 0
    keep_job_file(Path(options.config), submission.folder)
    save(submission)
    submit(submission, {member.name for member in submission.members}, before, options.environment)
    if options.command_of_job == "warmup":
        made = (f"drafter.init={member.run}/drafter" for member in submission.members)
        print("for the runs after it:", *map(shlex.quote, made))
    print(f"how it stands: tlt submit status {shlex.quote(str(relative_to_cwd(submission.folder)))}")
    return 0


def print_submission(submission: Submission, members: Sequence[SubmittedRun], before: Sequence[str]) -> None:
    """Print what Slurm is asked for, and the command of each of these members."""
    words = sbatch_arguments({_SHOWN.get(name, name): value for name, value in submission.request.options.items()})
    words += [f"--dependency=afterok:{':'.join(before)}"] if before else []
    print(f"asks Slurm for {format_count(submission.request.num_ranks, 'rank')}:", " ".join(words))
    for member in members:
        there = f"   (is there with {format_count(member.first_step, 'step')}, and resumes)" * bool(member.first_step)
        print(f"{member.run}: {shlex.join(('tlt', *member.arguments))}{there}", flush=True)


def make_submission(options: argparse.Namespace) -> Submission:
    """Return the submission that the options describe; nothing is written.

    Raises:
        ConfigError: a member's configuration is wrong, or the folder has a submission.
    """
    own_config = partial(command_config, options=argparse.Namespace(command=options.command_of_job))
    try:
        loaded = own_config(load_config(options.config, options.overrides))
    except ConfigError as error:
        keys = {each.partition("=")[0]: each for each in options.overrides if "," in each}
        if swept := next((each for key, each in keys.items() if str(error).startswith(key)), ""):
            raise ConfigError(f"{error}, or for a run of each --sweep {swept}") from None
        raise
    name = loaded.run.name
    folder = options.folder or SUBMITTED / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / FILE).exists():
        raise ConfigError(
            f"--folder {folder} has a submission; give another, or `tlt submit resubmit {shlex.quote(str(folder))}`"
        )
    config = str(folder.resolve() / Path(options.config).name)  # a copy: the file may be edited while jobs wait
    words = options.command_of_job, options.config, config, options.overrides, options.sweep
    members = make_members(*words, own_config)
    members = tuple(replace(member, first_step=read_run_row("", "", Path(member.run)).steps or 0) for member in members)
    before = read_script_options(options.script) if options.script else {}
    request = make_slurm_request(options, before, 0 if options.script else loaded.run.ranks)
    after = tuple(word if is_job(word) else str(Path(word).resolve()) for word in options.after)
    place = folder.resolve(), Path.cwd(), find_project()
    return Submission(*place, name, config, request, members, time.time(), after)


def is_job(word: str) -> bool:
    """Return True if a word of ``--after`` is a job's number, False for a folder."""
    return word.replace("_", "").isdecimal()


def find_project() -> Path:
    """The folder with ``sbatch/env.sh``: the current one, or the clone.

    Raises:
        ConfigError: neither has it.
    """
    for folder in (Path.cwd(), Path(tlt_hpc.__file__).resolve().parent.parent):
        if (folder / "sbatch" / "env.sh").is_file():
            return folder
    raise ConfigError("no sbatch/env.sh here; call this in the clone, or in a folder that `tlt init` has made")


def make_slurm_request(options: argparse.Namespace, before: Mapping[str, str], num_ranks: int = 0) -> SlurmRequest:
    """Return the request that the options make of Slurm; earlier options of sbatch decide what they leave open.

    Args:
        before: the earlier ones: a script's, or what a submission asked for before.
        num_ranks: those of a node, if neither says anything of nodes, GPUs or ranks.

    Raises:
        ConfigError: an option is not understood, is not the user's to give, or is of another measure than the node.
    """
    own = parse_sbatch_options([word if word.startswith("-") else f"--{word}" for word in options.sbatch])
    fields = {name: shown.replace("-", "_") for name, shown in _SHOWN.items()}
    typed = {name: str(vars(options)[field]) for name, field in fields.items() if field in options}
    if name := next((name for name in own if name in _OWN_OPTIONS), ""):
        raise ConfigError(f"--sbatch=--{name}: tlt submit decides that itself; leave it out")
    if name := next((name for name in own if name in typed), ""):
        raise ConfigError(f"--{name} is given as an option and in --sbatch; leave one of them out")
    # ranks that are not checked would start by --ntasks and the like
    if SlurmRequest(own).check_options("--sbatch").gpus_per_node and "gpus-per-node" in typed:
        raise ConfigError("GPUs are given as an option and in --sbatch; leave one of them out")
    if SlurmRequest(own | typed).gpus_per_node:
        before = _without_gpus(before)
    kept = {name: value for name, value in before.items() if name not in _OWN_OPTIONS and value != _SIGNAL}
    asked = (
        SlurmRequest(parse_sbatch_options([*sbatch_arguments(kept), *sbatch_arguments(own)])).check_options().options
    )
    asked = {name: value for name, value in asked.items() if not (name in _SHOWN and value.startswith("YOUR_"))} | typed
    asked = {name: value for name, value in asked.items() if value or name not in _SHOWN}  # --account "" asks for none
    for name in COUNTS:
        if not asked.get(name, "1").isdecimal():
            what = f"--{name}={asked[name]} is no whole number"
            raise ConfigError(f"{what}; give one, as a run has a fixed number of ranks")
    has_kinds = not asked.get("gpus-per-node", "").isdecimal()  # of GPUs, such as a100:4, or in gres
    if has_kinds and (number := SlurmRequest(asked).gpus_per_node):
        asked.setdefault("ntasks-per-node", str(number))
    if num_ranks and not asked.keys() & {"nodes", "gpus-per-node", "ntasks-per-node"}:
        asked["ntasks-per-node"] = str(num_ranks)
    asked = _DEFAULTS | asked
    shown = [name for name in _SHOWN if name in asked and not (name == "gpus-per-node" and has_kinds)]
    request = SlurmRequest({name: asked[name] for name in shown} | asked)
    further_options(request)  # refuses a time limit that Slurm does not read
    return request


def _without_gpus(options: Mapping[str, str]) -> dict[str, str]:
    """Options of sbatch without those of GPUs, and without the ranks that come with them."""
    others = ",".join(part for part in options.get("gres", "").split(",") if part and not num_gpus(part))
    left = {name: value for name, value in options.items() if name not in ("gpus-per-node", "gres", "ntasks-per-node")}
    return left | ({"gres": others} if others else {})


def refuse_second_starts(submission: Submission, before: Set[str]) -> None:
    """Refuse members whose run waits or is at work already, as part of an earlier submission from this folder.

    Args:
        before: jobs that the members wait for.

    Raises:
        ConfigError: with the job.
    """
    runs, queue = set(map(submission.run_folder, submission.members)), None
    known = load_known_submissions(submission.folder.parent)
    for earlier in known:
        same = [member for member in earlier.members if earlier.run_folder(member) in runs and member.jobs]
        queue = read_queue(each.user for each in known) if same and queue is None else queue
        for member in same:
            job = member.jobs[-1]
            if queue and job in queue and queue[job].is_live and before.isdisjoint((job, job.partition("_")[0])):
                raise ConfigError(
                    f"{member.run}: job {job} of {relative_to_cwd(earlier.folder)} is {queue[job].state.lower()}; wait "
                    f"for it, add --after {job}, or give another run.name"
                )


def refuse_finished(config: str, submission: Submission) -> None:
    """Refuse members whose run has nothing left to do.

    Raises:
        ConfigError: with its steps.
    """
    for member in submission.members:
        if finished_message(load_config(config, member.arguments[2:])):
            raise ConfigError(
                f"{member.run} has finished: {member.first_step} of {format_count(member.num_steps or 0, 'step')}; "
                "raise run.num_steps or give another run.name"
            )


def find_jobs_to_wait_for(after: Sequence[str], is_first: bool) -> list[str]:
    """The jobs that ``--after`` names, by number or by the folder of their submission; not those that have finished.

    Raises:
        ConfigError: a member has failed, there is no such submission or, the first time, no such job.
    """
    jobs, users = [], [load(Path(word)).user for word in after if not is_job(word)]
    queue = read_queue(users) if after else {}
    for word in after:
        if is_job(word):
            known = word in queue or any(job.startswith(f"{word}_") for job in queue)
            if known and word in queue and not queue[word].is_live and queue[word].state != "COMPLETED":
                raise ConfigError(f"--after {word}: that job is {queue[word].state.lower()}; submit it again first")
            if not known and is_first:
                raise ConfigError(f"--after {word}: no such job in squeue; if it has finished, leave --after out")
            if not known:
                print(f"job {word} is not in squeue any more, and is not waited for")
            jobs += [word] * known
            continue
        submission = load(Path(word))
        for status in read_statuses(submission, queue):
            if not status.is_live and status.state != FINISHED:
                raise ConfigError(f"--after {word}: {status.member.name} {status.state}; resubmit it first")
            jobs += [status.member.jobs[-1]] * status.is_live
    return jobs


def check_member(config: str, member: SubmittedRun, num_ranks: int) -> None:
    """Check a member's model, data, evaluation and rank count, as ``tlt train --dry-run`` does.

    Raises:
        ConfigError: in one line.
    """
    from tlt_hpc.plan.inputs import open_checked_sets, read_assets

    try:
        loaded = load_config(config, member.arguments[2:])
        assets = read_assets(loaded, num_ranks)
        if loaded.evaluation.every_steps and member.arguments[0] == "train":
            open_checked_sets(loaded, assets.folder, assets.shape, assets.tokenizer)
    except ValueError as error:
        is_elsewhere = not Path(config).resolve().is_relative_to(Path.cwd())
        is_path = "does not exist" in str(error)
        here = f" (relative paths are read from {Path.cwd()})" * (is_elsewhere and is_path)
        raise ConfigError(f"{member.name}: {error}{here}") from None


def drafter_folders_to_come(after: Sequence[str]) -> set[Path]:
    """Return the drafter folders that the warm-ups named by ``--after`` will write."""
    warmups = [load(Path(word)) for word in after if not is_job(word)]
    return {
        warmup.run_folder(member) / "drafter"
        for warmup in warmups
        for member in warmup.members
        if member.arguments[0] == "warmup"
    }


def preflight(config: str, submission: Submission, before: Sequence[str], gpu_memory: float | None = None) -> None:
    """Make the checks of ``tlt preflight`` with the first member and the very script that Slurm will get.

    The member may begin with a drafter that one of the jobs ``before`` it makes.

    Raises:
        ConfigError: something would end the job.
    """
    try:
        ask_slurm("sinfo", "-h", "-o", "%P")
    except SlurmError as error:
        raise ConfigError(
            error.message_without_remedy, "call this on a login node, where Slurm answers (SLURM_CONF?)"
        ) from None
    failures, findings, warnings = list[str](), 0, 0
    arguments = submission.members[0].arguments[2:]
    drafter = Path(load_config(config, arguments).drafter.init).resolve()
    is_made_before = bool(before) and drafter in drafter_folders_to_come(submission.after)
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "submission.sh"
        script.write_text(
            batch_script(submission.jobs_folder, submitit_parameters(submission, before)), encoding="utf-8"
        )
        print("checking the job as `tlt preflight` does", flush=True)
        check_job = load_extra("tlt_hpc.extras.preflight.checklist", "add --no-preflight").check_job
        for name, finding in check_job(config, arguments, SlurmRequest.of_script(script), gpu_memory):
            findings += 1
            if name == "drafter" and is_made_before:
                print(f"{'later':<8} {name:<12} {drafter} is written by the job before", flush=True)
            elif finding.level in ("warning", "failure"):
                print(f"{finding.level:<8} {name:<12} {finding.found}; {finding.remedy}", flush=True)
                failures += [name] * (finding.level == "failure")
                warnings += finding.level == "warning"
    if failures:
        skip = ", or add --no-preflight if it is of this machine alone" * set(failures).issubset(_OF_THIS_MACHINE)
        raise ConfigError(f"nothing was submitted: {format_count(len(failures), 'failure')}; correct it{skip}")
    print(f"{format_count(findings, 'check')}, {format_count(warnings, 'warning')}: nothing stands in the job's way")


def keep_job_file(config: Path, folder: Path) -> None:
    """Copy the job's file to where the members read it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config, folder / config.name)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: {error.strerror}; give a folder that can be written") from None


def submit(
    submission: Submission, names: Collection[str], before: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Submit the members of these names as one array after other jobs, and keep the numbers of their jobs.

    ``environment``: the variables that the user gave this process, which sbatch hands on to the jobs.
    """
    chosen = submission.members_named(names)
    commands = [member.arguments for member in chosen]
    jobs = submit_jobs(submission.jobs_folder, submitit_parameters(submission, before), commands, environment)
    save(submission.with_jobs(dict(zip((member.name for member in chosen), jobs, strict=True))))
    for member, job in zip(chosen, jobs, strict=True):
        print(f"job {job}: {member.name}")
