"""Runs ``tlt ablate``: one arm after the other in this process, then the held-out measurement and the figures.

Every rank runs it. Arms that are done are left alone, so an ablation that was killed goes on where it was.
"""

from __future__ import annotations

import gc
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from tlt_hpc.config import Config
from tlt_hpc.drafting.tail import IN_TAIL, TailTraining
from tlt_hpc.models.drafter_file import initial_drafter
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import read_assets
from tlt_hpc.resume.kept import drop_kept
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.ablate.ablate_options import ArmName
from tlt_hpc.studies.ablate.arms import WITHOUT_DRAFTER, training_of
from tlt_hpc.studies.ablate.figures import Figures, read_figures
from tlt_hpc.studies.ablate.held_out import measure
from tlt_hpc.studies.ablate.plan import Ablation, digest_of, mark_done, write_plan
from tlt_hpc.studies.warmup.plan import config_of as warmup_config_of
from tlt_hpc.studies.warmup.warm_up import WarmupReporter, warm_up
from tlt_hpc.train import Reporter, run

_THROWN_AWAY = "first-start-not-counted"


class Screens(Protocol):
    """Where an ablation's runs are shown; on ranks other than the first nowhere."""

    def run(self) -> AbstractContextManager[Reporter]: ...

    def warmup(self) -> AbstractContextManager[WarmupReporter]: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Stopped:
    """A signal ended the ablation before all arms were done; ``--resume`` goes on."""

    ablation: Ablation
    reason: str


def ablate(ablation: Ablation, world: World, screens: Screens) -> Figures | Stopped:
    """Run all arms that are not done yet, and hold them against each other; collective.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data, a drafter), before any step.
    """
    ablation = world.broadcast(ablation)  # the folder is named after rank 0's clock
    check_drafters(ablation, world)
    if world.rank == 0:
        write_plan(ablation)
    left = world.once(lambda: [arm for arm in ablation.arms if digest_of(ablation, arm) is None])
    if left and not throw_away_a_step(ablation, left, world, screens):
        return stopped(ablation, world)
    for arm in left:
        if not (prepare(ablation, arm, world, screens) and run_arm(ablation, arm, world, screens)):
            return stopped(ablation, world)
    screens.say("accept length on held-out prompts, by arm")
    held_out = measure(ablation, world)
    if held_out is None:
        return stopped(ablation, world)
    return world.once(lambda: read_figures(ablation, held_out))


def stopped(ablation: Ablation, world: World) -> Stopped:
    """What ended it; collective."""
    return Stopped(ablation, world.first_stop_reason())


def check_drafters(ablation: Ablation, world: World) -> None:
    """Find a drafter that does not fit now, and not after hours of other arms; collective, one rank a node reads.

    Raises:
        ValueError: as ``read_assets`` and ``initial_drafter``.
    """
    world.node_group.once(partial(_check_drafters, ablation, world.size))


def _check_drafters(ablation: Ablation, num_ranks: int) -> None:
    shape = read_assets(ablation.config, num_ranks).shape
    form = ablation.config.drafter.form
    if set(ablation.arms) - set(WITHOUT_DRAFTER):
        initial_drafter(ablation.config.drafter.init, form, shape)
    if "frozen-tv" in ablation.arms and ablation.tv_drafter:
        initial_drafter(ablation.tv_drafter, form, shape, "--tv-drafter")


def throw_away_a_step(ablation: Ablation, left: list[ArmName], world: World, screens: Screens) -> bool:
    """One step in a folder that is removed: the first run of a process is slower. False where a signal ended it."""
    has_drafter = any(arm not in WITHOUT_DRAFTER for arm in left)
    config = replace(ablation, num_steps=1).config_of("tail" if has_drafter else left[-1])
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": _THROWN_AWAY})})
    remove(config.folder, world)  # of an ablation that was killed in it
    finished = run_once(config, world, screens) is not None
    remove(config.folder, world)
    return finished


def remove(folder: Path, world: World) -> None:
    """Remove a folder, if it is there; collective."""
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()


def prepare(ablation: Ablation, arm: ArmName, world: World, screens: Screens) -> bool:
    """Make the drafter that an arm starts from, where it is not there yet; False where a signal ended it."""
    if arm != "frozen-tv" or ablation.tv_drafter:
        return True
    with screens.warmup() as reporter:
        return warm_up(warmup_config_of(ablation.tv_config), world, reporter).finished


def run_arm(ablation: Ablation, arm: ArmName, world: World, screens: Screens) -> bool:
    """Run an arm, or go on with it; False where a signal ended it."""
    config = ablation.config_of(arm)
    if arm == "control":
        world.once(partial(drop_kept_first_step, RunFolder(config.folder)))
    digest = run_once(config, world, screens, training_of(arm, ablation.folder))
    if digest is not None and world.rank == 0:
        mark_done(ablation, arm, digest)
    return digest is not None


def drop_kept_first_step(folder: RunFolder) -> None:
    """Have the first step of arm ``control`` generate all its responses: the drafter is trained on their features."""
    if not read_lines(folder.metrics):
        drop_kept(folder)


def run_once(config: Config, world: World, screens: Screens, training: TailTraining = IN_TAIL) -> str | None:
    """A run's policy, with what it occupied given back; None where a signal ended it."""
    with screens.run() as reporter:
        result = run(config, world, reporter, training=training)
    gc.collect()  # DeepSpeed's engines are full of cycles
    return result.policy_sha256 if result.finished else None
