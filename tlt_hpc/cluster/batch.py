"""The text of a batch script, from what a job asks of Slurm: one pure function, for files and submissions alike."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import groupby

from tlt_hpc.config import ConfigError

SIGNAL_SECONDS = 120
"""How long before its time limit a job is told to save and stop."""
RANK = "python -m mpi4py -m tlt_hpc"
"""A rank of ``tlt``, whose failure ends all (mpi4py's runner)."""
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


@dataclass(frozen=True)
class Array:
    """Members of one submission by index, ascending, of which ``at_once`` may run together."""

    indices: tuple[int, ...]
    at_once: int

    def __str__(self) -> str:
        # neighbours keep their distance to their place in the list
        runs = [
            [index for _, index in run] for _, run in groupby(enumerate(self.indices), lambda pair: pair[1] - pair[0])
        ]
        named = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return f"{named}%{min(self.at_once, len(self.indices))}"


@dataclass(frozen=True)
class Folders:
    """Where a job works, each as a line of shell with its comment: the clone, and what relative paths are read from."""

    project: str
    store: str


@dataclass(frozen=True)
class Batch:
    """What a job asks of Slurm, where it works, and what its ranks run (shell text).

    Raises:
        ConfigError: an option that Slurm would not take, or would take for another.
    """

    name: str
    command: str
    folders: Folders
    about: tuple[str, ...] = ()
    """Comment lines of the script's head, without their mark."""
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    time: str = "24:00:00"
    account: str = ""
    partition: str = ""
    memory: str = ""
    """Of a node, as Slurm writes it; ``0``: all that it has."""
    exclusive: bool = False
    requeue: bool = True
    signal_seconds: int = SIGNAL_SECONDS
    array: Array | None = None
    dependency: str = ""
    """As sbatch has it, e.g. ``afterok:17``; the job is cancelled once it can no longer be met."""
    log: str = "%x-%j.log"
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as ``--qos=long``."""
    before: tuple[str, ...] = ()
    """Lines of shell before the one that starts the ranks."""

    def __post_init__(self) -> None:
        check_counts(self)
        if not _TIME.fullmatch(self.time):
            raise ConfigError(f"time {self.time!r}: write it as Slurm does, e.g. 24:00:00, 2-00:00:00 or 90 (minutes)")
        for what in ("name", "account", "partition", "memory", "dependency", "log"):
            if not re.fullmatch(r"[^\n\"'\\]*", text := vars(self)[what]):
                raise ConfigError(f"{what} {text!r}: leave out quotes, backslashes and line ends")
        for option in self.options:
            if not re.fullmatch(r"--[a-z][a-z-]*(=\S+)?", option):
                raise ConfigError(f"{option!r} is no option of sbatch; write it with its value, e.g. --qos=long")


def check_counts(batch: Batch) -> None:
    """Refuse numbers that no job can have.

    Raises:
        ConfigError: with the number and the remedy.
    """
    counts = {"nodes": batch.nodes, "ranks per node": batch.ranks_per_node, "CPUs per rank": batch.cpus_per_rank}
    for what, count in counts.items():
        if count < 1:
            raise ConfigError(f"{count} {what}; give 1 or more")
    if batch.gpus_per_node < 0:
        raise ConfigError(f"{batch.gpus_per_node} GPUs per node; give 0 or more")


def render(batch: Batch) -> str:
    """The script's text; what is edited by hand stands at its top, and nothing in it depends on when or where it is
    rendered."""
    lines = [
        "#!/usr/bin/env bash",
        *(f"# {line}" for line in batch.about),
        *(f"#SBATCH {option}" for option in sbatch_options(batch)),
        f"PROJECT={batch.folders.project}",
        f"STORE={batch.folders.store}",
        "",
        "set -euo pipefail",
        "[[ -f $PROJECT/sbatch/env.sh ]] ||",
        '    { echo "$PROJECT has no sbatch/env.sh; call sbatch in the clone (SLURM_SUBMIT_DIR)" >&2; exit 1; }',
        'source "$PROJECT/sbatch/env.sh"',
        'cd "$STORE"',
        *batch.before,
        "# shellcheck disable=SC2086 # TLT_CONTAINER is words, or none: sbatch/env.sh",
        'srun --mpi="$TLT_SRUN_MPI" --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
        f"    $TLT_CONTAINER {batch.command}",
    ]
    return "\n".join(lines) + "\n"


def sbatch_options(batch: Batch) -> list[str]:
    """The options, in the order in which a user looks for them."""
    known = {
        "account": batch.account,
        "partition": batch.partition,
        "job-name": batch.name,
        "nodes": batch.nodes,
        "ntasks-per-node": batch.ranks_per_node,
        "cpus-per-task": batch.cpus_per_rank,
        "gpus-per-node": batch.gpus_per_node,
        "mem": batch.memory,
        "time": batch.time,
        "array": batch.array,
        "dependency": batch.dependency,
        "signal": f"USR2@{batch.signal_seconds}",
        "open-mode": "append",
        "output": batch.log,
    }
    flags = {
        "--exclusive": batch.exclusive,
        "--requeue": batch.requeue,
        "--no-requeue": not batch.requeue,
        # else a job whose warm-up failed would wait for ever
        "--kill-on-invalid-dep=yes": bool(batch.dependency),
    }
    named = [f"--{name}={shlex.quote(str(value))}" for name, value in known.items() if value]
    return [*named, *(flag for flag, given in flags.items() if given), *batch.options]
