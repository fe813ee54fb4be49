"""Reads the JSON files of a model's folder. Knows none of their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tlt_hpc.common.files import DamagedText, decoded, parse_object, read_bytes, told
from tlt_hpc.config import UserError

_MOST_BYTES = 2**28
"""Of a file of text; the longest, tokenizers, have 30 MB."""


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return decoded(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise UserError(told(error)) from None
    except DamagedText as error:
        raise UserError(f"{path} is not UTF-8 ({error}); download it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        UserError: it cannot be read, is no JSON, or no object.
    """
    text = read_text(path)
    try:
        return parse_object(text.encode())
    except DamagedText as error:
        raise UserError(f"{path} is no JSON object ({error}); download it again") from None
