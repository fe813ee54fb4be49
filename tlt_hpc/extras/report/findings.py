"""Everything that a report is made of, read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tlt_hpc.common.errors import UserError
from tlt_hpc.extras.report.analysis.acceptance import ACCEPTANCE, AcceptLengths
from tlt_hpc.extras.report.analysis.comparison import RunComparison, analyse_comparison
from tlt_hpc.extras.report.analysis.learning import Learning, analyse_learning
from tlt_hpc.extras.report.analysis.lengths import LENGTHS, ResponseLengths
from tlt_hpc.extras.report.analysis.survey import run_surveys
from tlt_hpc.extras.report.analysis.throughput import THROUGHPUT, Throughput
from tlt_hpc.extras.report.analysis.timeline import Timeline, analyse_timeline
from tlt_hpc.look.run_log import RunLog


@dataclass(frozen=True)
class RunFindings:
    """A run and the results of all analyses. ``comparison``: with ``other``, a run of the same seed."""

    log: RunLog
    learning: Learning
    lengths: ResponseLengths
    acceptance: AcceptLengths
    throughput: Throughput
    timeline: Timeline | None
    """None if no step is logged."""
    other: RunLog | None
    comparison: RunComparison | None

    @property
    def num_ranks(self) -> int:
        """The largest number of ranks of a step."""
        return int(self.throughput.num_ranks.max(initial=0))

    @property
    def is_exact(self) -> bool:
        """True if the text is promised not to depend on speculation, as ``Config.is_exact`` has it."""
        dtype, invariant, device = (self.log.setting("model", name) for name in ("dtype", "batch_invariant", "device"))
        return dtype == "float32" or invariant is True or device == "cpu"


def read_findings(path: Path, against: Path | None = None, last: int | None = None) -> RunFindings:
    """Read a run and the one to compare it with.

    Raises:
        UserError: there is no such run.
    """
    log = RunLog(path, last)
    other = None if against is None else RunLog(against)
    if other is not None and other.folder.path.resolve() == log.folder.path.resolve():
        raise UserError(f"--against {against}: that is the run itself; give another, such as one without speculation")
    lengths, acceptance, throughput = run_surveys(log, (LENGTHS, ACCEPTANCE, THROUGHPUT))
    drawn = typical_step(throughput)
    return RunFindings(
        log=log,
        learning=analyse_learning(log),
        lengths=lengths,
        acceptance=acceptance,
        throughput=throughput,
        timeline=None if drawn is None else analyse_timeline(log, drawn),
        other=other,
        comparison=None if other is None else analyse_comparison([other, log]),
    )


def typical_step(found: Throughput) -> int | None:
    """The step whose idle share is the nearest to the run's, a later one among equals; None without logs.

    Steps without the logs of all ranks count only if there is no other.
    """
    if not found.has_data:
        return None
    whole = np.maximum(found.rollout_seconds * found.num_ranks, 1e-9)
    chosen = found.is_whole if found.is_whole.any() else np.ones(len(whole), bool)
    mean = found.idle_rank_seconds[chosen].sum() / whole[chosen].sum()
    distance = np.where(chosen, np.abs(found.idle_rank_seconds / whole - mean), np.inf).round(9)
    return int(found.steps[distance == distance.min()][-1])
