"""From a situation to its memory plan: which parts are held in which phase of a step."""

from __future__ import annotations

from tlt_hpc.checkpoint.save import CHUNK_BYTES
from tlt_hpc.plan.memory.engine import PAGES, PlannedEngine
from tlt_hpc.plan.memory.plan import MemoryPlan, PhaseMemory
from tlt_hpc.plan.memory.situation import NamedBytes, Situation, total_bytes, without_empty_parts
from tlt_hpc.plan.memory.training import (
    FROZEN,
    MOMENTS,
    TrainingState,
    drafter_activations,
    gathered_reference_bytes,
    reference_model_bytes,
    training_state_bytes,
    update_activation_bytes,
)

CONTEXT_BYTES, COMMUNICATOR_BYTES = 1_500_000_000, 700_000_000
"""Assumed on each GPU: for CUDA's context and what the allocator cannot reuse, and for each communicator of NCCL."""
PROCESS_BYTES = {"cuda": 3_000_000_000, "cpu": 1_000_000_000}
"""Assumed for a rank's process in host memory: Python, torch, DeepSpeed and their libraries."""
_LOG_BYTES = 8
"""Bytes of a response token in the rollout log: the token and its log-probability, before compression."""


def plan_memory(situation: Situation, engine: PlannedEngine | None = None) -> MemoryPlan:
    """Bytes that the run takes on each rank's device by phase, on each rank in host memory, and on disk.

    Args:
        engine: of a situation that differs in training alone; None: it is constructed.

    Raises:
        ConfigError: ``rollout.kv_bytes`` holds no response of full length.
    """
    state, is_cuda = training_state_bytes(situation), situation.device == "cuda"
    engine = engine or PlannedEngine(situation)
    num_drafter = engine.num_drafter_parameters
    saved = _checkpoint_bytes(situation, num_drafter)
    runtime = {"CUDA, NCCL (assumed)": CONTEXT_BYTES + COMMUNICATOR_BYTES * _num_communicators(situation)}
    training = _drafter_training_bytes(situation, num_drafter) | state.resident | reference_model_bytes(situation)
    start = {name: count for name, count in training.items() if name != MOMENTS}  # the first step makes them
    held = (runtime if is_cuda else {}) | engine.resident_bytes
    # on CPUs the host's memory is the device's
    resident = held | training | ({} if is_cuda else _checkpoint_copy_bytes(situation, saved))
    phases = [
        PhaseMemory("start", held | start | _loading_phase_bytes(situation, state)),
        PhaseMemory("rollout", resident | engine.workspace_bytes),
        *(
            [PhaseMemory("tail", resident | _tail_phase_bytes(situation, num_drafter))]
            if situation.has_tail_phase
            else []
        ),
        PhaseMemory(
            "update", {**resident, PAGES: 0} | _update_phase_bytes(situation, state, num_drafter)
        ),  # given back meanwhile
        PhaseMemory("save", resident),
    ]
    loaded = {"weights while loading": situation.bytes_per_number * situation.shape.num_parameters if is_cuda else 0}
    is_sharded = situation.config.optimizer.zero_stage == 3  # rank 0 reads the policy and the reference for all
    copy = _checkpoint_copy_bytes(situation, saved) if is_cuda else {}
    host = _host_memory_bytes(situation, state, copy if is_sharded else loaded | copy)
    first_host = without_empty_parts(loaded if is_sharded else {})
    return MemoryPlan(situation, engine, tuple(phases), host, first_host, _disk_bytes(situation, saved))


def _num_communicators(situation: Situation) -> int:
    """Groups of ranks with a communicator: torch's of all, DeepSpeed's of all, a replica's, and one for sequences."""
    config, several = situation.config, situation.num_ranks > 1
    return 1 + several + (config.rollout.tensor_parallel > 1) + (config.optimizer.sequence_parallel > 1)


def micro_batch_tokens(situation: Situation) -> int:
    """Most tokens that a rank holds in a pass of the update: its slice of the budget, or of one response of full length
    that exceeds it; no more than its share of the step's samples."""
    config, rollout = situation.config, situation.config.rollout
    sharing = config.optimizer.sequence_parallel
    samples = rollout.prompts_per_step * rollout.group_size // config.algorithm.updates_per_step
    share = -(-samples * sharing // situation.num_ranks) * situation.max_sequence_tokens
    tokens = min(share, max(config.optimizer.micro_batch_tokens, situation.max_sequence_tokens))
    return -(-tokens // sharing)


def _drafter_training_bytes(situation: Situation, count: int) -> NamedBytes:
    average = 4 * count if situation.config.speculation.trains_drafter else 0
    return without_empty_parts(
        {"drafter in training": 4 * count, "drafter's moments": 8 * count, "drafter's average": average}
    )


def _loading_phase_bytes(situation: Situation, state: TrainingState) -> NamedBytes:
    """The policy as it is loaded, whole, before ZeRO shards it.

    At stage 3 this ends before the rest is made: rank 0 has it whole in host memory, and a GPU holds one matrix at a
    time, the largest of them the embedding; a reference follows in the same way.
    """
    stage, shape = situation.config.optimizer.zero_stage, situation.shape
    whole = situation.bytes_per_number * shape.num_parameters
    if stage == 3:
        if situation.device == "cuda":
            whole = situation.bytes_per_number * shape.vocab_size * shape.hidden_size
        begun = total_bytes(state.resident) - sum(state.resident.get(name, 0) for name in ("policy", FROZEN, MOMENTS))
        whole -= min(begun, total_bytes(reference_model_bytes(situation))) if situation.has_reference else begun
    elif situation.frozen_parameters:  # stays as it is
        whole = 4 * situation.num_shard_parameters
    elif stage:
        whole = max(whole, 4 * situation.num_shard_parameters)  # later the gradients, which begin as zeros
    return without_empty_parts({"policy, not yet shared out": max(0, whole) if stage else 0})


def _tail_phase_bytes(situation: Situation, num_drafter: int) -> NamedBytes:
    activations = drafter_activations(situation, situation.config.drafter.micro_step_tokens)
    return without_empty_parts({"drafter's gradients": 4 * num_drafter, "drafter's activations": activations})


def _update_phase_bytes(situation: Situation, state: TrainingState, num_drafter: int) -> NamedBytes:
    """The update at its largest: in a backward pass, at the end of one, or in the optimiser's step."""
    activations = update_activation_bytes(situation, micro_batch_tokens(situation))
    # on a CPU the sum in progress is held as tensors; on a GPU it has ended before, and takes less than what follows
    merges = situation.device == "cpu" and situation.has_tail_phase
    merge = {"merge of the drafters": 12 * num_drafter if merges else 0}
    gathered = state.held | gathered_reference_bytes(situation)
    if state.stepping > total_bytes(gathered) + max(activations, state.reduced):
        return without_empty_parts({**merge, "optimiser's step": state.stepping})
    largest = "gradients being reduced" if state.reduced > activations else "activations"
    return without_empty_parts({**merge, **gathered, largest: max(state.reduced, activations)})


def _host_memory_bytes(situation: Situation, state: TrainingState, more: dict[str, int]) -> NamedBytes:
    """Host memory of one rank."""
    reference = situation.bytes_per_number * situation.num_shard_parameters  # a rank's shard
    return without_empty_parts(
        {
            "process (assumed)": PROCESS_BYTES[situation.device],
            **more,
            "optimiser (offload)": state.host,
            "reference (offload)": reference * (situation.has_reference and situation.offloads_parameters),
        }
    )


def _checkpoint_bytes(situation: Situation, num_drafter: int) -> tuple[int, int]:
    """Bytes of a checkpoint, and of one of the drafter alone, which are written between those.

    Masters and moments of the policy; those of the drafter with its average.
    """
    drafter = 16 * num_drafter
    return 12 * situation.trained_parameters + drafter, drafter * situation.trains_drafter


def _checkpoint_copy_bytes(situation: Situation, saved: tuple[int, int]) -> NamedBytes:
    """A rank's share of either kind of checkpoint, in whole chunks each."""
    chunks = sum(-(-num_bytes // (situation.num_ranks * CHUNK_BYTES)) for num_bytes in saved)
    return {"copy for checkpoints": chunks * CHUNK_BYTES}


def _disk_bytes(situation: Situation, saved: tuple[int, int]) -> NamedBytes:
    """Upper bound of what the whole run writes."""
    config = situation.config
    step = config.samples_per_step * (
        4 * situation.max_sequence_tokens + (_LOG_BYTES - 4) * config.rollout.max_new_tokens
    )
    return without_empty_parts(
        {
            # the next is written before the oldest is removed; the best by an evaluation is kept beside the newest
            "checkpoints": (config.checkpoint.keep + 1 + bool(config.evaluation.every_steps)) * saved[0],
            "the drafter's between them": 3 * saved[1],
            "features": config.drafter.cache_bytes * situation.num_ranks if situation.has_learned_drafter else 0,
            "rollout logs": step * config.run.num_steps,
        }
    )
