"""The ways to train a drafter that the arms of an ablation compare with training in the tail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tlt_hpc.config import UserError
from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.drafting.tail import TailTraining
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_summary
from tlt_hpc.studies.ablate.first_rollouts import FirstRollouts


class SerialTraining(TailTraining):
    """All ranks take ``micro_steps`` micro-steps after every rollout, while nothing is generated.

    Before the update, so that features and head are of the same weights and the merge hides behind the update, as in
    the tail: the two differ only in whose seconds they take.
    """

    in_tail = False

    def __init__(self, micro_steps: int = 20) -> None:
        self._micro_steps = micro_steps

    def after_rollout(self, spot: SpotTrainer, step: int, rank: int, should_stop: Callable[[], bool]) -> None:
        """Take the step's micro-steps, or fewer where a stop is requested."""
        for _ in range(self.num_micro_steps(step, rank)):
            if not spot.micro_step(should_stop):
                return

    def num_micro_steps(self, step: int, rank: int) -> int:
        """Micro-steps of a rank after the rollout of ``step``."""
        return self._micro_steps


class ControlTraining(SerialTraining):
    """As many micro-steps as another run took by its log, by step and rank, all on the first step's responses."""

    cache = FirstRollouts

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run = RunFolder(run)

    def num_micro_steps(self, step: int, rank: int) -> int:
        """Micro-steps of a rank after the rollout of ``step``.

        Raises:
            UserError: the other run has no log of the step and rank.
        """
        path = self._run.rollout_log(step, rank)
        if not path.is_file():
            raise UserError(f"{path} does not exist; arm 'control' repeats the micro-steps that arm 'tail' logged")
        return len(read_summary(path).micro_steps)
