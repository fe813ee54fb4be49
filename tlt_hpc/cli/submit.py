"""``tlt submit``: checks a run, or a sweep of runs, submits it to Slurm as one array, and looks after it.

Every member is checked before any is submitted, gets its own ``run.name`` and runs ``tlt train`` on all its ranks.
Relative paths in a configuration are read from where this is called.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path

import tlt_hpc
from tlt_hpc.cli.command_line import did_you_mean
from tlt_hpc.cluster.executor import batch_script, send
from tlt_hpc.cluster.slurm import SlurmError, ask_slurm, read_queue
from tlt_hpc.cluster.status import FINISHED, MemberStatus, read_statuses, unfinished
from tlt_hpc.cluster.submission import FILE, Resources, Submission, SubmittedRun, load, make_members, parameters, save
from tlt_hpc.common.words import count
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.look.collect import RunRow, as_table, row_of, write_csv
from tlt_hpc.plan.preflight.checklist import all_results
from tlt_hpc.plan.preflight.request import num_gpus, sbatch_options
from tlt_hpc.plan.preflight.results import Level

SUBMITTED = Path("runs") / "submitted"
_OWN_OPTIONS = ("job-name", "output", "error", "open-mode", "array")
"""Of sbatch, that a submission sets itself."""


def run(options: argparse.Namespace) -> int:
    """Submit, or do what is asked of an earlier submission; returns the exit status.

    Raises:
        ValueError: in one line; nothing was submitted.
    """
    if options.config not in LATER:
        if near := did_you_mean(options.config, LATER):
            raise ConfigError(f"no job file and no command {options.config!r}{near}")
        return run_submit(options)
    if options.output is not None and options.config != "collect":
        raise ConfigError(f"--output {options.output} goes with tlt submit collect")
    if len(options.overrides) > 1:
        raise ConfigError(f"tlt submit {options.config} takes one folder; {options.overrides[1]} is one too many")
    submission = load(Path(options.overrides[0]) if options.overrides else newest_folder())
    return LATER[options.config](submission, read_statuses(submission, read_queue()), options)


# --- submit ---


def run_submit(options: argparse.Namespace) -> int:
    """Check every member, then submit them all, or print what would be submitted.

    Raises:
        ValueError: of the first member that would fail.
    """
    submission = make_submission(options)
    for member in submission.members:
        check_member(options.config, member, submission.resources.num_ranks)
    refuse_second_starts(submission)
    before = jobs_before(submission.after, is_first=True)
    asked = vars(submission.resources) | {"sbatch": ""}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if value]
    words += [*submission.resources.sbatch, *([f"--dependency=afterok:{':'.join(before)}"] if before else [])]
    print(f"asks Slurm for {count(submission.resources.num_ranks, 'rank')}:", " ".join(words))
    for member in submission.members:
        print(f"{member.run}: tlt {' '.join(member.arguments)}{resumes(submission, member)}", flush=True)
    if not options.no_preflight:
        preflight(options, submission, before)
    if options.dry_run:
        print("nothing was submitted (--dry-run)")
        return 0
    keep_job_file(Path(options.config), submission.folder)
    save(submission)
    submit(submission, {member.name for member in submission.members}, before)
    if options.command_of_job == "warmup":
        print("for the runs after it:", *(f"drafter.init={member.run}/drafter" for member in submission.members))
    print(f"how it stands: tlt submit status {submission.folder}")
    return 0


def make_submission(options: argparse.Namespace) -> Submission:
    """What is to be submitted.

    Raises:
        ConfigError: a member's configuration is wrong, or the folder has a submission.
    """
    loaded = load_config(options.config, options.overrides)
    name = loaded.run.name
    folder = options.folder or SUBMITTED / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / FILE).exists():
        raise ConfigError(f"--folder {folder} has a submission; give another, or `tlt submit resubmit {folder}`")
    config = str(folder.resolve() / Path(options.config).name)  # a copy: the file may be edited while jobs wait
    members = make_members(options.command_of_job, options.config, config, options.overrides, options.sweep)
    if options.command_of_job == "warmup":
        members = tuple(replace(member, run=warmup_folder(options.config, member)) for member in members)
    resources, after = resources_of(options, loaded.run.ranks), tuple(options.after)
    return Submission(folder.resolve(), Path.cwd(), find_project(), name, config, resources, members, after)


def warmup_folder(config: str, member: SubmittedRun) -> str:
    """Where a member's warm-up writes, which is not where its run does."""
    from tlt_hpc.studies.warmup import plan

    return str(plan.config_of(load_config(config, member.arguments[2:])).folder)


def find_project() -> Path:
    """The folder with ``sbatch/env.sh``: the current one, or the clone.

    Raises:
        ConfigError: neither has it.
    """
    for folder in (Path.cwd(), Path(tlt_hpc.__file__).resolve().parent.parent):
        if (folder / "sbatch" / "env.sh").is_file():
            return folder
    raise ConfigError("no sbatch/env.sh here; call this in the clone, or in a folder that `tlt init` has made")


def resources_of(options: argparse.Namespace, num_ranks: int) -> Resources:
    """What the options ask of Slurm; what they leave open, the ``#SBATCH`` lines of ``--script`` decide.

    Args:
        num_ranks: those of a node, if neither says anything of nodes, GPUs or ranks.

    Raises:
        ConfigError: no such script.
    """
    words = sbatch_options(options.script)
    known = {
        "nodes": "nodes", "ntasks-per-node": "ranks_per_node", "gpus-per-node": "gpus_per_node",
        "cpus-per-task": "cpus_per_rank", "partition": "partition", "account": "account", "time": "time", "mem": "mem",
    }  # fmt: skip
    counts = ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task")
    given: dict[str, object] = {}
    further = []
    gpus = {"gpus-per-node": "gpu:" + words.get("gpus-per-node", ""), "gres": words.get("gres", "")}
    for name, value in words.items():
        if name == "gres" or (name == "gpus-per-node" and not value.isdecimal()):  # of a kind as well, such as a100:4
            if num_gpus(gpus[name]):
                given.setdefault("ranks_per_node", num_gpus(gpus[name]))
            further.append(f"--{name}={value}")
        elif name in counts and not value.isdecimal():
            raise ConfigError(f"--script {options.script}: --{name}={value} is no whole number; give it as an option")
        elif name in known and not value.startswith("YOUR_"):
            given[known[name]] = int(value) if name in counts else value
        elif name not in (*known, *_OWN_OPTIONS):
            further.append(f"--{name}={value}" if value else f"--{name}")
    given |= {field.name: vars(options)[field.name] for field in fields(Resources) if field.name in options}
    if "gpus_per_node" in options and "ranks_per_node" not in options:
        given.pop("ranks_per_node", None)
        further = [word for word in further if not word.startswith(("--gpus-per-node=", "--gres=gpu"))]
    if options.script is None and not given.keys() & {"nodes", "gpus_per_node", "ranks_per_node"}:
        given["ranks_per_node"] = num_ranks
    return Resources(**given | {"sbatch": (*further, *options.sbatch)})  # type: ignore[arg-type]


def refuse_second_starts(submission: Submission) -> None:
    """Refuse members whose run waits or is at work already, as part of an earlier submission from this folder.

    Raises:
        ConfigError: with the job.
    """
    runs, queue = {(submission.store / member.run).resolve() for member in submission.members}, None
    for path in sorted(SUBMITTED.glob(f"*/{FILE}")):
        earlier = load(path.parent)
        same = [member for member in earlier.members if (earlier.store / member.run).resolve() in runs and member.jobs]
        queue = read_queue() if same and queue is None else queue
        for member in same:
            if queue and (job := member.jobs[-1]) in queue and queue[job].is_live:
                raise ConfigError(
                    f"{member.run}: job {job} of {path.parent} is {queue[job].state.lower()}; wait for it, add "
                    f"--after {job}, or give another run.name"
                )


def resumes(submission: Submission, member: SubmittedRun) -> str:
    """What to know of a run that there is already; empty for a new one."""
    row = row_of(member.name, "", submission.store / member.run)
    return f"   (is there with {count(row.steps, 'step')}, and resumes)" if row.steps else ""


def jobs_before(after: Sequence[str], is_first: bool) -> list[str]:
    """The jobs that ``--after`` names, by number or by the folder of their submission; not those that have finished.

    Raises:
        ConfigError: a member has failed, there is no such submission or, the first time, no such job.
    """
    jobs, queue = [], read_queue() if after else {}
    for word in after:
        if word.replace("_", "").isdecimal():
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
    """Check a member's model, data and rank count, as ``tlt train --dry-run`` does.

    Raises:
        ConfigError: in one line.
    """
    from tlt_hpc.plan.inputs import read_assets

    try:
        read_assets(load_config(config, member.arguments[2:]), num_ranks)
    except ValueError as error:
        raise ConfigError(f"{member.name}: {error}") from None


def drafters_before(after: Sequence[str]) -> set[Path]:
    """What the warm-ups that ``--after`` names by their folders will write."""
    warmups = [load(Path(word)) for word in after if not word.replace("_", "").isdecimal()]
    return {
        (warmup.store / member.run / "drafter").resolve()
        for warmup in warmups
        for member in warmup.members
        if member.arguments[0] == "warmup"
    }


def preflight(options: argparse.Namespace, submission: Submission, before: Sequence[str]) -> None:
    """Make the checks of ``tlt preflight`` with the first member and the very script that Slurm will get.

    The member may begin with a drafter that one of the jobs ``before`` it makes.

    Raises:
        ConfigError: something would end the job.
    """
    try:
        ask_slurm("sinfo", "-h", "-o", "%P")
    except SlurmError as error:
        raise ConfigError(f"{error}; call this on a login node, where Slurm answers (SLURM_CONF?)") from None
    failures, findings = 0, 0
    arguments = submission.members[0].arguments[2:]
    drafter = Path(load_config(options.config, arguments).drafter.init).resolve()
    is_made_before = bool(before) and drafter in drafters_before(options.after)
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "submission.sh"
        script.write_text(batch_script(submission.jobs_folder, parameters(submission, before)), encoding="utf-8")
        given = argparse.Namespace(
            config=options.config, overrides=arguments, script=script, model_id=None,
            fix=False, gpu_memory=options.gpu_memory, nodes=None, partition=None, account=None, time=None,
        )  # fmt: skip
        print("checking the job as `tlt preflight` does", flush=True)
        for name, finding in all_results(given):
            findings += 1
            if name == "drafter" and is_made_before:
                print(f"{'later':<8} {name:<12} {drafter} is written by the job before", flush=True)
            elif finding.level in (Level.WARNING, Level.FAILURE):
                print(f"{finding.level:<8} {name:<12} {finding.found}; {finding.remedy}", flush=True)
                failures += finding.level is Level.FAILURE
    if failures:
        raise ConfigError(f"nothing was submitted: {count(failures, 'failure')}; correct it, or add --no-preflight")
    print(f"{count(findings, 'check')}: nothing stands in the job's way")


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


def submit(submission: Submission, names: Collection[str], before: Sequence[str]) -> None:
    """Submit the members of these names as one array after other jobs, and keep the numbers of their jobs."""
    chosen = submission.chosen(names)
    jobs = send(submission.jobs_folder, parameters(submission, before), [member.arguments for member in chosen])
    save(submission.with_jobs(dict(zip((member.name for member in chosen), jobs, strict=True))))
    for member, job in zip(chosen, jobs, strict=True):
        print(f"job {job}: {member.name}")


# --- afterwards ---


def newest_folder() -> Path:
    """The submission that was made last from this folder.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(SUBMITTED.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"no submission in {SUBMITTED}; give its folder")
    return found[-1].parent


def run_status(submission: Submission, statuses: Sequence[MemberStatus], options: argparse.Namespace) -> int:
    """Print how each member stands; status 1 if one has failed."""
    print(f"submission  {submission.folder}")
    print(as_table(rows_of(submission, statuses), [str(each.log or "") for each in statuses]))
    return int(bool(unfinished(statuses)))


def run_resubmit(submission: Submission, statuses: Sequence[MemberStatus], options: argparse.Namespace) -> int:
    """Submit again what failed, was cancelled or stopped early; these runs resume."""
    again = unfinished(statuses)
    if not again:
        print("nothing has failed; nothing was submitted")
        return 0
    before = jobs_before(submission.after, is_first=False)
    for status in statuses:
        if status.is_blocked:
            ask_slurm("scancel", status.member.jobs[-1])
    submit(submission, again, before)
    return 0


def run_cancel(submission: Submission, statuses: Sequence[MemberStatus], options: argparse.Namespace) -> int:
    """End what waits or runs; the runs keep what they have committed, and can be resubmitted."""
    jobs = [status.member.jobs[-1] for status in statuses if status.is_live or status.is_blocked]
    if jobs:
        ask_slurm("scancel", *jobs)
    print(f"cancelled: {', '.join(jobs)}" if jobs else "nothing waits or runs")
    return 0


def run_collect(submission: Submission, statuses: Sequence[MemberStatus], options: argparse.Namespace) -> int:
    """Print what each member has reached and what it took; with ``--output``, write it as CSV as well."""
    rows = rows_of(submission, statuses)
    print(as_table(rows))
    if options.output is not None:
        swept = [dict(override.split("=", 1) for override in each.member.own) for each in statuses]
        write_csv(options.output, rows, swept)
        print(f"written to {options.output}")
    return 0


def rows_of(submission: Submission, statuses: Sequence[MemberStatus]) -> list[RunRow]:
    """What each member has reached, and what it took."""
    return [row_of(each.member.name, each.state, submission.store / each.member.run) for each in statuses]


LATER = {"status": run_status, "resubmit": run_resubmit, "collect": run_collect, "cancel": run_cancel}
