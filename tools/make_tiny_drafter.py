"""Put a warm-up of the embedded model into the package: its drafter in half precision, its facts, and its log.

tlt warmup jobs/tiny.toml
python tools/make_tiny_drafter.py runs/tiny-warmup --output tlt_hpc/models/assets/tiny_drafter \
    --log docs/tiny_drafter.md
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from safetensors.torch import load_file, save_file

from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.drafter_file import DRAFTER_FILE
from tlt_hpc.storage.folder import writing_beside
from tlt_hpc.storage.records import FACTS_FILE, CurvePoint, DrafterFacts, read_facts


def log_of(facts: DrafterFacts) -> str:
    """The log: what it was made from, and the curve."""
    text = (
        f"`tlt warmup jobs/tiny.toml`, {time.strftime('%Y-%m-%d')}, {facts.num_ranks} ranks; put into the package by "
        f"`tools/make_tiny_drafter.py`. From {facts.init} weights, on {facts.num_responses:,} responses "
        f"({facts.num_tokens:,} tokens) of the embedded model to problems of `{facts.data}`, {facts.batch_tokens:,} "
        f"tokens an update, learning rate {facts.learning_rate:g}. Accept length: tokens per target pass and sequence "
        f"by `{facts.strategy}` at temperature {facts.temperature:g} on {facts.num_validation_prompts} problems that "
        "were held out, always the same responses. Seconds are of training and validation. The weights after "
        f"{facts.num_updates} updates are kept: {facts.accept_length:.2f}."
    )
    lines = [
        "# How the embedded drafter was warmed up",
        "",
        *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False),
        "",
        "| updates | tokens seen | loss | accept length | seconds |",
        "|---|---|---|---|---|",
        *map(row_of, facts.curve),
    ]
    return "\n".join(lines) + "\n"


def row_of(point: CurvePoint) -> str:
    """One validation as a row of the table."""
    loss = "-" if point.loss is None else f"{point.loss:.3f}"
    return f"| {point.updates} | {point.tokens:,} | {loss} | {point.accept_length:.2f} | {point.seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a warm-up of the embedded model")
    parser.add_argument("--output", type=Path, required=True, help="where the drafter and its facts go")
    parser.add_argument("--log", type=Path, required=True, help="where the log goes, as Markdown")
    arguments = parser.parse_args()
    facts = read_facts(arguments.run / "drafter")
    if facts is None or facts.target != EMBEDDED_MODEL:
        parser.error(f"{arguments.run} is no warm-up of {EMBEDDED_MODEL}; run `tlt warmup jobs/tiny.toml` first")
    stored = load_file(arguments.run / "drafter" / DRAFTER_FILE)
    weights = {name: tensor.half() for name, tensor in stored.items() if name.endswith(".weight")}
    with writing_beside(arguments.output / DRAFTER_FILE) as part:
        save_file(weights, part)
    shutil.copyfile(arguments.run / "drafter" / FACTS_FILE, arguments.output / FACTS_FILE)
    arguments.log.write_text(log_of(facts))


if __name__ == "__main__":
    sys.exit(ending("make_tiny_drafter", main))
