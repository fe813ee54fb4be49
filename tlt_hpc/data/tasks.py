"""Problems of reasoning-gym, an optional package, made from the run's seed: its only home."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tlt_hpc.config import TASK_PREFIX, ConfigError, UserError
from tlt_hpc.data.rows import Row, RowError, first_line

_PROBED = 16


class TaskRows:
    """The problems 0..size-1 of a task; each is made when it is asked for, from seed and index."""

    kind = "reasoning-gym"

    def __init__(self, name: str, size: int, seed: int, arguments: Mapping[str, Any]) -> None:
        self.name, self._size = TASK_PREFIX + name, size
        self._made_from = json.dumps([name, size, seed, dict(arguments)], sort_keys=True)
        self._task = _make(name, size, seed, arguments)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        entry = self._task[index]
        answer = entry["answer"]
        if not isinstance(entry["question"], str):
            raise RowError(self.where(index), "its question is no text; use another task")
        return {
            "prompt": entry["question"],
            "answer": "" if answer is None else answer,  # some tasks judge by the entry alone, which is in extra_info
            "data_source": self.name,
            "extra_info": entry,
        }

    def where(self, index: int) -> str:
        return f"{self.name} problem {index}"

    def columns(self) -> frozenset[str]:
        return frozenset({"prompt", "answer", "data_source", "extra_info"})

    def digest(self) -> str:
        """Of what the problems are made from, and of the first of them: another version may make others."""
        first = [self._task[index] for index in range(min(_PROBED, self._size))]
        return hashlib.sha256((self._made_from + json.dumps(first, sort_keys=True, default=str)).encode()).hexdigest()


def _make(name: str, size: int, seed: int, arguments: Mapping[str, Any]) -> Any:
    """The package's own data set.

    Raises:
        UserError: the package is not installed.
        ConfigError: it has no such task, or the task does not take these arguments.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.source = {TASK_PREFIX + name!r} needs the package {error.name!r}; pip install reasoning-gym"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        remedy = (
            f"did you mean {TASK_PREFIX + near[0]!r}?" if near else f"it has e.g. {', '.join(sorted(DATASETS)[:5])}"
        )
        raise ConfigError(f"data.source = {TASK_PREFIX + name!r}: reasoning-gym has no such task; {remedy}")
    try:
        return reasoning_gym.create_dataset(name, **{**arguments, "size": size, "seed": seed})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.task_args = {dict(arguments)!r}: {TASK_PREFIX + name!r} refuses them ({first_line(error)}); "
            "fix data.task_args"
        ) from None
