"""Published heads as the drafter to begin with: the same tensors and drafts, what is refused, and where it is kept."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import ROOT, run_on_ranks
from plain_heads import PlainHead
from safetensors.torch import load_file, save_file
from test_evaluate import start as evaluated
from test_export import IDS, H, W, assert_same_drafts, embedded_eagle, exported, proposed, random_eagle3
from test_resume import Silent
from test_warmup import kept
from test_warmup import start as warmed_up
from tiny import CPU, NUM_TOKENS, embedded_decoder, embedded_folder, gcd_requests, generate, make_engine, texts
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt_hpc import train as run
from tlt_hpc.cli.main import main
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.drafting.state import TrainedDrafter
from tlt_hpc.evaluate import evaluate as evaluation
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.draft_layer import SETTINGS, TOKEN_IDS, DraftLayer, layer_between, layer_of
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import (
    DRAFTER_FILE,
    inference_drafter,
    initial_drafter,
    load_drafter,
    make_drafter,
    read_drafter,
)
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.rollout.strategy import OFF, Strategy

TINY = ROOT / "jobs" / "tiny.toml"
V, INNER = 24, 192
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": V,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None,
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": W,
    "norm_before_residual": False, "speculators_config": {"verifier": {"name_or_path": "ORG/Other-7B"}},
    "transformer_layer_config": {name: value for name, value in BASE.items() if name[:3] not in ("arc", "max")},
}  # fmt: skip
QKV = [("self_attn.q_proj", 128), ("self_attn.k_proj", 64), ("self_attn.v_proj", 64)]


# --- heads as others write them ---


def embedding() -> Tensor:
    return embedded_decoder().embedding.clone()


def random_tensors(form: str, prefix: str, inner: int = 256, num_drafted: int = W) -> dict[str, Tensor]:
    """A head's tensors under published names, of values that float16 holds exactly."""
    width = 2 * H if form == "eagle3" else H
    sizes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (rows, width) for name, rows in QKV}
    sizes |= {
        "fc.weight": (H, 3 * H if form == "eagle3" else 2 * H), f"{prefix}self_attn.o_proj.weight": (H, H),
        f"{prefix}mlp.gate_proj.weight": (inner, H), f"{prefix}mlp.up_proj.weight": (inner, H),
        f"{prefix}mlp.down_proj.weight": (H, inner), f"{prefix}post_attention_layernorm.weight": (H,),
    }  # fmt: skip
    if form == "eagle3":
        norms = (f"{prefix}input_layernorm.weight", f"{prefix}hidden_norm.weight", "norm.weight")
        sizes |= {**dict.fromkeys(norms, (H,)), "lm_head.weight": (num_drafted, H)}
    source = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(size, generator=source) * (size[-1] ** -0.5 * (len(size) > 1) or 0.3)
        for name, size in sizes.items()
    }
    return {name: (tensor + (tensor.dim() == 1)).half() for name, tensor in made.items()}


def with_ids(tensors: dict[str, Tensor], ids: list[int] = IDS) -> dict[str, Tensor]:
    drafted = torch.zeros(V, dtype=torch.bool)
    drafted[ids] = True
    return tensors | {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": drafted}


def head_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle3_with_all(folder: Path) -> Path:
    """A head that differs in all that it may, in the layout of speculators."""
    own = {"intermediate_size": INNER, "rms_norm_eps": 0.05, "rope_theta": 500.0, "rope_scaling": LLAMA3}
    config = SPECULATORS | {
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], **own},
    }  # fmt: skip
    tensors = with_ids(random_tensors("eagle3", "layers.0.", INNER)) | {"embed_tokens.weight": embedding().bfloat16()}
    tensors |= {"verifier_norm.weight": torch.ones(H)}
    return head_folder(folder, config, tensors)


def eagle3_of_all_tokens(folder: Path) -> Path:
    """A portable head without a vocabulary of its own, with its own theta, as SGLang names the layers."""
    config = BASE | {"rope_theta": 77.0, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    return head_folder(folder, config, random_tensors("eagle3", "midlayer.", num_drafted=V))


def eagle_with_bias(folder: Path) -> Path:
    """An EAGLE head as EAGLE's reference has it: fc with a bias, and the embedding."""
    own = {"intermediate_size": INNER, "rms_norm_eps": 0.02, "rope_theta": 300.0}
    tensors = random_tensors("eagle", "layers.0.", INNER) | {"embed_tokens.weight": embedding().half()}
    bias = {"fc.bias": torch.randn(H, generator=torch.Generator().manual_seed(2)).half()}
    zeros = {f"layers.0.{name}.bias": torch.zeros(rows) for name, rows in QKV}
    return head_folder(folder, BASE | own | {"architectures": ["LlamaForCausalLM"]}, tensors | bias | zeros)


HEADS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "all settings": ("eagle3", eagle3_with_all),
    "all tokens": ("eagle3", eagle3_of_all_tokens),
    "a bias": ("eagle", eagle_with_bias),
}


def imported(folder: Path | str, form: str) -> dict[str, Tensor]:
    found = initial_drafter(str(folder), form, embedded_decoder().shape, embedded_folder())  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32, local_files_only=True).eval()


# --- the same drafter ---


@pytest.mark.parametrize(
    ("kind", "form"),
    [("sglang", "eagle"), ("vllm", "eagle"), ("sglang", "eagle3"), ("speculators", "eagle3")],
)
def test_an_export_comes_back_as_it_was(kind, form, tmp_path):
    shape = embedded_decoder().shape
    before = read_drafter("embedded:tiny", shape, "") if form == "eagle" else random_eagle3(shape)
    after = imported(exported(kind, form, tmp_path, shape), form)
    assert after.keys() == before.keys(), "no settings: the layer is as its target's"
    assert all(torch.equal(after[name].float(), before[name].half().float()) for name in before)


ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 700.0},
    "linear": {"rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 700.0, "rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("kind", ["sglang", "speculators"])
@pytest.mark.parametrize("head_dim", [32, 48])
@pytest.mark.parametrize("own", [{}, *ROTARY.values()], ids=["as the target's", *ROTARY])
@pytest.mark.parametrize("rotary", ROTARY)
@torch.inference_mode()
def test_exports_of_every_rotary_and_head_size_come_back_and_draft_the_same(rotary, own, head_dim, kind, tmp_path):
    """Heads together are as wide as the hidden state or, as in most of Qwen3, not."""
    raw = json.loads((embedded_folder() / "config.json").read_text())
    raw |= {"model_type": "llama", "head_dim": head_dim, "rope_parameters": None, **ROTARY[rotary]}
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(raw))
    shape = read_shape(target)
    settings = layer_between(shape, shape_from(raw | {"rope_scaling": None} | own, "own")) if own else DraftLayer()
    stored = random_eagle3(shape) | settings.stored()
    (tmp_path / "own").mkdir()
    save_file(stored, tmp_path / "own" / DRAFTER_FILE)
    arguments = ["--format", kind, "--model", str(target), "--output", str(tmp_path / "out")]
    assert main(["export-drafter", str(tmp_path / "own"), *arguments]) == 0
    again = initial_drafter(str(tmp_path / "out"), "eagle3", shape, embedded_folder())
    assert again is not None and layer_of(again) == settings
    assert all(torch.equal(again[name].float(), stored[name].float()) for name in stored)

    drafter = make_drafter(shape, 0, torch.float32, CPU, again[TOKEN_IDS], settings)
    drafter.load_state_dict({name.removesuffix(".weight"): again[name] for name in again if name != SETTINGS})
    tokens, features = [2, 5, 3, 8, 13, 2, 3], torch.randn(6, 3 * H, generator=torch.Generator().manual_seed(3))
    plain = PlainHead(tmp_path / "out", embedding(), torch.empty(0))
    _, scores = plain.eagle3_step(tokens, features @ plain.tensors["fc.weight"].T)
    states = drafter(embedding()[tokens[1:]], drafter.fuse(features), torch.arange(6), attend_documents(None, [0]))
    drafted = drafter.logits(states)[-1]
    assert float((drafted - scores[IDS]).abs().max()) < 1e-4
    assert float(drafted.std()) > 0.1


@pytest.mark.parametrize("name", HEADS)
def test_an_imported_head_drafts_what_a_plain_reader_of_it_drafts(name, tmp_path, model):
    form, write = HEADS[name]
    head = write(tmp_path / "head")
    drafter = inference_drafter(imported(head, form), embedded_decoder())
    assert drafter.form == form
    if name != "all tokens":
        assert drafter.shape.intermediate_size == INNER != embedded_decoder().shape.intermediate_size
    assert_same_drafts([head], form, proposed(drafter), model)


@pytest.mark.parametrize("name", ["all settings", "a bias"])
def test_its_settings_go_through_files_and_exports(name, tmp_path, capsys):
    form, write = HEADS[name]
    first = imported(write(tmp_path / "head"), form)
    (tmp_path / "own").mkdir()
    save_file(first, tmp_path / "own" / DRAFTER_FILE)
    kind = "speculators" if form == "eagle3" else "sglang"
    arguments = ["--model", "embedded:tiny", "--output", str(tmp_path / "out")]
    assert main(["export-drafter", str(tmp_path / "own"), "--format", kind, *arguments]) == 0
    again = imported(tmp_path / "out", form)
    assert again.keys() == first.keys() and SETTINGS in first
    assert layer_of(again) == layer_of(first)
    assert all(torch.equal(again[n].float(), first[n].float()) for n in first if n != SETTINGS)
    served = load_drafter(str(tmp_path / "own"), embedded_decoder(), "test")
    assert served.own == layer_of(first)
    capsys.readouterr()
    assert main(["export-drafter", str(tmp_path / "own"), "--format", "vllm", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.endswith(f"use --format {kind}\n"), told


def test_rows_of_a_padded_vocabulary_are_left_out(tmp_path):
    head = imported(eagle3_of_all_tokens(tmp_path), "eagle3")
    assert head["token_ids"].tolist() == list(range(NUM_TOKENS))
    assert torch.equal(head["head.weight"], load_file(tmp_path / "model.safetensors")["lm_head.weight"][:NUM_TOKENS])


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_a_file_of_torch_is_read_without_running_it(form, tmp_path):
    head = eagle3_with_all(tmp_path) if form == "eagle3" else eagle_with_bias(tmp_path)
    wanted = imported(head, form)
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    got = imported(head, form)
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
    (head / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Trap(tmp_path / "ran")}))
    with pytest.raises(ConfigError, match="as weights alone"):
        imported(head, form)
    assert not (tmp_path / "ran").exists()


class Trap:
    """Leaves a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# --- what is refused ---


def changed(
    config: dict[str, Any] | None = None, nested: dict[str, Any] | None = None, **tensors: Any
) -> Callable[[Path], Path]:
    """A head of speculators that is fit but for these changes; None takes a tensor away."""

    def write(folder: Path) -> Path:
        layer = {**SPECULATORS["transformer_layer_config"], **(nested or {})}
        stored = with_ids(random_tensors("eagle3", "layers.0.")) | {"embed_tokens.weight": embedding()}
        stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
        return head_folder(folder, {**SPECULATORS, "transformer_layer_config": layer, **(config or {})}, kept)

    return write


def renamed(names: dict[str, Tensor], **config: Any) -> Callable[[Path], Path]:
    return lambda folder: head_folder(folder, {**BASE, **config}, names)


def other_row() -> Tensor:
    """The target's embedding with one row of another model."""
    return embedding().index_copy_(0, torch.tensor([5]), torch.ones(1, H))


ONES = torch.ones(128)
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "medusa": (renamed({"0.0.linear.weight": ONES}, architectures=["MedusaModel"]),
               r"no EAGLE head: architectures = \['MedusaModel'\], and no tensor 'fc.weight'"),
    "speculators' eagle": (changed({"speculators_model_type": "eagle"}), "speculators_model_type = 'eagle' is not"),
    "p-eagle": (changed({"speculators_model_type": "peagle"}), "speculators_model_type = 'peagle' is not supported"),
    "two layers": (changed(nested={"num_hidden_layers": 2}), "num_hidden_layers = 2, and a drafter has one layer"),
    "two layers' tensors": (changed(layers__1__mlp__up_proj__weight=ONES), "a tensor 'layers.1.mlp.up_proj.weight'"),
    "dflash": (changed(fc__weight=torch.ones(H, 5 * H)), r"'fc.weight' has shape \[128, 640\], which neither"),
    "fc_norm": (changed({"fc_norm": True}), "fc_norm = True is not supported"),
    "norm_output": (changed({"norm_output": True}), "norm_output = True is not supported"),
    "no features": (changed({"eagle_config": {"use_aux_hidden_state": False}}), "use_aux_hidden_state = False is not"),
    "width of another target": (changed({"target_hidden_size": 256}), "target_hidden_size = 256 is not supported"),
    "a window": (changed(nested={"layer_types": ["sliding_attention"]}), "layer_types = .* is not supported"),
    "yarn": (changed(nested={"rope_scaling": {"rope_type": "yarn"}}), "rope_type 'yarn' is not supported"),
    "another family's layer": (changed(nested={"model_type": "mistral", "sliding_window": 64}), "does not have"),
    "half a scaling": (changed(nested={"rope_scaling": {**LLAMA3, "factor": None}}), "factor is missing; "),
    "heads": (changed(nested={"num_attention_heads": 8, "head_dim": 16}),
              "num_attention_heads = 8, and the target's is 4: it is a head for 'ORG/Other-7B', and the target is t"),
    "key-value heads": (changed(nested={"num_key_value_heads": 4}), "num_key_value_heads = 4, and the target's is 2"),
    "head_dim": (changed(nested={"head_dim": 64}), "head_dim = 64, and the target's is 32"),
    "a vocabulary": (changed(nested={"vocab_size": 32}), "vocab_size = 32, and the target's is 24: it is a head for"),
    "another embedding": (changed(embed_tokens__weight=other_row()),
                          "row 5 of 'embed_tokens.weight' is not the target's: it is a head for 'ORG/Other-7B', and"),
    "an embedding's size": (changed(embed_tokens__weight=torch.ones(9, H)), r"'embed_tokens.weight' has shape \[9,"),
    "layers by SGLang's count": (changed({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
                                 r"= \[1, 3, 4\], and the features of a drafter here enter the layers \[2, 4, 5\]"),
    "layers by vLLM's count": (changed({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}),
                               r"= \[2, 4, 5\], and the features of a drafter here leave the layers \[1, 3, 4\]"),
    "no word on the residual": (changed({"norm_before_residual": None}), "norm_before_residual = None is neither true"),
    "biases": (changed(layers__0__self_attn__q_proj__bias=ONES), "q_proj.bias' is not zero"),
    "fc's bias": (changed(fc__bias=ONES), "'fc.bias' is not zero"),
    "norms of heads": (changed(layers__0__self_attn__q_norm__weight=ONES), "a tensor 'layers.0.self_attn.q_norm."),
    "a hole": (changed(lm_head__weight=None), "it has no tensor 'lm_head.weight'"),
    "sizes": (changed(nested={"intermediate_size": 300}), r"gate_proj.weight' has shape \[256, 128\], its config"),
    "drafted": (changed({"draft_vocab_size": 9}), r"has shape \[7, 128\], its config.json asks for \[9, 128\]"),
    "int8": (changed(norm__weight=torch.ones(H, dtype=torch.int8)), "'norm.weight' is stored as torch.int8"),
    "a value": (changed(norm__weight=torch.full((H,), torch.nan)), "'final_norm' holds values that are no numbers"),
    "ids": (changed(d2t=torch.zeros(W, dtype=torch.int64)), "'t2d' does not name the tokens that 'd2t' leads to"),
    "ids that fall": (changed(d2t=torch.tensor([2, 2, 3, 5, 9, 12, 5])), "'d2t' does not lead to ascending ids"),
    "ids out of range": (changed(d2t=torch.tensor([2, 2, 3, 5, 9, 12, 18])), "'d2t' does not lead to ascending ids"),
    "no ids": (changed(d2t=None, t2d=None), "'lm_head.weight' has 7 rows for 24 tokens, and no 'd2t' says which"),
    "a short map": (changed(t2d=torch.ones(7, dtype=torch.bool)), "'t2d' does not name the tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_another_head_is_refused_in_one_line(name, tmp_path):
    write, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as found:
        imported(write(tmp_path), "eagle3")
    said = str(found.value)
    assert said.startswith(f"drafter.init = {str(tmp_path)!r}: ") and "\n" not in said
    assert said.endswith("; give a head for this model or 'random'")


def test_the_head_that_the_changes_are_made_to_is_fit(tmp_path):
    assert SETTINGS not in imported(changed()(tmp_path), "eagle3"), "whatever its verifier is called"


def test_mistakes_are_named_before_ranks_start(tmp_path, capsys):
    eagle_with_bias(tmp_path / "head")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for place, words in (
        ("head", "is of the form 'eagle'; set drafter.form = 'eagle'"),
        ("empty", "beside config.json neither model.safetensors nor pytorch_model.bin; download the head's weights"),
        ("nowhere", "no drafter.safetensors there"),
    ):
        assert main(["train", str(TINY), "--dry-run", f"drafter.init={tmp_path / place}", "drafter.form=eagle3"]) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("\n") == 1 and words in told.err
    assert main(["train", str(TINY), "--dry-run", f"drafter.init={tmp_path / 'head'}", "drafter.form=eagle"]) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (b'{"norm_epsilon": -1}', "norm_epsilon: .* greater than 0"),
        (b"{", "holds no drafter's settings"),
        (b'{"norm_before_residual": true}', "is of another form"),
        (torch.ones(3), "is no row of bytes"),
    ],
)
def test_settings_that_are_none_are_refused(settings, words, tmp_path):
    good = {name: tensor.float() for name, tensor in embedded_eagle().items() if name.endswith(".weight")}
    if isinstance(settings, bytes):
        settings = torch.tensor(list(settings), dtype=torch.uint8)
    save_file(good | {SETTINGS: settings}, tmp_path / DRAFTER_FILE)
    with pytest.raises(UserError, match=words) as found:
        read_drafter(str(tmp_path), embedded_decoder().shape, "here")
    assert "\n" not in str(found.value)


# --- runs ---


@pytest.mark.parametrize("name", HEADS)
def test_the_text_is_that_of_plain_decoding(name, tmp_path):
    form, write = HEADS[name]
    requests = gcd_requests(3, 3)
    drafter = inference_drafter(imported(write(tmp_path), form), embedded_decoder())
    strategies = [Strategy("drafter", 4), Strategy("drafter", 3, 3, 7), OFF]
    options = {"max_new_tokens": 60, "chooser": "random", "max_live": 6, "page_size": 8}
    engine = make_engine(strategies, drafter=drafter, drafter_is_trained=True, **options)
    assert texts(generate(engine, requests)) == texts(generate(make_engine(max_new_tokens=60), requests))


def test_a_drafter_of_other_settings_is_not_taken_up(tmp_path):
    warm = imported(eagle3_with_all(tmp_path / "head"), "eagle3")

    def trained(state: dict[str, Tensor]) -> TrainedDrafter:
        own, ids = layer_of(state), warm["token_ids"]
        return TrainedDrafter(make_drafter(embedded_decoder().shape, 0, torch.float32, CPU, ids, own), 1e-3, 1)

    one = trained(warm)
    one.start_from(warm)
    assert torch.equal(one.state()[SETTINGS], warm[SETTINGS])
    trained(warm).load_state(one.state())
    said = r'has the settings \{"intermediate_size":192,.*, and this run\'s \{\}; use the'
    with pytest.raises(UserError, match=said):
        trained({}).load_state(one.state())


def test_a_warm_up_trains_all_of_a_head_and_keeps_its_settings(tmp_path):
    head = eagle_with_bias(tmp_path / "head")
    warmed_up(tmp_path, f"drafter.init={head}", "warmup.updates=2", "drafter.learning_rate=0.01")
    after, before = kept(tmp_path), imported(head, "eagle")
    assert torch.equal(after[SETTINGS], before[SETTINGS])
    weights = [name for name in before if name != SETTINGS]
    assert "fc_bias.weight" in weights and not any(torch.equal(after[n], before[n].float()) for n in weights)


def two_steps_at_once_and_in_two_starts(folder: str, head: str) -> list[str]:
    world = World.connect()

    def steps(name: str, count: int) -> str:
        changes = [f"drafter.init={head}", "drafter.form=eagle3", "speculation.mode=frozen", "checkpoint.every_steps=1"]
        changes += ["rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=60"]
        changes += [f"run.folder={folder}", f"run.name={name}", f"run.num_steps={count}"]
        return run.run(load_config(TINY, changes), world, Silent()).policy_sha256

    ends = [steps("whole", 2), steps("broken", 1), steps("broken", 2)]
    leave_process_group()
    return ends


@pytest.mark.mpi
def test_a_run_with_a_head_resumes_is_evaluated_and_exported(tmp_path, monkeypatch):
    head = eagle3_with_all(tmp_path / "head")
    for whole, half, resumed in run_on_ranks(2, two_steps_at_once_and_in_two_starts, str(tmp_path), str(head)):
        assert resumed == whole != half
    ends = [load_file(tmp_path / name / "drafter" / DRAFTER_FILE) for name in ("whole", "broken")]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    wanted = imported(head, "eagle3")
    assert all(torch.equal(ends[1][name].float(), wanted[name].float()) for name in wanted)
    run_folder = str(tmp_path / "broken")
    assert main(["export-drafter", run_folder, "--format", "speculators"]) == 0
    exports = imported(tmp_path / "broken" / "export" / "speculators", "eagle3")
    assert all(torch.equal(exports[name].float(), wanted[name].float()) for name in wanted)
    drafters, true_load = list[Drafter](), evaluation.inference_drafter
    monkeypatch.setattr(evaluation, "inference_drafter", lambda *of: drafters.append(true_load(*of)) or drafters[0])
    small = ["evaluation.limit=2", "evaluation.samples=2", "rollout.max_new_tokens=40"]
    assert evaluated(tmp_path, *small, place=run_folder).num_left == 0
    assert drafters[0].own == layer_of(wanted) and torch.equal(drafters[0].fc, wanted["fc.weight"].float())
