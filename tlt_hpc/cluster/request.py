"""What a batch script requests of Slurm: by options given here, SBATCH_ variables and #SBATCH lines, in this order."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from tlt_hpc.cluster.slurm import seconds_of
from tlt_hpc.config import ConfigError

_GPU_RESOURCE = re.compile(r"(?:^|,)(?:gres/)?gpu(?::(?!\d+(?:$|[,(]))[^:,()]+)?(?::(\d+))?(?=$|[,(])")


@dataclass(frozen=True)
class SlurmRequest:
    """What is requested of Slurm; zeros and empty texts: nothing."""

    nodes: int = 1
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    memory_mb: int | None = None
    """Of a node; 0: all of it, None: the cluster's default."""
    partition: str = ""
    account: str = ""
    time: str = ""
    signal: str = ""
    requeue: bool | None = None
    """None: the cluster's default."""
    cores_per_rank: int = 1
    variables: tuple[str, ...] = ()
    """Those of sbatch that decide something of this."""
    arguments: tuple[str, ...] = ()
    """Of sbatch: the options given here, and the script; empty without a script."""

    @property
    def limit_seconds(self) -> float:
        """Seconds until the time limit; infinite if none is known here.

        Raises:
            SlurmError: it is not in Slurm's format.
        """
        return (seconds_of(self.time) if self.time else 0.0) or math.inf  # 0 requests no limit

    def source(self, variable: str) -> str:
        """What says so, to be named to the user: a variable of sbatch if it is set, else the script."""
        return variable if variable in self.variables else "the script"


_OPTIONS = ("nodes", "partition", "account", "time")
_VARIABLES = {
    "SBATCH_PARTITION": "partition", "SBATCH_ACCOUNT": "account", "SBATCH_TIMELIMIT": "time", "SBATCH_SIGNAL": "signal",
    "SBATCH_GRES": "gres", "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_REQUEUE": "requeue", "SBATCH_NO_REQUEUE": "no-requeue",
}  # fmt: skip
_NOT_READ = {
    "ntasks": "--ntasks-per-node",
    "ntasks-per-gpu": "--ntasks-per-node",
    "gpus": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "gpus-per-socket": "--gpus-per-node",
    "tres-per-node": "--gpus-per-node",
    "tres-per-task": "--gpus-per-node and --cpus-per-task",
    "mem-per-cpu": "--mem, of a node",
    "mem-per-gpu": "--mem, of a node",
}
"""sbatch's options by another measure than the node, and what to write in their place."""


def make_request(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> SlurmRequest:
    """What the script requests with the options that are given beside it.

    Raises:
        ConfigError: no such script, an invalid value, or options without a script.
    """
    given = [f"--{name}={value}" for name in _OPTIONS if (value := vars(options)[name]) is not None]
    if options.script is None:
        if given:
            raise ConfigError(f"{given[0]} without --script: give the batch script that asks for it")
        return SlurmRequest()
    words = sbatch_words(options.script)
    named = [f"--{name}={environment[key]}" for key, name in _VARIABLES.items() if environment.get(key)]
    typed = sbatch_options(given)
    variables = tuple(key for key, name in _VARIABLES.items() if environment.get(key) and name not in typed)
    request = request_of([*words, *named, *given])
    return replace(request, arguments=(*given, str(options.script)), variables=variables)


def sbatch_words(script: Path | None) -> list[str]:
    """The options in the ``#SBATCH`` lines of a batch script before its first command; none without a script.

    Raises:
        ConfigError: the file cannot be read, or a line of it.
    """
    if script is None:
        return []
    try:
        lines = script.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--script {script}: {error.strerror}; give one such as sbatch/train_qwen7b.sh") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--script {script} is not a text; give one such as sbatch/train_qwen7b.sh") from None
    head = takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), lines)
    asked = [line[7:] for line in head if line.startswith("#SBATCH")]
    try:
        return [word for line in asked for word in shlex.split(line, comments=True)]
    except ValueError:
        raise ConfigError(f"--script {script}: a quote in an #SBATCH line has no end; close or remove it") from None


_LONG = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec",
    "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "i": "input",
    "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""sbatch's short options."""


def sbatch_options(words: Sequence[str]) -> dict[str, str]:
    """Options of sbatch by their long names, the last of each name; an empty text for one without a value.

    Raises:
        ConfigError: a word belongs to no option, or begins the second part of a heterogeneous job.
    """
    found, last = dict[str, str](), ""
    for word in words:
        if word in ("hetjob", "packjob"):
            raise ConfigError(
                f"the script asks for a heterogeneous job ({word}); a run has nodes of one kind: leave it out"
            )
        short = re.fullmatch(r"-(\w)=?(.*)", word)
        if word.startswith("--"):
            last, _, value = word[2:].partition("=")
            found.pop(last, None)  # the order says whether --requeue or --no-requeue counts
            found[last] = value
        elif short and short[1] in _LONG:
            last = _LONG[short[1]]
            found[last] = short[2].strip()
        elif last and not word.startswith("-") and not found[last]:
            found[last] = word
        else:
            raise ConfigError(f"{word!r} is not understood as an option of sbatch; write --OPTION=VALUE")
    return found


def request_of(words: Sequence[str], source: str = "the script") -> SlurmRequest:
    """What options of sbatch, given by ``source``, request; the last of each name counts.

    Raises:
        ConfigError: an invalid value, or an option by another measure than the node.
    """
    asked = sbatch_options(words)
    for name, instead in _NOT_READ.items():
        if value := asked.get(name):
            raise ConfigError(f"{source} asks for --{name}={value}; write {instead} in its place")
    kinds = asked["gpus-per-node"].split(",") if asked.get("gpus-per-node") else []
    gpus = num_gpus(",".join(f"gpu:{kind}" for kind in kinds) or asked.get("gres", ""))
    requeue = [name == "requeue" for name in asked if name in ("requeue", "no-requeue")]
    return SlurmRequest(
        nodes=_number(asked, "nodes", "1"),
        ranks_per_node=_number(asked, "ntasks-per-node", "0") or gpus,
        gpus_per_node=gpus,
        memory_mb=megabytes(asked["mem"]) if "mem" in asked else None,
        partition=asked.get("partition", ""),
        account=asked.get("account", ""),
        time=asked.get("time", ""),
        signal=asked.get("signal", ""),
        requeue=requeue[-1] if requeue else None,
        cores_per_rank=_number(asked, "cpus-per-task", "1"),
    )


def _number(asked: Mapping[str, str], name: str, default: str) -> int:
    """A count of nodes or ranks; of a range such as ``2-4`` its lower end."""
    value = asked.get(name, default)
    try:
        return int(value.partition("-")[0])
    except ValueError:
        raise ConfigError(f"--{name}={value} is no number; write it as sbatch takes it") from None


def num_gpus(gres: str) -> int:
    """The number of GPUs among generic resources, such as ``gpu:a100:4(S:0-1),nvme:1`` or ``gpu:8``."""
    return sum(int(count or 1) for count in _GPU_RESOURCE.findall(gres))


def megabytes(text: str) -> int:
    """Megabytes of ``64G``, ``4000`` (megabytes) or ``0``, which requests all that a node has."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        return 0
    return int(match[1]) * {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}[match[2]] // 1024
