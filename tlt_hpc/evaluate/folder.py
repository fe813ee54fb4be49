"""An evaluation's folder: what was evaluated and how, the responses so far, the results. Knows no engine.

evaluation.json   what the responses depend on: an evaluation continues only with the same
responses/        000007.h5: some judged responses each, by whichever rank
results.json      the figures, once all responses are there
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tlt_hpc.common.files import DamagedText, read_json
from tlt_hpc.common.records import SampleKey
from tlt_hpc.config import ConfigError
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.records import write_json
from tlt_hpc.storage.rollout_log import JudgedResponse, read_responses, write_responses

logger = logging.getLogger(__name__)

FOLDER = "evaluation"
_SAMPLED = 65536
WEIGHTS = "weights"
NEVER_SAMPLED = "the ids that are never sampled"


class EvaluationFolder:
    """The files of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = path / "evaluation.json"
        self.results = path / "results.json"
        self.responses = path / "responses"
        self.status = path / "status"
        """What each rank does, or did when it ended."""

    def check_and_save_settings(self, facts: Mapping[str, Any], replaces: bool = False) -> set[SampleKey]:
        """Compare what the responses depend on with what is there, then save it; data sets may be added.

        Returns the keys of the responses that are there.

        Args:
            replaces: delete an evaluation that depended on other facts, with a warning, instead of refusing it.

        Raises:
            ConfigError: they differ, or the file is damaged.
            WriteError: no room or no permission.
        """
        old = self._read_settings()
        plain = json.loads(json.dumps(facts))
        changed = next((name for name in plain if name in old and old[name] != plain[name]), None)
        if changed is not None:
            found = f"{self.path} holds an evaluation with {changed} = {old[changed]!r}, now {plain[changed]!r}"
            if not replaces:
                raise ConfigError(f"{found}; use what it was, or give another folder with --output")
            logger.warning("%s: evaluated again", found)
            shutil.rmtree(self.path)
            old = {}
        write_json(self.facts, {**old, **facts})
        return set(self.read_all_responses())

    def _read_settings(self) -> dict[str, Any]:
        try:
            # earlier versions, which do not name them, sampled all ids
            return {NEVER_SAMPLED: "", **read_json(self.facts, dict[str, Any])}
        except FileNotFoundError:
            return {}
        except DamagedText:
            raise ConfigError(f"{self.facts} is damaged; delete {self.path} to evaluate again") from None

    def next_number(self) -> int:
        """The first number that no file of responses has."""
        return 1 + max((int(path.stem) for path in self._files()), default=-1)

    def write_response_file(self, number: int, responses: Sequence[JudgedResponse]) -> str:
        """Add a file of responses; returns its name.

        Raises:
            WriteError: no room or no permission.
        """
        path = self.responses / f"{number:06d}.h5"
        write_responses(path, responses)
        return path.name

    def read_all_responses(self) -> dict[SampleKey, JudgedResponse]:
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


def step_folder(run: RunFolder, step: int) -> Path:
    """The folder of the evaluation of a run's policy after so many steps."""
    return run.path / FOLDER / f"step-{step:06d}"


def digest_weights(weights: Iterable[tuple[str, Tensor]], tied_head: bool) -> str:
    """A digest of weights, of any shapes and in any order: of elements spread evenly over each tensor.

    Training changes all of them, if only in the last bits.
    """
    return digest_of_samples({name: digest_sampled_elements(tensor) for name, tensor in weights}, tied_head)


def digest_sampled_elements(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu() + 0.0  # so that no zero has a sign
    return hashlib.sha256(some.numpy().tobytes() + str(tuple(tensor.shape)).encode()).hexdigest()


def digest_of_samples(samples: Mapping[str, str], tied_head: bool) -> str:
    parts = sorted(part for part in samples.items() if not (tied_head and part[0] == "lm_head.weight"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
