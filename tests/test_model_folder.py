"""Model folders that cannot be used: each is refused in one line by the command, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import embedded_folder

from tlt_hpc.cli.main import main
from tlt_hpc.config import UserError
from tlt_hpc.models.folder import load_policy_model, read_folder_weights

TINY = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
COMMANDS = [("warmup", str(TINY), "model.path=mine"), ("evaluate", "mine", str(TINY))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the embedded model, as ``mine`` in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(embedded_folder(), tmp_path / "mine")
    return tmp_path / "mine"


def change(path: Path, **changes: Any) -> None:
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main([*(command or ("train", str(TINY), "model.path=mine")), "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:5], err.count("\n")) == ("", "tlt: ", 1)
    return err[5:-1]


LINES = Path(__file__).with_name("unusable_models.txt").read_text().splitlines()


@pytest.mark.parametrize(("changes", "message"), zip(LINES[::2], LINES[1::2], strict=True))
def test_shapes_that_no_decoder_has(changes, message, folder, capsys):
    """Changes of config.json, null where a key is taken away, and below each what is said of them."""
    change(folder / CONFIG, **json.loads(changes))
    assert said(capsys) == f"mine/config.json: {message.strip()}"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, b"{", "mine/config.json is no JSON object ("),
        (CONFIG, b"[]", "mine/config.json is no JSON object (it is no object); download it again"),
        (CONFIG, b"[" * 100_000, "mine/config.json is no JSON object (it is nested too deep); download it"),
        (CONFIG, b"\xff", "mine/config.json is not UTF-8 ("),
        (CONFIG, None,
         "model.path = 'mine' has no config.json; on the login node: hf download ORG/NAME --local-dir mine"),
        ("generation_config.json", b"{", "mine/generation_config.json is no JSON object ("),
        ("tokenizer_config.json", b"{", "mine/tokenizer_config.json is no JSON object ("),
        ("tokenizer.json", b"{", "mine/tokenizer.json is no JSON object ("),
        ("tokenizer.json", b"{}", "mine/tokenizer.json is no tokenizer (Model missing."),
        ("tokenizer.json", None, "model folder mine has no tokenizer.json; save the fast tokenizer there"),
        ("model.safetensors", b"version https://git-lfs", "mine/model.safetensors is no whole safetensors file ("),
        ("model.safetensors", None, f"model folder mine has no model.safetensors and no {INDEX}; convert the weights"),
        (INDEX, b"{", f"mine/{INDEX} is no JSON object ("),
        (INDEX, b"{}", f"mine/{INDEX} has no 'weight_map'; download it again"),
        (INDEX, b'{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
         f"model folder mine lacks 1.safetensors and 1 more shards that {INDEX} names; download them"),
    ],
)  # fmt: skip
def test_files_that_are_damaged_or_missing(file, content, message, folder, capsys):
    (folder / ("model.safetensors" if file == INDEX else file)).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert said(capsys).startswith(message)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "names no eos_token_id; add one to its"),
        (99, "eos_token_id 99 is none of the model's tokens 0 to 23; fix its"),
        ("<end>", "eos_token_id '<end>' is none of the model's tokens 0 to 23; fix its"),
    ],
)
def test_ends_that_are_no_tokens(token, message, folder, capsys):
    for file in (CONFIG, "generation_config.json"):
        change(folder / file, eos_token_id=token)
    assert f"{message} generation_config.json" in said(capsys)


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_tied_head_that_is_in_a_file_of_torch_too_is_the_embedding(factor, folder):
    """No check before the start reads such a file."""
    weights = dict(read_folder_weights(embedded_folder()))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * factor
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    if factor == 1.0:
        assert "lm_head.weight" not in dict(load_policy_model(folder, "float32").named_parameters())
        return
    with pytest.raises(UserError, match=r"^model folder .* is not the embedding; set it to false there "):
        load_policy_model(folder, "float32")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_torch_is_refused_where_the_decoder_reads_it(command, folder, capsys):
    torch.save(dict(read_folder_weights(folder)), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert main(["train", str(TINY), "model.path=mine", "--dry-run"]) == 0
    capsys.readouterr()
    assert said(capsys, *command) == (
        f"model folder mine has no model.safetensors and no {INDEX}; convert the weights with save_pretrained"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_adapter_beside_the_weights(command, folder, capsys):
    """The trained model would have it, the decoder would not."""
    (folder / "adapter_config.json").write_text("{}")
    assert said(capsys, *command).startswith("model folder mine has an adapter (adapter_config.json), which ")


def test_a_prompt_of_tokens_that_the_model_does_not_have(folder, capsys):
    """The tokenizer has got more tokens, and the model has not."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    names = ("a", "b", "c", "d", "e")
    raw["added_tokens"] += [{**raw["added_tokens"][0], "id": 20 + i, "content": name} for i, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    Path("data.jsonl").write_text('{"prompt": "1d", "answer": "1"}\n{"prompt": "1e", "answer": "1"}\n')
    assert said(capsys, "train", str(TINY), "model.path=mine", "data.source=data.jsonl") == (
        "data.jsonl:2: the tokenizer makes a token 24 of it, and the model has 0 to 23 (is tokenizer.json the model's "
        "own?); fix or remove the row"
    )


def test_a_target_of_too_few_layers_for_the_drafter(folder, capsys):
    change(folder / CONFIG, num_hidden_layers=6, layer_types=None)
    assert said(capsys, *COMMANDS[0], "drafter.form=eagle3", "drafter.init=random") == (
        "drafter.form = 'eagle3': an EAGLE-3 drafter reads three layers of its target, and this one has 6, of which no "
        "three can be told apart; use a target of 7 layers or more, or a drafter of the EAGLE form"
    )
