"""What the rollout engine takes on each rank: weights, pages, and the workspace of its widest pass. Counts alone.

Of a replica's layers a rank has its part (``Situation.part``), and so of keys and values; embedding, head, hidden
states and features are whole on each, and ``max_live`` sequences are a replica's: every rank has a row of each.
"""

from __future__ import annotations

from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.activations import drafter_layer_parameters, drafter_parameters
from tlt_hpc.plan.memory.parts import Part, Situation, some
from tlt_hpc.rollout.strategy import Strategy, strategies_of

GRAPHS_BYTES = 1_500_000_000
"""Assumed of captured graphs on a GPU: their intermediates, and what the driver keeps of each."""
_SPARE_POSITIONS = 64
_MOST_TABLE_BYTES = 1 << 26
_LEAST_PACKED = 1 << 18
_NOISE_AHEAD, _NOISE_BLOCK = 32, 1 << 15
_FLOAT64_ROWS = 2048
_NUCLEUS_BYTES, _GUARDED_NUCLEUS_BYTES = 38, 46
"""Of a logit where ``top_p`` truncates, beside what its choice takes anyway: sorted, summed up, searched twice."""


def engine_parts(situation: Situation) -> tuple[Part, ...]:
    """What the engine holds from the start to the end of a run."""
    return some(
        (
            Part("rollout weights", situation.item * situation.part.num_parameters),
            Part("packed weights", _packed(situation)),
            Part("drafter in use", situation.item * _served_numbers(situation)),
            Part("keys, values, features", pool_bytes(situation)),
            Part("noise and rows", _rows(situation)),
            Part("angles", _angles(situation)),
            Part("graphs (assumed)", GRAPHS_BYTES if situation.device == "cuda" else 0),
        )
    )


def num_drafter_parameters(situation: Situation) -> int:
    """Weights of the learned drafter; 0 where there is none."""
    settings = situation.config.drafter
    if not situation.learns_drafting:
        return 0
    return drafter_parameters(situation.shape, settings.form, settings.vocabulary)


def _served_numbers(situation: Situation) -> int:
    """Of the drafter that drafts: its parameters, whole, and the copies that are computed with."""
    count, form = num_drafter_parameters(situation), situation.config.drafter.form
    if not count:
        return 0
    own = drafter_layer_parameters(situation.part, form)
    cut = own if situation.config.rollout.tensor_parallel > 1 else 0
    rest = count - drafter_layer_parameters(situation.shape, form)
    return count + cut + (rest + own if situation.device == "cpu" and _packs(situation) else 0)


def num_features(situation: Situation) -> int:
    """Vectors of the hidden size that are kept of a position for the drafter."""
    if not situation.learns_drafting:
        return 0
    return 1 if situation.config.drafter.form == "eagle" else 4


def strategies(situation: Situation) -> tuple[Strategy, ...]:
    """What a round may be."""
    speculation = situation.config.speculation
    return strategies_of(speculation.mode, speculation.strategies)


def positions(situation: Situation) -> int:
    """Positions of the longest sequence with the drafts that a round may write behind it."""
    return situation.longest + max(map(_slots, strategies(situation))) + 1


def page_bytes(situation: Situation) -> int:
    """Bytes of one page, as ``rollout.kv_cache.page_bytes`` has them."""
    shape, kept = situation.part, num_features(situation)
    layers = shape.num_layers + (1 if kept else 0)
    numbers = 2 * layers * shape.num_kv_heads * shape.head_dim + kept * shape.hidden_size
    return situation.config.rollout.page_size * situation.item * numbers


def pool_bytes(situation: Situation) -> int:
    """Bytes of all pages, one more than are handed out among them."""
    rollout, size = situation.config.rollout, page_bytes(situation)
    each = -(-positions(situation) // rollout.page_size)
    pages = max(0, rollout.kv_bytes // size - 1) if rollout.kv_bytes else rollout.max_live * each
    return (pages + 1) * size


def rollout_workspace(situation: Situation) -> tuple[Part, ...]:
    """What the widest pass and the choice of its tokens take for a moment."""
    rollout, shape = situation.config.rollout, situation.part
    widest = max(strategy.widest_pass for strategy in strategies(situation))
    rows = rollout.max_live * widest
    tokens = max(rows, min(rollout.prefill_tokens, rollout.max_live * situation.config.data.max_prompt_tokens))
    h, q = shape.hidden_size, shape.num_heads * shape.head_dim
    qkv = q + 2 * shape.num_kv_heads * shape.head_dim
    layer = situation.item * tokens * (4 * h + 2 * qkv + 2 * q + 4 * shape.intermediate_size)
    return some(
        (
            Part("pass of the decoder", layer),
            Part("logits and scores", rows * shape.vocab_size * (12 + situation.item)),
            Part("nucleus (top_p)", rows * shape.vocab_size * _nucleus(situation)),
            Part("pages read", _pages_read(situation)),
            Part("tie guard", _guard(situation)),
        )
    )


def _nucleus(situation: Situation) -> int:
    """Bytes a logit, where responses are sampled from a nucleus: a rollout's, or those of evaluations between steps."""
    rollout, evaluation = situation.config.rollout, situation.config.evaluation
    judged = evaluation.every_steps and evaluation.samples and evaluation.top_p < 1.0
    if rollout.top_p == 1.0 and not judged:
        return 0
    return _GUARDED_NUCLEUS_BYTES if situation.config.tie_guard else _NUCLEUS_BYTES


def _pages_read(situation: Situation) -> int:
    """A CPU gathers a layer's pages, and masks them by query."""
    if situation.device == "cuda":
        return 0
    shape, slots = situation.part, pool_bytes(situation) // page_bytes(situation)
    slots *= situation.config.rollout.page_size
    widest = max(strategy.widest_pass for strategy in strategies(situation))
    per_group = shape.num_heads // shape.num_kv_heads
    masks = widest * (2 + per_group) * situation.item
    return slots * (2 * shape.num_kv_heads * shape.head_dim * situation.item + masks)


def _guard(situation: Situation) -> int:
    """A layer and a part of the head in float64, and one sequence alone."""
    if not situation.config.tie_guard:
        return 0
    s = situation.part
    weights = s.hidden_size * ((2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim + 3 * s.intermediate_size)
    tokens = situation.longest * (8 * s.hidden_size + 4 * s.intermediate_size)
    return 8 * (weights + min(_FLOAT64_ROWS, s.vocab_size) * s.hidden_size + tokens)


def _rows(situation: Situation) -> int:
    rollout, depth = situation.config.rollout, max(strategy.depth for strategy in strategies(situation))
    vocabulary = situation.shape.vocab_size
    width = max(depth + 1, min(_NOISE_AHEAD, _NOISE_BLOCK // vocabulary))
    host = 4 if situation.device == "cpu" else 0  # log-probabilities stand in host memory
    return rollout.max_live * (4 * width * vocabulary + (8 + host) * positions(situation))


def _angles(situation: Situation) -> int:
    """Of the tables of the decoder and of the drafters: that of the one in training is whole."""
    own = _table(situation, situation.part)
    return 2 * own + _table(situation, situation.shape) if situation.learns_drafting else own


def _table(situation: Situation, s: ModelShape) -> int:
    count = s.max_positions + _SPARE_POSITIONS
    if situation.device == "cuda" or situation.item == 2:
        return 2 * situation.item * count * s.head_dim
    turns = 8 * count * s.head_dim // 2
    heads = s.num_heads + 2 * s.num_kv_heads
    return turns * (1 + heads) if turns * heads <= _MOST_TABLE_BYTES else turns


def _slots(strategy: Strategy) -> int:
    """As ``rollout.drafts.slots_needed``: positions beyond a sequence's last token that a round may write."""
    grown = 1 + (strategy.depth - 1) * strategy.branching if strategy.branching > 1 else strategy.depth
    return max(grown + 1, strategy.widest_pass)


def _packs(situation: Situation) -> bool:
    s = situation.part
    return s.hidden_size * s.intermediate_size >= _LEAST_PACKED


def _packed(situation: Situation) -> int:
    """The second copy of large matrices that CPUs multiply by."""
    if situation.device == "cuda":
        return 0
    sizes = _matrices(situation.part)
    return situation.item * sum(size for size in sizes if size >= _LEAST_PACKED)


def _matrices(s: ModelShape) -> list[int]:
    """Sizes of the decoder's fused matrices, all layers and the head."""
    qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    layer = [qkv, s.num_heads * s.head_dim, 2 * s.intermediate_size, s.intermediate_size]
    return [size * s.hidden_size for size in layer] * s.num_layers + [s.vocab_size * s.hidden_size]
