"""The members of a submission: one run for each point of a grid, or for each line of a list. Knows no Slurm."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.config import Config, ConfigError, load_config

_VALUE = re.compile(r"""(?:^|,)((?:"[^"]*"|'[^']*'|\[(?:[^][]|\[[^]]*\])*\]|\{[^}]*\}|[^,])*)""")


@dataclass(frozen=True)
class SweepMember:
    """One run: its configuration, and the overrides that lead to it."""

    config: Config
    overrides: tuple[str, ...]
    own: tuple[str, ...]
    """The overrides that it does not share with all members."""

    @property
    def name(self) -> str:
        return self.config.run.name


def make_members(config: str, shared: Sequence[str], points: Iterable[Sequence[str]]) -> list[SweepMember]:
    """A run for every point, which is a list of overrides; each is named after its own unless it says ``run.name``.

    Raises:
        ConfigError: a member's configuration is wrong, or two members would write to one folder.
    """
    base = load_config(config, shared).run.name
    members = []
    for own in points:
        named = own and not any(override.startswith("run.name=") for override in own)
        name = (f"run.name={'-'.join([base, *map(label, own)])}",) if named else ()
        overrides = (*shared, *own, *name)
        members.append(SweepMember(load_config(config, overrides), overrides, tuple(own)))
    names = [member.name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two members have run.name = {twice!r}; remove what stands twice, or give each a run.name")
    return members


def grid(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of what ``section.key=A,B`` name; one point without overrides where there are none.

    Raises:
        ConfigError: one is not of that form.
    """
    return list(itertools.product(*map(expand, sweeps)))


def read_list(path: Path) -> list[tuple[str, ...]]:
    """A point for every line of overrides, as a shell splits it; what follows ``#`` is a comment.

    Raises:
        ConfigError: the file cannot be read or names no run.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        points = [tuple(shlex.split(line, comments=True)) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--list {path}: {error}; give a file with the overrides of a run on each line") from None
    if not any(points):
        raise ConfigError(f"--list {path} names no run; write the overrides of one on each line, e.g. run.seed=1")
    return [point for point in points if point]


def expand(sweep: str) -> list[str]:
    """The overrides that ``section.key=A,B`` stands for; commas within brackets or quotes part nothing.

    Raises:
        ConfigError: it is not of that form.
    """
    key, separator, text = sweep.partition("=")
    values = _VALUE.findall(text)
    if not separator or not all(values):
        raise ConfigError(f"--sweep {sweep!r} is not of the form section.key=A,B, e.g. run.seed=0,1,2")
    return [f"{key}={value}" for value in values]


def label(override: str) -> str:
    """A member's part of its run's name, e.g. ``seed0``."""
    key, _, value = override.partition("=")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", key.rpartition(".")[2] + value).strip("_")
