"""Base class of the analyses of a run: data, a verdict in words, and both as plain JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.look.series import to_json_types


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
        """True if there is anything to draw."""
        return True

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict in JSON's types; NaN and infinity become null."""
        tree = to_json_types(self)
        return {"run": tree.pop("run"), "verdict": self.verdict, **tree}


@dataclass(frozen=True)
class StepAnalysis(Analysis):
    """The result of an analysis by step, [S]; steps are numbered from 1, as users count them."""

    steps: NDArray[np.int64]

    @property
    def has_data(self) -> bool:
        """True if there is any step."""
        return len(self.steps) > 0
