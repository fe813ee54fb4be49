"""Folders whose weights are made to be right or wrong: every command has the same verdict, before anything starts.

A folder that is let pass gives the logits of transformers, whose own loading knows nothing of the checks.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CPU, embedded_folder
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import random_models

from tlt_hpc.cli.main import main
from tlt_hpc.cli.submit import check_member
from tlt_hpc.config import UserError, load_config
from tlt_hpc.export import policy
from tlt_hpc.extras.preflight.job_checks import check_model
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.folder import load_policy_model, read_folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.weight_check import check_sizes, weight_sizes
from tlt_hpc.mpi.world import as_sendable_error

TINY = str(Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml")
EMBEDDING, HEAD, INDEX = "model.embed_tokens.weight", "lm_head.weight", "model.safetensors.index.json"
FIRST = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, Tensor]


class Made(NamedTuple):
    """A folder's weights, by file if there are several, and what is changed in its config.json."""

    files: dict[str, Tensors]
    config: dict[str, Any] = {}  # noqa: RUF012 nothing writes to it
    index: dict[str, str] | None = None
    metadata: dict[str, Any] | None = {}  # noqa: RUF012


def weights() -> Tensors:
    """Of the embedded model, whose head is its embedding."""
    return load_file(embedded_folder() / "model.safetensors")


def one(change: Callable[[Tensors], Tensors], **config: Any) -> Made:
    return Made({"model.safetensors": change(weights())}, config)


def plus(**more: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name.replace("__", "."): tensor for name, tensor in more.items()}


def head(change: Callable[[Tensor], Tensor], **config: Any) -> Made:
    return one(lambda tensors: tensors | {HEAD: change(tensors[EMBEDDING].clone())}, **config)


def renamed(change: Callable[[str], str]) -> Made:
    return one(lambda tensors: {change(name): tensor for name, tensor in tensors.items()})


def without(*parts: str) -> Made:
    return one(lambda tensors: {n: t for n, t in tensors.items() if not any(part in n for part in parts)})


def cast(dtype: torch.dtype, only: str = "") -> Made:
    return one(lambda tensors: {n: t.to(dtype) if only in n else t for n, t in tensors.items()})


def shards(first: Callable[[str], bool], twice: str = "", index: dict[str, str] | None = None) -> Made:
    """In two files: the names of the first, and the rest, with a tensor that is in both."""
    tensors, files = weights(), {"1.safetensors": Tensors(), "2.safetensors": Tensors()}
    for name, tensor in tensors.items():
        files[f"{2 - first(name)}.safetensors"][name] = tensor
    placed = {name: file for file, each in files.items() for name in each}
    if twice:
        files["2.safetensors"][twice] = tensors[twice]
    return Made(files, {}, placed | (index or {}))


def quantised(suffixes: tuple[str, ...]) -> Made:
    """A matrix in the tensors that its method has in its place."""
    stem = FIRST.removesuffix(".weight")
    made = {f"{stem}.{suffix}": torch.ones(4, 4, dtype=torch.int32) for suffix in suffixes}
    return one(lambda tensors: {n: t for n, t in tensors.items() if n != FIRST or "weight" in suffixes} | made)


def family(name: str, is_fused: bool) -> Made:
    """A random model of another family; experts in a tensor each, or all in one."""
    model = random_models.random_model(name)
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"max_position_embeddings": 1024}
    if not is_fused:
        for fused in [n for n in own if "mlp.experts." in n]:
            stem, _, kind = fused.rpartition(".")
            parts = kind.removesuffix("_proj").split("_")
            for number, each in enumerate(own.pop(fused)):
                for part, rows in zip(parts, each.chunk(len(parts)), strict=True):
                    own[f"{stem}.{number}.{part}_proj.weight"] = rows.clone()
    return Made({"model.safetensors": own}, config)


ROWS, LAYER = torch.ones(24), "model.layers.7."
RIGHT: dict[str, Callable[[], Made]] = {
    "as it is": lambda: one(dict),
    "a tied head that is the embedding": lambda: head(lambda e: e),
    "a head of its own": lambda: head(lambda e: e * 1.5, tie_word_embeddings=False),
    "rotary frequencies": lambda: one(plus(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))),
    "float32": lambda: cast(torch.float32),
    "float64": lambda: cast(torch.float64),
    "two precisions": lambda: cast(torch.float32, "norm"),
    "two files": lambda: shards(lambda name: ".0." in name),
    "experts, a tensor for each": lambda: family("qwen3_moe", False),
    "experts, a tensor for all": lambda: family("qwen3_moe", True),
    "another family": lambda: family("gemma3_text", True),
}  # fmt: skip
WRONG: dict[str, tuple[Callable[[], Made], str]] = {
    "one number of a tied head": (lambda: head(lambda e: e.index_fill_(0, torch.tensor([23]), 2.0)),
                                   "is stored and is not the embedding; set tie_word_emb"),
    "a tied head of another type": (lambda: head(lambda e: e.double()), "in F64, not in the embedding's F16"),
    "a tied head of another size": (lambda: head(lambda e: e[:20].contiguous()), "'lm_head.weight' has shape [20,"),
    "no head": (lambda: one(dict, tie_word_embeddings=False), "no 'lm_head.weight', and config.json does not tie"),
    "no word on the head": (lambda: one(dict, tie_word_embeddings=None), "no 'lm_head.weight', and config.json does"),
    "from DDP": (lambda: renamed("module.{}".format), "saved from inside a wrapper); save the model that is inside"),
    "compiled": (lambda: renamed("_orig_mod.{}".format), "saved from inside a wrapper); save the model that is inside"),
    "a model of images": (lambda: renamed(lambda n: n.replace("model.", "model.language_model.")), "more than text"),
    "its older names": (lambda: renamed("language_model.{}".format), "reads more than text); save its language model"),
    "with its eyes": (lambda: one(plus(model__visual__blocks__0__norm1__weight=ROWS)), "that reads more than text"),
    "unmerged adapters": (
        lambda: renamed(lambda n: "base_model.model." + n.replace("_proj.", "_proj.base_layer.")),
        "it has adapters that are not merged); merge them first"),
    "an adapter": (lambda: one(plus(**{FIRST.replace(".", "__")[:-8] + "__lora_A__weight": ROWS})), "merge them first"),
    "a value head": (lambda: one(plus(v_head__summary__weight=ROWS)), "a head for values, rewards or classes); save"),
    "a score": (lambda: one(plus(score__weight=ROWS)), "a head for values, rewards or classes); save the language mo"),
    "no prefix": (lambda: renamed(lambda n: n.removeprefix("model.")), "the prefix 'model.' is missing); load it with"),
    "a prefix twice": (lambda: renamed("model.{}".format), "config.json asks for no such tensor); take the co"),
    "a missing layer": (lambda: without(LAYER), "'model.layers.7.input_layernorm.weight' and 11 more weights"),
    "a layer more": (
        lambda: one(lambda t: t | {n.replace(LAYER, "model.layers.8."): x.clone() for n, x in t.items() if LAYER in n}),
        "config.json has num_hidden_layers = 8); take the config.json"),
    "a bias more": (lambda: one(plus(model__layers__0__self_attn__o_proj__bias=torch.ones(128))), "no such tensor); "),
    "biases less": (lambda: without("k_proj.bias"), "'model.layers.0.self_attn.k_proj.bias' and 7 more weights"),
    "an unknown tensor": (lambda: one(plus(extra=ROWS)), "'extra' is no weight of this model of type qwen2"),
    "a vocabulary": (lambda: one(dict, vocab_size=32), f"'{EMBEDDING}' has shape [24, 128], config.json asks"),
    "a width": (lambda: one(dict, intermediate_size=192), "mlp.down_proj.weight' has shape [128, 256], config"),
    "fp8": (lambda: cast(torch.float8_e4m3fn, "proj.weight"), "stored as F8_E4M3, is of quantised weights; give the"),
    "int8": (lambda: cast(torch.int8, "up_proj"), "stored as I8, is of quantised weights; give the folder"),
    "GPTQ": (lambda: quantised(("qweight", "qzeros", "scales", "g_idx")), "is of quantised weights; give the folder"),
    "scales beside weights": (
        lambda: one(plus(**{FIRST.replace(".", "__") + "_scale_inv": ROWS})), "stored as F32, is of quantised"),
    "a tensor in two files": (lambda: shards(lambda name: ".0." in name, twice=FIRST), f"both hold '{FIRST}'; "),
    "a missing file": (lambda: shards(lambda name: ".0." in name, index={"x": "3.safetensors"}), "lacks 3.safetensors"),
    "a tensor not in its file": (
        lambda: shards(lambda name: ".0." in name, index={"x": "2.safetensors"}), "2.safetensors lacks 'x', which mod"),
    "an index without metadata": (lambda: shards(lambda name: True)._replace(metadata=None), "has no 'metadata', wh"),
    "files that are no names": (
        lambda: shards(lambda name: False, index={"x": 3}), "'weight_map'"),  # type: ignore[dict-item]
}  # fmt: skip


def write(made: Made) -> Path:
    """The folder ``mine`` in the working folder."""
    folder = Path("mine")
    shutil.copytree(embedded_folder(), folder)
    (folder / "model.safetensors").unlink()
    for name, tensors in made.files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if made.index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": made.metadata, "weight_map": made.index}))
    raw = json.loads((folder / "config.json").read_text())
    raw = made.config if "model_type" in made.config else raw | made.config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return folder


JOB = (TINY, "model.path=mine", "drafter.init=random")
COMMANDS = {
    "train": ("train", *JOB, "--dry-run"),
    "train adapters": ("train", *JOB, "lora.rank=2", "--dry-run"),
    "evaluate": ("evaluate", "mine", TINY, "--dry-run"),
    "warmup": ("warmup", *JOB, "--dry-run"),
    "plan": ("plan", *JOB),
}


def verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each command says of the folder; nothing where it lets it pass."""
    said = {}
    for name, words in COMMANDS.items():
        code = main([*words])
        told = capsys.readouterr()
        assert (code == 0, told.err.count("\n")) in ((True, 0), (False, 1)), told
        said[name] = told.err.removeprefix("tlt: ").rstrip("\n")
    config = load_config(Path(TINY), [word for word in COMMANDS["train adapters"] if "=" in word])
    member = SimpleNamespace(name="m", arguments=["train", TINY, "model.path=mine"])
    shapes = {} if any(said.values()) else {name: weight.shape for name, weight in read_folder_weights(folder)}
    stored = Mock(config=config, model=folder, shapes=shapes)
    for name, check in {
        "preflight": lambda: check_model(SimpleNamespace(config=config, num_ranks=2, uses_gpu=False)),  # type: ignore[arg-type]
        "submit": lambda: check_member(TINY, member, 2),  # type: ignore[arg-type]
        "export-policy": lambda: policy.check_model(stored),
    }.items():
        try:
            check()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error).removeprefix("m: ")
    return said


def test_an_error_keeps_what_is_wrong_apart_from_the_remedy():
    """A caller that knows another remedy replaces it whole, and nothing of what is wrong; also on another rank."""
    with pytest.raises(UserError) as caught:
        check_sizes({"model.norm.weight; its copy": (32,)}, read_shape(embedded_folder()), "a; b")
    fact, _, remedy = str(caught.value).rpartition("; ")
    assert fact.startswith("a; b: 'model.norm.weight; its copy' is no weight of") and remedy.startswith("take the conf")
    for sent in (caught.value, pickle.loads(pickle.dumps(caught.value)), as_sendable_error(caught.value)):
        assert (str(sent), sent.message_without_remedy) == (str(caught.value), fact)


@pytest.mark.parametrize("name", WRONG)
def test_every_command_refuses_the_weights_in_the_same_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make, words = WRONG[name]
    said = verdicts(write(make()), capsys)
    assert len(set(said.values())) == 1, said
    assert words in said["train"] and "mine" in said["train"]
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", RIGHT)
@torch.inference_mode()
def test_every_command_lets_right_weights_pass_and_they_compute_what_transformers_does(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = write(RIGHT[name]())
    said = verdicts(folder, capsys)
    assert not any(said.values()), said
    shape = read_shape(folder)
    decoder = Decoder(shape, torch.float32, CPU)
    decoder.load_weights(read_folder_weights(folder), 0)
    cuts = {each: cut.sizes for each, cut in decoder.weight_cuts().items()}
    assert weight_sizes(shape) == cuts, "the check's names are the decoder's"
    tokens = torch.randint(0, 20, (30,), generator=torch.Generator().manual_seed(0))
    hidden = decoder.hidden_states(tokens, torch.arange(30), attend_documents(None, shape.windows))
    theirs = load_policy_model(folder, "float32")(tokens[None]).logits[0]
    assert float((decoder.logits(hidden) - theirs).abs().max()) < 1e-3
