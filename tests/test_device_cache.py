"""The cache for CUDA devices on a CPU: against the CPU's own, through Triton's interpreter, and by whole engines."""

from functools import partial

import pytest
import torch
from interpreter import interpreted
from test_kv_cache import CPU, SHAPE, D, G, R
from tiny import embedded_decoder

from tlt_hpc.kernels import dispatch
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.layers import transformer_layer
from tlt_hpc.models.linear import Norm
from tlt_hpc.models.rotary import RotaryRows
from tlt_hpc.models.shape import shape_from
from tlt_hpc.rollout import device_cache
from tlt_hpc.rollout.device_cache import DevicePagedCache
from tlt_hpc.rollout.kv_cache import HostPagedCache, PoolSizes
from tlt_hpc.rollout.tree import tree

INTERPRETS = dispatch.has_triton() and not torch.cuda.is_available()
needs_interpreter = pytest.mark.skipif(not INTERPRETS, reason="needs triton, imported as an interpreter")
TABLES = [[3, 0, 9], [8, 1, 6, 4], [2, 12], [5, 7, 10, 11]]
SIZE, NUM_PAGES = 64, 13


def draw(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def both_caches(num_positions=4 * SIZE):
    """The two kinds of cache, every page full of the same numbers."""
    caches = [
        kind(SHAPE, PoolSizes(NUM_PAGES, SIZE, len(TABLES), num_positions), torch.float32, CPU)
        for kind in (HostPagedCache, DevicePagedCache)
    ]
    held = draw(2, NUM_PAGES * SIZE, 2 * G, D)
    for cache in caches:
        for row, table in enumerate(TABLES):
            cache.set_table(row, table)
        everywhere = torch.arange(NUM_PAGES).unsqueeze(1)
        places = torch.arange(SIZE).expand(NUM_PAGES, -1)
        fill = cache.attend(cache.layout(everywhere.tolist(), NUM_PAGES), everywhere, places)
        for layer in range(2):
            fill(layer, torch.zeros(NUM_PAGES * SIZE, G * R, D), held[layer])
    return caches


def outputs(cache, positions, *tree_of, layer=1):
    """Attention of the same random queries, keys and values at ``positions``; equal positions get equal ones."""
    fused = draw(len(TABLES), NUM_PAGES * SIZE, (R + 2) * G, D, seed=1)
    rows = torch.arange(len(TABLES)).unsqueeze(1)
    query, key_value = fused[rows, positions].flatten(0, 1).split_with_sizes((R * G, 2 * G), 1)
    attend = cache.attend(cache.layout(TABLES, NUM_PAGES), cache.tables, positions, *tree_of)
    return attend(layer, query, key_value)


def positions_of(width, lengths=(150, 200, 10, 90)):
    """Positions from each row's length on; the last row has one less to do and repeats its last, as prefills do."""
    positions = torch.tensor(lengths).unsqueeze(1) + torch.arange(width)
    if width > 1:
        positions[3, -1] = positions[3, -2]
    return positions


@pytest.mark.parametrize("width", [1, 2, 9, 40, 63])
def test_chains_read_as_the_cpus_cache_does(width):
    host, device = both_caches()
    positions = positions_of(width, (120, 190, 0, 90))
    torch.testing.assert_close(outputs(device, positions), outputs(host, positions), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [64, 65, 130])
def test_long_chains_are_read_in_blocks_that_see_each_other(width):
    host, device = both_caches()
    tables = TABLES[1::2]
    positions = torch.tensor([[0], [256 - width]]) + torch.arange(width)
    query, key_value = draw(2 * width, R * G, D), draw(2 * width, 2 * G, D, seed=1)
    found = []
    for cache in (host, device):
        attend = cache.attend(cache.layout(tables, NUM_PAGES), cache.tables[1::2], positions)
        found.append(attend(0, query, key_value))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def grown_tree(num_slots, width, seed=0):
    """Ancestors [B, W, S] of the last ``width`` nodes of random trees of ``num_slots`` slots."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.stack(
        [torch.tensor([0] + [int(torch.randint(i + 1, (1,), generator=generator)) for i in range(num_slots - 1)])] * 4
    )
    return tree(torch.zeros_like(parents), parents, num_slots).ancestors[:, -width:]


@pytest.mark.parametrize(("num_slots", "width"), [(5, 5), (17, 4), (64, 64), (64, 3)])
@pytest.mark.parametrize("committed", [(60, 100, 10, 90), (5, -1, 0, 1)])
def test_trees_read_as_the_cpus_cache_does(num_slots, width, committed):
    """A drafter's queries are the newest of its nodes; a sequence of one token has its root at -1."""
    host, device = both_caches()
    # a root that is itself a query stands somewhere
    committed = torch.tensor(committed).clamp(min=0 if width == num_slots else -1)
    positions = committed.unsqueeze(1) + torch.arange(num_slots - width, num_slots)
    of_tree = committed, grown_tree(num_slots, width)
    torch.testing.assert_close(
        outputs(device, positions, *of_tree), outputs(host, positions, *of_tree), atol=1e-5, rtol=1e-5
    )


@needs_interpreter
@pytest.mark.parametrize("width", [1, 11, 66])
def test_chains_by_the_triton_program(width):
    _, device = both_caches()
    positions = positions_of(width, (100, 180, 0, 90))[[0, 1, 3]]
    query, key_value = draw(3 * width, R * G, D), draw(3 * width, 2 * G, D, seed=1)
    attend = device.attend(device.layout(TABLES, NUM_PAGES), device.tables[[0, 1, 3]], positions)
    wanted = attend(0, query, key_value)
    with interpreted():
        torch.testing.assert_close(attend(0, query, key_value), wanted, atol=1e-5, rtol=1e-5)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_drafters_tree_by_the_triton_program():
    _, device = both_caches()
    committed = torch.tensor([150, -1, 10, 90])
    positions = committed.unsqueeze(1) + torch.arange(13, 17)
    of_tree = committed, grown_tree(17, 4)
    wanted = outputs(device, positions, *of_tree)
    with interpreted():
        torch.testing.assert_close(outputs(device, positions, *of_tree), wanted, atol=1e-5, rtol=1e-5)


# -- fused layers -----------------------------------------------------------------------------------------------------

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
families = pytest.mark.parametrize("family", FAMILIES)
PAGES_OF_16 = [[3, 0, 9, 1], [8, 2, 6, 4], [12, 7, 5, 11]]
NUM_PASSES = {"target": 2, "drafter": 5}


def empty_models(family, dtype, device):
    shape = shape_from({**SIZES, **FAMILIES[family]}, "test")
    return Decoder(shape, dtype, device), Eagle(shape, 3, dtype, device)


def random_models(family, dtype):
    """A target and a drafter whose weights are numbers of half precision, so that they are the same in any."""
    target, drafter = empty_models(family, dtype, CPU)
    shape = target.shape
    sizes = enumerate((name, cut.sizes) for name, cut in target.weight_cuts().items())
    target.load(((name, (0.3 * draw(*size, seed=i)).bfloat16()) for i, (name, size) in sizes), 0)
    half = {name: weight.bfloat16() for name, weight in Eagle(shape, 3, torch.float32, CPU).state_dict().items()}
    half["post_norm"] = (0.3 * draw(shape.hidden_size)).bfloat16()
    drafter.load_state_dict(half)
    return target, drafter


def plainly(attend):
    """The same attention, which nobody can tell to be able to do more."""
    return partial(attend)


@torch.inference_mode()
def all_passes(models, through=lambda attend: attend, length=40):
    """What each kind of pass says, target's and drafter's, and what they leave in the pages.

    A prefill in which a row repeats its last position, a tree; the drafter's reading, three steps, and nodes of a tree.
    """
    target, drafter = models
    device = target.device
    cache = DevicePagedCache(target.shape, PoolSizes(13, 16, 3, 64, 1), target.dtype, device)
    for row, table in enumerate(PAGES_OF_16):
        cache.set_table(row, table)
    layout, own = cache.layout(PAGES_OF_16, 13), cache.drafter_layer
    rows = torch.arange(3).unsqueeze(1)
    text = torch.randint(31, (3, 64), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = draw(2, 3, 64, SIZES["hidden_size"], seed=1).to(device, target.dtype)
    first, out = torch.arange(length).repeat(3, 1), []
    first[2, -1] = length - 2
    committed = torch.tensor([length, length, length - 1], device=device)
    parents = torch.tensor([[0, 0, 0, 1, 2, 3, 3]] * 3, device=device)
    drafts = tree(torch.zeros_like(parents), parents, 3)

    def decode(places, positions, *of_tree):
        attend = through(cache.attend(layout, cache.tables, places, *of_tree))
        out.append(target.hidden(text[rows, places].flatten(), positions.flatten(), attend))

    def propose(attend, places, positions):
        embedded, features = inputs[:, rows, places].flatten(1, 2)
        out.append(drafter(embedded, features, positions.flatten(), through(attend)))

    first = first.to(device)
    places = committed.unsqueeze(1) + torch.arange(7, device=device)
    decode(first, first)
    decode(places, committed.unsqueeze(1) + drafts.depths, committed, drafts.ancestors)
    propose(cache.attend(layout, cache.tables, first, only_layer=own), first, first)
    for d, attend in enumerate(cache.attend_steps(layout, cache.tables, places[:, :3], own)):
        propose(attend, places[:, d : d + 1], places[:, d : d + 1])
    newest = cache.attend(layout, cache.tables, places[:, 5:], committed, drafts.ancestors[:, 5:], own)
    propose(newest, places[:, 5:], committed.unsqueeze(1) + drafts.depths[:, 5:])
    return [*out, cache._keys[:, :-1], cache._values[:, :-1]]


@pytest.fixture
def fused_calls(monkeypatch):
    """Counts rotations by the kernel."""
    calls, real = [], device_cache.rotate_and_store
    monkeypatch.setattr(device_cache, "rotate_and_store", lambda *arguments: (calls.append(1), real(*arguments))[1])
    return calls


def fused_count(models):
    return NUM_PASSES["target"] * len(models[0].layers) + NUM_PASSES["drafter"]


@families
def test_fused_layers_say_what_plain_ones_say(family, monkeypatch, fused_calls):
    models = random_models(family, torch.float32)
    plain = all_passes(models, plainly)
    assert not fused_calls
    monkeypatch.setattr(RotaryRows, "rotate", None)  # the fused path gathers nothing
    fused = all_passes(models)
    assert len(fused_calls) == fused_count(models)
    for got, wanted in zip(fused, plain, strict=True):
        assert wanted.std() > 0.1
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("family", ["qwen3-biased", "gemma3", "experts"])
def test_fused_layers_by_the_triton_programs(family, fused_calls):
    models = random_models(family, torch.float32)
    wanted = all_passes(models, plainly, 9)
    with interpreted():
        fused = all_passes(models, length=9)
    assert len(fused_calls) == fused_count(models)
    for got, plain in zip(fused, wanted, strict=True):
        torch.testing.assert_close(got, plain, atol=2e-5, rtol=2e-5)


# -- engines ----------------------------------------------------------------------------------------------------------


# -- what else a GPU takes ---------------------------------------------------------------------------------------------


@needs_interpreter
def test_fused_gate_and_norm_are_the_layers_own_and_leave_training_alone():
    decoder = embedded_decoder()
    shape, layer = decoder.shape, decoder.layers[0]
    x = draw(5, shape.hidden_size)
    rotary = decoder.rotaries.at(torch.arange(5))[0]

    def attend(_, query, key_value):
        return query.flatten(1)

    def run(x):
        return transformer_layer(x, layer, shape, rotary, 0, attend)

    norm = Norm(draw(64, seed=1).half(), 1e-6)
    with torch.inference_mode():
        wanted, normed = run(x), norm(x[:, :64].half())
        with interpreted():
            torch.testing.assert_close(run(x), wanted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(norm(x[:, :64].half()), normed, atol=2e-3, rtol=2e-3)
    slope = torch.func.grad(lambda x: run(x).sum())
    wanted = slope(x)
    with interpreted():
        torch.testing.assert_close(slope(x), wanted)
