"""Takes up again the steps that the rollout log has and no checkpoint: their updates, with nothing generated anew.

A step is committed once its line stands in ``metrics.jsonl``: rank 0 writes it when every rank's log of the step is in
its place. So what a kill costs is the step under way, however long ago a checkpoint became whole. Knows the log and the
policy's update. The drafter is as the checkpoint has it: its micro-steps depend on the clock and no text depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.config import UserError
from tlt_hpc.job import Job
from tlt_hpc.records import Request, Rollout, SampleKey
from tlt_hpc.rl.gather import gather
from tlt_hpc.rl.policy import PolicyStats
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import Line, read_lines
from tlt_hpc.tail import requests_of
from tlt_hpc.update import update_policy

logger = logging.getLogger(__name__)

_NORM_TOLERANCE, _PROBS_TOLERANCE = 0.05, 0.01
"""Relative, of the gradient's norm; of the mean distance of a token's probability from the logged one.

On other ranks, or a device whose sums have no fixed order, an update's last bits differ: nothing that these would see.
"""


class ReplayError(UserError):
    """The rollout log does not belong to the checkpoint; one line with the remedy."""


def replay(job: Job, step: int, shown: Callable[[int], None]) -> int:
    """Repeat the committed steps' updates from ``step`` on; the first step that is still to be generated. Collective.

    Ends before a step whose log is incomplete or damaged, which is warned of, and at a stop vote. ``shown`` is called
    on rank 0 with every step that was taken up.

    Raises:
        ReplayError: on all ranks, where an update is not the one that the run made.
    """
    committed = job.world.broadcast(read_lines(job.folder.metrics) if job.world.rank == 0 else {})
    while step < job.config.run.num_steps and step in committed and not job.world.agree_to_stop():
        logged = read_ranks(job, step)
        if logged is None:
            break
        rollouts, rewards = logged
        stats = update_policy(job, rollouts, rewards).stats
        check_update(job.folder, step, rewards, stats, committed[step])
        if job.world.rank == 0:
            shown(step)
        step += 1
    return step


def read_ranks(job: Job, step: int) -> tuple[list[Rollout], NDArray[np.float32]] | None:
    """All responses of a step and their rewards, ordered by key; None where the log lacks any. Collective.

    The files are dealt over the ranks, however many wrote them.
    """
    paths = job.world.broadcast(job.folder.rollout_logs(step) if job.world.rank == 0 else [])
    rollouts: list[Rollout] = []
    rewards, trouble = [np.zeros(0, np.float32)], ""
    for path in paths[job.world.rank :: job.world.size]:
        try:
            record = read_step(path)
        except (DamagedFile, OSError) as error:
            trouble = str(error)
            break
        rollouts += record.rollouts
        rewards.append(record.rewards)
    troubles = [each for each in job.world.allgather(trouble) if each]
    everything = gather(job.world, rollouts, np.concatenate(rewards))
    if not troubles and not is_whole(everything[0], requests_of(job, step), step):
        troubles = [f"{job.folder.rollouts} lacks responses of step {step}, or has others"]
    if troubles:
        if job.world.rank == 0:
            logger.warning("step %d is generated again: %s", step, troubles[0])
        return None
    return everything


def is_whole(rollouts: Sequence[Rollout], requests: Sequence[Request], step: int) -> bool:
    """Whether these are the responses to the step's requests, all of them, by the step's weights."""

    def prompts(of: Sequence[Request] | Sequence[Rollout]) -> dict[SampleKey, bytes]:
        return {each.key: np.asarray(each.prompt_tokens, np.int32).tobytes() for each in of}

    return (
        len(rollouts) == len(requests)
        and prompts(rollouts) == prompts(requests)
        and all(rollout.weight_version == step for rollout in rollouts)
    )


def check_update(folder: RunFolder, step: int, rewards: NDArray[np.float32], stats: PolicyStats, line: Line) -> None:
    """Refuse an update that is not the one the run's metrics tell of: then log and checkpoint are of different runs.

    Raises:
        ReplayError: with both values.
    """
    for name, found, tolerance in (
        ("critic/score/mean", float(rewards.mean()), 1e-6),
        ("perf/total_num_tokens", stats.num_tokens, 0),
        ("actor/grad_norm", stats.grad_norm, _NORM_TOLERANCE * line["actor/grad_norm"]),
        ("actor/rollout_probs_diff_mean", stats.rollout_probs_diff_mean, _PROBS_TOLERANCE),
    ):
        if not abs(found - line[name]) <= tolerance:
            raise ReplayError(
                f"step {step}, repeated from {folder.rollouts}, has {name} {found:.6g} where {folder.metrics} has "
                f"{line[name]:.6g}: log and checkpoint are not of one run; to generate the steps from {step} on "
                "again, remove their lines from metrics.jsonl"
            )
