"""The decoder against transformers: logits, features, the cache, families, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from tiny import CPU, embedded_decoder, embedded_folder, gcd_requests, generate, make_engine
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import find_model, folder_weights
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.rollout.kv_cache import KVCache

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
    yield "llama", LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    yield "llama3-rope", LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False))


MODELS = dict(random_models())


def reference(model, tokens):
    with torch.no_grad():
        out = model.float().eval()(tokens, output_hidden_states=True)
    return out.logits, out.hidden_states[-1]


def decode_in_pieces(decoder, tokens, pieces):
    """Hidden states of rows of tokens [B, T], fed to a cache in pieces of the given widths."""
    cache = KVCache(decoder.shape, tokens.shape[0], tokens.shape[1], torch.float32, CPU)
    out, start = [], 0
    for width in filter(None, pieces):
        positions = torch.arange(start, start + width).expand(tokens.shape[0], width)
        piece = tokens[:, start : start + width]
        hidden = decoder.hidden(piece.flatten(), positions.flatten(), cache.attend(positions))
        out.append(hidden.view(*piece.shape, -1))
        start += width
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", MODELS)
def test_random_models_of_both_families_agree_with_transformers(name, tmp_path):
    model = MODELS[name]
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases off their defaults, so that each is seen to be used
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    decoder = Decoder(read_shape(tmp_path), torch.float32, CPU)
    decoder.load(folder_weights(tmp_path), 0)
    tokens = torch.randint(61, (3, 120))
    logits, features = reference(model, tokens)
    hidden = decode_in_pieces(decoder, tokens, [50, 1, 1, 4, 64])
    torch.testing.assert_close(hidden, features, atol=1e-4, rtol=0)
    torch.testing.assert_close(decoder.logits(hidden), logits, atol=1e-4, rtol=0)
    exact = decoder.reference_logits(tokens[0], 120)
    torch.testing.assert_close(exact.float(), logits[0], atol=1e-4, rtol=0)
    assert decoder.shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_embedded_model_agrees_with_transformers_on_its_own_longest_text():
    longest = max(
        generate(make_engine(max_live=64, max_new_tokens=500), gcd_requests(24, 4)),
        key=lambda r: len(r.response_tokens),
    )
    tokens = torch.from_numpy(np.concatenate([longest.prompt_tokens, longest.response_tokens])).long().unsqueeze(0)
    assert tokens.shape[1] > 200
    model = AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32)
    logits, features = reference(model, tokens)
    left = tokens.shape[1] - 150
    hidden = decode_in_pieces(embedded_decoder(), tokens, [100, *[1] * 50, *[5] * (left // 5), left % 5])
    # both are off by their own rounding, which grows with the length; float64 says by how much
    exact = embedded_decoder().reference_logits(tokens[0], tokens.shape[1]).unsqueeze(0)
    assert (embedded_decoder().logits(hidden) - exact).abs().max() < 3e-4
    assert (logits - exact).abs().max() < 3e-4
    short = slice(0, 100)
    torch.testing.assert_close(hidden[:, short], features[:, short], atol=1e-4, rtol=0)
    torch.testing.assert_close(embedded_decoder().logits(hidden)[:, short], logits[:, short], atol=1e-4, rtol=0)


def test_weights_load_in_place_and_wrong_ones_are_refused():
    shape = read_shape(embedded_folder())
    decoder = Decoder(shape, torch.float32, CPU)
    weights = dict(folder_weights(embedded_folder()))
    address = decoder.layers[0].qkv.data_ptr()
    decoder.load(weights.items(), 3)
    assert decoder.layers[0].qkv.data_ptr() == address
    assert decoder.version == 3
    missing = {name: w for name, w in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"lack 'model\.norm\.weight'"):
        decoder.load(missing.items(), 4)
    with pytest.raises(ValueError, match=r"'model\.foo' is not part"):
        decoder.load({"model.foo": torch.zeros(1)}.items(), 4)
    with pytest.raises(ValueError, match=r"shape \[2\], config.json asks for \[128\]"):
        decoder.load({"model.norm.weight": torch.zeros(2)}.items(), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_features_the_decoder_lacks_are_refused_by_name(change, message):
    raw = json.loads((embedded_folder() / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        shape_from({**raw, **change}, "config.json")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json in that folder"):
        find_model(str(tmp_path))
