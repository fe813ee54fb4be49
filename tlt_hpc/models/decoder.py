"""The rollout's decoder for all families: flat tokens in, hidden states out. Knows no cache.

Shapes: ``T`` tokens flat over sequences, ``H`` hidden, ``V`` vocabulary (padding rows included).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.config import UserError
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.layers import Attend, LayerWeights, run_layers, transformer_layer
from tlt_hpc.models.linear import InvariantLinear, Linear, Norm, copy_and_pack_parts, mask_excluded_tokens
from tlt_hpc.models.mlp import Experts, GatedMlp, Mlp, Stack
from tlt_hpc.models.piece import LOWER_RATE, Cut, is_finite, names_not_finite
from tlt_hpc.models.rotary import SPARE_POSITIONS, LayerRotaries
from tlt_hpc.models.shape import TAKE_CONFIG, ModelShape
from tlt_hpc.models.sharding import WHOLE, Sharding
from tlt_hpc.models.weight_files import is_fused_expert_name, split_fused_experts

HEAD_ROWS = 2048
"""Of the head, that are in float64 at once: all would take twice the memory of a wide vocabulary's weights."""


class _Slot(NamedTuple):
    """What this rank keeps of a stored weight."""

    cut: Cut
    """The part of the weight."""
    target: Tensor
    """Where it is copied to."""
    offset: float = 0.0
    """Added to the copy, before it is multiplied by ``gain``."""
    gain: float = 1.0


class Decoder:
    """Weights of the policy in the layout that decodes fastest, refreshed in place after every policy step.

    With a ``sharding`` over several ranks it holds this rank's part of every layer, and all of them call each pass.
    With ``is_invariant`` a row of a pass has the same bits whatever else is in the pass.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        sharding: Sharding = WHOLE,
        is_invariant: bool = False,
        excluded: Sequence[int] = (),
    ) -> None:
        """``excluded``: ids whose logits are such that they are never sampled, as ``tokens_without_text`` has them."""
        self._linear = InvariantLinear if is_invariant else Linear
        self.shape, self.dtype, self.device, self.sharding = shape, dtype, device, sharding
        self.part = sharding.shape_of_rank(shape)
        """The sizes of what this rank has of the layers."""
        self.version = -1
        """Counts weight loads; -1 before the first."""
        self.embedding = self._empty(shape.vocab_size, shape.hidden_size)
        self.head = self.embedding if shape.tied_head else self._empty(shape.vocab_size, shape.hidden_size)
        self.final_norm = self._empty_norm(shape.hidden_size)
        self.layers = [self._empty_layer() for _ in range(shape.num_layers)]
        self.rotaries = LayerRotaries(self.part, shape.max_positions + SPARE_POSITIONS, dtype, device)
        self._head = self._linear(self.head)
        self._excluded = torch.tensor(excluded, device=device) if excluded else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        tensors = {id(tensor): tensor.nbytes for tensor in (self.embedding, self.head, self.final_norm.weight)}
        return sum(tensors.values()) + sum(layer.weight_bytes for layer in self.layers)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copies that the fast linear layers read, beside the weights; 0 before the first load."""
        return self._head.packed_bytes + sum(layer.packed_bytes for layer in self.layers)

    def weight_cuts(self) -> dict[str, Cut]:
        """This rank's part of each weight, by Hugging Face name: what ``load_weights`` is given if ``are_cut``."""
        return {name: slot.cut for name, slot in self._slots()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, are_cut: bool = False) -> None:
        """Copy weights under their Hugging Face names into place; addresses do not change.

        Args:
            weights: whole, of which this rank takes its part (``weight_cuts``), or with ``are_cut`` its part already.

        Raises:
            ValueError: a name is missing or unknown, a shape differs, or a value is not finite.
        """
        slots, finite = dict(self._slots()), dict[str, Tensor]()
        missing = set(slots)
        for name, tensor, is_cut in _split_expert_weights(weights, are_cut):
            if name == "lm_head.weight" and self.shape.tied_head:
                continue
            if name not in slots:
                raise ValueError(
                    f"weight {name!r} is not part of a {self.shape.family} decoder of this shape; {TAKE_CONFIG}"
                )
            cut, target, offset, gain = slots[name]
            target.copy_((Cut(cut.cut_sizes, ()) if is_cut else cut).cut_from(name, tensor))
            if offset or gain != 1.0:
                target.add_(offset).mul_(gain)
            finite[name] = is_finite(target)
            missing.discard(name)
            BEAT.tick()
        if missing:
            raise ValueError(
                f"weights lack {sorted(missing)[0]!r} and {len(missing) - 1} more, which config.json asks for; "
                f"{TAKE_CONFIG}"
            )
        if wrong := names_not_finite(finite):
            raise UserError(
                f"weight {wrong[0]!r} holds values that are not finite, as {len(wrong)} of {len(finite)} weights do; "
                f"download the model again or, if this run has trained it, {LOWER_RATE}"
            )
        self.pack_weights()
        self.version = version

    @torch.inference_mode()
    def hidden_states(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm: tokens [T], positions [T] -> [T, H]."""
        return self.features(tokens, positions, attend, ())[0]

    @torch.inference_mode()
    def features(
        self, tokens: Tensor, positions: Tensor, attend: Attend, layers: Collection[int]
    ) -> tuple[Tensor, Tensor]:
        """``hidden_states`` [T, H], and the inputs of ``layers``, ascending, joined with it: [T, (1 + len(layers)) H].

        Args:
            tokens, positions: [T].
        """
        x, rotaries = self._embed(tokens, self.dtype), self.rotaries.rows_at_positions(positions)
        hidden, entering = run_layers(x, self.layers, self.final_norm, self.part, rotaries, attend, layers)
        return hidden, torch.cat([*entering, hidden], -1) if entering else hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32: hidden [..., H] -> [..., V]."""
        flat = self._head.multiply_in_float32(hidden.reshape(-1, hidden.shape[-1])).float()
        mask_excluded_tokens(flat, self._excluded)
        return flat if hidden.dim() == 2 else flat.view(*hidden.shape[:-1], -1)

    @torch.inference_mode()
    def reference_logits(self, tokens: Tensor, last: int) -> Tensor:
        """Float64 logits of the ``last`` positions of one sequence, computed alone: tokens [T] -> [last, V].

        A pure function of weights and tokens: no cache, no batch, no strategy. Layers are cast one at a time, so it
        needs little memory beside the weights. Ranks that share the layers sum in float64 too: all of them have the
        same bits, and one rank alone would have them but for the last ones of a float64.
        """
        return self.reference_logits_of_hidden(self.reference_hidden(tokens)[-last:])

    @torch.inference_mode()
    def reference_logits_of_hidden(self, hidden: Tensor) -> Tensor:
        """Float64 logits of float64 hidden states [T, H] -> [T, V]."""
        scratch = torch.empty(HEAD_ROWS, self.head.shape[1], dtype=torch.float64, device=self.device)
        parts = torch.split(self.head, HEAD_ROWS)
        logits = torch.cat([F.linear(hidden, scratch[: len(part)].copy_(part)) for part in parts], 1)
        return mask_excluded_tokens(logits, self._excluded)

    @torch.inference_mode()
    def reference_hidden(self, tokens: Tensor) -> Tensor:
        """Float64 hidden states after the final norm, as ``reference_logits`` has them: tokens [T] -> [T, H]."""
        positions = torch.arange(len(tokens), device=self.device)
        rotaries = LayerRotaries(self.part, len(tokens), torch.float64, self.device).rows_at_positions(positions)
        attend = attend_documents(None, self.shape.windows)
        x = self._embed(tokens, torch.float64)
        for i, layer in enumerate(self._reference_layers()):
            x = transformer_layer(x, layer, self.part, rotaries[i], i, attend)
        return self.final_norm.to(torch.float64)(x)

    def _reference_layers(self) -> Iterator[LayerWeights]:
        """Float64 copies of the layers, each in the memory of the one before: fresh pages cost more than the cast."""
        if self.dtype == torch.float64:
            yield from self.layers
            return
        wide = self.layers[0].to(torch.float64)
        for layer in self.layers:
            copy_and_pack_parts(wide.parts(), layer.parts())
            yield wide

    def _embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """What enters the first layer: tokens [T] -> [T, H]."""
        x = F.embedding(tokens, self.embedding).to(dtype)
        scale = self.shape.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=self.dtype).item()

    def _empty(self, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=self.dtype, device=self.device)

    def _empty_norm(self, *sizes: int) -> Norm:
        """A norm; where its weight counts from an offset, half precision would round the sum more than the weight."""
        weight = self._empty(*sizes)
        return Norm(
            weight.float() if self.shape.norm_offset and weight.itemsize < 4 else weight, self.shape.norm_epsilon
        )

    def _empty_layer(self) -> LayerWeights:
        s = self.part
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        return LayerWeights(
            input_norm=self._empty_norm(s.hidden_size),
            qkv=self._linear(self._empty(width, s.hidden_size), self._empty(width) if s.qkv_bias else None),
            head_norm=self._empty_norm(s.num_heads + s.num_kv_heads, s.head_dim) if s.head_norm else None,
            output=self.sharding.row_linear(
                self._empty(s.hidden_size, s.num_heads * s.head_dim),
                self._empty(s.hidden_size) if s.output_bias else None,
                self._linear,
            ),
            post_norm=self._empty_norm(s.hidden_size),
            mlp=self._empty_experts() if s.num_experts else self._empty_mlp(),
            after_attention=self._empty_norm(s.hidden_size) if s.output_norms else None,
            after_mlp=self._empty_norm(s.hidden_size) if s.output_norms else None,
        )

    def _empty_mlp(self) -> Mlp:
        h, inner = self.part.hidden_size, self.part.intermediate_size
        down = self.sharding.row_linear(self._empty(h, inner), kind=self._linear)
        return GatedMlp(self._linear(self._empty(2 * inner, h)), down, self.part.activation)

    def _empty_experts(self) -> Mlp:
        s = self.part
        return Experts(
            router=self._linear(self._empty(s.num_experts, s.hidden_size)),
            gate_up=Stack(self._empty(s.num_experts, 2 * s.expert_size, s.hidden_size)),
            down=Stack(self._empty(s.num_experts, s.hidden_size, s.expert_size)),
            num_chosen=s.experts_per_token,
            norms_weights=s.norm_expert_weights,
            all_reduce=self.sharding.all_reduce if self.sharding.size > 1 else None,
        )

    def pack_weights(self) -> None:
        """Derive from the weights what the fast paths read; ``load_weights`` does."""
        self.final_norm.pack_weights()
        self._head.pack_weights()
        for layer in self.layers:
            layer.pack_weights()

    def _slots(self) -> Iterator[tuple[str, _Slot]]:
        """Where each weight is kept, by its Hugging Face name."""
        yield "model.embed_tokens.weight", _uncut_slot(self.embedding)
        yield "model.norm.weight", self._norm_slot(self.final_norm)
        if not self.shape.tied_head:
            yield "lm_head.weight", _uncut_slot(self.head)
        for i, layer in enumerate(self.layers):
            for name, slot in (*self._attention_slots(layer), *self._norm_slots(layer), *self._mlp_slots(layer.mlp)):
                yield f"model.layers.{i}.{name}", slot

    def _attention_slots(self, layer: LayerWeights) -> Iterator[tuple[str, _Slot]]:
        s, part, shard = self.shape, self.part, self.sharding
        whole = {"q": s.num_heads, "k": s.num_kv_heads, "v": s.num_kv_heads}
        own = {"q": shard.heads(s), "k": shard.kv_heads(s), "v": shard.kv_heads(s)}
        num_rows = [n * s.head_dim for n in (part.num_heads, part.num_kv_heads, part.num_kv_heads)]
        for tensor, kind in ((layer.qkv.weight, "weight"), (layer.qkv.bias, "bias")):
            if tensor is None:
                continue
            for name, rows in zip("qkv", torch.split(tensor, num_rows), strict=True):
                sizes = (whole[name] * s.head_dim, *tensor.shape[1:])
                cut = slice(own[name].start * s.head_dim, own[name].stop * s.head_dim)
                yield f"self_attn.{name}_proj.{kind}", _Slot(Cut(sizes, (cut,)), rows)
        if layer.head_norm is not None:
            heads = torch.split(layer.head_norm.weight, [part.num_heads, part.num_kv_heads])
            for name, rows in zip("qk", heads, strict=True):  # one weight for each of these heads
                gain = s.query_gain if name == "q" else 1.0
                yield f"self_attn.{name}_norm.weight", _Slot(Cut((s.head_dim,), ()), rows, s.norm_offset, gain)
        mixed = slice(own["q"].start * s.head_dim, own["q"].stop * s.head_dim)
        sizes = s.hidden_size, s.num_heads * s.head_dim
        yield "self_attn.o_proj.weight", _Slot(Cut(sizes, (slice(None), mixed)), layer.output.weight)
        if layer.output.bias is not None:
            yield "self_attn.o_proj.bias", _uncut_slot(layer.output.bias)

    def _norm_slots(self, layer: LayerWeights) -> Iterator[tuple[str, _Slot]]:
        assert layer.input_norm is not None, "only a drafter goes without"
        yield "input_layernorm.weight", self._norm_slot(layer.input_norm)
        if layer.after_attention is None or layer.after_mlp is None:
            yield "post_attention_layernorm.weight", self._norm_slot(layer.post_norm)
            return
        yield "post_attention_layernorm.weight", self._norm_slot(layer.after_attention)
        yield "pre_feedforward_layernorm.weight", self._norm_slot(layer.post_norm)
        yield "post_feedforward_layernorm.weight", self._norm_slot(layer.after_mlp)

    def _norm_slot(self, norm: Norm) -> _Slot:
        return _uncut_slot(norm.weight)._replace(offset=self.shape.norm_offset)

    def _mlp_slots(self, mlp: Mlp) -> Iterator[tuple[str, _Slot]]:
        s, inner = self.shape, self.sharding.inner_range(self.shape)
        if isinstance(mlp, GatedMlp):
            yield from _mlp_slots("mlp", s.intermediate_size, inner, mlp.gate_up.weight, mlp.down.weight)
            return
        assert isinstance(mlp, Experts)
        yield "mlp.gate.weight", _uncut_slot(mlp.router.weight)
        for i, (gate_up, down) in enumerate(zip(mlp.gate_up.weight, mlp.down.weight, strict=True)):
            yield from _mlp_slots(f"mlp.experts.{i}", s.expert_size, inner, gate_up, down)


def _split_expert_weights(weights: Iterable[tuple[str, Tensor]], are_cut: bool) -> Iterator[tuple[str, Tensor, bool]]:
    """The weights with a tensor for each expert, and whether it is cut: those that came in one for all never are."""
    for given, tensor in weights:
        is_cut = are_cut and not is_fused_expert_name(given)
        yield from ((name, part, is_cut) for name, part in split_fused_experts([(given, tensor)]))


def _uncut_slot(tensor: Tensor) -> _Slot:
    return _Slot(Cut(tuple(tensor.shape), ()), tensor)


def _mlp_slots(name: str, size: int, inner: slice, gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, _Slot]]:
    for part, rows in zip(("gate", "up"), gate_up.chunk(2), strict=True):
        yield f"{name}.{part}_proj.weight", _Slot(Cut((size, rows.shape[1]), (inner,)), rows)
    yield f"{name}.down_proj.weight", _Slot(Cut((down.shape[0], size), (slice(None), inner)), down)
