"""Every family against transformers: logits, the update's gradient, the export; and the same text however it is made.

The models are small and have random weights (``tools/random_models.py``), a window shorter than the texts where the
family has one, and parts that differ from their defaults.
"""

from __future__ import annotations

import random
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_world import OneRank
from tiny import CPU, decode_in_pieces
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import prove_exactness
import random_models
from fetch_model import default_folder

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.folder import decoding_dtype, load_policy_model, read_folder_weights
from tlt_hpc.models.policy_model import PolicyModel
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.models.tokenizer import load_tokenizer, package_asset_folder
from tlt_hpc.storage.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = list(random_models.FAMILIES)
NUM_PROMPTS, LONGEST = 200, 120
families = pytest.mark.parametrize("family", FAMILIES)
UNLIKE = ("qwen3_moe", "gemma3_text")
"""Those whose layers have least in common."""


@cache
def model_of(family: str) -> Any:
    return random_models.random_model(family)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folder of each family's model, with a tokenizer."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        model_of(family).save_pretrained(root / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(package_asset_folder("tiny") / name, root / family / name)
    return {family: root / family for family in FAMILIES}


def decoder_of(folder: Path) -> Decoder:
    shape = read_shape(folder)
    decoder = Decoder(shape, decoding_dtype("float32", CPU, shape), CPU)
    decoder.load_weights(read_folder_weights(folder), 0)
    return decoder


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(0, random_models.NUM_TOKENS, (length,), generator=generator) for length in lengths]


# --- the decoder ---


@families
@torch.inference_mode()
def test_logits_are_those_of_transformers(family, folders):
    """Of documents end to end, of the float64 pass, and of rows that are fed to a cache in pieces."""
    model, decoder = model_of(family), decoder_of(folders[family])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert decoder.shape.num_parameters == num_parameters and decoder.weight_bytes >= 4 * num_parameters
    texts = prompts()
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = decoder.hidden_states(torch.cat(texts), positions, attend_documents(lengths, decoder.shape.windows))
    rows = model(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)).logits  # nothing sees what comes after it
    for row, own in zip(rows, torch.split(decoder.logits(hidden), lengths), strict=True):
        assert float((own - row[: len(own)]).abs().max()) < 1e-4
    last = len(texts[0])  # by float64
    assert float((decoder.reference_logits(texts[0], last) - rows[0][:last]).abs().max()) < 1e-4
    tokens = torch.randint(random_models.NUM_TOKENS, (3, 120), generator=torch.Generator().manual_seed(2))
    out = model(tokens, output_hidden_states=True)
    features = decode_in_pieces(decoder, tokens, [50, 1, 1, 4, 64])
    torch.testing.assert_close(features.float(), out.hidden_states[-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(decoder.logits(features).float(), out.logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@torch.inference_mode()
def test_logits_of_real_weights_are_as_exact_as_those_of_transformers():
    """Gemma 3 270M on pages of this project, past its window of 512."""
    folder = default_folder("gemma3")
    if not folder.is_dir():
        pytest.skip(f"no Gemma 3 in {folder}; see tools/fetch_model.py")
    decoder, tokenizer = decoder_of(folder), load_tokenizer(folder)
    other = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    for page in ("README.md", "docs/how_it_works.md", "docs/drafter.md"):
        tokens = torch.tensor(tokenizer.encode(f"<bos>{(ROOT / page).read_text()[:4000]}").ids[:700])
        hidden = decoder.hidden_states(tokens, torch.arange(len(tokens)), attend_documents(None, decoder.shape.windows))
        ours, exact = decoder.logits(hidden[-150:]), decoder.reference_logits(tokens, 150)
        assert float((ours - exact).abs().max()) < 2.5e-4
        assert float((ours - other(tokens[None]).logits[0, -150:]).abs().max()) < 4e-4


@families
@torch.inference_mode()
def test_a_second_load_leaves_nothing_of_the_first(family, folders):
    """Whatever is derived from weights, as norms and blocked copies are, is derived again at each load."""
    decoder, other = decoder_of(folders[family]), random_models.random_model(family, seed=1)
    tokens = torch.randint(random_models.NUM_TOKENS, (70,), generator=torch.Generator().manual_seed(1))
    decoder.load_weights(((name, weight.detach()) for name, weight in other.named_parameters()), 1)
    found = decoder.logits(
        decoder.hidden_states(tokens, torch.arange(70), attend_documents(None, decoder.shape.windows))
    )
    wanted = other(tokens[None]).logits[0]
    assert float((model_of(family)(tokens[None]).logits[0] - wanted).abs().max()) > 0.1
    assert float((found - wanted).abs().max()) < 1e-4
    assert float((decoder.reference_logits(tokens, 70) - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("norms_weights", [False, True])
@torch.inference_mode()
def test_the_weights_of_experts_are_normed_where_the_config_says_so(norms_weights):
    """In the fast pass, and in the float64 pass of a decoder of another precision."""
    options = {**random_models.FAMILIES["qwen3_moe"], "norm_topk_prob": norms_weights}
    config = AutoConfig.for_model("qwen3_moe", **random_models.SIZES, **options)
    model = random_models.model_of(config)
    decoder = Decoder(shape_from(config.to_dict(), "experts"), torch.float32, CPU)
    decoder.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), 0)
    tokens = torch.randint(random_models.NUM_TOKENS, (40,), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens[None]).logits[0]
    found = decoder.logits(
        decoder.hidden_states(tokens, torch.arange(40), attend_documents(None, decoder.shape.windows))
    )
    assert float((found - wanted).abs().max()) < 1e-4
    assert float((decoder.reference_logits(tokens, 40) - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "family", [each if each in UNLIKE else pytest.param(each, marks=pytest.mark.ci) for each in FAMILIES]
)
def test_the_text_does_not_depend_on_how_it_is_generated(family, folders, monkeypatch):
    """Nor, in half precision, on what else is in the batch."""
    monkeypatch.setattr(prove_exactness, "MOST_TOKENS", 90)
    model = prove_exactness.Model(folders[family], random_models.NUM_TOKENS, family)
    wanted, alone = prove_exactness.requests(8, model), prove_exactness.Way("plain")
    ways = {way.name: way for way in prove_exactness.WAYS}
    plain, *_ = prove_exactness.generate(alone, wanted, CPU, torch.float32, model)
    assert max(len(text) for (text,) in plain.values()) > 2 * random_models.WINDOW
    for name in ("preempted, chunked prefill", "ahead, a GPU's rounds, on the CPU"):
        found, counts, _ = prove_exactness.generate(ways[name], wanted, CPU, torch.float32, model)
        assert counts.num_tokens / counts.num_row_passes > 1.1
        assert all(all(text.tolist() == plain[key][0].tolist() for text in found[key]) for key in plain)
    monkeypatch.setattr(prove_exactness, "MOST_TOKENS", 50)
    crowded = replace(prove_exactness.WAYS[5], max_live=3)
    halves = [prove_exactness.generate(way, wanted[:4], CPU, torch.bfloat16, model)[0] for way in (alone, crowded)]
    assert all(halves[1][key][0].tolist() == text.tolist() for key, (text,) in halves[0].items())


@families
def test_what_config_json_leaves_out_is_as_in_transformers(family):
    sizes = dict.fromkeys(("vocab_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 8)
    sizes["num_key_value_heads"] = 4
    sizes |= {"hidden_size": 64, "intermediate_size": 32, "max_position_embeddings": 99}
    theirs = AutoConfig.for_model(family, **sizes)
    experts = {key: getattr(theirs, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
               if hasattr(theirs, key)}  # fmt: skip
    shape = shape_from({"model_type": family, **sizes, **experts}, "test")
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert shape.tied_head == theirs.tie_word_embeddings and shape.norm_epsilon == theirs.rms_norm_eps
    scalar = getattr(theirs, "query_pre_attn_scalar", shape.head_dim)
    assert shape.query_gain == (shape.head_dim / scalar) ** 0.5
    rope = theirs.rope_parameters
    assert shape.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert shape.local_theta == rope.get("sliding_attention", {}).get("rope_theta")
    window = getattr(theirs, "sliding_window", None) or 0
    kinds = getattr(theirs, "layer_types", None) or (["sliding_attention"] * 8 if window else [])
    assert shape.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds or [""] * 8)


# --- the update ---


@families
def test_the_gradient_is_that_of_transformers(family, folders):
    """Of documents packed end to end, against each alone in transformers' own attention, without dropout."""
    texts = [*[text for text in prompts() if len(text) > 2][:4], max(prompts(), key=len)]
    packed, plain = load_policy_model(folders[family], "float32"), random_models.random_model(family)
    plain.set_attn_implementation("eager")
    policy, lengths = PolicyModel(packed).train(), [len(text) for text in texts]
    ends = torch.tensor(lengths).cumsum(0)
    where = torch.cat([torch.arange(end - length, end - 1) for end, length in zip(ends, lengths, strict=True)])
    tokens, positions = torch.cat(texts), torch.cat([torch.arange(length) for length in lengths])
    log_probs, *_ = policy(tokens, positions, lengths, where, tokens[where + 1], 0.7)
    log_probs.sum().backward()
    wanted = 0.0
    for text in texts:
        scores = (plain(text.unsqueeze(0)).logits[0, :-1] / 0.7).log_softmax(-1)
        wanted = wanted + scores.gather(1, text[1:].unsqueeze(1)).sum()
    wanted.backward()
    assert abs(float(log_probs.sum() - wanted)) < 1e-5 * abs(float(wanted))
    theirs = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters():
        scale = max(1.0, float(theirs[name].grad.abs().max()))
        assert float((parameter.grad - theirs[name].grad).abs().max()) < 1e-5 * scale, name


# --- the export ---


@families
@torch.inference_mode()
def test_an_exported_policy_opens_in_transformers(family, folders, tmp_path):
    config = load_config(
        Path(__file__).parent.parent / "jobs" / "tiny.toml", [f"run.folder={tmp_path}", f"model.path={folders[family]}"]
    )
    run, model = RunFolder(config.folder), random_models.random_model(family, seed=1)
    run.make_missing_folders()
    run.config.write_text(to_toml(config))
    masters = {f"{name}.master": parameter.detach() for name, parameter in model.named_parameters()}
    CheckpointStore(run.checkpoints, keep=1).save(3, OneRank(), {"policy": masters}, {})  # type: ignore[arg-type]
    assert main(["export-policy", str(run.path), "--dtype", "float32"]) == 0
    opened = AutoModelForCausalLM.from_pretrained(run.path / "export" / "policy", dtype=torch.float32)
    for text in random.Random(0).sample(prompts(), 5):
        assert torch.equal(opened(text.unsqueeze(0)).logits, model(text.unsqueeze(0)).logits)
    decoder = decoder_of(run.path / "export" / "policy")
    text = max(prompts(), key=len)
    wanted = model(text.unsqueeze(0)).logits[0, -1:]
    assert float((decoder.reference_logits(text, 1) - wanted).abs().max()) < 1e-4
