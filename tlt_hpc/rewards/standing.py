"""Owns a process's server of rewards: one for each set of rules, started before MPI is and kept from job to job."""

from __future__ import annotations

import functools

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Settings
from tlt_hpc.rewards.client import RewardClient
from tlt_hpc.rewards.judge import needs_worker
from tlt_hpc.rewards.scorer import Bench


def settings_of(section: RewardSection) -> Settings:
    """The rules of a configuration."""
    return Settings(
        kinds=tuple(sorted({section.default, *section.by_source.values()})),
        function=section.function,
        tolerance=section.tolerance,
        format_pattern=section.format_pattern,
        format_tags=section.format_tags,
        format_weight=section.format_weight,
        workers=section.workers,
        cpu_seconds=section.cpu_seconds,
        memory_mb=section.memory_mb,
        wall_seconds=section.wall_seconds,
    )


def without_form(section: RewardSection) -> RewardSection:
    """The same rules but for the form's share: an evaluation asks whether the answer is right."""
    return section.model_copy(update={"format_weight": 0.0})


def standing_bench(section: RewardSection) -> Bench:
    """What this process judges with; the first call starts its server where a kind needs one, later ones find it.

    The first call belongs before MPI starts: a process that MPI has initialised should start no other.
    """
    settings = settings_of(section)
    needs = any(needs_worker(kind, settings) for kind in settings.kinds)
    return Bench(section, settings, _standing_client(settings) if needs else None)


@functools.cache
def _standing_client(settings: Settings) -> RewardClient:
    return RewardClient(settings)
