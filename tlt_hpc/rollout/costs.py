"""What a decoding round costs in seconds, by strategy and batch size.

``measure_profile`` times the parts of a round before the first rollout and ``CostProfile`` interpolates between the
measured points. ``RoundCosts`` starts from such a profile, or from a guess, and corrects it by what rounds really take.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from tlt_hpc.common.files import read_bytes
from tlt_hpc.rollout.strategy import OFF, Strategy

logger = logging.getLogger(__name__)

_SCHEMA = 1
_REPETITIONS = 3
"""Timed runs of each point; the fastest counts."""

Agree = Callable[[int], int]
"""Takes this rank's number and returns that of the first rank of its replica (a broadcast). Ranks that decode together
must not act on their own clocks."""


def own(index: int) -> int:
    """``Agree`` for a rank that decodes alone."""
    return index


class CostPrior(Protocol):
    """What rounds are expected to take before any has been measured."""

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        """Seconds of a round of ``num_live`` sequences."""

    def catch_up_seconds(self, strategy: Strategy, backlog: int) -> float:
        """Seconds until a drafter that was not used has read ``backlog`` positions, over all sequences."""


class GuessedCosts:
    """Costs without a profile: a plain round is 1, a draft step 0.15, a further verified token 0.05."""

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        steps = strategy.depth if strategy.has_drafter else 0
        return 1.0 + 0.15 * steps + 0.05 * strategy.num_drafts

    def catch_up_seconds(self, strategy: Strategy, backlog: int) -> float:
        return 0.0


# -- the profile ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfileKey:
    """Where a profile was measured. ``model`` has the shapes of target and drafter, as in ``qwen2-8x128x256-v24``."""

    processor: str
    num_cores: int
    device: str
    num_threads: int
    torch_version: str
    model: str
    dtype: str


def processor_name() -> str:
    """The processor's marketing name if the system knows it, otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class CostGrid:
    """Seconds by batch size and by one more number (width or depth).

    Linear in that number and in log2 of the batch between measured points, constant outside. ``rows``: batch -> points
    of (number, seconds), both ascending.
    """

    rows: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]

    def seconds(self, batch: int, number: int) -> float:
        points = [(math.log2(measured), _interpolate(row, number)) for measured, row in self.rows]
        return _interpolate(points, math.log2(batch))

    def covers(self, batch: int, number: int) -> bool:
        """Whether a point lies within what was measured."""
        largest_batch, row = self.rows[-1]
        return batch <= largest_batch and row[0][0] <= number <= row[-1][0]


@dataclass(frozen=True)
class CostProfile:
    """Seconds of verifying passes by (batch, width), and of drafts by (batch, depth) for each kind of draft."""

    key: ProfileKey
    verify: CostGrid
    drafts: Mapping[str, CostGrid]
    measured_seconds: float
    """Time the measurement took."""

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        """Seconds of a round of ``num_live`` sequences; beyond the largest measured batch, those of that batch."""
        verify = self.verify.seconds(num_live, strategy.widest_pass)
        return verify if strategy == OFF else verify + self._draft(strategy).seconds(num_live, strategy.depth)

    def catch_up_seconds(self, strategy: Strategy, backlog: int) -> float:
        """Seconds until a drafter has read ``backlog`` positions, at the rate of its steps in the largest batch."""
        batch, points = self._draft(strategy).rows[-1]
        depth, seconds = points[-1]
        return backlog * seconds / (depth * batch)

    def covers(self, strategies: Sequence[Strategy], max_live: int) -> bool:
        """Whether the costs of all these strategies, up to this batch, follow from what was measured."""
        return all(
            self.verify.covers(max_live, strategy.widest_pass)
            and (strategy == OFF or (kind in self.drafts and self.drafts[kind].covers(max_live, strategy.depth)))
            for strategy in strategies
            for kind in [draft_kind(strategy)]
        )

    def _draft(self, strategy: Strategy) -> CostGrid:
        return self.drafts[draft_kind(strategy)]


def draft_kind(strategy: Strategy) -> str:
    """Names the drafts whose cost differs by depth and batch only."""
    tree = f"x{strategy.branching}v{strategy.num_drafts}" if strategy.branching > 1 else ""
    return f"{strategy.source}{tree}"


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    after = bisect_right(points, x, key=lambda point: point[0])
    if after == 0 or after == len(points):
        return points[max(0, after - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# -- measuring a profile ----------------------------------------------------------------------------------------------


class Measures(Protocol):
    """What the engine offers to be timed: each call runs once and returns its seconds, device finished."""

    def measure_verify(self, batch: int, width: int) -> float:
        """A target pass over ``width`` tokens of each of ``batch`` sequences, sampling and walk included."""

    def measure_draft(self, batch: int, depth: int, strategy: Strategy) -> float:
        """The strategy's draft for ``batch`` sequences, with its depth replaced by ``depth``."""


def measure_profile(
    key: ProfileKey,
    strategies: Sequence[Strategy],
    max_live: int,
    measures: Measures,
    max_seconds: float,
    agree: Agree = own,
) -> CostProfile:
    """Measure batches 1 and ``max_live``, then those between them, coarse to fine, until the time is used up.

    The fastest run of each point counts, and the points of a batch take turns: other work on the machine only makes a
    run slower, and a short burst of it does not hit one point alone. The two end batches are always measured; no
    further batch is begun if the time spent plus that of the slowest batch exceeds ``max_seconds``.
    """
    assert max_live >= 1, f"max_live = {max_live}"
    start, rows, longest = time.perf_counter(), {}, 0.0
    for count, batch in enumerate(_batches(max_live)):
        begun = time.perf_counter()
        if count >= 2 and agree(int(begun - start + longest > max_seconds)):
            break
        rows[batch] = _measure_batch(batch, strategies, measures)
        longest = max(longest, time.perf_counter() - begun)
    seconds = time.perf_counter() - start
    logger.info("cost profile: batches %s measured in %.1f s", sorted(rows), seconds)
    kinds = [kind for kind in rows[1] if kind]
    return CostProfile(key, _grid(rows, ""), {kind: _grid(rows, kind) for kind in kinds}, seconds)


_Points = tuple[tuple[int, float], ...]


def _measure_batch(batch: int, strategies: Sequence[Strategy], measures: Measures) -> dict[str, _Points]:
    """The points of one batch by kind of draft; the kind "" is the verifying pass."""
    widths = sorted({1} | {strategy.widest_pass for strategy in strategies})
    runs = {("", width): partial(measures.measure_verify, batch, width) for width in widths}
    by_kind: dict[str, dict[int, Strategy]] = {}
    for strategy in strategies:
        if strategy != OFF:
            by_kind.setdefault(draft_kind(strategy), {})[strategy.depth] = strategy
    for kind, by_depth in by_kind.items():
        for depth in sorted({min(by_depth), max(by_depth)}):
            runs[kind, depth] = partial(measures.measure_draft, batch, depth, by_depth[depth])
    for run in runs.values():
        run()  # the first may allocate or compile
    fastest = dict.fromkeys(runs, math.inf)
    for _ in range(_REPETITIONS):
        for point, run in runs.items():
            fastest[point] = min(fastest[point], run())
    points: dict[str, _Points] = {}
    for (kind, number), seconds in fastest.items():
        points[kind] = (*points.get(kind, ()), (number, seconds))
    return points


def _batches(max_live: int) -> list[int]:
    """1, the largest, then the powers of two between them, farthest from those already there first."""
    order, left = list(dict.fromkeys([1, max_live])), [1 << i for i in range(1, max_live.bit_length())]
    while left := [batch for batch in left if batch not in order]:
        order.append(max(left, key=lambda batch: min(abs(math.log2(batch / other)) for other in order)))
    return order


def _grid(rows: Mapping[int, Mapping[str, _Points]], kind: str) -> CostGrid:
    return CostGrid(tuple((batch, rows[batch][kind]) for batch in sorted(rows)))


# -- the profile as a file --------------------------------------------------------------------------------------------


def read_profile(path: Path) -> CostProfile:
    """Read the cost profile that a run wrote.

    Raises:
        OSError: no such file.
        ValueError: it holds no cost profile of this schema.
    """
    try:
        return from_json(json.loads(read_bytes(path)))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} holds no cost profile ({error!r}); give that of another run") from error


def to_json(profile: CostProfile) -> dict[str, object]:
    """Plain lists and numbers, seconds as they were measured."""
    return {
        "schema": _SCHEMA,
        "key": asdict(profile.key),
        "verify": profile.verify.rows,
        "drafts": {kind: grid.rows for kind, grid in profile.drafts.items()},
        "measured_seconds": profile.measured_seconds,
    }


def from_json(tree: Mapping[str, object]) -> CostProfile:
    """The inverse of ``to_json``.

    Raises:
        ValueError, KeyError, TypeError: something else.
    """
    if tree["schema"] != _SCHEMA:
        raise ValueError(f"schema {tree['schema']!r}, this version writes {_SCHEMA}")
    key, drafts, seconds = tree["key"], tree["drafts"], tree["measured_seconds"]
    if not (isinstance(key, dict) and isinstance(drafts, dict) and isinstance(seconds, float)):
        raise ValueError("key, drafts and measured_seconds are an object, an object and a number")
    grids = {str(kind): _grid_of(rows) for kind, rows in drafts.items()}
    return CostProfile(ProfileKey(**key), _grid_of(tree["verify"]), grids, seconds)


def _grid_of(rows: object) -> CostGrid:
    if not isinstance(rows, list):
        raise ValueError("rows are a list")
    grid = CostGrid(
        tuple((int(batch), tuple((int(number), float(s)) for number, s in points)) for batch, points in rows)
    )
    batches = [batch for batch, _ in grid.rows]
    numbers = [[number for number, _ in points] for _, points in grid.rows]
    seconds = [s for _, points in grid.rows for _, s in points]
    if not seconds or not all(_ascend(values) for values in [batches, *numbers]):
        raise ValueError("points are missing or out of order")
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ValueError("seconds are positive numbers")
    return grid


def _ascend(values: Sequence[int]) -> bool:
    return len(values) > 0 and values[0] >= 1 and all(a < b for a, b in pairwise(values))


# -- costs learned from rounds ----------------------------------------------------------------------------------------


class _Ratio:
    """Measured over predicted seconds: the median of recent rounds and of what was believed before them.

    The lower of two middle values counts, so one slow round beside the belief changes nothing.
    """

    _ROUNDS = 15
    _STALE_ROUNDS = 256

    def __init__(self, belief: float | None) -> None:
        self._belief, self._round = belief, 0
        self._values: deque[float] = deque(maxlen=self._ROUNDS)
        self.estimate = 1.0 if belief is None else belief

    def add(self, value: float, at_round: int) -> None:
        if self._values and at_round - self._round > self._STALE_ROUNDS:
            self._belief = self.estimate
            self._values.clear()
        self._round = at_round
        self._values.append(value)
        believed = () if self._belief is None else (self._belief,)
        values = sorted((*believed, *self._values))
        self.estimate = values[(len(values) - 1) // 2]


class RoundCosts:
    """Seconds of a round by strategy and live sequences: a prior, times a ratio learned per power of two of the batch.

    A strategy without a ratio at a batch size takes the one it has at the nearest batch size, changed as another
    strategy's ratio changed between the two. Strategies are given by index and looked up in lists: every round asks for
    all of them.
    """

    _OFF_ROUNDS = 3
    _TABLE_ROUNDS = 32
    """Rounds for which ratios that were inferred, not measured, are kept as they are."""

    def __init__(self, strategies: Sequence[Strategy], prior: CostPrior | None) -> None:
        self._strategies = tuple(strategies)
        self._off = self._strategies.index(OFF) if OFF in self._strategies else 0
        self._has_profile = prior is not None
        self.known = [self._has_profile] * len(self._strategies)
        """Whether the cost was measured, in the profile or in any round, by strategy."""
        self._prior: CostPrior = prior or GuessedCosts()
        self._ratios: list[dict[int, _Ratio]] = [{} for _ in self._strategies]
        self._tables: dict[int, list[float]] = {}
        self._predicted: dict[int, list[float]] = {}
        self._num_rounds = self._num_off_rounds = 0

    @property
    def ready(self) -> bool:
        """Whether there is a plain round's cost to compare others with."""
        return self._has_profile or self._num_off_rounds >= self._OFF_ROUNDS

    def measured(self, index: int, num_live: int) -> bool:
        """Whether it ran in a round of about this many sequences."""
        return _bucket(num_live) in self._ratios[index]

    def seconds(self, num_live: int) -> list[float]:
        """Expected seconds of a round, by strategy."""
        table = self._table(_bucket(num_live))
        return [predicted * ratio for predicted, ratio in zip(self._predictions(num_live), table, strict=True)]

    def catch_up_seconds(self, index: int, backlog: int) -> float:
        """Seconds that the drafter, if the strategy has one, takes to read a backlog of positions."""
        strategy = self._strategies[index]
        return self._prior.catch_up_seconds(strategy, backlog) if backlog and strategy.has_drafter else 0.0

    def add(self, index: int, num_live: int, seconds: float) -> None:
        """A measured round."""
        self._num_rounds += 1
        self._num_off_rounds += index == self._off
        bucket = _bucket(num_live)
        if bucket not in (ratios := self._ratios[index]):
            believable = self._has_profile or ratios or (index != self._off and self._ratios[self._off])
            ratios[bucket] = _Ratio(self._ratio(index, bucket) if believable else None)
            self._tables.clear()
            self.known[index] = True
        ratios[bucket].add(seconds / self._predictions(num_live)[index], self._num_rounds)
        if self._num_rounds % self._TABLE_ROUNDS == 0:
            self._tables.clear()
        elif bucket in self._tables:
            self._tables[bucket][index] = ratios[bucket].estimate

    def _predictions(self, num_live: int) -> list[float]:
        if num_live not in self._predicted:
            self._predicted[num_live] = [self._prior.seconds(strategy, num_live) for strategy in self._strategies]
        return self._predicted[num_live]

    def _table(self, bucket: int) -> list[float]:
        if bucket not in self._tables:
            self._tables[bucket] = [self._ratio(index, bucket) for index in range(len(self._strategies))]
        return self._tables[bucket]

    def _ratio(self, index: int, bucket: int) -> float:
        ratios = self._ratios[index]
        if bucket in ratios:
            return ratios[bucket].estimate
        if not ratios:
            return 1.0 if index == self._off else self._ratio(self._off, bucket)
        near = min(ratios, key=lambda other: abs(other - bucket))
        return ratios[near].estimate * self._change(near, bucket)

    def _change(self, near: int, bucket: int) -> float:
        """How ratios changed from one batch size to another, by a strategy that was measured at both."""
        for ratios in self._ratios:
            if near in ratios and bucket in ratios:
                return ratios[bucket].estimate / ratios[near].estimate
        return 1.0


def _bucket(num_live: int) -> int:
    return (num_live - 1).bit_length()
