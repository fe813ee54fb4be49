"""Which runs an ablation consists of; checked before anything starts. Imports nothing heavy."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import (
    Config,
    ConfigError,
    UserError,
    config_for_comparison,
    load_saved_config,
    parse_config,
    to_toml,
)
from tlt_hpc.plan.plan_options import parse_positive_integer
from tlt_hpc.rollout.strategy import parse_strategies
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_environments

ARMS = {
    "plain": "no speculation",
    "ngram": "n-grams alone",
    "frozen": "the drafter as it starts",
    "tail": "the drafter trained by idle ranks while others generate",
    "ahead": "the drafter as it starts; idle ranks generate the next step's drafts ahead",
    "ahead-tail": "idle ranks train the drafter or generate ahead, as the run decides from tail to tail",
}
"""Arms in the order in which they run, and what they are."""
WITHOUT_DRAFTER = ("plain", "ngram")
_AHEAD = ("ahead", "ahead-tail")
_MODES = {"frozen": "frozen", "tail": "full", "ahead": "frozen", "ahead-tail": "full"}
"""Modes of speculation of the arms with a drafter."""
_MAY_CHANGE = ("run.num_steps", "run.folder")


@dataclass(frozen=True)
class Ablation:
    """The runs that an ablation consists of."""

    config: Config
    """The job's own."""
    arms: tuple[str, ...]
    num_steps: int

    @property
    def folder(self) -> Path:
        """The folder of all arms, each of which is a run in it."""
        return Path(self.config.run.folder) / f"{self.config.run.name}-ablate"

    def config_of(self, arm: str) -> Config:
        """The configuration of an arm's run: only the arm, the length and the folder differ.

        Raises:
            ConfigError: the arm is one that the job cannot have.
        """
        tree = config_for_comparison(self.config).model_dump()
        tree["run"] |= {"name": arm, "folder": str(self.folder), "num_steps": self.num_steps}
        tree["speculation"] |= {"mode": _MODES.get(arm, arm), "ahead": "on" if arm in _AHEAD else "off"}
        return parse_config(tree)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options beside the configuration and its overrides."""
    command.add_argument(
        "--steps", type=parse_positive_integer, default=30, metavar="N", help="steps of each arm (default 30)"
    )
    arms = f"of {','.join(ARMS)} (default: all that the job can have)"
    command.add_argument("--arms", metavar="ARM,...", help=arms)


def plan_ablation(config: Config, options: argparse.Namespace) -> Ablation:
    """The ablation that the options ask for; writes nothing.

    Raises:
        UserError: an option that makes no sense, an arm that the job cannot have, or other settings than those of the
            arms that are there already.
    """
    if config.rollout.tensor_parallel > 1:
        raise UserError(
            f"rollout.tensor_parallel = {config.rollout.tensor_parallel}: tlt ablate decodes with a whole model on "
            "every rank; if it fits, give rollout.tensor_parallel=1"
        )
    if options.arms is None:
        arms = tuple(arm for arm in ARMS if not _reason_against_arm(config, arm))
    else:
        asked = options.arms.split(",")
        if unknown := [name for name in asked if name not in ARMS]:
            raise UserError(f"--arms {options.arms}: there is no arm {unknown[0]!r}; use {', '.join(ARMS)}")
        arms = tuple(arm for arm in ARMS if arm in asked)
    ablation = Ablation(config, arms, options.steps)
    for arm in arms:
        if obstacle := _reason_against_arm(config, arm):
            raise ConfigError(f"arm {arm!r}: {obstacle}")
        _check_same_settings(ablation.config_of(arm))
    return ablation


def _reason_against_arm(config: Config, arm: str) -> str:
    """The reason why the job cannot have an arm, with the remedy; empty if it can."""
    strategies = parse_strategies("full", config.speculation.strategies)
    if arm == "ngram" and not any(strategy.source == "ngram" for strategy in strategies):
        return "speculation.strategies has no n-grams; add e.g. 'ngram-4' or leave the arm out of --arms"
    if arm in WITHOUT_DRAFTER:
        return ""
    if not any(strategy.has_drafter for strategy in strategies):
        return "no strategy uses the drafter; add e.g. 'drafter-4' to speculation.strategies, or use --arms plain,ngram"
    if arm in ("frozen", "ahead") and config.drafter.init == "random":
        return "drafter.init = 'random' leaves nothing to freeze; set it to a drafter of tlt warmup or omit the arm"
    return ""


def check_ranks(ablation: Ablation, num_ranks: int) -> None:
    """Refuse to resume an ablation on another number of ranks: its arms would not be comparable.

    Raises:
        ConfigError: names the first arm that was begun on another number.
    """
    for arm in ablation.arms:
        folder = RunFolder(ablation.folder / arm)
        starts, _ = read_environments(folder.environment)
        begun = sum(host.num_ranks for host in starts[0].hosts) if starts else num_ranks
        if begun != num_ranks:
            raise ConfigError(
                f"{folder.path} was begun on {format_count(begun, 'rank')}, now {num_ranks}; start {begun}, or give "
                "another run.name"
            )


def _check_same_settings(config: Config) -> None:
    """Refuse to resume an arm with other settings: it would not be comparable.

    Raises:
        ConfigError: names the first key that differs.
    """
    saved = RunFolder(config.folder).config
    if not saved.is_file():
        return
    old, new = _flatten_config(load_saved_config(saved)), _flatten_config(config)
    if old["run.num_steps"] > new["run.num_steps"]:
        raise ConfigError(f"{saved} is of {old['run.num_steps']} steps; give --steps {old['run.num_steps']} or more")
    if changed := [key for key, value in old.items() if value != new[key] and key not in _MAY_CHANGE]:
        key = changed[0]
        raise ConfigError(
            f"{saved} has {key} = {old[key]!r}, now {new[key]!r}; use the same file and overrides, or another run.name"
        )


def _flatten_config(config: Config) -> dict[str, Any]:
    tree = config.model_dump()
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}


def describe(ablation: Ablation, num_ranks: int) -> str:
    """The plan in words, then the job's configuration as TOML."""
    head = (
        f"ablation    {ablation.folder}: {format_count(ablation.num_steps, 'step')} of each arm on "
        f"{format_count(num_ranks, 'rank')}, seed {ablation.config.run.seed}"
    )
    arms = (f"{arm:11} {ARMS[arm]}" for arm in ablation.arms)
    return "\n".join([head, *arms, "", to_toml(ablation.config)])
