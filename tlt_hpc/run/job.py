"""The parts of a training run on one rank: constructed before its first step, closed after its last.

What every command that generates text has is in session.py; the loop over steps is in train.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tlt_hpc.checkpoint.claim import claim_run_folder_all_ranks
from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import Config, DrafterSection, truncation_warning
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.drafting.spot_trainer import AVERAGE_MERGES, SpotTrainer
from tlt_hpc.drafting.tail_plan import TailPlan
from tlt_hpc.look.environment import RankPlace, collect_start_environment
from tlt_hpc.models.drafter import AS_TARGET, TOKEN_IDS, Drafter, parse_layer_settings
from tlt_hpc.models.drafter_file import make_drafter, read_drafter_of_init
from tlt_hpc.models.folder import import_transformers, load_policy_all_ranks
from tlt_hpc.models.piece import read_and_broadcast_all, read_and_broadcast_each
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.mpi.world import NodeGroup, World
from tlt_hpc.plan.inputs import Assets, read_and_broadcast_assets
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.rl.distributed import join_process_group
from tlt_hpc.rl.loss import MismatchWatch
from tlt_hpc.rl.policy import Policy
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.run.session import (
    Session,
    choose_vocabulary,
    closing_session_on_error,
    open_judge,
    open_session,
    read_first_prompts,
)
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder, node_folder
from tlt_hpc.storage.records import Environment
from tlt_hpc.storage.step_lines import best_evaluated_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafting:
    """The parts that only a run with a learned drafter has."""

    cache: FeatureCache
    spot: SpotTrainer
    engine_drafter: Drafter
    """The engine's copy, in the decoder's precision; refreshed after every merge."""
    checkpoints: CheckpointStore
    """Saves of the drafter alone, after each step that no whole checkpoint follows."""
    warned: list[int] = field(default_factory=list)
    """The step, if any, whose warning said that its save was left out."""

    def load(self, checkpoint: Checkpoint, node: NodeGroup) -> None:
        """Collective over the node. Load the drafter of a checkpoint.

        Raises:
            UserError: it is of another shape.
        """
        names = checkpoint.tensor_names("drafter")
        with checkpoint.open_tensor_reader("drafter") as read:
            self.spot.trained.load_state(dict(read_and_broadcast_each(node, names, read)))


@dataclass(frozen=True)
class Job(Session):
    """The parts of a training run on one rank."""

    folder: RunFolder
    prompts: PromptSource
    engine: RolloutEngine
    policy: Policy
    checkpoints: CheckpointStore
    drafting: Drafting | None
    judge: Judge
    """Judges responses; its server outlives the job, for further ones of this process."""
    mismatch: MismatchWatch
    tail_plan: TailPlan

    def load_policy(self, version: int) -> None:
        """Collective. Put the policy's weights into the decoder; the drafter reads its embedding and head there."""
        self.engine.load_policy(self.policy.gather_named_weights(), version)

    def load_engine_drafter(self) -> None:
        """Copy the trained drafter into the engine's."""
        assert self.drafting is not None
        self.engine.load_drafter(self.drafting.spot.trained.averaged_weights(), self.drafting.spot.trained.has_learned)


def build_job(config: Config, world: World) -> Job:
    """Collective. Build all parts of a run; if one cannot be built, those before it are closed."""
    judge = open_judge(config.reward, world)
    node = world.node_group
    world.print_once("reading the model and the data")
    assets = read_and_broadcast_assets(config, world.size, node)
    for warning in (node.run_first_and_broadcast(lambda: assets.prompts.warning), truncation_warning(config.rollout)):
        if world.rank == 0 and warning:
            logger.warning("%s", warning)
    has_drafter, trains_drafter = config.speculation.has_drafter, config.speculation.trains_drafter
    warm = read_initial_drafter(config, assets.shape, node) if has_drafter else None
    session, folder = open_session(config, world, assets), RunFolder(config.folder)
    device, parts = session.decoder.device, session.parts
    with closing_session_on_error(session):
        merges = AVERAGE_MERGES if trains_drafter else 1
        drafting = make_drafting(session, assets, folder, warm, merges) if has_drafter else None
        if drafting:
            parts.callback(drafting.cache.abandon_step)  # still open if the run failed: its thread ends here
        environment = gather_environment(world, device, assets.excluded_token_ids)
        # last of what may find a mistake of the user's: nothing is written before
        claim_run_folder_all_ranks(folder, config, world, assets.prompts, environment)
        if drafting:
            drafting.cache.remove_parts()
        ahead = agree_on_ahead_mode(config, world, device)
        served = drafting.engine_drafter if drafting else None
        engine = session.make_engine(session.engine_settings(ahead != "off"), served, keeps=session.keeps_response)
        world.print_once("joining the process group")
        join_process_group(world, "cuda" if device.type == "cuda" else "cpu")
        world.print_once("importing transformers")
        import_transformers(config.lora.rank > 0)
        world.print_once("loading the policy")
        is_sharded = config.optimizer.zero_stage == 3
        start = partial(load_policy_all_ranks, assets.folder, config.model.dtype, device, is_sharded, world.rank, node)
        reference = start if config.algorithm.kl_coefficient else None
        policy = Policy(start(), config, world, reference, assets.excluded_token_ids)
        parts.callback(policy.close)
        return Job(
            **vars(session),
            folder=folder,
            prompts=assets.prompts,
            engine=engine,
            policy=policy,
            checkpoints=CheckpointStore(
                folder.checkpoints, config.checkpoint.keep, partial(best_evaluated_step, folder.metrics)
            ),
            drafting=drafting,
            judge=judge,
            mismatch=MismatchWatch(config.model.dtype, config.algorithm.correction.name != "none"),
            tail_plan=TailPlan(trains_drafter, ahead),
        )


def agree_on_ahead_mode(config: Config, world: World, device: torch.device) -> str:
    """``speculation.ahead``, but "off" without speculation, where a single replica never waits, and where it is "auto"
    and ranks share cores, so that those that wait would slow down the others. Collective.
    """
    wanted = config.speculation.ahead
    if config.speculation.mode == "plain" or world.size == config.rollout.tensor_parallel:
        return "off"
    hosts = world.allgather((world.hostname, os.sched_getaffinity(0)))
    # a launcher may have bound each rank to cores of its own
    cores = set[int]().union(*(own for host, own in hosts if host == world.hostname))
    crowded = device.type == "cpu" and world.node_group.size > len(cores)
    return "off" if any(world.allgather(crowded)) and wanted == "auto" else wanted


def read_initial_drafter(config: Config, shape: ModelShape, node: NodeGroup) -> dict[str, torch.Tensor] | None:
    """Collective over the node. Read the weights that ``drafter.init`` names; None if it is random.

    Raises:
        ConfigError: there are none, or they are of another model.
    """
    model = find_model(config.model.path)
    return read_and_broadcast_all(
        node, partial(read_drafter_of_init, config.drafter.init, config.drafter.form, shape, model)
    )


def gather_environment(world: World, device: torch.device, never_sampled: Sequence[int]) -> Environment | None:
    """Collective: on rank 0 the nodes, GPUs and versions that the run has; None on other ranks."""
    gpu = uuid = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, uuid = properties.name, f"GPU-{properties.uuid}"
    places = world.allgather(RankPlace.here(world.hostname, gpu, uuid))
    return None if world.rank else collect_start_environment(world, places, torch.version.cuda or "", never_sampled)


def make_drafting(
    session: Session,
    assets: Assets,
    folder: RunFolder,
    warm: dict[str, torch.Tensor] | None,
    average_merges: int,
) -> Drafting:
    """Collective. Build the drafter (from the weights ``warm``, or random), its cache and its trainer."""
    config, world, decoder = session.config, session.world, session.decoder
    shape, seed, settings = decoder.shape, config.run.seed, config.drafter
    token_ids = warm.get(TOKEN_IDS) if warm is not None else None
    own = parse_layer_settings(warm) if warm is not None else AS_TARGET
    if warm is None and settings.form == "eagle3":
        token_ids = choose_vocabulary(config, assets, read_first_prompts(config.run, assets.prompts))
    served = make_drafter(shape, seed, decoder.dtype, decoder.device, token_ids, own)
    if decoder.sharding.size > 1:
        served.set_sharding(decoder.sharding)
    place, rank, num_ranks = gather_cache_placement(config.drafter, world, folder)
    sizes = served.num_features, shape.hidden_size, settings.cache_bytes
    cache = FeatureCache(place, rank, *sizes, num_ranks)
    spot = SpotTrainer(decoder, cache, settings, seed, world.rank, token_ids, own, average_merges)
    if warm is not None:
        spot.trained.copy_weights_from(warm)
    alone = CheckpointStore(folder.drafter_checkpoints, keep=2)
    return Drafting(cache, spot, served, alone)


def gather_cache_placement(drafter: DrafterSection, world: World, folder: RunFolder) -> tuple[RunFolder, int, int]:
    """Collective. Return the folder of the feature cache, this rank's number there, and the number of ranks.

    Raises:
        UserError: on all ranks, if a node does not have a variable in ``drafter.cache_folder``.
    """
    template = drafter.cache_folder
    if not template:
        return folder, world.rank, world.size
    found = world.run_on_all_ranks(lambda: node_folder(template, folder.path, world.hostname))
    return RunFolder(found), world.local_rank, world.allgather(world.hostname).count(world.hostname)
