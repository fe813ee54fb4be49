"""What a job looks at on every node before it loads anything: the node that differs from the others is named.

One rank a node gathers, small records travel; no process is started, since MPI is, and torch is not imported.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import tlt_hpc
from tlt_hpc.common.source import source_digest
from tlt_hpc.config import Config, UserError
from tlt_hpc.models.tokenizer import find_model

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "numpy", "mpi4py", "deepspeed", "transformers")
_DRIVER = Path("/proc/driver/nvidia")
ABSENT = "none"
_REMEDIES = {
    "source": "install the same version on all nodes, or start from a folder that they share",
    "mpi": "load the same modules on all nodes",
    "gpus": "leave that node out (sbatch --exclude=NODE), or ask for nodes of one kind (--constraint)",
    "run_folder": "set run.folder to a file system that all nodes share",
    "model": "copy the same model to all nodes, or set model.path to a folder that they share",
}
_REMEDY = "start all ranks from one environment that all nodes share"
_HARMLESS = ("driver",)
"""Facts in which nodes may differ: it is warned of."""


@dataclass(frozen=True)
class NodeFacts:
    """What a node has; a text each, so that two of them can be shown side by side."""

    python: str
    packages: str
    source: str
    """Version and digest of the package itself."""
    mpi: str
    gpus: str
    driver: str
    run_folder: str
    model: str


@dataclass(frozen=True)
class Record:
    """What a rank contributes: its node's facts where it is the node's first, and its own error where it has one."""

    hostname: str
    facts: NodeFacts | None
    error: str = ""


def check_nodes(world: World, config: Config, check: Callable[[], object] = lambda: None) -> None:
    """Refuse nodes that differ in what must not differ; collective, before anything is loaded.

    Args:
        check: what a node's first rank looks at besides; raises ValueError.

    Raises:
        UserError: on all ranks, with the node, both values and the remedy; or with the error that a rank met.
    """
    if world.local_rank:
        return _judge(world, Record(world.hostname, None))
    error = ""
    try:
        check()
    except ValueError as caught:
        error = str(caught)
    return _judge(world, Record(world.hostname, gather_facts(config, world), error))


def report_error(world: World, error: ValueError) -> None:
    """In the place of ``check_nodes`` on a rank that met an error before: tells it to all, so that none waits.

    Raises:
        UserError: always, on all ranks, with the error of the first rank that has one.
    """
    _judge(world, Record(world.hostname, None, str(error)))


def _judge(world: World, own: Record) -> None:
    records = world.allgather(own)
    refuse_errors(records)
    difference = find_difference({one.hostname: one.facts for one in records if one.facts is not None})
    if difference.refused:
        raise UserError(difference.refused)
    if difference.warned and world.rank == 0:
        logger.warning("%s", difference.warned)


def refuse_errors(records: Sequence[Record]) -> None:
    """Raise the first rank's error: as it stands where all who looked have it, else with its rank and node.

    Raises:
        UserError: there is one.
    """
    looked = [record for record in records if record.facts is not None or record.error]
    for rank, record in enumerate(records):
        if record.error:
            is_everywhere = all(other.error == record.error for other in looked)
            raise UserError(record.error if is_everywhere else f"rank {rank} on {record.hostname}: {record.error}")


@dataclass(frozen=True)
class Difference:
    """The first difference that a job is refused for, and the first that it is warned of; empty: none."""

    refused: str = ""
    warned: str = ""


def find_difference(nodes: Mapping[str, NodeFacts]) -> Difference:
    """What differs between nodes, in order of their ranks: the majority is right, of a draw the first."""
    found = {True: "", False: ""}
    for field in fields(NodeFacts):
        values = {hostname: str(vars(facts)[field.name]) for hostname, facts in nodes.items()}
        is_harmless = field.name in _HARMLESS
        if len(set(values.values())) > 1 and not found[is_harmless]:
            found[is_harmless] = _in_words(field.name, values)
    return Difference(found[False], found[True])


def _in_words(name: str, values: Mapping[str, str]) -> str:
    """One line: the odd nodes, their value, and what the others have."""
    usual = Counter(values.values()).most_common(1)[0][0]
    odd = next(value for value in values.values() if value != usual)
    hosts = [hostname for hostname, value in values.items() if value == odd]
    others = sum(value == usual for value in values.values())
    where = f"node {hosts[0]}" if len(hosts) == 1 else f"nodes {', '.join(hosts[:4])}{' ...' * (len(hosts) > 4)}"
    theirs, ours = _where_they_differ(odd, usual)
    more = len(values) - len(hosts) - others
    return (
        f"{where}: {name.replace('_', ' ')} {theirs}, where {others} other node{'s' * (others != 1)} "
        f"ha{'ve' if others != 1 else 's'} {ours}{f' ({more} more differ)' if more else ''}; "
        f"{_REMEDIES.get(name, _REMEDY)}"
    )


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Of two lists in words the entries that are not in both."""
    ones, others = one.split(", "), other.split(", ")
    mine, theirs = ([item for item in items if item not in rest] for items, rest in ((ones, others), (others, ones)))
    return ", ".join(mine) or one, ", ".join(theirs) or other


def gather_facts(config: Config, world: World) -> NodeFacts:
    """This node's facts."""
    return NodeFacts(
        python=platform.python_version(),
        packages=", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        source=f"tlt_hpc {tlt_hpc.__version__} ({source_digest()})",
        mpi=" ".join(world.library.split("\n")[0].split()),
        gpus=gpus_in_words(os.environ),
        driver=_driver(),
        run_folder=_of(lambda: "is there" if Path(config.run.folder).is_dir() else "is not there"),
        model=_of(lambda: model_digest(find_model(config.model.path))),
    )


def model_digest(folder: Path) -> str:
    """Of a model's config.json and tokenizer, and of the sizes of its files of weights, which are not read."""
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"):
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode() + (folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\0".encode())
    return digest.hexdigest()[:12]


def gpus_in_words(environment: Mapping[str, str]) -> str:
    """How many GPUs the job has on this node, of which models: as the driver's files and Slurm say."""
    files = sorted((_DRIVER / "gpus").glob("*/information"))
    models = {_model_of(path.read_text(encoding="utf-8")) for path in files}
    count = environment.get("SLURM_GPUS_ON_NODE") or str(len(files))
    return f"{count} x {' and '.join(sorted(models))}" if models else ABSENT


def _model_of(information: str) -> str:
    lines = (line.partition(":") for line in information.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "Model"), "GPU")


def _driver() -> str:
    """The version in ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...``."""
    path = _DRIVER / "version"
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), ABSENT)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def _of(read: Callable[[], str]) -> str:
    """What a node can read, or that it cannot: the others must not wait for it."""
    try:
        return read()
    except (ValueError, OSError) as error:
        return f"cannot be read: {error}".replace(", ", " ")
