"""Submits a run, or a sweep of runs, to Slurm as one array, and looks after what it submitted; knows submitit.

    python jobs/submit.py jobs/qwen7b.toml --nodes 8 --gpus-per-node 8 --partition gpu --sweep run.seed=0,1,2
    python jobs/submit.py status FOLDER       # how each member stands; the folder is printed at submission
    python jobs/submit.py resubmit FOLDER     # those that failed, alone

Every member is checked before any is submitted, gets its own ``run.name`` and runs ``tlt train`` on all its ranks.
Relative paths in a configuration are read from where this is called.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the clone's own package, installed or not: that is what the jobs run

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.cli.main import INTERRUPTED, USER_ERROR
from tlt_hpc.cluster.executor import send
from tlt_hpc.cluster.slurm import read_queue
from tlt_hpc.cluster.status import (
    MemberStatus,
    read_statuses,
    status_table,
    unfinished,
)
from tlt_hpc.cluster.submission import FILE, Resources, Submission, SubmittedRun, load, make_members, parameters, save
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.plan.plan_options import at_least_one
from tlt_hpc.storage.folder import WriteError


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
        print("submit: interrupted; `submit.py resubmit FOLDER` submits what is left", file=sys.stderr)
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
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="section.key=A,B,..", help="a member each; repeat for a grid"
    )
    add = parser.add_argument_group("of Slurm", argument_default=argparse.SUPPRESS).add_argument
    add("--nodes", type=at_least_one)
    add("--gpus-per-node", type=at_least_one, help="one rank each; without: CPUs")
    add("--ranks-per-node", type=at_least_one, help="where it is not the number of GPUs")
    add("--cpus-per-rank", type=at_least_one)
    add("--partition")
    add("--account")
    add("--time", help="limit of each job (default 24:00:00)")
    add("--mem", help="memory of a node; 0: all of it")
    add("--sbatch", action="append", metavar="--OPTION=VALUE", help="a further option: --sbatch=--qos=long")
    parser.add_argument("--folder", type=Path, help="of logs and records (default runs/submitted/NAME-TIME)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print it; submit nothing")
    return parser.parse_intermixed_args(given)


# --- submit ---


def run_submit(options: argparse.Namespace) -> int:
    """Check every member, then submit them all, or print what would be submitted.

    Raises:
        ValueError: in one line, of the first member that would fail; nothing was submitted.
    """
    submission = make_submission(options)
    for member in submission.members:
        check(options.config, member, submission.resources.num_ranks)
    for member in submission.members:
        print(f"{member.run}: tlt {' '.join(member.arguments)}")
    if options.dry_run:
        print("sbatch:", " ".join(f"{name}={value}" for name, value in vars(submission.resources).items() if value))
        return 0
    keep_job_file(Path(options.config), submission.folder)
    save(submission)
    print(f"kept in {submission.folder}")
    submit(submission, {member.name for member in submission.members})
    print(f"look after it with: python jobs/submit.py status {submission.folder}")
    return 0


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


def make_submission(options: argparse.Namespace) -> Submission:
    """What is to be submitted.

    Raises:
        ConfigError: a member's configuration is wrong, or the folder has a submission.
    """
    name = load_config(options.config, options.overrides).run.name
    folder = options.folder or Path("runs") / "submitted" / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / FILE).exists():
        raise ConfigError(f"--folder {folder} has a submission; give another, or `submit.py resubmit {folder}`")
    config = str(folder.resolve() / Path(options.config).name)  # a copy: the file may be edited while jobs wait
    members = make_members(options.config, config, options.overrides, options.sweep)
    given = {field.name: vars(options)[field.name] for field in fields(Resources) if field.name in options}
    resources = Resources(**given | {"sbatch": tuple(given.get("sbatch", ()))})
    return Submission(folder.resolve(), Path.cwd(), ROOT, name, config, resources, members)


def check(config: str, member: SubmittedRun, num_ranks: int) -> None:
    """Check a member's model, data and rank count, as ``tlt train --dry-run`` does.

    Raises:
        ConfigError: in one line.
    """
    from tlt_hpc.plan.inputs import read_assets

    try:
        read_assets(load_config(config, member.arguments[2:]), num_ranks)
    except ValueError as error:
        raise ConfigError(f"{member.name}: {error}") from None


def submit(submission: Submission, names: Collection[str]) -> None:
    """Submit the members of these names as one array, and keep the numbers of their jobs."""
    chosen = submission.chosen(names)
    jobs = send(submission.jobs_folder, parameters(submission), [member.arguments for member in chosen])
    save(submission.with_jobs(dict(zip((member.name for member in chosen), jobs, strict=True))))
    for member, job in zip(chosen, jobs, strict=True):
        print(f"job {job}: {member.name}")


# --- afterwards ---


def run_later(words: Sequence[str]) -> int:
    """A command on what was submitted before."""
    parser = argparse.ArgumentParser(prog=f"submit.py {words[0]}", description=LATER[words[0]].__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as the submission printed it")
    submission = load(parser.parse_args(words[1:]).folder)
    return LATER[words[0]](submission, read_statuses(submission, read_queue()))


def run_status(submission: Submission, statuses: Sequence[MemberStatus]) -> int:
    """Print how each member stands; status 1 if one has failed."""
    print(status_table(statuses))
    return int(bool(unfinished(statuses)))


def run_resubmit(submission: Submission, statuses: Sequence[MemberStatus]) -> int:
    """Submit again what failed, was cancelled or stopped early; these runs resume."""
    again = unfinished(statuses)
    if not again:
        print("nothing has failed; nothing was submitted")
        return 0
    submit(submission, again)
    return 0


LATER = {"status": run_status, "resubmit": run_resubmit}


if __name__ == "__main__":
    sys.exit(ending("submit", main))
