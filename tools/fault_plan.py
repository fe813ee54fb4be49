"""Which fault strikes a run as the how-manieth, by a seed: every kind in each cycle. For ``faults.py``."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fault_rank import OF_RANK_0, PLACES

OTHERS = ("kill", "kill", "kill", "limit", "limit", "cancel", "disk", "disk")
"""Of a cycle, beside one kill at every place."""
CYCLE = len(PLACES) + len(OTHERS)
STARTING_SECONDS = 20.0
"""From its ranks' first instruction until a run is well under way."""
MOST_ROOM = 1_500_000
"""Bytes that a disk has left, at most, that is to run full: less than a checkpoint."""


@dataclass(frozen=True)
class Variant:
    """A run that is struck, and its counterpart that is left alone."""

    ranks: int
    settings: tuple[str, ...]


VARIANTS = {
    "plain": Variant(2, ()),
    "refills": Variant(2, ("algorithm.max_refills=2",)),
    "replicas": Variant(4, ("rollout.tensor_parallel=2",)),
}
_REFILLS, _REPLICAS = (3, 8, 13, 18), (6, 16)
"""Places in a cycle whose faults strike a run of these variants; all others strike the plain one."""


@dataclass(frozen=True)
class Fault:
    """What happens to one start of the run."""

    kind: str
    """place, kill, limit (SIGUSR2 to all ranks), cancel (SIGTERM to all, SIGKILL ten seconds later) or disk."""
    detail: str
    """Of a place: where, which rank, at the how-manieth coming. Of a disk: the bytes it has left. Else the rank."""
    after_steps: int
    """Steps to be committed before it strikes; a place strikes when it is come to, a disk when it is full."""
    seconds: float
    """After those; without any, after the ranks are there."""

    @property
    def rank(self) -> int | None:
        """The rank that is killed; None where not one alone is."""
        if self.kind == "place":
            return int(self.detail.split(":")[1])
        return int(self.detail) if self.kind == "kill" else None

    @property
    def name(self) -> str:
        """The place, or the kind."""
        return self.detail.partition(":")[0] if self.kind == "place" else self.kind


def variant_of(number: int) -> str:
    """Which run the fault of this number strikes."""
    place = number % CYCLE
    return "refills" if place in _REFILLS else "replicas" if place in _REPLICAS else "plain"


def draw(seed: int, number: int, attempt: int = 0) -> Fault:
    """The fault of this number; another of the same kind, sooner to come, where it came after the run's end."""
    cycle, place = divmod(number, CYCLE)
    kinds = [*sorted(PLACES), *OTHERS]
    random.Random(f"{seed} {cycle}").shuffle(kinds)
    name, source = kinds[place], random.Random(f"{seed} {number} {attempt}")
    rank, steps = source.randrange(VARIANTS[variant_of(number)].ranks), source.randrange(3)
    seconds = source.uniform(0, 3 if steps else STARTING_SECONDS)
    if name in PLACES:
        # before and after the function in turn, and sooner where it did not come often enough
        most = max(1, (2 if name == "replay" else 6) - 3 * attempt)
        coming = 2 * source.randrange(most) + (cycle + attempt) % 2
        return Fault("place", f"{name}:{0 if name in OF_RANK_0 else rank}:{coming}", 0, 0.0)
    if name == "disk":
        return Fault("disk", str(source.randrange(MOST_ROOM)), 0, 0.0)
    return Fault(name, str(rank), steps, seconds / (1 + attempt))
