"""Repeats the updates of steps that the rollout log has and no checkpoint; nothing is generated again.

A step is committed once its line is in ``metrics.jsonl``: rank 0 writes it when every rank's log of the step is in
place. So a kill costs the step in progress, however old the last whole checkpoint is. Where the drafter was not saved
since, and the step's features are still on disk (those of the last two), it takes as many micro-steps again as the log
has. They are not the same ones, for they depended on the clock; no text depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.common.records import Rollout, SampleKey, Stream
from tlt_hpc.config import UserError
from tlt_hpc.look.metrics import PROBS_DIFF, SCORE, TRAINED_TOKENS, mean_of
from tlt_hpc.rl.draws import StepDraws, gather_rollouts
from tlt_hpc.rl.stats import PolicyStats
from tlt_hpc.rl.update import update_policy
from tlt_hpc.run.job import Job
from tlt_hpc.run.kept_responses import find_excluded_token_text
from tlt_hpc.storage.folder import RunFolder, wait_for_listed_files
from tlt_hpc.storage.hdf5 import DamagedFile, UnreadableFile
from tlt_hpc.storage.rollout_log import StepRecord, read_step, read_summary
from tlt_hpc.storage.step_lines import Line, read_lines

logger = logging.getLogger(__name__)

_PROBS_TOLERANCE = 1e-4
"""On other ranks, or a device whose sums have no fixed order, an update's last bits differ: far less than this."""


class ReplayError(UserError):
    """The rollout log does not belong to the checkpoint; one line with the remedy."""


def replay(job: Job, step: int, shown: Callable[[int], None]) -> tuple[int, Checkpoint | None]:
    """Collective. Repeat the committed steps' updates from ``step`` on.

    Returns the first step that is still to be generated, and the checkpoint that the drafter was last loaded from.

    The drafter is loaded from each checkpoint of it alone on the way, and trained on the steps after the last of these.
    Ends before a step whose log is incomplete or damaged, with a warning, and at a stop vote. ``shown`` is called on
    rank 0 with every step that was repeated.

    Raises:
        ReplayError: on all ranks, where an update is not the one that the run made.
    """
    committed = job.world.run_first_and_broadcast(lambda: read_lines(job.folder.metrics))
    uncommitted = next(number for number in count(step) if not is_committed(committed.get(number)))
    end, loaded = min(uncommitted, job.config.run.num_steps), None
    # after its step, for what a stop adds in the middle of the next one is in the whole checkpoint alone
    saves: dict[int, Checkpoint] = {}
    if job.drafting:
        saves = job.world.run_first_and_broadcast(
            partial(job.drafting.checkpoints.open_checkpoints_within, step + 1, end)
        )
    if step < end:
        job.world.print_once("repeating updates from the rollout logs")
    while True:
        if job.drafting and step in saves:
            loaded = saves.pop(step)
            job.drafting.load(loaded, job.world.node_group)
        if step >= end or job.world.agree_to_stop() or (logged := gather_logged_step(job, step)) is None:
            break
        rollouts, rewards, num_micro_steps = logged
        if not saves:
            train_drafter(job, step, num_micro_steps)
        job.engine.release_pages()
        with BEAT.in_phase(Phase.UPDATE, step):
            stats = update_policy(job.config, job.policy, rollouts, rewards).stats
        check_update(job.folder, step, rewards, stats, committed[step])
        if job.world.rank == 0:
            shown(step)
        step += 1
    return step, loaded


def train_drafter(job: Job, step: int, num_micro_steps: int) -> None:
    """Collective. Train the drafter on a step's features for as many micro-steps as the run did.

    Does nothing if the run did not, or no rank sees the step's features any more. A stop request ends it early.
    """
    if job.drafting is None or not num_micro_steps:
        return
    spot, sees = job.drafting.spot, job.drafting.cache.set_previous_step(step)
    if not any(job.world.allgather(sees)):
        return
    job.load_policy(step)  # whose head the drafter reads
    spot.begin_rollout(step)
    for _ in range(-(-num_micro_steps // job.world.size)):
        if job.world.stop_requested or not spot.take_micro_step():
            break
    spot.end_rollout()
    with spot.merging_drafters(job.world):
        pass


def is_committed(line: Line | None) -> bool:
    """Return True if a step has a line with all figures that its repetition is compared with."""
    return line is not None and {SCORE, TRAINED_TOKENS, PROBS_DIFF} <= line.keys()


def gather_logged_step(job: Job, step: int) -> tuple[list[Rollout], NDArray[np.float32], int] | None:
    """Collective. Read a step from all its files: rollouts and rewards by key, the drafter's micro-steps on all ranks.

    Returns None if the log lacks any response. The files are sharded over the ranks, however many wrote them.

    Raises:
        UserError: on all ranks, if a file exists and cannot be read now, or the responses are to other prompts.
    """
    world, paths = job.world, job.world.run_first_and_broadcast(lambda: wait_for_step_logs(job.folder, step))
    found = world.run_on_all_ranks(lambda: _read_logs(paths[world.rank :: world.size]))
    records = [record for record in found if isinstance(record, StepRecord)]
    damage = "".join(error for error in found if isinstance(error, str))
    reports = world.allgather((damage, sum(len(record.micro_steps) for record in records)))
    rewards = np.concatenate([np.zeros(0, np.float32), *(record.rewards for record in records)])
    own = [rollout for record in records for rollout in record.rollouts]
    gathered = gather_rollouts(world, own, rewards, {})
    damaged = next((damage for damage, _ in reports if damage), "")
    draws = StepDraws(job.config, job.prompts, step)
    excluded = job.assets.excluded_token_ids
    lacking = damaged or describe_missing_responses(gathered.rollouts, gathered.rewards, draws, excluded, job.folder)
    if lacking:
        if world.rank == 0:
            logger.warning("step %d and those after it are generated again: %s", step + 1, lacking)
        return None
    return gathered.rollouts, gathered.rewards, sum(count for _, count in reports)


def wait_for_step_logs(folder: RunFolder, step: int) -> list[Path]:
    """Return all ranks' logs of a committed step, after waiting for those that a client of NFS does not list yet."""
    first = folder.rollout_log(step, 0)
    if not wait_for_listed_files(first.parent, {first.name}):
        with suppress(DamagedFile, FileNotFoundError):  # as is reported when it is read
            num_ranks = read_summary(first).num_ranks
            wait_for_listed_files(first.parent, {folder.rollout_log(step, rank).name for rank in range(num_ranks)})
    return folder.rollout_logs(step)


def _read_logs(paths: Sequence[Path]) -> list[StepRecord | str]:
    if paths:
        wait_for_listed_files(
            paths[0].parent, {path.name for path in paths}
        )  # rank 0 may have listed them on another node
    return [_read_log(path) for path in paths]


def _read_log(path: Path) -> StepRecord | str:
    """One rank's log of a step, or what is wrong with the file.

    Raises:
        UserError: it cannot be read now.
    """
    try:
        return read_step(path)
    except UnreadableFile as error:
        raise UserError(f"{error}; nothing was changed") from None
    except (DamagedFile, FileNotFoundError) as error:
        return str(error)


def describe_missing_responses(
    rollouts: Sequence[Rollout],
    rewards: NDArray[np.float32],
    draws: StepDraws,
    excluded: Sequence[int],
    folder: RunFolder,
) -> str:
    """Return in words which responses of a step its log lacks, or has of other weights; empty if it has all.

    Raises:
        ReplayError: it has responses to other prompts, or tokens that are never sampled now.
    """
    scores = dict(zip((rollout.key for rollout in rollouts), rewards, strict=True))
    step, asked, log = draws.step, dict[SampleKey, bytes](), folder.rollouts
    again = _regeneration_remedy(folder, step)
    if told := find_excluded_token_text(rollouts, excluded):
        raise ReplayError(f"{log} has {told}; restore the model's tokenizer files, or {again}")
    requests = draws.first_requests()
    while requests:
        asked |= {request.key: request.prompt_tokens.tobytes() for request in requests}
        is_whole = asked.keys() <= scores.keys()
        more = is_whole and draws.allows_refill()
        requests = draws.draw_refill_requests(np.array([scores[key] for key in asked], np.float32)) if more else []
    for rollout in rollouts:
        if not is_whole and rollout.key.stream == Stream.REFILL:
            continue  # which refills were drawn depends on the scores that are missing
        if asked.get(rollout.key) != rollout.prompt_tokens.astype(np.int32).tobytes():
            raise ReplayError(
                f"{log} has a response of step {step + 1} to another prompt than data.source = "
                f"{draws.config.data.source!r} gives; restore that, or {again}"
            )
        if rollout.weight_version != step:
            return f"{log} has responses of weights {rollout.weight_version}"
    count = len(asked.keys() - scores.keys())
    return f"{log} lacks {count} of the {len(asked)} responses of step {step + 1}" if count else ""


def _regeneration_remedy(folder: RunFolder, step: int) -> str:
    """The remedy where a step's log cannot be used."""
    return f"remove {folder.rollout_log(step, 0).parent} to generate this step and those after it again"


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
                f"step {step + 1}, repeated from {folder.rollouts}, has {name} {found:.6g} where {folder.metrics} has "
                f"{line[name]:.6g}: log and checkpoint are not of one run; {_regeneration_remedy(folder, step)}"
            )
