"""Runs of other families than the embedded model's: resumed bit for bit, and the same on ranks that share layers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from launch_ranks import tlt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import random_models

from tlt_hpc.models.tokenizer import package_asset_folder

RUN = ("jobs/tiny.toml", "drafter.init=random", "rollout.prompts_per_step=2", "rollout.group_size=4")
RUN += ("rollout.max_new_tokens=70", "evaluation.every_steps=0", "checkpoint.every_steps=1", "run.name=run")


REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 7 / 7\n"


def model_folder(family: str, folder: Path) -> Path:
    random_models.random_model(family).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package_asset_folder("tiny") / name, folder / name)
    return folder


def learns(folder: Path) -> tuple[str, ...]:
    """Settings by which all groups differ in their rewards, though a random model solves nothing."""
    (folder / "reward.py").write_text(REWARD)
    return f"reward.default={folder / 'reward.py'}:score", "optimizer.learning_rate=1e-3"


def policy_of(folder: Path) -> str:
    return str(json.loads((folder / "run" / "finished.json").read_text())["policy_sha256"])


def metrics_of(folder: Path, step: int) -> dict[str, float]:
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[step])


@pytest.mark.mpi
@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit_and_does_not_depend_on_how_layers_are_shared(family, tmp_path):
    model = f"model.path={model_folder(family, tmp_path / 'model')}"
    whole, parts, shared, spread = (tmp_path / name for name in ("whole", "parts", "shared", "spread"))
    run = (*RUN, model, *learns(tmp_path), "optimizer.zero_stage=3")
    tlt(2, "train", *run, f"run.folder={whole}", "run.num_steps=2")
    for steps in (1, 2):
        tlt(2, "train", *run, f"run.folder={parts}", f"run.num_steps={steps}")
    tlt(2, "train", *run, f"run.folder={shared}", "run.num_steps=2", "rollout.tensor_parallel=2")
    tlt(2, "train", *run, f"run.folder={spread}", "run.num_steps=1", "optimizer.sequence_parallel=2")
    assert policy_of(whole) == policy_of(parts) == policy_of(shared)
    lines = [metrics_of(whole, step) for step in (0, 1)]
    assert lines[1]["response_length/max"] > 25 and all(line["actor/grad_norm"] > 0 for line in lines)
    for name in ("actor/grad_norm", "actor/ppo_kl"):
        assert metrics_of(spread, 0)[name] == pytest.approx(lines[0][name], rel=1e-5)


@pytest.mark.mpi
@pytest.mark.ci
def test_adapters_of_a_mixture_of_experts_are_for_attention(tmp_path):
    settings = (*RUN, f"model.path={model_folder('qwen3_moe', tmp_path / 'model')}", f"run.folder={tmp_path}")
    settings += learns(tmp_path)
    tlt(1, "train", *settings, "run.num_steps=1", "lora.rank=4")
    tlt(1, "export-policy", str(tmp_path / "run"), "--dtype", "float32", "--output", str(tmp_path / "out"), "--adapter")
    targets = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert targets == ["k_proj", "o_proj", "q_proj", "v_proj"]
