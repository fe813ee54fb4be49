"""One step's rollout on this rank, and its work while it waits for the others.

It scores responses first; then it trains the drafter or generates responses of the next step ahead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.common.records import Request, Rollout, RolloutTiming, SampleKey
from tlt_hpc.config import UserError
from tlt_hpc.drafting.tail_plan import IdleWork
from tlt_hpc.mpi.pulse import Pulse
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.scorer import Scorer
from tlt_hpc.rl.ahead_generation import AheadGeneration
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.run.job import Drafting, Job
from tlt_hpc.run.kept_responses import Keeper, find_excluded_token_text, open_keeper_all_ranks
from tlt_hpc.run.session import decode_response_text, engine_status


class RollingReporter(Protocol):
    """Shows a rollout in progress; called on rank 0 only."""

    def show_rollout(self, step: int, roster: Roster) -> None: ...

    def show_phase(self, step: int, name: str) -> None: ...


@dataclass(frozen=True)
class RolloutOutcome:
    """Outcome of a rollout on this rank: its shard, its times, and whether a stop vote cut it short."""

    rollouts: list[Rollout]
    timings: tuple[RolloutTiming, ...]
    """Times of the step's own rollout, and of each refill."""
    stopped: bool
    scorer: Scorer
    """With the rewards that were found while the rank waited."""
    idle_work: IdleWork
    """Use of idle ranks."""
    num_stored: int
    """Tokens that were generated ahead for this rank's responses."""
    ahead_spans: list[tuple[float, float]]
    """Times at which this rank generated ahead, in seconds since the epoch."""
    late_seconds: float
    """From when this rank learned of a release to its leaving the loop, the longest."""
    decode_cpu_seconds: float
    """User and system time of this process until its own last token, refills added."""
    kept: Set[SampleKey]
    """Keys of the responses that an earlier start has kept, of all ranks."""


def roll_out(job: Job, step: int, reporter: RollingReporter) -> RolloutOutcome:
    """Collective. Generate a step's responses, apart from those that an earlier start has kept.

    A rank that has finished meanwhile scores responses, then trains the drafter or generates the next step's responses.
    """
    idle_work = job.tail_plan.choose_idle_work()
    begun = time.time(), time.process_time()
    keeper, kept = open_keeper_all_ranks(job.config, job.folder, job.world, step)
    draws = StepDraws(job.config, job.prompts, step)
    scorer = Scorer(
        job.judge, draws.prompt_of, lambda rollout: decode_response_text(job.tokenizer, rollout.response_tokens)
    )
    if job.drafting:
        open_feature_cache(job.drafting, job.engine, step)
    num_stored = job.engine.num_stored_tokens if job.replica.index == 0 else 0
    has_next = idle_work.ahead and step + 1 < job.config.run.num_steps
    following = StepDraws(job.config, job.prompts, step + 1).first_requests() if has_next else []
    ahead = AheadGeneration(job.engine, job.replica, job.pulse, job.split_by_replica(following))
    requests, timings, late_seconds, stopped = draws.first_requests(), list[RolloutTiming](), list[float](), False
    cpu_seconds = 0.0
    while requests:
        left = add_kept_to_engine(job, requests, keeper, kept)
        timing, cpu, late, stopped = generate_until_all_finish(
            job, step, left, scorer, keeper, idle_work, ahead, begun, reporter
        )
        timings.append(timing)
        cpu_seconds += cpu
        late_seconds.append(late)
        requests = [] if stopped else gather_refill_requests(job.world, job.engine, draws, scorer)
        begun = time.time(), time.process_time()
        if requests and job.world.rank == 0:
            reporter.show_phase(step, f"refill {draws.num_refills} of at most {job.config.algorithm.max_refills}")
    job.engine.ahead.end_and_keep_texts()
    late = max(late_seconds)
    rollouts = job.engine.take_finished_rollouts()
    return RolloutOutcome(
        rollouts, tuple(timings), stopped, scorer, idle_work, num_stored, ahead.spans, late, cpu_seconds, kept.keys()
    )


def add_kept_to_engine(
    job: Job, requests: list[Request], keeper: Keeper, kept: Mapping[SampleKey, Rollout]
) -> list[Request]:
    """The requests that are still to be generated.

    Kept responses to the others join the engine's finished ones on the ranks that own them: they are scored, gathered
    and logged like any other.

    Raises:
        UserError: as ``requests_without_kept``.
    """
    left = requests_without_kept(requests, kept, job.config.data.source, job.assets.excluded_token_ids)
    own = [kept[request.key] for request in requests if request.key in kept and job.owns_response(request.key)]
    job.engine.add_finished_rollouts(own)
    keeper.count_as_written(len(own))
    return left


def requests_without_kept(
    requests: list[Request], kept: Mapping[SampleKey, Rollout], source: object, excluded: Sequence[int]
) -> list[Request]:
    """The requests for which nothing was kept.

    Raises:
        UserError: on all ranks, if a kept response is to another prompt, or has a token of ``excluded``.
    """
    for request in requests:
        rollout = kept.get(request.key)
        if rollout is not None and not np.array_equal(rollout.prompt_tokens, request.prompt_tokens):
            raise UserError(
                f"a response of step {request.key.step + 1} that an earlier start has kept is to another prompt than "
                f"data.source = {source!r} gives; restore that, or remove the run's folder kept/"
            )
    used = [kept[request.key] for request in requests if request.key in kept]
    if told := find_excluded_token_text(used, excluded):
        raise UserError(f"an earlier start has kept {told}; remove the run's folder kept/ to generate it again")
    return [request for request in requests if request.key not in kept]


@BEAT.in_phase(Phase.REWARD)
def gather_refill_requests(world: World, engine: RolloutEngine, draws: StepDraws, scorer: Scorer) -> list[Request]:
    """Collective. Draw all ranks' requests that replace zero-variance groups; none if there are enough others."""
    if not draws.allows_refill():
        return []
    own = list(engine.finished_rollouts)
    scored = list(zip((rollout.key for rollout in own), scorer.judge_and_wait_for_rewards(own).tolist(), strict=True))
    ranks = world.allgather(scored)  # scores alone: the responses are gathered once, for the update
    return draws.draw_refill_requests(np.array([score for _, score in sorted(chain.from_iterable(ranks))], np.float32))


def generate_until_all_finish(
    job: Job,
    step: int,
    requests: list[Request],
    scorer: Scorer,
    keeper: Keeper,
    idle_work: IdleWork,
    ahead: AheadGeneration,
    begun: tuple[float, float],
    reporter: RollingReporter,
) -> tuple[RolloutTiming, float, float, bool]:
    """Generate; once this rank has finished, score, then train the drafter or generate ahead until the last rank has
    finished.

    Returns the times, the CPU seconds until this rank's last token, the seconds from the release until this rank left
    the loop, and whether a stop vote ended it.

    Args:
        requests: all ranks'.
        idle_work: what idle ranks do.
        begun: when this rank began, in seconds since the epoch, and its CPU seconds then.
    """
    engine, world = job.engine, job.world
    (start, cpu_start), last_token, cpu_last = begun, time.time(), time.process_time()

    def on_round() -> None:
        nonlocal last_token, cpu_last
        last_token, cpu_last = time.time(), time.process_time()
        scorer.submit_and_poll(engine.finished_rollouts)

    def status() -> Status:
        return rank_status(engine, world, job.drafting, ahead)

    def on_idle(roster: Roster) -> bool:
        return train_or_generate_ahead(job, scorer, idle_work, ahead, roster)

    def shown(roster: Roster) -> None:
        if keeper.is_due(engine.finished_rollouts):
            with job.pulse.progressing():
                keeper.write_new_responses(engine.finished_rollouts)
        if world.rank == 0:
            reporter.show_rollout(step, roster)

    own = job.own_replica_requests(requests)
    roster = job.generate(engine, own, on_idle=on_idle, on_round=on_round, status=status, shown=shown, epoch=step)
    late_seconds = time.perf_counter() - job.pulse.released_at
    timing = RolloutTiming(start, last_token, time.time())
    engine.abort()  # of its own, what a stop leaves
    ahead.end_idle_span()
    # the update may take long, and may be killed
    keeper.write_new_responses(engine.finished_rollouts, durable=roster.has_stop_vote)
    return timing, cpu_last - cpu_start, late_seconds, roster.has_stop_vote


def train_or_generate_ahead(
    job: Job, scorer: Scorer, idle_work: IdleWork, ahead: AheadGeneration, roster: Roster
) -> bool:
    """Score responses, or else train the drafter for one micro-step or generate ahead; False if there is nothing to do.

    The pulse continues meanwhile, so that the release ends any of them at once.
    """
    now = rank_status(job.engine, job.world, job.drafting, ahead)
    if job.world.stop_requested and (now.state is not State.AHEAD or job.replica.size == 1):
        return False  # nothing is begun while the vote is on its way, and the core is left to others
    if scorer.has_unscored(job.engine.finished_rollouts):
        with job.pulse.progressing(now):
            scorer.score_while_waiting(job.engine.finished_rollouts, lambda: is_over(job.pulse, job.world))
        if job.replica.size == 1:
            return True
    if now.state is State.AHEAD:  # the ranks of a replica do so together, whatever each of them has scored
        ahead.generate_ahead_slice(roster, now, lambda: is_over(job.pulse, job.world))
        return True
    if not (idle_work.trains and roster.others_still_generate(job.world.rank)):
        return False
    assert job.drafting is not None
    with job.pulse.progressing(now._replace(state=State.TRAINING)):
        return job.drafting.spot.take_micro_step(lambda: is_over(job.pulse, job.world))


def is_over(pulse: Pulse, world: World) -> bool:
    """True if this rank should return to its loop: the rollout is over, or it has a stop to vote for."""
    return pulse.is_over or world.stop_requested


def rank_status(engine: RolloutEngine, world: World, drafting: Drafting | None, ahead: AheadGeneration) -> Status:
    """Return the status that this rank reports to the others in a training run's rollout."""
    now, steps = engine_status(engine, world), len(drafting.spot.records) if drafting else 0
    state = now.state
    if state is State.IDLE and ahead.has_work:
        state = State.AHEAD
    elif state is State.IDLE and steps:
        state = State.TRAINING
    return now._replace(state=state, drafter_steps=steps)


def open_feature_cache(drafting: Drafting, engine: RolloutEngine, step: int) -> None:
    """Open this rank's feature cache for the step, and have the engine fill it; a full disk leaves the step without."""
    with drafting.cache.tolerating_write_errors():
        drafting.cache.begin_step(step, engine.decoder.version)
    engine.outbox.set_sink(drafting.cache.append)
    drafting.spot.begin_rollout(step)


@BEAT.in_phase(Phase.SAVING)
def close_feature_cache(drafting: Drafting, stopped: bool) -> None:
    """Close the feature cache of the step: nothing is trained on it before the next rollout."""
    drafting.spot.end_rollout()
    if stopped:
        drafting.cache.abandon_step()
        return
    with drafting.cache.tolerating_write_errors():
        drafting.cache.end_step()
