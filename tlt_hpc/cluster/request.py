"""What a job asks of Slurm: the options of sbatch that a script, its variables or a user give, read in one place."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from tlt_hpc.cluster.slurm import parse_slurm_time
from tlt_hpc.config import ConfigError

_GPU_RESOURCE = re.compile(r"(?:^|,)(?:gres/)?gpu(?::(?!\d+(?:$|[,(]))[^:,()]+)?(?::(\d+))?(?=$|[,(])")
_READ_FROM_VARIABLES = (
    "partition", "account", "time", "signal", "gres", "gpus-per-node", "mem", "requeue", "no-requeue"
)  # fmt: skip
_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX"}
"""sbatch's variables (``SBATCH_...``) that are not called after their option."""
OPPOSITE = {"requeue": "no-requeue", "no-requeue": "requeue"}
COUNTS = ("nodes", "ntasks-per-node", "cpus-per-task")
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
_LONG = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus", "H": "hold",
    "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec",
    "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "i": "input",
    "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""sbatch's short options."""


@dataclass(frozen=True)
class SlurmRequest:
    """What a job asks of Slurm; zeros and empty texts: nothing."""

    options: dict[str, str] = field(default_factory=dict)
    """Of sbatch, by their long names; an empty text for one without a value."""
    variables: tuple[str, ...] = ()
    """Those of sbatch that decide something of this."""
    arguments: tuple[str, ...] = ()
    """Of sbatch for a script: the options given beside it, and its path; empty without a script."""

    @classmethod
    def of_script(
        cls, script: Path, given: Mapping[str, str] | None = None, environment: Mapping[str, str] = os.environ
    ) -> SlurmRequest:
        """What sbatch would ask for with a script: by options ``given`` to it, its variables and the script's lines.

        Raises:
            ConfigError: no such script, or an invalid value.
        """
        typed = given or {}
        named = {name: value for name in _READ_FROM_VARIABLES if (value := environment.get(sbatch_variable_name(name)))}
        words = [word for part in (read_script_options(script), named, typed) for word in sbatch_arguments(part)]
        variables = tuple(sbatch_variable_name(name) for name in named if name not in typed)
        return cls(parse_sbatch_options(words), variables, (*sbatch_arguments(typed), str(script))).check_options()

    def option_value(self, option: str) -> str:
        """The value of an option of sbatch; empty where it is not given."""
        return self.options.get(option, "")

    def check_options(self, source: str = "the script") -> SlurmRequest:
        """Refuse what ``source`` must not ask for; returns this request.

        Raises:
            ConfigError: a count is no number, or an option has another measure than the node.
        """
        for name, instead in _NOT_READ.items():
            if value := self.option_value(name):
                raise ConfigError(f"{source} asks for --{name}={value}; write {instead} in its place")
        for name in COUNTS:
            self._count(name)
        return self

    def _count(self, name: str, default: int = 1) -> int:
        """A count of nodes, ranks or cores; of a range such as ``2-4`` its lower end."""
        value = self.options.get(name)
        try:
            return default if value is None else int(value.partition("-")[0])
        except ValueError:
            raise ConfigError(f"--{name}={value} is no number; write it as sbatch takes it") from None

    @property
    def nodes(self) -> int:
        return self._count("nodes")

    @property
    def gpus_per_node(self) -> int:
        kinds = ",".join(f"gpu:{kind}" for kind in self.option_value("gpus-per-node").split(",") if kind)
        return num_gpus(kinds or self.option_value("gres"))

    @property
    def ranks_per_node(self) -> int:
        """As asked for, else one for each GPU; 0: neither is asked for."""
        return self._count("ntasks-per-node", 0) or self.gpus_per_node

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes, one of each unless something else is asked for."""
        return self.nodes * (self.ranks_per_node or 1)

    @property
    def cores_per_rank(self) -> int:
        return self._count("cpus-per-task")

    @property
    def memory_mb(self) -> int | None:
        """Of a node; 0: all of it, None: the cluster's default."""
        return megabytes(self.options["mem"]) if "mem" in self.options else None

    @property
    def wants_requeue(self) -> bool | None:
        """None: the cluster's default."""
        return next((name == "requeue" for name in OPPOSITE if name in self.options), None)

    @property
    def limit_seconds(self) -> float:
        """Seconds until the time limit; infinite if none is known here.

        Raises:
            SlurmError: it is not in Slurm's format.
        """
        return parse_slurm_time(self.option_value("time") or "0") or math.inf  # 0 requests no limit

    def option_source(self, option: str) -> str:
        """What decides about an option, to be named to the user: a variable of sbatch if it is set, else the script."""
        return variable if (variable := sbatch_variable_name(option)) in self.variables else "the script"


def sbatch_variable_name(option: str) -> str:
    """The variable with which sbatch takes an option."""
    return f"SBATCH_{_VARIABLES.get(option, option.upper().replace('-', '_'))}"


def sbatch_arguments(options: Mapping[str, str]) -> list[str]:
    """Options as they are typed."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def read_script_options(script: Path) -> dict[str, str]:
    """The options in the ``#SBATCH`` lines of a batch script before its first command.

    Raises:
        ConfigError: the file cannot be read, or a line of it.
    """
    try:
        lines = script.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--script {script}: {error.strerror}; give one such as sbatch/train_qwen7b.sh") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--script {script} is not a text; give one such as sbatch/train_qwen7b.sh") from None
    head = takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), lines)
    asked = [line[7:] for line in head if line.startswith("#SBATCH")]
    try:
        words = [word for line in asked for word in shlex.split(line, comments=True)]
    except ValueError:
        raise ConfigError(f"--script {script}: a quote in an #SBATCH line has no end; close or remove it") from None
    return parse_sbatch_options(words)


def parse_sbatch_options(words: Sequence[str]) -> dict[str, str]:
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
            found.pop(OPPOSITE.get(last, ""), None)
            found[last] = value
        elif short and short[1] in _LONG:
            last = _LONG[short[1]]
            found[last] = short[2].strip()
        elif last and not word.startswith("-") and not found[last]:
            found[last] = word
        else:
            raise ConfigError(f"{word!r} is not understood as an option of sbatch; write --OPTION=VALUE")
    return found


def num_gpus(gres: str) -> int:
    """The number of GPUs among generic resources, such as ``gpu:a100:4(S:0-1),nvme:1`` or ``gpu:8``."""
    return sum(int(count or 1) for count in _GPU_RESOURCE.findall(gres))


def megabytes(text: str) -> int:
    """Megabytes of ``64G``, ``4000`` (megabytes) or ``0``, which requests all that a node has."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if match is None:
        return 0
    return int(match[1]) * {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}[match[2]] // 1024
