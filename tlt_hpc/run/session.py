"""Builds the parts of a run from its configuration, generates with them, and closes them.

``Session.generate`` is the loop of every rollout, which releases waiting ranks. The loop over steps is in train.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tlt_hpc.cluster.device import GIVEN as GIVEN_GPU
from tlt_hpc.cluster.device import set_cublas_workspaces
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import Prompt, Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import Config, ConfigError, ModelSection, RewardSection, RolloutSection, RunSection, UserError
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.folder import decoding_dtype, num_used_tokens, read_folder_weights
from tlt_hpc.models.sharding import WHOLE, Sharding
from tlt_hpc.models.tokenizer import control_token_ids
from tlt_hpc.mpi.pulse import BUSY_SECONDS, Pulse
from tlt_hpc.mpi.replica import Replica, ReplicaPulse, check_replicas_per_node
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import Assets, ModelAssets, check_experts
from tlt_hpc.rewards.scorer import Judge, open_process_judge
from tlt_hpc.rl.distributed import join_process_group, make_replica_all_reduce
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import parse_strategies

logger = logging.getLogger(__name__)

_COUNTED_STEPS = 64
"""Steps whose prompts are counted for a draft vocabulary."""
CALIBRATION_RESPONSES = 8
"""Responses that the engine is calibrated with, at most."""


@dataclass(frozen=True)
class Session:
    """The parts on one rank of a command that generates text: training, evaluation, warm-up, ablation, bench."""

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

    def engine_settings(self, ahead: bool = False) -> EngineSettings:
        """The engine's settings in the job's rollouts; ``ahead``: with drafts from texts generated ahead."""
        rollout, speculation, assets = self.config.rollout, self.config.speculation, self.assets
        return EngineSettings(
            params=SamplingParams(
                max_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                top_k=rollout.top_k,
                top_p=rollout.top_p,
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
            strategies=parse_strategies(speculation.mode, speculation.strategies),
            stored_texts=ahead and speculation.mode != "plain",
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
            restrict_draft_vocabulary(
                drafter, self.config, self.assets, read_first_prompts(self.config.run, self.assets.prompts)
            )
        try:
            agree = self.replica.broadcast_from_first_rank if self.replica.size > 1 else None
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
        self.calibrate_with_own_keys(engine, some)

    def calibrate_with_own_keys(self, engine: RolloutEngine, requests: Sequence[Request]) -> None:
        """The same with the requests' own keys, for texts that are not generated again with these."""
        note = ""
        if engine.settings.tie_guard:
            most = format_count(engine.settings.params.max_tokens, "token")
            note = f" on {format_count(len(requests), 'response')} of at most {most}, which are discarded"
        with self.world.printing_duration("calibrating the rollout engine", note):
            engine.calibrate(requests)

    def keeps_response(self, key: SampleKey) -> bool:
        """Return True if this rank keeps a response that its replica generates."""
        return self.replica.trains_on_unit(sharding_unit_of(self.config.rollout, key))

    def owns_response(self, key: SampleKey) -> bool:
        """Return True if this rank scores, trains on and logs a response: its replica's, and its own among them."""
        return self.replica.generates_unit(sharding_unit_of(self.config.rollout, key)) and self.keeps_response(key)

    def replica_of(self, key: SampleKey) -> int:
        """The number of the replica that generates a response: replicas take whole groups, or samples of all groups."""
        return sharding_unit_of(self.config.rollout, key) % self.replica.count

    def split_by_replica(self, requests: Sequence[Request]) -> list[list[Request]]:
        """All ranks' requests, as the replicas share them."""
        shards: list[list[Request]] = [[] for _ in range(self.replica.count)]
        for request in requests:
            shards[self.replica_of(request.key)].append(request)
        return shards

    def own_replica_requests(self, requests: Sequence[Request]) -> list[Request]:
        """Those of all ranks' requests that this rank's replica generates."""
        return self.split_by_replica(requests)[self.replica.number]

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
        """Collective. Generate this rank's requests; return once all ranks have finished or one asks to stop.

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
        pulse.begin_rollout(epoch)
        while not (roster := pulse.poll(status())).is_over:
            if engine.has_work:
                decode_one_round(engine, pulse)
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
    """Collective. Build what generates text, without weights.

    Raises:
        ConfigError: a replica would span several nodes, or this rank has no usable device.
    """
    world.print_once("building the decoder", f"; {assets.excluded_tokens_text}" if assets.excluded_tokens_text else "")
    check_replicas_per_node(world.allgather(world.hostname), config.rollout.tensor_parallel)
    replica = Replica(world, config.rollout.tensor_parallel)
    device = choose_device(config.model, world)
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
    comm = world.duplicate_comm_all_ranks()
    pulse = ReplicaPulse(comm, replica) if replica.size > 1 else Pulse(comm, BUSY_SECONDS)
    parts = ExitStack()
    parts.callback(pulse.close)
    return Session(config, world, replica, assets, decoder, pulse, parts)


@contextmanager
def closing_session_on_error(session: Session) -> Iterator[None]:
    """Close a session if what is built on it within fails."""
    with ExitStack() as undo:
        undo.callback(session.close)
        yield
        undo.pop_all()


def load_model_weights(session: Session) -> None:
    """Collective over the node. Load the weights of the job's model folder into the decoder."""
    weights = read_folder_weights(session.assets.folder, session.decoder.weight_cuts(), session.world.node_group)
    session.decoder.load_weights(weights, 0, are_cut=True)


def engine_status(engine: RolloutEngine, world: World) -> Status:
    """Return the status of a rank that only generates."""
    state = State.BUSY if engine.has_work else State.IDLE
    return Status(state, engine.num_unfinished, engine.num_tokens, 0, world.stop_requested)


def decode_response_text(tokenizer: Tokenizer, tokens: NDArray[np.int32]) -> str:
    """A response as it is judged: without control tokens, with tags such as ``<think>``, special tokens or not."""
    control = control_token_ids(tokenizer)
    return str(tokenizer.decode([id_ for id_ in tokens.tolist() if id_ not in control], skip_special_tokens=False))


def decode_one_round(engine: RolloutEngine, pulse: Pulse) -> None:
    """One round of decoding; a prefill may take long, and the others' rounds continue meanwhile."""
    if not engine.may_prefill:
        engine.step()
        return
    with pulse.progressing():
        engine.step()


def open_judge(reward: RewardSection, world: World) -> Judge:
    """Open what this rank judges responses with, ready for use; collective where it has a server.

    Raises:
        ConfigError: on all ranks, where a rank's server cannot judge what it is asked to.
    """
    judge = open_process_judge(reward)
    client = judge.client
    if client is None:
        return judge

    def wait_until_ready() -> None:
        try:
            client.wait_until_ready()
        except UserError as error:
            raise ConfigError(f"rank {world.rank} on {world.hostname}: {error}") from None

    world.run_on_all_ranks(wait_until_ready)
    if client.sandbox:
        world.print_once(f"programs of responses run in a sandbox (by {client.sandbox})")
    return judge


def choose_device(model: ModelSection, world: World) -> torch.device:
    """The rank's device: a CUDA device for each local rank if there are any, unless the configuration says otherwise.

    Raises:
        ConfigError: ``cuda`` is asked for, or the launcher has given this rank a GPU, and torch sees none.
        UserError: of ``set_cublas_workspaces``.
    """
    available = torch.cuda.is_available()
    wanted = model.device == "cuda" or (model.device == "auto" and GIVEN_GPU in os.environ)
    if wanted and not available:
        raise ConfigError(
            f"rank {world.rank} on {world.hostname} has no CUDA device that torch sees; install a CUDA build of torch "
            "that fits the driver, fix the allocation, or give model.device=cpu"
        )
    if model.device == "cpu" or not available:
        return torch.device("cpu")
    set_cublas_workspaces(os.environ)
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    logger.info("rank %d on %s uses %s", world.rank, world.hostname, device)
    return device


def make_sharding(replica: Replica, world: World, device: torch.device, in_order: bool) -> Sharding:
    """Collective. Return this rank's part of the decoder, with the sum over its replica (``make_replica_all_reduce``).

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
    return Sharding(replica.index, replica.size, make_replica_all_reduce(world, replica.size, in_order))


def sharding_unit_of(rollout: RolloutSection, key: SampleKey) -> int:
    """The number by which a response is sharded over replicas and ranks: its group's, or its own among all samples."""
    return key.draw if rollout.shard == "group" else key.draw * rollout.group_size + key.sample


def read_first_prompts(run: RunSection, source: PromptSource) -> list[Prompt]:
    """Collective over the node. Return the prompts of a run's first steps."""
    return [prompt for step in range(min(run.num_steps, _COUNTED_STEPS)) for prompt in source.draw_step_prompts(step)]


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


def restrict_draft_vocabulary(drafter: Eagle, config: Config, assets: ModelAssets, prompts: Sequence[Prompt]) -> None:
    """Let a drafter without a head of its own read a part of a wide one: the rows of the most frequent tokens."""
    if num_used_tokens(assets.tokenizer, assets.shape) > config.drafter.vocabulary:
        drafter.set_draft_vocabulary(choose_vocabulary(config, assets, prompts))


def count_tokens(texts: Iterable[NDArray[np.int32]], num_tokens: int) -> NDArray[np.int64]:
    """Count each of ``num_tokens`` tokens in texts, each [T] int32; returns counts [num_tokens] int64."""
    counts = np.zeros(num_tokens, np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=num_tokens)[:num_tokens]
    return counts


def most_frequent_tokens(counts: NDArray[np.int64], num: int, always: Sequence[int] = ()) -> NDArray[np.int64]:
    """The ``num`` most frequent ids (all where there are fewer) and those of ``always`` among them, ascending.

    An id of ``always`` that is not counted is none of the tokenizer's: a model may name such an end token.
    Where counts are equal, as of all that never occurred, lower ids come first: in a vocabulary of merged pairs these
    are the merges made first, of what is frequent in text at large.
    """
    ranked, first = counts.astype(np.float64), [token for token in set(always) if token < len(counts)]
    ranked[first] = np.inf
    order = np.argsort(-ranked, kind="stable")
    return np.sort(order[: max(num, len(first))])
