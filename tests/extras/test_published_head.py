"""Published heads as the drafter to begin with: the same tensors and drafts, what is refused, and where it is kept."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import ROOT, run_on_ranks
from plain_heads import PlainHead
from safetensors.torch import load_file, save_file
from test_evaluate import start as evaluated
from test_export import (
    FORMATS,
    IDS,
    INNER,
    H,
    V,
    W,
    assert_same_drafts,
    embedded_eagle,
    exported,
    proposed,
    random_eagle3,
)
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
from tlt_hpc.models.drafter import (
    SETTINGS,
    TOKEN_IDS,
    Drafter,
    DraftLayer,
    differing_layer_settings,
    parse_layer_settings,
)
from tlt_hpc.models.drafter_file import (
    DRAFTER_FILE,
    inference_drafter,
    load_drafter,
    make_drafter,
    read_drafter,
    read_drafter_of_init,
)
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.rollout.strategy import OFF, Strategy

TINY = ROOT / "jobs" / "tiny.toml"
OWN_INNER = 192
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BASE = {**FORMATS["vllm eagle3"]["config"]}
del BASE["draft_vocab_size"], BASE["rope_parameters"]
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": W,
    "norm_before_residual": False, "speculators_config": {"verifier": {"name_or_path": "ORG/Other-7B"}},
    "transformer_layer_config": {name: value for name, value in BASE.items() if name != "architectures"},
}  # fmt: skip


# --- heads as others write them ---


def embedding() -> Tensor:
    return embedded_decoder().embedding.clone()


def random_tensors(form: str, prefix: str, inner: int = INNER, num_drafted: int = W) -> dict[str, Tensor]:
    """A head's tensors under published names, of values that float16 holds exactly."""
    sizes = {
        re.sub(r"^(midlayer|layers\.0)\.", prefix, name): [inner if n == INNER and "mlp." in name else n for n in size]
        for name, size in FORMATS[f"vllm {form}"]["shapes"].items()
        if name not in ("d2t", "t2d")
    }
    if form == "eagle3":
        sizes["lm_head.weight"] = [num_drafted, H]
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
    own = {"intermediate_size": OWN_INNER, "rms_norm_eps": 0.05, "rope_theta": 500.0, "rope_scaling": LLAMA3}
    config = SPECULATORS | {
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], **own},
    }  # fmt: skip
    tensors = with_ids(random_tensors("eagle3", "layers.0.", OWN_INNER)) | {
        "embed_tokens.weight": embedding().bfloat16()
    }
    tensors |= {"verifier_norm.weight": torch.ones(H)}
    return head_folder(folder, config, tensors)


def eagle3_of_all_tokens(folder: Path) -> Path:
    """A portable head without a vocabulary of its own, with its own theta, as SGLang names the layers."""
    config = BASE | {"rope_theta": 77.0, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    return head_folder(folder, config, random_tensors("eagle3", "midlayer.", num_drafted=V))


def eagle_with_bias(folder: Path) -> Path:
    """An EAGLE head as EAGLE's reference has it: fc with a bias, and the embedding."""
    own = {"intermediate_size": OWN_INNER, "rms_norm_eps": 0.02, "rope_theta": 300.0}
    tensors = random_tensors("eagle", "layers.0.", OWN_INNER) | {"embed_tokens.weight": embedding().half()}
    bias = {"fc.bias": torch.randn(H, generator=torch.Generator().manual_seed(2)).half()}
    shapes = FORMATS["sglang eagle"]["shapes"]
    zeros = {name: torch.zeros(shapes[name]) for name in shapes if name.endswith("_proj.bias")}
    return head_folder(folder, BASE | own | {"architectures": ["LlamaForCausalLM"]}, tensors | bias | zeros)


HEADS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "all settings": ("eagle3", eagle3_with_all),
    "all tokens": ("eagle3", eagle3_of_all_tokens),
    "a bias": ("eagle", eagle_with_bias),
}


def imported(folder: Path | str, form: str) -> dict[str, Tensor]:
    found = read_drafter_of_init(str(folder), form, embedded_decoder().shape, embedded_folder())  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32, local_files_only=True).eval()


# --- the same drafter ---


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_an_export_of_the_eagle_form_comes_back_as_it_was(kind, tmp_path):
    shape = embedded_decoder().shape
    before, after = (
        read_drafter("embedded:tiny", shape, ""),
        imported(exported(kind, "eagle", tmp_path, shape), "eagle"),
    )
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
    settings = (
        differing_layer_settings(shape, shape_from(raw | {"rope_scaling": None} | own, "own")) if own else DraftLayer()
    )
    stored = random_eagle3(shape) | settings.to_tensors()
    (tmp_path / "own").mkdir()
    save_file(stored, tmp_path / "own" / DRAFTER_FILE)
    arguments = ["--format", kind, "--model", str(target), "--output", str(tmp_path / "out")]
    assert main(["export-drafter", str(tmp_path / "own"), *arguments]) == 0
    again = read_drafter_of_init(str(tmp_path / "out"), "eagle3", shape, embedded_folder())
    assert again is not None and parse_layer_settings(again) == settings
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


@pytest.mark.parametrize(
    "name", [each if each == "all settings" else pytest.param(each, marks=pytest.mark.ci) for each in HEADS]
)
def test_an_imported_head_drafts_what_a_plain_reader_of_it_drafts_and_leaves_the_text_as_it_is(name, tmp_path, model):
    form, write = HEADS[name]
    head = write(tmp_path / "head")
    drafter = inference_drafter(imported(head, form), embedded_decoder())
    assert drafter.form == form
    if name != "all tokens":
        assert drafter.shape.intermediate_size == OWN_INNER != embedded_decoder().shape.intermediate_size
    assert_same_drafts([head], form, proposed(drafter), model)
    requests, options = gcd_requests(3, 3), {"chooser": "random", "max_live": 6, "page_size": 8}
    strategies = [Strategy("drafter", 4), Strategy("drafter", 3, 3, 7), OFF]
    engine = make_engine(strategies, drafter=drafter, drafter_is_trained=True, max_new_tokens=60, **options)
    assert texts(generate(engine, requests)) == texts(generate(make_engine(max_new_tokens=60), requests))


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
    assert parse_layer_settings(again) == parse_layer_settings(first)
    assert all(torch.equal(again[n].float(), first[n].float()) for n in first if n != SETTINGS)
    served = load_drafter(str(tmp_path / "own"), embedded_decoder(), "test")
    assert served.own == parse_layer_settings(first)
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


def changed(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """A head of speculators that is fit but for these changes; None takes a tensor away."""
    layer = {**SPECULATORS["transformer_layer_config"], **config.get("transformer_layer_config", {})}
    stored = {**with_ids(random_tensors("eagle3", "layers.0.")), "embed_tokens.weight": embedding(), **tensors}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    return head_folder(folder, {**SPECULATORS, **config, "transformer_layer_config": layer}, kept)


def other_row() -> Tensor:
    """The target's embedding with one row of another model."""
    return embedding().index_copy_(0, torch.tensor([5]), torch.ones(1, H))


ONES, FIRST = torch.ones(128), "layers.0.self_attn"
LINES = Path(__file__).with_name("unusable_heads.txt").read_text().splitlines()
"""Changes of config.json, and below each what is said of them."""
TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"layers.1.mlp.up_proj.weight": ONES},
     "it has a tensor 'layers.1.mlp.up_proj.weight', and its layer here none of that name"),
    ({"fc.weight": torch.ones(H, 5 * H)}, "'fc.weight' has shape [128, 640], which neither EAGLE nor EAGLE-3 has"),
    ({"embed_tokens.weight": other_row()}, "row 5 of 'embed_tokens.weight' is not the target's: it is a head for "
     "'ORG/Other-7B', and the target is tiny"),
    ({"embed_tokens.weight": torch.ones(9, H)},
     "'embed_tokens.weight' has shape [9, 128], its config.json asks for [24, 128]"),
    ({f"{FIRST}.q_proj.bias": ONES}, f"'{FIRST}.q_proj.bias' is not zero, and its layer here has no such bias"),
    ({"fc.bias": ONES}, "'fc.bias' is not zero, and its layer here has no such bias"),
    ({"lm_head.weight": None}, "it has no tensor 'lm_head.weight'"),
    ({"norm.weight": ONES.to(torch.int8)}, "'norm.weight' is stored as torch.int8, which is not supported"),
    ({"norm.weight": ONES * torch.nan}, "'final_norm' holds values that are no numbers"),
    ({"d2t": torch.zeros(W, dtype=torch.int64)}, "'t2d' does not name the tokens that 'd2t' leads to"),
    ({"t2d": torch.ones(7, dtype=torch.bool)}, "'t2d' does not name the tokens that 'd2t' leads to"),
    ({"d2t": torch.tensor([2, 2, 3, 5, 9, 12, 5])}, "'d2t' does not lead to ascending ids of the target's 24 tokens"),
    ({"d2t": torch.tensor([2, 2, 3, 5, 9, 12, 18])}, "'d2t' does not lead to ascending ids of the target's 24 tokens"),
    ({"d2t": None, "t2d": None}, "'lm_head.weight' has 7 rows for 24 tokens, and no 'd2t' says which"),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], dict[str, Tensor | None], str]] = [
    *((json.loads(config), {}, words.strip()) for config, words in zip(LINES[::2], LINES[1::2], strict=True)),
    *(({}, tensors, words) for tensors, words in TENSORS),
    (
        {"speculators_model_type": None, "architectures": ["MedusaModel"]},
        {"fc.weight": None},
        "it is no EAGLE head: architectures = ['MedusaModel'], and no tensor 'fc.weight'",
    ),
]


@pytest.mark.parametrize(("config", "tensors", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_another_head_is_refused_in_one_line(config, tensors, words, tmp_path):
    with pytest.raises(ConfigError) as found:
        imported(changed(tmp_path, config, tensors), "eagle3")
    remedy = "give a head for this model or 'random'"
    assert str(found.value) == f"drafter.init = {str(tmp_path)!r}: {words}; {remedy}"


def test_the_head_that_the_changes_are_made_to_is_fit(tmp_path):
    assert SETTINGS not in imported(changed(tmp_path, {}, {}), "eagle3"), "whatever its verifier is called"


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


def test_a_drafter_of_other_settings_is_not_taken_up(tmp_path):
    warm = imported(eagle3_with_all(tmp_path / "head"), "eagle3")

    def trained(state: dict[str, Tensor]) -> TrainedDrafter:
        own, ids = parse_layer_settings(state), warm["token_ids"]
        return TrainedDrafter(make_drafter(embedded_decoder().shape, 0, torch.float32, CPU, ids, own), 1e-3, 1)

    one = trained(warm)
    one.copy_weights_from(warm)
    assert torch.equal(one.host_state_copy()[SETTINGS], warm[SETTINGS])
    trained(warm).load_state(one.host_state_copy())
    said = r'has the settings \{"intermediate_size":192,.*, and this run\'s \{\}; use the'
    with pytest.raises(UserError, match=said):
        trained({}).load_state(one.host_state_copy())


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
        return run.run_training(load_config(TINY, changes), world, Silent()).policy_sha256

    ends = [steps("whole", 2), steps("broken", 1), steps("broken", 2)]
    leave_process_group()
    return ends


@pytest.mark.mpi
@pytest.mark.ci
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
    assert drafters[0].own == parse_layer_settings(wanted) and torch.equal(drafters[0].fc, wanted["fc.weight"].float())
