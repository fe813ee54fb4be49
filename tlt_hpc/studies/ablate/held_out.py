"""How well each arm's last drafter drafts, whatever the clock did: one chain, the same prompts, the arm's policy.

With the tie guard the policy after the last step is the same in all arms, and so is the text that it answers with: what
differs is how many target passes a drafter's chain of four spares. Without it every arm has a policy and a text of its
own, and a drafter is judged on those that it was trained for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.common.records import Request, Rollout
from tlt_hpc.config import Config
from tlt_hpc.drafting.schedule import JUDGED_DEPTH
from tlt_hpc.evaluate.subject import policy_readers
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.once import readers_once
from tlt_hpc.mpi.node import NodeGroup
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import Assets, read_assets_once
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.session import choose_device, engine_settings, make_engine
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.studies.ablate.ablate_options import ArmName
from tlt_hpc.studies.ablate.arms import WITHOUT_DRAFTER
from tlt_hpc.studies.ablate.plan import Ablation, digest_of
from tlt_hpc.studies.ablate.statistics import Passes
from tlt_hpc.studies.warmup.texts import from_prompts

STRATEGY = Strategy("drafter", JUDGED_DEPTH)


def measure(ablation: Ablation, world: World) -> dict[ArmName, Passes] | None:
    """Tokens and target passes of every held-out response, by arm that has a drafter; collective.

    None where a signal ended it.

    Raises:
        ConfigError: too few prompts to hold any out.
    """
    arms = [arm for arm in ablation.arms if arm not in WITHOUT_DRAFTER]
    if not arms:
        return {}
    config = ablation.config_of(arms[0])
    node = world.node_group
    assets = read_assets_once(config, world.size, node)
    # of the warm-up's: draws of steps that no run comes to
    requests = from_prompts(config, assets.prompts).validation_requests(config.run.seed)
    decoder, loaded = Decoder(assets.shape, DTYPES[config.model.dtype], choose_device(config, world)), None
    settings = settings_of(config, assets, world, len(requests))
    own = requests[world.rank :: world.size]
    measured: dict[ArmName, Passes] = {}
    for arm in arms:
        digest = node.once(partial(digest_of, ablation, arm))
        if loaded is None or digest != loaded:
            load_policy(ablation, arm, decoder, node)
            loaded = digest
        rollouts = answer(ablation, arm, decoder, settings, own, world)
        shards = world.allgather(None if rollouts is None else sorted((r.key, counts(r)) for r in rollouts))
        if None in shards:
            return None
        pairs = [pair for _, pair in sorted(item for shard in shards if shard is not None for item in shard)]
        measured[arm] = Passes(tuple(tokens for tokens, _ in pairs), tuple(passes for _, passes in pairs))
    return measured


def counts(rollout: Rollout) -> tuple[int, int]:
    """Tokens of a response, and the target passes that they took."""
    return len(rollout.response_tokens), rollout.num_target_passes


def load_policy(ablation: Ablation, arm: ArmName, decoder: Decoder, node: NodeGroup) -> None:
    """Give a decoder the policy that an arm came to; collective over the node, whose first rank reads."""
    folder = RunFolder(ablation.folder / arm)
    store = CheckpointStore(folder.checkpoints, ablation.config.checkpoint.keep)
    checkpoint = node.once(lambda: store.at(ablation.num_steps))
    weights = ((name, read(None)) for name, read in readers_once(node, policy_readers(checkpoint)))
    decoder.load(weights, ablation.num_steps)


def settings_of(config: Config, assets: Assets, world: World, num_requests: int) -> EngineSettings:
    """The run's sampling, with its tie guard where it has one: a flipped tie would change the rest of a text."""
    settings = engine_settings(config, assets, world)
    return replace(
        settings,
        strategies=(STRATEGY,),
        max_live=min(settings.max_live, -(-num_requests // world.size)),
    )


def answer(
    ablation: Ablation, arm: ArmName, decoder: Decoder, settings: EngineSettings, requests: list[Request], world: World
) -> list[Rollout] | None:
    """This rank's responses, drafted by the drafter that an arm left; None where the rank was asked to stop."""
    place = str(ablation.folder / arm / "drafter")
    engine = make_engine(decoder, settings, load_drafter(place, decoder, f"arm {arm!r}", world.node_group))
    engine.drafter_ready = True
    if requests:
        engine.calibrate(requests[:1])
    engine.submit(requests)
    while engine.has_work and not world.stop_requested:
        engine.step()
    num_left = engine.abort()
    rollouts = engine.collect()
    return None if num_left else rollouts
