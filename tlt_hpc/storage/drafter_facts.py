"""What is on record of a drafter, in a JSON file beside its weights, so that whoever copies the folder has both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.storage.json_record import read_record, write_record

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
    write_record(folder / FACTS_FILE, facts)


def read_facts(folder: Path) -> DrafterFacts | None:
    """The facts of a drafter's folder; None if there are none.

    Raises:
        UserError: the file is broken.
    """
    return read_record(folder / FACTS_FILE, DrafterFacts, "remove it")
