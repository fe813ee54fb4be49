"""Tokens that no text has: which these are, and that neither rollouts nor updates give them any probability."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from by_definition import choice_of, noise_of
from launch_ranks import ROOT, tlt
from tiny import CPU, byte_tokenizer, embedded_folder, embedded_tokenizer, generate
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import Request, SampleKey, SamplingParams
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.policy_model import PolicyModel
from tlt_hpc.models.shape import read_shape, shape_from
from tlt_hpc.models.tokenizer import tokens_without_text
from tlt_hpc.plan.inputs import ModelAssets, describe_model
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, Strategy

TINY = ROOT / "jobs" / "tiny.toml"
EXCLUDED_TEXTS = [
    "<|begin_of_text|>", "<pad>", "<unk>", "<|reserved_special_token_7|>", "<unused12>", "<|image_pad|>",
    "<|vision_start|>", "<start_of_image>", "<|box_end|>", "[control_8]", "<SPECIAL_20>", "<|dummy_id_3|>",
    "<extra_id_9>",
]  # fmt: skip
ALLOWED_TEXTS = [
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "[TOOL_CALLS]", "<tool_call>",
    "<|python_tag|>", "<|channel|>", "[THINK]", "<seed:think>", "<|special|>", "image",
]  # fmt: skip
NOT_SPECIAL = ("<unused12>", "</think>", "<tool_call>", "image")
"""Text of added tokens, and which of them are not special."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    roles = {"bos_token": {"content": "<|begin_of_text|>"}, "pad_token": "<pad>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**roles, "eos_token": "<|im_end|>"}))
    return tmp_path


def test_which_tokens_no_text_has(folder: Path) -> None:
    tokenizer = byte_tokenizer(["some text of a response"], 300, [])
    size = tokenizer.get_vocab_size()
    added = [*EXCLUDED_TEXTS, *ALLOWED_TEXTS]
    tokenizer.add_tokens([AddedToken(text, special=text not in NOT_SPECIAL) for text in added])
    ids = {text: tokenizer.token_to_id(text) for text in added}
    assert min(ids.values()) == size
    highest, ends = max(ids.values()), [ids["<|im_end|>"]]
    found = tokens_without_text(folder, tokenizer, highest + 5, ends)
    assert found == (*sorted(ids[text] for text in EXCLUDED_TEXTS), *range(highest + 1, highest + 5))
    assert tokens_without_text(folder, tokenizer, highest + 5, [ids["<pad>"]]) == tuple(
        t for t in found if t != ids["<pad>"]
    )
    assert tokens_without_text(folder, tokenizer, size, ends) == (), "of a smaller model"


# -- what a user sees of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["train"], ["warmup"], ["compare"], ["evaluate", "embedded:tiny"]], ids=lambda words: words[0]
)
def test_a_plan_says_which(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, str(TINY), f"run.folder={tmp_path}", "evaluation.limit=4", "--dry-run"]) == 0
    assert "\ntokens      5 of 24 ids never sampled: 0, 20-23\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("excluded", "told"),
    [
        ((), ""),
        ((7,), "1 of 24 ids never sampled: 7"),
        ((0, 2, 3, 5, 7, 9, 10), "7 of 24 ids never sampled: 0, 2-3, 5, 7, ..."),
    ],
)
def test_one_line_has_room_for_the_first_of_them(excluded: tuple[int, ...], told: str) -> None:
    shape = read_shape(embedded_folder())
    assets = ModelAssets(embedded_folder(), shape, embedded_tokenizer(), (1,), excluded)
    assert assets.excluded_tokens_text == told
    lines = describe_model(load_config(TINY, []).model, assets)
    assert lines[0].startswith("model ") and lines[1:] == ([f"tokens      {told}"] if told else [])


def test_a_start_says_which_and_its_files_keep_them(tmp_path: Path) -> None:
    small = "evaluation.limit=1", "evaluation.samples=0", "evaluation.max_new_tokens=4", "speculation.mode=plain"
    command = "evaluate", "embedded:tiny", str(TINY), *small, "--output", str(tmp_path / "out"), "run.ranks=1"
    assert "building the decoder; 5 of 24 ids never sampled: 0, 20-23\n" in tlt(1, *command).stdout
    facts, key = tmp_path / "out" / "evaluation.json", "the ids that are never sampled"
    tree, folder = json.loads(facts.read_text()), EvaluationFolder(facts.parent)
    assert tree[key] == "0, 20-23" and len(folder.check_and_save_settings(tree)) == 1
    with pytest.raises(ConfigError, match=f"with {key} = '0, 20-23', now '0'; .* --output"):
        folder.check_and_save_settings({**tree, key: "0"})
    facts.write_text(json.dumps({name: value for name, value in tree.items() if name != key}))
    with pytest.raises(ConfigError, match=f"with {key} = '', now '0, 20-23'; "):
        folder.check_and_save_settings(tree)
    assert len(folder.check_and_save_settings({**tree, key: ""})) == 1, "of an earlier version"


# -- a model that would write them all the time -----------------------------------------------------------------------

V, USED, EOS, EXCLUDED = 40, 36, 1, (0, 5, 6, 17, *range(36, 40))
CONFIG = Qwen2Config(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.3,
)  # fmt: skip
LENGTH, REQUESTS = 24, [Request(SampleKey(2, 0, 0, 0, i), np.array([3, 7, 2], np.int32)) for i in range(6)]


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    made = Qwen2ForCausalLM(CONFIG).eval()
    with torch.no_grad():
        made.lm_head.weight[list(EXCLUDED)] *= 8.0
    return made


def engine_of(model: Qwen2ForCausalLM, strategies: list[Strategy], **options) -> RolloutEngine:
    shape = shape_from(CONFIG.to_dict(), "test")
    decoder = Decoder(shape, torch.float32, CPU, excluded=EXCLUDED)
    defaults = {"max_live": 8, "max_prompt_tokens": 4, "tie_guard": True, "page_size": 8, "chooser": "random"}
    settings = EngineSettings(
        num_tokens=USED, eos_token_ids=(EOS,), strategies=tuple(strategies), **{**defaults, **options}
    )
    engine = RolloutEngine(decoder, settings, Eagle(shape, 0, torch.float32, CPU), drafter_is_trained=True)
    engine.load_policy(model.state_dict().items(), 0)
    engine.calibrate([Request(SampleKey(9, 3, 0, 0, i), REQUESTS[0].prompt_tokens) for i in range(4)])
    return engine


def allowed_logits(model: Qwen2ForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    logits[:, list(EXCLUDED)] = -torch.inf
    return logits


RULES = [SamplingRule(1.0, USED), SamplingRule(0.7, USED, top_k=30, top_p=0.95), SamplingRule(0.0, USED)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("attention", ["auto", "paged-kernel"])
@pytest.mark.parametrize("zone", [None, float("inf")])
def test_they_are_never_sampled_and_log_probs_are_of_the_others(model, rule, attention, zone) -> None:
    """By no drafter, on host and device, and not by the guard either; the trainer's log-probabilities are the same."""
    params = SamplingParams(LENGTH, rule.temperature, rule.top_k, rule.top_p)
    strategies = [OFF, Strategy("drafter", 3), Strategy("drafter", 3, 2, 6), Strategy("ngram", 2)]
    engine = engine_of(model, strategies, stored_texts=True, params=params, attention=attention)
    assert engine._guard.logit_tolerance < 1e-2, "differences of excluded logits count as errors"
    engine._guard.logit_tolerance = zone or engine._guard.logit_tolerance
    engine.set_stored_texts({request.key: np.array(EXCLUDED[:3] * 5, np.int32) for request in REQUESTS[:2]})
    trained, free = PolicyModel(deepcopy(model), excluded=EXCLUDED), 0
    for request, rollout in zip(REQUESTS, generate(engine, REQUESTS), strict=True):
        prompt, wanted = request.prompt_tokens.tolist(), list[int]()
        while len(wanted) < LENGTH and wanted[-1:] != [EOS]:
            logits = allowed_logits(model, prompt + wanted)[-1]
            wanted.append(choice_of(logits, noise_of(request.key, len(wanted), USED), rule))
        assert rollout.response_tokens.tolist() == wanted
        whole, heat = torch.tensor(prompt + wanted), rule.temperature or 1.0
        rows = (allowed_logits(model, whole.tolist()) / heat).log_softmax(-1)
        where = torch.arange(len(prompt) - 1, len(whole) - 1)
        exact = rows[where, whole[where + 1]]
        np.testing.assert_allclose(rollout.log_probs, exact.numpy(), atol=1e-4)
        inputs = (whole, torch.arange(len(whole)), (len(whole),), where, whole[where + 1], heat)
        found, entropy, _ = trained(*inputs)
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy.double(), torch.special.entr(rows[where].exp()).sum(1), atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            first = model(whole[None]).logits[0, where].argmax(-1)
        free += sum(token in EXCLUDED for token in first.tolist())
    assert free > 20, "the model would have said the same without the exclusion"
    assert engine._guard.num_raised == 0


def test_the_gradient_is_that_of_the_softmax_over_the_others(model) -> None:
    tokens = torch.tensor([3, 7, 2, 9, 4, 11, 30])
    where, targets = torch.arange(2, 6), tokens[3:]
    own, plain = deepcopy(model), deepcopy(model)
    found = PolicyModel(own, excluded=EXCLUDED)(tokens, torch.arange(7), (7,), where, targets, 0.7, True)
    kept = [token for token in range(V) if token not in EXCLUDED]
    rows = (plain(tokens[None]).logits[0, where][:, kept] / 0.7).log_softmax(-1)
    chosen = rows.gather(1, torch.tensor([[kept.index(token)] for token in targets.tolist()]))[:, 0]
    for log_probs, entropy in (found[:2], (chosen, -(rows.exp() * rows).sum(1))):
        (log_probs.sum() + 0.3 * entropy.sum()).backward()
    for (name, weight), wanted in zip(own.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, wanted.grad, atol=1e-5, rtol=1e-4, msg=name)
    of_head = own.lm_head.weight.grad
    assert not of_head[list(EXCLUDED)].any() and float(of_head[kept].abs().max()) > 0.1
