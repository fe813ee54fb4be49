"""The arms of an ablation: what differs between their runs, and which of them a job can have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_hpc.config import Config, ConfigError, parse_config, without_side_effects
from tlt_hpc.drafting.tail import IN_TAIL, TailTraining
from tlt_hpc.rollout.strategy import strategies_of
from tlt_hpc.studies.ablate.ablate_options import ARMS, ArmName
from tlt_hpc.studies.ablate.serial import ControlTraining, SerialTraining

MEANING: Mapping[ArmName, str] = {
    "plain": "no speculation",
    "ngram": "n-grams alone",
    "frozen": "the drafter as it starts",
    "frozen-tv": "the drafter as a warm-up with the total-variation loss leaves it",
    "serial": "the drafter trained by all ranks after every rollout, in time of its own",
    "tail": "the drafter trained by idle ranks while others generate",
    "control": "the drafter given the tail's updates, step by step, on the first step's rollouts",
    "tail-random": "as tail, from random weights",
}
WITHOUT_DRAFTER: tuple[ArmName, ...] = ("plain", "ngram")
_FROZEN = {"train": False, "schedule": "always"}


def possible_arms(config: Config) -> tuple[ArmName, ...]:
    """What is run where no arms were asked for: each of them that shows something on this job."""
    return tuple(arm for arm in ARMS if arm != "tail-random" and why_not(config, arm) is None)


def check_arms(config: Config, arms: tuple[ArmName, ...]) -> None:
    """Refuse an arm that the job cannot have.

    Raises:
        ConfigError: with the arm and the remedy.
    """
    for arm in arms:
        reason = why_not(config, arm)
        if reason is not None:
            raise ConfigError(f"arm {arm!r}: {reason}")


def why_not(config: Config, arm: ArmName) -> str | None:
    """What keeps the job from having an arm, with the remedy; None where nothing does."""
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


def config_of(config: Config, arm: ArmName, num_steps: int, folder: Path, tv_drafter: str) -> Config:
    """The configuration of one arm's run in ``folder``: nothing differs but the arm, the length and the place."""
    tree = without_side_effects(config).model_dump()
    tree["run"] |= {"name": arm, "folder": str(folder), "num_steps": num_steps}
    tree["checkpoint"]["replay"] = False  # it would leave out updates of the drafter, which are what is compared
    tree["speculation"]["mode"] = arm if arm in WITHOUT_DRAFTER else "full"
    tree["drafter"] |= _drafter_keys(arm, tv_drafter)
    return parse_config(tree)


def _drafter_keys(arm: ArmName, tv_drafter: str) -> dict[str, Any]:
    keys: dict[ArmName, dict[str, Any]] = {
        "plain": {},
        "ngram": {},
        "frozen": _FROZEN,
        "frozen-tv": {**_FROZEN, "init": tv_drafter},
        "serial": {"train": True},
        "tail": {"train": True},
        # the tail's log says how many updates a step takes, none where its schedule had it rest; the first step's
        # features stay with the run, so they are not on a node's disk
        "control": {"train": True, "schedule": "always", "cache_folder": ""},
        "tail-random": {"train": True, "init": "random"},
    }
    return keys[arm]


def training_of(arm: ArmName, folder: Path) -> TailTraining:
    """How the drafter of an arm in ``folder`` is trained."""
    if arm == "control":
        return ControlTraining(folder / "tail")
    return SerialTraining() if arm == "serial" else IN_TAIL
