"""Keeps fingerprints of a run's data with the run, and refuses to resume with other data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tlt_hpc.common.files import DamagedText, read_json, told
from tlt_hpc.config import ConfigError

FILE = "data.json"
_STRICTER = {("drop", "error"), ("skip", "error")}
"""Once rows were left out, they stay left out: otherwise draws would shift. The other way nothing shifts."""


def claim_data(folder: Path, facts: Mapping[str, str]) -> None:
    """Keep ``facts`` of the data in a run's folder, or compare them with those that are there.

    Raises:
        ConfigError: they differ.
    """
    path = folder / FILE
    try:
        old = read_json(path, dict[str, str])
    except FileNotFoundError:
        old = {}
    except DamagedText:
        raise ConfigError(f"{path} is damaged; remove it to resume with the data as it is now") from None
    except OSError as error:
        raise ConfigError(told(error)) from None
    for key in sorted(set(old) & set(facts)):
        _check(folder, key, old[key], facts[key])
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(dict(facts), indent=1) + "\n", encoding="utf-8")
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def _check(folder: Path, key: str, old: str, new: str) -> None:
    if key in ("data.overlong", "data.broken_rows"):
        if (old, new) in _STRICTER:
            raise ConfigError(
                f"{folder} holds a run with {key} = {old!r}, now {new!r}; rows that it left out would be missed: "
                "resume with the old value or give another run.name"
            )
    elif old != new:
        raise ConfigError(
            f"{folder} holds a run whose {key} was another ({old[:12]} then, {new[:12]} now); "
            "give it back as it was or give another run.name"
        )
