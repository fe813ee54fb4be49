"""All that a report is made of, read once. Decides nothing and words nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlt_hpc.common.errors import UserError
from tlt_hpc.look.analysis.acceptance import ACCEPTANCE, Acceptance
from tlt_hpc.look.analysis.comparison import Comparison, analyse_comparison
from tlt_hpc.look.analysis.energy import Energy, analyse_energy
from tlt_hpc.look.analysis.environment import Environments, analyse_environment
from tlt_hpc.look.analysis.learning import Learning, analyse_learning
from tlt_hpc.look.analysis.lengths import LENGTHS, Lengths
from tlt_hpc.look.analysis.result import count
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.survey import take_all
from tlt_hpc.look.analysis.throughput import THROUGHPUT, Throughput
from tlt_hpc.look.analysis.timeline import Timeline, analyse_timeline
from tlt_hpc.look.report.rounds import ROUNDS
from tlt_hpc.plan.simulate.rank_step import RankStep
from tlt_hpc.storage.finished_word import FinishedWord, read_finished

_MOST_TRIED = 5
"""Steps of which a timeline is tried."""


@dataclass(frozen=True)
class Findings:
    """A run, and what the analyses found in it; ``comparison`` holds it against ``other``, a run of the same seed."""

    log: RunLog
    learning: Learning
    lengths: Lengths
    acceptance: Acceptance
    throughput: Throughput
    energy: Energy
    environments: Environments
    timeline: Timeline | None
    """None where no step is logged."""
    other: RunLog | None
    other_final: FinishedWord | None
    comparison: Comparison | None
    num_lines_before: int
    """Committed steps that are not looked at."""
    rounds: dict[int, tuple[RankStep, ...]]
    """By step, of a run that speculates and is not held against another: what its gain is estimated from."""
    final: FinishedWord | None
    """None while a run has not finished."""

    @property
    def is_begun(self) -> bool:
        """Whether any step is committed."""
        return len(self.learning.steps) > 0

    @property
    def num_ranks(self) -> int:
        """The most that a step had."""
        return int(self.throughput.num_ranks.max(initial=0))

    @property
    def ranks_in_words(self) -> str:
        """``2 ranks``; of a run that went on with another number, ``2 to 4 ranks``."""
        fewest = int(self.throughput.num_ranks.min(initial=self.num_ranks))
        return count(self.num_ranks, "rank") if fewest == self.num_ranks else f"{fewest} to {self.num_ranks} ranks"

    @property
    def clock_seconds(self) -> float | None:
        """From the first step's start to the last's end; None where either is not logged, or ``is_set_back``."""
        steps, logged = self.learning.steps, self.throughput.steps
        if len(steps) == 0 or len(logged) == 0 or (steps[0], steps[-1]) != (logged[0], logged[-1]):
            return None
        return None if self.is_set_back else float(self.throughput.ended[-1] - self.throughput.began[0])

    @property
    def is_set_back(self) -> bool:
        """Whether the clock went back between two steps, so that it does not tell what lies between them."""
        began, ended = self.throughput.began, self.throughput.ended
        return not bool(np.all(ended >= began) and np.all(began[1:] >= began[:-1]))

    @property
    def idle(self) -> tuple[float, float]:
        """Idle rank-seconds, and all rank-seconds of the rollouts, of the steps with the logs of all ranks."""
        told = self.throughput.is_whole
        whole = (self.throughput.rollout_seconds * self.throughput.num_ranks)[told].sum()
        return float(self.throughput.idle_rank_seconds[told].sum()), float(whole)

    @property
    def harvested(self) -> float:
        """Rank-seconds of the same steps."""
        return float(self.throughput.harvested_rank_seconds[self.throughput.is_whole].sum())

    @property
    def mode(self) -> str:
        """``plain``, ``ngram``, ``full``, or nothing where the configuration does not tell."""
        return str(self.log.setting("speculation", "mode") or "")

    @property
    def is_guarded(self) -> bool:
        """Whether near-ties were decided the same way on every path, so that the text cannot depend on speculation."""
        guard, dtype = self.log.setting("rollout", "tie_guard"), self.log.setting("model", "dtype")
        return bool(guard != "off" and dtype == "float32")  # version 0.1 had a key that switched it off

    def mean(self, metric: str) -> float:
        """Of a metric over the steps that tell it; NaN where none does."""
        values = self.log.metric(metric)
        return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Every analysis as its own JSON."""
        parts = {
            "learning": self.learning,
            "lengths": self.lengths,
            "acceptance": self.acceptance,
            "throughput": self.throughput,
            "energy": self.energy,
            "environments": self.environments,
            "timeline": self.timeline,
            "comparison": self.comparison,
        }
        return {name: part.to_json() for name, part in parts.items() if part is not None}


def find(path: Path, against: Path | None = None, step: int | None = None, last: int | None = None) -> Findings:
    """Read a run, and one to hold it against.

    Raises:
        UserError: there is no such run or step.
    """
    log = RunLog(path, last)
    other = None if against is None else RunLog(against)
    if other is not None and other.folder.path.resolve() == log.folder.path.resolve():
        raise UserError(f"--against {against}: that is the run itself; give another, such as one without speculation")
    surveys = (LENGTHS, ACCEPTANCE, THROUGHPUT)
    is_estimated = other is None and log.setting("speculation", "mode") not in (None, "plain")
    lengths, acceptance, throughput, *more = take_all(log, (*surveys, ROUNDS) if is_estimated else surveys)
    return Findings(
        log=log,
        learning=analyse_learning(log),
        lengths=lengths,
        acceptance=acceptance,
        throughput=throughput,
        energy=analyse_energy(log),
        environments=analyse_environment(log),
        timeline=_timeline(log, throughput, step),
        num_lines_before=0 if last is None else len(RunLog(path).lines) - len(log.lines),
        other=other,
        other_final=None if other is None else read_final(other),
        comparison=None if other is None else analyse_comparison([other, log]),
        rounds=more[0] if more else {},
        final=read_final(log),
    )


def _timeline(log: RunLog, throughput: Throughput, step: int | None) -> Timeline | None:
    if step is not None:
        return analyse_timeline(log, step)
    for each in typical_steps(throughput)[:_MOST_TRIED]:
        try:
            return analyse_timeline(log, each)
        except UserError as error:  # damaged logs: another step's will do
            log.note(str(error))
    return None


def typical_steps(found: Throughput) -> list[int]:
    """Steps by how near their share of waiting is to the run's; those with the logs of all ranks first, like ones last
    to first."""
    if not len(found.steps):
        return []
    whole = np.maximum(found.rollout_seconds * found.num_ranks, 1e-9)
    shares = found.idle_rank_seconds / whole
    told = found.is_whole if found.is_whole.any() else np.ones(len(shares), bool)
    mean = found.idle_rank_seconds[told].sum() / whole[told].sum()
    distance = np.where(told, np.abs(shares - mean), np.inf)
    return [int(found.steps[i]) for i in np.lexsort((-found.steps, distance.round(9)))]


def read_final(log: RunLog) -> FinishedWord | None:
    """What a run's ``finished.json`` says; None while it has not finished, or where the file is damaged."""
    try:
        return read_finished(log.folder.finished)
    except UserError as error:
        log.note(str(error))
        return None
