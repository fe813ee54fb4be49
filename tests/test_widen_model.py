"""``tools/widen_model.py``: the wide model's logits are the source's, for transformers and for the decoder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import CPU
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import random_models
import widen_model

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import embedded, load_tokenizer
from tlt_hpc.models.weight_check import check_weights

WIDE = {"hidden_size": 180, "intermediate_size": 224, "vocab_size": 130, "num_hidden_layers": 9}
WIDE |= {"num_attention_heads": 15, "num_key_value_heads": 3}
PLAIN_LLAMA = {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}
TOKENS = torch.randint(0, random_models.NUM_TOKENS, (2, 80), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["tied llama", *widen_model.FAMILIES])
def source(request, tmp_path, monkeypatch) -> Path:
    """The folder of a random model, in several files."""
    family = request.param.split()[-1]
    if family != request.param:
        monkeypatch.setitem(random_models.FAMILIES, family, PLAIN_LLAMA)
    random_models.random_model(family).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded("tiny") / name, tmp_path / "source" / name)
    return tmp_path / "source"


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()(TOKENS).logits


def decoder_of(folder: Path) -> Decoder:
    decoder = Decoder(read_shape(folder), torch.float32, CPU)
    decoder.load(folder_weights(folder), 0)
    return decoder


def test_the_wide_model_computes_the_same_function(source, tmp_path):
    wide = tmp_path / "wide"
    widen_model.widen(source, wide, WIDE, torch.float32)
    expected, found = logits(source), logits(wide)
    assert expected.std() > 0.3
    torch.testing.assert_close(found[..., : random_models.NUM_TOKENS], expected, atol=1e-5, rtol=1e-5)
    assert not found[..., random_models.NUM_TOKENS :].any() and found.shape[-1] == WIDE["vocab_size"]

    shape = read_shape(wide)
    check_weights(wide, shape)
    assert load_tokenizer(wide).get_vocab() == load_tokenizer(source).get_vocab()
    assert shape.num_parameters == sum(tensor.numel() for _, tensor in folder_weights(wide))
    assert len(list(wide.glob("*.safetensors"))) == shape.num_layers + 1
    decoded = decoder_of(wide).reference_logits(TOKENS[0], TOKENS.shape[1])
    torch.testing.assert_close(decoded[:, : random_models.NUM_TOKENS], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("qwen3", {}, "of the family qwen3; use a model of llama"),
        ("llama", {"hidden_size": 45}, "do not fit into"),
        ("llama", {"intermediate_size": 64}, "do not fit into"),
        # one query head to a key head, where the source has two
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}, "do not fit into"),
        ("llama", {"vocab_size": 90}, "do not fit into"),
        ("biases that config.json does not name", {}, "94 weights, not 66"),
    ],
)
def test_what_cannot_be_widened_is_refused(family, sizes, words, tmp_path):
    source = tmp_path / "source"
    random_models.random_model("qwen3" if family == "qwen3" else "llama").save_pretrained(source)
    if family.startswith("biases"):
        raw = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**raw, "attention_bias": False}))
    with pytest.raises(ValueError, match=words):
        widen_model.widen(source, tmp_path / "wide", WIDE | sizes, torch.float32)
    assert family.startswith("biases") or not (tmp_path / "wide").exists()


def test_the_wide_drafter_computes_the_same_function(tmp_path):
    source, wide = embedded("tiny"), tmp_path / "wide"
    sizes = WIDE | {"num_attention_heads": 12, "intermediate_size": 288, "num_hidden_layers": 10}
    widen_model.widen(source, wide, sizes, torch.float32)
    widen_model.widen_drafter("embedded:tiny", read_shape(source), wide, torch.float32)
    tokens, states = torch.arange(20), torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    found = []
    for folder, place in ((source, "embedded:tiny"), (wide, str(wide / "drafter"))):
        decoder = decoder_of(folder)
        given = torch.nn.functional.pad(states, (0, decoder.shape.hidden_size - 128))
        drafter = load_drafter(place, decoder, "here")
        found.append(drafter(decoder.embedding[tokens], given, torch.arange(20), attend_documents([20])))
    torch.testing.assert_close(found[1][:, :128], found[0], atol=1e-5, rtol=1e-5)
    assert not found[1][:, 128:].any() and found[0].std() > 0.3


def test_models_that_the_tools_write_have_the_permissions_of_the_umask(tmp_path):
    """safetensors makes its files private, so that others could not read a model in a shared folder."""
    source, wide = tmp_path / "source", tmp_path / "wide"
    code = (
        "import sys, random_models, widen_model, torch; from pathlib import Path\n"
        f"sys.argv[1:] = ['llama', {str(source)!r}]; random_models.main()\n"
        f"widen_model.widen(Path({str(source)!r}), Path({str(wide)!r}), {WIDE!r}, torch.float32)"
    )
    tools = Path(random_models.__file__).parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tools, umask=0o027)
    files = [path for folder in (source, wide) for path in folder.iterdir()]
    assert len(files) > 10 and {path.stat().st_mode & 0o777 for path in files} == {0o640}
