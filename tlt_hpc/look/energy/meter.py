"""Joules of a step and of its rollout, on this rank; which counters are read is agreed on by all ranks. Knows no MPI.

A kind of counter that one node or GPU lacks is told by none: a part of a run would pass for the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tlt_hpc.look.energy.counter import Counter, NoCounterError
from tlt_hpc.look.energy.nvml import Nvml
from tlt_hpc.look.energy.rapl import Rapl

GPU, CPU = "gpu", "cpu"
PREFIX = "energy/"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reach:
    """What a rank could read, for all ranks to know."""

    hostname: str
    gpu: str = ""
    """UUID of the GPU that it uses; empty without one."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Kind of counter -> why it cannot be read."""


class Counters:
    """A rank's counters: of its GPU, if it has one, and for the first rank of a node of the node's processors."""

    def __init__(self, hostname: str, gpu: str, is_first_of_node: bool) -> None:
        self.open: dict[str, Counter] = {}
        lacking: dict[str, str] = {}
        kinds: dict[str, Callable[[], Counter]] = {}
        if gpu:
            kinds[GPU] = lambda: Nvml(gpu)
        if is_first_of_node:
            kinds[CPU] = Rapl
        for kind, make in kinds.items():
            try:
                self.open[kind] = make()
            except NoCounterError as error:
                lacking[kind] = str(error)
        self.reach = Reach(hostname, gpu, lacking)

    def close(self) -> None:
        """Close those that are open."""
        while self.open:
            self.open.popitem()[1].close()


def told_kinds(ranks: Sequence[Reach]) -> dict[str, str]:
    """Kind of counter -> empty where all that have one can read theirs, else the first's reason; the same on all ranks.

    Of GPUs, only where every rank uses one.
    """
    kinds = (GPU, CPU) if all(rank.gpu for rank in ranks) else (CPU,)
    reasons = {kind: [rank for rank in ranks if kind in rank.lacking] for kind in kinds}
    return {kind: f"{lack[0].hostname}: {lack[0].lacking[kind]}" if lack else "" for kind, lack in reasons.items()}


class Meter:
    """Takes the counters at the start of a step, at the end of its rollout and at its own end.

    Args:
        counters: this rank's; closed here.
        ranks: what all ranks can read, in their order.
    """

    def __init__(self, counters: Counters, ranks: Sequence[Reach], rank: int) -> None:
        self._kinds = [kind for kind, reason in told_kinds(ranks).items() if not reason]
        own = ranks[rank]
        is_double = any((one.hostname, one.gpu) == (own.hostname, own.gpu) for one in ranks[:rank])
        skipped = {GPU} if is_double else set()  # of ranks that share a GPU, the first reads it
        self._close = counters.close
        self._lost: set[str] = set()
        self._counters = {k: c for k, c in counters.open.items() if k in self._kinds and k not in skipped}
        for kind in counters.open.keys() - self._counters.keys():
            counters.open.pop(kind).close()
        self._start: dict[str, float] = {}
        self._rollout: dict[str, float] = {}

    def begin_step(self) -> None:
        """A step begins, with its rollout."""
        self._start, self._rollout = self._read(), {}

    def end_rollout(self) -> None:
        """The rollout is over on all ranks."""
        self._rollout = self._read()

    def end_step(self) -> dict[str, float]:
        """This rank's part of a step's joules, to be summed over the ranks; alike named on all of them.

        NaN where a counter was lost: it makes the sum one.
        """
        end, taken = self._read(), {}
        for kind in self._kinds:
            begun = self._start.get(kind, math.nan)
            taken[f"{PREFIX}{kind}_joules"] = self._since(kind, begun, end)
            taken[f"{PREFIX}rollout_{kind}_joules"] = self._since(kind, begun, self._rollout)
        return taken

    def close(self) -> None:
        """Close the counters."""
        self._counters = {}
        self._close()

    def _since(self, kind: str, begun: float, values: Mapping[str, float]) -> float:
        if kind not in self._counters:
            return 0.0
        joules = values.get(kind, math.nan) - begun
        return joules if joules > 0 else math.nan  # counted from zero anew by a driver, or a counter that stands still

    def _read(self) -> dict[str, float]:
        return {kind: self._joules(kind, counter) for kind, counter in self._counters.items()}

    def _joules(self, kind: str, counter: Counter) -> float:
        try:
            return counter.joules()
        except NoCounterError as error:
            if kind not in self._lost:
                self._lost.add(kind)
                logger.warning("energy is not told from here on: %s", error)
            return math.nan
