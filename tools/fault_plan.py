"""Which fault interrupts which start of a run, by a seed: every kind once or more in each cycle. For ``faults.py``."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fault_rank import OF_RANK_0, PLACES

OTHERS = ("kill", "kill", "kill", "limit", "limit", "cancel", "disk", "disk")
"""In a cycle, beside one kill at every place."""
CYCLE = len(PLACES) + len(OTHERS)
STARTING_SECONDS = 20.0
"""From the start of the ranks until the run is well under way."""
MAX_FREE_BYTES = 1_500_000
"""Free bytes, at most, of a disk that is to run full: less than a checkpoint."""
RANKS = {"plain": 2, "refills": 2, "replicas": 4}
VARIANTS = {"plain": (), "refills": ("algorithm.max_refills=2",), "replicas": ("rollout.tensor_parallel=2",)}
"""The runs that are interrupted: their ranks and settings."""
_REFILLS, _REPLICAS = (3, 8, 13, 18), (6, 16)
"""Places in a cycle whose faults are for these variants; all others are for the plain one."""


@dataclass(frozen=True)
class Fault:
    """What happens to one start of a run."""

    kind: str
    """place, kill, limit (SIGUSR2 to all ranks), cancel (SIGTERM to all, SIGKILL ten seconds later) or disk."""
    detail: str
    """place: PLACE:RANK:COUNT as in ``fault_rank.py``; disk: its free bytes; else the rank."""
    after_steps: int = 0
    """Steps to be committed before it; a place or a full disk needs no such time."""
    seconds: float = 0.0
    """To wait after that."""

    @property
    def rank(self) -> int | None:
        """The rank that is killed; None if not exactly one is."""
        if self.kind == "place":
            return int(self.detail.split(":")[1])
        return int(self.detail) if self.kind == "kill" else None

    @property
    def name(self) -> str:
        """The place, or the kind."""
        return self.detail.partition(":")[0] if self.kind == "place" else self.kind


def variant_of(number: int) -> str:
    """Return which run the fault of this number is for."""
    place = number % CYCLE
    return "refills" if place in _REFILLS else "replicas" if place in _REPLICAS else "plain"


def draw(seed: int, number: int) -> Fault:
    """Return the fault of this number."""
    cycle, place = divmod(number, CYCLE)
    kinds = [*sorted(PLACES), *OTHERS]
    random.Random(f"{seed} {cycle}").shuffle(kinds)
    name, source = kinds[place], random.Random(f"{seed} {number} 0")
    rank, steps = source.randrange(RANKS[variant_of(number)]), source.randrange(3)
    seconds = source.uniform(0, 3 if steps else STARTING_SECONDS)
    if name in PLACES:
        count = (
            2 * source.randrange(2 if name == "replay" else 6) + cycle % 2
        )  # even: before the function, odd: after it
        return Fault("place", f"{name}:{0 if name in OF_RANK_0 else rank}:{count}")
    if name == "disk":
        return Fault("disk", str(source.randrange(MAX_FREE_BYTES)))
    return Fault(name, str(rank), steps, seconds)
