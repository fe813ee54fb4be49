"""``tlt export-drafter``: finds the drafter, lays it out, writes it, and prints what was written."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tlt_hpc import __version__
from tlt_hpc.checkpoint.store import find_requested_step
from tlt_hpc.config import EMBEDDED_MODEL, UserError, load_saved_config
from tlt_hpc.export.export_options import output_folder
from tlt_hpc.export.model_card import escape_markdown
from tlt_hpc.export.writer import CARD, CONFIG, MARK, WEIGHTS, check_output, checkpoint_at, write_folder
from tlt_hpc.extras.drafter_formats.formats import SPECULATIVE_TOKENS, Files, Target, convert_drafter, read_target
from tlt_hpc.models.drafter_file import (
    DRAFTER_FILE,
    TOKEN_IDS,
    is_inference_tensor,
    read_drafter,
    select_and_check_tensors,
)
from tlt_hpc.models.tokenizer import package_asset_folder
from tlt_hpc.storage.folder import RunFolder, no_run_message
from tlt_hpc.storage.records import read_facts
from tlt_hpc.storage.step_lines import read_lines

_ACCEPT_LENGTH = "drafter/spec_decode/mean_acceptance_length"


@dataclass(frozen=True)
class PolicyExport:
    """The policy of a run, as ``tlt export-policy`` is to write it."""

    folder: Path
    command: str


@dataclass(frozen=True)
class Source:
    """A drafter, its target, and what was recorded of its training."""

    origin: Path
    drafter: Mapping[str, Tensor]
    """Tensors by name; with ``token_ids`` it is of the EAGLE-3 form."""
    target: Target
    recorded: dict[str, str]
    policy: PolicyExport | None
    """Its target, if that is the policy of a run and not the model that the run started from."""

    @property
    def is_eagle3(self) -> bool:
        """True if the drafter is of the EAGLE-3 form."""
        return TOKEN_IDS in self.drafter

    @property
    def title(self) -> str:
        """The heading of the drafter's card."""
        return f"{'EAGLE-3' if self.is_eagle3 else 'EAGLE'} drafter for {self.target.name}"


def run(options: argparse.Namespace) -> None:
    """Export one drafter.

    Raises:
        ValueError: nothing to export, a format that cannot carry it, or no place to write; nothing was written.
    """
    options.step = find_requested_step(RunFolder(Path(options.place)), options.step)
    output = output_folder(options, options.kind)
    check_output(output, {WEIGHTS, CONFIG, CARD}.__contains__)
    source = find_drafter(options)
    for name, tensor in source.drafter.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(
                f"{source.origin}: drafter tensor {name!r} holds values that are no numbers; take an earlier --step"
            )
    files = convert_drafter(options.kind, source.drafter, source.target)
    command = serving_command(source, options.kind, output)

    def fill(part: Path) -> Iterator[Path]:
        save_file(files.tensors, part / WEIGHTS, metadata={"format": "pt"})
        (part / CONFIG).write_text(json.dumps(files.config, indent=2) + "\n", encoding="utf-8")
        (part / CARD).write_text(render_card(source, files, options.kind, command), encoding="utf-8")
        yield from (part / WEIGHTS, part / CONFIG, part / CARD)

    write_folder(output, fill)
    print(f"wrote {output}: {source.title}, for {options.kind}, from {source.origin}")
    print("\n".join(f"{name:15} {value}" for name, value in source.recorded.items()))
    print(f"next: {command}\n{serving_advice(source)}")


def policy_of(options: argparse.Namespace) -> PolicyExport:
    """The policy of the run and step that the options name.

    Raises:
        UserError: as ``output_folder``.
    """
    words = ["tlt", "export-policy", options.place]
    words += ["--step", str(options.step)] * (options.step is not None)
    words += ["--model", str(options.model)] * (options.model is not None)
    policy = argparse.Namespace(place=options.place, step=options.step, output=None)
    return PolicyExport(output_folder(policy, "policy"), shlex.join(words))


def find_drafter(options: argparse.Namespace) -> Source:
    """The drafter that the options name.

    Raises:
        ValueError: there is none, a file is broken, or the target is unknown; one line with the remedy.
    """
    place = str(options.place)
    folder = package_asset_folder("tiny_drafter") if place == EMBEDDED_MODEL else Path(place)
    run = RunFolder(folder)
    target = find_target(options, run)
    if options.step is None and (folder / DRAFTER_FILE).is_file():
        return _read_drafter_source(folder, target, None)
    checkpoint = checkpoint_at(run, options.step)
    if checkpoint is not None and checkpoint.tensor_names("drafter"):
        with checkpoint.open_tensor_reader("drafter") as read:
            stored = {name: read(name) for name in filter(is_inference_tensor, checkpoint.tensor_names("drafter"))}
        drafter = select_and_check_tensors(stored, target.shape, str(checkpoint.folder))
        line = read_lines(run.metrics).get(checkpoint.step - 1, {})
        recorded = {
            "target": f"the policy after {checkpoint.step:,} RL steps from {target.name}",
            "updates": f"{int(checkpoint.read_tensor('drafter', 'num_steps')):,}",
        }
        if _ACCEPT_LENGTH in line:
            recorded["accept length"] = f"{line[_ACCEPT_LENGTH]:.2f} in the run's last rollout, with all strategies"
        return Source(checkpoint.folder, drafter, target, recorded, policy_of(options))
    if options.step is None and (folder / "drafter" / DRAFTER_FILE).is_file():
        return _read_drafter_source(folder / "drafter", target, policy_of(options) if checkpoint else None)
    raise UserError(
        f"{place} has no drafter; give a run with speculation.mode = 'full' that has saved a checkpoint, or a folder "
        f"that has a {DRAFTER_FILE}"
    )


def find_target(options: argparse.Namespace, run: RunFolder) -> Target:
    """The model that a drafter drafts for.

    Raises:
        ValueError: the options and the run name none, or it is not there.
    """
    if options.model is not None:
        return read_target(options.model)
    if options.place == EMBEDDED_MODEL:
        return read_target(EMBEDDED_MODEL)
    if not run.config.is_file():
        raise UserError(no_run_message(run.path, "config.toml that names the target model (--model FOLDER)"))
    return read_target(load_saved_config(run.config).model.path)


def _read_drafter_source(folder: Path, target: Target, policy: PolicyExport | None) -> Source:
    """A drafter in a file of its own, with the facts of its warm-up if they are there."""
    stored = read_drafter(str(folder), target.shape, str(folder))
    drafter = {name.removesuffix(".weight"): tensor for name, tensor in stored.items()}
    facts, recorded = read_facts(folder), {"target": target.name}
    if facts is not None:
        recorded |= {
            "data": f"{facts.num_responses:,} responses of {facts.target} to {facts.data}",
            "updates": f"{facts.num_updates:,}",
            "accept length": f"{facts.accept_length:.2f} at temperature {facts.temperature:g}, by {facts.strategy} on "
            f"{facts.num_validation_prompts} held-out prompts",
        }
    return Source(folder, drafter, target, recorded, policy)


def render_card(source: Source, files: Files, kind: str, command: str) -> str:
    """The README.md of an export."""
    rows = {"layout": kind, "bytes": f"{sum(t.nbytes for t in files.tensors.values()):,}", **source.recorded}
    table = "\n".join(f"| {name} | {escape_markdown(value)} |" for name, value in rows.items())
    return (
        f"---\ntags:\n- speculative-decoding\n- eagle\n---\n\n{MARK}-drafter -->\n\n# {escape_markdown(source.title)}"
        f"\n\n| | |\n|---|---|\n{table}\n\n{escape_markdown(serving_advice(source))}\n\n```\n{command}\n```\n\n"
        f"Written by tlt_hpc {__version__} from {escape_markdown(str(source.origin))}.\n"
    )


def serving_command(source: Source, kind: str, output: Path) -> str:
    """The command that serves the target with the drafter."""
    target = shlex.quote(str(source.policy.folder) if source.policy else source.target.path)
    method = "eagle3" if source.is_eagle3 else "eagle"
    if kind != "sglang":
        settings = {"method": method, "model": str(output), "num_speculative_tokens": SPECULATIVE_TOKENS}
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} "
        f"--speculative-draft-model-path {shlex.quote(str(output))} --speculative-num-steps {SPECULATIVE_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {SPECULATIVE_TOKENS + 1}"
    )


def serving_advice(source: Source) -> str:
    """A sentence on which weights to serve the drafter with."""
    if source.policy is None:
        return "The target checks every draft: a drafter that fits it badly makes serving slower, not different."
    return (
        f"`{source.policy.command}` writes the policy to {source.policy.folder}. With the model that the run started "
        f"from ({source.target.path}) the text is as right, but fewer drafts are accepted."
    )
