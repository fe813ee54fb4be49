"""What rounds cost on this machine with this model: measured once at start-up, kept as JSON, interpolated.

Knows how to measure neither: the engine hands in what runs a pass and a draft once. A profile only seeds the choosers;
what rounds really take replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol, Self, TypeVar

from tlt_hpc.common.files import read_bytes
from tlt_hpc.rollout.decisions import Agree, own
from tlt_hpc.rollout.strategy import OFF, Strategy

logger = logging.getLogger(__name__)

_SCHEMA = 1
_MARK_BYTES = 7
"""Of a digest, so that it passes for a positive number of 64 bits."""
MOST_DRIFT = 3.0
"""So many times slower or faster than a kept profile says, and it is measured anew; less is for ratios to learn."""
HOLDS, IS_SLOWER, IS_FASTER = range(3)
"""What the machine is now against a kept profile; faster by one strategy, it was under press when that was made."""
_RUNS_TO_CHECK = 3
T = TypeVar("T")


class Measures(Protocol):
    """What the engine offers to be timed: each call runs once and returns its seconds, device finished."""

    def measure_verify(self, batch: int, width: int) -> float:
        """A target pass over ``width`` tokens of each of ``batch`` sequences, sampling and walk included."""

    def measure_draft(self, batch: int, depth: int, strategy: Strategy) -> float:
        """The strategy's draft for ``batch`` sequences, were it ``depth`` deep."""


class Node(Protocol):
    """The ranks of a node, of which one opens a file; both are collective over them."""

    def alike(self, mark: int) -> Self:
        """Those that give the same number."""

    def once(self, do: Callable[[], T]) -> T:
        """What ``do`` returns on the first of them; on no other is it called."""


class _OneRank:
    """A rank that reads for itself."""

    def alike(self, mark: int) -> Self:
        return self

    def once(self, do: Callable[[], T]) -> T:
        return do()


ONE_RANK = _OneRank()


@dataclass(frozen=True)
class ProfileKey:
    """What costs depend on: a profile made under another key is not used.

    ``model`` tells the shapes of target and drafter, e.g. ``qwen2-8x128x256-v24``.
    """

    processor: str
    num_cores: int
    device: str
    num_threads: int
    torch_version: str
    model: str
    dtype: str

    def file_name(self, strategies: Sequence[Strategy], max_live: int) -> str:
        """Settings that ask for other measurements keep a file of their own."""
        needs = [asdict(self), sorted(strategy.name for strategy in strategies), max_live]
        return f"{hashlib.sha256(json.dumps(needs, sort_keys=True).encode()).hexdigest()[:20]}.json"


def processor_name() -> str:
    """The processor's marketing name where the system tells it, its architecture elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class CostGrid:
    """Seconds by batch and by one more number (width or depth).

    Linear in it and in log2 of the batch between measured points, flat outside. ``rows``: batch -> points of
    (number, seconds), both ascending.
    """

    rows: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]

    def seconds(self, batch: int, number: int) -> float:
        points = [(math.log2(measured), _interpolate(row, number)) for measured, row in self.rows]
        return _interpolate(points, math.log2(batch))

    def covers(self, batch: int, number: int) -> bool:
        """Whether a point lies within what was measured."""
        most_batch, row = self.rows[-1]
        return batch <= most_batch and row[0][0] <= number <= row[-1][0]


@dataclass(frozen=True)
class CostProfile:
    """Seconds of verifying passes by (batch, width) and of drafts by (batch, depth) for each kind of draft."""

    key: ProfileKey
    verify: CostGrid
    drafts: Mapping[str, CostGrid]
    measured_seconds: float
    """What the measuring took."""

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
        """Whether these can all be costed, up to this batch, from what was measured."""
        return all(
            self.verify.covers(max_live, strategy.widest_pass)
            and (strategy == OFF or (kind in self.drafts and self.drafts[kind].covers(max_live, strategy.depth)))
            for strategy in strategies
            for kind in [draft_kind(strategy)]
        )

    def _draft(self, strategy: Strategy) -> CostGrid:
        return self.drafts[draft_kind(strategy)]


def draft_kind(strategy: Strategy) -> str:
    """Names the drafts whose cost differs by depth and batch alone."""
    tree = f"x{strategy.branching}v{strategy.num_drafts}" if strategy.branching > 1 else ""
    return f"{strategy.source}{tree}"


# -- measuring ------------------------------------------------------------------------------------------------------


def measure_profile(
    key: ProfileKey,
    strategies: Sequence[Strategy],
    max_live: int,
    measures: Measures,
    max_seconds: float = 10.0,
    repetitions: int = 5,
    agree: Agree = own,
) -> CostProfile:
    """Measure batches 1 and ``max_live``, then those between them, coarse to fine, while the time lasts.

    Of each point the fastest run counts, and the runs of a batch's points take turns: other work on the machine only
    makes a run slower, and a moment of it meets no point alone. The two end batches are measured in any case; no
    further one is begun once the seconds spent, and what the longest would add, exceed ``max_seconds``.

    Raises:
        ValueError: ``max_live`` or ``repetitions`` under 1.
    """
    if max_live < 1 or repetitions < 1:
        raise ValueError(f"max_live = {max_live}, repetitions = {repetitions}: both must be at least 1")
    start, rows, longest = time.perf_counter(), {}, 0.0
    for count, batch in enumerate(_batches(max_live)):
        begun = time.perf_counter()
        if count >= 2 and agree(int(begun - start + longest > max_seconds)):
            logger.info("cost profile: %g s are spent, batch %d and on are interpolated", max_seconds, batch)
            break
        rows[batch] = _measure_batch(batch, strategies, measures, repetitions)
        longest = max(longest, time.perf_counter() - begun)
    seconds = time.perf_counter() - start
    logger.info("cost profile: batches %s measured in %.1f s", sorted(rows), seconds)
    kinds = [kind for kind in next(iter(rows.values())) if kind]
    return CostProfile(key, _grid(rows, ""), {kind: _grid(rows, kind) for kind in kinds}, seconds)


_Points = tuple[tuple[int, float], ...]


def _measure_batch(
    batch: int, strategies: Sequence[Strategy], measures: Measures, repetitions: int
) -> dict[str, _Points]:
    """One batch's points by kind of draft; the kind "" is the verifying pass."""
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
    for _ in range(repetitions):
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


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    after = bisect_right(points, x, key=lambda point: point[0])
    if after == 0 or after == len(points):
        return points[max(0, after - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# -- keeping --------------------------------------------------------------------------------------------------------


def profile_folder() -> Path:
    """Where profiles are kept: ``profiles`` below TLT_CACHE, or below ~/.cache/tlt_hpc."""
    root = os.environ.get("TLT_CACHE", "")
    return (Path(root) if root else Path.home() / ".cache" / "tlt_hpc") / "profiles"


def load_or_measure(
    key: ProfileKey,
    strategies: Sequence[Strategy],
    max_live: int,
    measures: Measures,
    max_seconds: float = 10.0,
    folder: Path | None = None,
    agree: Agree = own,
    node: Node = ONE_RANK,
) -> CostProfile:
    """The kept profile of this machine and model, or a new one where there is none that fits; collective over the node.

    Of a node's ranks of one kind the first reads, and what it measures is written and holds for all of them: all
    measure at the same time, as they will decode. Ranks that compute a pass together have the first one's, whatever
    they are themselves, since it decides for them.
    A kept profile is held against rounds of one sequence and of the most: one made while other work pressed upon the
    machine would keep strategies from ever being tried. Where the machine is slower now, the new one serves this job
    alone: the press may be gone at the next start.
    A file that cannot be read, is damaged, or was made under another key or for other strategies is measured anew and
    replaced. Where the folder cannot be written, the profile serves this job alone, and a warning says so.
    """
    name = key.file_name(strategies, max_live)
    path = (folder or profile_folder()) / name
    mark = int.from_bytes(hashlib.sha256(name.encode()).digest()[:_MARK_BYTES])
    kind = node.alike(agree(mark))
    kept = kind.once(lambda: _fitting(path, key, strategies, max_live))
    if kept is not None:
        drift = agree(_drift(kept, strategies, max_live, measures))
        drift = kind.once(lambda: drift)
        if drift == HOLDS:
            return kept
        logger.info("the cost profile in %s is of a machine that was faster or slower: measuring anew", path)
    measured = measure_profile(key, strategies, max_live, measures, max_seconds, agree=agree)
    return kind.once(lambda: measured if kept is not None and drift == IS_SLOWER else _keep(path, measured))


def _drift(kept: CostProfile, strategies: Sequence[Strategy], max_live: int, measures: Measures) -> int:
    """Whether the machine still takes about as long for rounds of one sequence and of the most, by any strategy."""
    rows = {batch: _measure_batch(batch, strategies, measures, _RUNS_TO_CHECK) for batch in sorted({1, max_live})}
    drafts = {kind: _grid(rows, kind) for kind in rows[1] if kind}
    now = CostProfile(kept.key, _grid(rows, ""), drafts, 0.0)
    ratios = [now.seconds(strategy, batch) / kept.seconds(strategy, batch) for strategy in strategies for batch in rows]
    if min(ratios) < 1 / MOST_DRIFT:
        return IS_FASTER
    return IS_SLOWER if max(ratios) > MOST_DRIFT else HOLDS


def _keep(path: Path, profile: CostProfile) -> CostProfile:
    try:
        write_profile(path, profile)
    except OSError as error:
        logger.warning("cannot keep the cost profile in %s: %s; set TLT_CACHE to a writable folder", path, error)
    return profile


def write_profile(path: Path, profile: CostProfile) -> None:
    """Write beside and rename: readers see all of it or none, and several writers never mix.

    Raises:
        OSError: the disk refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(to_json(profile), file, indent=1)
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)  # gone already where it was renamed


def read_profile(path: Path) -> CostProfile:
    """Read a profile back.

    Raises:
        OSError: no such file.
        ValueError: it holds no cost profile of this schema.
    """
    try:
        return from_json(json.loads(read_bytes(path)))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} holds no cost profile ({error!r}); delete it, it is measured anew") from error


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


def _fitting(path: Path, key: ProfileKey, strategies: Sequence[Strategy], max_live: int) -> CostProfile | None:
    """The kept profile; None where there is none, or one of something else."""
    kept = _read_kept(path)
    if kept is not None and not (kept.key == key and kept.covers(strategies, max_live)):
        logger.warning("%s is of another machine, model or setting; measuring anew", path)
        return None
    if kept is not None:
        logger.info("cost profile: read from %s", path)
    return kept


def _read_kept(path: Path) -> CostProfile | None:
    try:
        return read_profile(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s; measuring anew", error)
        return None
