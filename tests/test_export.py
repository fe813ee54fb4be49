"""Exported drafters: the exact files of each format, and that they draft as the engine does; exported policies."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_world import OneRank
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from plain_heads import PlainHead
from safetensors.torch import load_file, save_file
from tiny import NUM_TOKENS, embedded_decoder, embedded_folder, gcd_requests, generate, make_engine
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.main import main
from tlt_hpc.config import EMBEDDED_MODEL, UserError, load_config, to_toml
from tlt_hpc.evaluate.subject import find_subject
from tlt_hpc.export import policy
from tlt_hpc.extras.drafter_formats.formats import convert_drafter, read_target
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import DRAFTER_FILE, eagle3_sizes, load_drafter, select_and_check_tensors
from tlt_hpc.models.tokenizer import package_asset_folder
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.storage.folder import RunFolder

H, INNER, V, W = 128, 256, 24, 7
IDS = [2, 3, 5, 8, 13, 17, 19]
JOB = str(Path(__file__).parent.parent / "jobs" / "tiny.toml")
FORMATS = json.loads((Path(__file__).parent / "export_formats.json").read_text())
"""By format and form the exact config.json and the tensors' shapes of an export for the embedded model."""


# --- what is exported ---


@pytest.fixture(scope="module")
def target():
    return read_target(EMBEDDED_MODEL)


def random_eagle3(shape) -> dict[str, Tensor]:
    """A file's tensors, of values that float16 holds exactly; norms differ from one another and from ones."""
    generator, stored = torch.Generator().manual_seed(0), {}
    for name, size in eagle3_sizes(shape, W).items():
        scale = size[1] ** -0.5 if len(size) > 1 else 0.3
        stored[f"{name}.weight"] = (torch.randn(size, generator=generator) * scale + (len(size) == 1)).half().float()
    del stored["token_ids.weight"]
    return stored | {"token_ids": torch.tensor(IDS)}


def embedded_eagle() -> dict[str, Tensor]:
    return load_file(package_asset_folder("tiny_drafter") / DRAFTER_FILE)


def drafter_folder(folder: Path, stored: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored | {"num_steps": torch.tensor(11), "fc.exp_avg": torch.zeros(3)}, folder / DRAFTER_FILE)
    return folder


def tlt(*arguments: object) -> int:
    return main(["export-drafter", *map(str, arguments)])


def exported(kind: str, form: str, folder: Path, shape) -> Path:
    place = drafter_folder(folder / "drafter", embedded_eagle() if form == "eagle" else random_eagle3(shape))
    assert tlt(place, "--format", kind, "--model", EMBEDDED_MODEL, "--output", folder / "out") == 0
    return folder / "out"


def scaled(stored: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor.float() * factor for name, tensor in stored.items() if name.endswith(".weight")}


def masters(factor: float) -> dict[str, Tensor]:
    """The embedded model's weights times a factor, with a moment that no export may hold."""
    weights = load_file(package_asset_folder("tiny") / "model.safetensors")
    state = {f"{name}.master": tensor.float() * factor for name, tensor in weights.items()}
    return state | {f"{name}.exp_avg": torch.ones_like(tensor.float()) for name, tensor in weights.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 10 and 20, whose drafters and policies differ by a factor of 2."""
    folder = RunFolder(tmp_path / "tiny")
    folder.make_missing_folders()
    configure(folder.path)
    store = CheckpointStore(folder.checkpoints, keep=2)
    for step, factor in ((10, 1.0), (20, 2.0)):
        drafter = scaled(embedded_eagle(), factor) | {"num_steps": torch.tensor(step * 7), "fc.exp_avg": torch.ones(2)}
        store.save(step, OneRank(), {"policy": masters(factor), "drafter": drafter}, {})  # type: ignore[arg-type]
    write_figures(folder.path, 6.5)
    return folder.path


def test_what_writes_into_a_run_that_is_anothers_asks_for_another_place(run, monkeypatch, capsys):
    there = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: not str(place).startswith(str(run)) and there(place, mode))
    for words in (["evaluate", JOB], ["report"], ["export-policy"], ["export-drafter", "--format=sglang"]):
        before = sorted(run.rglob("*"))
        assert main([words[0], str(run), *words[1:]]) == 2
        said = capsys.readouterr().err
        assert "cannot write" in said and "no permission" in said and "--output" in said and said.count("\n") == 1
        assert sorted(run.rglob("*")) == before


# --- the exact files ---


@pytest.mark.parametrize("name", FORMATS)
def test_names_sizes_types_and_config_are_exactly_those_of_the_format(name, tmp_path, target):
    kind, form = name.split()
    wanted = json.loads(json.dumps(FORMATS[name]).replace('"MODEL"', json.dumps(str(package_asset_folder("tiny")))))
    out = exported(kind, form, tmp_path, target.shape)
    assert {path.name for path in out.iterdir()} == {"config.json", "README.md", "model.safetensors"}
    tensors = load_file(out / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == wanted["shapes"]
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    ids = {"d2t": torch.int64, "t2d": torch.bool} if form == "eagle3" else {}
    assert types == dict.fromkeys(tensors, torch.float16) | ids
    assert json.loads((out / "config.json").read_text()) == wanted["config"]
    assert not any(tensor.any() for name, tensor in tensors.items() if name.endswith(".bias"))
    if form == "eagle3":
        assert (torch.arange(W) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero().flatten().tolist() == IDS
    if kind != "speculators":  # which transformers does not read
        read = AutoConfig.from_pretrained(out)
        assert isinstance(read, Qwen2Config if (kind, form) == ("sglang", "eagle") else LlamaConfig)
        assert read.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    method = {"eagle": "EAGLE", "eagle3": "EAGLE3"}[form]
    command = f"--speculative-algorithm {method} " if kind == "sglang" else f'"method": "{form}"'
    assert command in (out / "README.md").read_text()


def test_a_llama_target_with_a_scaled_rotary_embedding(target):
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}
    shape = replace(target.shape, family="llama", qkv_bias=False, rope_theta=5e5)
    drafter = select_and_check_tensors(embedded_eagle(), target.shape, "x")
    shape = replace(shape, rope_scaling={**scaling, "rope_theta": 5e5})
    files = convert_drafter("sglang", drafter, replace(target, shape=shape))
    rope = {"rope_scaling": scaling, "rope_theta": 5e5, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    wanted = FORMATS["vllm eagle"]
    assert files.config == {**wanted["config"], **rope, "architectures": ["LlamaForCausalLMEagle"]}
    assert files.tensors.keys() == {*wanted["shapes"], "fc.bias"}, "a Llama has no biases of queries, keys and values"


# --- the same tokens ---


@pytest.fixture(scope="module")
def model():
    """The embedded model as transformers runs it, without code of this package."""
    return AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32, local_files_only=True).eval()


def proposed(drafter: Drafter) -> list[tuple[list[int], list[int]]]:
    """For each round the committed tokens and the chain of four that the engine drafted greedily."""
    seen, propose = [], LearnedDrafts.propose

    def spy(self, rows, *others):
        proposal = propose(self, rows, *others)
        drafts = proposal.tokens[:, 1:].tolist()
        seen.extend(zip([list(sequence.text) for sequence in rows.responses], drafts, strict=True))
        return proposal

    greedy = SamplingRule(0.0, NUM_TOKENS)
    engine = make_engine(
        [Strategy("drafter", 4)], rule=greedy, drafter=drafter, drafter_is_trained=True, max_new_tokens=80
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnedDrafts, "propose", spy)
        generate(engine, gcd_requests(6, 1, seed=3))
    assert len(seen) > 60
    return [(tokens, drafts) for tokens, drafts in seen if len(tokens) > 1]


@torch.inference_mode()
def assert_same_drafts(folders: list[Path], form: str, seen: list[tuple[list[int], list[int]]], model: Any) -> None:
    """Plain readers of the folders draft what the engine has drafted."""
    heads = [PlainHead(folder, model.model.embed_tokens.weight, model.lm_head.weight) for folder in folders]
    compared = set()
    for tokens, drafts in seen[::2]:
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        own = states[-1][0, :-1] if form == "eagle" else torch.cat([states[layer][0, :-1] for layer in (2, 4, 5)], -1)
        for head in heads:
            mine, margin = head.chain(tokens, own, 4)
            if margin > 1e-3:  # below that, the order of a sum decides
                assert mine == drafts
                compared.add(tuple(drafts))
    assert len(compared) > 5, "chains that differ from one another"


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_an_export_drafts_what_the_engine_drafts(form, tmp_path, target, model):
    kinds = ("sglang", "vllm") if form == "eagle" else ("vllm", "speculators")  # SGLang's files of EAGLE-3 are vLLM's
    folders = [exported(kind, form, tmp_path / kind, target.shape) for kind in kinds]
    place = tmp_path / kinds[0] / "drafter" if form == "eagle3" else EMBEDDED_MODEL
    assert_same_drafts(folders, form, proposed(load_drafter(str(place), embedded_decoder(), "test")), model)


# --- where a drafter is found ---


def fc_of(out: Path) -> Tensor:
    return load_file(out / "model.safetensors")["fc.weight"].float()


def test_a_runs_newest_checkpoint_or_the_one_asked_for_is_exported_beside_it(run, capsys):
    weights = embedded_eagle()["fc.weight"].float()
    for step, factor, name, accept_length in ((20, 2.0, "vllm", "2.19"), (10, 1.0, "vllm-step-000010", "2.09")):
        assert tlt(run, "--format", "vllm", *(["--step", 10] if step == 10 else [])) == 0
        assert torch.equal(fc_of(run / "export" / name), factor * weights)
        said, card = capsys.readouterr().out, (run / "export" / name / "README.md").read_text()
        assert f"updates         {7 * step}" in said and f"{accept_length} in" in said
        assert f"| target | the policy after {step} RL steps from embedded:tiny |" in card
    shutil.rmtree(run / "checkpoints")
    drafter_folder(run / "drafter", scaled(embedded_eagle(), 3.0))
    assert tlt(run, "--format", "vllm") == 0, "the drafter's own file, where there is no checkpoint"
    assert "export-policy" not in capsys.readouterr().out, "which would find no policy"
    assert torch.equal(fc_of(run / "export" / "vllm"), (3.0 * weights).half().float())


def error_of(capsys) -> str:
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("tlt: ") and said.err.count("\n") == 1
    return said.err


def test_an_export_that_fails_keeps_the_one_before(run, capsys, monkeypatch):
    assert tlt(run, "--format", "vllm", "--step", 10, "--output", run / "out") == 0
    capsys.readouterr()
    before = (run / "out" / "model.safetensors").read_bytes()
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("tlt_hpc.export.writer.sync", full)
    assert tlt(run, "--format", "vllm", "--output", run / "out") == 2
    assert "No space left on device" in error_of(capsys)
    assert (run / "out" / "model.safetensors").read_bytes() == before
    assert not list(run.glob("out.*"))


# --- errors ---


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export-drafter {run} --format sglang --step 15", "has steps 10, 20; use one that is there"),
        ("export-drafter {here}/alone --format sglang", "--model FOLDER"),
        ("export-drafter embedded:tiny --format sglang --output {here}/other", "is no earlier export; give a new or"),
        ("export-policy {run} --step 7", "no such checkpoint in"),
        ("export-policy {run} --model {here}/other",
         "config.json asks for [128, 512] (by {here}/other/config.json); give --model the folder"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_remedy_and_writes_nothing(command, words, tmp_path, run, capsys):
    drafter_folder(tmp_path / "alone", embedded_eagle())
    (tmp_path / "other").mkdir()
    config = json.loads((package_asset_folder("tiny") / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    assert main(command.format(here=tmp_path, run=run).split()) == 2
    assert words.format(here=tmp_path) in error_of(capsys)
    assert not list(tmp_path.rglob("model.safetensors"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("down.weight", torch.full((H, INNER), torch.nan), "'down' holds values that are no numbers"),
        ("output.weight", torch.full((H, H), 1e6), "values beyond torch.float16"),
        ("token_ids", torch.tensor([2, 3, 5, 8, 13, 13, 19]), "each above the one before"),
    ],
)
def test_a_drafter_with_unusable_values_is_refused(name, value, words, tmp_path, target, capsys):
    place = drafter_folder(tmp_path / "d", random_eagle3(target.shape) | {name: value})
    assert tlt(place, "--format", "vllm", "--model", EMBEDDED_MODEL) == 2
    assert words in error_of(capsys)
    assert not (place / "export").exists()


def test_eagle3_needs_a_target_of_seven_layers(target):
    few = replace(target, shape=replace(target.shape, num_layers=6))
    with pytest.raises(UserError, match="use a target of 7 layers or more"):
        convert_drafter("sglang", random_eagle3(target.shape), few)


# --- the policy ---


def test_a_policy_in_several_files_is_the_checkpoints_and_the_newest_replaces_only_it(run, monkeypatch, capsys):
    out, start = run / "out", package_asset_folder("tiny")
    with monkeypatch.context() as patch:
        patch.setattr(policy, "SHARD_BYTES", 1_000_000)
        assert main(["export-policy", str(run), "--dtype=float32", "--step=10", f"--output={out}"]) == 0
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for place in (out, start))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, start))
    assert ours("gcd(12,18)=").input_ids == theirs("gcd(12,18)=").input_ids
    assert (out / "generation_config.json").read_bytes() == (start / "generation_config.json").read_bytes()
    files = [load_file(path) for path in sorted(out.glob("model-0000*-of-0000*.safetensors"))]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert len(files) > 2 and all(size <= 1e6 or len(file) == 1 for size, file in zip(sizes, files, strict=True))
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(sizes)

    assert main(["export-policy", str(run), f"--output={out}"]) == 0
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"], "a file of the earlier export"
    weights, before = load_file(out / "model.safetensors"), load_file(start / "model.safetensors")
    assert weights.keys() == before.keys()
    assert all(torch.equal(weight, (before[name].float() * 2).bfloat16()) for name, weight in weights.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"

    (out / "notes.txt").write_text("mine")
    there = {path.name: path.stat().st_ino for path in out.iterdir()}
    capsys.readouterr()
    assert main(["export-policy", str(run), f"--output={out}"]) == 2
    assert "has 'notes.txt' in it and is no earlier export" in capsys.readouterr().err
    assert {path.name: path.stat().st_ino for path in out.iterdir()} == there


def test_the_runs_own_chat_template_goes_with_its_policy(run, tmp_path, capsys):
    """Else a server would write chats in a format that the policy was not trained on."""
    template = tmp_path / "own; old.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    config = run / "config.toml"
    config.write_text(config.read_text().replace('chat_template = "auto"', f'chat_template = "{template}"'))
    for _ in range(2):
        assert main(["export-policy", str(run)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(run / "export" / "policy")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    template.unlink()
    assert main(["export-policy", str(run)]) == 2
    assert f"data.chat_template = '{template}': No such file or directory; restore the file" in capsys.readouterr().err


def test_a_weight_that_float16_cannot_hold_is_not_exported_as_infinity():
    with pytest.raises(UserError, match=r"^weight 'w' has values beyond torch\.float16; take --dtype bfloat16$"):
        policy.cast_weight("w", torch.tensor([1.0, 7e4]), torch.float16)


def test_an_adapter_replaces_an_earlier_one(tmp_path: Path) -> None:
    config = load_config("jobs/tiny.toml", ["lora.rank=2", f"run.folder={tmp_path}"])
    weights = Mock(
        config=config, model=tmp_path, trained_shapes={"model.layers.0.self_attn.q_proj.weight.lora_A": (2, 4)}
    )
    weights.checkpoint.step = 3
    weights.open_adapter_reader.return_value = nullcontext(lambda name: torch.ones(2, 4))
    for _ in range(2):
        policy.export_adapter(Namespace(place="run", output=tmp_path / "out", dtype="float32", step=None), weights)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("<!-- written by tlt export-adapter -->") and "the adapter after 3 steps of tiny" in card


# --- the model card ---

HOSTILE = "a|b\n---\n# c `d` <img src=x> [e](f) *g* _h_ ${i}$ \\ &amp; ```\x1b[2J"
START = {
    "time": "2026-11-22T10:00:00+00:00", "version": "0.1.0", "commit": "", "source": "ab", "python": "3.11",
    "packages": {"torch": "2.13.0"}, "cuda": "12.8", "mpi": "MPICH 5", "threads": "1", "slurm": {}, "command": [],
    "hosts": [{"name": "n", "num_ranks": 4, "processor": "EPYC", "num_cores": 64, "memory_bytes": 1,
                             "gpus": {"H200": 4}}],
}  # fmt: skip


def figures(step: int, seconds: float) -> dict[str, float]:
    return {
        "training/global_step": float(step + 1), "critic/score/mean": 0.25 + step / 100, "perf/total_num_tokens": 500.0,
        "timing_s/step": 900.0, "rollout/seconds": seconds,
        "drafter/spec_decode/mean_acceptance_length": 2 + step / 100,
    }  # fmt: skip


def write_lines(run: Path, lines: list[dict[str, float]]) -> None:
    RunFolder(run).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def configure(run: Path, *overrides: str) -> None:
    RunFolder(run).config.write_text(to_toml(load_config(JOB, [f"run.folder={run.parent}", *overrides])))


def write_figures(run: Path, seconds: float, num_steps: int = 20) -> None:
    write_lines(run, [figures(step, seconds) for step in range(num_steps)])


def cells_of(card: Path) -> dict[str, str]:
    """The table as a reader of Markdown sees it, whose cells are nothing but text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(ModelCard.load(card).text)
    cells = [after.children for token, after in pairwise(tokens) if token.type == "td_open"]
    assert {each.type for children in cells for each in children} == {"text"}
    texts = ["".join(each.content for each in children) for children in cells]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def test_a_policys_card_has_the_figures_up_to_its_step(run, capsys):
    configure(run, "data.source=data/math.jsonl")
    RunFolder(run).environment.write_text(json.dumps(START) + "\n")
    assert main(["export-policy", str(run), "--step", "10"]) == 0
    card = run / "export" / "policy-step-000010" / "README.md"
    data = ModelCard.load(card).data
    assert (data.library_name, data.datasets, data.license) == ("transformers", ["EleutherAI/hendrycks_math"], None)
    assert data.base_model is None and "dapo" in data.tags and "published: base_model, license." in card.read_text()
    assert cells_of(card) == {
        "base model": "embedded:tiny", "data": "data/math.jsonl", "algorithm": "dapo (advantage group, loss clip)",
        "steps": "10, each of 128 responses", "score": "0.255 to 0.335 (means of the first and last 2 steps)",
        "response tokens": "5,000", "cost": "10 GPU-hours, 500 tokens per GPU-hour",
        "versions": "tlt_hpc 0.1.0, torch 2.13.0",
    }  # fmt: skip
    assert f"from_pretrained({json.dumps(str(card.parent))})" in card.read_text()


def test_text_from_a_job_is_text_in_the_card_of_a_policy_without_a_log(run):
    configure(run, f"data.source={json.dumps(HOSTILE)}")
    RunFolder(run).metrics.unlink()
    assert main(["export-policy", str(run)]) == 0
    shown = cells_of(run / "export" / "policy" / "README.md")
    assert list(shown) == ["base model", "data", "algorithm", "steps"]
    assert shown["data"] == "a|b --- # c `d` <img src=x> [e](f) *g* _h_ ${i}$ \\ &amp; ```\\x1b[2J"


def test_the_gain_over_the_plain_run_of_a_comparison_is_in_the_card(run):
    plain = run.parent / "plain"
    RunFolder(plain).make_missing_folders()
    configure(plain, "speculation.mode=plain")
    write_figures(plain, 9.75, num_steps=8)
    said = []
    for change in ((), ("rollout.group_size=2",)):
        configure(run, *change)
        assert main(["export-policy", str(run)]) == 0
        said.append(cells_of(run / "export" / "policy" / "README.md").get("speed-up by speculation"))
    assert said == ["1.50 times as fast in rollouts (median of 8 steps)", None], "another job is no measure"


def test_base_model_and_license_are_the_start_models(run, tmp_path):
    model = shutil.copytree(package_asset_folder("tiny"), tmp_path / "Qwen2.5-tiny")
    for text, license_name in (
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Qwen\n", "apache-2.0"),
        ("# Qwen\n---\nlicense: mit\n---\n", None),
        ("---\nlicense: 'a: b'\n---\n", None),
    ):
        (model / "README.md").write_text(text)
        assert main(["export-policy", str(run), "--model", str(model)]) == 0
        data = ModelCard.load(run / "export" / "policy" / "README.md").data
        assert (data.base_model, data.license) == ("Qwen/Qwen2.5-tiny", license_name)


def test_the_serving_command_names_the_folder_that_the_printed_export_of_the_policy_writes(run, capsys):
    """Both commands can be typed as they are printed."""
    for options, name in (([], "policy"), (["--step", "10"], "policy-step-000010")):
        capsys.readouterr()
        assert main(["export-drafter", str(run), "--format=sglang", *options]) == 0
        said = capsys.readouterr().out
        folder = run / "export" / name
        command = shlex.split(said.partition("next: ")[2].partition("\n")[0])
        assert command[command.index("--model-path") + 1] == str(folder) and not folder.exists()
        (typed,) = re.findall(r"`(tlt export-policy .*?)` writes the policy to (\S+)\. ", said)
        assert main(shlex.split(typed[0])[1:]) == 0 and typed[1] == str(folder)
        assert (folder / "model.safetensors").is_file()


def test_the_best_step_is_exported_and_evaluated(run, capsys):
    assert main(["export-policy", str(run), "--step", "best"]) == 2
    assert f"--step best: no step of {run} that has a checkpoint was evaluated" in error_of(capsys)
    scores = {10: 0.7, 15: 0.9, 20: 0.6}  # after 15 steps there is no checkpoint
    write_lines(run, [{**figures(step, 6.5), **score_of(scores, step + 1)} for step in range(20)])
    assert main(["export-policy", str(run), "--step", "best"]) == 0
    assert (run / "export" / "policy-step-000010" / "model.safetensors").is_file()
    assert main(["export-drafter", str(run), "--format=vllm", "--step", "best"]) == 0
    assert f"tlt export-policy {run} --step 10" in capsys.readouterr().out
    assert find_subject(str(run), "best").name == f"{run}, step 10"
    with pytest.raises(SystemExit):
        main(["export-policy", str(run), "--step", "last"])
    assert "argument --step: 'last': use the number of a step, or best" in capsys.readouterr().err


def score_of(scores: dict[int, float], step: int) -> dict[str, float]:
    return {"val-core/gcd/acc/mean@4": scores[step]} if step in scores else {}
