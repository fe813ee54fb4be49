"""Exported drafters: the exact files of each format, and that they draft as the engine does; exported policies.

The readers here are written from the layouts' description alone: they import none of the drafter's code.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_world import OneRank
from safetensors.torch import load_file, save_file
from tiny import NUM_TOKENS, embedded_decoder, embedded_folder, gcd_requests, generate, make_engine
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.main import main
from tlt_hpc.config import EMBEDDED_MODEL, UserError, load_config, to_toml
from tlt_hpc.export import policy
from tlt_hpc.export.formats import lay_out, read_target
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import DRAFTER_FILE, checked_drafter, drafter_sizes, eagle3_sizes, load_drafter
from tlt_hpc.models.eagle3 import feature_layers
from tlt_hpc.models.folder import embedded
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_facts

H, INNER, V, W, QUERIES, KEYS = 128, 256, 24, 7, 128, 64
IDS = [2, 3, 5, 8, 13, 17, 19]


THREE = ["config.json", "README.md", "model.safetensors"]

LAYER = {
    "self_attn.q_proj.weight": (QUERIES, H),
    "self_attn.k_proj.weight": (KEYS, H),
    "self_attn.v_proj.weight": (KEYS, H),
    "self_attn.o_proj.weight": (H, QUERIES),
    "mlp.gate_proj.weight": (INNER, H),
    "mlp.up_proj.weight": (INNER, H),
    "mlp.down_proj.weight": (H, INNER),
    "post_attention_layernorm.weight": (H,),
}
WIDE = {f"self_attn.{part}_proj.weight": (rows, 2 * H) for part, rows in zip("qkv", (QUERIES, KEYS, KEYS), strict=True)}
NORMS = {"hidden_norm.weight": (H,), "input_layernorm.weight": (H,)}
BIASES = {f"layers.0.self_attn.{p}_proj.bias": (n,) for p, n in zip("qkv", (QUERIES, KEYS, KEYS), strict=True)}
EAGLE = {"fc.weight": (H, 2 * H), **{f"layers.0.{name}": sizes for name, sizes in LAYER.items()}}
EAGLE3 = {
    "fc.weight": (H, 3 * H),
    **{f"midlayer.{name}": sizes for name, sizes in (LAYER | WIDE | NORMS).items()},
    "norm.weight": (H,),
    "lm_head.weight": (W, H),
    "d2t": (W,),
    "t2d": (V,),
}
SIZES = {
    ("sglang", "eagle"): EAGLE | {"fc.bias": (H,)} | BIASES,
    ("vllm", "eagle"): EAGLE,
    ("sglang", "eagle3"): EAGLE3,
    ("vllm", "eagle3"): EAGLE3,
}
CASES = list(SIZES)

CONFIG = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": V,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float16",
}
QWEN2 = {key: value for key, value in CONFIG.items() if key != "attention_bias"}
LLAMA_EAGLE3 = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": W}
CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    ("sglang", "eagle"): {
        **QWEN2,
        "architectures": ["Qwen2ForCausalLMEagle"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    ("vllm", "eagle"): {**CONFIG, "architectures": ["LlamaForCausalLM"]},
    ("sglang", "eagle3"): LLAMA_EAGLE3,
    ("vllm", "eagle3"): LLAMA_EAGLE3,
}


# --- the world that is exported from ---


@pytest.fixture(scope="module")
def target():
    return read_target(EMBEDDED_MODEL)


def random_eagle3(shape, seed: int = 0, ids: list[int] | None = None) -> dict[str, Tensor]:
    """A file's tensors, of values that float16 holds exactly; norms differ from one another and from ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = eagle3_sizes(shape, len(ids or IDS))
    stored = {}
    for name, size in sizes.items():
        scale = size[1] ** -0.5 if len(size) > 1 else 0.3
        values = torch.randn(size, generator=generator) * scale + (len(size) == 1)
        stored[f"{name}.weight"] = values.half().float()
    del stored["token_ids.weight"]
    return stored | {"token_ids": torch.tensor(ids or IDS)}


def embedded_eagle() -> dict[str, Tensor]:
    return load_file(embedded("tiny_drafter") / DRAFTER_FILE)


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
    weights = load_file(embedded("tiny") / "model.safetensors")
    state = {f"{name}.master": tensor.float() * factor for name, tensor in weights.items()}
    return state | {f"{name}.exp_avg": torch.ones_like(tensor.float()) for name, tensor in weights.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 10 and 20, whose drafters and policies differ by a factor of 2."""
    config = load_config(Path(__file__).parent.parent / "jobs" / "tiny.toml", [f"run.folder={tmp_path}"])
    folder = RunFolder(config.folder)
    folder.create()
    folder.config.write_text(to_toml(config))
    store = CheckpointStore(folder.checkpoints, keep=2)
    for step, factor in ((10, 1.0), (20, 2.0)):
        drafter = scaled(embedded_eagle(), factor) | {"num_steps": torch.tensor(step * 7), "fc.exp_avg": torch.ones(2)}
        store.save(step, OneRank(), {"policy": masters(factor), "drafter": drafter}, {})  # type: ignore[arg-type]
    rows = [
        {"training/global_step": float(i), "drafter/spec_decode/mean_acceptance_length": 2 + i / 100} for i in range(20)
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder.path


# --- the exact files ---


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_names_sizes_types_and_config_are_exactly_those_of_the_format(kind, form, tmp_path, target):
    out = exported(kind, form, tmp_path, target.shape)
    assert sorted(path.name for path in out.iterdir()) == sorted(THREE)
    tensors = load_file(out / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SIZES[kind, form]
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    ids = {"d2t": torch.int64, "t2d": torch.bool} if form == "eagle3" else {}
    assert types == dict.fromkeys(tensors, torch.float16) | ids
    assert json.loads((out / "config.json").read_text()) == CONFIGS[kind, form]
    assert not any(tensor.any() for name, tensor in tensors.items() if name.endswith(".bias"))
    if form == "eagle3":
        assert (torch.arange(W) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero().flatten().tolist() == IDS
    read = AutoConfig.from_pretrained(out)
    assert isinstance(read, Qwen2Config if (kind, form) == ("sglang", "eagle") else LlamaConfig)
    assert read.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    card, method = (out / "README.md").read_text(), "EAGLE3" if form == "eagle3" else "EAGLE"
    command = f"--speculative-algorithm {method} " if kind == "sglang" else f'"method": "{form}"'
    assert command in card and " drafter for embedded:tiny" in card


def test_only_a_qwen2_target_gets_sglangs_qwen2_layer(target):
    llama = replace(target, shape=replace(target.shape, family="llama", qkv_bias=False))
    files = lay_out("sglang", checked_drafter(embedded_eagle(), target.shape, "x"), llama)
    assert files.config == {**CONFIG, "architectures": ["LlamaForCausalLMEagle"]}
    assert set(files.tensors) == set(EAGLE) | {"fc.bias"}


def test_a_scaled_rotary_embedding_is_written_where_both_readers_look(target):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    drafter = checked_drafter(random_eagle3(target.shape), target.shape, "x")
    for stored in (scaling, {**scaling, "rope_theta": 5e5}):
        shape = replace(target.shape, family="llama", rope_scaling=stored, rope_theta=5e5)
        config = lay_out("vllm", drafter, replace(target, shape=shape)).config
        assert config["rope_scaling"] == scaling
        assert config["rope_theta"] == 5e5
        assert config["rope_parameters"] == {**scaling, "rope_theta": 5e5}


# --- plain readers ---


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def rotated(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Heads [n, heads, d] at positions 0..n-1: number j turns with number j + d/2."""
    size = config["head_dim"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies).unsqueeze(1)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def layer_of(tensors: dict[str, Tensor], prefix: str, config: dict[str, Any], x: Tensor, read: Tensor) -> Tensor:
    """x [n, H] after a Llama layer whose attention reads ``read``, from an export's tensors."""

    def linear(name: str, value: Tensor) -> Tensor:
        bias = tensors.get(f"{prefix}{name}.bias")
        return F.linear(value, tensors[f"{prefix}{name}.weight"].float(), None if bias is None else bias.float())

    size, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    q = rotated(linear("self_attn.q_proj", read).view(len(x), heads, size), config)
    k = rotated(linear("self_attn.k_proj", read).view(len(x), groups, size), config)
    v = linear("self_attn.v_proj", read).view(len(x), groups, size)
    k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
    x = x + linear("self_attn.o_proj", mixed)
    y = norm(x, tensors[f"{prefix}post_attention_layernorm.weight"].float(), config["rms_norm_eps"])
    return x + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y))


class ExportedDrafter:
    """An export read plainly, beside the target's embedding and head [V, H]; drafts greedily."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor) -> None:
        self.tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.config = json.loads((folder / "config.json").read_text())
        self.embedding, self.head = embedding, head

    def norm(self, name: str, x: Tensor) -> Tensor:
        return norm(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def eagle_step(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next feature [1, H] and the scores of all tokens, after features ``hidden`` [n - 1, H]."""
        joined = torch.cat([self.embedding[tokens[1:]], hidden], -1)
        x = F.linear(joined, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        feature = layer_of(self.tensors, "layers.0.", self.config, x, x)[-1:]
        return feature, (feature @ self.head.T)[0, :NUM_TOKENS]

    def eagle3_step(self, tokens: list[int], x: Tensor) -> tuple[Tensor, Tensor]:
        """The next state [1, H] and the scores of all tokens, after states ``x`` [n - 1, H]."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding[tokens[1:]])
        read = torch.cat([embedded, self.norm("midlayer.hidden_norm", x)], -1)
        out = layer_of(self.tensors, "midlayer.", self.config, x, read)[-1:]
        scores = torch.full((V,), -torch.inf)
        scores[self.tensors["t2d"]] = (self.norm("norm", out) @ self.tensors["lm_head.weight"].T)[0]
        return out, scores

    def chain(self, tokens: list[int], states: Tensor, depth: int) -> tuple[list[int], float]:
        """Drafts after ``tokens`` [n] with the target's ``states`` [n - 1, ...], and the least margin of a choice."""
        tokens, drafts, margin = list(tokens), list[int](), math.inf
        is_eagle3 = "t2d" in self.tensors
        x = F.linear(states, self.tensors["fc.weight"]) if is_eagle3 else states
        for _ in range(depth):
            state, scores = (self.eagle3_step if is_eagle3 else self.eagle_step)(tokens, x)
            best = scores.topk(2)
            drafts.append(int(best.indices[0]))
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens, x = [*tokens, drafts[-1]], torch.cat([x, state])
        return drafts, margin


# --- the same tokens ---


@pytest.fixture(scope="module")
def model():
    """The embedded model as transformers runs it: neither its decoder's code nor its drafter's is ours."""
    return AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def proposals(request, tmp_path_factory) -> tuple[str, list[tuple[list[int], list[int]]]]:
    """A form, and what the engine drafts with such a drafter."""
    place = EMBEDDED_MODEL
    if request.param == "eagle3":
        place = str(tmp_path_factory.mktemp("eagle3"))
        save_file(random_eagle3(embedded_decoder().shape), Path(place) / DRAFTER_FILE)
    return request.param, proposals_of(load_drafter(place, embedded_decoder(), "test"))


def proposals_of(drafter: Drafter) -> list[tuple[list[int], list[int]]]:
    """Committed tokens and the chain of four that the engine drafted after them, greedily, round by round."""
    seen = []
    propose = LearnedDrafts.propose

    def spy(self, rows, *others):
        proposal = propose(self, rows, *others)
        drafts = proposal.drafts.tokens[:, 1:].tolist()
        seen.extend(zip([list(sequence.text) for sequence in rows.responses], drafts, strict=True))
        return proposal

    engine = make_engine(
        [Strategy("drafter", 4)],
        rule=SamplingRule(0.0, NUM_TOKENS),
        drafter=drafter,
        max_new_tokens=80,
    )
    engine.drafter_ready = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnedDrafts, "propose", spy)
        generate(engine, gcd_requests(6, 1, seed=3))
    return [(tokens, drafts) for tokens, drafts in seen if len(tokens) > 1]


@torch.inference_mode()
def test_an_export_drafts_what_the_engine_drafts(tmp_path, target, model, proposals):
    form, seen = proposals
    kinds = ("sglang", "vllm") if form == "eagle" else ("vllm",)  # the files of EAGLE-3 are the same for both
    files = [
        ExportedDrafter(
            exported(kind, form, tmp_path / kind, target.shape), model.model.embed_tokens.weight, model.lm_head.weight
        )
        for kind in kinds
    ]
    layers, compared = feature_layers(target.shape.num_layers), set()
    assert layers == (2, 4, 5) and len(seen) > 60
    for tokens, drafts in seen[::2]:
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        own = states[-1][0, :-1] if form == "eagle" else torch.cat([states[layer][0, :-1] for layer in layers], -1)
        for each in files:
            mine, margin = each.chain(tokens, own, 4)
            if margin > 1e-3:  # closer than that the order of a sum decides
                assert mine == drafts
                compared.add(tuple(drafts))
    assert len(compared) > 5, "chains that differ from one another"


# --- where a drafter is found ---


def fc_of(out: Path) -> Tensor:
    return load_file(out / "model.safetensors")["fc.weight"].float()


def test_a_runs_newest_checkpoint_or_the_one_asked_for_is_exported_beside_it(run, capsys):
    for step, factor, name, accept_length in ((20, 2.0, "vllm", "2.19"), (10, 1.0, "vllm-step-000010", "2.09")):
        assert tlt(run, "--format", "vllm", *(["--step", 10] if step == 10 else [])) == 0
        assert torch.equal(fc_of(run / "export" / name), factor * embedded_eagle()["fc.weight"].float())
        said, card = capsys.readouterr().out, (run / "export" / name / "README.md").read_text()
        for words in (f"step-{step:06d}", f"updates         {7 * step}", f"{accept_length} in", '"method": "eagle"'):
            assert words in said, words
        assert f"| target | the policy after {step} RL steps from embedded:tiny |" in card


def test_a_drafters_own_file_is_exported_where_there_is_no_checkpoint(run, capsys):
    shutil.rmtree(run / "checkpoints")
    drafter_folder(run / "drafter", scaled(embedded_eagle(), 3.0))
    assert tlt(run, "--format", "vllm") == 0
    assert torch.equal(fc_of(run / "export" / "vllm"), (3.0 * embedded_eagle()["fc.weight"].float()).half().float())
    assert tlt(EMBEDDED_MODEL, "--format", "vllm", "--output", run / "embedded") == 0
    assert torch.equal(fc_of(run / "embedded"), embedded_eagle()["fc.weight"].float())
    assert f"{read_facts(embedded('tiny_drafter')).accept_length:.2f} at temperature 1, by" in capsys.readouterr().out


# --- where it is written ---


def error_of(capsys) -> str:
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tlt: ")
    assert said.err.count("\n") == 1
    return said.err


def test_a_folder_of_other_things_is_left_alone(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for name in THREE:
        (model / name).write_text("mine")
    for place, said in (
        (model, "is no earlier export; give a new or empty folder"),
        (model / "config.json", "is a file; give a folder"),
        (model / "config.json" / "out", "choose another --output"),
    ):
        assert tlt(EMBEDDED_MODEL, "--format", "vllm", "--output", place) == 2
        assert said in error_of(capsys)
    assert all((model / name).read_text() == "mine" for name in THREE)


def test_an_export_that_fails_keeps_the_one_before(run, capsys, monkeypatch):
    assert tlt(run, "--format", "vllm", "--step", 10, "--output", run / "out") == 0
    capsys.readouterr()
    before = (run / "out" / "model.safetensors").read_bytes()

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tlt_hpc.export.writer.sync", full)
    assert tlt(run, "--format", "vllm", "--output", run / "out") == 2
    assert "No space left on device" in error_of(capsys)
    assert (run / "out" / "model.safetensors").read_bytes() == before
    assert not list(run.glob("out.*"))


# --- what cannot be ---


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export-drafter embedded:tiny --format sglang", "add --output FOLDER"),
        ("export-drafter {run} --format sglang --step 15", "has those of steps 10, 20; use one that is there"),
        ("export-drafter {here}/none --format sglang", "none does not exist"),
        ("export-drafter {here}/empty --format sglang --model embedded:tiny", "has no drafter; give a run"),
        ("export-drafter {here}/alone --format sglang", "--model FOLDER"),
        ("export-drafter {here}/alone --format sglang --model {here}/empty", "no config.json in that folder"),
        ("export-drafter {here}/cut --format sglang --model embedded:tiny", "is no whole safetensors file"),
        ("export-policy {here}/none", "none does not exist"),
        ("export-policy {run} --step 7", "no such checkpoint in"),
        ("export-policy {run} --model {here}/other", "asks for 1,973,376 weights, the checkpoint has 1,186,944"),
        ("export-policy {run} --model elsewhere", "model.path = 'elsewhere': no config.json in that folder"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy_and_writes_nothing(command, words, tmp_path, run, capsys):
    (tmp_path / "empty").mkdir()
    drafter_folder(tmp_path / "alone", embedded_eagle())
    cut = drafter_folder(tmp_path / "cut", embedded_eagle()) / DRAFTER_FILE
    cut.write_bytes(cut.read_bytes()[:500])
    (tmp_path / "other").mkdir()
    config = json.loads((embedded("tiny") / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    assert main(command.format(here=tmp_path, run=run).split()) == 2
    assert words in error_of(capsys)
    assert not list(tmp_path.rglob("model.safetensors"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("qkv.weight", None, "drafter tensor 'qkv' is missing"),
        ("down.weight", torch.full((H, INNER), torch.nan), "'down' holds values that are no numbers"),
        ("output.weight", torch.full((H, QUERIES), 1e6), "values beyond torch.float16"),
        ("token_ids", torch.tensor([2, 3, 5, 8, 13, 13, 19]), "each above the one before"),
    ],
)
def test_a_drafter_of_another_model_or_broken_is_refused(name, value, words, tmp_path, target, capsys):
    stored = random_eagle3(target.shape)
    stored.pop(name)
    place = drafter_folder(tmp_path / "d", stored if value is None else stored | {name: value})
    assert tlt(place, "--format", "vllm", "--model", EMBEDDED_MODEL) == 2
    assert words in error_of(capsys)
    assert not (place / "export").exists()


def test_a_target_of_seven_layers_and_heads_of_another_width_are_carried(target):
    seven = replace(target, shape=replace(target.shape, num_layers=7))
    drafter = checked_drafter(random_eagle3(target.shape), target.shape, "x")
    assert set(lay_out("vllm", drafter, seven).tensors) == set(EAGLE3)
    wide = replace(target, shape=replace(target.shape, family="qwen3", head_dim=64, qkv_bias=False))
    made = {name: torch.zeros(size) for name, size in drafter_sizes(wide.shape).items()}
    files = lay_out("sglang", made, wide)
    assert files.config["head_dim"] == 64
    assert files.tensors["layers.0.self_attn.q_proj.weight"].shape == (256, H)
    assert files.tensors["layers.0.self_attn.o_proj.weight"].shape == (H, 256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 64}, "an EAGLE-3 drafter needs heads of hidden_size / num_attention_heads"),
        ({"num_layers": 6}, "use a target of 7 layers or more"),
    ],
)
def test_what_the_layout_of_eagle3_cannot_carry_is_refused(changes, words, target):
    changed = replace(target, shape=replace(target.shape, **changes))
    drafter = {name: torch.zeros(size) for name, size in eagle3_sizes(changed.shape, W).items()}
    with pytest.raises(UserError, match=words):
        lay_out("sglang", drafter, changed)


# --- the policy ---


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    return logits


def test_transformers_reads_the_policy_and_its_tokenizer_from_several_files(run, capsys, monkeypatch):
    monkeypatch.setattr(policy, "SHARD_BYTES", 1_000_000)
    assert main(["export-policy", str(run), "--dtype", "float32", "--step", "10"]) == 0
    out = run / "export" / "policy-step-000010"
    torch.testing.assert_close(logits_of(out), logits_of(embedded("tiny")))
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, embedded("tiny")))
    assert ours("gcd(12,18)=").input_ids == theirs("gcd(12,18)=").input_ids
    assert (out / "generation_config.json").read_bytes() == (embedded("tiny") / "generation_config.json").read_bytes()
    said = capsys.readouterr().out
    assert f"wrote {out}: the policy after 10 steps, 1." in said and f"next: vllm serve {out}" in said
    files = [load_file(path) for path in sorted(out.glob("model-0000*-of-0000*.safetensors"))]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files]
    assert len(files) > 2 and all(size <= 1e6 or len(file) == 1 for size, file in zip(sizes, files, strict=True))
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(sizes)


def test_the_newest_is_taken_rounded_and_nothing_else_is_there(run):
    assert main(["export-policy", str(run)]) == 0
    out = run / "export" / "policy"
    weights, start = load_file(out / "model.safetensors"), load_file(embedded("tiny") / "model.safetensors")
    assert weights.keys() == start.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, (start[name].float() * 2).bfloat16()), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert not list(run.glob("export/*.part"))


def test_an_earlier_export_gives_way_and_nothing_else_does(run, capsys):
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
