"""``finished.json``: what a run that has finished leaves of its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.common.files import Count
from tlt_hpc.storage.json_record import read_record, write_record


@dataclass(frozen=True)
class FinishedWord:
    """How many steps a run has done, and the digest of the policy after them."""

    num_steps: Count
    policy_sha256: str


def write_finished(path: Path, word: FinishedWord) -> None:
    """Raises ``WriteError`` if there is no room or no permission."""
    write_record(path, word)


def read_finished(path: Path) -> FinishedWord | None:
    """The record; None if the run has not finished.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    return read_record(path, FinishedWord, "remove it, and the run looks for itself")
