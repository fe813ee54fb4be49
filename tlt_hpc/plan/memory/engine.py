"""Bytes that rollouts take on each rank: what the engine itself says it holds, and the workspace of its widest pass.

A rank holds its share of its replica's layers, keys and values. Embedding, head, hidden states and features are whole
on each rank. ``max_live`` counts a replica's sequences: every rank has a row of each.
"""

from __future__ import annotations

import torch

from tlt_hpc.common.records import SamplingParams
from tlt_hpc.config import ConfigError
from tlt_hpc.kernels.attention import PARTIAL_BYTES
from tlt_hpc.models.decoder import HEAD_ROWS, Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.sharding import Sharding
from tlt_hpc.plan.memory.situation import NamedBytes, Situation, without_empty_parts
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.settings import EngineSettings, pool_sizes
from tlt_hpc.rollout.strategy import parse_strategies

GRAPHS_BYTES = 1_500_000_000
"""Assumed for captured graphs on a GPU: their intermediates, and what the driver keeps of each."""
SPAN, _TILE_ROWS = 256, 64
"""Positions of each of attention's partial results on a GPU, and queries times heads that a program takes at most."""
PAGES = "keys, values, features"
_NUCLEUS_BYTES, _GUARDED_NUCLEUS_BYTES = 38, 46
"""Additional bytes of a logit if ``top_p`` truncates: sorted, summed up, searched twice."""
_META = torch.device("meta")


class PlannedEngine:
    """The rollout engine of a job on torch's meta device: its tensors have sizes, but neither values nor memory."""

    def __init__(self, situation: Situation) -> None:
        """Construct decoder, drafter and engine as a run does.

        Raises:
            ConfigError: ``rollout.kv_bytes`` holds no sequence of full length.
        """
        self.situation, tensor_parallel = situation, situation.config.rollout.tensor_parallel
        self.settings = _make_engine_settings(situation)
        # oneDNN packs large matrices on CPUs
        was_enabled = bool(torch.backends.mkldnn.enabled)
        _enable_onednn(situation.device == "cpu")
        try:
            with _META:
                decoder = Decoder(situation.shape, situation.decoding_dtype, _META, Sharding(0, tensor_parallel))
                decoder.pack_weights()
                self.drafter = _make_planned_drafter(situation, decoder) if situation.has_learned_drafter else None
                num_features = self.drafter.num_features if self.drafter else 0
                self.sizes = pool_sizes(self.settings, decoder, num_features)
                engine = RolloutEngine(decoder, self.settings, self.drafter)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        finally:
            _enable_onednn(was_enabled)
        self.part, self.table = decoder.part, engine.memory_table()
        self.page_bytes = page_bytes(self.part, self.sizes.page_size, decoder.dtype, num_features)

    @property
    def num_drafter_parameters(self) -> int:
        """Weights of the learned drafter; 0 if there is none."""
        return sum(parameter.numel() for parameter in self.drafter.parameters()) if self.drafter else 0

    @property
    def resident_bytes(self) -> NamedBytes:
        """Bytes that the engine holds from the start to the end of a run."""
        is_cuda, sizes = self.situation.device == "cuda", self.sizes
        tokens = 8 * sizes.num_rows * sizes.num_positions  # on GPUs noise is not kept, and log-probabilities are not
        trained = 0
        if self.drafter:  # whole, and as precise as the other
            trained = self.drafter.rotary.num_bytes
        return without_empty_parts(
            {
                "rollout weights": self.table["weights"],
                "packed weights": self.table["packed weights"],
                "drafter in use": self.table["drafter"] + self.table["packed drafter"],
                "drafts' part of the head": self.table["drafts' part of the head"],
                PAGES: self.table[PAGES],
                "noise and rows": tokens if is_cuda else self.table["noise and rows"],
                "angles": self.table["angles"] + trained,
                "graphs (assumed)": GRAPHS_BYTES if is_cuda else 0,
            }
        )

    @property
    def workspace_bytes(self) -> NamedBytes:
        """Bytes that the widest pass and the choice of its tokens take temporarily."""
        rollout, shape = self.situation.config.rollout, self.part
        vocab_size, item = shape.vocab_size, self.situation.decoding_bytes_per_number
        rows = max(self.settings.max_pass_tokens(vocab_size).values())
        tokens = max(rows, min(rollout.prefill_tokens, rollout.max_live * self.settings.max_prompt_tokens))
        h, q = shape.hidden_size, shape.num_heads * shape.head_dim
        qkv = q + 2 * shape.num_kv_heads * shape.head_dim
        inner = 4 * shape.mlp_width + 2 * shape.experts_per_token * h
        is_cuda = self.situation.device == "cuda"
        return without_empty_parts(
            {
                "pass of the decoder": item * tokens * (4 * h + 2 * qkv + 2 * q + inner),
                "logits and scores": rows * vocab_size * 16,
                "nucleus (top_p)": rows * vocab_size * _nucleus_bytes_per_logit(self.situation),
                "pages read": 0 if is_cuda else self._page_gather_bytes(),
                "attention": self._attention_partials_bytes() if is_cuda else 0,
                "tie guard": self._tie_guard_bytes() if self.situation.has_tie_guard else 0,
            }
        )

    def _attention_partials_bytes(self) -> int:
        """What attention on a GPU keeps of spans of sequences until they are joined, in a pass over drafts."""
        tokens = max(self.settings.max_pass_tokens(self.part.vocab_size).values())
        # each row has a block of queries that is not filled
        block = max(1, _TILE_ROWS * self.part.num_kv_heads // self.part.num_heads)
        queries = (tokens + self.sizes.num_rows * block) * self.part.num_heads
        return min(PARTIAL_BYTES, 4 * queries * self.part.head_dim * -(-self.situation.max_sequence_tokens // SPAN))

    def _page_gather_bytes(self) -> int:
        """What a CPU takes to gather a layer's pages and to mask them by query."""
        shape, item = self.part, self.situation.decoding_bytes_per_number
        slots = (self.sizes.num_pages + 1) * self.sizes.page_size
        per_group = shape.num_heads // shape.num_kv_heads
        masks = self.settings.max_slots * (2 + per_group) * item * len(set(shape.windows))
        return slots * (2 * shape.num_kv_heads * shape.head_dim * item + masks)

    def _tie_guard_bytes(self) -> int:
        """A layer and a part of the head in float64, and one sequence."""
        s = self.part
        weights = s.hidden_size * (2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim + s.mlp_parameters
        if self.situation.decoding_bytes_per_number == 8:  # no copy
            weights = 0
        tokens = self.situation.max_sequence_tokens * (8 * s.hidden_size + 4 * s.mlp_width)
        return 8 * (weights + min(HEAD_ROWS, s.vocab_size) * s.hidden_size + tokens)


def _enable_onednn(is_on: bool) -> None:
    torch.backends.mkldnn.set_flags(is_on, _fp32_precision=None)  # type: ignore[no-untyped-call]


def _make_engine_settings(situation: Situation) -> EngineSettings:
    rollout, speculation = situation.config.rollout, situation.config.speculation
    ahead = speculation.ahead != "off" and situation.num_ranks > rollout.tensor_parallel
    return EngineSettings(
        params=SamplingParams(rollout.max_new_tokens),
        num_tokens=situation.shape.vocab_size,
        eos_token_ids=(),
        max_live=rollout.max_live,
        max_prompt_tokens=situation.config.data.max_prompt_tokens,
        tie_guard=situation.has_tie_guard,
        kv_bytes=rollout.kv_bytes,
        page_size=rollout.page_size,
        strategies=parse_strategies(speculation.mode, speculation.strategies),
        stored_texts=ahead and speculation.mode != "plain",
    )


def _make_planned_drafter(situation: Situation, decoder: Decoder) -> Drafter:
    settings, shape = situation.config.drafter, situation.shape
    among = torch.arange(min(settings.vocabulary, shape.vocab_size))
    ids = among if settings.form == "eagle3" else None
    drafter = make_drafter(shape, 0, decoder.dtype, decoder.device, ids)
    if decoder.sharding.size > 1:
        drafter.set_sharding(decoder.sharding)
    if isinstance(drafter, Eagle) and len(among) < shape.vocab_size:
        drafter.set_draft_vocabulary(among)
    return drafter


def _nucleus_bytes_per_logit(situation: Situation) -> int:
    """Bytes per logit, if rollouts or the evaluations between steps sample from a nucleus."""
    rollout, evaluation = situation.config.rollout, situation.config.evaluation
    judged = evaluation.every_steps and evaluation.samples and evaluation.top_p < 1.0
    if rollout.top_p == 1.0 and not judged:
        return 0
    return _GUARDED_NUCLEUS_BYTES if situation.has_tie_guard else _NUCLEUS_BYTES
