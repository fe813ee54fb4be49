"""``tlt export-drafter``: finds the drafter, lays it out, writes it, and prints what was written."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from tlt_hpc import __version__
from tlt_hpc.export.export_options import read_options
from tlt_hpc.export.formats import Files, lay_out
from tlt_hpc.export.source import Source, open_source
from tlt_hpc.export.writer import FILES, check_output, write
from tlt_hpc.models.drafter_file import TOKEN_IDS
from tlt_hpc.models.eagle3 import feature_layers

MARK = "<!-- written by tlt export-drafter -->"
"""Identifies an earlier export, which may be replaced."""
POLICY_FOLDER = "POLICY_FOLDER"
"""Placeholder for the trained policy, which ``tlt export-policy`` writes."""
SPECULATIVE_TOKENS = 5
"""Length of the chain of drafts in the commands that are proposed."""


def run(given: argparse.Namespace) -> None:
    """Export one drafter.

    Raises:
        ValueError: nothing to export, a format that cannot carry it, or no place to write; nothing was written.
    """
    options = read_options(given)
    check_output(options.output, MARK, FILES.__contains__)
    source = open_source(options)
    files = lay_out(options.kind, source.drafter, source.target)
    rows = [*describe(source), ("weights", weights_line(files)), *source.rows]
    command = serving_command(source, options.kind, options.output)
    write(options.output, files, card(source, rows, options.kind, command))
    print(f"wrote {options.output}: {form_name(source)} drafter for {options.kind}, {weights_line(files)}")
    for name, tensor in sorted(files.tensors.items()):
        print(f"  {name:45}  {str(tensor.dtype).removeprefix('torch.'):8}  {list(tensor.shape)}")
    print("\n".join(f"{name:15} {value}" for name, value in [("from", str(source.origin)), *rows]))
    print(f"next: {command}\n{advice(source)}")


def form_name(source: Source) -> str:
    """EAGLE or EAGLE-3."""
    return "EAGLE-3" if TOKEN_IDS in source.drafter else "EAGLE"


def describe(source: Source) -> list[tuple[str, str]]:
    """The form of a drafter."""
    shape = source.target.shape
    if TOKEN_IDS not in source.drafter:
        return [("form", "EAGLE: one layer on [embedding; last hidden state], with the target's head and embedding")]
    low, middle, high = feature_layers(shape.num_layers)
    vocabulary = f"drafting {len(source.drafter[TOKEN_IDS]):,} of {shape.vocab_size:,} tokens"
    return [
        ("form", f"EAGLE-3: one layer on the inputs of the target's layers {low}, {middle} and {high}, {vocabulary}")
    ]


def weights_line(files: Files) -> str:
    """Tensors, numbers and bytes of an export."""
    floats = [tensor for tensor in files.tensors.values() if tensor.is_floating_point()]
    dtype = str(floats[0].dtype).removeprefix("torch.")
    size = sum(tensor.nbytes for tensor in files.tensors.values())
    return f"{len(files.tensors)} tensors, {sum(t.numel() for t in floats):,} weights in {dtype}, {size:,} bytes"


def card(source: Source, rows: list[tuple[str, str]], kind: str, command: str) -> str:
    """The README.md of an export."""
    table = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows)
    return (
        f"---\ntags:\n- speculative-decoding\n- eagle\n---\n\n{MARK}\n\n"
        f"# {form_name(source)} drafter for {source.target.name}\n\n| | |\n|---|---|\n| layout | {kind} |\n{table}\n\n"
        f"{advice(source)}\n\n```\n{command}\n```\n\nWritten by tlt_hpc {__version__} from {source.origin}.\n"
    )


def serving_command(source: Source, kind: str, output: Path) -> str:
    """The command that serves the target with the drafter.

    After reinforcement learning the target is the policy, which the user has to export in Hugging Face form.
    """
    target = shlex.quote(POLICY_FOLDER if source.num_steps else source.target.path)
    method = "eagle3" if TOKEN_IDS in source.drafter else "eagle"
    if kind == "vllm":
        settings = {"method": method, "model": str(output), "num_speculative_tokens": SPECULATIVE_TOKENS}
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {shlex.quote(str(output))} --speculative-num-steps {SPECULATIVE_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {SPECULATIVE_TOKENS + 1}"
    )


def advice(source: Source) -> str:
    """Which weights to serve the drafter with."""
    if not source.num_steps:
        return "The target checks every draft: a drafter that fits it badly makes serving slower, not different."
    return (
        f"It was trained on that policy's own text and hidden states. {POLICY_FOLDER} stands for the policy's weights "
        "as a Hugging Face folder, which tlt export-policy writes; with the model that the run started from "
        f"({source.target.path}) the text is as right, but fewer drafts are accepted."
    )
