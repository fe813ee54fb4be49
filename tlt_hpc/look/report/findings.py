"""Everything that a report is made of, read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlt_hpc.common.errors import UserError
from tlt_hpc.look.analysis.acceptance import ACCEPTANCE, AcceptLengths
from tlt_hpc.look.analysis.comparison import RunComparison, analyse_comparison
from tlt_hpc.look.analysis.energy_use import EnergyUse, analyse_energy
from tlt_hpc.look.analysis.learning import Learning, analyse_learning
from tlt_hpc.look.analysis.lengths import LENGTHS, ResponseLengths
from tlt_hpc.look.analysis.survey import take_all
from tlt_hpc.look.analysis.throughput import THROUGHPUT, Throughput
from tlt_hpc.look.analysis.timeline import Timeline, analyse_timeline
from tlt_hpc.look.run_log import RunLog

_MAX_TRIED = 5
"""Number of steps that are tried for the timeline."""


@dataclass(frozen=True)
class RunFindings:
    """A run and the results of all analyses. ``comparison``: with ``other``, a run of the same seed."""

    log: RunLog
    learning: Learning
    lengths: ResponseLengths
    acceptance: AcceptLengths
    throughput: Throughput
    energy: EnergyUse
    timeline: Timeline | None
    """None if no step is logged."""
    other: RunLog | None
    comparison: RunComparison | None

    @property
    def is_begun(self) -> bool:
        """Whether any step is committed."""
        return len(self.learning.steps) > 0

    @property
    def num_ranks(self) -> int:
        """The largest number of ranks of a step."""
        return int(self.throughput.num_ranks.max(initial=0))

    @property
    def mode(self) -> str:
        """``plain``, ``ngram`` or ``full``; empty if unknown."""
        return str(self.log.setting("speculation", "mode") or "")

    @property
    def is_guarded(self) -> bool:
        """Whether the tie guard was on, so that the text cannot depend on speculation."""
        guard, dtype = self.log.setting("rollout", "tie_guard"), self.log.setting("model", "dtype")
        return bool(guard != "off" and dtype == "float32")  # version 0.1 had a key that switched it off

    def to_json(self) -> dict[str, Any]:
        """The JSON of each analysis, by name."""
        names = ("learning", "lengths", "acceptance", "throughput", "energy", "timeline", "comparison")
        return {name: getattr(self, name).to_json() for name in names if getattr(self, name) is not None}


def find(path: Path, against: Path | None = None, step: int | None = None, last: int | None = None) -> RunFindings:
    """Read a run and the one to compare it with.

    Raises:
        UserError: there is no such run or step.
    """
    log = RunLog(path, last)
    other = None if against is None else RunLog(against)
    if other is not None and other.folder.path.resolve() == log.folder.path.resolve():
        raise UserError(f"--against {against}: that is the run itself; give another, such as one without speculation")
    lengths, acceptance, throughput = take_all(log, (LENGTHS, ACCEPTANCE, THROUGHPUT))
    return RunFindings(
        log=log,
        learning=analyse_learning(log),
        lengths=lengths,
        acceptance=acceptance,
        throughput=throughput,
        energy=analyse_energy(log),
        timeline=_timeline(log, throughput, step),
        other=other,
        comparison=None if other is None else analyse_comparison([other, log]),
    )


def _timeline(log: RunLog, throughput: Throughput, step: int | None) -> Timeline | None:
    if step is not None:
        return analyse_timeline(log, step)
    for each in typical_steps(throughput)[:_MAX_TRIED]:
        try:
            return analyse_timeline(log, each)
        except UserError as error:  # damaged logs: try another step
            log.note(str(error))
    return None


def typical_steps(found: Throughput) -> list[int]:
    """Steps ordered by how close their idle share is to the run's, later steps first among equals.

    Steps without the logs of all ranks come last.
    """
    whole = np.maximum(found.rollout_seconds * found.num_ranks, 1e-9)
    chosen = found.is_whole if found.is_whole.any() else np.ones(len(whole), bool)
    mean = found.idle_rank_seconds[chosen].sum() / max(whole[chosen].sum(), 1e-9)
    distance = np.where(chosen, np.abs(found.idle_rank_seconds / whole - mean), np.inf)
    return [int(found.steps[i]) for i in np.lexsort((-found.steps, distance.round(9)))]
