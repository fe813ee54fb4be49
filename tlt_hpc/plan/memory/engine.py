"""What the rollout engine takes on each rank: weights, pages, and the workspace of its widest pass.

A rank holds its share of its replica's layers (``Situation.part``), keys and values. Embedding, head, hidden states and
features are whole on each rank. ``max_live`` counts a replica's sequences: every rank has a row of each.
"""

from __future__ import annotations

from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.plan import NamedBytes, Situation, present
from tlt_hpc.plan.memory.training import drafter_layer_parameters, num_drafter_parameters
from tlt_hpc.rollout.strategy import Strategy, strategies_of

GRAPHS_BYTES = 1_500_000_000
"""Assumed for captured graphs on a GPU: their intermediates, and what the driver keeps of each."""
PARTIAL_BYTES, SPAN = 2**29, 256
"""Those of attention's partial results, and positions of each."""
_SPARE_POSITIONS = 64
_MIN_PACKED = 1 << 18
PAGES = "keys, values, features"
_NOISE_AHEAD, _NOISE_BLOCK = 32, 1 << 15
_FLOAT64_ROWS = 2048
_NUCLEUS_BYTES, _GUARDED_NUCLEUS_BYTES = 38, 46
"""Additional bytes of a logit if ``top_p`` truncates: sorted, summed up, searched twice."""


def engine_parts(situation: Situation) -> NamedBytes:
    """What the engine holds from the start to the end of a run."""
    return present(
        {
            "rollout weights": situation.decoding_item * situation.part.num_parameters,
            "packed weights": _packed(situation),
            "drafter in use": situation.decoding_item * _served_numbers(situation),
            "drafts' part of the head": situation.decoding_item * _drafted_head(situation),
            PAGES: pool_bytes(situation),
            "noise and rows": _rows(situation),
            "angles": _angles(situation),
            "graphs (assumed)": GRAPHS_BYTES if situation.device == "cuda" else 0,
        }
    )


def _served_numbers(situation: Situation) -> int:
    """Numbers in the drafter that the engine uses: its whole parameters, and the copies that it computes with."""
    count, form = num_drafter_parameters(situation), situation.config.drafter.form
    if not count:
        return 0
    own = drafter_layer_parameters(situation.part, form)
    cut = own if situation.config.rollout.tensor_parallel > 1 else 0
    rest = count - drafter_layer_parameters(situation.shape, form)
    return count + cut + (rest + own if situation.device == "cpu" and _packs(situation) else 0)


def _drafted_head(situation: Situation) -> int:
    """Numbers of the copied rows of the policy's head, where an EAGLE drafter drafts among some tokens alone."""
    settings, shape = situation.config.drafter, situation.shape
    if not num_drafter_parameters(situation) or settings.form != "eagle" or shape.vocab_size <= settings.vocabulary:
        return 0
    return settings.vocabulary * shape.hidden_size * (2 if situation.device == "cpu" and _packs(situation) else 1)


def num_features(situation: Situation) -> int:
    """Vectors of the hidden size that are kept of each position for the drafter."""
    if not situation.learns_drafting:
        return 0
    return 1 if situation.config.drafter.form == "eagle" else 4


def strategies(situation: Situation) -> tuple[Strategy, ...]:
    """The strategies that a round may use."""
    speculation, rollout = situation.config.speculation, situation.config.rollout
    ahead = speculation.ahead != "off" and situation.num_ranks > rollout.tensor_parallel
    return strategies_of(speculation.mode, speculation.strategies, ahead)


def positions(situation: Situation) -> int:
    """Positions of the longest sequence with the drafts that a round may write behind it."""
    return situation.longest + max(strategy.num_slots for strategy in strategies(situation)) + 1


def page_bytes(situation: Situation) -> int:
    """Bytes of one page, as in ``rollout.kv_cache.page_bytes``."""
    shape, kept = situation.part, num_features(situation)
    layers = shape.num_layers + (1 if kept else 0)
    numbers = 2 * layers * shape.num_kv_heads * shape.head_dim + kept * shape.hidden_size
    return situation.config.rollout.page_size * situation.decoding_item * numbers


def pool_bytes(situation: Situation) -> int:
    """Bytes of all pages, including the one that is never handed out."""
    rollout, size = situation.config.rollout, page_bytes(situation)
    each = -(-positions(situation) // rollout.page_size)
    pages = max(0, rollout.kv_bytes // size - 1) if rollout.kv_bytes else rollout.max_live * each
    return (pages + 1) * size


def rollout_workspace(situation: Situation) -> NamedBytes:
    """What the widest pass and the choice of its tokens take temporarily."""
    rollout, shape = situation.config.rollout, situation.part
    vocab_size = shape.vocab_size
    rows = max(min(rollout.max_live, one.max_rows(vocab_size)) * one.widest_pass for one in strategies(situation))
    tokens = max(rows, min(rollout.prefill_tokens, rollout.max_live * situation.config.data.max_prompt_tokens))
    h, q = shape.hidden_size, shape.num_heads * shape.head_dim
    qkv = q + 2 * shape.num_kv_heads * shape.head_dim
    inner = 4 * shape.mlp_width + 2 * shape.experts_per_token * h
    layer = situation.decoding_item * tokens * (4 * h + 2 * qkv + 2 * q + inner)
    return present(
        {
            "pass of the decoder": layer,
            "logits and scores": rows * vocab_size * 16,
            "nucleus (top_p)": rows * vocab_size * _nucleus(situation),
            "pages read": _pages_read(situation),
            "attention": _partial_results(situation),
            "tie guard": _guard(situation),
        }
    )


def _nucleus(situation: Situation) -> int:
    """Bytes per logit, if rollouts or the evaluations between steps sample from a nucleus."""
    rollout, evaluation = situation.config.rollout, situation.config.evaluation
    judged = evaluation.every_steps and evaluation.samples and evaluation.top_p < 1.0
    if rollout.top_p == 1.0 and not judged:
        return 0
    return _GUARDED_NUCLEUS_BYTES if situation.is_guarded else _NUCLEUS_BYTES


def _partial_results(situation: Situation) -> int:
    """What attention on a GPU keeps of spans of sequences until they are joined, in a pass over drafts."""
    if situation.device != "cuda":
        return 0
    rollout, shape = situation.config.rollout, situation.part
    positions = situation.config.data.max_prompt_tokens + rollout.max_new_tokens
    widest = max(strategy.widest_pass for strategy in strategies(situation))
    queries = rollout.max_live * widest * shape.num_heads
    return min(PARTIAL_BYTES, 4 * queries * shape.head_dim * -(-positions // SPAN))


def _pages_read(situation: Situation) -> int:
    """What a CPU takes to gather a layer's pages and to mask them by query."""
    if situation.device == "cuda":
        return 0
    shape, slots = situation.part, pool_bytes(situation) // page_bytes(situation)
    slots *= situation.config.rollout.page_size
    widest = max(strategy.widest_pass for strategy in strategies(situation))
    per_group = shape.num_heads // shape.num_kv_heads
    masks = widest * (2 + per_group) * situation.decoding_item * len(set(shape.windows))
    return slots * (2 * shape.num_kv_heads * shape.head_dim * situation.decoding_item + masks)


def _guard(situation: Situation) -> int:
    """What the tie guard takes: a layer and a part of the head in float64, and one sequence."""
    if not situation.is_guarded:
        return 0
    s = situation.part
    weights = s.hidden_size * (2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim + s.mlp_parameters
    if situation.decoding_item == 8:  # no copy
        weights = 0
    tokens = situation.longest * (8 * s.hidden_size + 4 * s.mlp_width)
    return 8 * (weights + min(_FLOAT64_ROWS, s.vocab_size) * s.hidden_size + tokens)


def _rows(situation: Situation) -> int:
    rollout, depth = situation.config.rollout, max(strategy.depth for strategy in strategies(situation))
    vocabulary = situation.shape.vocab_size
    width = max(depth + 1, min(_NOISE_AHEAD, _NOISE_BLOCK // vocabulary))
    # log-probabilities are in host memory, and GPUs make noise where it is needed
    own = 4 * (width * vocabulary + positions(situation)) if situation.device == "cpu" else 0
    return rollout.max_live * (own + 8 * positions(situation))


def _angles(situation: Situation) -> int:
    """Rotary tables of the decoder and of both drafters; the table of the drafter in training is whole."""
    own = _table(situation, situation.part)
    target = own * (2 if situation.shape.local_theta and any(situation.shape.local_layers) else 1)
    return target + own + _table(situation, situation.shape) if situation.learns_drafting else target


def _table(situation: Situation, s: ModelShape) -> int:
    return 2 * situation.decoding_item * (s.max_positions + _SPARE_POSITIONS) * s.head_dim


def _packs(situation: Situation) -> bool:
    s = situation.part
    return situation.decoding_item == 4 and s.hidden_size * s.intermediate_size >= _MIN_PACKED


def _packed(situation: Situation) -> int:
    """The second copy of large matrices, which CPUs multiply by in float32."""
    if situation.device == "cuda" or situation.decoding_item == 8:
        return 0
    sizes = _matrices(situation.part)
    return situation.decoding_item * sum(size for size in sizes if size >= _MIN_PACKED)


def _matrices(s: ModelShape) -> list[int]:
    """Sizes of the decoder's fused matrices, all layers and the head."""
    qkv = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    mlp = [s.num_experts] if s.num_experts else [2 * s.intermediate_size, s.intermediate_size]
    layer = [qkv, s.num_heads * s.head_dim, *mlp]
    return [size * s.hidden_size for size in layer] * s.num_layers + [s.vocab_size * s.hidden_size]
