"""``finished.json``: what a run that has finished leaves of its end. Knows not who looks for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import Count, DamagedText, read_json, told
from tlt_hpc.storage.folder import writing_beside


@dataclass(frozen=True)
class FinishedWord:
    """How many steps a run has done, and the digest of the policy after them."""

    num_steps: Count
    policy_sha256: str


def write_finished(path: Path, word: FinishedWord) -> None:
    """Leave the word.

    Raises:
        WriteError: no room or no permission.
    """
    with writing_beside(path) as part:
        part.write_text(json.dumps(asdict(word)) + "\n", encoding="utf-8")


def read_finished(path: Path) -> FinishedWord | None:
    """The word; None where a run has not finished.

    Raises:
        UserError: it is damaged, or cannot be read.
    """
    try:
        return read_json(path, FinishedWord)
    except FileNotFoundError:
        return None
    except DamagedText as error:
        raise UserError(f"{path} is damaged ({error}); remove it, and the run looks for itself") from None
    except OSError as error:
        raise UserError(told(error)) from None
