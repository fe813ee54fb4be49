"""Keeps fingerprints of a run's data with the run, and refuses to resume with other data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlt_hpc.config import ConfigError
from tlt_hpc.storage.records import read_record, write_json

FILE = "data.json"


def claim_data(folder: Path, facts: Mapping[str, str]) -> None:
    """Write the fingerprints ``facts`` to a run's folder, or compare them with those that are there.

    Raises:
        UserError: they differ, or the file is damaged or cannot be written.
    """
    path = folder / FILE
    old = read_record(path, dict[str, str], "remove it to resume with the data as it is now") or {}
    for key in sorted(set(old) & set(facts)):
        # Once prompts were left out, they stay left out: otherwise draws would shift. The other way nothing shifts.
        if old[key] != facts[key] and (key, facts[key]) != ("data.overlong", "drop"):
            if key == "model.path":
                raise ConfigError(
                    f"{folder} holds a run that began with other files of its model, which it still needs (as the "
                    "reference, or below its adapters); restore them or give another run.name"
                )
            why = "prompts that it left out would shift all draws: " if key == "data.overlong" else ""
            raise ConfigError(
                f"{folder} holds a run whose {key} was another ({old[key][:12]} then, {facts[key][:12]} now); "
                f"{why}restore it or give another run.name"
            )
    write_json(path, dict(facts))
