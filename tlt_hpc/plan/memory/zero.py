"""What the policy's training state takes on each rank, by ZeRO stage. Counts alone; DeepSpeed's own code is the source.

Bytes of DeepSpeed 0.19 with the settings of ``rl/policy.py``, found by counting tensors at every stage on 1 and 2
ranks (``tools/check_memory_plan.py`` counts them again). ``P`` parameters, ``N`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlt_hpc.plan.memory.parts import Part, Situation

MOMENTS = "Adam moments"
BUCKET_ELEMENTS = 50_000_000
"""Gradients reduced in one collective (``rl.engine.REDUCE_BUCKET_ELEMENTS``)."""
_KEPT_WHOLE = 100_000
"""Parameters up to this size stay gathered at stage 3 (DeepSpeed's stage3_param_persistence_threshold)."""
_MOST_GATHERED = 1_000_000_000
"""Parameters gathered at once at stage 3 (its stage3_max_live_parameters)."""
_STAGE_0_REDUCED = 500_000_000
"""Gradients that stage 0 copies at once to reduce them."""


@dataclass(frozen=True)
class TrainingState:
    """Bytes of a rank."""

    resident: tuple[Part, ...]
    held: tuple[Part, ...]
    """Beside activations, through all micro-batches of an update."""
    reduced: int
    """At the end of a backward pass, when activations are gone: gradients on their way to the ranks that keep them."""
    stepping: int
    """Inside the optimiser's step, in place of activations and of what is held."""
    host: int
    """Of them in host memory, with offload."""


def training_state(situation: Situation) -> TrainingState:
    """What the policy's engine takes at the configured stage."""
    count, settings = situation.shape.num_parameters, situation.config.optimizer
    item, ranks = situation.item, situation.num_ranks
    if settings.zero_stage == 0:
        return _stage_0(count)
    own = -(-count // ranks)
    if settings.zero_stage == 1 and item == 2 and not situation.offloads:
        return _stage_1_in_bf16(count, own)
    state = _stage_3(situation, count, own) if settings.zero_stage == 3 else _stage_1_or_2(situation, count, own)
    if not situation.offloads:
        return state
    return _offload(state, own, item * own if situation.offloads_parameters else 0)


def _stage_0(count: int) -> TrainingState:
    return TrainingState(
        resident=(Part("policy", 4 * count), Part(MOMENTS, 8 * count)),
        held=(Part("gradients", 4 * count),),
        reduced=4 * min(count, _STAGE_0_REDUCED),
        stepping=4 * count,
        host=0,
    )


def _stage_1_in_bf16(count: int, own: int) -> TrainingState:
    """DeepSpeed's BF16_Optimizer: every rank keeps all gradients, in fp32."""
    return TrainingState(
        resident=(
            Part("policy", 2 * count),
            Part("gradients", 4 * count),
            Part("fp32 masters", 4 * own),
            Part(MOMENTS, 8 * own),
        ),
        held=(Part("gradients in bf16", 2 * count),),
        reduced=0,
        stepping=2 * count + 8 * own,
        host=0,
    )


def _stage_1_or_2(situation: Situation, count: int, own: int) -> TrainingState:
    bucket = 4 * min(count, BUCKET_ELEMENTS)
    # stage 1 adds up whole gradients over the micro-batches, stage 2 each rank's share
    waiting = situation.item * count if situation.config.optimizer.zero_stage == 1 else 4 * own
    return TrainingState(
        resident=(
            Part("policy", situation.item * count),
            Part("fp32 masters", 4 * own),
            Part(MOMENTS, 8 * own),
        ),
        held=(Part("gradients", waiting), Part("bucket of gradients", bucket), *_head_reduction(situation)),
        reduced=4 * own if situation.config.optimizer.zero_stage == 1 else bucket,
        stepping=12 * own,
        host=0,
    )


def _stage_3(situation: Situation, count: int, own: int) -> TrainingState:
    item, bucket = situation.item, 4 * min(count, BUCKET_ELEMENTS)
    gathered = min(count, small_parameters(situation) + _MOST_GATHERED) if situation.num_ranks > 1 else 0
    return TrainingState(
        resident=(
            Part("policy", item * own),
            Part("gradients", 4 * own),
            Part("fp32 masters", 4 * own),
            Part(MOMENTS, 8 * own),
            Part("bucket of gradients", bucket),
        ),
        held=(Part("gathered weights", item * gathered), *_head_reduction(situation)),
        reduced=2 * bucket,
        stepping=12 * own,
        host=0,
    )


def _offload(state: TrainingState, own: int, parameters: int) -> TrainingState:
    """Masters, moments and the rank's gradients in host memory, where the step is taken too; its parameters if asked.

    ``parameters``: bytes of the rank's own, 0 where they stay on the GPU.
    """
    away = {"fp32 masters", MOMENTS, "gradients"} | ({"policy"} if parameters else set())
    return TrainingState(
        resident=tuple(part for part in state.resident if part.name not in away),
        held=tuple(part for part in state.held if part.name not in away),
        reduced=state.reduced,
        stepping=0,
        host=16 * own + parameters,
    )


def _head_reduction(situation: Situation) -> tuple[Part, ...]:
    """The gradient of the head (a tied one is the embedding's) on its way, where no bucket holds it.

    In half precision it is there once more in float32, as it is sent, while the backward pass goes on to the layers.
    """
    count = situation.shape.vocab_size * situation.shape.hidden_size
    if count <= BUCKET_ELEMENTS:
        return ()
    return (Part("head's gradient", count * (situation.item + (4 if situation.item == 2 else 0))),)


def small_parameters(situation: Situation) -> int:
    """Numbers in tensors that stage 3 never shares out: norms and biases, and all of a small model."""
    s = situation.shape
    rows, columns = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    matrices = [rows * s.hidden_size] * 2 + [columns * s.hidden_size] * 2 + [s.intermediate_size * s.hidden_size] * 3
    table = s.vocab_size * s.hidden_size
    tables = [table] if s.tied_head else [table, table]
    large = s.num_layers * sum(size for size in matrices if size > _KEPT_WHOLE)
    large += sum(size for size in tables if size > _KEPT_WHOLE)
    return s.num_parameters - large
