"""Repeats the updates of steps that the rollout log has and no checkpoint; nothing is generated again.

A step is committed once its line stands in ``metrics.jsonl``: rank 0 writes it when every rank's log of the step is in
its place. So what a kill costs is the step under way, however long ago a checkpoint became whole. Knows the log, the
policy's update and the drafter's micro-steps. These are as many as the log tells of where the drafter was not saved
since and the step's features are still on disk: those of the last two. They are not the same, for they depended on the
clock; no text depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.common.records import Rollout, SampleKey, Stream
from tlt_hpc.config import UserError
from tlt_hpc.look.metrics import PROBS_DIFF, SCORE, TRAINED_TOKENS, mean_of
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.rl.gather import gather
from tlt_hpc.rl.policy import PolicyStats
from tlt_hpc.rl.update import update_policy
from tlt_hpc.session import Job
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

_PROBS_TOLERANCE = 1e-4
"""On other ranks, or a device whose sums have no fixed order, an update's last bits differ: far less than this."""


class ReplayError(UserError):
    """The rollout log does not belong to the checkpoint; one line with the remedy."""


@dataclass(frozen=True)
class Replayed:
    """How far a repetition came."""

    step: int
    """The first that is still to be generated."""
    drafter: Checkpoint | None
    """What the drafter was loaded from on the way."""


def replay(job: Job, step: int, shown: Callable[[int], None]) -> Replayed:
    """Repeat the committed steps' updates from ``step`` on. Collective.

    The drafter is taken up wherever the run saved it alone on the way, and trained on the steps after the last such
    save. Ends before a step whose log is incomplete or damaged, which is warned of, and at a stop vote. ``shown`` is
    called on rank 0 with every step that was taken up.

    Raises:
        ReplayError: on all ranks, where an update is not the one that the run made.
    """
    committed = job.world.once(lambda: read_lines(job.folder.metrics))
    uncommitted = next(number for number in count(step) if not is_committed(committed.get(number)))
    end, loaded = min(uncommitted, job.config.run.num_steps), None
    # after its step, for what a stop adds in the middle of the next one is in the whole checkpoint alone
    saves = saved_drafters(job, step + 1, end)
    missing = next((number for number in range(step) if number not in committed), None)
    if missing is not None and job.world.rank == 0:
        logger.warning(
            "%s has no line of step %d, which the checkpoint of step %d is beyond: what was logged since cannot be "
            "taken up where its line is missing, and its steps are generated again",
            job.folder.metrics, missing, step,
        )  # fmt: skip
    while True:
        if job.drafting and step in saves:
            loaded = saves.pop(step)
            job.drafting.load(loaded, job.world.node_group)
        if step >= end or job.world.agree_to_stop():
            break
        logged = read_ranks(job, step)
        if logged is None:
            break
        if not saves:
            train_drafter(job, step, logged.num_micro_steps)
        with BEAT.within(Phase.UPDATE, step):
            stats = update_policy(job.config, job.policy, logged.rollouts, logged.rewards).stats
        check_update(job.folder, step, logged.rewards, stats, committed[step])
        if job.world.rank == 0:
            shown(step)
        step += 1
    return Replayed(step, loaded)


def saved_drafters(job: Job, first: int, last: int) -> dict[int, Checkpoint]:
    """The checkpoints of the drafter alone of these steps, as rank 0 finds them; collective."""
    if job.drafting is None:
        return {}
    return job.world.once(partial(job.drafting.checkpoints.within, first, last))


def train_drafter(job: Job, step: int, num_micro_steps: int) -> None:
    """Train the drafter on a step's features as often as the run did, the ranks together; collective.

    Nothing where the run did not, or no rank sees the step's features any more. A stop request ends it early.
    """
    if job.drafting is None or not num_micro_steps:
        return
    spot, sees = job.drafting.spot, job.drafting.cache.look_back(step)
    if not any(job.world.allgather(sees)):
        return
    job.load_policy(step)  # whose head the drafter reads
    spot.begin(step)
    for _ in range(-(-num_micro_steps // job.world.size)):
        if job.world.stop_requested or not spot.micro_step():
            break
    spot.end()
    spot.start_merge(job.world)
    spot.finish_merge(job.world)


def is_committed(line: Line | None) -> bool:
    """Whether a step has a line that its repetition can be compared with; one of an earlier version has not."""
    return line is not None and {SCORE, TRAINED_TOKENS, PROBS_DIFF} <= line.keys()


@dataclass(frozen=True)
class LoggedStep:
    """What all ranks logged of a step, ordered by key."""

    rollouts: list[Rollout]
    rewards: NDArray[np.float32]
    num_micro_steps: int
    """Of the drafter, of all ranks together."""


def read_ranks(job: Job, step: int) -> LoggedStep | None:
    """A step from all its files; None where the log lacks any response. Collective.

    The files are sharded over the ranks, however many wrote them.

    Raises:
        ReplayError: on all ranks, where a file is there and cannot be read now, or the responses are to other prompts.
    """
    paths = job.world.once(lambda: job.folder.rollout_logs(step))
    rollouts: list[Rollout] = []
    rewards, num_micro_steps, damaged, unreadable = [np.zeros(0, np.float32)], 0, "", ""
    for path in paths[job.world.rank :: job.world.size]:
        try:
            record = read_step(path)
        except (DamagedFile, FileNotFoundError) as error:
            damaged = str(error)
        except OSError as error:
            unreadable = f"{path}: {error}"
        else:
            rollouts += record.rollouts
            rewards.append(record.rewards)
            num_micro_steps += len(record.micro_steps)
    reports = job.world.allgather((damaged, unreadable, num_micro_steps))
    everything = gather(job.world, rollouts, np.concatenate(rewards))
    for _, trouble, _ in reports:
        if trouble:
            raise ReplayError(f"{trouble}; nothing was changed: start again when it can be read")
    lacking = next((trouble for trouble, *_ in reports if trouble), "") or missing_responses(*everything, job, step)
    if lacking:
        if job.world.rank == 0:
            logger.warning("step %d and those after it are generated again: %s", step, lacking)
        return None
    return LoggedStep(*everything, sum(count for *_, count in reports))


def missing_responses(rollouts: Sequence[Rollout], rewards: NDArray[np.float32], job: Job, step: int) -> str:
    """What the log lacks of the responses to the step's requests by the step's weights; empty where it has all.

    Raises:
        ReplayError: it has responses to other prompts.
    """
    scores = dict(zip((rollout.key for rollout in rollouts), rewards, strict=True))
    draws, asked = StepDraws(job.config, job.prompts, step), dict[SampleKey, bytes]()
    requests = draws.requests()
    while requests:
        asked |= {request.key: request.prompt_tokens.tobytes() for request in requests}
        is_whole = asked.keys() <= scores.keys()
        more = is_whole and draws.needs_scores()
        requests = draws.refill(np.array([scores[key] for key in asked], np.float32)) if more else []
    for rollout in rollouts:
        if not is_whole and rollout.key.stream == Stream.REFILL:
            continue  # what was asked for cannot be told without what is lacking
        if asked.get(rollout.key) != rollout.prompt_tokens.astype(np.int32).tobytes():
            raise ReplayError(
                f"{job.folder.rollouts} has a response of step {step} to another prompt than data.source = "
                f"{job.config.data.source!r} gives; restore that, or set checkpoint.replay = false to generate the "
                "steps again"
            )
        if rollout.weight_version != step:
            return f"{job.folder.rollouts} has responses of weights {rollout.weight_version}"
    count = len(asked.keys() - scores.keys())
    return f"{job.folder.rollouts} lacks {count} of the {len(asked)} responses of step {step}" if count else ""


def check_update(folder: RunFolder, step: int, rewards: NDArray[np.float32], stats: PolicyStats, line: Line) -> None:
    """Refuse an update that is not the one the run's metrics tell of: then log and checkpoint are of different runs.

    Judged by how far the logged probabilities are from those of the weights that were loaded: in float32 1e-7 where
    they belong together, 1e-3 and more where the weights are those of a few steps earlier or later.

    Raises:
        ReplayError: with both values.
    """
    for name, found, tolerance in (
        (SCORE, mean_of(rewards), 1e-6 * max(1.0, abs(line[SCORE]))),
        (TRAINED_TOKENS, stats.num_tokens, 0),
        (PROBS_DIFF, stats.mismatch.rollout_probs_diff_mean, 2 * line[PROBS_DIFF] + _PROBS_TOLERANCE),
    ):
        if not abs(found - line[name]) <= tolerance:
            raise ReplayError(
                f"step {step}, repeated from {folder.rollouts}, has {name} {found:.6g} where {folder.metrics} has "
                f"{line[name]:.6g}: log and checkpoint are not of one run; set checkpoint.replay = false to generate "
                "the steps again"
            )
