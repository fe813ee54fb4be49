"""The learned drafter in EAGLE form: one layer over [embedding of the next token; the target's last hidden state].

Embedding and head are the current policy's: the drafter holds none of its own. Knows no cache and no optimiser.
Source: EAGLE (arXiv 2401.15077), TLT (arXiv 2511.16665) section 4. Shapes: ``T`` tokens, ``H`` hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tlt_hpc.models.layers import Attend, LayerWeights, run_layers
from tlt_hpc.models.linear import Linear, Norm
from tlt_hpc.models.rotary import SPARE_POSITIONS, in_pairs, pairs_order, rotary_table
from tlt_hpc.models.shape import ModelShape


class Drafter(nn.Module):
    """Predicts from the feature at position t and the token at t + 1 the feature at t + 1, hence token t + 2.

    Parameters keep heads in halves, as Hugging Face does, whatever the layout they are computed in.
    """

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            values = torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)
            return nn.Parameter(values.to(device, dtype))

        h, i = shape.hidden_size, shape.intermediate_size
        self.fc = matrix(h, 2 * h)
        self.qkv = matrix(heads, h)
        self.output = matrix(h, shape.num_heads * shape.head_dim, 0.5)
        self.gate_up = matrix(2 * i, h)
        self.down = matrix(h, i, 0.5)
        self.post_norm = nn.Parameter(torch.ones(h, dtype=dtype, device=device))
        pairs = in_pairs(dtype, device)
        self.rotary = rotary_table(shape, shape.max_positions + SPARE_POSITIONS, dtype, device, pairs)
        self._order = pairs_order(shape, device) if pairs else None
        self._packed: tuple[Linear, LayerWeights] | None = None
        self.register_load_state_dict_post_hook(_pack_again)  # type: ignore[no-untyped-call]

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Predicted features [T, H] from next tokens ``embedded`` [T, H] and ``features`` [T, H] at positions [T]."""
        packed = None if torch.is_grad_enabled() else self._packed
        fc, layer = packed or (Linear(self.fc), self._layer())
        x = fc(torch.cat([embedded, features], -1))
        return run_layers(x, (layer,), None, self.shape, self.rotary.at(positions), attend)

    @torch.no_grad()
    def pack(self) -> None:
        """Serve from a copy laid out for speed, from now on; ``load_state_dict`` renews it.

        For a drafter that is loaded, not trained: a weight changed in place does not reach the copy. Where gradients
        are recorded the parameters themselves are read.
        """
        fc, layer = Linear(self.fc.detach()), self._layer()
        fc.pack()
        layer.pack()
        self._packed = fc, layer

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copy that is served from, beside the parameters'."""
        if self._packed is None:
            return 0
        fc, layer = self._packed
        permuted = layer.qkv.weight.nbytes if self._order is not None else 0
        return fc.packed_bytes + layer.packed_bytes + permuted

    def _layer(self) -> LayerWeights:
        qkv = self.qkv if self._order is None else self.qkv[self._order]
        return LayerWeights(
            input_norm=None,
            qkv=Linear(qkv),
            head_norm=None,
            output=Linear(self.output),
            post_norm=Norm(self.post_norm, self.shape.norm_epsilon),
            gate_up=Linear(self.gate_up),
            down=Linear(self.down),
        )


def _pack_again(drafter: nn.Module, _: object) -> None:
    assert isinstance(drafter, Drafter)
    if drafter._packed is not None:
        drafter.pack()
