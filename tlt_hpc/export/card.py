"""The text of an export: a model card, and the command that serves the drafter."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tlt_hpc import __version__
from tlt_hpc.export.formats import FORMATS, SPECULATIVE_TOKENS, Files
from tlt_hpc.export.forms import AnyDrafter, Eagle3Drafter
from tlt_hpc.export.source import History, Source
from tlt_hpc.export.target import Target
from tlt_hpc.models.eagle3 import feature_layers

MARK = "<!-- written by tlt export-drafter -->"
"""Identifies an earlier export, which may be replaced."""
POLICY_FOLDER = "POLICY_FOLDER"
"""Placeholder for the trained policy, which ``tlt export-policy`` writes."""
_ABSENT = "not recorded"


def form_name(drafter: AnyDrafter) -> str:
    """EAGLE or EAGLE-3."""
    return "EAGLE-3" if isinstance(drafter, Eagle3Drafter) else "EAGLE"


def card(source: Source, files: Files, kind: str, command: str, embedding: str | None) -> str:
    """The README.md of an export; ``embedding`` says where the copy of the target's is from, if there is one."""
    rows = [
        ("form", _describe_form(source.drafter, source.target)),
        ("layout", FORMATS[kind].title),
        ("weights", weights_line(files)),
        *record_rows(source),
        *([("embedding", embedding)] if embedding else []),
    ]
    lines = [
        "---\ntags:\n- speculative-decoding\n- eagle\n---",
        MARK,
        f"# {form_name(source.drafter)} drafter for {source.target.name}",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]),
        advice(source),
        f"```\n{command}\n```",
        f"Written by tlt_hpc {__version__} from {source.origin}.",
    ]
    return "\n\n".join(lines) + "\n"


def record_rows(source: Source) -> list[tuple[str, str]]:
    """What was recorded of the drafter's training."""
    history = source.history
    return [
        ("target", _describe_target(source.target, history)),
        ("data", history.data or _ABSENT),
        ("RL steps", _number(history.num_steps)),
        ("drafter updates", _describe_updates(history)),
        ("accept length", _describe_accept(history)),
    ]


def weights_line(files: Files) -> str:
    """Tensors, numbers and bytes of an export."""
    tensors = files.tensors.values()
    floats = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    size = sum(tensor.nbytes for tensor in tensors)
    return f"{len(tensors)} tensors, {floats:,} weights in {_dtype_name(files)}, {size:,} bytes"


def tensor_table(files: Files) -> list[str]:
    """Name, sizes and type of every tensor, one a line."""
    width = max(map(len, files.tensors))
    return [
        f"  {name:{width}}  {str(tensor.dtype).removeprefix('torch.'):8}  {list(tensor.shape)}"
        for name, tensor in sorted(files.tensors.items())
    ]


def next_command(source: Source, kind: str, output: Path) -> str:
    """The command, or Python call, that serves the target with the drafter.

    After reinforcement learning the target is the policy, which the user has to export in Hugging Face form.
    """
    is_eagle3 = isinstance(source.drafter, Eagle3Drafter)
    path = POLICY_FOLDER if source.history.num_steps else source.target.path
    target, place = shlex.quote(path), shlex.quote(str(output))
    if kind == "speculators":
        return f"vllm serve {place}"
    if kind == "eagle":
        return (
            f"EaModel.from_pretrained(use_eagle3={is_eagle3}, base_model_path={json.dumps(path)}, "
            f"ea_model_path={json.dumps(str(output))})"
        )
    if kind == "vllm":
        settings = {
            "method": "eagle3" if is_eagle3 else "eagle",
            "model": str(output),
            "num_speculative_tokens": SPECULATIVE_TOKENS,
        }
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"
    algorithm = "EAGLE3" if is_eagle3 else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {place} --speculative-num-steps {SPECULATIVE_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {SPECULATIVE_TOKENS + 1}"
    )


def _describe_form(drafter: AnyDrafter, target: Target) -> str:
    if not isinstance(drafter, Eagle3Drafter):
        return (
            "EAGLE: one layer on [embedding; last hidden state after the final norm], head and embedding the target's"
        )
    low, middle, high = feature_layers(target.shape.num_layers)
    return (
        f"EAGLE-3: one layer on the inputs of the target's layers {low}, {middle} and {high}, "
        f"drafting {len(drafter.token_ids):,} of {target.shape.vocab_size:,} tokens"
    )


def _describe_target(target: Target, history: History) -> str:
    if not history.num_steps:
        return target.name
    return f"the policy after {history.num_steps} RL steps from {target.name}"


def _describe_updates(history: History) -> str:
    if history.init is None:
        return _number(history.num_updates)
    return f"{_number(history.num_updates)}, begun from {history.init}"


def _describe_accept(history: History) -> str:
    if history.accept_length is None:
        return _ABSENT
    heat = "" if history.temperature is None else f" at temperature {history.temperature:g}"
    if history.validation is not None:
        return f"{history.accept_length:.2f} tokens per target pass and sequence{heat}, by {history.validation}"
    return (
        f"{history.accept_length:.2f} tokens per target pass and sequence{heat}, over the whole of the run's last "
        "rollout before these weights: rounds without drafts and drafts from n-grams are counted too"
    )


def advice(source: Source) -> str:
    """Which weights to serve the drafter with."""
    if not source.history.num_steps:
        return "The target checks every draft: a drafter that fits it badly makes serving slower, not different."
    return (
        f"It was trained on that policy's own text and hidden states. {POLICY_FOLDER} stands for the policy's weights "
        "as a Hugging Face folder, which tlt export-policy writes; with the model that the run started from "
        f"({source.target.path}) the text is as right, but fewer drafts are accepted."
    )


def _number(value: int | None) -> str:
    return _ABSENT if value is None else f"{value:,}"


def _dtype_name(files: Files) -> str:
    return next(str(t.dtype) for t in files.tensors.values() if t.is_floating_point()).removeprefix("torch.")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
