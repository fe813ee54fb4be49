"""The progress of a warm-up's training: counts, the curve, and when it is over. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlt_hpc.config import WarmupSection
from tlt_hpc.storage.records import CurvePoint


@dataclass(frozen=True)
class Progress:
    """The state after ``updates`` updates; the same on every rank, so all decide alike. Saved as JSON by its fields."""

    updates: int = 0
    tokens: int = 0
    """Response tokens trained on, repeats counted."""
    seconds: float = 0.0
    """Rank 0's wall-clock seconds of training, validations included, over all starts."""
    losses: tuple[float, ...] = ()
    """Mean losses of the updates since the last validation."""
    curve: tuple[CurvePoint, ...] = ()
    is_finished: bool = False
    documents: int = 0
    """How many responses are trained on; 0 in files of earlier versions."""

    @property
    def best(self) -> CurvePoint | None:
        """The point of the highest accept length, the first of equal ones; None before any validation."""
        return max(self.curve, key=lambda point: point.accept_length, default=None)

    @property
    def num_since_best(self) -> int:
        """The number of validations after the best one."""
        return len(self.curve) - 1 - self.curve.index(self.best) if self.best else 0

    def after_update(self, loss: float, num_tokens: int, seconds: float) -> Progress:
        """Return the progress after one update more, of ``num_tokens`` response tokens and so many seconds."""
        tokens, losses = self.tokens + num_tokens, (*self.losses, loss)
        return replace(self, updates=self.updates + 1, tokens=tokens, seconds=self.seconds + seconds, losses=losses)

    def after_validation(self, accept_length: float, seconds: float) -> Progress:
        """Return the progress with one point of the curve more."""
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        point = CurvePoint(self.updates, self.tokens, self.seconds + seconds, loss, accept_length)
        return replace(self, seconds=point.seconds, losses=(), curve=(*self.curve, point))

    def share_done(self, limits: WarmupSection) -> float:
        """Return the share of the updates that has been made, 0 to 1."""
        return min(1.0, self.updates / limits.updates)

    def end_reason(self, limits: WarmupSection) -> str:
        """Return why the training ends here: all updates made, or no new best for too long; empty if it does not."""
        if self.updates >= limits.updates:
            return f"warmup.updates = {limits.updates}"
        return f"no new best in {limits.patience} validations" if self.num_since_best >= limits.patience else ""

    def validation_is_due(self, limits: WarmupSection, is_trained: bool) -> bool:
        """Return True if the drafter is to be validated before the next update.

        Args:
            is_trained: the drafter has learned something, without which it is not validated at the start.
        """
        last = self.curve[-1].updates if self.curve else -1
        if self.updates == 0:
            return is_trained and last < 0
        is_time = self.updates % limits.validation_interval == 0 or bool(self.end_reason(limits))
        return last < self.updates and is_time
