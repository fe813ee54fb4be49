"""Builds what an evaluation of its own needs: the light files checked, the engine, the drafter where there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.common.records import Request
from tlt_hpc.config import Config, ConfigError, check_replicas
from tlt_hpc.data.evaluation_sets import EvaluationSets, longest_response
from tlt_hpc.data.rows import digest_of
from tlt_hpc.evaluate.folder import WEIGHTS
from tlt_hpc.evaluate.requests import Wanted, sampling_params
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import TOKEN_IDS, initial_drafter, serving_drafter
from tlt_hpc.models.folder import end_token_ids, find_model, load_tokenizer
from tlt_hpc.models.once import read_all_once
from tlt_hpc.models.shape import ModelShape, check_sharding, read_shape
from tlt_hpc.mpi.node import NodeGroup
from tlt_hpc.mpi.replica import Replica
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import ModelAssets, open_checked_sets
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import strategies_of
from tlt_hpc.session import CALIBRATION_RESPONSES, calibration_requests, engine_settings, keeps_of, make_engine

# of [reward]: what a verdict depends on
_JUDGING = (
    "default",
    "by_source",
    "function",
    "tolerance",
    "format_pattern",
    "format_tags",
    "cpu_seconds",
    "memory_mb",
)


def read_assets(config: Config, num_ranks: int) -> tuple[ModelAssets, EvaluationSets]:
    """The light files of the model, and the data sets; ``config`` is ``subject.config_for``'s.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    folder = find_model(config.model.path)
    shape = read_shape(folder)
    check_replicas(config, num_ranks)
    check_sharding(shape, config.rollout.tensor_parallel, "rollout.tensor_parallel")
    tokenizer = load_tokenizer(folder)
    sets = open_checked_sets(config, folder, shape, tokenizer)
    return ModelAssets(folder, shape, tokenizer, end_token_ids(folder, shape)), sets


def check_same_sets(sets: EvaluationSets, world: World) -> None:
    """Refuse data sets that are not the same on all nodes: ranks would not agree on what is to be answered.

    Collective.

    Raises:
        ConfigError: on all ranks.
    """
    seen = world.allgather((world.hostname, sets.marks()))
    for rank, (hostname, marks) in enumerate(seen):
        for name, mark in marks.items():
            if mark != seen[0][1].get(name):
                raise ConfigError(
                    f"evaluation.sources: rank {rank} on {hostname} reads another {name!r} than rank 0 on "
                    f"{seen[0][0]}; give all nodes the same files"
                )


def facts_of(config: Config, sets: EvaluationSets, fingerprint: str) -> dict[str, object]:
    """What responses and verdicts depend on, by name."""
    evaluation = config.evaluation
    function = config.reward.function.rpartition(":")[0]
    return {
        WEIGHTS: fingerprint,
        "model.dtype": config.model.dtype,
        "evaluation.seed": evaluation.seed,
        "evaluation.temperature": evaluation.temperature,
        "evaluation.top_p": evaluation.top_p,
        "evaluation.max_new_tokens": longest_response(config),
        "rollout.stop_strings": config.rollout.stop_strings,
        **{f"reward.{name}": vars(config.reward)[name] for name in _JUDGING},
        **({"the file of reward.function": digest_of(Path(function))} if function else {}),
        **{f"data of {name}": digest for name, digest in sets.fingerprints().items()},
    }


def build_engine(
    config: Config,
    assets: ModelAssets,
    sets: EvaluationSets,
    decoder: Decoder,
    drafter: Drafter | None,
    world: World,
    replica: Replica,
) -> RolloutEngine:
    """The engine with the evaluation's sampling.

    Raises:
        ConfigError: the budget of pages holds no response of full length.
    """
    settings = engine_settings_of(config, assets, sets, drafter, world)
    engine = make_engine(decoder, settings, drafter, replica)
    engine.keeps = keeps_of(config, replica)
    engine.drafter_ready = drafter is not None
    return engine


def engine_settings_of(
    config: Config, assets: ModelAssets, sets: EvaluationSets, drafter: Drafter | None, world: World
) -> EngineSettings:
    """The rollout's, but for what is sampled how; without a drafter none of its strategies."""
    strategies = strategies_of(config.speculation.mode, config.speculation.strategies)
    return replace(
        engine_settings(config, assets, world),
        params=sampling_params(config),
        max_prompt_tokens=sets.longest_prompt,
        strategies=tuple(s for s in strategies if drafter is not None or not s.has_drafter),
    )


def calibration_of(wanted: list[Wanted]) -> list[Request]:
    """A few of the prompts, to calibrate the engine with."""
    some = wanted[:: max(1, len(wanted) // CALIBRATION_RESPONSES)]
    return calibration_requests([each.requests[-1] for each in some])


def open_drafter(config: Config, checkpoint: Checkpoint | None, decoder: Decoder, node: NodeGroup) -> Drafter | None:
    """The checkpoint's drafter, else what ``drafter.init`` names; None where there is none worth asking.

    Collective over the node, whose first rank reads.

    Raises:
        ConfigError: ``drafter.init`` names what does not fit the model.
    """
    if config.speculation.mode != "full":
        return None
    weights = read_all_once(node, lambda: _drafter_weights(config, checkpoint, decoder.shape))
    return None if weights is None else serving_drafter(weights, decoder)


def _drafter_weights(config: Config, checkpoint: Checkpoint | None, shape: ModelShape) -> dict[str, Tensor] | None:
    if checkpoint is None or not checkpoint.names("drafter"):
        return initial_drafter(config.drafter.init, config.drafter.form, shape)
    if not int(checkpoint.read("drafter", "num_steps")) and config.drafter.init == "random":
        return None
    names = [n for n in checkpoint.names("drafter") if n.endswith(".weight") or n == TOKEN_IDS]
    return {name: checkpoint.read("drafter", name) for name in names}
