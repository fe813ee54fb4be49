"""Builds the parts of a run from its configuration, generates with them, and closes them.

``Session.generate`` is the loop of every rollout, which releases waiting ranks. The loop over steps is in train.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tlt_hpc.checkpoint.claim import claim_folder
from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cluster.device import GIVEN as GIVEN_GPU
from tlt_hpc.cluster.device import fix_workspaces
from tlt_hpc.common.records import Prompt, Request, SampleKey, SamplingParams, Stream
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, ConfigError, UserError, truncation_warning
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.drafting.tail_plan import TailPlan
from tlt_hpc.drafting.vocabulary import count_tokens, most_frequent_tokens
from tlt_hpc.look.energy import EnergyMeter
from tlt_hpc.look.environment import RankPlace, find_environment
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.draft_layer import AS_TARGET, TOKEN_IDS, layer_of
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import initial_drafter, make_drafter
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.folder import decoding_dtype, folder_weights, import_transformers, num_used_tokens, start_model
from tlt_hpc.models.once import read_all_once, read_each_once
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.models.sharding import WHOLE, Sharding
from tlt_hpc.models.tokenizer import control_token_ids, find_model
from tlt_hpc.mpi.node import NodeGroup
from tlt_hpc.mpi.pulse import BUSY_SECONDS, Pulse
from tlt_hpc.mpi.replica import Replica, ReplicaPulse, check_nodes
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import Assets, ModelAssets, read_assets_once
from tlt_hpc.plan.shape_checks import check_experts
from tlt_hpc.rewards.scorer import Judge, standing_judge
from tlt_hpc.rl.correction import MismatchWatch
from tlt_hpc.rl.distributed import join_process_group, replica_sum
from tlt_hpc.rl.policy import Policy
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import strategies_of
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder, node_folder
from tlt_hpc.storage.records import Environment
from tlt_hpc.storage.step_lines import best_evaluated

logger = logging.getLogger(__name__)

_COUNTED_STEPS = 64
"""Steps whose prompts are counted for a draft vocabulary."""
CALIBRATION_RESPONSES = 8
"""Responses that the engine is calibrated with, at most."""


@dataclass(frozen=True)
class Drafting:
    """The parts that only a run with a learned drafter has."""

    cache: FeatureCache
    spot: SpotTrainer
    served: Drafter
    """The engine's copy, in the decoder's precision; refreshed after every merge."""
    checkpoints: CheckpointStore
    """Saves of the drafter alone, after each step that no whole checkpoint follows."""
    warned: list[int] = field(default_factory=list)
    """The step, if any, whose warning said that its save was left out."""

    def load(self, checkpoint: Checkpoint, node: NodeGroup) -> None:
        """Load the drafter of a checkpoint; collective over the node.

        Raises:
            UserError: it is of another shape.
        """
        names = checkpoint.names("drafter")
        with checkpoint.reading("drafter") as read:
            self.spot.load_state(dict(read_each_once(node, names, read)))


@dataclass(frozen=True)
class Session:
    """What every command that generates text has on one rank: training, evaluation, warm-up, ablation and bench."""

    config: Config
    world: World
    replica: Replica
    assets: ModelAssets
    decoder: Decoder
    pulse: Pulse
    parts: ExitStack
    """Closes the session's parts, the last opened first."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.assets.tokenizer

    def settings(self, ahead: bool = False) -> EngineSettings:
        """The engine's settings in the job's rollouts; ``ahead``: with strategies for texts generated ahead."""
        rollout, speculation, assets = self.config.rollout, self.config.speculation, self.assets
        return EngineSettings(
            params=SamplingParams(
                max_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                top_k=rollout.top_k,
                top_p=rollout.top_p,
                min_p=rollout.min_p,
                min_tokens=rollout.min_new_tokens,
                stop_strings=rollout.stop_strings,
            ),
            num_tokens=num_used_tokens(assets.tokenizer, assets.shape),
            eos_token_ids=assets.eos_token_ids,
            max_live=rollout.max_live,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            tie_guard=self.decoder.dtype == torch.float32,
            kv_bytes=rollout.kv_bytes,
            page_size=rollout.page_size,
            prefill_tokens=rollout.prefill_tokens,
            strategies=strategies_of(speculation.mode, speculation.strategies, ahead),
            seed=self.world.rank,
            # with special tokens, whose text a stop string may be: those that end a chat's turn are such
            detokenize=partial(assets.tokenizer.decode, skip_special_tokens=False) if rollout.stop_strings else None,
        )

    def make_engine(
        self,
        settings: EngineSettings,
        drafter: Drafter | None = None,
        *,
        keeps: Callable[[SampleKey], bool] = lambda key: True,
        drafter_is_trained: bool = False,
    ) -> RolloutEngine:
        """A rollout engine on this rank's decoder; ``keeps`` and ``drafter_is_trained`` as ``RolloutEngine`` has them.

        Raises:
            ConfigError: the budget of pages holds no response of full length, or another setting that cannot work.
        """
        if isinstance(drafter, Eagle) and drafter.served_ids is None and isinstance(self.assets, Assets):
            draft_among_frequent(drafter, self.config, self.assets, drawn_first(self.config, self.assets.prompts))
        try:
            agree = self.replica.agree if self.replica.size > 1 else None
            engine = RolloutEngine(self.decoder, settings, drafter, agree, keeps, drafter_is_trained)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.parts.callback(engine.close)
        return engine

    def calibrate(self, engine: RolloutEngine, requests: Sequence[Request]) -> None:
        """Measure near-ties on responses that are discarded.

        They have a stream of their own: the requests' true keys would generate the coming texts.
        """
        some = [
            replace(request, key=replace(request.key, stream=Stream.CALIBRATION))
            for request in requests[:CALIBRATION_RESPONSES]
        ]
        self.calibrate_on(engine, some)

    def calibrate_on(self, engine: RolloutEngine, requests: Sequence[Request]) -> None:
        """The same with the requests' own keys, for texts that are not generated again with these."""
        note = ""
        if engine.settings.tie_guard:
            most = count(engine.settings.params.max_tokens, "token")
            note = f" on {count(len(requests), 'response')} of at most {most}, which are discarded"
        with self.world.saying("calibrating the rollout engine", note):
            engine.calibrate(requests)

    def keeps(self, key: SampleKey) -> bool:
        """Whether this rank keeps a response that its replica generates."""
        return self.replica.keeps(unit_of(self.config, key))

    def is_own(self, key: SampleKey) -> bool:
        """Whether a response is this rank's to score, train on and log: its replica's, and its own among them."""
        return self.replica.takes(unit_of(self.config, key)) and self.keeps(key)

    def replica_of(self, key: SampleKey) -> int:
        """The number of the replica that generates a response: replicas take whole groups, or samples of all groups."""
        return unit_of(self.config, key) % self.replica.count

    def by_replica(self, requests: Sequence[Request]) -> list[list[Request]]:
        """All ranks' requests, as the replicas share them."""
        shards: list[list[Request]] = [[] for _ in range(self.replica.count)]
        for request in requests:
            shards[self.replica_of(request.key)].append(request)
        return shards

    def shard(self, requests: Sequence[Request]) -> list[Request]:
        """Those of all ranks' requests that this rank's replica generates."""
        return self.by_replica(requests)[self.replica.number]

    def generate(
        self,
        engine: RolloutEngine,
        requests: Iterable[Request],
        *,
        on_idle: Callable[[Roster], bool] | None = None,
        on_round: Callable[[], None] | None = None,
        status: Callable[[], Status] | None = None,
        shown: Callable[[Roster], None] | None = None,
        epoch: int = 0,
    ) -> Roster:
        """Generate this rank's requests, and return once all ranks have finished or one asks to stop; collective.

        Args:
            on_idle: does something useful while other ranks generate; returns False if there is nothing to do.
            on_round: called after each round of decoding.
            status: what this rank reports to the others, if not the engine's progress alone.
            shown: called after each round of this rank with the latest roster.
            epoch: of the pulse; any number that all ranks give.

        Returns the last roster, which is the same on all ranks.
        """
        pulse, status = self.pulse, status or (lambda: engine_status(engine, self.world))
        self.replica.mark = lambda: engine.text_mark
        engine.submit(requests)
        pulse.begin(epoch)
        while not (roster := pulse.poll(status())).over:
            if engine.has_work:
                decode(engine, pulse)
                if on_round:
                    on_round()
            elif on_idle is None or not on_idle(roster):
                pulse.back_off()
            if shown:
                shown(roster)
        self.replica.mark = lambda: 0  # the replica outlives the engine, which may hold much memory
        return roster

    def close(self) -> None:
        """Close the parts; the process group stays for a further session of this process."""
        self.parts.close()


def open_session(config: Config, world: World, assets: ModelAssets) -> Session:
    """Build what generates text, without weights; collective.

    Raises:
        ConfigError: a replica would span several nodes, or this rank has no usable device.
    """
    world.say("building the decoder", f"; {assets.exclusion}" if assets.exclusion else "")
    check_nodes(world.allgather(world.hostname), config.rollout.tensor_parallel)
    replica = Replica(world, config.rollout.tensor_parallel)
    device = choose_device(config, world)
    kinds = world.allgather(device.type)
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"rank {kinds.index('cpu')} has no GPU where others have one: give every rank a GPU (--gpus-per-node), or "
            "none (model.device = 'cpu')"
        )
    dtype = decoding_dtype(config.model.dtype, device, assets.shape)
    check_experts(config, assets.shape, device.type)
    invariant = config.model.batch_invariant and dtype == torch.bfloat16
    sharding = make_sharding(replica, world, device, invariant)
    decoder = Decoder(assets.shape, dtype, device, sharding, invariant, assets.excluded_token_ids)
    comm = world.private_comm()
    pulse = ReplicaPulse(comm, replica) if replica.size > 1 else Pulse(comm, BUSY_SECONDS)
    parts = ExitStack()
    parts.callback(pulse.close)
    return Session(config, world, replica, assets, decoder, pulse, parts)


@contextmanager
def closed_on_error(session: Session) -> Iterator[None]:
    """Close a session if what is built on it within fails."""
    with ExitStack() as undo:
        undo.callback(session.close)
        yield
        undo.pop_all()


def load_folder(session: Session) -> None:
    """Load the weights of the job's model folder into the decoder; collective over the node."""
    weights = folder_weights(session.assets.folder, session.decoder.weight_cuts(), session.world.node_group)
    session.decoder.load(weights, 0, are_cut=True)


def engine_status(engine: RolloutEngine, world: World) -> Status:
    """What a rank that only generates reports to the others."""
    state = State.BUSY if engine.has_work else State.IDLE
    return Status(state, engine.num_unfinished, engine.num_tokens, 0, world.stop_requested)


def text_of(tokenizer: Tokenizer, tokens: NDArray[np.int32]) -> str:
    """A response as it is judged: without control tokens, with tags such as ``<think>``, special tokens or not."""
    control = control_token_ids(tokenizer)
    return str(tokenizer.decode([id_ for id_ in tokens.tolist() if id_ not in control], skip_special_tokens=False))


def decode(engine: RolloutEngine, pulse: Pulse) -> None:
    """One round of decoding; a prefill may take long, and the others' rounds continue meanwhile."""
    if not engine.has_waiting:
        engine.step()
        return
    with pulse.progressing():
        engine.step()


@dataclass(frozen=True)
class Job(Session):
    """The parts of a training run on one rank."""

    folder: RunFolder
    prompts: PromptSource
    engine: RolloutEngine
    policy: Policy
    checkpoints: CheckpointStore
    drafting: Drafting | None
    bench: Judge
    """What gives responses their rewards; its server outlives the job, for further ones of this process."""
    mismatch: MismatchWatch
    meter: EnergyMeter
    plan: TailPlan

    def load_policy(self, version: int) -> None:
        """Put the policy's weights into the decoder; the drafter reads its embedding and head there. Collective."""
        self.engine.load_policy(self.policy.named_weights(), version)

    def serve_drafter(self) -> None:
        """Copy the trained drafter into the engine's."""
        assert self.drafting is not None
        self.engine.load_drafter(self.drafting.spot.served(), self.drafting.spot.is_trained)


def assemble(config: Config, world: World) -> Job:
    """Build all parts of a run; collective. If one cannot be built, those before it are closed."""
    bench = open_bench(config, world)
    node = world.node_group
    world.say("reading the model and the data")
    assets = read_assets_once(config, world.size, node)
    for warning in (node.once(lambda: assets.prompts.warning), truncation_warning(config)):
        if world.rank == 0 and warning:
            logger.warning("%s", warning)
    has_drafter = config.speculation.mode == "full"
    warm = read_initial_drafter(config, assets.shape, node) if has_drafter else None
    session, folder = open_session(config, world, assets), RunFolder(config.folder)
    device, parts = session.decoder.device, session.parts
    with closed_on_error(session):
        drafting = make_drafting(session, assets, folder, warm) if has_drafter else None
        if drafting:
            parts.callback(drafting.cache.abandon_step)  # still open if the run failed: its thread ends here
        meter, environment = look_around(world, device, assets.excluded_token_ids)
        parts.callback(meter.close)
        # last of what may find a mistake of the user's: nothing is written before
        claim_folder(folder, config, world, assets.prompts, environment)
        if drafting:
            drafting.cache.remove_parts()
        ahead = ahead_mode(config, world, device)
        served = drafting.served if drafting else None
        engine = session.make_engine(session.settings(ahead != "off"), served, keeps=session.keeps)
        world.say("joining the process group")
        join_process_group(world, "cuda" if device.type == "cuda" else "cpu")
        world.say("importing transformers")
        import_transformers(config.lora.rank > 0)
        world.say("loading the policy")
        is_sharded = config.optimizer.zero_stage == 3
        start = partial(start_model, assets.folder, config.model.dtype, device, is_sharded, world.rank, node)
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
                folder.checkpoints, config.checkpoint.keep, partial(best_evaluated, folder.metrics)
            ),
            drafting=drafting,
            bench=bench,
            mismatch=MismatchWatch(config.model.dtype, config.algorithm.rollout_correction != "none"),
            meter=meter,
            plan=TailPlan(drafting is not None and config.drafter.train, ahead),
        )


def ahead_mode(config: Config, world: World, device: torch.device) -> str:
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
    """The weights that ``drafter.init`` names; None if it is random. Collective over the node.

    Raises:
        ConfigError: there are none, or they are of another model.
    """
    model = find_model(config.model.path)
    return read_all_once(node, partial(initial_drafter, config.drafter.init, config.drafter.form, shape, model))


def look_around(
    world: World, device: torch.device, never_sampled: Sequence[int]
) -> tuple[EnergyMeter, Environment | None]:
    """The meter of energy, and on rank 0 what the run runs on; collective."""
    gpu = uuid = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, uuid = properties.name, f"GPU-{properties.uuid}"
    meter = EnergyMeter(world.hostname, uuid)
    ranks = world.allgather((RankPlace.here(world.hostname, gpu, uuid), meter.reach))
    energy = meter.agree([reach for _, reach in ranks], world.rank)
    if world.rank:
        return meter, None
    places = [place for place, _ in ranks]
    return meter, find_environment(world, places, torch.version.cuda or "", energy, never_sampled)


def open_bench(config: Config, world: World) -> Judge:
    """What this rank judges responses with, ready to; collective where it has a server.

    Raises:
        ConfigError: on all ranks, where a rank's server cannot judge what it is asked to.
    """
    bench = standing_judge(config.reward)
    client = bench.client
    if client is None:
        return bench

    def wait_until_ready() -> None:
        try:
            client.wait_until_ready()
        except UserError as error:
            raise ConfigError(f"rank {world.rank} on {world.hostname}: {error}") from None

    world.all_or_none(wait_until_ready)
    if client.sandbox:
        world.say(f"programs of responses run in a sandbox (by {client.sandbox})")
    return bench


def choose_device(config: Config, world: World) -> torch.device:
    """The rank's device: a CUDA device for each local rank if there are any, unless the configuration says otherwise.

    Raises:
        ConfigError: ``cuda`` is asked for, or the launcher has given this rank a GPU, and torch sees none.
        UserError: of ``fix_workspaces``.
    """
    available = torch.cuda.is_available()
    wanted = config.model.device == "cuda" or (config.model.device == "auto" and GIVEN_GPU in os.environ)
    if wanted and not available:
        raise ConfigError(
            f"rank {world.rank} on {world.hostname} has no CUDA device that torch sees; install a CUDA build of torch "
            "that fits the driver, fix the allocation, or give model.device=cpu"
        )
    if config.model.device == "cpu" or not available:
        return torch.device("cpu")
    fix_workspaces(os.environ)
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    logger.info("rank %d on %s uses %s", world.rank, world.hostname, device)
    return device


def make_sharding(replica: Replica, world: World, device: torch.device, in_order: bool) -> Sharding:
    """Which part of the decoder this rank holds, and how its replica sums (``replica_sum``); collective.

    Raises:
        ConfigError: on all ranks, where the ranks of a replica share a GPU.
    """
    if replica.size == 1:
        return WHOLE
    join_process_group(world, "cuda" if device.type == "cuda" else "cpu")
    if device.type == "cuda" and torch.distributed.get_backend() == "gloo":
        raise ConfigError(
            f"rollout.tensor_parallel = {replica.size} with ranks that share a GPU (TLT_SHARE_GPUS=1): CUDA graphs "
            "cannot hold sums by gloo, and NCCL refuses two ranks on one GPU; use rollout.tensor_parallel = 1, or a "
            "GPU for each rank"
        )
    return Sharding(replica.index, replica.size, replica_sum(world, replica.size, in_order))


def unit_of(config: Config, key: SampleKey) -> int:
    """The number by which a response is sharded over replicas and ranks: its group's, or its own among all samples."""
    return key.draw if config.rollout.shard == "group" else key.draw * config.rollout.group_size + key.sample


def make_drafting(
    session: Session, assets: Assets, folder: RunFolder, warm: dict[str, torch.Tensor] | None
) -> Drafting:
    """The drafter (from the weights ``warm``, or random), its cache and its trainer; collective."""
    config, world, decoder = session.config, session.world, session.decoder
    shape, seed, settings = decoder.shape, config.run.seed, config.drafter
    token_ids = warm.get(TOKEN_IDS) if warm is not None else None
    own = layer_of(warm) if warm is not None else AS_TARGET
    if warm is None and settings.form == "eagle3":
        token_ids = choose_vocabulary(config, assets, drawn_first(config, assets.prompts))
    served = make_drafter(shape, seed, decoder.dtype, decoder.device, token_ids, own)
    if decoder.sharding.size > 1:
        served.split(decoder.sharding)
    place, rank, num_ranks = cache_place(config, world, folder)
    sizes = served.num_features, shape.hidden_size, settings.cache_bytes
    cache = FeatureCache(place, rank, *sizes, num_ranks)
    spot = SpotTrainer(decoder, cache, settings, seed, world.rank, token_ids, own)
    if warm is not None:
        spot.start_from(warm)
    alone = CheckpointStore(folder.drafter_checkpoints, keep=2)
    return Drafting(cache, spot, served, alone)


def cache_place(config: Config, world: World, folder: RunFolder) -> tuple[RunFolder, int, int]:
    """Where the feature cache is, and which of how many ranks this one is there; collective.

    Raises:
        UserError: on all ranks, if a node does not have a variable in ``drafter.cache_folder``.
    """
    template = config.drafter.cache_folder
    if not template:
        return folder, world.rank, world.size
    found = world.all_or_none(lambda: node_folder(template, folder.path, world.hostname))
    return RunFolder(found), world.local_rank, world.allgather(world.hostname).count(world.hostname)


def drawn_first(config: Config, source: PromptSource) -> list[Prompt]:
    """The prompts of a run's first steps; collective over the node."""
    return [prompt for step in range(min(config.run.num_steps, _COUNTED_STEPS)) for prompt in source.batch(step)]


def choose_vocabulary(config: Config, assets: ModelAssets, prompts: Sequence[Prompt]) -> torch.Tensor:
    """The tokens [W] to draft among: end tokens, those that were added to the vocabulary, and the most frequent others,
    ``drafter.vocabulary`` together.

    Before a run there is no response to count: ``prompts`` and their answers stand for them.
    """
    answers = (assets.tokenizer.encode(prompt.answer, add_special_tokens=False).ids for prompt in prompts)
    texts = chain((prompt.tokens for prompt in prompts), (np.array(answer, np.int32) for answer in answers))
    counted = count_tokens(texts, num_used_tokens(assets.tokenizer, assets.shape))
    excluded = set(assets.excluded_token_ids)
    counted[[token for token in excluded if token < len(counted)]] = 0
    always = [*assets.eos_token_ids, *(assets.tokenizer.get_added_tokens_decoder().keys() - excluded)]
    return torch.from_numpy(most_frequent_tokens(counted, config.drafter.vocabulary, always))


def draft_among_frequent(drafter: Eagle, config: Config, assets: ModelAssets, prompts: Sequence[Prompt]) -> None:
    """Let a drafter without a head of its own read a part of a wide one: the rows of the most frequent tokens."""
    if num_used_tokens(assets.tokenizer, assets.shape) > config.drafter.vocabulary:
        drafter.draft_among(choose_vocabulary(config, assets, prompts))
