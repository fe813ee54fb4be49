"""Where the training of a warm-up stands: counts and the curve, when it is over, and both as JSON and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tlt_hpc.config import WarmupSection
from tlt_hpc.storage.records import CurvePoint


@dataclass(frozen=True)
class Progress:
    """After ``updates`` updates; the same on every rank, so all decide alike."""

    updates: int = 0
    tokens: int = 0
    """Response tokens trained on, repeats counted."""
    seconds: float = 0.0
    """Rank 0's wall-clock seconds of training, validations included, over all starts."""
    losses: tuple[float, ...] = ()
    """Of the updates since the last validation."""
    curve: tuple[CurvePoint, ...] = ()
    is_finished: bool = False

    @property
    def mean_loss(self) -> float | None:
        """Of the updates since the last validation; None where there was none."""
        return sum(self.losses) / len(self.losses) if self.losses else None

    @property
    def best(self) -> CurvePoint | None:
        """The first of the highest accept lengths."""
        return max(self.curve, key=lambda point: point.accept_length, default=None)

    @property
    def num_since_best(self) -> int:
        """Validations after the best one."""
        return len(self.curve) - 1 - self.curve.index(self.best) if self.best else 0

    def learned(self, loss: float, num_tokens: int, seconds: float) -> Progress:
        """One update more."""
        return replace(
            self,
            updates=self.updates + 1,
            tokens=self.tokens + num_tokens,
            seconds=self.seconds + seconds,
            losses=(*self.losses, loss),
        )

    def validated(self, accept_length: float, seconds: float) -> Progress:
        """One point of the curve more."""
        seconds += self.seconds
        point = CurvePoint(self.updates, self.tokens, seconds, self.mean_loss, accept_length)
        return replace(self, seconds=seconds, losses=(), curve=(*self.curve, point))


def share_done(progress: Progress, limits: WarmupSection) -> float:
    """The share of the updates that has been made, 0 to 1."""
    return min(1.0, progress.updates / limits.updates)


def is_over(progress: Progress, limits: WarmupSection) -> bool:
    """Whether the training ends here: all updates are made, or there was no new best for too long."""
    return progress.updates >= limits.updates or progress.num_since_best >= limits.patience


def validation_is_due(progress: Progress, limits: WarmupSection, is_trained: bool) -> bool:
    """Whether the drafter is to be judged before the next update; at the start only where it has learned already."""
    last = progress.curve[-1].updates if progress.curve else -1
    if progress.updates == 0:
        return is_trained and last < 0
    return last < progress.updates and (progress.updates % limits.validate_every == 0 or is_over(progress, limits))


def end_reason(progress: Progress, limits: WarmupSection) -> str:
    """Why it ended, in words."""
    if progress.updates >= limits.updates:
        return f"warmup.updates = {limits.updates}"
    return f"no new best in {limits.patience} validations"


def to_json(progress: Progress) -> dict[str, Any]:
    """What ``from_json`` reads back to an equal one."""
    return asdict(progress)


def from_json(tree: Mapping[str, Any]) -> Progress:
    """The inverse of ``to_json``."""
    curve = tuple(CurvePoint(**point) for point in tree["curve"])
    return Progress(**{**tree, "losses": tuple(tree["losses"]), "curve": curve})
