"""What a job asks of Slurm: by options, SBATCH_ variables and a batch script's #SBATCH lines, in this order.

Asks nobody.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from tlt_hpc.config import ConfigError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_SRUN_MPI = re.compile(r"--mpi[= ]\"?(?:\$\{TLT_SRUN_MPI:-(?P<default>\w+)\}|(?P<fixed>\w+))")


@dataclass(frozen=True)
class Request:
    """What is asked of Slurm; zeros and empty texts: nothing was said."""

    nodes: int = 1
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    memory_mb: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    seconds: float = 0.0
    srun_mpi: str = ""
    """Empty: what fits the MPI library."""
    script: Path | None = None
    overrides: tuple[str, ...] = ()
    """Options that sbatch gets before the script's name, as they were given here."""
    constraint: str = ""
    gpu_kind: str = ""
    """Such as ``a100``; empty: any."""
    signal: str = ""
    requeue: bool | None = None
    """None: the cluster's default."""


_OPTIONS = {
    "--nodes": "nodes",
    "--ntasks-per-node": "ranks_per_node",
    "--gpus-per-node": "gpus_per_node",
    "--cpus-per-task": "cpus_per_rank",
    "--partition": "partition",
    "--account": "account",
    "--time": "time",
}
"""sbatch's options, and what they are called here."""
_VARIABLES = {
    "SBATCH_PARTITION": "--partition",
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_QOS": "--qos",
    "SBATCH_TIMELIMIT": "--time",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_GRES": "--gres",
    "SBATCH_GPUS": "--gpus",
    "SBATCH_GPUS_PER_NODE": "--gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "--gpus-per-task",
}


def make_request(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Request:
    """What the script and the options ask for.

    Raises:
        ConfigError: no such script, or a value that cannot be.
    """
    for name in ("nodes", "ranks_per_node", "gpus_per_node", "cpus_per_rank"):
        value, least = vars(options)[name], 0 if name == "gpus_per_node" else 1
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give {least} or more")
    given = {option: vars(options)[name] for option, name in _OPTIONS.items()}
    overrides = tuple(f"{option}={value}" for option, value in given.items() if value is not None)
    named = [f"{option}={environment[name]}" for name, option in _VARIABLES.items() if environment.get(name)]
    return replace(
        request_of([*_sbatch_words(options.script), *named, *overrides]),
        srun_mpi=environment.get("TLT_SRUN_MPI") or _srun_mpi(options.script),
        script=options.script,
        overrides=overrides,
    )


def request_of(words: Sequence[str]) -> Request:
    """What options of sbatch ask for, of which the last of a name counts.

    Raises:
        ConfigError: a value that cannot be.
    """
    asked = vars(_parsed(words))
    nodes = _count(asked["nodes"].partition("-")[0]) or 1
    ranks = _count(asked["ntasks_per_node"]) or -(-_count(asked["ntasks"]) // nodes)
    gpus = _gpus_per_node(asked, nodes, ranks)
    ranks = ranks or gpus // (_count(asked["gpus_per_task"]) or 1)
    cpus = _count(asked["cpus_per_task"]) or 1
    return Request(
        nodes=nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        cpus_per_rank=cpus,
        memory_mb=_memory_per_node(asked, max(ranks, 1) * cpus, gpus),
        partition=asked["partition"],
        account=asked["account"],
        qos=asked["qos"],
        seconds=seconds_of(asked["time"]),
        constraint=asked["constraint"],
        gpu_kind=_gpu_kind(asked),
        signal=asked["signal"],
        requeue=asked["requeue"],
    )


def seconds_of(text: str) -> float:
    """A time as Slurm writes it, in seconds; 0 where none is given, infinity where there is no limit.

    Raises:
        ConfigError: it is no such time.
    """
    if not text:
        return 0.0
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"time {text!r}: give it as sbatch takes it, e.g. 90 (minutes), 24:00:00 or 2-00:00:00")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"]:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return float(86400 * int(match["days"]) + 3600 * hours + 60 * minutes + seconds)
    if len(parts) < 3:  # minutes[:seconds]
        parts = [0, *parts, 0][:3]
    return float(3600 * parts[0] + 60 * parts[1] + parts[2])


class _Quiet(argparse.ArgumentParser):
    """Ends with an error of ours instead of the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the script's #SBATCH lines: {message}; write them as sbatch takes them")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """What options of sbatch ask for; those that do not matter here are left out."""
    parser = _Quiet(add_help=False, allow_abbrev=False)
    for names in (
        *(("-N", "--nodes"), ("-n", "--ntasks"), ("--ntasks-per-node",), ("-c", "--cpus-per-task")),
        *(("--mem",), ("--mem-per-cpu",), ("--mem-per-gpu",)),
        *(("--gpus-per-node",), ("--gres",), ("-G", "--gpus"), ("--gpus-per-task",)),
        *(("-C", "--constraint"),),
        *(("-p", "--partition"), ("-t", "--time"), ("-A", "--account"), ("-q", "--qos"), ("--signal",)),
    ):
        parser.add_argument(*names, default="")
    parser.add_argument("--requeue", dest="requeue", action="store_const", const=True)
    parser.add_argument("--no-requeue", dest="requeue", action="store_const", const=False)
    return parser.parse_known_args(words)[0]


def _gpus_per_node(asked: Mapping[str, str], nodes: int, ranks: int) -> int:
    """However they are asked for: for a node, for the whole job, or for each of a node's ranks."""
    whole = -(-_count(asked["gpus"]) // nodes)
    if asked["gpus_per_node"]:
        return _count(asked["gpus_per_node"])
    counts = [one.rpartition(":")[2] for one in _gpu_resources(asked["gres"])]
    in_gres = sum(int(count) if count.isdecimal() else 1 for count in counts)
    return in_gres or whole or max(ranks, 1) * _count(asked["gpus_per_task"])


def _gpu_kind(asked: Mapping[str, str]) -> str:
    """The kind of GPUs that is asked for, ``a100`` of ``a100:4`` and of ``gpu:a100:4``; empty where any will do."""
    gres = [one.removeprefix("gpu:") for one in _gpu_resources(asked["gres"])]
    text = asked["gpus_per_node"] or ":".join(gres[:1]) or asked["gpus"] or asked["gpus_per_task"]
    kind, separator, _ = text.partition(":")
    return kind if separator else ""


def _gpu_resources(gres: str) -> list[str]:
    """The GPUs among the generic resources of ``--gres``."""
    return [one for one in gres.split(",") if one.partition(":")[0] == "gpu"]


def _memory_per_node(asked: Mapping[str, str], cpus: int, gpus: int) -> int:
    """In megabytes: for a node, or for each of its ``cpus`` or ``gpus``; sbatch takes one of the three."""
    each = cpus * megabytes(asked["mem_per_cpu"]) or gpus * megabytes(asked["mem_per_gpu"])
    return megabytes(asked["mem"]) or each


def _sbatch_words(script: Path | None) -> list[str]:
    lines = [] if script is None else _read(script).splitlines()
    return [word for line in lines if line.startswith("#SBATCH") for word in shlex.split(line[7:], comments=True)]


def _srun_mpi(script: Path | None) -> str:
    match = None if script is None else _SRUN_MPI.search(_read(script))
    return "" if match is None else match["default"] or match["fixed"]


def _read(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--script {script}: {error}; give a batch script such as sbatch/train_qwen7b.sh") from None


def _count(text: str) -> int:
    """``8`` of ``8``, ``a100:8`` and ``gpu:a100:8``; 0 of nothing.

    Raises:
        ConfigError: there is no number.
    """
    found = re.search(r"(?:^|[:=])(\d+)(?:$|[(,])", text)
    if text and found is None:
        raise ConfigError(f"the script's #SBATCH lines ask for {text!r}, which is no number; write one")
    return int(found[1]) if found else 0


def megabytes(text: str) -> int:
    """Memory as Slurm writes it, of ``64G``, ``4000`` (megabytes) or ``0``, which asks for all that a node has."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        return 0
    return int(match[1]) * {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}[match[2]] // 1024
