"""Which ablation is asked for, new or resumed, checked before anything runs; and what its folder keeps of that."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.common.words import count
from tlt_hpc.config import Config, ConfigError, UserError, load_config, refuse_replicas, to_toml
from tlt_hpc.storage.folder import make_folder, writing_beside
from tlt_hpc.studies.ablate.ablate_options import ARMS, AblateOptions, ArmName
from tlt_hpc.studies.ablate.arms import MEANING, check_arms, config_of, possible_arms

DEFAULT_STEPS = 30
TV_RUN = "tv"
"""Name of the run whose warm-up makes the drafter of ``frozen-tv``."""
_PLAN_FILE, _CONFIG_FILE, _ARM_FILE = "plan.json", "config.toml", "arm.json"
_FREE = {("run", "num_steps"), ("run", "folder"), ("run", "ranks")}


@dataclass(frozen=True)
class Ablation:
    """The runs that an ablation consists of, and where they are."""

    folder: Path
    config: Config
    """The job's own."""
    arms: tuple[ArmName, ...]
    num_steps: int
    num_ranks: int
    tv_drafter: str
    """Where the drafter of ``frozen-tv`` was to be taken from; empty: from a warm-up in the ablation's folder."""

    @property
    def tv_config(self) -> Config:
        """The job whose warm-up makes the drafter of ``frozen-tv``."""
        run = self.config.run.model_copy(update={"name": TV_RUN, "folder": str(self.folder)})
        drafter = self.config.drafter.model_copy(update={"loss": "total-variation"})
        return self.config.model_copy(update={"run": run, "drafter": drafter})

    @property
    def tv_folder(self) -> str:
        """The drafter that ``frozen-tv`` starts from."""
        return self.tv_drafter or str(self.folder / f"{TV_RUN}-warmup" / "drafter")

    def config_of(self, arm: ArmName) -> Config:
        """The configuration of an arm's run."""
        return config_of(self.config, arm, self.num_steps, self.folder, self.tv_folder)


def plan_ablation(config: Config, options: AblateOptions, num_ranks: int) -> Ablation:
    """The ablation that the options ask for; writes nothing.

    Raises:
        UserError: an arm that the job cannot have, or an ablation to resume that is none or another one.
    """
    refuse_replicas(config, "tlt ablate")
    if options.resume is not None:
        return resumed(config, options, num_ranks)
    arms = options.arms or possible_arms(config)
    check_arms(config, arms)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.run.folder).resolve() / f"{config.run.name}-ablate-{stamp}"
    tv_drafter = "" if options.tv_drafter is None else str(Path(options.tv_drafter).resolve())
    return Ablation(folder, config, arms, options.num_steps or DEFAULT_STEPS, num_ranks, tv_drafter)


def resumed(config: Config, options: AblateOptions, num_ranks: int) -> Ablation:
    """The ablation in a folder, with what the options add to it.

    Raises:
        UserError: there is none, or what is asked for is not comparable with what is there.
    """
    assert options.resume is not None
    folder = options.resume.resolve()
    if not (folder / _PLAN_FILE).is_file():
        raise UserError(f"--resume {options.resume}: no {_PLAN_FILE} there; give the folder of an earlier tlt ablate")
    old = json.loads((folder / _PLAN_FILE).read_text())
    check_same(load_config(folder / _CONFIG_FILE), config, folder)
    if num_ranks != old["num_ranks"]:
        raise ConfigError(
            f"{folder} was begun on {count(old['num_ranks'], 'rank')}, now {num_ranks}; "
            f"use run.ranks={old['num_ranks']}"
        )
    num_steps = options.num_steps or old["num_steps"]
    if num_steps < old["num_steps"]:
        raise ConfigError(
            f"--steps {num_steps}: {folder} has arms of {count(old['num_steps'], 'step')}; give as many or more"
        )
    given = None if options.tv_drafter is None else str(Path(options.tv_drafter).resolve())
    if given not in (None, old["tv_drafter"]):
        raise ConfigError(f"--tv-drafter {options.tv_drafter}: {folder} was begun without it; leave it out")
    arms = tuple(arm for arm in ARMS if arm in {*old["arms"], *(options.arms or ())})
    check_arms(config, arms)
    return Ablation(folder, config, arms, num_steps, num_ranks, old["tv_drafter"])


def check_same(old: Config, new: Config, folder: Path) -> None:
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
    kept = {
        "arms": ablation.arms,
        "num_steps": ablation.num_steps,
        "num_ranks": ablation.num_ranks,
        "tv_drafter": ablation.tv_drafter,
    }
    with writing_beside(ablation.folder / _CONFIG_FILE) as part:
        part.write_text(to_toml(ablation.config), encoding="utf-8")
    with writing_beside(ablation.folder / _PLAN_FILE) as part:
        part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def mark_done(ablation: Ablation, arm: ArmName, policy_sha256: str) -> None:
    """Note that an arm has taken all its steps, and the weights that it came to.

    Raises:
        WriteError: the disk refused.
    """
    with writing_beside(ablation.folder / arm / _ARM_FILE) as part:
        part.write_text(json.dumps({"num_steps": ablation.num_steps, "policy_sha256": policy_sha256}) + "\n")


def digest_of(ablation: Ablation, arm: ArmName) -> str | None:
    """Digest of the policy that an arm came to; None where it has not taken all steps yet."""
    path = ablation.folder / arm / _ARM_FILE
    if not path.is_file():
        return None
    noted = json.loads(path.read_text())
    return str(noted["policy_sha256"]) if noted["num_steps"] == ablation.num_steps else None


def describe(ablation: Ablation) -> str:
    """The plan in words, then the job's configuration as TOML."""
    lines = [
        f"ablation    {ablation.folder}: {count(ablation.num_steps, 'step')} of each arm on "
        f"{count(ablation.num_ranks, 'rank')}, seed {ablation.config.run.seed}",
        *(f"{arm:11} {MEANING[arm]}" for arm in ablation.arms),
    ]
    if "frozen-tv" in ablation.arms:
        lines.append(f"{'':11} frozen-tv starts from {ablation.tv_drafter or 'a warm-up that is run before it'}")
    return "\n".join([*lines, "", to_toml(ablation.config)])
