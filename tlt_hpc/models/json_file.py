"""Reads the JSON files of a model's folder. Knows none of their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlt_hpc.config import UserError
from tlt_hpc.files import LINES_BYTES, read_bytes


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        UserError: it is no JSON, or no object.
    """
    try:
        found = json.loads(read_bytes(path, LINES_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object; download it again")
    return found
