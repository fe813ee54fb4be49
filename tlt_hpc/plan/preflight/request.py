"""What a job requests of Slurm: by options, SBATCH_ variables and a batch script's #SBATCH lines, in this order."""

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
_GPU_RESOURCE = re.compile(r"(?:^|,)gpu(?::(?!\d+(?:$|[,(]))([^:,()]+))?(?::(\d+))?(?=$|[,(])")
_SRUN_MPI = re.compile(r"--mpi[= ]\"?(?:\$\{TLT_SRUN_MPI:-(?P<default>\w+)\}|(?P<fixed>\w+))")


@dataclass(frozen=True)
class SlurmRequest:
    """What is requested of Slurm; zeros and empty texts: nothing."""

    nodes: int = 1
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    memory_mb: int = 0
    partition: str = ""
    account: str = ""
    seconds: float = 0.0
    srun_mpi: str = ""
    """Empty: what fits the MPI library."""
    script: Path | None = None
    overrides: tuple[str, ...] = ()
    """Options given here, which sbatch gets before the script's name."""
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
"""sbatch's options, and their names here."""
_VARIABLES = {
    "SBATCH_PARTITION": "--partition",
    "SBATCH_ACCOUNT": "--account",
    "SBATCH_TIMELIMIT": "--time",
    "SBATCH_CONSTRAINT": "--constraint",
    "SBATCH_GRES": "--gres",
    "SBATCH_GPUS": "--gpus",
    "SBATCH_GPUS_PER_NODE": "--gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "--gpus-per-task",
}
_NOT_READ = {
    "gpus": "--gpus-per-node",
    "gpus_per_task": "--gpus-per-node",
    "mem_per_cpu": "--mem, of a node",
    "mem_per_gpu": "--mem, of a node",
}
"""sbatch's options for GPUs and memory by another measure than the node, and what to write in their place."""


def make_request(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> SlurmRequest:
    """What the script and the options request.

    Raises:
        ConfigError: no such script, or an invalid value.
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


def request_of(words: Sequence[str]) -> SlurmRequest:
    """What options of sbatch request; the last of each name counts.

    Raises:
        ConfigError: an invalid value.
    """
    asked = vars(_parsed(words))
    for name, instead in _NOT_READ.items():
        if asked[name]:
            raise ConfigError(f"the job asks for --{name.replace('_', '-')}={asked[name]}; preflight reads {instead}")
    nodes = _count(asked["nodes"].partition("-")[0]) or 1
    gpus = asked["gpus_per_node"] and f"gpu:{asked['gpus_per_node']}"
    kinds = gpu_resources(gpus or asked["gres"])
    num_gpus = sum(count for _, count in kinds)
    return SlurmRequest(
        nodes=nodes,
        ranks_per_node=_count(asked["ntasks_per_node"]) or -(-_count(asked["ntasks"]) // nodes) or num_gpus,
        gpus_per_node=num_gpus,
        cpus_per_rank=_count(asked["cpus_per_task"]) or 1,
        memory_mb=megabytes(asked["mem"]),
        partition=asked["partition"],
        account=asked["account"],
        seconds=seconds_of(asked["time"]),
        constraint=asked["constraint"],
        gpu_kind=kinds[0][0] if kinds else "",
        signal=asked["signal"],
        requeue=asked["requeue"],
    )


def seconds_of(text: str) -> float:
    """A time in Slurm's format, in seconds; 0 if none is given, infinity if there is no limit.

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
    """Raises a ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the script's #SBATCH lines: {message}; write them as sbatch takes them")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options of sbatch that matter here."""
    parser = _Quiet(add_help=False, allow_abbrev=False)
    for names in (
        *(("-N", "--nodes"), ("-n", "--ntasks"), ("--ntasks-per-node",), ("-c", "--cpus-per-task")),
        *(("--mem",), ("--mem-per-cpu",), ("--mem-per-gpu",), ("-C", "--constraint")),
        *(("--gpus-per-node",), ("--gres",), ("-G", "--gpus"), ("--gpus-per-task",)),
        *(("-p", "--partition"), ("-t", "--time"), ("-A", "--account"), ("--signal",)),
    ):
        parser.add_argument(*names, default="")
    parser.add_argument("--requeue", dest="requeue", action="store_const", const=True)
    parser.add_argument("--no-requeue", dest="requeue", action="store_const", const=False)
    return parser.parse_known_args(words)[0]


def gpu_resources(gres: str) -> list[tuple[str, int]]:
    """Kinds and numbers of the GPUs among generic resources, such as ``gpu:a100:4(S:0-1),nvme:1`` or ``gpu:8``."""
    return [(kind, int(count or 1)) for kind, count in _GPU_RESOURCE.findall(gres)]


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
    """Megabytes of ``64G``, ``4000`` (megabytes) or ``0``, which requests all that a node has."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        return 0
    return int(match[1]) * {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}[match[2]] // 1024
