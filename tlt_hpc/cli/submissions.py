"""``tlt submit``: submits a job, or looks after earlier submissions: list, status, resubmit, cancel, collect."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tlt_hpc.cli.command_line import did_you_mean
from tlt_hpc.cli.submit import (
    check_member,
    find_jobs_to_wait_for,
    is_job,
    make_slurm_request,
    preflight,
    print_submission,
    relative_to_cwd,
    run_submit,
    submission_folder,
    submit,
)
from tlt_hpc.cluster.slurm import QueuedJob, SlurmError, ask_slurm, read_queue
from tlt_hpc.cluster.status import UNKNOWN, MemberStatus, cancelled_file, read_statuses, unfinished_member_names
from tlt_hpc.cluster.submission import FILE, SUBMITTED, Submission, load, load_known_submissions
from tlt_hpc.common.formatting import format_table
from tlt_hpc.config import ConfigError, UserError
from tlt_hpc.look.live.list_runs import read_accept_length_text, read_state_text
from tlt_hpc.look.run_table import RunRow, as_table, read_run_row, write_csv
from tlt_hpc.mpi.owner import read_owner


def run(options: argparse.Namespace) -> int:
    """Submit, or do what is asked of an earlier submission; returns the exit status.

    Raises:
        ValueError: in one line; nothing was submitted.
    """
    command = options.command.removeprefix("submit").strip()
    if not command:
        if options.config in SUBMISSION_COMMANDS:
            raise ConfigError(f"{options.config} comes before all options: tlt submit {options.config} ...")
        if near := did_you_mean(options.config, SUBMISSION_COMMANDS):
            raise ConfigError(f"no job file and no command {options.config!r}{near}")
        return run_submit(options)
    if command == "list":
        return print_submission_list(load_known_submissions(*filter(None, [options.folder])))
    if command == "collect" and options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: its folder does not exist; make it first")
    if options.submission:
        submission, names = find_submission(options.submission)
        newest = {job for member in submission.members_named(names) for job in member.jobs[-1:]}
        word = options.submission
        if command == "cancel" and is_job(word) and not any(word in (job, job.partition("_")[0]) for job in newest):
            raise ConfigError(f"job {word} was submitted again since; give the newest: {', '.join(sorted(newest))}")
        known = load_known_submissions(submission.folder.parent)
    elif known := load_known_submissions():
        submission = submission_to_cancel(known) if command == "cancel" else known[-1]
        names = {member.name for member in submission.members}
    else:
        raise ConfigError(f"no submission in {SUBMITTED}; give its folder")
    if command != "status":  # which names those that this one waits for as well
        print(f"submission  {submission.folder}")
    return COMMANDS[command](submission, names, known, options)


def find_submission(word: str) -> tuple[Submission, set[str]]:
    """The submission in a folder, of a name in ``runs/submitted``, or of a job; and the members that are meant.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if (submission_folder(word) / FILE).exists():
        submission = load(submission_folder(word))
        return submission, {member.name for member in submission.members}
    known = load_known_submissions()
    for submission in reversed(known):
        if is_job(word) and (names := submission.member_names_of_job(word)):
            return submission, names
    there = ", ".join(str(relative_to_cwd(each.folder)) for each in known[-5:])
    remedy = f"there are {there} (all: tlt submit list)" if there else "give the folder that `tlt submit` has named"
    raise ConfigError(f"no submission {word}; {remedy}")


def submission_to_cancel(known: Sequence[Submission]) -> Submission:
    """The newest submission, if it is the only one with jobs to cancel, or none has any.

    Raises:
        ConfigError: another one has.
    """
    queue = read_queue()
    live = [each for each in known if any(one.is_live or one.is_blocked for one in read_statuses(each, queue))]
    if any(each != known[-1] for each in live):
        folders = ", ".join(str(relative_to_cwd(each.folder)) for each in live)
        raise ConfigError(f"jobs of an earlier submission wait or run; give one of {folders}")
    return known[-1]


def read_queue_or_warn(submissions: Iterable[Submission]) -> Mapping[str, QueuedJob] | None:
    """Return the jobs in squeue of the users of these submissions; None, with a warning, if Slurm does not answer."""
    try:
        return read_queue(each.user for each in submissions)
    except SlurmError as error:
        print(f"tlt: {error}; what follows is what the files say", file=sys.stderr, flush=True)
        return None


def print_submission_list(known: Sequence[Submission]) -> int:
    """Print all submissions, the newest last, with their time, number of runs and states."""
    if not known:
        raise ConfigError(f"no {SUBMITTED} in {Path.cwd()}; call this where they were submitted, or give the folder")
    queue, rows = read_queue_or_warn(known), [("submission", "submitted", "runs", "states")]
    for each in known:
        states = Counter(status.state for status in read_statuses(each, queue))
        words = ", ".join(f"{number} {state}" for state, number in states.items())
        rows.append((
            str(relative_to_cwd(each.folder)), f"{datetime.fromtimestamp(each.made):%Y-%m-%d %H:%M}",
            str(len(each.members)), words,
        ))  # fmt: skip
    print(format_table(rows))
    return 0


def run_status(
    submission: Submission, names: Collection[str], known: Sequence[Submission], options: argparse.Namespace
) -> int:
    """Print how each member stands, after those of the submissions waited for; status 1 if one has failed."""
    chain = submission.dependency_chain(known)
    queue, failed = read_queue_or_warn(chain), set[str]()
    for each in chain:
        statuses = [one for one in read_statuses(each, queue) if each != submission or one.member.name in names]
        print(f"submission  {each.folder}")
        print(
            as_table(
                member_result_rows(each, statuses, known),
                [str(relative_to_cwd(one.log)) if one.log else "" for one in statuses],
            )
        )
        failed |= unfinished_member_names(statuses)
    return int(bool(failed))


def run_resubmit(
    submission: Submission, names: Collection[str], known: Sequence[Submission], options: argparse.Namespace
) -> int:
    """Submit again what failed, was cancelled or stopped early; these runs resume. It is checked if asked otherwise.

    Raises:
        ValueError: a later submission has continued one of these runs, a job that they wait for has failed, or what is
            asked of Slurm now would end them.
    """
    queue = read_queue([submission.user])
    statuses = [one for one in read_statuses(submission, queue) if one.member.name in names]
    again = unfinished_member_names(statuses)
    for member in submission.members_named(again):
        later, _ = submission.find_continuation(member, known)
        if later:
            folder = shlex.quote(str(relative_to_cwd(later.folder)))
            raise ConfigError(f"{member.run}: {folder} has continued it since; `tlt submit resubmit {folder}`")
    if not again:
        live = [status.member.jobs[-1] for status in statuses if status.is_live]
        first = f"tlt submit cancel {shlex.quote(str(relative_to_cwd(submission.folder)))}"
        more = f" and {len(live) - 1} more are" if live[1:] else " is"
        remedy = f"; {live[0]}{more} in the queue: to ask for something else, `{first}` first" if live else ""
        print(f"nothing has failed; nothing was submitted{remedy}")
        return 0
    before = find_jobs_to_wait_for(submission.after, is_first=False)
    asked = replace(submission, request=make_slurm_request(options, submission.request.options))
    print_submission(asked, asked.members_named(again), before)
    if asked.request != submission.request:
        check_changed_members(asked, again, before, with_preflight=not options.no_preflight)
    if options.dry_run:
        print("nothing was submitted (--dry-run)")
        return 0
    for status in statuses:
        if status.is_blocked:
            ask_slurm("scancel", status.member.jobs[-1])
    submit(asked, again, before, options.environment)
    return 0


def check_changed_members(
    asked: Submission, names: Collection[str], before: Sequence[str], with_preflight: bool
) -> None:
    """Check members that get other nodes, ranks or limits than before, where their relative paths are read from.

    Raises:
        ConfigError: something would end their jobs.
    """
    chosen = asked.members_named(names)
    with chdir(asked.store):
        for member in chosen:
            check_member(asked.config, member, asked.request.num_ranks)
        if with_preflight:
            preflight(asked.config, replace(asked, members=tuple(chosen)), before)


def run_cancel(
    submission: Submission, names: Collection[str], known: Sequence[Submission], options: argparse.Namespace
) -> int:
    """End what waits or runs; the runs keep what they have committed, and can be resubmitted."""
    queue = read_queue([submission.user])
    statuses = [one for one in read_statuses(submission, queue) if one.member.name in names]
    jobs = [status.member.jobs[-1] for status in statuses if status.is_live or status.is_blocked]
    if jobs and options.dry_run:
        print(f"would be cancelled: {', '.join(jobs)}; nothing was (--dry-run)")
        return 0
    if jobs:
        ask_slurm("scancel", *jobs)
    for job in jobs:
        cancelled_file(submission, job).touch()
    print(f"cancelled: {', '.join(jobs)}" if jobs else "nothing waits or runs")
    return 0


def run_collect(
    submission: Submission, names: Collection[str], known: Sequence[Submission], options: argparse.Namespace
) -> int:
    """Print what each member has reached and what it took; with ``--output``, write it as CSV as well."""
    queue = read_queue_or_warn([submission])
    statuses = [one for one in read_statuses(submission, queue) if one.member.name in names]
    rows = member_result_rows(submission, statuses, known)
    print(as_table(rows))
    if options.output is not None:
        swept = [dict(override.split("=", 1) for override in each.member.own) for each in statuses]
        write_csv(options.output, rows, swept)
        print(f"written to {options.output}")
    return 0


def member_result_rows(
    submission: Submission, statuses: Sequence[MemberStatus], known: Sequence[Submission] = ()
) -> list[RunRow]:
    """Return each member's results and costs, without the steps of a later one of the ``known`` submissions."""
    rows = []
    for each in statuses:
        member, place = each.member, submission.run_folder(each.member)
        _, later = submission.find_continuation(member, known)
        ends = (member.num_steps, later.first_step if later else None)
        until = min((end for end in ends if end is not None), default=None)
        row = read_run_row(member.name, each.state, place, until)
        if each.state == UNKNOWN:
            row = row._replace(state=read_state_text_or_unknown(place))
        elif row.steps is None:  # a warm-up
            row = row._replace(state=each.state + read_accept_length_text(place))
        owner = read_owner(place / "status")
        restarts = owner.restarts if owner and owner.job in member.jobs[-1:] else ""
        rows.append(row._replace(num_steps=member.num_steps, restarts=restarts))
    return rows


def read_state_text_or_unknown(place: Path) -> str:
    """Return the state of the run in a folder by its own files."""
    try:
        return read_state_text(place)
    except UserError:  # it has written nothing
        return UNKNOWN


COMMANDS = {"status": run_status, "resubmit": run_resubmit, "collect": run_collect, "cancel": run_cancel}
SUBMISSION_COMMANDS = ("list", *COMMANDS)
