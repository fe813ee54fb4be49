"""Runs ``tlt ablate``: one arm after the other in this process, then the held-out measurement and the figures.

Every rank runs it. Arms that have finished are not run again, so an ablation that was killed can be resumed.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.common.records import Request, Rollout
from tlt_hpc.config import Config
from tlt_hpc.drafting.schedule import JUDGED_DEPTH
from tlt_hpc.evaluate.subject import policy_readers
from tlt_hpc.models.drafter_file import initial_drafter, load_drafter
from tlt_hpc.models.once import readers_once
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import read_assets, read_assets_once
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.session import Session, open_session
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.studies.ablate.figures import AblationFigures, read_figures
from tlt_hpc.studies.ablate.gains import Passes
from tlt_hpc.studies.ablate.plan import WITHOUT_DRAFTER, Ablation, digest_of, mark_done, write_plan
from tlt_hpc.studies.warmup.texts import from_prompts
from tlt_hpc.train import Reporter, run

_THROWN_AWAY = "first-start-not-counted"
MakeReporter = Callable[[], AbstractContextManager[Reporter]]
"""Makes the reporter of an arm's run; on ranks other than the first one that shows nothing."""


@dataclass(frozen=True)
class StoppedAblation:
    """A signal ended the ablation before all arms had finished; ``--resume`` continues it."""

    ablation: Ablation
    reason: str


def ablate(ablation: Ablation, world: World, make_reporter: MakeReporter) -> AblationFigures | StoppedAblation:
    """Run all arms that have not finished yet, and compare them; collective.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data, a drafter), before any step.
    """
    ablation = world.broadcast(ablation)  # the folder is named after rank 0's clock
    world.node_group.once(partial(check_drafter, ablation, world.size))
    if world.rank == 0:
        write_plan(ablation)
    left = world.once(lambda: [arm for arm in ablation.arms if digest_of(ablation, arm) is None])
    if left and not throw_away_a_step(ablation, left, world, make_reporter):
        return StoppedAblation(ablation, world.first_stop_reason())
    for arm in left:
        digest = run_once(ablation.config_of(arm), world, make_reporter)
        if digest is None:
            return StoppedAblation(ablation, world.first_stop_reason())
        if world.rank == 0:
            mark_done(ablation, arm, digest)
    world.say("measuring accept length on held-out prompts, by arm")
    held_out = measure(ablation, world)
    if held_out is None:
        return StoppedAblation(ablation, world.first_stop_reason())
    return world.once(lambda: read_figures(ablation, held_out))


def check_drafter(ablation: Ablation, num_ranks: int) -> None:
    """Find a drafter that does not fit now, and not after hours of other arms.

    Raises:
        ValueError: as ``read_assets`` and ``initial_drafter``.
    """
    shape, drafter = read_assets(ablation.config, num_ranks).shape, ablation.config.drafter
    if set(ablation.arms) - set(WITHOUT_DRAFTER):
        initial_drafter(drafter.init, drafter.form, shape)


def throw_away_a_step(ablation: Ablation, left: list[str], world: World, make_reporter: MakeReporter) -> bool:
    """One step in a folder that is removed: the first run of a process is slower. False if a signal ended it."""
    has_drafter = any(arm not in WITHOUT_DRAFTER for arm in left)
    config = replace(ablation, num_steps=1).config_of("tail" if has_drafter else left[-1])
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": _THROWN_AWAY})})
    remove(config.folder, world)  # of an ablation that was killed in it
    finished = run_once(config, world, make_reporter) is not None
    remove(config.folder, world)
    return finished


def remove(folder: Path, world: World) -> None:
    """Remove a folder, if it is there; collective."""
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()


def run_once(config: Config, world: World, make_reporter: MakeReporter) -> str | None:
    """A run's policy, with what it occupied given back; None if a signal ended it."""
    with make_reporter() as reporter:
        result = run(config, world, reporter)
    gc.collect()  # DeepSpeed's engines are full of cycles
    return result.policy_sha256 if result.finished else None


# -- how well each arm's last drafter drafts ----------------------------------------------------------------------


def measure(ablation: Ablation, world: World) -> dict[str, Passes] | None:
    """Tokens and target passes of every held-out response, by arm that has a drafter; collective.

    Each drafter answers the same prompts in chains of four, with its arm's last policy: with the tie guard that is the
    same in all arms, and so is the text. None if a signal ended it.

    Raises:
        ConfigError: too few prompts to hold any out.
    """
    arms = [arm for arm in ablation.arms if arm not in WITHOUT_DRAFTER]
    if not arms:
        return {}
    config = ablation.config_of(arms[0])
    assets = read_assets_once(config, world.size, world.node_group)
    # of the warm-up's: draws of steps that no run comes to
    requests = from_prompts(config, assets.prompts).validation_requests(config.run.seed)
    measured: dict[str, Passes] = {}
    with closing(open_session(config, world, assets)) as session:
        settings = session.settings()
        max_live = min(settings.max_live, -(-len(requests) // world.size))
        settings = replace(settings, strategies=(Strategy("drafter", JUDGED_DEPTH),), max_live=max_live)
        own, loaded = requests[world.rank :: world.size], None
        for arm in arms:
            digest = world.node_group.once(partial(digest_of, ablation, arm))
            if loaded is None or digest != loaded:
                load_policy(ablation, arm, session)
                loaded = digest
            rollouts = answer(session, settings, str(ablation.folder / arm / "drafter"), f"arm {arm!r}", own)
            if rollouts is None:
                return None
            shards = world.allgather([(r.key, len(r.response_tokens), r.num_target_passes) for r in rollouts])
            rows = sorted(chain.from_iterable(shards))
            measured[arm] = Passes(tuple(tokens for _, tokens, _ in rows), tuple(passes for *_, passes in rows))
    return measured


def answer(
    session: Session, settings: EngineSettings, drafter: str, asked: str, requests: list[Request]
) -> list[Rollout] | None:
    """This rank's responses with the drafter of a folder, by an engine of their own; None after a stop request."""
    loaded = load_drafter(drafter, session.decoder, asked, session.world.node_group)
    engine = session.make_engine(settings, loaded)
    engine.drafter_ready = True
    if requests:
        engine.calibrate(requests[:1])
    return None if session.generate(engine, requests).stopping else engine.collect()


def load_policy(ablation: Ablation, arm: str, session: Session) -> None:
    """Give the decoder the policy that an arm came to; collective over the node, whose first rank reads."""
    node = session.world.node_group
    store = CheckpointStore(RunFolder(ablation.folder / arm).checkpoints, ablation.config.checkpoint.keep)
    checkpoint = node.once(lambda: store.at(ablation.num_steps))
    weights = ((name, read(None)) for name, read in readers_once(node, policy_readers(checkpoint)))
    session.decoder.load(weights, ablation.num_steps)
