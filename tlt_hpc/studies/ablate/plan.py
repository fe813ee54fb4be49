"""Which ablation is asked for, new or resumed, checked before anything runs; and what its folder keeps of that."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_hpc.common.words import count
from tlt_hpc.config import (
    Config,
    ConfigError,
    UserError,
    load_config,
    parse_config,
    refuse_replicas,
    to_toml,
    without_side_effects,
)
from tlt_hpc.rollout.strategy import strategies_of
from tlt_hpc.storage.folder import make_folder, writing_beside

DEFAULT_STEPS = 30
MEANING = {
    "plain": "no speculation",
    "ngram": "n-grams alone",
    "frozen": "the drafter as it starts",
    "tail": "the drafter trained by idle ranks while others generate",
    "tail-random": "as tail, from random weights",
}
ARMS = tuple(MEANING)
"""In the order in which they run."""
WITHOUT_DRAFTER = ("plain", "ngram")
_DRAFTER_KEYS: dict[str, dict[str, Any]] = {
    "frozen": {"train": False, "schedule": "always"},
    "tail": {"train": True},
    "tail-random": {"train": True, "init": "random"},
}
_PLAN_FILE, _CONFIG_FILE, _ARM_FILE = "plan.json", "config.toml", "arm.json"
_FREE = {("run", "num_steps"), ("run", "folder"), ("run", "ranks")}


@dataclass(frozen=True)
class Ablation:
    """The runs that an ablation consists of, and where they are."""

    folder: Path
    config: Config
    """The job's own."""
    arms: tuple[str, ...]
    num_steps: int
    num_ranks: int

    def config_of(self, arm: str) -> Config:
        """The configuration of an arm's run: nothing differs but the arm, the length and the place."""
        tree = without_side_effects(self.config).model_dump()
        tree["run"] |= {"name": arm, "folder": str(self.folder), "num_steps": self.num_steps}
        tree["checkpoint"]["replay"] = False  # it would leave out updates of the drafter, which are what is compared
        tree["speculation"]["mode"] = arm if arm in WITHOUT_DRAFTER else "full"
        tree["drafter"] |= _DRAFTER_KEYS.get(arm, {})
        return parse_config(tree)


def add_ablate_options(command: argparse.ArgumentParser) -> None:
    """The options beside the configuration and its overrides."""
    add = command.add_argument
    add("--steps", type=int, metavar="N", help=f"steps of each arm (default {DEFAULT_STEPS})")
    add("--arms", metavar="ARM,...", help=f"of {','.join(ARMS)} (default: all that the job can have but tail-random)")
    add("--resume", type=Path, metavar="FOLDER", help="resume this ablation; --steps and --arms may add to it")


def plan_ablation(config: Config, options: argparse.Namespace, num_ranks: int) -> Ablation:
    """The ablation that the options ask for; writes nothing.

    Raises:
        UserError: an option that makes no sense, an arm that the job cannot have, or nothing comparable to resume.
    """
    refuse_replicas(config, "tlt ablate")
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps {options.steps} compares nothing; use 1 or more")
    asked = None if options.arms is None else options.arms.split(",")
    if unknown := [name for name in asked or () if name not in ARMS]:
        raise UserError(f"--arms {options.arms}: there is no arm {unknown[0]!r}; use {', '.join(ARMS)}")
    if options.resume is not None:
        return _resumed(config, options.resume, options.steps, asked or [], num_ranks)
    arms = in_order(asked) if asked else possible_arms(config)
    check_arms(config, arms)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.run.folder).resolve() / f"{config.run.name}-ablate-{stamp}"
    return Ablation(folder, config, arms, options.steps or DEFAULT_STEPS, num_ranks)


def in_order(arms: Sequence[str]) -> tuple[str, ...]:
    """Arms, each once, in the order in which they run."""
    return tuple(arm for arm in ARMS if arm in arms)


def possible_arms(config: Config) -> tuple[str, ...]:
    """What is run if no arms were asked for: each of them that shows something on this job."""
    return tuple(arm for arm in ARMS if arm != "tail-random" and _why_not(config, arm) is None)


def check_arms(config: Config, arms: Sequence[str]) -> None:
    """Refuse an arm that the job cannot have.

    Raises:
        ConfigError: with the arm and the remedy.
    """
    for arm in arms:
        if (reason := _why_not(config, arm)) is not None:
            raise ConfigError(f"arm {arm!r}: {reason}")


def _why_not(config: Config, arm: str) -> str | None:
    """What keeps the job from having an arm, with the remedy."""
    strategies = strategies_of("full", config.speculation.strategies)
    if arm == "ngram" and not any(strategy.source == "ngram" for strategy in strategies):
        return "speculation.strategies has no n-grams; add e.g. 'ngram-4' or leave the arm out of --arms"
    if arm in WITHOUT_DRAFTER:
        return None
    if not any(strategy.has_drafter for strategy in strategies):
        return (
            "no strategy of the job asks a learned drafter; add e.g. 'drafter-4' to speculation.strategies, or use "
            "--arms plain,ngram"
        )
    if arm == "frozen" and config.drafter.init == "random":
        return (
            "drafter.init = 'random' leaves nothing to freeze; run tlt warmup and give its drafter as drafter.init, "
            "or leave the arm out of --arms"
        )
    return None


def _resumed(config: Config, place: Path, steps: int | None, asked: Sequence[str], num_ranks: int) -> Ablation:
    """The ablation in a folder, with what the options add to it.

    Raises:
        UserError: there is none, or what is asked for is not comparable with what is there.
    """
    folder = place.resolve()
    if not (folder / _PLAN_FILE).is_file():
        raise UserError(f"--resume {place}: no {_PLAN_FILE} there; give the folder of an earlier tlt ablate")
    old = json.loads((folder / _PLAN_FILE).read_text())
    if unknown := [arm for arm in old["arms"] if arm not in ARMS]:
        raise UserError(f"--resume {place}: this version has no arm {unknown[0]!r}; resume it with tlt_hpc 0.1")
    _check_same(load_config(folder / _CONFIG_FILE), config, folder)
    if num_ranks != old["num_ranks"]:
        raise ConfigError(
            f"{folder} was begun on {count(old['num_ranks'], 'rank')}, now {num_ranks}; "
            f"use run.ranks={old['num_ranks']}"
        )
    num_steps = steps or old["num_steps"]
    if num_steps < old["num_steps"]:
        raise ConfigError(
            f"--steps {num_steps}: {folder} has arms of {count(old['num_steps'], 'step')}; give as many or more"
        )
    arms = in_order([*old["arms"], *asked])
    check_arms(config, arms)
    return Ablation(folder, config, arms, num_steps, num_ranks)


def _check_same(old: Config, new: Config, folder: Path) -> None:
    """Refuse another job than the one that was begun: its arms would not be comparable.

    Raises:
        ConfigError: with the first key that differs.
    """
    for section, values in old.model_dump().items():
        for name, value in values.items():
            now = new.model_dump()[section][name]
            if value != now and (section, name) not in _FREE:
                raise ConfigError(
                    f"{folder} was begun with {section}.{name} = {value!r}, now {now!r}; give the same file and "
                    "overrides, or start another ablation without --resume"
                )


def write_plan(ablation: Ablation) -> None:
    """Keep what the ablation is, for ``--resume``.

    Raises:
        WriteError: the disk refused.
    """
    make_folder(ablation.folder)
    kept = {"arms": ablation.arms, "num_steps": ablation.num_steps, "num_ranks": ablation.num_ranks}
    with writing_beside(ablation.folder / _CONFIG_FILE) as part:
        part.write_text(to_toml(ablation.config), encoding="utf-8")
    with writing_beside(ablation.folder / _PLAN_FILE) as part:
        part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def mark_done(ablation: Ablation, arm: str, policy_sha256: str) -> None:
    """Note that an arm has taken all its steps, and the weights that it came to.

    Raises:
        WriteError: the disk refused.
    """
    with writing_beside(ablation.folder / arm / _ARM_FILE) as part:
        part.write_text(json.dumps({"num_steps": ablation.num_steps, "policy_sha256": policy_sha256}) + "\n")


def digest_of(ablation: Ablation, arm: str) -> str | None:
    """Digest of the policy that an arm came to; None if it has not taken all steps yet."""
    path = ablation.folder / arm / _ARM_FILE
    if not path.is_file():
        return None
    noted = json.loads(path.read_text())
    return str(noted["policy_sha256"]) if noted["num_steps"] == ablation.num_steps else None


def describe(ablation: Ablation) -> str:
    """The plan in words, then the job's configuration as TOML."""
    head = (
        f"ablation    {ablation.folder}: {count(ablation.num_steps, 'step')} of each arm on "
        f"{count(ablation.num_ranks, 'rank')}, seed {ablation.config.run.seed}"
    )
    arms = (f"{arm:11} {MEANING[arm]}" for arm in ablation.arms)
    return "\n".join([head, *arms, "", to_toml(ablation.config)])
