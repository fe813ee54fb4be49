"""What Slurm reports of a cluster, by its own commands."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from tlt_hpc.config import UserError
from tlt_hpc.plan.preflight.program import ask
from tlt_hpc.plan.preflight.request import gpu_resources, seconds_of

ANSWER_SECONDS = 30.0
"""A busy controller answers in a few; more is an outage."""
_UNUSABLE = ("down", "drain", "drng", "fail", "maint", "unk", "no_respond", "reboot", "power", "planned_down", "inval")
"""Prefixes of states in which a node accepts no job, now or soon."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    count: int
    state: str
    cpus: int
    memory_mb: int
    gres: str

    @property
    def is_usable(self) -> bool:
        """Whether they are up, busy or not."""
        return not self.state.lower().startswith(_UNUSABLE)

    @property
    def gpus(self) -> int:
        return sum(count for _, count in gpu_resources(self.gres))

    @property
    def gpu_kinds(self) -> tuple[str, ...]:
        """Slurm's names of a node's GPUs, such as ``a100``; empty if they have none."""
        return tuple(sorted({kind for kind, _ in gpu_resources(self.gres) if kind}))


@dataclass(frozen=True)
class Partition:
    """A partition's limits; infinite if there is none."""

    name: str
    state: str
    max_seconds: float
    max_nodes: float
    preempt_mode: str
    groups: tuple[NodeKind, ...]

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.groups)


def read_partitions(names: str) -> tuple[Partition, ...]:
    """The partitions of a comma-separated list, in one of which the job will run; the default one if it is empty.

    Raises:
        UserError: Slurm does not answer, or has no such partition; ``sbatch`` refuses a list with an unknown name too.
    """
    lines = slurm_output("scontrol", "show", "partition", "-o").splitlines()
    raw = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if line.startswith("PartitionName=")]
    found = {one["PartitionName"]: one for one in raw}
    wanted = [name for name in names.split(",") if name]
    wanted = wanted or [name for name, one in found.items() if one.get("Default") == "YES"]
    known = ", ".join(sorted(found)) or "none, it has none"
    if not wanted:
        raise UserError(f"this Slurm has no default partition; give --partition, one of {known}")
    for name in wanted:
        if name not in found:
            raise UserError(f"partition {name!r} does not exist here; give one of {known}")
    return tuple(_partition(found[name]) for name in dict.fromkeys(wanted))


def _partition(raw: dict[str, str]) -> Partition:
    name = raw["PartitionName"]
    return Partition(
        name=name,
        state=raw["State"],
        max_seconds=seconds_of(raw["MaxTime"]),
        max_nodes=math.inf if raw["MaxNodes"] == "UNLIMITED" else float(raw["MaxNodes"]),
        preempt_mode=raw["PreemptMode"],
        groups=tuple(_groups(slurm_output("sinfo", "-h", "-p", name, "-o", "%D|%T|%c|%m|%G"))),
    )


def _groups(text: str) -> Iterable[NodeKind]:
    for line in text.splitlines():
        count, state, cpus, memory, gres = line.split("|", 4)
        yield NodeKind(int(count), state, int(cpus.rstrip("+")), int(memory.rstrip("+")), gres)  # 256000+: or more


def launch_types() -> list[str]:
    """The values that ``srun --mpi`` accepts here.

    Raises:
        UserError: Slurm does not answer.
    """
    lines = [line.strip() for line in ask(["srun", "--mpi=list"], ANSWER_SECONDS).text.splitlines()]
    named = [word.strip() for line in lines if "versions available:" in line for word in line.split(":")[1].split(",")]
    return sorted({line for line in lines if re.fullmatch(r"\w+", line)} | set(named))


def slurm_output(*command: str) -> str:
    """What a command of Slurm prints.

    Raises:
        UserError: Slurm does not answer, or refuses.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no {command[0]} on PATH, so this is no node of a Slurm cluster; run on a login node")
    answer = ask(command, ANSWER_SECONDS)
    if answer.status:
        raise UserError(f"{' '.join(command)}: {answer.last_line}; ask Slurm by hand whether it is up: scontrol ping")
    return answer.out
