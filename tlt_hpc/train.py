"""The main loop: roll out, reward, update, refresh. Every rank runs it from the first step not on disk to the last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_hpc.cluster.stopping import Stop
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import AHEAD, PREFILL, PhaseSpan, Rollout
from tlt_hpc.config import Config, UserError
from tlt_hpc.drafting.merge import sums_on_gpus
from tlt_hpc.drafting.spot_trainer import SpotTrainer
from tlt_hpc.drafting.tail_plan import STORED_ACCEPTED, STORED_TOKENS
from tlt_hpc.evaluate.between_steps import TESTING, evaluate_policy_all_ranks, read_exam_all_ranks
from tlt_hpc.evaluate.exam import Exam
from tlt_hpc.look.metrics import (
    DECODE_CPU,
    DUE,
    K3,
    KEPT_TOKENS,
    LATE,
    MERGE_EXPOSED,
    PROBS_DIFF,
    PhaseTimer,
    gather_step_metrics,
)
from tlt_hpc.mpi.owner import check_owner, check_owner_all_ranks
from tlt_hpc.mpi.roster import Roster
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.scorer import join_unjudged
from tlt_hpc.rl.ahead_generation import longest_ahead_texts
from tlt_hpc.rl.draws import gather_rollouts
from tlt_hpc.rl.update import update_policy
from tlt_hpc.rollout.acceptance import DraftCounts
from tlt_hpc.rollout.rounds import EngineCounts
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.run.job import Job, build_job
from tlt_hpc.run.kept_responses import remove_kept_responses
from tlt_hpc.run.rollout_loop import RollingReporter, RolloutOutcome, close_feature_cache, roll_out
from tlt_hpc.run.saving import (
    agree_to_continue,
    begin_drafter_save_if_due,
    drop_steps_after,
    reserve_copy,
    resume,
    save_at_end,
    save_checkpoint,
    write_final_drafter,
)
from tlt_hpc.storage.folder import RunFolder, rank_of, sync
from tlt_hpc.storage.records import record_finished
from tlt_hpc.storage.rollout_log import StepRecord, write_step
from tlt_hpc.storage.step_lines import Line, add_line, read_lines, replace_line

logger = logging.getLogger(__name__)


class Reporter(RollingReporter, Protocol):
    """Shows a run to its user; called on rank 0 only."""

    def show_replayed_step(self, step: int) -> None: ...

    def show_start(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None: ...

    def show_step(self, line: Line) -> None: ...

    def show_evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class RunResult:
    """The state of a run at its end; the same on every rank."""

    first_step: int
    """The step it began with, after what a checkpoint and the log had."""
    num_steps: int
    finished: bool
    policy_sha256: str
    """Empty unless it finished."""
    stop_reason: str
    """Empty unless a signal or a vote ended the run early."""


def run_training(
    config: Config, world: World, reporter: Reporter, follow: Callable[[int], None] | None = None
) -> RunResult:
    """Collective. Run, or resume, the job that ``config`` describes.

    Args:
        follow: on rank 0, called with the number of steps whose lines are whole, for trackers.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data), before any step.
    """
    with closing(build_job(config, world)) as job:
        *_, result = take_steps(job, follow, reporter)
    assert result is not None
    return result


def take_steps(job: Job, follow: Callable[[int], None] | None, reporter: Reporter) -> Iterator[RunResult | None]:
    """Collective. Take the steps that are left; yields None before each of them, and at last the run's result.

    Raises:
        ValueError: as ``run_training``.
    """
    config, world = job.config, job.world
    evaluation = read_exam_all_ranks(config, world, job.decoder.shape, job.tokenizer)
    saved, step = resume(job, reporter.show_replayed_step)
    first = step
    reserve_copy(job)
    if world.rank == 0:
        memory = job.engine.memory_table() | (job.drafting.spot.memory_table() if job.drafting else {})
        reporter.show_start(config, step, memory)
    if saved < step:  # so that nothing is replayed twice
        saved = save_checkpoint(job, step, saved)
    check_owner_all_ranks(world, job.folder.status, BEAT.start_name)
    world.run_first_and_broadcast(lambda: take_back_replaced_steps(job, step))
    judged = evaluate_and_track(job, evaluation, follow, step, reporter)
    timer = PhaseTimer()
    while step < config.run.num_steps:
        yield None
        if not agree_to_continue(world, job.checkpoints):
            break
        if not take_step(job, step, reporter, is_saved=saved == step, timer=timer):
            break
        step += 1
        with timer.recording_span("save_checkpoint"):
            if step % config.checkpoint.every_steps == 0:
                saved = save_checkpoint(job, step, saved)
            else:
                begin_drafter_save_if_due(job, step)
        with timer.recording_span("testing"):
            judged = evaluate_and_track(job, evaluation, follow, step, reporter)
    stop, is_saved = save_at_end(job, saved, step)
    finished = step >= config.run.num_steps and judged and is_saved
    digest = ""
    if finished:
        world.run_first_and_broadcast(lambda: write_final_drafter(job.folder, job.drafting))
        digest = job.policy.gather_weights_sha256()  # gathers the whole policy
        world.run_first_and_broadcast(lambda: record_finished(job.folder.finished, step, digest))
    yield RunResult(first, step, finished, digest, world.flag.reason if stop and not finished else "")


def take_step(job: Job, step: int, reporter: Reporter, is_saved: bool = False, timer: PhaseTimer | None = None) -> bool:
    """Collective. Take one step of the run; False where a stop vote ended it before the policy changed.

    ``is_saved``, alike on all ranks: there is a checkpoint of this step already, so a stop leaves nothing to save.
    ``timer`` has recorded what happened since the step before.
    """
    BEAT.enter_step(step)
    timer = timer or PhaseTimer()
    shows = job.world.rank == 0
    with timer("gen"):
        outcome = roll_out(job, step, reporter)
        if job.drafting:
            close_feature_cache(job.drafting, outcome.stopped)
    if outcome.stopped:
        if not is_saved:
            merge_for_checkpoint(job, step, outcome, reporter)
        return False
    with ExitStack() as merge:
        with timer("refresh"):
            merge.enter_context(merging_drafters(job, outcome.idle_work.trains))
        if shows:
            reporter.show_phase(step, "reward")
        with timer("reward"):
            rewards = outcome.scorer.judge_and_wait_for_rewards(outcome.rollouts)
            check_responses_judged_all_ranks(job.world, step, outcome)
            rollouts, scores = gather_step_rollouts(job, outcome.rollouts, rewards)
        if shows:
            reporter.show_phase(step, "update")
        # the merge has no other MPI call to make progress in while torch communicates
        with timer("update_actor"), job.pulse.progressing():
            job.engine.release_pages()
            update = update_policy(job.config, job.policy, rollouts, scores)
        with timer("refresh"):
            merge.close()
            if job.decoder.device.type == "cuda":
                torch.cuda.empty_cache()
                job.world.barrier()  # ranks that share a GPU take the pages' memory again when all have left theirs
            job.load_policy(step + 1)
    advantages_of = {rollouts[i].key: a for i, a in zip(update.trained, update.advantages, strict=True)}
    advantages = np.array([advantages_of.get(rollout.key, np.nan) for rollout in outcome.rollouts], np.float32)
    record = make_step_record(job, step, outcome, rewards, advantages, timer)
    merged = job.drafting.spot.merge_report if job.drafting else None
    line: Line = {
        **gather_step_metrics(job.world, record, update, merged, timer.take_phase_seconds()),
        "drafter/why": outcome.idle_work.why if job.drafting or outcome.idle_work.ahead else "no learned drafter",
    }
    job.tail_plan.add_step_metrics(line)
    write_and_commit_step_all_ranks(job.world, job.folder, step, record, line)
    if shows:
        reporter.show_step(line)
        if warning := job.mismatch.warning_for_step(line[PROBS_DIFF], line[K3]):
            logger.warning("step %d: %s", step + 1, warning)
    return True


def merge_for_checkpoint(job: Job, step: int, outcome: RolloutOutcome, reporter: Reporter) -> None:
    """Collective. Merge what was trained until a stop: it belongs to the checkpoint, and to all ranks alike.

    Where the job is killed at once, nothing is merged.
    """
    if job.world.agree_to_stop() is Stop.KILL:
        return
    if job.world.rank == 0:
        reporter.show_phase(step, "stopping: saving a checkpoint")
    with merging_drafters(job, outcome.idle_work.trains):
        pass


@contextmanager
def merging_drafters(job: Job, trains_drafter: bool) -> Iterator[None]:
    """Collective. Merge the ranks' drafters (``SpotTrainer.merging_drafters``) and load the merged one into the engine.

    Does nothing in a step that trains none.
    """
    if job.drafting is None or not trains_drafter:
        yield
        return
    if sums_on_gpus():
        job.engine.release_pages()  # the merge needs memory, too
    with job.drafting.spot.merging_drafters(job.world):
        yield
    job.load_engine_drafter()


def take_back_replaced_steps(job: Job, step: int) -> None:
    """Remove what steps from ``step`` on are about to write again, unless none is to be done; on rank 0."""
    if step < job.config.run.num_steps and not job.world.stop_requested:
        # logs that are about to be replaced are no committed step's
        drop_steps_after(job.folder, job.drafting, step)
        job.folder.finished.unlink(missing_ok=True)  # of fewer steps


def write_and_commit_step_all_ranks(world: World, folder: RunFolder, step: int, record: StepRecord, line: Line) -> None:
    """Collective. Write each rank's log of a step, then the step's line."""
    check_owner_all_ranks(world, folder.status, BEAT.start_name)
    world.run_on_all_ranks(lambda: write_step(folder.rollout_log(step, world.rank), record))
    world.run_first_and_broadcast(lambda: commit_step(folder, world.size, step, line))


def commit_step(folder: RunFolder, num_ranks: int, step: int, line: Line) -> None:
    """Commit a step by its line, once every rank's log is there; on rank 0.

    Raises:
        UserError, WriteError: the folder is another start's by now, or it cannot be written.
    """
    confirm = partial(check_owner, folder.status, BEAT.start_name)
    confirm()
    remove_foreign_logs(folder, num_ranks, step)
    # again: a start that was stopped for long meanwhile would remove the lines of the one that has taken over
    add_line(folder.metrics, line, confirm)
    remove_kept_responses(folder)


def check_responses_judged_all_ranks(world: World, step: int, outcome: RolloutOutcome) -> None:
    """Collective. Warn of responses that could not be judged, and end a run that has no others.

    Raises:
        UserError: on all ranks.
    """
    found = join_unjudged(world.allgather(outcome.scorer.find_unjudged(outcome.rollouts)))
    if not found.total:
        return
    if found.total == found.num_responses:
        raise UserError(
            f"none of the {found.total} responses of step {step + 1} could be judged: {found.explain()}; "
            "then start again"
        )
    if world.rank == 0:
        logger.warning(
            "step %d: %d of %d responses could not be judged and have reward 0: %s",
            step + 1, found.total, found.num_responses, found.explain(),
        )  # fmt: skip


# -- reward and update ----------------------------------------------------------------------------------------------


def gather_step_rollouts(
    job: Job, rollouts: Sequence[Rollout], rewards: NDArray[np.float32]
) -> tuple[list[Rollout], NDArray[np.float32]]:
    """Collective. Return all ranks' rollouts and rewards; the engine gets the texts generated ahead for its prompts."""
    texts = job.engine.ahead.take_finished_texts()  # the same on all ranks of a replica: one of them sends
    found = gather_rollouts(job.world, rollouts, rewards, texts if job.replica.index == 0 else {})
    job.engine.set_stored_texts(longest_ahead_texts(found.texts, lambda key: job.replica_of(key) == job.replica.number))
    return found.rollouts, found.rewards


def evaluate_and_track(
    job: Job, evaluation: Exam | None, follow: Callable[[int], None] | None, step: int, reporter: Reporter
) -> bool:
    """Collective. ``evaluate_if_due``, then give trackers all steps whose lines are complete."""
    judged = evaluate_if_due(job, evaluation, step, reporter)
    if follow:
        follow(step if judged else step - 1)
    return judged


def evaluate_if_due(job: Job, evaluation: Exam | None, step: int, reporter: Reporter) -> bool:
    """Collective. Evaluate the policy after ``step`` steps if that is due and the step's line has no figures of it.

    False if a stop vote cut it short: the next start resumes it.
    """
    every = job.config.evaluation.every_steps
    if evaluation is None or not step or (step % every and step < job.config.run.num_steps):
        return True
    line = job.world.run_first_and_broadcast(lambda: read_lines(job.folder.metrics, step - 1).get(step - 1))
    if line is None or TESTING in line:
        return True
    if job.world.rank == 0:
        reporter.show_phase(step - 1, "evaluation")

    def show(roster: Roster) -> None:
        left = sum(status.sequences_left for status in roster.statuses)
        reporter.show_phase(step - 1, f"evaluation, {format_count(left, 'response')} left")

    metrics = evaluate_policy_all_ranks(job, evaluation, step, show)
    if metrics is not None:
        with_figures = {**line, **metrics}
        job.world.run_first_and_broadcast(lambda: write_evaluation_figures(job.folder, with_figures))
        if job.world.rank == 0:
            reporter.show_evaluation(step, metrics)
    return metrics is not None


def write_evaluation_figures(folder: RunFolder, line: Line) -> None:
    """Replace a step's line by one with an evaluation's figures; on rank 0.

    Raises:
        UserError, WriteError: as ``commit_step``.
    """
    confirm = partial(check_owner, folder.status, BEAT.start_name)
    confirm()
    replace_line(folder.metrics, line, confirm)


# -- records --------------------------------------------------------------------------------------------------------


def make_step_record(
    job: Job,
    step: int,
    outcome: RolloutOutcome,
    rewards: NDArray[np.float32],
    advantages: NDArray[np.float32],
    timer: PhaseTimer,
) -> StepRecord:
    """Return this rank's record of a step; ``advantages`` [responses] are NaN where dynamic sampling left one out."""
    counts = job.engine.take_counts()
    if job.replica.index > 0:
        counts = counts.without_shared_counts()
    micro_steps = tuple(job.drafting.spot.records) if job.drafting else ()
    rounds, tokens = np.array([*counts.strategies.values()], np.int64).reshape(-1, 2).T
    kept = [rollout for rollout in outcome.rollouts if rollout.key in outcome.kept]
    ahead_seconds = sum((end - start for start, end in outcome.ahead_spans), 0.0)
    return StepRecord(
        step=step,
        rank=job.world.rank,
        num_ranks=job.world.size,
        rollouts=tuple(outcome.rollouts),
        rewards=rewards,
        advantages=advantages,
        timing=outcome.timings[0],
        refills=outcome.timings[1:],
        micro_steps=micro_steps,
        harvested_seconds=sum((m.end_seconds - m.start_seconds for m in micro_steps), 0.0) + ahead_seconds,
        strategy_names=tuple(counts.strategies),
        strategy_rounds=rounds,
        strategy_tokens=tokens,
        decisions=strategy_decisions(counts),
        spans=counts.spans,
        phases=(
            *(PhaseSpan(*span) for span in timer.take_spans()),
            *(PhaseSpan(AHEAD, *s) for s in outcome.ahead_spans),
        ),
        guarded_near_ties=counts.num_guarded,
        metrics={
            "rollout/preemptions": float(counts.num_preempted),
            "rollout/drafter_faults": float(counts.num_drafter_faults),
            **{f"rollout/{name}_seconds": seconds for name, seconds in vars(counts.seconds).items()},
            "ahead/seconds": ahead_seconds,
            "ahead/tokens": float(counts.num_ahead),
            STORED_TOKENS: float(outcome.num_stored),
            "ahead/drafts": float(counts.num_stored),
            STORED_ACCEPTED: float(counts.num_stored_accepted),
            LATE: outcome.late_seconds,
            DECODE_CPU: outcome.decode_cpu_seconds,
            "rollout/kept": float(len(kept)),
            KEPT_TOKENS: float(sum(len(rollout.response_tokens) for rollout in kept)),
            **outcome.scorer.metrics(),
            **timer.take_cpu(),
            **(drafter_metrics(job.drafting.spot, outcome.idle_work.trains) if job.drafting else {}),
            **(learned_drafter_counts(job.engine.settings, counts).to_summable_metrics() if job.drafting else {}),
        },
    )


def drafter_metrics(spot: SpotTrainer, trains: bool) -> dict[str, float]:
    """Return figures of the learned drafter's training on this rank; ``trains``: the step trains it."""
    return {
        DUE: float(trains),
        MERGE_EXPOSED: spot.merge_report.exposed_seconds,
        "drafter/cut_rank_seconds": spot.cut_seconds,
        "drafter/skipped_steps": float(spot.num_skipped),
        "drafter/dropped_replicas": float(spot.merge_report.is_dropped),
    }


def learned_drafter_counts(settings: EngineSettings, counts: EngineCounts) -> DraftCounts:
    """Counts of the learned drafter's drafts, by all its strategies together."""
    families = {strategy.family for strategy in settings.strategies if strategy.has_drafter}
    return DraftCounts.total(counts.drafts[family] for family in sorted(families & counts.drafts.keys()))


def strategy_decisions(counts: EngineCounts) -> NDArray[np.int32]:
    """Live sequences and index of the strategy [D, 2] of every round."""
    spans = counts.spans
    columns = np.stack([spans.num_live, spans.strategy_index.astype(np.int32)], 1)
    rounds: NDArray[np.int32] = columns[spans.strategy_index != PREFILL]
    return rounds


def remove_foreign_logs(folder: RunFolder, num_ranks: int, step: int) -> None:
    """Remove a step's files of ranks that are no more: a run resumed on fewer of them has written the step again."""
    foreign = [path for path in folder.rollout_logs(step) if rank_of(path) >= num_ranks]
    for path in foreign:
        path.unlink()
    if foreign:
        sync(foreign[0].parent)  # if a power failure brought them back, the line would commit them, too
