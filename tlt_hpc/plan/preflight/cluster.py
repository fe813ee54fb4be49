"""What Slurm reports of a cluster, read from its own commands."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from tlt_hpc.config import UserError
from tlt_hpc.plan.preflight.program import ProgramOutput, ask
from tlt_hpc.plan.preflight.request import gpu_resources, seconds_of

_SECONDS = 30.0
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
    gpus: int
    gres: str
    features: frozenset[str] = frozenset()

    @property
    def is_usable(self) -> bool:
        """Whether they are up, busy or not."""
        return not self.state.lower().startswith(_UNUSABLE)

    @property
    def gpu_kinds(self) -> tuple[str, ...]:
        """Slurm's names of a node's GPUs, such as ``a100``; empty if they have none."""
        return tuple(sorted({kind for kind, _ in gpu_resources(self.gres) if kind}))

    def meets(self, constraint: str) -> bool:
        """Whether a node has the features of a ``--constraint``, one of its alternatives.

        True for one with counts or parentheses, which only sbatch can judge.
        """
        if re.search(r"[()*]", constraint):
            return True
        alternatives = constraint.strip("[]").split("|")
        return any(self.features.issuperset(one.split("&")) for one in alternatives) or not constraint


@dataclass(frozen=True)
class Gate:
    """Whom a partition admits: comma-separated names in lower case; ``all``: there is no list."""

    allowed: str = "all"
    denied: str = ""

    def takes(self, name: str) -> bool:
        """Whether it admits a name; the list of allowed names has precedence, as in Slurm."""
        if self.allowed != "all":
            return name.lower() in self.allowed.split(",")
        return name.lower() not in self.denied.split(",")

    @property
    def words(self) -> str:
        """The rule in words, to follow its partition's name."""
        return f"takes only {self.allowed}" if self.allowed != "all" else f"takes none of {self.denied}"


@dataclass(frozen=True)
class Partition:
    """A partition's limits; infinite or 0 if there is none."""

    name: str
    state: str
    max_seconds: float
    max_nodes: float
    preempt_mode: str
    grace_seconds: float
    accounts: Gate
    qos: Gate
    groups: tuple[NodeKind, ...]

    @property
    def num_nodes(self) -> int:
        return sum(group.count for group in self.groups)


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of the whole cluster."""

    kill_wait_seconds: float
    requeues: bool
    preempt_type: str


class NoSuchPartition(UserError):  # noqa: N818
    """Slurm knows no partition of that name."""


def read_partitions(names: str) -> tuple[Partition, ...]:
    """The partitions of a comma-separated list, in one of which the job will run; the default one if it is empty.

    Raises:
        NoSuchPartition: with the names that exist; ``sbatch`` refuses a list with an unknown name too.
        UserError: Slurm does not answer.
    """
    found = {one["PartitionName"]: one for one in _partitions()}
    wanted = [name for name in names.split(",") if name]
    wanted = wanted or [name for name, one in found.items() if one.get("Default") == "YES"]
    if not wanted:
        raise NoSuchPartition(f"this Slurm has no default partition; give --partition, one of {_names(found)}")
    for name in wanted:
        if name not in found:
            raise NoSuchPartition(f"partition {name!r} does not exist here; give one of {_names(found)}")
    return tuple(_partition(found[name]) for name in dict.fromkeys(wanted))


def _partition(raw: dict[str, str]) -> Partition:
    return Partition(
        name=raw["PartitionName"],
        state=raw["State"],
        max_seconds=seconds_of(raw["MaxTime"]),
        max_nodes=float("inf") if raw["MaxNodes"] == "UNLIMITED" else float(raw["MaxNodes"]),
        preempt_mode=raw["PreemptMode"],
        grace_seconds=float(raw["GraceTime"]),
        accounts=_gate(raw, "Accounts"),
        qos=_gate(raw, "Qos"),
        groups=tuple(_groups(raw["PartitionName"])),
    )


def _gate(raw: dict[str, str], of: str) -> Gate:
    """Slurm prints one of the two lists: a partition with denied names has no line of allowed ones."""
    return Gate(raw.get(f"Allow{of}", "ALL").lower(), raw.get(f"Deny{of}", "").lower())


def read_settings() -> SlurmSettings:
    """The cluster's settings.

    Raises:
        UserError: Slurm does not answer.
    """
    lines = (line.partition("=") for line in _said("scontrol", "show", "config").splitlines())
    raw = {key.strip(): value.strip() for key, separator, value in lines if separator}
    return SlurmSettings(float(raw["KillWait"].split()[0]), raw["JobRequeue"] == "1", raw["PreemptType"])


def accounts_of(user: str) -> dict[str, frozenset[str]]:
    """The accounts that a user may charge, each with its QOS, in lower case; empty if Slurm has none."""
    if shutil.which("sacctmgr") is None:
        return {}
    command = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account,qos"]
    answer = ask(command, _SECONDS)
    lines = answer.out.lower().splitlines() if answer.status == 0 else []
    found: dict[str, frozenset[str]] = {}
    for account, qos in (line.split("|") for line in lines if line.count("|") == 1):  # one a partition and cluster
        found[account] = found.get(account, frozenset()) | {name for name in qos.split(",") if name}
    return found


def launch_types() -> list[str]:
    """The values that ``srun --mpi`` accepts here.

    Raises:
        UserError: Slurm does not answer.
    """
    answer = ask(["srun", "--mpi=list"], _SECONDS)
    lines = [line.strip() for line in answer.text.splitlines()]
    named = [word.strip() for line in lines if "versions available:" in line for word in line.split(":")[1].split(",")]
    return sorted({line for line in lines if re.fullmatch(r"\w+", line)} | set(named))


def would_take(arguments: Iterable[str]) -> ProgramOutput:
    """What ``sbatch`` prints about a job that it only tests and does not submit.

    Raises:
        UserError: Slurm does not answer.
    """
    return ask(["sbatch", "--test-only", *arguments], _SECONDS)


def _partitions() -> list[dict[str, str]]:
    lines = _said("scontrol", "show", "partition", "-o").splitlines()
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if line.startswith("PartitionName=")]


def _groups(partition: str) -> Iterable[NodeKind]:
    for line in _said("sinfo", "-h", "-p", partition, "-o", "%D|%T|%c|%m|%G|%f").splitlines():
        count, state, cpus, memory, gres, features = line.split("|", 5)
        named = frozenset(features.split(",")) - {"(null)"}
        yield NodeKind(int(count), state, _least(cpus), _least(memory), gpus_of(gres), gres, named)


def gpus_of(gres: str) -> int:
    """GPUs of a node by its generic resources in ``sinfo``, such as ``gpu:a100:4(S:0-1)``."""
    return sum(count for _, count in gpu_resources(gres))


def _least(text: str) -> int:
    """``256000`` of ``256000+``, which means that many or more."""
    return int(text.rstrip("+"))


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no {command[0]} on PATH, so this is no node of a Slurm cluster; run on a login node")
    answer = ask(command, _SECONDS)
    if answer.status:
        raise UserError(f"{' '.join(command)}: {answer.last_line}; ask Slurm by hand whether it is up: scontrol ping")
    return answer.out


def _names(found: Iterable[str]) -> str:
    return ", ".join(sorted(found)) or "none, it has none"
