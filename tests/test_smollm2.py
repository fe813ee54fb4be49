"""The decoder on a real model with a real vocabulary, against transformers."""

import gc

import pytest
import torch
from smollm2 import TEXTS, smollm2_decoder, smollm2_folder
from tiny import CPU, decode_in_pieces
from transformers import LlamaForCausalLM

from tlt_hpc.models import linear
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import load_tokenizer

NUM_TOKENS = 96


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(smollm2_folder())
    return torch.tensor([tokenizer.encode(text).ids[:NUM_TOKENS] for text in TEXTS])


def transformers_logits(prompts, dtype):
    model = LlamaForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype)
    with torch.no_grad():
        logits = model(prompts).logits
    del model
    gc.collect()
    return logits


@pytest.fixture(scope="module")
def expected(prompts):
    return transformers_logits(prompts, torch.float32)


def decoded(prompts, pieces, decoder):
    return decoder.logits(decode_in_pieces(decoder, prompts, pieces))


PIECES = {"prefill": [NUM_TOKENS], "steps": [32, *[1] * 24, *[4] * 10]}


@pytest.fixture(scope="module")
def plain_decoder():
    """With the products that PyTorch itself uses instead of the packed ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_can_block", lambda weight: False)
        decoder = Decoder(read_shape(smollm2_folder()), torch.float32, CPU)
        decoder.load(folder_weights(smollm2_folder()), 0)
    assert decoder.packed_bytes == 0
    return decoder


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_logits_equal_transformers_in_fp32(prompts, expected, pieces, plain_decoder):
    # transformers itself is 0.9e-4 off its own float64 (logits to 36)
    difference = (decoded(prompts, pieces, plain_decoder) - expected).abs()
    assert difference.max() < 1.5e-4
    assert difference.pow(2).mean().sqrt() < 2e-5


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_packed_products_cost_a_bit_of_the_last_digits(prompts, expected, pieces):
    """They sum in an order of their own."""
    difference = (decoded(prompts, pieces, smollm2_decoder()) - expected).abs()
    assert difference.max() < 2.5e-4
    assert difference.pow(2).mean().sqrt() < 3e-5
    assert (difference > 1e-4).float().mean() < 3e-3  # 0.0017 with the products of an AMD EPYC


def test_the_float64_pass_equals_transformers_in_float64(prompts):
    """transformers rounds its rotary angles to fp32 even there."""
    expected = transformers_logits(prompts[:1], torch.float64)
    exact = smollm2_decoder().reference_logits(prompts[0], NUM_TOKENS)
    assert (exact - expected[0]).abs().max() < 5e-5
