"""What config.json says against transformers: every spelling of the rotary embedding, and every field changed.

A configuration that the decoder accepts must give the logits of transformers; all others must be refused.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import random_models

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.models.shape import shape_from

CPU, KINDS = torch.device("cpu"), ["sliding_attention", "full_attention"]
SMALL = {"num_hidden_layers": 2, "max_window_layers": 1, "sliding_window": 8}
TOKENS = torch.randint(0, random_models.NUM_TOKENS, (40,), generator=torch.Generator().manual_seed(0))
MISSING = object()
families = pytest.mark.parametrize("family", random_models.FAMILIES)


def raw_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of two layers, which says nothing of the rotary embedding."""
    raw = {"model_type": family, **random_models.SIZES, **random_models.FAMILIES[family], **SMALL}
    if "layer_types" in raw:
        raw["layer_types"] = KINDS
    del raw["max_position_embeddings"]
    raw = {**raw, "max_position_embeddings": 64, "rope_parameters": MISSING, **changes}
    return {key: deepcopy(value) for key, value in raw.items() if value is not MISSING}


@torch.inference_mode()
def verdict(raw: dict[str, Any]) -> str:
    """Whether the decoder refuses the configuration, or computes what transformers does."""
    try:
        shape = shape_from(deepcopy(raw), "config.json")
    except ValueError:
        return "refused"
    try:
        model = random_models.model_of(CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw)))
        theirs = model(TOKENS[None]).logits[0]
    except StrictDataclassFieldValidationError:
        return "of another type"  # the model's loading says so in one line
    except Exception as error:  # noqa: BLE001 of any kind: there is no such model
        return f"accepted, and transformers has {type(error).__name__}: {error}"
    decoder = Decoder(shape, torch.float32, CPU)
    try:
        decoder.load_weights(((name, weight.detach()) for name, weight in model.named_parameters()), 0)
    except ValueError:
        return "refused"
    hidden = decoder.hidden_states(TOKENS, torch.arange(len(TOKENS)), attend_documents(None, shape.windows))
    apart = float((decoder.logits(hidden) - theirs).abs().max())
    return "same" if apart < 3e-4 else f"accepted, and logits are {apart:.2g} apart"


def check_all(cases: list[dict[str, Any]], family: str, least: int) -> None:
    """Each change of the family's configuration is refused or computed rightly, and at least so many the latter."""
    found = [(verdict(raw_of(family, **changes)), changes) for changes in cases]
    wrong = [f"{changes}: {said:.200}" for said, changes in found if said.startswith("accepted")]
    assert not wrong, "\n".join(wrong)
    assert Counter(said for said, _ in found)["same"] >= least


# --- the rotary embedding ---

SPELLINGS: dict[str, Any] = json.loads(Path(__file__).with_name("rope_spellings.json").read_text())
SPELLINGS["absent"] = MISSING


def rotations(pairs: list[tuple[str, str]], family: str) -> list[dict[str, Any]]:
    """Names of a spelling of ``rope_parameters`` and of one of ``rope_scaling``, each beside other keys that count."""
    local = (MISSING, 70.0, None) if family == "gemma3_text" else (MISSING,)
    return [
        {
            "rope_parameters": SPELLINGS[newer], "rope_scaling": SPELLINGS[older], "rope_theta": theta,
            "rope_local_base_freq": base, "original_max_position_embeddings": original,
        }
        for newer, older in pairs
        for theta, base in product((MISSING, 500.0), local)
        for original in ((MISSING, 16) if "llama3" in newer + older else (MISSING,))
    ]  # fmt: skip


@families
def test_a_rotary_embedding_in_every_spelling(family):
    """By ``rope_parameters``, by ``rope_scaling`` of older files, by both of one kind."""
    pairs = [*((name, "absent") for name in SPELLINGS), *(("absent", name) for name in SPELLINGS)]
    pairs += [("linear", "linear without theta"), ("llama3", "llama3 without theta"), ("default", "empty")]
    check_all(rotations(pairs, family), family, least=15)


@pytest.mark.slow
@families
def test_two_spellings_of_a_rotary_embedding_in_one_file(family):
    check_all(rotations(list(product(SPELLINGS, SPELLINGS)), family), family, least=50)


# --- every other field ---

MORE = {
    *("is_causal", "partial_rotary_factor", "rope_theta", "rope_local_base_freq"),
    *("sliding_window_pattern", "hidden_act", "hidden_activation", "use_sliding_window"),
    *("sliding_window", "attention_bias", "qkv_bias", "mlp_bias"),
    *("attention_out_bias", "layer_types", "num_local_experts", "num_experts"),
    *("head_dim", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("pretraining_tp", "use_bidirectional_attention", "tie_word_embeddings", "is_decoder"),
    *("max_window_layers", "norm_topk_prob", "mlp_only_layers"),
}
"""Fields of some family, or of all: a file may have them by mistake."""
NOT_OF_THE_MODEL = {
    *("id2label", "label2id", "problem_type", "transformers_version", "architectures", "return_dict", "dtype"),
    *("output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder", "vocab_size", "rope_parameters"),
    *("attention_dropout", "residual_dropout"),  # switched off when a model is loaded
}
LISTS = ([kind] * 2 for kind in KINDS)
SIZES = [16, 32, None]
VALUES = {
    "layer_types": [*LISTS, KINDS, KINDS[::-1], KINDS[:1], [], False],
    "mlp_only_layers": [[], [1], None],
    "sliding_window": [1, 2, 24, None],
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), SIZES),
}
WORDS, PLAIN = ["gelu", "gelu_pytorch_tanh", "silu", "relu", None], [True, False, 0, 1, 24, 0.5, None]


@families
def test_every_field_of_a_configuration_changed(family):
    own = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
    cases = [
        {name: value}
        for name in sorted((own | MORE) - NOT_OF_THE_MODEL)
        for value in VALUES.get(name, WORDS if "act" in name.split("_")[-1] else PLAIN)
    ]
    check_all([{}, *cases], family, least=80)
