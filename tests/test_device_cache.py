"""Fused layers over the cache for CUDA devices, on a CPU: against plain ones, and through Triton's interpreter."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from interpreter import interpreted
from tiny import CPU, tree_relations

from tlt_hpc.kernels import dispatch
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.rotary import RotaryRows
from tlt_hpc.models.shape import shape_from
from tlt_hpc.rollout import device_cache
from tlt_hpc.rollout.device_cache import DevicePagedCache
from tlt_hpc.rollout.kv_cache import PoolSizes

INTERPRETS = dispatch.has_triton() and not torch.cuda.is_available()
needs_interpreter = pytest.mark.skipif(not INTERPRETS, reason="needs triton, imported as an interpreter")


def draw(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


SIZES = {
    "vocab_size": 31,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-biased": {"model_type": "qwen3", "attention_bias": True},
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
PAGES_OF_16 = [[3, 0, 9, 1], [8, 2, 6, 4], [12, 7, 5, 11]]
NUM_PASSES = {"target": 2, "drafter": 5}


def random_models(family):
    """A target and a drafter of random weights."""
    shape = shape_from({**SIZES, **FAMILIES[family]}, "test")
    target, drafter = Decoder(shape, torch.float32, CPU), Eagle(shape, 3, torch.float32, CPU)
    sizes = enumerate((name, cut.sizes) for name, cut in target.weight_cuts().items())
    target.load_weights(((name, 0.3 * draw(*size, seed=i)) for i, (name, size) in sizes), 0)
    drafter.load_state_dict({**drafter.state_dict(), "post_norm": 0.3 * draw(shape.hidden_size)})
    return target, drafter


@torch.inference_mode()
def all_passes(models, through=lambda attend: attend, length=40):
    """What each kind of pass says, target's and drafter's, and what they leave in the pages.

    A prefill in which a row repeats its last position, a tree; the drafter's reading, three steps, and nodes of a tree.
    ``through`` may hide what an attention can do beside being called.
    """
    target, drafter = models
    cache = DevicePagedCache(target.shape, PoolSizes(13, 16, 3, 64, 1), target.dtype, CPU)
    for row, table in enumerate(PAGES_OF_16):
        cache.set_table(row, table)
    layout, own = cache.build_layout(PAGES_OF_16, 13), cache.drafter_layer
    rows = torch.arange(3).unsqueeze(1)
    text = torch.randint(31, (3, 64), generator=torch.Generator().manual_seed(0))
    inputs = draw(2, 3, 64, SIZES["hidden_size"], seed=1)
    first, out = torch.arange(length).repeat(3, 1), []
    first[2, -1] = length - 2
    committed = torch.tensor([length, length, length - 1])
    depths, ancestors = (x.repeat(3, *[1] * x.dim()) for x in tree_relations([0, 0, 0, 1, 2, 3, 3]))

    def decode(places, positions, *of_tree):
        attend = through(cache.make_attention(layout, cache.tables, places, *of_tree))
        out.append(target.hidden_states(text[rows, places].flatten(), positions.flatten(), attend))

    def propose(attend, places, positions):
        embedded, features = inputs[:, rows, places].flatten(1, 2)
        out.append(drafter(embedded, features, positions.flatten(), through(attend)))

    places = committed.unsqueeze(1) + torch.arange(7)
    decode(first, first)
    decode(places, committed.unsqueeze(1) + depths, committed, ancestors)
    propose(cache.make_attention(layout, cache.tables, first, only_layer=own), first, first)
    for d, attend in enumerate(cache.make_step_attentions(layout, cache.tables, places[:, :3], own)):
        propose(attend, places[:, d : d + 1], places[:, d : d + 1])
    newest = cache.make_attention(layout, cache.tables, places[:, 5:], committed, ancestors[:, 5:], own)
    propose(newest, places[:, 5:], committed.unsqueeze(1) + depths[:, 5:])
    return [*out, cache._keys[:, :-1], cache._values[:, :-1]]


@pytest.fixture
def fused_calls(monkeypatch):
    """Counts rotations by the kernel."""
    calls, real = [], device_cache.rotate_and_store
    monkeypatch.setattr(device_cache, "rotate_and_store", lambda *arguments: (calls.append(1), real(*arguments))[1])
    return calls


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(
    ("family", "programs"),
    [
        *((family, nullcontext) for family in FAMILIES),
        pytest.param("qwen3-biased", interpreted, marks=needs_interpreter),
        *(pytest.param(each, interpreted, marks=[needs_interpreter, pytest.mark.ci]) for each in ("gemma3", "experts")),
    ],
)
def test_fused_layers_say_what_plain_ones_say(family, programs, monkeypatch, fused_calls):
    models, length = random_models(family), 9 if programs is interpreted else 40
    plain = all_passes(models, partial, length)
    assert not fused_calls
    monkeypatch.setattr(RotaryRows, "rotate", None)  # the fused path gathers nothing
    with programs():
        fused = all_passes(models, length=length)
    assert len(fused_calls) == NUM_PASSES["target"] * len(models[0].layers) + NUM_PASSES["drafter"]
    for got, wanted in zip(fused, plain, strict=True):
        assert wanted.std() > 0.1
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_wide_chunks_have_each_token_once_beside_a_row_that_repeats_its_only_position():
    positions = torch.stack((torch.zeros(70, dtype=torch.int64), torch.arange(70)))
    blocks = device_cache.chain_blocks(positions, torch.zeros(2, 3, dtype=torch.int32))
    assert sorted(blocks.tokens[blocks.seen >= 0].tolist()) == list(range(140))
