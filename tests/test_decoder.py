"""Loading the decoder: folders of several files, a second load, blocked matrices, and what it refuses."""

import sys
from pathlib import Path

import pytest
import torch
from tiny import CPU, embedded_decoder, embedded_folder
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import random_models

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.rollout.device_cache import make_cache
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.kv_cache import PoolSizes


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(read_shape(folder), torch.float32, CPU)
    decoder.load_weights(read_folder_weights(folder), 0)
    return decoder


def test_sharded_folders_load_whole_or_name_what_is_missing(tmp_path):
    model, tokens = random_models.random_model("llama"), torch.arange(60)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "model-stray.safetensors").write_bytes(b"not of this model")
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    names = [name for name, _ in read_folder_weights(tmp_path)]
    assert len(shards) > 1 and len(names) == len(set(names))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(loaded(tmp_path).reference_logits(tokens, 60).float(), expected, atol=1e-4, rtol=0)
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
    first.pack_weights()
    with torch.inference_mode():
        torch.testing.assert_close(first(embedded, features, positions, attend), wanted[0], atol=1e-5, rtol=0)
        first.load_state_dict(second.state_dict())
        torch.testing.assert_close(first(embedded, features, positions, attend), wanted[1], atol=1e-5, rtol=0)


def test_a_second_load_repacks_matrices_that_are_large_enough_to_be_blocked():
    sizes = {
        "hidden_size": 512, "intermediate_size": 576, "vocab_size": 520, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    shape = shape_from(LlamaConfig(**sizes, tie_word_embeddings=False).to_dict(), "wide")
    source = torch.Generator().manual_seed(0)
    names = {name: cut.sizes for name, cut in Decoder(shape, torch.float32, CPU).weight_cuts().items()}
    first, second = (
        {name: torch.randn(size, generator=source) * size[-1] ** -0.5 for name, size in names.items()} for _ in range(2)
    )
    decoder, fresh = (Decoder(shape, torch.float32, CPU) for _ in range(2))
    decoder.load_weights(first.items(), 0)
    assert decoder.packed_bytes > 0.5 * decoder.weight_bytes, "hardly any matrix is blocked"
    drafter = Eagle(shape, 0, torch.float32, CPU)
    drafter.set_draft_vocabulary(torch.arange(4, 520))
    cache = make_cache(shape, PoolSizes(1, 8, 1, 8, 1), torch.float32, CPU)
    drafts = LearnedDrafts(drafter, decoder, cache, 1, 520)
    assert drafts.head_bytes == 2 * 516 * 512 * 4, "the drafts' part of the head is blocked too"
    tokens = torch.randint(520, (24,), generator=source)
    found = []
    for one in (decoder, fresh):
        one.load_weights(second.items(), 1)
        found.append(one.logits(one.hidden_states(tokens, torch.arange(24), attend_documents(None))))
    assert torch.equal(*found)
    torch.testing.assert_close(decoder.reference_logits(tokens, 24).float(), found[0], atol=1e-4, rtol=0)
    drafts.copy_target_head()
    states = torch.randn(2, 3, 512, generator=source)
    torch.testing.assert_close(drafts._logits(states), states @ second["lm_head.weight"][4:].T, atol=1e-4, rtol=0)


def test_weights_load_in_place_and_wrong_ones_are_refused():
    decoder, weights = loaded(embedded_folder()), dict(read_folder_weights(embedded_folder()))
    address = decoder.layers[0].qkv.weight.data_ptr()
    decoder.load_weights(weights.items(), 3)
    assert decoder.layers[0].qkv.weight.data_ptr() == address
    down = "model.layers.1.mlp.down_proj.weight"
    broken = weights[down].clone()
    broken[0, 3] = torch.nan
    for given, words in (
        ({name: w for name, w in weights.items() if name != "model.norm.weight"}, r"lack 'model\.norm\.weight'"),
        ({"model.foo": torch.zeros(1)}, r"'model\.foo' is not part"),
        ({"model.norm.weight": torch.zeros(2)}, r"shape \[2\], config.json asks for \[128\]"),
        ({**weights, down: broken}, rf"'{down}' holds values that are not"),
        ({**weights, down: broken.nan_to_num(torch.inf)}, rf"'{down}' holds values that are not"),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.load_weights(given.items(), 4)
    assert decoder.version == 3
