"""Problems of reasoning-gym, an optional package that is imported only here, made from the run's seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tlt_hpc.config import TASK_PREFIX, ConfigError, UserError
from tlt_hpc.data.rows import Row, RowError, first_line

_SIZE = 10_000
_PROBED = 16


class TaskRows:
    """The problems of a task, 10,000 unless the arguments have ``size``; each is made on demand from seed and index.

    Raises:
        UserError: the package is not installed, has no such task, or the task refuses the arguments; ``key`` is
            what named the task.
    """

    kind = "reasoning-gym"

    def __init__(self, name: str, seed: int, arguments: Mapping[str, Any], key: str) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise UserError(
                f"{key} = {TASK_PREFIX + name!r} needs the package {error.name!r}; pip install reasoning-gym"
            ) from None
        if name not in DATASETS:
            raise ConfigError(
                f"{key} = {TASK_PREFIX + name!r}: reasoning-gym has no such task; its gallery lists the names"
            )
        self.name, self._size = TASK_PREFIX + name, arguments.get("size", _SIZE)
        others = {key: value for key, value in arguments.items() if key != "size"}
        self._made_from = json.dumps([name, self._size, seed, others], sort_keys=True)
        try:
            self._task = reasoning_gym.create_dataset(name, **others, size=self._size, seed=seed)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data.task_args = {dict(arguments)!r}: {self.name!r} refuses them ({first_line(error)}); "
                "fix data.task_args"
            ) from None

    def __len__(self) -> int:
        return int(self._size)

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

    def digest(self) -> str:
        """Digest of the task's arguments and first problems: another version of the package may make others."""
        first = [self._task[index] for index in range(min(_PROBED, len(self)))]
        return hashlib.sha256((self._made_from + json.dumps(first, sort_keys=True, default=str)).encode()).hexdigest()
