"""A process's server of rewards: one for each set of rules, started before MPI is and kept from job to job."""

from __future__ import annotations

import functools

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.client import RewardClient
from tlt_hpc.rewards.judge import needs_worker
from tlt_hpc.rewards.scorer import Judge


def without_form(section: RewardSection) -> RewardSection:
    """The same rules without the form's share: an evaluation asks whether the answer is right."""
    return section.model_copy(update={"format_weight": 0.0})


def standing_judge(section: RewardSection) -> Judge:
    """What this process judges with; the first call starts its server if a kind needs one, later ones find it.

    The first call belongs before MPI starts: a process that MPI has initialised should start no other.
    """
    needs = any(needs_worker(kind) for kind in section.kinds)
    return Judge(section, _standing_client(section.model_dump_json()) if needs else None)


@functools.cache
def _standing_client(settings: str) -> RewardClient:
    return RewardClient(RewardSection.model_validate_json(settings))
