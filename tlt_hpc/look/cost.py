"""What a run cost: GPU-hours and tokens, from the lines of its steps and the records of its starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.text_format import format_three_digits
from tlt_hpc.storage.records import Environment
from tlt_hpc.storage.step_lines import Line, step_of

_SECONDS = ("timing_s/step", "timing_s/testing")
_TOKENS = "perf/total_num_tokens"


@dataclass(frozen=True)
class Cost:
    """The cost of steps and evaluations; starts, saves and steps that were cut off before their end do not count."""

    hours: float
    """Sum over all GPUs, or over all ranks if they have no GPU."""
    unit: str
    """``GPU-hours`` or ``rank-hours``."""
    lost_hours: float
    """The part in steps that were generated again after a resume from an earlier one."""
    tokens: int
    """Response tokens of the steps that are part of the run."""

    @property
    def tokens_per_hour(self) -> float:
        """Response tokens per GPU-hour, or per rank-hour without a GPU."""
        return self.tokens / self.hours

    @property
    def hours_text(self) -> str:
        """The hours: 0.0512, 12.3 or 4,560."""
        return format_three_digits(self.hours)

    @property
    def unit_and_rate_text(self) -> str:
        """The words after the number: the unit, lost steps and tokens per hour."""
        lost = f" ({format_three_digits(self.lost_hours)} in lost steps)" if self.lost_hours else ""
        rate = f"{format_three_digits(self.tokens_per_hour)} tokens per {self.unit.removesuffix('s')}"
        return f"{self.unit}{lost}, {rate}"

    def times(self, factor: float) -> Cost:
        """The cost of ``factor`` times as many such steps."""
        return Cost(factor * self.hours, self.unit, factor * self.lost_hours, round(factor * self.tokens))


def cost_of(log: RunLog) -> Cost | None:
    """The cost of the steps that a log covers, and of those that a whole run has lost; None if it is unknown."""
    devices = _Devices(log)
    kept, lost = list(log.lines.values()), log.dropped_lines if log.is_whole else ()
    lost_hours = sum(map(devices.hours, lost))
    hours = lost_hours + sum(map(devices.hours, kept))
    if hours <= 0:
        return None
    return Cost(hours, devices.unit, lost_hours, int(sum(_nonnegative_number(line, _TOKENS) for line in kept)))


class _Devices:
    """The number of GPUs, or of ranks without one, that were at work in a step."""

    def __init__(self, log: RunLog) -> None:
        self._log, starts = log, [(_num_ranks(start), _num_gpus(start)) for start in log.environments_of_starts]
        ranks, gpus = starts[-1] if starts else (0, 0)
        self.unit = "GPU-hours" if gpus else "rank-hours"
        self._each = gpus / ranks if gpus and ranks else 1.0
        self._is_constant, self._ranks = len(set(starts)) == 1, ranks

    def hours(self, line: Line) -> float:
        """Device-hours of a step, by the number of its logs if starts had different numbers of ranks."""
        ranks = self._ranks if self._is_constant else len(self._log.files(step_of(line))) or self._ranks
        return ranks * self._each * sum(_nonnegative_number(line, name) for name in _SECONDS) / 3600


def _num_ranks(start: Environment) -> int:
    return sum(host.num_ranks for host in start.hosts)


def _num_gpus(start: Environment) -> int:
    return sum(sum(host.gpus.values()) for host in start.hosts)


def _nonnegative_number(line: Line, name: str) -> float:
    """A figure of a step; 0 where it is missing, negative or not finite."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0 else 0.0
