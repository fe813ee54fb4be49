"""A user's own order of an epoch's rows: a pure function in a file of theirs, and what it may not do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlt_hpc.config import ConfigError
from tlt_hpc.data.order import Indices
from tlt_hpc.data.rows import first_line


@dataclass(frozen=True)
class RowFacts:
    """What a curriculum is told of a row; ``difficulty`` is the row's own word for it, None where it has none."""

    index: int
    """Its place in the list, which is what the curriculum answers with."""
    source: str
    ability: str
    difficulty: Any


Curriculum = Callable[[int, Sequence[RowFacts]], Sequence[int]]
"""(epoch, rows) -> indices into ``rows``, as many as there are rows: one may stand several times, or not at all."""


def load_curriculum(spec: str) -> Curriculum:
    """The function that ``path.py:name`` names.

    Raises:
        ConfigError: there is none, or its file fails.
    """
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ConfigError(f"data.curriculum = {spec!r} is not of the form path.py:name")
    if not Path(path).is_file():
        raise ConfigError(f"data.curriculum = {spec!r}: there is no file {path}; give path.py:name")
    module_spec = importlib.util.spec_from_file_location("tlt_user_curriculum", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"data.curriculum = {spec!r}: {path} is no Python file; give path.py:name")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"data.curriculum = {spec!r}: {path} fails ({_said(error)}); mend it") from error
    function = vars(module).get(name)
    if not callable(function):
        raise ConfigError(f"data.curriculum = {spec!r}: {path} has no function {name!r}; name one that it has")
    return function  # type: ignore[no-any-return]


class CurriculumOrder:
    """The order of each epoch by a curriculum, checked."""

    def __init__(self, spec: str, facts: Sequence[RowFacts]) -> None:
        """Ask for the first epoch twice.

        Raises:
            ConfigError: as ``load_curriculum`` and ``__call__``, or the two differ.
        """
        self._spec, self._facts, self._function = spec, tuple(facts), load_curriculum(spec)
        if not np.array_equal(self(0), self(0)):
            raise ConfigError(
                f"data.curriculum = {spec!r} gives two orders for epoch 0; it must depend on its arguments alone: "
                "seed its random numbers with the epoch"
            )

    def __call__(self, epoch: int) -> Indices:
        """The rows [N] of an epoch.

        Raises:
            ConfigError: the function fails, or its answer is no list of N valid indices.
        """
        try:
            answer = self._function(epoch, self._facts)
        except (Exception, SystemExit) as error:
            raise self._refusal(f"fails in epoch {epoch} ({_said(error)})") from error
        return self._checked(answer, epoch)

    def _checked(self, answer: object, epoch: int) -> Indices:
        count = len(self._facts)
        try:
            order = np.asarray(answer)
        except ValueError:
            raise self._refusal(f"gives no list of indices for epoch {epoch}") from None
        if order.ndim != 1 or not np.issubdtype(order.dtype, np.integer):
            what = f"{type(answer).__name__}{f' of {order.dtype}' if order.ndim == 1 else ''}"
            raise self._refusal(f"gives no list of indices for epoch {epoch} but {what}")
        if len(order) != count:
            raise self._refusal(f"gives {len(order)} indices for epoch {epoch}; there are {count} rows")
        if order.min() < 0 or order.max() >= count:
            wrong = next(int(i) for i in order if not 0 <= i < count)
            raise self._refusal(f"gives the index {wrong} for epoch {epoch}; rows are 0 to {count - 1}")
        return order.astype(np.int64)

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"data.curriculum = {self._spec!r} {what}; it must return as many indices as there are rows")


def _said(error: Exception | SystemExit) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
