"""Submits a run, or a sweep of runs, to Slurm as one array, and looks after what it submitted; knows submitit.

    python jobs/submit.py jobs/qwen7b.toml --nodes 8 --gpus-per-node 8 --partition gpu --sweep run.seed=0,1,2
    python jobs/submit.py status FOLDER       # how each member stands; the folder is printed at submission
    python jobs/submit.py resubmit FOLDER     # those that failed, alone
    python jobs/submit.py collect FOLDER      # the results in one table, as CSV and JSON too

Every member is checked before any is submitted, gets its own ``run.name`` and runs ``tlt train`` on all its ranks.
Relative paths in a configuration are read from where this is called.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the clone's own package, installed or not: that is what the jobs run

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.cli.main import INTERRUPTED, USER_ERROR
from tlt_hpc.cluster.batch import Batch, Folders, sbatch_options
from tlt_hpc.cluster.collect import collect, results_table, write_results
from tlt_hpc.cluster.slurm import read_queue
from tlt_hpc.cluster.status import FINISHED, TaskStatus, last_words, read_status, status_table, unfinished
from tlt_hpc.cluster.submission import STAGES, Key, Submission, Task, load, make_tasks, save, send_all
from tlt_hpc.cluster.sweep import SweepMember, grid, make_members, read_list
from tlt_hpc.config import Config, ConfigError, load_config
from tlt_hpc.storage.folder import WriteError

ABOUT = "Submitted by jobs/submit.py; edits here change nothing."


def main(given: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    words = list(sys.argv[1:] if given is None else given)
    try:
        if words and words[0] in LATER:
            return run_later(words)
        return run_submit(parse(words))
    except (ValueError, WriteError) as error:
        print(f"submit: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("submit: interrupted; `submit.py resubmit FOLDER` goes on with what is left", file=sys.stderr)
        return INTERRUPTED


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options of a submission."""
    parser = argparse.ArgumentParser(
        prog="submit.py",
        description="Submit a run, or a sweep of runs, as one Slurm array.",
        epilog=f"For what was submitted: submit.py {'|'.join(LATER)} FOLDER",
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every member")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--sweep", action="append", default=[], metavar="section.key=A,B,..", help="a member each; repeat for a grid"
    )
    what.add_argument("--list", type=Path, metavar="FILE", help="a member for each line of overrides")
    what.add_argument("--warmup", action="store_true", help="warm the drafter up first, once for all that can share it")
    what.add_argument("--evaluate", action="store_true", help="evaluate each run's policy once it is trained")
    what.add_argument(
        "--chain", type=int, default=1, metavar="N", help="N jobs after each other, for sites that do not requeue"
    )
    add_resources(parser.add_argument_group("of Slurm"))
    parser.add_argument("--folder", type=Path, help="of logs and records (default runs/submitted/NAME-TIME)")
    parser.add_argument("--local", action="store_true", help="on this machine, one member after another")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print it; submit nothing")
    return parser.parse_intermixed_args(given)


def add_resources(group: argparse._ArgumentGroup) -> None:
    """What a member asks of Slurm."""
    group.add_argument("--nodes", type=int, default=1)
    group.add_argument("--gpus-per-node", type=int, default=0, help="one rank each")
    group.add_argument("--ranks-per-node", type=int, help="where it is not the number of GPUs")
    group.add_argument("--cpus-per-rank", type=int, default=1)
    group.add_argument("--partition", default="")
    group.add_argument("--account", default="")
    group.add_argument("--time", default="24:00:00", help="limit of each job (default 24:00:00)")
    group.add_argument("--mem", default="", help="memory of a node; 0: all of it")
    group.add_argument("--exclusive", action="store_true", help="whole nodes")
    group.add_argument("--at-once", type=int, default=256, help="members that may run together")
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help="a further option: --sbatch=--qos=long"
    )


RESOURCES = {
    "nodes": "nodes",
    "gpus_per_node": "gpus_per_node",
    "ranks_per_node": "ranks_per_node",
    "cpus_per_rank": "cpus_per_rank",
    "partition": "partition",
    "account": "account",
    "time": "time",
    "mem": "memory",
    "exclusive": "exclusive",
    "sbatch": "options",
    "at_once": "",
}
"""The options' names, and the fields of ``Batch`` that they are."""


def with_resources(submission: Submission, given: Mapping[str, Any]) -> Submission:
    """The same with other resources, where they are given.

    Raises:
        ConfigError: what Slurm would not take.
    """
    fields = {field: given[name] for name, field in RESOURCES.items() if field and given.get(name) is not None}
    if "gpus_per_node" in fields:  # one rank each
        fields.setdefault("ranks_per_node", fields["gpus_per_node"] or 1)
    if "options" in fields:
        fields["options"] = tuple(fields["options"])
    batch = dataclasses.replace(submission.batch, **fields)
    return dataclasses.replace(submission, batch=batch, at_once=given.get("at_once") or submission.at_once)


# --- submit ---


def run_submit(options: argparse.Namespace) -> int:
    """Check every member, then submit, print or run them.

    Raises:
        ValueError: in one line, of the first member that would fail; nothing was submitted.
    """
    members = make_members(options.config, options.overrides, points_of(options))
    submission = make_submission(options, members)
    check(members, submission)
    for task in submission.tasks:
        print(f"{task.stage:8} {task.run}: tlt {' '.join(task.arguments)}")
    if options.dry_run:
        return dry_run(submission)
    keep_job_file(Path(options.config), submission.folder)
    save(submission)
    print(f"kept in {submission.folder}")
    status = submit(submission, {task.key for task in submission.tasks})
    print(f"look after it with: python jobs/submit.py status {submission.folder}")
    return status


def keep_job_file(config: Path, folder: Path) -> None:
    """Copy the job's file to where the members read it.

    Raises:
        ConfigError: another file of that name is there, or it cannot be written.
    """
    kept = folder / config.name
    if kept.exists() and kept.read_bytes() != config.read_bytes():
        raise ConfigError(f"--folder {folder} has another {config.name}; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not kept.exists():
            shutil.copyfile(config, kept)
    except OSError as error:
        raise ConfigError(f"--folder {folder}: {error.strerror}; give a folder that can be written") from None


def points_of(options: argparse.Namespace) -> Iterable[Sequence[str]]:
    """The members' own overrides.

    Raises:
        ConfigError: both a grid and a list are given, or one of them is wrong.
    """
    if options.sweep and options.list:
        raise ConfigError("--sweep and --list both say what the members are; give one of them")
    return read_list(options.list) if options.list else grid(options.sweep)


def make_submission(options: argparse.Namespace, members: Sequence[SweepMember]) -> Submission:
    """What is to be submitted.

    Raises:
        ConfigError: a number or an option that Slurm would not take, or a folder that has a submission.
    """
    name = load_config(options.config, options.overrides).run.name
    for what, count in (("--at-once", options.at_once), ("--chain", options.chain)):
        if count < 1:
            raise ConfigError(f"{what} {count}: give 1 or more")
    folder = options.folder or Path("runs") / "submitted" / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / "submission.json").exists():
        raise ConfigError(f"--folder {folder} has a submission; give another, or `submit.py resubmit {folder}`")
    config = str(folder.resolve() / Path(options.config).name)  # a copy: the file may be edited while jobs wait
    return Submission(
        folder.resolve(),
        Path.cwd(),
        make_batch(options, name),
        make_tasks(members, config, name, warmup=options.warmup, evaluate=options.evaluate),
        options.at_once,
        options.chain,
        options.local,
    )


def make_batch(options: argparse.Namespace, name: str) -> Batch:
    """What each training asks of Slurm.

    Raises:
        ConfigError: what Slurm would not take.
    """
    return Batch(
        name=name,
        command="",
        folders=Folders(quoted(ROOT), quoted(Path.cwd())),
        about=(ABOUT,),
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node or options.gpus_per_node or 1,
        cpus_per_rank=options.cpus_per_rank,
        gpus_per_node=options.gpus_per_node,
        time=options.time,
        account=options.account,
        partition=options.partition,
        memory=options.mem,
        exclusive=options.exclusive,
        options=tuple(options.sbatch),
    )


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def check(members: Sequence[SweepMember], submission: Submission) -> None:
    """Hold every member against its model, data and rank count, as ``tlt train --dry-run`` does.

    Raises:
        ValueError: in one line, of the first member that would fail.
    """
    from tlt_hpc.plan.inputs import read_assets

    ranks = submission.batch.nodes * submission.batch.ranks_per_node
    for member in members:
        checked(member, lambda config: read_assets(config, config.run.ranks if submission.is_local else ranks))
    if submission.of_stage("warmup"):
        from tlt_hpc.studies.warmup.plan import config_of

        for member in members:
            if member.config.speculation.mode == "full":
                checked(member, config_of)


def checked(member: SweepMember, check: Callable[[Config], object]) -> None:
    try:
        check(member.config)
    except ValueError as error:
        raise ConfigError(f"{member.name}: {error}") from None


def submit(submission: Submission, chosen: Collection[Key]) -> int:
    """Submit the chosen tasks, or run them here, and keep what jobs they became."""
    if submission.is_local:
        return run_locally(submission, chosen)
    from tlt_hpc.cluster.executor import send

    if any(stage == "train" for stage, *_ in chosen):
        for warning in limits_overstepped(submission.batch):
            print(f"submit.py: {warning}", file=sys.stderr)
    for so_far in send_all(submission, chosen, partial(send, submission.jobs_folder)):
        save(so_far)
        submission = so_far
    for task in submission.tasks:
        if task.key in chosen:
            print(f"job {' then '.join(task.jobs[-submission.chain :])}: {task.stage} {task.member}")
    return 0


def limits_overstepped(batch: Batch) -> list[str]:
    """What of a batch the partition does not give, each with its remedy: Slurm may take such a job and never start it.

    Only said, for a site's QOS may allow what its partition does not.
    """
    from tlt_hpc.plan.preflight import limits
    from tlt_hpc.plan.preflight.planned_job import PlannedJob
    from tlt_hpc.plan.preflight.request import request_of
    from tlt_hpc.plan.preflight.results import Level, judge

    request = request_of([word for option in sbatch_options(batch) for word in shlex.split(option)])
    subject = PlannedJob(None, request, asks_slurm=True)
    checks = (limits.check_time, limits.check_node_count, limits.check_cpus, limits.check_gpus)
    verdicts = [judge(check.__name__, partial(check, subject)) for check in checks]
    return [f"{one.found}; {one.remedy}" for one in verdicts if one.level == Level.FAILURE]


def dry_run(submission: Submission) -> int:
    """Print the batch scripts as Slurm would get them."""
    from tlt_hpc.cluster.executor import script

    count = 0

    def show(batch: Batch, tasks: Sequence[Task]) -> list[str]:
        nonlocal count
        count += 1
        print(f"\n{script(batch, submission.jobs_folder)}", end="")
        return [f"JOB{count}" + f"_{task.index}" * (batch.array is not None) for task in tasks]

    if not submission.is_local:
        list(send_all(submission, {task.key for task in submission.tasks}, show))
    return 0


def run_locally(submission: Submission, chosen: Collection[Key]) -> int:
    """Run tasks here, one after another; one that fails takes along those that need it alone. The worst exit status."""
    from tlt_hpc.cluster.executor import send_locally, wait_for

    statuses: dict[Key, int] = {}
    for task in submission.tasks:
        before = None if task.after is None else (STAGES[STAGES.index(task.stage) - 1], task.after)
        if task.key not in chosen or (before is not None and statuses.get(before, 0)):
            continue
        job = send_locally(submission.jobs_folder, task, submission.batch.gpus_per_node)
        submission = submission.with_jobs({task.key: [job.job_id]})
        save(submission)
        print(f"{task.stage} {task.member}: log {job.paths.stdout}", flush=True)
        statuses[task.key] = wait_for(job)
        print(f"{task.stage} {task.member}: ended with status {statuses[task.key]}", flush=True)
    return max(statuses.values(), default=0)


# --- afterwards ---


def run_later(words: Sequence[str]) -> int:
    """A command on what was submitted before."""
    parser = argparse.ArgumentParser(prog=f"submit.py {words[0]}", description=LATER[words[0]].__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as the submission printed it")
    if words[0] == "resubmit":  # what is not given stays as it was
        add_resources(parser.add_argument_group("of Slurm, where it shall be other than before"))
        parser.set_defaults(**dict.fromkeys(RESOURCES))
    options = parser.parse_args(words[1:])
    submission = with_resources(load(options.folder), vars(options))
    return LATER[words[0]](submission, statuses_of(submission))


def statuses_of(submission: Submission) -> list[TaskStatus]:
    from tlt_hpc.cluster import executor

    queue = {} if submission.is_local else read_queue()
    return read_status(submission, queue, partial(executor.read_status, submission.jobs_folder))


def run_status(submission: Submission, statuses: Sequence[TaskStatus]) -> int:
    """Print how each task stands; status 1 where one has failed."""
    print(status_table(statuses))
    for status in statuses:
        if words := last_words(status):
            print(f"{status.task.member} {status.task.stage}: {words}")
    return int(bool(unfinished(statuses)))


def run_resubmit(submission: Submission, statuses: Sequence[TaskStatus]) -> int:
    """Submit again what failed, was cancelled or stopped early; runs go on from where they were."""
    again = unfinished(statuses)
    if not again:
        print("nothing has failed; nothing was submitted")
        return 0
    return submit(submission, again)


def run_collect(submission: Submission, statuses: Sequence[TaskStatus]) -> int:
    """Print the results of all runs as one table, and write it as CSV and JSON; status 1 where one has not finished."""
    rows = collect(submission, statuses)
    print(results_table(rows))
    print("\n".join(map(str, write_results(submission.folder, rows))))
    return int(any(row["state"] != FINISHED for row in rows))


LATER = {"status": run_status, "resubmit": run_resubmit, "collect": run_collect}


if __name__ == "__main__":
    sys.exit(ending("submit", main))
