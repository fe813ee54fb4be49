"""What is on record of a drafter, in a JSON file beside its weights, so that whoever copies the folder has both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_hpc.common.files import DamagedText, read_json, told
from tlt_hpc.config import UserError
from tlt_hpc.storage.folder import writing_beside

FACTS_FILE = "facts.json"


@dataclass(frozen=True)
class CurvePoint:
    """One validation of a warm-up; ``loss`` is the mean since the one before, None where nothing was learned yet."""

    updates: int
    tokens: int
    """Response tokens trained on so far, repeats counted."""
    seconds: float
    """Wall-clock seconds of training so far, validations included."""
    loss: float | None
    accept_length: float


@dataclass(frozen=True)
class DrafterFacts:
    """A warm-up's drafter: what it learned from, for how long, and how well it drafts."""

    target: str
    data: str
    init: str
    num_responses: int
    num_tokens: int
    """Response tokens of the data, repeats not counted."""
    num_updates: int
    """Behind the weights that were kept."""
    learning_rate: float
    batch_tokens: int
    accept_length: float
    strategy: str
    """What validation drafted with."""
    temperature: float
    num_validation_prompts: int
    num_ranks: int
    curve: tuple[CurvePoint, ...]


def write_facts(folder: Path, facts: DrafterFacts) -> None:
    """Put the facts beside a drafter's weights.

    Raises:
        WriteError: the disk refused.
    """
    with writing_beside(folder / FACTS_FILE) as part:
        part.write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> DrafterFacts | None:
    """The facts of a drafter's folder; None where there are none.

    Raises:
        UserError: the file is broken.
    """
    path = folder / FACTS_FILE
    try:
        return read_json(path, DrafterFacts)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(told(error)) from None
    except DamagedText as error:
        raise UserError(f"{path} cannot be read ({error}); remove it") from None
