"""What training the policy and the drafter takes on each rank: state by ZeRO stage, reference model, activations.

Bytes of DeepSpeed 0.19 with the settings of ``rl/policy.py``, found by counting tensors at every stage on 1 and 2
ranks, and activations by counting the bytes of live tensors over shapes, lengths and precisions
(``tools/check_memory_plan.py`` counts them again). ``P`` parameters, ``N`` ranks; ``H`` hidden, ``I`` intermediate,
``V`` vocabulary, ``q`` all query heads, ``k`` all key heads, each times the head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tlt_hpc.models.documents import MAX_SCORES, RUN_TOKENS
from tlt_hpc.models.policy_model import CHUNK_LOGITS
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.situation import NamedBytes, Situation, without_empty_parts
from tlt_hpc.rl.distributed import REDUCE_BUCKET_ELEMENTS

MOMENTS, FROZEN = "Adam moments", "frozen weights"
_KEPT_WHOLE = 100_000
"""Parameters up to this size stay gathered at stage 3 (DeepSpeed's stage3_param_persistence_threshold)."""
_MAX_GATHERED = 1_000_000_000
"""Parameters gathered at once at stage 3 (its stage3_max_live_parameters)."""
_PREFETCHED = 50_000_000
"""Parameters of the next layers that are gathered ahead (its stage3_prefetch_bucket_size)."""
_SUB_GROUP = 1_000_000_000
"""A rank's parameters that an optimiser on the host steps at once (its sub_group_size)."""
_STAGE_0_REDUCED = 500_000_000
"""Gradients that stage 0 copies at once to reduce them."""
_LOGIT_BYTES = 16
"""Bytes of a logit of the policy's head: logits, their log-softmax, its exponential and its product, in float32."""
_DRAFT_LOGIT_BYTES = 20
"""Bytes of a logit in the drafter's loss: both logits, both softmaxes, their gradient."""
_MULTIPROCESSORS = 132
"""Of an H100 or H200; other GPUs have fewer, or about as many."""


@dataclass(frozen=True)
class TrainingState:
    """Bytes of a rank's training state."""

    resident: NamedBytes
    held: NamedBytes = field(default_factory=dict)
    """Held in addition to activations, through all micro-batches of an update."""
    reduced: int = 0
    """Gradients on their way to the ranks that keep them, at the end of a backward pass, when activations are gone."""
    stepping: int = 0
    """Inside the optimiser's step, in place of activations and of what is held."""
    host: int = 0
    """In host memory, with offload."""


def training_state_bytes(situation: Situation) -> TrainingState:
    """Bytes of the policy's engine at the configured ZeRO stage."""
    stage = situation.config.optimizer.zero_stage
    if stage == 0:
        state = _zero_stage_0_bytes(situation.trained_parameters)
    elif stage == 1 and situation.bytes_per_number == 2 and not situation.offloads_optimizer:
        state = _zero_stage_1_bf16_bytes(situation)
    else:
        state = _zero_stage_3_bytes(situation) if stage == 3 else _zero_stage_1_2_bytes(situation)
    frozen = -(-situation.frozen_parameters // (situation.num_ranks if stage == 3 else 1))
    state = replace(state, resident=without_empty_parts({FROZEN: situation.bytes_per_number * frozen}) | state.resident)
    return _with_optimizer_offloaded(state, situation) if situation.offloads_optimizer else state


def _zero_stage_0_bytes(count: int) -> TrainingState:
    return TrainingState(
        resident=without_empty_parts({"policy": 4 * count, MOMENTS: 8 * count}),
        held=without_empty_parts({"gradients": 4 * count}),
        reduced=4 * min(count, _STAGE_0_REDUCED),
        stepping=4 * count,
    )


def _zero_stage_1_bf16_bytes(situation: Situation) -> TrainingState:
    """DeepSpeed's BF16_Optimizer: every rank keeps all gradients, in fp32."""
    count, own = situation.trained_parameters, situation.num_shard_parameters
    state = {"policy": 2 * count, "gradients": 4 * count, "fp32 masters": 4 * own, MOMENTS: 8 * own}
    return TrainingState(
        without_empty_parts(state), without_empty_parts({"gradients in bf16": 2 * count}), stepping=2 * count + 8 * own
    )


def _zero_stage_1_2_bytes(situation: Situation) -> TrainingState:
    count, own = situation.trained_parameters, situation.num_shard_parameters
    is_stage_1 = situation.config.optimizer.zero_stage == 1
    bucket = 4 * min(count, REDUCE_BUCKET_ELEMENTS)
    # stage 1 adds up whole gradients over the micro-batches, stage 2 each rank's shard
    held = {"gradients": situation.bytes_per_number * count if is_stage_1 else 4 * own, "bucket of gradients": bucket}
    return TrainingState(
        resident=without_empty_parts(
            {"policy": situation.bytes_per_number * count, "fp32 masters": 4 * own, MOMENTS: 8 * own}
        ),
        held=without_empty_parts({**held, **_head_gradient_bytes(situation)}),
        reduced=4 * own if is_stage_1 else bucket,
        stepping=12 * own,
    )


def _zero_stage_3_bytes(situation: Situation) -> TrainingState:
    count, own, item = situation.trained_parameters, situation.num_shard_parameters, situation.bytes_per_number
    bucket = 4 * min(count, REDUCE_BUCKET_ELEMENTS)
    gathered = (
        min(count + situation.frozen_parameters, num_unsharded_parameters(situation) + _MAX_GATHERED)
        if situation.num_ranks > 1
        else 0
    )
    state = {"policy": item * own, "gradients": 4 * own, "fp32 masters": 4 * own, MOMENTS: 8 * own}
    return TrainingState(
        resident=without_empty_parts({**state, "bucket of gradients": bucket}),
        held=without_empty_parts({"gathered weights": item * gathered, **_head_gradient_bytes(situation)}),
        reduced=2 * bucket,
        stepping=12 * own,
    )


def _with_optimizer_offloaded(state: TrainingState, situation: Situation) -> TrainingState:
    """The state with masters, moments and the rank's gradients in host memory, where the step is taken too; its
    parameters if asked.

    The host has the gradients twice: as they are added up, and as the step reads them.
    """
    own, moves_parameters = situation.num_shard_parameters, situation.offloads_parameters
    groups = [min(_SUB_GROUP, own - start) for start in range(0, own, _SUB_GROUP)]
    host = 12 * own + _pinned_allocation_bytes(4 * own) + sum(_pinned_allocation_bytes(4 * count) for count in groups)
    away = {"fp32 masters", MOMENTS, "gradients"} | ({"policy", FROZEN} if moves_parameters else set())
    return TrainingState(
        resident={name: count for name, count in state.resident.items() if name not in away},
        held={name: count for name, count in state.held.items() if name not in away},
        reduced=state.reduced,
        host=host
        + sum(_pinned_allocation_bytes(state.resident.get(name, 0)) for name in ("policy", FROZEN) if moves_parameters),
    )


def _pinned_allocation_bytes(num_bytes: int) -> int:
    """What torch's allocator takes for so many bytes of pinned host memory: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _head_gradient_bytes(situation: Situation) -> dict[str, int]:
    """The largest gradient, mostly the head's (if tied, the embedding's), while it is reduced, if it exceeds a bucket.

    In half precision a float32 copy of it is sent while the backward pass continues with the layers.
    """
    shape = situation.shape
    largest = max(shape.vocab_size * shape.hidden_size, *_mlp_matrix_sizes(shape))
    count = 0 if situation.frozen_parameters else largest
    size = situation.bytes_per_number + (4 if situation.bytes_per_number == 2 else 0)
    return {"head's gradient": count * size if count > REDUCE_BUCKET_ELEMENTS else 0}


def num_unsharded_parameters(situation: Situation) -> int:
    """Parameters in tensors that stage 3 never shards: norms and biases, and all of a small model."""
    s = situation.shape
    rows, columns = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    matrices = [rows * s.hidden_size] * 2 + [columns * s.hidden_size] * 2 + _mlp_matrix_sizes(s)
    table = s.vocab_size * s.hidden_size
    tables = [table] if s.tied_head else [table, table]
    large = s.num_layers * sum(size for size in matrices if size > _KEPT_WHOLE)
    large += sum(size for size in tables if size > _KEPT_WHOLE)
    return s.num_parameters - large + (situation.trained_parameters if situation.frozen_parameters else 0)


def _mlp_matrix_sizes(s: ModelShape) -> list[int]:
    """Sizes of the tensors of a layer's MLP; those of all experts are in one."""
    if not s.num_experts:
        return [s.intermediate_size * s.hidden_size] * 3
    experts = s.num_experts * s.expert_size * s.hidden_size
    return [s.num_experts * s.hidden_size, 2 * experts, experts]


# --- the reference model: whole below stage 3, sharded at stage 3 ---


def reference_model_bytes(situation: Situation) -> NamedBytes:
    """Bytes of the reference model on the device; at stage 3 its shard, and small tensors whole once they were read."""
    if not situation.has_reference:
        return {}
    count = situation.shape.num_parameters
    if situation.config.optimizer.zero_stage == 3:
        count = 0 if situation.offloads_parameters else situation.num_shard_parameters
        count += num_unsharded_parameters(situation) if situation.num_ranks > 1 else 0
    return without_empty_parts({"reference": situation.bytes_per_number * count})


def gathered_reference_bytes(situation: Situation) -> NamedBytes:
    """Bytes that a forward pass of a sharded reference gathers at once: a table, and what is prefetched."""
    is_sharded = situation.config.optimizer.zero_stage == 3 and situation.num_ranks > 1
    if not situation.has_reference or not is_sharded:
        return {}
    s = situation.shape
    most = s.vocab_size * s.hidden_size + _PREFETCHED + max(_mlp_matrix_sizes(s))
    count = min(s.num_parameters - num_unsharded_parameters(situation), most)
    return without_empty_parts({"gathered reference": situation.bytes_per_number * count})


# --- activations: what a forward pass keeps for its backward pass ---


def update_activation_bytes(situation: Situation, num_tokens: int) -> int:
    """Most bytes of activations in one forward and backward pass of the policy over ``num_tokens``."""
    shape, item = situation.shape, situation.bytes_per_number
    layer = _policy_layer_bytes(situation) * num_tokens
    repeats = situation.config.optimizer.uses_gradient_checkpointing(situation.device)
    kept = num_tokens * item * shape.hidden_size * shape.num_layers if repeats else layer * shape.num_layers
    kept += num_tokens * (3 * item * shape.hidden_size + 2 * item * shape.head_dim)  # the last norm, rotary table
    if situation.config.algorithm.router_aux_coefficient:  # all routers' logits, and their softmax in float32
        kept += num_tokens * (item + 4) * shape.num_experts * shape.num_layers
    gradients = num_tokens * item * 3 * max(shape.hidden_size, shape.mlp_width // 2)
    gradients += _query_gradient_bytes(situation, num_tokens)
    logits = _LOGIT_BYTES * min(num_tokens * shape.vocab_size, max(CHUNK_LOGITS, shape.vocab_size))
    if item == 2 and not situation.frozen_parameters:  # the head's gradient and a part, in float32
        logits += 8 * shape.vocab_size * shape.hidden_size
    return kept + max(logits, gradients + (layer if repeats else 0))


def _query_gradient_bytes(situation: Situation, num_tokens: int) -> int:
    """What deterministic flash attention adds up the queries' gradients in, in float32: the fewer documents, the more
    buffers of all queries.
    """
    s, optimizer = situation.shape, situation.config.optimizer
    if situation.device == "cpu" or situation.bytes_per_number == 4:
        return 0
    documents = max(1, num_tokens // situation.max_sequence_tokens)
    heads = max(1, s.num_heads // optimizer.sequence_parallel)
    return 4 * num_tokens * s.num_heads * s.head_dim * -(-_MULTIPROCESSORS // (documents * heads))


def _policy_layer_bytes(situation: Situation) -> int:
    """What one layer of transformers' model keeps of a token."""
    s, item = situation.shape, situation.bytes_per_number
    q, k = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    norm = 3 * item if item == 4 else 4 + 2 * item  # input in float32, normed, weighted; half precision casts
    outputs = 2 if situation.device == "cpu" else 1  # on a GPU the runs of documents need no concatenation
    norms = (4 if s.output_norms else 2) * norm * s.hidden_size
    inner = 4 * s.mlp_width + 3 * s.experts_per_token * s.hidden_size
    total = norms + item * ((1 + outputs) * q + 2 * k + inner)
    total += 8 + 4 * s.num_heads  # norms' factors, attention's log-sum-exp
    if s.head_norm:
        total += (norm - item) * (q + k)
    return total + (item * RUN_TOKENS if situation.device == "cpu" else 0)


def drafter_activations(situation: Situation, num_tokens: int) -> int:
    """Most bytes of activations of a micro-step of ``num_tokens``, in float32."""
    settings, s = situation.config.drafter, situation.shape
    q, k = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    wide = 10 if settings.form == "eagle" else 16
    step = 4 * (wide * s.hidden_size + 4 * (q + k) + 4 * s.intermediate_size + 64)
    step += 4 * RUN_TOKENS if situation.device == "cpu" else 0
    kept, most = step * num_tokens, 0
    length = min(num_tokens, situation.max_sequence_tokens)
    if settings.num_unrolled > 1:
        scores = s.num_heads * length
        recomputes = scores * length > MAX_SCORES
        kept += (settings.num_unrolled - 1) * num_tokens * (step + (0 if recomputes else 8 * scores))
        most = 20 * MAX_SCORES if recomputes else 0
    # the target's logits are the larger half, whatever the drafter's vocabulary is
    logits = _DRAFT_LOGIT_BYTES * min(num_tokens * s.vocab_size, CHUNK_LOGITS)
    return kept + max(most, logits, 6 * s.intermediate_size * num_tokens)
