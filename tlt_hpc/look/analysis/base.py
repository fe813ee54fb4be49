"""Base class of the analyses of a run: data, a verdict in words, and both as plain JSON."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.words import FIRST_STEP


@dataclass(frozen=True)
class Analysis(ABC):
    """The result of one analysis; ``problems`` lists what could not be read and was left out."""

    run: str
    problems: tuple[str, ...]

    @property
    @abstractmethod
    def verdict(self) -> str:
        """The result in one paragraph."""

    @property
    def has_data(self) -> bool:
        """Whether there is anything to draw."""
        return True

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict in JSON's types; NaN and infinity become null."""
        tree = plain(self)
        return {"run": tree.pop("run"), "verdict": self.verdict, **tree}


@dataclass(frozen=True)
class StepAnalysis(Analysis):
    """The result of an analysis by step, [S]; steps are numbered from 1, as users count them."""

    steps: NDArray[np.int64]

    @property
    def has_data(self) -> bool:
        return len(self.steps) > 0


def numbered(steps: Iterable[int]) -> NDArray[np.int64]:
    """The numbers from 1 of steps that a run log counts from 0: all results of analyses have these."""
    return np.array([step + FIRST_STEP for step in steps], np.int64)


def plain(value: Any) -> Any:
    """Turn arrays into lists, dataclasses into dictionaries, and NaN and infinity into None."""
    if is_dataclass(value) and not isinstance(value, type):
        # dataclasses.asdict would copy every array
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
