"""The model card of a policy: README.md with the front matter that the Hugging Face Hub reads.

Its figures are from the lines of the run's steps. Text from the configuration and from files is escaped, so that it
stays text in YAML and Markdown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.printable import escape_control_characters
from tlt_hpc.config import Config, UserError
from tlt_hpc.data.files import known_by_output
from tlt_hpc.export.writer import CARD, MARK
from tlt_hpc.look.columns import COLUMNS, SCORE
from tlt_hpc.look.cost import cost_of
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import change_of, compared_series, differing_settings, speed_of
from tlt_hpc.models.tokenizer import hub_name

_UNKNOWN = "ORG/NAME"
_LICENSE = re.compile(r"^license:[ \t]*([a-z0-9][a-z0-9.-]*)[ \t]*$", re.MULTILINE)
_CARD_CHARACTERS = 1 << 16
"""Read of the start model's card; its front matter is far shorter."""
_PACKAGES = ("torch", "transformers", "deepspeed")


def policy_card(config: Config, log: RunLog | None, model: Path, output: Path, num_steps: int) -> str:
    """The card of a policy.

    Args:
        log: the run's, up to the step of the policy; None if it has none.
        model: the folder of the start model.
        output: where the policy is written.
        num_steps: steps that it was trained for.
    """
    algorithm = config.algorithm
    recipe = f"advantage {algorithm.recipe.advantage}, loss {algorithm.recipe.loss}"
    rows = {
        "base model": config.model.path,
        "data": config.data.source_name,
        "algorithm": f"{algorithm.name} ({recipe})",
        "steps": f"{num_steps:,}, each of {format_count(config.samples_per_step, 'response')}",
        **(dict(_training_table_rows(log)) if log else {}),
    }
    table = "\n".join(f"| {name} | {escape_markdown(value)} |" for name, value in rows.items())
    place = json.dumps(str(output))
    data = front_matter(config, model)
    lacking = [name for name, value in (("base_model", data.base_model), ("license", data.license)) if not value]
    note = f"\nNot known here, and to be added before this is published: {', '.join(lacking)}.\n" if lacking else ""
    return (
        f"---\n{data}\n---\n\n{MARK}-policy -->\n\n# {escape_markdown(config.run.name)}\n\n"
        f"A policy trained with reinforcement learning.\n{note}\n| | |\n|---|---|\n{table}\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({place})\ntokenizer = AutoTokenizer.from_pretrained({place})\n"
        "```\n"
    )


def front_matter(config: Config, model: Path) -> Any:
    """The card's data; what is not known is left out. A license is that of the start model's own card."""
    from huggingface_hub import ModelCardData

    name = hub_name(model)
    files = [config.data.source] if isinstance(config.data.source, str) else config.data.source
    sets = [known.repository for known in map(known_by_output, map(Path, files)) if known]
    return ModelCardData(
        base_model=None if name == _UNKNOWN else name,
        datasets=list(dict.fromkeys(sets)) or None,
        library_name="transformers",
        license=_license_of(model),
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", config.algorithm.name, "tlt_hpc"],
    )


def escape_markdown(text: str) -> str:
    """Text as one line of Markdown that shows it as it is, in a cell of a table too."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&!])", r"\\\1", " ".join(escape_control_characters(text).split()))


def _license_of(model: Path) -> str | None:
    path = model / CARD
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        begin, *parts = re.split(r"^---[ \t]*$", file.read(_CARD_CHARACTERS), maxsplit=2, flags=re.MULTILINE)
    found = _LICENSE.search(parts[0]) if len(parts) == 2 and not begin.strip("\ufeff \n") else None
    return found[1] if found else None


def _training_table_rows(log: RunLog) -> Iterator[tuple[str, str]]:
    """Rows of the table that are known from the steps and starts."""
    if change := change_of(log.metric(COLUMNS[SCORE].metric)):
        steps = "step" if change.quarter == 1 else f"{change.quarter} steps"
        yield "score", f"{change.first:.3f} to {change.last:.3f} (means of the first and last {steps})"
    if cost := cost_of(log):
        yield "response tokens", f"{cost.tokens:,}"
        yield "cost", f"{cost.hours_text} {cost.unit_and_rate_text}"
    if speed := _speed_up(log):
        yield "speed-up by speculation", speed
    if log.environments_of_starts:
        start = log.environments_of_starts[-1]
        versions = {"tlt_hpc": start.version, **{name: start.packages.get(name, "") for name in _PACKAGES}}
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _speed_up(log: RunLog) -> str | None:
    """Of rollouts, against the run ``plain`` that ``tlt compare`` left beside this one; None if there is none."""
    try:
        plain = RunLog(log.folder.path.resolve().parent / "plain")
    except UserError:
        return None
    if (
        plain.speculation_mode != "plain"
        or log.speculation_mode in ("plain", "")
        or differing_settings(plain.config, log.config)
    ):
        return None
    if (speed := speed_of(compared_series(plain, plain.name), compared_series(log, log.name))) is None:
        return None
    return f"{speed.rollout:.2f} times as fast in rollouts (median of {format_count(len(speed.steps), 'step')})"
