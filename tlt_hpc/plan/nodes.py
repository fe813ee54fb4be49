"""Compares all nodes when a job starts, before anything is loaded: a node that differs from the others is named.

One rank of each node gathers the facts. No process is started, because MPI is running, and torch is not imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tlt_hpc
from tlt_hpc.common.source import installed_version, source_digest
from tlt_hpc.config import Config, ModelSection, UserError
from tlt_hpc.models.tokenizer import find_model

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

_PACKAGES = ("torch", "numpy", "mpi4py", "deepspeed", "transformers")
_DRIVER = Path("/proc/driver/nvidia")
ABSENT = "none"
NEEDS_COMPILER = "install c-compiler with conda, or load a module that has one (TLT_MODULES)"
_REMEDIES = {
    "source": "install the same version on all nodes, or start from a folder that they share",
    "mpi": "load the same modules on all nodes",
    "gpus": "leave that node out (sbatch --exclude=NODE), or ask for nodes of one kind (--constraint)",
    "run folder": "set run.folder to a file system that all nodes share",
    "model": "copy the same model to all nodes, or set model.path to a folder that they share",
}
_REMEDY = "start all ranks from one environment that all nodes share"

NodeFacts = dict[str, str]
"""What a node has; one text for each fact, so that two can be shown side by side."""


@dataclass(frozen=True)
class NodeReport:
    """A rank's contribution: its node's facts if it is the first rank there, and its own error if it has one."""

    hostname: str
    facts: NodeFacts | None
    error: str = ""


def check_nodes(world: World, config: Config, check: Callable[[], object] = lambda: None) -> None:
    """Refuse nodes that differ in what must not differ; collective, before anything is loaded.

    Args:
        check: a further check on each node's first rank; raises ValueError.

    Raises:
        UserError: on all ranks, with the node, both values and the remedy; or with the error of a rank.
    """
    if world.local_rank:
        return _gather_and_check_reports(world, NodeReport(world.hostname, None))
    error = ""
    try:
        check()
        check_compiler(config.model, os.environ)
    except ValueError as caught:
        error = str(caught)
    return _gather_and_check_reports(world, NodeReport(world.hostname, read_node_facts(config, world), error))


def check_compiler(model: ModelSection, environment: Mapping[str, str]) -> None:
    """See that Triton can compile on this node, if the job uses its GPUs.

    Raises:
        UserError: with what is missing.
    """
    uses_gpus = model.device != "cpu" and describe_gpus(environment) != ABSENT
    if uses_gpus and (missing := missing_for_triton(environment)):
        raise UserError(f"this node has {missing}, which Triton needs for its kernels; {NEEDS_COMPILER}")


def missing_for_triton(environment: Mapping[str, str]) -> str:
    """Name the part that this machine lacks for Triton's small C program that launches kernels; empty: none.

    Triton compiles it where the job runs: by ``CC``, gcc or clang, with Python's headers.
    """
    named = environment.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        return f"no C compiler ({f'CC={named}' if named else 'gcc or clang'})"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    return "" if header.is_file() else f"no {header}"


def broadcast_error(world: World, error: ValueError) -> None:
    """Replaces ``check_nodes`` on a rank that has failed already: sends its error to all ranks, so that none waits.

    Raises:
        UserError: always, on all ranks, with the error of the first rank that has one.
    """
    _gather_and_check_reports(world, NodeReport(world.hostname, None, str(error)))


def _gather_and_check_reports(world: World, own: NodeReport) -> None:
    records = world.allgather(own)
    refuse_errors(records)
    if difference := find_difference({one.hostname: one.facts for one in records if one.facts is not None}):
        raise UserError(difference)


def refuse_errors(records: Sequence[NodeReport]) -> None:
    """Raise the first rank's error: as it is if all checking ranks have it, else with its rank and node.

    Raises:
        UserError: there is one.
    """
    looked = [record for record in records if record.facts is not None or record.error]
    for rank, record in enumerate(records):
        if record.error:
            is_everywhere = all(other.error == record.error for other in looked)
            raise UserError(record.error if is_everywhere else f"rank {rank} on {record.hostname}: {record.error}")


def find_difference(nodes: Mapping[str, NodeFacts]) -> str:
    """One line on the first fact that differs, which ends the job; empty if all nodes are alike.

    Nodes in order of their ranks: the majority is right, or the first of equal groups.
    """
    for name in next(iter(nodes.values()), {}):
        values = {hostname: facts[name] for hostname, facts in nodes.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        odd = next((value for value in values.values() if value != usual), None)
        if odd is not None:
            hosts = [hostname for hostname, value in values.items() if value == odd]
            where = f"node{'s' * (len(hosts) > 1)} {', '.join(hosts[:4])}{' ...' * (len(hosts) > 4)}"
            others = f"{count} other nodes have" if count > 1 else "1 other node has"
            theirs, ours = _differing_list_entries(odd, usual)
            remedy = _REMEDIES.get(name, _REMEDY)
            return f"{where}: {name} {theirs}, where {others} {ours}; {remedy}"
    return ""


def _differing_list_entries(one: str, other: str) -> tuple[str, str]:
    """The entries of two comma-separated lists that are not in both."""
    ones, others = one.split(", "), other.split(", ")
    mine, theirs = ([item for item in items if item not in rest] for items, rest in ((ones, others), (others, ones)))
    return ", ".join(mine) or one, ", ".join(theirs) or other


def read_node_facts(config: Config, world: World) -> NodeFacts:
    """This node's facts."""
    return {
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {installed_version(name) or ABSENT}" for name in _PACKAGES),
        "source": f"tlt_hpc {tlt_hpc.__version__} ({source_digest()})",
        "mpi": " ".join(world.mpi_version.split("\n")[0].split()),
        "gpus": describe_gpus(os.environ),
        "run folder": _text_or_error(lambda: "is there" if Path(config.run.folder).is_dir() else "is not there"),
        "model": _text_or_error(lambda: model_digest(find_model(config.model.path))),
    }


def model_digest(folder: Path) -> str:
    """A digest of a model's config.json and tokenizer, and of the sizes of its weight files, which are not read."""
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"):
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode() + (folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\0".encode())
    return digest.hexdigest()[:12]


def describe_gpus(environment: Mapping[str, str]) -> str:
    """Number and models of the job's GPUs on this node, from the driver's files and Slurm."""
    files = sorted((_DRIVER / "gpus").glob("*/information"))
    models = {_parse_gpu_model(path.read_text(encoding="utf-8")) for path in files}
    count = environment.get("SLURM_GPUS_ON_NODE") or str(len(files))
    return f"{count} x {' and '.join(sorted(models))}" if models else ABSENT


def _parse_gpu_model(information: str) -> str:
    lines = (line.partition(":") for line in information.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "Model"), "GPU")


def _text_or_error(read: Callable[[], str]) -> str:
    """What a node reads, or its error as text: the others must not wait for it."""
    try:
        return read()
    except (ValueError, OSError) as error:
        return f"cannot be read: {error}".replace(", ", " ")
