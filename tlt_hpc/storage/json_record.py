"""Records that are one JSON file of a run each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import DamagedText, read_json, told
from tlt_hpc.storage.folder import writing_beside

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def write_record(path: Path, record: DataclassInstance) -> None:
    """Write a dataclass.

    Raises:
        WriteError: no room or no permission; the file is as before.
    """
    with writing_beside(path) as part:
        part.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(path: Path, kind: type[T], remedy: str) -> T | None:
    """What ``write_record`` wrote; None if there is no file.

    Raises:
        UserError: it is damaged, with ``remedy``, or cannot be read.
    """
    try:
        return read_json(path, kind)
    except FileNotFoundError:
        return None
    except DamagedText as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None
    except OSError as error:
        raise UserError(told(error)) from None
