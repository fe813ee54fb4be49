"""From a situation to its memory plan: which parts are held in which phase of a step."""

from __future__ import annotations

from tlt_hpc.plan.memory.engine import PAGES, engine_parts, rollout_workspace
from tlt_hpc.plan.memory.plan import MemoryPlan, NamedBytes, PhaseMemory, Situation, present, total
from tlt_hpc.plan.memory.training import (
    FROZEN,
    MOMENTS,
    TrainingState,
    drafter_activations,
    gathered_reference,
    num_drafter_parameters,
    reference_parts,
    training_state,
    update_activations,
)

RUNTIME_BYTES = 2_000_000_000
"""Assumed for CUDA's context, NCCL's buffers and what the allocator cannot reuse, on each GPU."""
PROCESS_BYTES = {"cuda": 3_000_000_000, "cpu": 1_000_000_000}
"""Assumed for a rank's process in host memory: Python, torch, DeepSpeed and their libraries."""
COPY_CHUNK_BYTES = 1 << 24
"""Host memory for a checkpoint's copy is allocated in chunks of this size (``checkpoint.save``)."""
_LOG_BYTES = 8
"""Bytes of a response token in the rollout log: the token and its log-probability, before compression."""


def plan_memory(situation: Situation) -> MemoryPlan:
    """What the run takes on each rank's device by phase, on each rank in host memory, and on disk."""
    state, is_cuda = training_state(situation), situation.device == "cuda"
    runtime = present({"CUDA, NCCL (assumed)": RUNTIME_BYTES if is_cuda else 0})
    resident = runtime | engine_parts(situation) | _drafter(situation) | state.resident | reference_parts(situation)
    start = {name: count for name, count in resident.items() if name != MOMENTS}  # the first step makes them
    if not is_cuda:  # the host's memory is the device's
        resident |= _checkpoint_copy(situation)
    phases = [
        PhaseMemory("start", start | _start(situation, state)),
        PhaseMemory("rollout", resident | rollout_workspace(situation)),
        *([PhaseMemory("tail", resident | _tail(situation))] if situation.has_tail else []),
        PhaseMemory("update", {**resident, PAGES: 0} | _update(situation, state)),  # given back meanwhile
        PhaseMemory("save", resident),
    ]
    loaded = {"weights while loading": situation.item * situation.shape.num_parameters if is_cuda else 0}
    is_sharded = situation.config.optimizer.zero_stage == 3  # rank 0 reads the policy and the reference for all
    host = _host(situation, state, {} if is_sharded else loaded)
    return MemoryPlan(situation, tuple(phases), host, present(loaded if is_sharded else {}), _disk(situation))


def micro_batch_tokens(situation: Situation) -> int:
    """Most tokens that a rank holds in a pass of the update: its slice of the budget, or of one response of full length
    that exceeds it; no more than its share of the step's samples."""
    config, rollout = situation.config, situation.config.rollout
    sharing = config.optimizer.sequence_parallel
    samples = rollout.prompts_per_step * rollout.group_size // config.algorithm.updates_per_step
    share = -(-samples * sharing // situation.num_ranks) * situation.longest
    tokens = min(share, max(config.optimizer.micro_batch_tokens, situation.longest))
    return -(-tokens // sharing)


def _drafter(situation: Situation) -> NamedBytes:
    weights = 4 * num_drafter_parameters(situation)
    average = weights if situation.config.speculation.trains_drafter else 0
    return present({"drafter in training": weights, "drafter's moments": 2 * weights, "drafter's average": average})


def _start(situation: Situation, state: TrainingState) -> NamedBytes:
    """The policy as it is loaded, whole, before ZeRO shards it.

    At stage 3 this ends before the rest is made: rank 0 has it whole in host memory, and a GPU holds one matrix at a
    time, the largest of them the embedding; a reference follows in the same way.
    """
    stage, shape = situation.config.optimizer.zero_stage, situation.shape
    whole = situation.item * shape.num_parameters
    if stage == 3:
        if situation.device == "cuda":
            whole = situation.item * shape.vocab_size * shape.hidden_size
        begun = total(state.resident) - sum(state.resident.get(name, 0) for name in ("policy", FROZEN, MOMENTS))
        whole -= min(begun, total(reference_parts(situation))) if situation.has_reference else begun
    elif situation.frozen_parameters:  # stays as it is
        whole = 4 * situation.own_parameters
    elif stage:
        whole = max(whole, 4 * situation.own_parameters)  # later the gradients, which begin as zeros
    return present({"policy, not yet shared out": max(0, whole) if stage else 0})


def _tail(situation: Situation) -> NamedBytes:
    activations = drafter_activations(situation, situation.config.drafter.micro_step_tokens)
    return present({"drafter's gradients": 4 * num_drafter_parameters(situation), "drafter's activations": activations})


def _update(situation: Situation, state: TrainingState) -> NamedBytes:
    """The update at its largest: in a backward pass, at the end of one, or in the optimiser's step."""
    activations = update_activations(situation, micro_batch_tokens(situation))
    # on a CPU the sum in progress is held as tensors; on a GPU it has ended before, and takes less than what follows
    merges = situation.device == "cpu" and situation.has_tail
    merge = {"merge of the drafters": 12 * num_drafter_parameters(situation) if merges else 0}
    gathered = state.held | gathered_reference(situation)
    if state.stepping > total(gathered) + max(activations, state.reduced):
        return present({**merge, "optimiser's step": state.stepping})
    largest = "gradients being reduced" if state.reduced > activations else "activations"
    return present({**merge, **gathered, largest: max(state.reduced, activations)})


def _host(situation: Situation, state: TrainingState, loaded: dict[str, int]) -> NamedBytes:
    """Host memory of one rank."""
    is_cuda = situation.device == "cuda"
    reference = situation.item * situation.own_parameters  # a rank's shard
    return present(
        {
            "process (assumed)": PROCESS_BYTES[situation.device],
            **loaded,
            **(_checkpoint_copy(situation) if is_cuda else {}),
            "optimiser (offload)": state.host,
            "reference (offload)": reference * (situation.has_reference and situation.offloads_parameters),
        }
    )


def _checkpoint_copy(situation: Situation) -> dict[str, int]:
    """A rank's share of a checkpoint, and of the drafter's own checkpoint, in whole chunks each."""
    shares = (_saved(situation), _saved_alone(situation))
    chunks = sum(-(-share // (situation.num_ranks * COPY_CHUNK_BYTES)) for share in shares)
    return {"copy for checkpoints": chunks * COPY_CHUNK_BYTES}


def _saved_alone(situation: Situation) -> int:
    """Bytes of a checkpoint of the drafter alone, written between the whole ones."""
    return 16 * num_drafter_parameters(situation) * situation.trains_drafter


def _saved(situation: Situation) -> int:
    """Bytes of a checkpoint: masters and moments, the drafter's with its average."""
    return 12 * situation.trained_parameters + 16 * num_drafter_parameters(situation)


def _disk(situation: Situation) -> NamedBytes:
    """Upper bound of what the whole run writes."""
    config = situation.config
    step = config.samples_per_step * (4 * situation.longest + (_LOG_BYTES - 4) * config.rollout.max_new_tokens)
    return present(
        {
            # the next is written before the oldest is removed; the best by an evaluation is kept beside the newest
            "checkpoints": (config.checkpoint.keep + 1 + bool(config.evaluation.every_steps)) * _saved(situation),
            "the drafter's between them": 3 * _saved_alone(situation),
            "features": config.drafter.cache_bytes * situation.num_ranks if situation.learns_drafting else 0,
            "rollout logs": step * config.run.num_steps,
        }
    )
