"""A run's policy as a Hugging Face folder: what transformers reads there is what the checkpoint has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.export import policy
from tlt_hpc.models.folder import embedded
from tlt_hpc.storage.folder import RunFolder

ROOT = Path(__file__).parent.parent


class OneRank:
    rank, size, hostname = 0, 1, "here"

    def allgather(self, item: Any) -> list[Any]:
        return [item]


def masters(factor: float) -> dict[str, torch.Tensor]:
    """The embedded model's weights times a factor, with a moment that no export may hold."""
    weights = load_file(embedded("tiny") / "model.safetensors")
    state = {f"{name}.master": tensor.float() * factor for name, tensor in weights.items()}
    return state | {f"{name}.exp_avg": torch.ones_like(tensor.float()) for name, tensor in weights.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 and 20."""
    config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={tmp_path}"])
    folder = RunFolder(config.folder)
    folder.create()
    folder.config.write_text(to_toml(config))
    store = CheckpointStore(folder.checkpoints, keep=2)
    for step, factor in ((10, 1.0), (20, 0.5)):
        store.save(step, OneRank(), {"policy": masters(factor)}, {})  # type: ignore[arg-type]
    return folder.path


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    return logits


def test_transformers_reads_the_policy_and_its_tokenizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-policy", str(run), "--dtype", "float32", "--step", "10"]) == 0
    out = run / "export" / "policy-step-000010"
    torch.testing.assert_close(logits_of(out), logits_of(embedded("tiny")))
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, embedded("tiny")))
    assert ours("gcd(12,18)=").input_ids == theirs("gcd(12,18)=").input_ids
    assert (out / "generation_config.json").read_bytes() == (embedded("tiny") / "generation_config.json").read_bytes()
    said = capsys.readouterr().out
    assert f"wrote {out}: the policy after 10 steps, 1." in said and f"next: vllm serve {out}" in said
    assert "| from | embedded:tiny |" in (out / "README.md").read_text()


def test_the_newest_is_taken_rounded_and_nothing_else_is_there(run: Path) -> None:
    assert main(["export-policy", str(run)]) == 0
    out = run / "export" / "policy"
    weights, start = load_file(out / "model.safetensors"), load_file(embedded("tiny") / "model.safetensors")
    assert weights.keys() == start.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, (start[name].float() * 0.5).bfloat16()), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert not list(run.glob("export/*.part"))


def test_large_weights_are_cut_into_files_with_an_index(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SHARD_BYTES", 1_000_000)
    assert main(["export-policy", str(run), "--dtype", "float32", "--step", "10"]) == 0
    out = run / "export" / "policy-step-000010"
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and [s.name[-14:-12] for s in shards] == [f"{len(shards):02d}"] * len(shards)
    assert all(sum(t.nbytes for t in load_file(s).values()) <= 1e6 or len(load_file(s)) == 1 for s in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in load_file(s).values())
    torch.testing.assert_close(logits_of(out), logits_of(embedded("tiny")))


def test_an_earlier_export_gives_way_and_nothing_else_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run / "export" / "policy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "SHARD_BYTES", 1_000_000)
        assert main(["export-policy", str(run)]) == 0
    assert main(["export-policy", str(run)]) == 0
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"], "a file of the earlier export"
    (out / "notes.txt").write_text("mine")
    before = {path.name: path.stat().st_ino for path in out.iterdir()}
    assert main(["export-policy", str(run)]) == 2
    assert "has 'notes.txt' in it and is no earlier export; give a new or empty folder" in capsys.readouterr().err
    assert {path.name: path.stat().st_ino for path in out.iterdir()} == before


def test_a_failed_export_leaves_the_earlier_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-policy", str(run), "--step", "10", "--output", str(run / "out")]) == 0
    before = (run / "out" / "model.safetensors").read_bytes()
    for path in (run / "checkpoints" / "step-000020").glob("*.safetensors"):
        path.unlink()
    assert main(["export-policy", str(run), "--step", "20", "--output", str(run / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert (run / "out" / "model.safetensors").read_bytes() == before
    assert not (run / "out.part").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist; give a run's folder"),
        (
            ["RUN", "--step", "7"],
            "--step 7: no such checkpoint in RUN/checkpoints, which has those of steps 10, 20; use one that is there",
        ),
        (["RUN", "--step", "0"], "--step 0 is no checkpoint; use the number of a folder below RUN/checkpoints"),
        (["RUN", "--output", str(ROOT / "README.md")], f"--output {ROOT}/README.md is a file; give a folder"),
        (
            ["RUN", "--output", str(ROOT / "jobs")],
            f"--output {ROOT}/jobs has 'llama70b.toml' in it and is no earlier export; give a new or empty folder",
        ),
        (
            ["RUN", "--model", "elsewhere"],
            "model.path = 'elsewhere': no config.json in that folder; download the model there first (compute nodes "
            "have no internet) or use 'embedded:tiny'",
        ),
    ],
)
def test_mistakes_are_one_line(run: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-policy", *(str(run) if word == "RUN" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error == f"tlt: {said.replace('RUN/', f'{run}/') if 'steps' in said else said}\n"
    assert not (run / "export").exists()


def test_the_folder_of_another_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded("tiny"), model)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "intermediate_size": 512}))
    assert main(["export-policy", str(run), "--model", str(model)]) == 2
    assert capsys.readouterr().err == (
        f"tlt: {model}/config.json asks for 1,973,376 weights, the checkpoint has 1,186,944; give --model the folder "
        "that the run began with\n"
    )
    assert not (run / "export").exists()


def test_a_run_without_a_checkpoint_is_told_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert main(["export-policy", str(run)]) == 2
    assert capsys.readouterr().err == f"tlt: {run} has no checkpoint yet; train on until it has saved one\n"
