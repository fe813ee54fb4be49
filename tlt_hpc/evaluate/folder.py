"""An evaluation's folder: what was evaluated and how, the responses so far, the results. Knows no engine.

evaluation.json   what the responses depend on: an evaluation continues only with the same
responses/        000007.h5: some judged responses each, by whichever rank
results.json      the figures, once all responses are there
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt_hpc.common.files import DamagedText, read_json, told
from tlt_hpc.common.records import SampleKey
from tlt_hpc.config import ConfigError
from tlt_hpc.storage.evaluation_log import JudgedResponse, read_responses, write_responses
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.records import write_json

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
Facts = Mapping[str, Any]


class EvaluationFolder:
    """The files of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def facts(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    @property
    def responses(self) -> Path:
        return self.path / "responses"

    @property
    def status(self) -> Path:
        """What each rank is at, or was at when it ended."""
        return self.path / "status"

    def claim(self, facts: Facts) -> None:
        """Keep what the responses depend on, or hold it against what is there; data sets may be added.

        Raises:
            ConfigError: they differ.
            WriteError: no room or no permission.
        """
        old = self.read_facts()
        changed = changed_facts(old, facts)
        if changed:
            name, before, now = changed
            raise ConfigError(
                f"{self.path} holds an evaluation with {name} = {before!r}, now {now!r}; use what it was, or "
                "give another folder with --output"
            )
        write_json(self.facts, {**old, **facts})

    def read_facts(self) -> dict[str, Any]:
        """What the responses that are there depend on; nothing where there are none.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            return read_json(self.facts, dict[str, Any])
        except FileNotFoundError:
            return {}
        except DamagedText:
            raise ConfigError(f"{self.facts} is damaged; delete {self.path} to evaluate again") from None
        except OSError as error:
            raise ConfigError(told(error)) from None

    def set_aside(self) -> Path:
        """Give the folder another name, under which nothing looks for it; returns that."""
        number = 1
        while (other := self.path.with_name(f"{self.path.name}-replaced-{number}")).exists():
            number += 1
        self.path.rename(other)
        return other

    def next_number(self) -> int:
        """The first number that no file of responses has."""
        return 1 + max((int(path.stem) for path in self._files()), default=-1)

    def write(self, number: int, responses: Sequence[JudgedResponse]) -> str:
        """Add a file of responses; returns its name.

        Raises:
            WriteError: no room or no permission.
        """
        path = self.responses / f"{number:06d}.h5"
        write_responses(path, responses)
        return path.name

    def read(self) -> dict[SampleKey, JudgedResponse]:
        """All responses so far; those of damaged files are generated again, which is warned of."""
        found: dict[SampleKey, JudgedResponse] = {}
        for path in self._files():
            try:
                found |= {response.key: response for response in read_responses(path)}
            except DamagedFile as error:
                logger.warning("%s", error)
        return found

    def _files(self) -> list[Path]:
        return sorted(path for path in self.responses.glob("*.h5") if path.stem.isdecimal())


def changed_facts(old: Facts, new: Facts) -> tuple[str, Any, Any] | None:
    """The first fact of both that differs, with both values."""
    plain = json.loads(json.dumps(new))
    differing = (name for name in plain if name in old and old[name] != plain[name])
    return next(((name, old[name], plain[name]) for name in differing), None)
