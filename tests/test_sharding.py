"""Ranks that compute every pass together: the same logits, text and decisions on all of them. Threads are the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_world import ThreadWorld, on_threads
from tiny import CPU, decode_in_pieces, embedded_folder, gcd_requests, generate, make_engine, texts

from tlt_hpc.common.records import Rollout
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.drafter import AS_TARGET, Drafter, DraftLayer
from tlt_hpc.models.drafter_file import TOKEN_IDS, make_drafter, read_drafter
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.shape import ModelShape, check_sharding, read_shape
from tlt_hpc.models.sharding import Sharding
from tlt_hpc.plan.inputs import check_shape
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.strategy import OFF, Strategy

TINY = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
SHAPE = read_shape(embedded_folder())
OWN = DraftLayer(intermediate_size=192, rope_theta=300.0, norm_before_residual=True, fc_bias=True)
CHAIN = Strategy("drafter", 4)
TREE = Strategy("drafter", 4, 3, 8)
NGRAM = Strategy("ngram", 4)
REQUESTS = gcd_requests(4, 3)


def sharding_of(world: ThreadWorld) -> Sharding:
    return Sharding(world.rank, world.size, lambda x: sum(world.allgather(x.clone())))


def random_weights(shape: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: cut.sizes for name, cut in Decoder(shape, torch.float32, CPU).weight_cuts().items()}
    return {
        name: torch.randn(size, generator=generator) * (1.0 if len(size) == 1 else size[-1] ** -0.5)
        for name, size in sizes.items()
    }


def logits_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V] by the rollout's own path, half of the tokens first."""
    half = len(tokens) // 2
    return decoder.logits(decode_in_pieces(decoder, tokens.unsqueeze(0), [half, len(tokens) - half])[0])


def decoder_of(sharding: Sharding, shape: ModelShape, weights: dict[str, torch.Tensor]) -> Decoder:
    decoder = Decoder(shape, torch.float32, CPU, sharding)
    decoder.load_weights(weights.items(), 0)
    return decoder


def wide(**changes: object) -> ModelShape:
    sizes = {"vocab_size": 40, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "num_layers": 3}
    return replace(SHAPE, **(sizes | changes))


SHAPES = {
    "embedded": SHAPE,
    "qwen3": wide(family="qwen3", head_norm=True, qkv_bias=False),
    "llama": wide(family="llama", qkv_bias=True, output_bias=True, tied_head=False),
    "one kv head": wide(num_kv_heads=1),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_one_ranks_to_a_hair_and_the_same_bits_on_all(plain: list[Rollout], name: str, size: int) -> None:
    shape = SHAPES[name]
    tokens = torch.randint(0, shape.vocab_size, (48,), generator=torch.Generator().manual_seed(1))
    weights = random_weights(shape)
    if name == "embedded":  # on random tokens its activations, and the error, are ten times as large
        weights = dict(read_folder_weights(embedded_folder()))
        tokens = torch.tensor([*plain[0].prompt_tokens.tolist(), *plain[0].response_tokens.tolist()])
    whole = decoder_of(Sharding(), shape, weights)

    def both(world: ThreadWorld) -> tuple[torch.Tensor, torch.Tensor, int]:
        decoder = decoder_of(sharding_of(world), shape, weights)
        return logits_of(decoder, tokens), decoder.reference_logits(tokens, 3), decoder.weight_bytes

    (first, exact, num_bytes), *others = on_threads(size, both)
    assert all(torch.equal(first, fast) and torch.equal(exact, slow) for fast, slow, _ in others)
    assert (first - logits_of(whole, tokens)).abs().max() < 1e-4
    assert (exact - whole.reference_logits(tokens, 3)).abs().max() < 1e-10
    layers = 2 * sum(layer.weight_bytes for layer in whole.layers) // size
    assert num_bytes < whole.weight_bytes - sum(layer.weight_bytes for layer in whole.layers) + layers


def test_a_folder_gives_a_rank_the_part_that_whole_weights_would() -> None:
    for index in range(2):
        by_part, by_whole = (Decoder(SHAPE, torch.float32, CPU, Sharding(index, 2)) for _ in range(2))
        by_part.load_weights(read_folder_weights(embedded_folder(), by_part.weight_cuts()), 0, are_cut=True)
        by_whole.load_weights(read_folder_weights(embedded_folder()), 0)
        for mine, other in zip(by_part.layers, by_whole.layers, strict=True):
            for part, same in zip(mine.parts(), other.parts(), strict=True):
                assert all(map(torch.equal, part.tensors, same.tensors))
        cut = by_part.weight_cuts()["model.layers.0.mlp.down_proj.weight"]
        assert cut.slices[1] == slice(index * 128, index * 128 + 128)


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        (wide(num_heads=12, num_kv_heads=4), 6, "rollout.tensor_parallel = 6 does not divide the model's "
         "num_key_value_heads = 4; use 4 or another number that does"),
        (wide(intermediate_size=250), 4, "rollout.tensor_parallel = 4 does not divide the model's intermediate_size = "
         "250; use 2 or another number that does"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_divided_is_refused(shape: ModelShape, size: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_sharding(shape, size, "rollout.tensor_parallel")
    assert str(caught.value) == message


EXPERTS = wide(num_experts=4, experts_per_token=2, expert_size=64, intermediate_size=250)


def test_a_mixture_of_experts_is_checked_before_a_rank_starts() -> None:
    """Its drafter's layer has a width of its own, and on a GPU float32 would let rounding choose experts."""
    shared = ["rollout.tensor_parallel=4", "drafter.init=random"]
    with pytest.raises(ConfigError, match=r"^the drafter's layer: rollout.tensor_parallel = 4 .* = 250; use 2 or"):
        check_shape(load_config(TINY, shared), EXPERTS, 4)
    for other in ("speculation.mode=ngram", "drafter.init=/a/published/head"):
        check_shape(load_config(TINY, [*shared, other]), EXPERTS, 4)
    with pytest.raises(ConfigError, match=r"^model.dtype = 'float32' with a mixture of experts .*'bfloat16'$"):
        check_shape(load_config(TINY, ["model.device=cuda"]), EXPERTS, 1)
    check_shape(load_config(TINY, ["model.device=cuda", "model.dtype=bfloat16"]), EXPERTS, 1)
    check_shape(load_config(TINY, ["algorithm.router_aux_coefficient=0.001"]), EXPERTS, 1)


# -- the engine -----------------------------------------------------------------------------------------------------


def engine_of(world: ThreadWorld | None, strategies: tuple[Strategy, ...], **changes: object) -> RolloutEngine:
    sharding = sharding_of(world) if world else Sharding()
    weights = read_drafter("embedded:tiny", SHAPE, "the test's drafter")
    drafter = make_drafter(SHAPE, 0, torch.float32, CPU, weights.get(TOKEN_IDS))
    if world:
        drafter.set_sharding(sharding)
    options = {"decoder": Decoder(SHAPE, torch.float32, CPU, sharding), "drafter": drafter, "max_live": 8, **changes}
    options |= {"agree": world.broadcast if world else None, "seed": sharding.index}
    engine = make_engine(strategies, max_new_tokens=120, **options)
    engine.load_drafter({name.removesuffix(".weight"): tensor for name, tensor in weights.items()})
    return engine


@pytest.fixture(scope="module")
def plain() -> list[Rollout]:
    return generate(engine_of(None, (OFF,)), REQUESTS)


def draft_of(drafter: Drafter) -> torch.Tensor:
    """What three documents' worth of positions lead to, with rows seen by attention as training has them."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(24, drafter.num_features * SHAPE.hidden_size, generator=generator)
    embedded = torch.randn(24, SHAPE.hidden_size, generator=generator)
    with torch.inference_mode():
        return drafter(embedded, drafter.fuse(features), torch.arange(24), attend_documents([7, 9, 8]))


@pytest.mark.parametrize("token_ids", [None, torch.arange(2, 20)], ids=["eagle", "eagle3"])
@pytest.mark.parametrize(("size", "own"), [(2, AS_TARGET), (4, AS_TARGET), (2, OWN)], ids=["two", "four", "own layer"])
def test_a_drafter_that_is_split_drafts_what_it_did_whole(
    size: int, own: DraftLayer, token_ids: torch.Tensor | None
) -> None:
    whole = make_drafter(SHAPE, 3, torch.float32, CPU, token_ids, own)
    state = whole.state_dict()
    whole.load_state_dict(state | ({"fc_bias": torch.ones(128)} if "fc_bias" in state else {}))
    whole.pack_weights()

    def work(world: ThreadWorld) -> torch.Tensor:
        drafter = make_drafter(SHAPE, 0, torch.float32, CPU, token_ids, own)
        drafter.set_sharding(sharding_of(world))
        drafter.pack_weights()
        drafter.load_state_dict(whole.state_dict())
        return draft_of(drafter)

    first, *others = on_threads(size, work)
    assert all(torch.equal(first, other) for other in others)
    assert (first - draft_of(whole)).abs().max() < 1e-5


def test_a_drafter_whose_own_width_cannot_be_divided_is_not_split() -> None:
    drafter = make_drafter(SHAPE, 0, torch.float32, CPU, None, DraftLayer(intermediate_size=190))
    with pytest.raises(ConfigError, match="tensor_parallel = 4 does not divide the model's intermediate_size = 190"):
        drafter.set_sharding(Sharding(0, 4))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_text_is_one_ranks_whatever_is_drafted(plain: list[Rollout], size: int) -> None:
    def work(world: ThreadWorld) -> tuple[dict, int, dict[str, tuple[int, int]], float]:
        engine = engine_of(world, (OFF, CHAIN, TREE, NGRAM), chooser="random")
        rollouts = generate(engine, REQUESTS)
        counts = engine.take_counts()
        return texts(rollouts), engine.text_mark, counts.strategies, counts.num_tokens / counts.num_row_passes

    results = on_threads(size, work)
    assert all(found == texts(plain) for found, *_ in results)
    assert all(result == results[0] for result in results), "ranks took different ways, though of different seeds"
    assert all(rounds > 0 for rounds, _ in results[0][2].values())
    assert results[0][3] > 1.5, "drafts of a drafter that is split are as good as ever"
