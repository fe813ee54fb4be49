"""Builds the parts of a warm-up from its configuration; owns its folder and what may change in it.

config.toml       the resolved configuration
features/         part-00003/cache/...: features of one part of the responses each; may be deleted at the end
training/         where the training stands, the last two saves
drafter/          the best drafter so far and its facts
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tlt_hpc.checkpoint.claim import claim_run_folder_all_ranks
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.config import Config, ConfigError, load_saved_config
from tlt_hpc.drafting.spot_trainer import SpotTrainer
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import read_drafter_of_init
from tlt_hpc.models.folder import num_used_tokens
from tlt_hpc.models.piece import read_and_broadcast_all
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import read_and_broadcast_assets
from tlt_hpc.run.job import make_drafting
from tlt_hpc.run.session import Session, closing_session_on_error, load_model_weights, open_session
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.studies.warmup.texts import Texts, from_logs, from_prompts

# What the responses and the held-out prompts depend on. The rest is the training's.
_OF_RESPONSES = ("warmup.sources", "warmup.responses")
_NUM_SAVES = 2


@dataclass(frozen=True)
class Warmup(Session):
    """The parts of a warm-up on one rank."""

    path: Path
    texts: Texts
    trainer: SpotTrainer
    engine_drafter: Drafter
    """The engines' copy, in the decoder's precision."""
    saves: CheckpointStore

    @property
    def features_folder(self) -> Path:
        """The folder of the features of all parts."""
        return RunFolder(self.path).features


def build_warmup(config: Config, world: World) -> Warmup:
    """Build all parts of the warm-up that ``config`` (from ``plan.warmup_config``) describes. Collective.

    Raises:
        ValueError: the user's mistake, before anything is written.
    """
    node = world.node_group
    assets = read_and_broadcast_assets(config, world.size, node)
    form, shape = config.drafter.form, assets.shape
    init = partial(read_drafter_of_init, config.drafter.init, form, shape, assets.folder)
    warm = read_and_broadcast_all(node, init)
    num_tokens = num_used_tokens(assets.tokenizer, assets.shape)
    if config.warmup.sources:
        texts = world.run_first_and_broadcast(lambda: from_logs(config.warmup, assets.shape.max_positions, num_tokens))
    else:
        texts = from_prompts(config.warmup, assets.prompts)
    session = open_session(config, world, assets)
    with closing_session_on_error(session):
        load_model_weights(session)
        folder = RunFolder(config.folder)
        # the cache that comes with it is a run's; a warm-up keeps its features in parts
        drafting = make_drafting(session, assets, folder, warm, average_merges=1)  # nothing is merged
        world.run_first_and_broadcast(lambda: _check_same_settings(folder, config))
        claim_run_folder_all_ranks(folder, config, world, None if config.warmup.sources else assets.prompts)
        saves = CheckpointStore(folder.training, _NUM_SAVES)
        return Warmup(
            **vars(session),
            path=folder.path,
            texts=texts,
            trainer=drafting.spot,
            engine_drafter=drafting.engine_drafter,
            saves=saves,
        )


def _check_same_settings(folder: RunFolder, config: Config) -> None:
    """Refuse settings other than the saved ones where responses, or a training that has begun, depend on them.

    Raises:
        ConfigError: with both values.
    """
    if not folder.config.exists():
        return
    old, new = _warmup_settings(load_saved_config(folder.config)), _warmup_settings(config)
    for key in old if folder.training.exists() else _OF_RESPONSES:
        if old[key] != new[key]:
            remedy = "" if key in _OF_RESPONSES else f", delete {folder.training} to train again on the same responses"
            raise ConfigError(
                f"{folder.config} holds a warm-up with {key} = {old[key]!r}, now {new[key]!r}; use the old "
                f"value{remedy} or give another run.name"
            )


def _warmup_settings(config: Config) -> dict[str, Any]:
    """The settings of a warm-up which may otherwise change when a run continues."""
    own = {f"warmup.{name}": value for name, value in config.warmup.model_dump().items()}
    return {**own, "drafter.learning_rate": config.drafter.learning_rate}
