"""Packed matrices and norms against float64: any number of rows, bias, residual, repacking, the choice by size."""

import pytest
import torch
import torch.nn.functional as F

from tlt_hpc.models.linear import Linear, Norm

BIG, SMALL = (640, 512), (96, 64)
ROWS = (1, 2, 3, 4, 5, 8, 33)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05}


def make(size, dtype=torch.float32, bias=False):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator).to(dtype)
    layer = Linear(weight, torch.randn(size[0], generator=generator).to(dtype) if bias else None)
    layer.pack_weights()
    return layer


def exact(layer, x):
    return F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [BIG, SMALL])
@torch.inference_mode()
def test_products_and_residuals_for_every_number_of_rows(size, bias, dtype):
    layer = make(size, dtype, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, size[1]).to(dtype) * 0.1
        residual = torch.randn(num_rows, size[0]).to(dtype)
        before = residual.clone()
        wanted = exact(layer, x)
        torch.testing.assert_close(layer(x).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 5)
        added = layer.forward_plus_residual(residual, x).double()
        torch.testing.assert_close(added, wanted + residual.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 5)
        assert torch.equal(residual, before), "the residual is read, not written"


def test_only_matrices_that_gain_are_packed():
    assert make(BIG).packed_bytes == 4 * BIG[0] * BIG[1]
    assert make(SMALL).packed_bytes == 0
    assert make(BIG, torch.float16).packed_bytes == 0
    assert make(BIG).to(torch.float64).packed_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_norms_equal_the_definition(dtype, scale):
    """Small rows too: there epsilon is most of the divisor."""
    x, weight = (torch.randn(5, 48) * scale).to(dtype), torch.randn(48).to(dtype)
    norm = Norm(weight, 1e-5)
    wanted = F.rms_norm(x.double(), (48,), weight.double(), 1e-5)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 0.05)
    torch.testing.assert_close(norm(x).double(), wanted, atol=tolerance, rtol=tolerance)
    per_head = Norm(torch.stack([weight, weight * 2]), 1e-5)
    both = per_head(torch.stack([x, x], 1)).double()
    torch.testing.assert_close(both, torch.stack([wanted, 2 * wanted], 1), atol=2 * tolerance, rtol=tolerance)


def test_gradients_of_a_norm_are_those_of_the_definition():
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: Norm(weight, 1e-5)(x), (x, weight))
