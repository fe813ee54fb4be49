"""Adapters of low rank against peft's own, on 1, 2 and 4 ranks; a run with them, resumed, evaluated and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_on_ranks, tlt
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_policy import (
    TOLERANCE,
    Reference,
    capture_gradients,
    connect,
    distance,
    make_advantages,
    make_config,
    make_model,
    make_policy,
    make_rollouts,
    weights_of,
)
from transformers import AutoModelForCausalLM

from tlt_hpc.config import ConfigError, LoraSection
from tlt_hpc.models.folder import load_policy_model
from tlt_hpc.models.lora import adapter_names, add_adapters, merge_adapters, named_adapters, target_layers
from tlt_hpc.models.shape import num_adapter_parameters, read_shape
from tlt_hpc.models.tokenizer import find_model
from tlt_hpc.models.weight_files import read_headers
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.rl.policy import Policy

RANK, ALPHA, TARGETS = 4, 16, target_layers(has_experts=False)
CHANGES = {"lora__rank": RANK, "lora__alpha": ALPHA}
LORA = LoraSection(rank=RANK, alpha=ALPHA)
RUN = ("jobs/tiny.toml", "lora.rank=8", "optimizer.learning_rate=2e-3", "rollout.prompts_per_step=4")
RUN += ("rollout.group_size=4", "rollout.max_new_tokens=60", "checkpoint.every_steps=1", "run.name=run")


class PeftReference(Reference):
    """``Reference`` for adapters: peft's own model, which begins with the adapters of a policy."""

    def __init__(self, config: Any, policy: Policy) -> None:
        super().__init__(config)
        wanted = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        self.model = get_peft_model(make_model(), wanted)
        self.inner = self.model.base_model.model
        with torch.no_grad():
            for name, parameter in self.inner.named_parameters():
                if "lora_" in name:
                    parameter.copy_(policy._parameters[name])
        trained = [parameter for parameter in self.inner.parameters() if parameter.requires_grad]
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            trained, settings.learning_rate, eps=self.optimizer.defaults["eps"], weight_decay=settings.weight_decay
        )


def compare_with_peft(stages: list[int], changes: dict[str, Any]) -> list[dict[str, Any]]:
    world, results = connect(), []
    for stage in stages:
        # at stage 3 DeepSpeed gathers a parameter that is asked for outside of a pass only in a context of its own
        first = make_policy(make_config(optimizer__zero_stage=1, **CHANGES, **changes), world)
        reference = PeftReference(first._config, first)
        begun = weights_of(first)
        first.close()
        policy = make_policy(make_config(optimizer__zero_stage=stage, **CHANGES, **changes), world)
        captured = capture_gradients(policy)
        for step in range(2):
            reference.update(make_rollouts(step), make_advantages(step))
            policy.update(make_rollouts(step), make_advantages(step))
        wanted = [{n.removeprefix("base_model.model."): g for n, g in each.items()} for each in reference.gradients]
        results.append(
            {
                "gradient": max(map(distance, captured, wanted)),
                "largest": [max(float(g.abs().max()) for n, g in wanted[-1].items() if kind in n) for kind in "AB"],
                "begun": distance(begun, dict(make_model().named_parameters())),
                "weights": distance(weights_of(policy), merged_by_peft(reference.model)),
                "moved": distance(weights_of(policy), dict(make_model().named_parameters())),
                "trained": len(captured[0]),
                "sha256": policy.gather_weights_sha256(),
            }
        )
        policy.close()
    leave_process_group()
    return results


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.merge_and_unload().named_parameters()}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("num_ranks", "stages", "changes"),
    [
        (1, [1, 0], {}),
        (2, [1, 3], {"optimizer__gradient_checkpointing": True}),
        pytest.param(4, [2], {"optimizer__sequence_parallel": 2}, marks=pytest.mark.ci),
    ],
)
def test_gradients_and_weights_equal_pefts(num_ranks: int, stages: list[int], changes: dict[str, Any]) -> None:
    ranks = run_on_ranks(num_ranks, compare_with_peft, stages, changes)
    for result in ranks[0]:
        assert result["begun"] == 0 and result["moved"] > 0.01 and min(result["largest"]) > 1e-3, result
        assert result["gradient"] < TOLERANCE and result["weights"] < TOLERANCE, result
        assert result["trained"] == 2 * 2 * len(TARGETS), result
    assert all(rank == ranks[0] for rank in ranks), "hashes and stats differ between ranks"


def distances_from_base(stage: int) -> list[list[float]]:
    """Each token's distance from the reference, and from the model that the adapters were added to."""
    world = connect()
    config = make_config(
        algorithm__name="rloo", algorithm__kl_coefficient=0.5, algorithm__kl_estimator="k1",
        optimizer__zero_stage=stage, **CHANGES,
    )  # fmt: skip
    policy = Policy(make_model(), config, world, reference=lambda: pytest.fail("no second model is made"))
    rollouts = make_rollouts()
    policy.update(rollouts, make_advantages())
    found = policy.reference_kl_by_token_all_ranks(rollouts).tolist()
    now, base = Reference(config), Reference(config)
    now.model.load_state_dict(weights_of(policy))
    with torch.no_grad():
        wanted = torch.cat([now.log_probs(r) - base.log_probs(r) for r in rollouts]).tolist()
    policy.update(rollouts, make_advantages())  # the adapters are on again, and learn
    policy.close()
    leave_process_group()
    return [found, wanted]


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.ci)])
def test_the_reference_is_the_model_without_its_adapters(stage: int) -> None:
    for found, wanted in run_on_ranks(2, distances_from_base, stage):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4) and max(map(abs, wanted)) > 0.1


def test_the_adapters_depend_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 99)
        model = make_model()
        add_adapters(model, LORA, seed)
        assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in model.named_parameters())
        assert {name for name, _ in named_adapters(model)} == {
            each for name in weights if name.split(".")[-2] in TARGETS for each in adapter_names(name)
            if name.endswith("weight")
        }  # fmt: skip
        return [parameter.detach().clone() for _, parameter in named_adapters(model)]

    weights = dict(make_model().named_parameters())
    one, same, other, last = drawn(0), drawn(0), drawn(1), drawn(2**63 - 1)
    assert all(map(torch.equal, one, same))
    assert not all(map(torch.equal, one, other)) and not all(map(torch.equal, one, last))
    halves = make_model(torch.bfloat16)
    add_adapters(halves, LORA, 0)
    assert {parameter.dtype for parameter in halves.parameters()} == {torch.bfloat16}
    named = dict(merge_adapters(dict(halves.named_parameters()), LORA))
    assert named.keys() == weights.keys() and all(weight.dtype == torch.bfloat16 for weight in named.values())


def learn_near_the_base(stages: list[int]) -> list[list[Any]]:
    """By stage: the weights' distance from the first stage's after two steps, and the distance in the loss."""
    world, found = connect(), []
    first: dict[str, torch.Tensor] = {}
    changes = {"algorithm__kl_coefficient": 0.5, "optimizer__gradient_checkpointing": True, **CHANGES}
    for stage in stages:
        config = make_config(optimizer__zero_stage=stage, **changes)
        policy = Policy(make_model(tied=True), config, world, reference=lambda: pytest.fail("no second model is made"))
        stats = [policy.update(make_rollouts(step), make_advantages(step)) for step in range(2)][1]
        weights = weights_of(policy)
        first = first or weights
        found.append([distance(first, weights), stats.kl_loss, sorted(weights)])
        policy.close()
    leave_process_group()
    return found


@pytest.mark.mpi
@pytest.mark.ci
def test_the_distance_from_the_base_in_the_loss_is_the_same_at_every_stage() -> None:
    for rank in run_on_ranks(2, learn_near_the_base, [1, 3]):
        names = sorted(name for name, _ in make_model(tied=True).named_parameters())
        assert all(far < TOLERANCE and kl > 1e-3 and each == names for far, kl, each in rank), rank


@pytest.mark.mpi
@pytest.mark.ci
def test_a_run_with_adapters_resumes_bit_for_bit_and_is_exported_and_evaluated(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tlt(2, "train", *RUN, f"run.folder={whole}", "run.num_steps=3")
    for steps in (2, 3):
        tlt(2, "train", *RUN, f"run.folder={parts}", f"run.num_steps={steps}")
    digests = [json.loads((place / "run" / "finished.json").read_text())["policy_sha256"] for place in (whole, parts)]
    assert digests[0] == digests[1]
    saved = [path for path in (whole / "run/checkpoints/step-000003").iterdir() if path.name.startswith("policy-")]
    shape = read_shape(find_model("embedded:tiny"))
    names = [name for path in saved for name in load_file(path)]
    assert all("lora_" in name for name in names)
    count = sum(tensor.numel() for path in saved for tensor in load_file(path).values())
    assert count == 3 * num_adapter_parameters(shape, 8)

    run, model, adapter = whole / "run", tmp_path / "model", tmp_path / "adapter"
    tlt(1, "export-policy", str(run), "--dtype", "float32", "--output", str(model))
    tlt(1, "export-policy", str(run), "--dtype", "float32", "--output", str(adapter), "--adapter")
    ours = AutoModelForCausalLM.from_pretrained(model)
    base = load_policy_model(find_model("embedded:tiny"), "float32")
    theirs: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    weights = dict(ours.named_parameters())
    assert distance(weights, dict(theirs.named_parameters())) < 1e-6
    moved = distance(weights, dict(load_policy_model(find_model("embedded:tiny"), "float32").named_parameters()))
    assert moved > 1e-4

    check_evaluation(run, model, tmp_path)
    check_another_base(run, tmp_path)
    tlt(1, "train", *RUN, f"run.folder={parts}", "run.num_steps=4", "run.ranks=1")
    assert len((parts / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def check_evaluation(run: Path, model: Path, tmp_path: Path) -> None:
    """A checkpoint with adapters answers as the model that it is exported to."""
    short = ("jobs/tiny.toml", "evaluation.limit=4", "evaluation.samples=2", "evaluation.max_new_tokens=60")
    prints = []
    for place in (run, model):
        out = tmp_path / f"evaluation-of-{place.name}"
        tlt(2, "evaluate", str(place), *short, "--output", str(out))
        prints.append(json.loads((out / "evaluation.json").read_text())["weights"])
    assert prints[0] == prints[1]


def check_another_base(run: Path, tmp_path: Path) -> None:
    """Weights that the adapters were not trained on are refused by name, in a resume and by an export."""
    other = tmp_path / "other"
    shutil.copytree(find_model("embedded:tiny"), other)
    (path,) = {stored.file for stored in read_headers(other).values()}
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    done = tlt(
        1, "train", *RUN, f"run.folder={run.parent}", "run.num_steps=4", "run.ranks=1", f"model.path={other}", status=2
    )
    assert "holds a run that began with other files of its model" in done.stderr
    done = tlt(1, "export-policy", str(run), "--model", str(other), "--output", str(tmp_path / "wrong"), status=2)
    assert "are not those that the adapters in" in done.stderr


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = r"lora\.rank = 4 \(0: no adapters\) needs the package .peft., which is not installed; pip install peft"
    with pytest.raises(ConfigError, match=said):
        LORA.check_installed()
    LoraSection().check_installed()
