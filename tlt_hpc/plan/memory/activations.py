"""What a forward pass keeps for its backward pass, of the policy and of the drafter. Counts alone.

Every count was found by counting the bytes of live tensors over shapes, lengths and precisions (LiveBytes). ``H``
hidden, ``I`` intermediate, ``V`` vocabulary, ``q`` all query heads, ``k`` all key heads, each times the head size.
"""

from __future__ import annotations

from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.parts import Situation

CHUNK_LOGITS = 1 << 26
"""Logits in memory at once, of policy and drafter alike."""
_LOGIT_BYTES = 16
"""Of the policy's head: logits, their log-softmax, its exponential and its product, in float32."""
_DRAFT_LOGIT_BYTES = 20
"""Of the drafter's loss: both logits, both softmaxes, their gradient."""
_MASKED_RUN = 128
"""Keys of a run of short documents, whose mask is kept by every layer (``models.documents``); on CPUs."""
_MOST_SCORES = 1 << 24


def update_activations(situation: Situation, num_tokens: int) -> int:
    """Most bytes of activations in one forward and backward pass of the policy over ``num_tokens``."""
    shape, item = situation.shape, situation.item
    layer = policy_layer_bytes(situation) * num_tokens
    repeats = situation.config.optimizer.repeats_layers(situation.device)
    kept = num_tokens * item * shape.hidden_size * shape.num_layers if repeats else layer * shape.num_layers
    kept += num_tokens * (3 * item * shape.hidden_size + 2 * item * shape.head_dim)  # the last norm, angles
    gradients = num_tokens * item * 3 * max(shape.hidden_size, shape.intermediate_size // 2)
    logits = _LOGIT_BYTES * min(num_tokens * shape.vocab_size, max(CHUNK_LOGITS, shape.vocab_size))
    return kept + max(logits, gradients + (layer if repeats else 0))


def policy_layer_bytes(situation: Situation) -> int:
    """What one layer of transformers' model keeps of a token."""
    s, item = situation.shape, situation.item
    q, k = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    norm = 3 * item if item == 4 else 4 + 2 * item  # input in float32, normed, weighted; half precision casts
    outputs = 2 if situation.device == "cpu" else 1  # on a GPU nothing puts the runs of documents together
    total = 2 * norm * s.hidden_size + item * ((1 + outputs) * q + 2 * k + 4 * s.intermediate_size)
    total += 8 + 4 * s.num_heads  # norms' factors, attention's log-sum-exp
    if s.head_norm:
        total += (norm - item) * (q + k)
    return total + (item * _MASKED_RUN if situation.device == "cpu" else 0)


def drafter_activations(situation: Situation, num_tokens: int) -> int:
    """Most bytes of activations of a micro-step of ``num_tokens``, in float32."""
    settings, s = situation.config.drafter, situation.shape
    q, k = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    wide = 10 if settings.form == "eagle" else 16
    step = 4 * (wide * s.hidden_size + 4 * (q + k) + 4 * s.intermediate_size + 64)
    step += 4 * _MASKED_RUN if situation.device == "cpu" else 0
    kept, most = step * num_tokens, 0
    length = min(num_tokens, situation.longest)
    if settings.num_unrolled > 1:
        scores = s.num_heads * length
        again = scores * length > _MOST_SCORES
        kept += (settings.num_unrolled - 1) * num_tokens * (step + (0 if again else 8 * scores))
        most = 20 * _MOST_SCORES if again else 0
    logits = _DRAFT_LOGIT_BYTES * min(num_tokens * draft_vocabulary(situation), CHUNK_LOGITS)
    return kept + max(most, logits, 6 * s.intermediate_size * num_tokens)


def draft_vocabulary(situation: Situation) -> int:
    """Logits of a position in the drafter's loss, whose larger half is the target's."""
    return situation.shape.vocab_size


def drafter_parameters(shape: ModelShape, form: str, vocabulary: int) -> int:
    """Weights of a drafter; ``vocabulary``: of an EAGLE-3 one."""
    h, layer = shape.hidden_size, drafter_layer_parameters(shape, form)
    if form == "eagle":
        return 2 * h * h + layer + h
    return 3 * h * h + layer + 4 * h + min(vocabulary, shape.vocab_size) * h


def drafter_layer_parameters(shape: ModelShape, form: str) -> int:
    """Of them those of the layer's matrices; EAGLE-3's attention reads states and embeddings side by side."""
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    attention = (1 if form == "eagle" else 2) * rows + shape.num_heads * shape.head_dim
    return shape.hidden_size * (attention + 3 * shape.intermediate_size)
