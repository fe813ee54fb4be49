"""The decoder against transformers: logits, features, the cache, families, and what it refuses."""

from copy import deepcopy

import pytest
import torch
from tiny import CPU, decode_in_pieces, embedded_decoder, embedded_folder
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.rollout.device_cache import make_cache
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.kv_cache import PoolSizes

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_models():
    torch.manual_seed(0)
    yield "qwen2-tied", Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    yield "qwen2-untied", Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    qwen3 = {**SIZES, "head_dim": 16}  # wider than hidden_size / num_heads
    yield "qwen3-tied", Qwen3ForCausalLM(Qwen3Config(**qwen3, tie_word_embeddings=True))
    yield "qwen3-biased", Qwen3ForCausalLM(Qwen3Config(**qwen3, attention_bias=True, tie_word_embeddings=False))
    yield "llama", LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    yield "llama-tied-biased", LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True))
    yield "llama3-rope", LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False))


MODELS = dict(random_models())


def saved(name, folder, **options):
    model = deepcopy(MODELS[name])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases off their defaults, so that each is seen to be used
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return model


def loaded(folder, dtype=torch.float32):
    decoder = Decoder(read_shape(folder), dtype, CPU)
    decoder.load(folder_weights(folder), 0)
    return decoder


def check_against_transformers(decoder, model):
    tokens = torch.randint(61, (3, 120))
    with torch.no_grad():
        out = model.float().eval()(tokens, output_hidden_states=True)
    logits, features = out.logits, out.hidden_states[-1]
    hidden = decode_in_pieces(decoder, tokens, [50, 1, 1, 4, 64])
    torch.testing.assert_close(hidden, features, atol=1e-4, rtol=0)
    torch.testing.assert_close(decoder.logits(hidden), logits, atol=1e-4, rtol=0)
    exact = decoder.reference_logits(tokens[0], 120)
    torch.testing.assert_close(exact.float(), logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_random_models_of_every_family_agree_with_transformers(name, tmp_path):
    model = saved(name, tmp_path)
    decoder = loaded(tmp_path)
    check_against_transformers(decoder, model)
    assert decoder.shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert decoder.weight_bytes >= 4 * decoder.shape.num_parameters


def test_sharded_folders_load_whole_or_name_what_is_missing(tmp_path):
    model = saved("llama", tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    names = [name for name, _ in folder_weights(tmp_path)]
    assert len(names) == len(set(names))
    check_against_transformers(loaded(tmp_path), model)
    (tmp_path / "model-stray.safetensors").write_bytes(b"not of this model")
    check_against_transformers(loaded(tmp_path), model)
    content = shards[1].read_bytes()
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match=rf"{shards[1].name} lacks 'model\..*index\.json places there"):
        loaded(tmp_path)
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"lacks {shards[1].name} .*model\.safetensors\.index\.json names"):
        loaded(tmp_path)
    shards[1].write_bytes(content)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        loaded(tmp_path)


def test_the_packed_drafter_serves_what_its_parameters_say():
    shape = embedded_decoder().shape
    embedded, features, positions = torch.randn(9, 128), torch.randn(9, 128), torch.arange(9) + 3
    attend = attend_documents(None)
    first, second = (Eagle(shape, seed, torch.float32, CPU) for seed in (0, 1))
    wanted = [drafter(embedded, features, positions, attend).detach() for drafter in (first, second)]
    assert wanted[0].isfinite().all() and (wanted[0] - wanted[1]).abs().max() > 0.1
    first.pack()
    with torch.inference_mode():
        torch.testing.assert_close(first(embedded, features, positions, attend), wanted[0], atol=1e-5, rtol=0)
        first.load_state_dict(second.state_dict())
        torch.testing.assert_close(first(embedded, features, positions, attend), wanted[1], atol=1e-5, rtol=0)


def test_a_second_load_repacks_matrices_that_are_large_enough_to_be_blocked():
    sizes = {
        **SIZES,
        "hidden_size": 512,
        "intermediate_size": 576,
        "vocab_size": 520,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    shape = shape_from(LlamaConfig(**sizes, head_dim=64, tie_word_embeddings=False).to_dict(), "wide")
    source = torch.Generator().manual_seed(0)
    names = {name: cut.sizes for name, cut in Decoder(shape, torch.float32, CPU).weight_cuts().items()}
    first, second = (
        {name: torch.randn(size, generator=source) * size[-1] ** -0.5 for name, size in names.items()} for _ in range(2)
    )
    decoder, fresh = (Decoder(shape, torch.float32, CPU) for _ in range(2))
    decoder.load(first.items(), 0)
    assert decoder.packed_bytes > 0.5 * decoder.weight_bytes, "hardly any matrix is blocked"
    drafter = Eagle(shape, 0, torch.float32, CPU)
    drafter.draft_among(torch.arange(4, 520))
    cache = make_cache(shape, PoolSizes(1, 8, 1, 8, 1), torch.float32, CPU)
    drafts = LearnedDrafts(drafter, decoder, cache, 1, 520)
    assert drafts.head_bytes == 2 * 516 * 512 * 4, "the drafts' part of the head is blocked too"
    tokens = torch.randint(520, (24,), generator=source)
    found = []
    for one in (decoder, fresh):
        one.load(second.items(), 1)
        found.append(one.logits(one.hidden(tokens, torch.arange(24), attend_documents(None))))
    assert torch.equal(*found)
    torch.testing.assert_close(decoder.reference_logits(tokens, 24).float(), found[0], atol=1e-4, rtol=0)
    drafts.read_head()
    states = torch.randn(2, 3, 512, generator=source)
    torch.testing.assert_close(drafts._logits(states), states @ second["lm_head.weight"][4:].T, atol=1e-4, rtol=0)


def test_weights_load_in_place_and_wrong_ones_are_refused():
    shape = read_shape(embedded_folder())
    decoder = Decoder(shape, torch.float32, CPU)
    weights = dict(folder_weights(embedded_folder()))
    address = decoder.layers[0].qkv.weight.data_ptr()
    decoder.load(weights.items(), 3)
    assert decoder.layers[0].qkv.weight.data_ptr() == address
    assert decoder.version == 3
    missing = {name: w for name, w in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"lack 'model\.norm\.weight'"):
        decoder.load(missing.items(), 4)
    with pytest.raises(ValueError, match=r"'model\.foo' is not part"):
        decoder.load({"model.foo": torch.zeros(1)}.items(), 4)
    with pytest.raises(ValueError, match=r"shape \[2\], config.json asks for \[128\]"):
        decoder.load({"model.norm.weight": torch.zeros(2)}.items(), 4)
    for value in (torch.nan, torch.inf):
        broken = {name: w.clone() for name, w in weights.items()}
        broken["model.layers.1.mlp.down_proj.weight"][0, 3] = value
        with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' holds values that are not"):
            decoder.load(broken.items(), 4)
    assert decoder.version == 3
