"""``tlt submit``: submits a job, or looks after an earlier submission: status, resubmit, cancel, collect."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tlt_hpc.cli.command_line import did_you_mean
from tlt_hpc.cli.submit import SUBMITTED, jobs_before, known_submissions, run_submit, short, submit
from tlt_hpc.cluster.slurm import ask_slurm, read_queue
from tlt_hpc.cluster.status import MemberStatus, read_statuses, unfinished
from tlt_hpc.cluster.submission import Submission, load
from tlt_hpc.config import ConfigError
from tlt_hpc.look.collect import RunRow, as_table, row_of, write_csv


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
    if options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: its folder does not exist; make it first")
    if len(options.overrides) > 1:
        raise ConfigError(f"tlt submit {options.config} takes one folder; {options.overrides[1]} is one too many")
    if options.overrides:
        submission = load(Path(options.overrides[0]))
        known = known_submissions(submission.folder.parent)
    elif known := known_submissions():
        submission = known[-1]
    else:
        raise ConfigError(f"no submission in {SUBMITTED}; give its folder")
    return LATER[options.config](submission, known, options)


def run_status(submission: Submission, known: Sequence[Submission], options: argparse.Namespace) -> int:
    """Print how each member stands, after those of the submissions waited for; status 1 if one has failed."""
    queue, failed = read_queue(), set[str]()
    for each in submission.chain(known):
        statuses = read_statuses(each, queue)
        print(f"submission  {each.folder}")
        print(as_table(rows_of(each, statuses, known), [str(status.log or "") for status in statuses]))
        failed |= unfinished(statuses)
    return int(bool(failed))


def run_resubmit(submission: Submission, known: Sequence[Submission], options: argparse.Namespace) -> int:
    """Submit again what failed, was cancelled or stopped early; these runs resume.

    Raises:
        ConfigError: a later submission has continued one of these runs, or a job that they wait for has failed.
    """
    statuses = read_statuses(submission, read_queue())
    again = unfinished(statuses)
    for member in submission.chosen(again):
        later, _ = submission.continued_by(member, known)
        if later:
            folder = short(later.folder)
            raise ConfigError(f"{member.run}: {folder} has continued it since; `tlt submit resubmit {folder}`")
    if not again:
        print("nothing has failed; nothing was submitted")
        return 0
    before = jobs_before(submission.after, is_first=False)
    for status in statuses:
        if status.is_blocked:
            ask_slurm("scancel", status.member.jobs[-1])
    submit(submission, again, before)
    return 0


def run_cancel(submission: Submission, known: Sequence[Submission], options: argparse.Namespace) -> int:
    """End what waits or runs; the runs keep what they have committed, and can be resubmitted."""
    statuses = read_statuses(submission, read_queue())
    jobs = [status.member.jobs[-1] for status in statuses if status.is_live or status.is_blocked]
    if jobs:
        ask_slurm("scancel", *jobs)
    print(f"cancelled: {', '.join(jobs)}" if jobs else "nothing waits or runs")
    return 0


def run_collect(submission: Submission, known: Sequence[Submission], options: argparse.Namespace) -> int:
    """Print what each member has reached and what it took; with ``--output``, write it as CSV as well."""
    statuses = read_statuses(submission, read_queue())
    rows = rows_of(submission, statuses, known)
    print(as_table(rows))
    if options.output is not None:
        swept = [dict(override.split("=", 1) for override in each.member.own) for each in statuses]
        write_csv(options.output, rows, swept)
        print(f"written to {options.output}")
    return 0


def rows_of(submission: Submission, statuses: Sequence[MemberStatus], known: Sequence[Submission] = ()) -> list[RunRow]:
    """What each member has reached, and what it took, without the steps of a later one of the ``known`` submissions."""
    rows = []
    for each in statuses:
        _, later = submission.continued_by(each.member, known)
        ends = (each.member.num_steps, later.first_step if later else None)
        until = min((end for end in ends if end is not None), default=None)
        rows.append(row_of(each.member.name, each.state, submission.place(each.member), until))
    return rows


LATER = {"status": run_status, "resubmit": run_resubmit, "collect": run_collect, "cancel": run_cancel}
