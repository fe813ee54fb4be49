"""From a situation to its memory plan: which parts are there in which phase of a step. Counts alone."""

from __future__ import annotations

from tlt_hpc.plan.memory.activations import drafter_activations, update_activations
from tlt_hpc.plan.memory.engine import engine_parts, num_drafter_parameters, rollout_workspace
from tlt_hpc.plan.memory.parts import MemoryPlan, Part, Phase, Situation, some, total
from tlt_hpc.plan.memory.reference import gathered_reference, reference_in_host_memory, reference_parts
from tlt_hpc.plan.memory.zero import MOMENTS, TrainingState, training_state

RUNTIME_BYTES = 2_000_000_000
"""Assumed of a GPU for CUDA's context, NCCL's buffers and what the allocator cannot give out again."""
PROCESS_BYTES = {"cuda": 3_000_000_000, "cpu": 1_000_000_000}
"""Assumed of a rank's process in host memory: Python, torch, DeepSpeed and their libraries."""
COPY_CHUNK_BYTES = 1 << 24
"""Host memory of a checkpoint is taken in chunks of so much (``checkpoint.host_copy``)."""
_LOG_BYTES = 8
"""Of a response token in the rollout log: the token and its log-probability, before compression."""


def plan_memory(situation: Situation) -> MemoryPlan:
    """What the run takes on each rank's device by phase, of each rank in host memory, and on disk."""
    state = training_state(situation)
    resident = (*_runtime(situation), *engine_parts(situation), *_drafter(situation), *state.resident)
    resident = (*resident, *reference_parts(situation))
    start = tuple(part for part in resident if part.name != MOMENTS)  # the first step makes them
    if situation.device == "cpu":  # the host's memory is the device's
        resident = (*resident, _checkpoint_copy(situation))
    phases = [
        Phase("start", start, _start(situation, state)),
        Phase("rollout", resident, rollout_workspace(situation)),
        Phase("tail", resident, _tail(situation)),
        Phase("update", resident, _update(situation, state)),
        Phase("save", resident, ()),
    ]
    named = tuple(phase for phase in phases if phase.name != "tail" or _trains(situation))
    return MemoryPlan(situation, named, _host(situation, state), _first_host(situation), _disk(situation))


def micro_batch_tokens(situation: Situation) -> int:
    """Most tokens that a rank holds in a pass of the update: its slice of the budget, or of one response of full length
    beyond it; no more than it ever has."""
    config, rollout = situation.config, situation.config.rollout
    sharing = config.optimizer.sequence_parallel
    samples = rollout.prompts_per_step * rollout.group_size // config.algorithm.updates_per_step
    share = -(-samples * sharing // situation.num_ranks) * situation.longest
    tokens = min(share, max(config.optimizer.micro_batch_tokens, situation.longest))
    return -(-tokens // sharing)


def _trains(situation: Situation) -> bool:
    return situation.learns_drafting and situation.config.drafter.train


def _runtime(situation: Situation) -> tuple[Part, ...]:
    return some((Part("CUDA, NCCL (assumed)", RUNTIME_BYTES if situation.device == "cuda" else 0),))


def _drafter(situation: Situation) -> tuple[Part, ...]:
    settings, weights = situation.config.drafter, 4 * num_drafter_parameters(situation)
    averaged = settings.train and settings.average_merges > 1
    return some(
        (
            Part("drafter in training", weights),
            Part("drafter's moments", 2 * weights),
            Part("drafter's average", weights if averaged else 0),
        )
    )


def _start(situation: Situation, state: TrainingState) -> tuple[Part, ...]:
    """The policy arrives whole and is shared out, which at stage 3 is over before the rest is made.

    At stage 3 rank 0 has it whole in host memory, and a GPU one matrix at a time, the largest of them the embedding;
    a reference comes after it in the same way.
    """
    stage, shape = situation.config.optimizer.zero_stage, situation.shape
    whole = situation.item * shape.num_parameters
    if stage == 3:
        if situation.device == "cuda":
            whole = situation.item * shape.vocab_size * shape.hidden_size
        begun = total(part for part in state.resident if part.name not in ("policy", MOMENTS))
        whole -= min(begun, total(reference_parts(situation))) if situation.has_reference else begun
    elif stage:
        whole = max(whole, 4 * -(-shape.num_parameters // situation.num_ranks))  # then gradients of zero, to begin with
    return some((Part("policy, not yet shared out", max(0, whole) if stage else 0),))


def _tail(situation: Situation) -> tuple[Part, ...]:
    weights = 4 * num_drafter_parameters(situation)
    tokens = situation.config.drafter.micro_step_tokens
    return (
        Part("drafter's gradients", weights),
        Part("drafter's activations", drafter_activations(situation, tokens)),
    )


def _update(situation: Situation, state: TrainingState) -> tuple[Part, ...]:
    """At its largest: in a backward pass, as it ends, or in the optimiser's step."""
    activations = update_activations(situation, micro_batch_tokens(situation))
    merge = Part("merge of the drafters", _merge(situation))
    gathered = (*state.held, *gathered_reference(situation))
    held = total(gathered)
    if state.stepping > held + max(activations, state.reduced):
        return some((merge, Part("optimiser's step", state.stepping)))
    last = Part("activations", activations)
    if state.reduced > activations:
        last = Part("gradients being reduced", state.reduced)
    return some((merge, *gathered, last))


def _merge(situation: Situation) -> int:
    """On a CPU the sum that is under way stands where tensors do; from a GPU it goes through host memory."""
    if situation.device == "cuda" or not _trains(situation):
        return 0
    return 3 * 4 * num_drafter_parameters(situation)


def _host(situation: Situation, state: TrainingState) -> tuple[Part, ...]:
    """Of one rank."""
    drafter = num_drafter_parameters(situation)
    copies = 2 if _trains(situation) and situation.device == "cuda" else 0
    return some(
        (
            Part("process (assumed)", PROCESS_BYTES[situation.device]),
            Part("weights while loading", 0 if _rank_0_loads(situation) else _loaded(situation)),
            *(() if situation.device == "cpu" else (_checkpoint_copy(situation),)),
            Part("optimiser (offload)", state.host),
            Part("reference (offload)", reference_in_host_memory(situation)),
            Part("merge of the drafters", copies * 12 * drafter),
        )
    )


def _first_host(situation: Situation) -> tuple[Part, ...]:
    """Of rank 0 beside that."""
    return some((Part("weights while loading", _loaded(situation) if _rank_0_loads(situation) else 0),))


def _rank_0_loads(situation: Situation) -> bool:
    """At stage 3 the others are dealt what it has read, the policy and then the reference."""
    return situation.config.optimizer.zero_stage == 3


def _loaded(situation: Situation) -> int:
    """A whole model on its way to a GPU."""
    return situation.item * situation.shape.num_parameters if situation.device == "cuda" else 0


def _checkpoint_copy(situation: Situation) -> Part:
    """A rank's share of what is saved, and of the drafter alone, in whole chunks each."""
    shares = (_saved(situation), _saved_alone(situation))
    chunks = sum(-(-share // (situation.num_ranks * COPY_CHUNK_BYTES)) for share in shares)
    return Part("copy for checkpoints", chunks * COPY_CHUNK_BYTES)


def _saved_alone(situation: Situation) -> int:
    """Of the drafter's checkpoints between the whole ones."""
    alone = _trains(situation)
    return 16 * num_drafter_parameters(situation) * alone


def _saved(situation: Situation) -> int:
    """Of a checkpoint: masters and moments, the drafter's with its average, a reference that is renewed."""
    renewed = situation.config.algorithm.reference_every_steps > 0
    reference = situation.item * situation.shape.num_parameters * renewed
    return 12 * situation.shape.num_parameters + 16 * num_drafter_parameters(situation) + reference


def _disk(situation: Situation) -> tuple[Part, ...]:
    """Of the whole run, at most."""
    config, saved = situation.config, _saved(situation)
    step = config.samples_per_step * (4 * situation.longest + (_LOG_BYTES - 4) * config.rollout.max_new_tokens)
    cache = config.drafter.cache_bytes * situation.num_ranks if situation.learns_drafting else 0
    return some(
        (
            Part("checkpoints", (config.checkpoint.keep + 1) * saved),  # the next is written before one goes
            Part("the drafter's between them", 3 * _saved_alone(situation)),
            Part("features", cache),
            Part("rollout logs", step * config.run.num_steps),
        )
    )
