"""What a batch script requests of Slurm: by options given here, SBATCH_ variables and #SBATCH lines, in this order."""

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

_GPU_RESOURCE = re.compile(r"(?:^|,)gpu(?::(?!\d+(?:$|[,(]))[^:,()]+)?(?::(\d+))?(?=$|[,(])")


@dataclass(frozen=True)
class SlurmRequest:
    """What is requested of Slurm; zeros and empty texts: nothing."""

    nodes: int = 1
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    memory_mb: int = 0
    partition: str = ""
    account: str = ""
    time: str = ""
    signal: str = ""
    requeue: bool | None = None
    """None: the cluster's default."""
    arguments: tuple[str, ...] = ()
    """Of sbatch: the options given here, and the script; empty without a script."""


_OPTIONS = ("nodes", "partition", "account", "time")
_VARIABLES = {"SBATCH_PARTITION": "partition", "SBATCH_ACCOUNT": "account"}
_NOT_READ = {
    "ntasks": "--ntasks-per-node",
    "gpus": "--gpus-per-node",
    "gpus_per_task": "--gpus-per-node",
    "mem_per_cpu": "--mem, of a node",
    "mem_per_gpu": "--mem, of a node",
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
    return replace(request_of([*words, *named, *given]), arguments=(*given, str(options.script)))


def sbatch_words(script: Path | None) -> list[str]:
    """The options in the ``#SBATCH`` lines of a batch script; none without a script.

    Raises:
        ConfigError: the file cannot be read.
    """
    if script is None:
        return []
    try:
        lines = script.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--script {script}: {error.strerror}; give one such as sbatch/train_qwen7b.sh") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--script {script} is not a text; give one such as sbatch/train_qwen7b.sh") from None
    return [word for line in lines if line.startswith("#SBATCH") for word in shlex.split(line[7:], comments=True)]


_LONG = {
    "A": "account", "C": "constraint", "G": "gpus", "J": "job-name", "L": "licenses", "N": "nodes",
    "c": "cpus-per-task", "d": "dependency", "e": "error", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""sbatch's short options, which all take a value."""


def sbatch_options(script: Path | None) -> dict[str, str]:
    """The options of ``sbatch_words`` by their long names; an empty text for one without a value.

    Raises:
        ConfigError: the file cannot be read, or a word belongs to no option.
    """
    found, last = dict[str, str](), ""
    for word in sbatch_words(script):
        short = re.fullmatch(r"-(\w)=?(.*)", word)
        if word.startswith("--"):
            last, _, value = word[2:].partition("=")
            found[last] = value
        elif short and short[1] in _LONG:
            last = _LONG[short[1]]
            found[last] = short[2]
        elif last and not word.startswith("-") and not found[last]:
            found[last] = word
        else:
            raise ConfigError(f"--script {script}: {word!r} in an #SBATCH line is not understood; write --OPTION=VALUE")
    return found


class _Parser(argparse.ArgumentParser):
    """Raises a ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"the script's #SBATCH lines: {message}; write them as sbatch takes them")


def request_of(words: Sequence[str]) -> SlurmRequest:
    """What options of sbatch request; the last of each name counts.

    Raises:
        ConfigError: an invalid value, or an option by another measure than the node.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=lambda text: int(text.partition("-")[0]), default=1)
    parser.add_argument("--ntasks-per-node", type=int, default=0)
    for names in (
        *(("--mem",), ("--gpus-per-node",), ("--gres",), ("--signal",), ("-p", "--partition"), ("-A", "--account")),
        *(("-t", "--time"), ("-n", "--ntasks"), ("-G", "--gpus"), ("--gpus-per-task",)),
        *(("--mem-per-cpu",), ("--mem-per-gpu",)),
    ):
        parser.add_argument(*names, default="")
    parser.add_argument("--requeue", dest="requeue", action="store_const", const=True)
    parser.add_argument("--no-requeue", dest="requeue", action="store_const", const=False)
    asked = parser.parse_known_args(words)[0]
    for name, instead in _NOT_READ.items():
        if value := vars(asked)[name]:
            raise ConfigError(f"the script asks for --{name.replace('_', '-')}={value}; preflight reads {instead}")
    gpus = num_gpus((asked.gpus_per_node and f"gpu:{asked.gpus_per_node}") or asked.gres)
    return SlurmRequest(
        nodes=asked.nodes,
        ranks_per_node=asked.ntasks_per_node or gpus,
        gpus_per_node=gpus,
        memory_mb=megabytes(asked.mem),
        partition=asked.partition,
        account=asked.account,
        time=asked.time,
        signal=asked.signal,
        requeue=asked.requeue,
    )


def num_gpus(gres: str) -> int:
    """The number of GPUs among generic resources, such as ``gpu:a100:4(S:0-1),nvme:1`` or ``gpu:8``."""
    return sum(int(count or 1) for count in _GPU_RESOURCE.findall(gres))


def megabytes(text: str) -> int:
    """Megabytes of ``64G``, ``4000`` (megabytes) or ``0``, which requests all that a node has."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        return 0
    return int(match[1]) * {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}[match[2]] // 1024
