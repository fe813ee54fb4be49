"""Estimates from a speculative run's own log how long plain decoding of its responses would have taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tlt_hpc.plan.simulate.costs import Floats, TokenCosts
from tlt_hpc.plan.simulate.measured import MANY_ROUNDS, has_plain, plain_seconds, read_rounds, setting_of
from tlt_hpc.plan.simulate.run_log import RecordedRun, read_run
from tlt_hpc.plan.simulate.step import StepPhases, simulate, walk
from tlt_hpc.rollout.strategy import OFF

TRUSTED_SHARE = 0.5
"""Least share of an estimate's seconds at batches where the run itself decoded plainly, for it to be trusted.

Six runs with n-grams alone, which are above it, were within 11 % of a plain run of the same tokens; six with a drafter,
which are below it, within 26 % (docs/simulator.md).
"""


@dataclass(frozen=True)
class PlainEstimate:
    """Seconds [T] by step, as the run took them and as plain decoding of the same responses would have taken.

    ``plain_step_seconds`` keep the rest of the step as it was. ``measured_share`` is the share of the plain rollouts'
    rank-seconds at batches where the run itself decoded plainly often enough; ``basis`` says so in words.
    """

    steps: tuple[int, ...]
    rollout_seconds: Floats
    plain_rollout_seconds: Floats
    step_seconds: Floats
    plain_step_seconds: Floats
    measured_share: float
    num_plain_rounds: int
    basis: str

    @property
    def rollout_gain(self) -> float:
        """Plain rollouts over the run's own."""
        return float(self.plain_rollout_seconds.sum() / self.rollout_seconds.sum())

    @property
    def step_gain(self) -> float:
        """The same of whole steps."""
        return float(self.plain_step_seconds.sum() / self.step_seconds.sum())

    @property
    def is_trusted(self) -> bool:
        """Whether most of the estimate rests on the run's own plain rounds."""
        return self.measured_share >= TRUSTED_SHARE


def estimate_plain(path: Path) -> PlainEstimate:
    """Estimate how long a run's rollouts would have taken without speculation, on the same machine at the run's pace.

    Raises:
        ValueError: no run, a run that decoded plainly anyway, one of replicas, or one without a plain round.
    """
    return estimate_of(read_run(path), path)


def estimate_of(log: RecordedRun, path: Path) -> PlainEstimate:
    """As ``estimate_plain``, for a log that was read from ``path``.

    Raises:
        ValueError: as ``estimate_plain``.
    """
    if log.config.speculation.mode == "plain":
        raise ValueError(f"{path} has decoded plainly itself (speculation.mode); give a run that speculates")
    return estimate(log)


def estimate(log: RecordedRun) -> PlainEstimate:
    """As ``estimate_plain``, for any log that was read.

    Raises:
        ValueError: the run never decoded plainly.
    """
    rounds, read_seconds = read_rounds(log)
    setting = replace(setting_of(log), stop_seconds=0.0)
    most = setting.max_live
    token = plain_seconds(log, rounds, most)
    plain = simulate(log.lengths, _plain(token, read_seconds), setting, StepPhases()).rollout_seconds + log.stop_seconds
    share = _share(log, token, has_plain(rounds, most))
    num_plain = int(np.count_nonzero(rounds.are(OFF.name)))
    return PlainEstimate(
        steps=log.steps,
        rollout_seconds=log.rollout_seconds,
        plain_rollout_seconds=plain,
        step_seconds=log.step_seconds,
        plain_step_seconds=log.step_seconds - log.rollout_seconds + plain,
        measured_share=share,
        num_plain_rounds=num_plain,
        basis=_basis(num_plain, share, log.profile is not None),
    )


def _share(log: RecordedRun, token: Floats, is_measured: np.ndarray) -> float:
    """The share of all rank-seconds of plain decoding at batches where it was measured."""
    rollouts = log.lengths.reshape(-1, log.lengths.shape[2])

    def rank_seconds(of: Floats) -> float:
        return float(walk(rollouts, _plain(of), len(of)).seconds.sum())

    return rank_seconds(np.where(is_measured, token, 0.0)) / rank_seconds(token)


def _plain(token: Floats, read_seconds: float = 0.0) -> TokenCosts:
    return TokenCosts((OFF.name,), token[None, :], np.zeros((1, len(token))), read_seconds)


def _basis(num_plain: int, share: float, has_profile: bool) -> str:
    shape = "as its cost profile has them" if has_profile else "on a line through its plain rounds"
    rest = f", the rest {shape}" if share < 1 else ""
    own = f"{num_plain:,} plain round{'' if num_plain == 1 else 's'} of the run itself"
    return f"{own}: {share:.0%} of the plain seconds at batches where it made {MANY_ROUNDS} or more{rest}"
