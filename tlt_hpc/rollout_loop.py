"""One step's rollout on this rank, and what is done while it waits for the others: rewards, then the drafter.

Knows neither the policy's update nor what is written of a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from tlt_hpc.cluster.watch.beat import BEAT, Phase
from tlt_hpc.common.records import Request, Rollout, RolloutTiming, SampleKey
from tlt_hpc.config import UserError
from tlt_hpc.drafting.schedule import Decision, DraftCounts, decide
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.resume.kept import Keeper, open_keeper
from tlt_hpc.rewards.scorer import Scorer
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.session import Job, generate, is_own, shard
from tlt_hpc.storage.step_lines import read_lines


class RollingReporter(Protocol):
    """Whoever shows a rollout while it goes on; called on rank 0 alone."""

    def rolling(self, step: int, roster: Roster) -> None: ...

    def phase(self, step: int, name: str) -> None: ...


@dataclass(frozen=True)
class Tail:
    """What a rollout left on this rank: its shard, its times, and whether a stop vote cut it short."""

    rollouts: list[Rollout]
    timings: tuple[RolloutTiming, ...]
    """Of the step's own rollout, and of each refill."""
    stopped: bool
    scorer: Scorer
    """With the rewards that were found while the rank waited."""
    decision: Decision
    """Whether the step trains the drafter."""
    late_seconds: float
    """From this rank's knowing of a release to its leaving the loop, the longest."""
    kept: Set[SampleKey]
    """Of the responses that an earlier start has left, of all ranks."""


@dataclass(frozen=True)
class Part:
    """One rollout of a step: its own, or a refill."""

    timing: RolloutTiming
    stopped: bool
    late_seconds: float


def roll_out(job: Job, step: int, reporter: RollingReporter) -> Tail:
    """Generate a step's responses, apart from those that an earlier start has kept; collective.

    A rank that has finished scores and trains the drafter meanwhile: ``StepGeneration.on_idle``.
    """
    decision = decide_training(job, step)
    keeper, kept = open_keeper(job, step)
    draws = StepDraws(job.config, job.prompts, step)
    scorer = make_scorer(job, draws)
    begin_features(job, step)
    trains = decision.trains and trains_in_tail(job)
    requests, parts = draws.requests(), list[Part]()
    while requests:
        left = take_up(job, requests, keeper, kept)
        parts.append(generate_part(job, step, left, scorer, keeper, trains, reporter))
        requests = [] if parts[-1].stopped else refill(job, draws, scorer)
        if requests and job.world.rank == 0:
            reporter.phase(step, f"refill {draws.num_refills} of at most {job.config.algorithm.max_refills}")
    timings = tuple(part.timing for part in parts)
    late = max(part.late_seconds for part in parts)
    return Tail(job.engine.collect(), timings, parts[-1].stopped, scorer, decision, late, kept.keys())


def take_up(job: Job, requests: list[Request], keeper: Keeper, kept: Mapping[SampleKey, Rollout]) -> list[Request]:
    """Those of the requests that are still to be generated.

    What was kept of the others stands among the engine's finished ones from here on, on the ranks whose it is: it is
    scored, gathered and logged like any other.

    Raises:
        UserError: on all ranks, where a kept response is to another prompt.
    """
    left = still_to_do(requests, kept, job.config.data.source)
    own = [kept[request.key] for request in requests if request.key in kept and is_own(job, request.key)]
    job.engine.take_over(own)
    keeper.skip(len(own))
    return left


def still_to_do(requests: list[Request], kept: Mapping[SampleKey, Rollout], source: object) -> list[Request]:
    """Those of the requests that nothing was kept of.

    Raises:
        UserError: on all ranks, where a kept response is to another prompt.
    """
    for request in requests:
        rollout = kept.get(request.key)
        if rollout is not None and not np.array_equal(rollout.prompt_tokens, request.prompt_tokens):
            raise UserError(
                f"a response of step {request.key.step} that an earlier start has kept is to another prompt than "
                f"data.source = {source!r} gives; restore that, or remove the run's folder kept/"
            )
    return [request for request in requests if request.key not in kept]


@BEAT.within(Phase.REWARD)
def refill(job: Job, draws: StepDraws, scorer: Scorer) -> list[Request]:
    """What replaces the groups that teach nothing, of all ranks; none where there are enough. Collective."""
    if not draws.needs_scores():
        return []
    own = list(job.engine.finished)
    scored = list(zip((rollout.key for rollout in own), scorer.rewards(own).tolist(), strict=True))
    ranks = job.world.allgather(scored)  # scores alone: the responses are gathered once, for the update
    return draws.refill(np.array([score for _, score in sorted(chain.from_iterable(ranks))], np.float32))


@dataclass
class StepGeneration:
    """This rank's part in a rollout, as ``session.generate`` drives it."""

    job: Job
    scorer: Scorer
    keeper: Keeper
    trains: bool
    """Whether the step trains the drafter on idle ranks."""
    last_token: float
    """When this rank generated its last token, in seconds since the epoch."""

    @property
    def has_work(self) -> bool:
        return self.job.engine.has_work

    def status(self) -> Status:
        return status(self.job)

    def step(self) -> None:
        """One round of decoding; what has ended may be scored by the reward server meanwhile."""
        decode(self.job)
        self.last_token = time.time()
        self.scorer.offer(self.job.engine.finished)

    def on_idle(self, roster: Roster) -> bool:
        """Score responses, and once all are scored train the drafter; False where there is nothing to do."""
        return use_wait(self.job, self.scorer, self.trains and worth_training(self.job, roster))

    def keep_finished(self) -> None:
        """Write finished responses where that is due."""
        if self.keeper.is_due(self.job.engine.finished):
            with self.job.pulse.progressing():
                self.keeper.keep(self.job.engine.finished)


def generate_part(
    job: Job,
    step: int,
    requests: list[Request],
    scorer: Scorer,
    keeper: Keeper,
    trains: bool,
    reporter: RollingReporter,
) -> Part:
    """Generate; once this rank runs dry, score and train the drafter until the last rank has finished.

    Args:
        requests: all ranks'.
        trains: whether the step trains the drafter while it waits.
    """
    start = time.time()
    work = StepGeneration(job, scorer, keeper, trains, start)

    def shown(roster: Roster) -> None:
        work.keep_finished()
        if job.world.rank == 0:
            reporter.rolling(step, roster)

    job.engine.submit(shard(job, requests))
    roster = generate(job.pulse, work, step, shown)
    late_seconds = time.perf_counter() - job.pulse.released_at
    timing = RolloutTiming(start, work.last_token, time.time())
    if roster.stopping:
        job.engine.abort()
    keeper.keep(job.engine.finished, durable=roster.stopping)  # the update may take long, and may be killed
    return Part(timing, roster.stopping, late_seconds)


def worth_training(job: Job, roster: Roster) -> bool:
    """Whether this rank, which is idle, should train rather than wait."""
    return roster.worth_training(job.config.drafter.min_idle, job.world.rank)


def begin_features(job: Job, step: int) -> None:
    """Open this rank's feature cache for the step, and have the engine fill it; a full disk leaves the step without."""
    if job.drafting is None:
        return
    cache = job.drafting.cache
    with cache.giving_up():
        cache.begin_step(step, job.engine.decoder.version)
    job.engine.feature_sink = cache.append
    job.drafting.spot.begin(step)


@BEAT.within(Phase.SAVING)
def end_features(job: Job, tail: Tail) -> None:
    """Close the feature cache of the step: nothing is trained on it before the next rollout."""
    if job.drafting is None:
        return
    job.drafting.spot.end()
    if tail.stopped:
        job.drafting.cache.abandon_step()
        return
    with job.drafting.cache.giving_up():
        job.drafting.cache.end_step()


def decode(job: Job) -> None:
    """One round of decoding; a prefill may take long, and the others' rounds go on meanwhile."""
    if not job.engine.has_waiting:
        job.engine.step()
        return
    with job.pulse.progressing():
        job.engine.step()


def use_wait(job: Job, scorer: Scorer, trains: bool) -> bool:
    """Something useful while others generate, rewards first; False where there is nothing to do."""
    if scorer.has_unscored(job.engine.finished):
        with job.pulse.progressing(status(job)):
            scorer.score_ahead(job.engine.finished, lambda: is_over(job))
        return True
    return trains and train(job)


def train(job: Job) -> bool:
    """One micro-step of the drafter; the pulse goes on meanwhile, so that the release ends it at once."""
    assert job.drafting is not None
    with job.pulse.progressing(status(job)._replace(state=State.TRAINING)):
        return job.drafting.spot.micro_step(lambda: is_over(job))


def is_over(job: Job) -> bool:
    """Whether this rank should come back to its loop: the rollout is over, or it has a stop to vote for."""
    return job.pulse.over or job.world.stop_requested


def trains_in_tail(job: Job) -> bool:
    """Whether idle ranks train the drafter during the rollout."""
    return job.drafting is not None and job.drafting.training.in_tail


def train_after_rollout(job: Job, step: int, tail: Tail) -> None:
    """Train the drafter where the run does so after the rollout; a step that was stopped does not."""
    if job.drafting and tail.decision.trains and not tail.stopped:
        job.drafting.training.after_rollout(job.drafting.spot, step, job.world.rank, lambda: job.world.stop_requested)


def decide_training(job: Job, step: int) -> Decision:
    """Whether the step trains the drafter; collective: rank 0 reads the log, so all decide alike."""
    if job.drafting is None:
        return Decision(False, "no learned drafter")
    if not job.config.drafter.train:
        return Decision(False, "frozen")
    return job.world.once(lambda: decide(job.config.drafter, step, past_drafts(job, step)))


def past_drafts(job: Job, step: int) -> list[DraftCounts]:
    """What the log tells of the learned drafter's rounds in the steps before ``step``."""
    lines = read_lines(job.folder.metrics)
    return [DraftCounts.from_metrics(line) for number, line in lines.items() if number < step]


def status(job: Job) -> Status:
    """What this rank tells the others."""
    engine = job.engine
    steps = len(job.drafting.spot.records) if job.drafting else 0
    state = State.BUSY if engine.has_work else State.TRAINING if steps else State.IDLE
    return Status(state, engine.num_unfinished, engine.num_tokens, steps, job.world.stop_requested)


def make_scorer(job: Job, draws: StepDraws) -> Scorer:
    """What gives the step's responses their rewards."""

    def text_of(rollout: Rollout) -> str:
        return job.tokenizer.decode(rollout.response_tokens.tolist(), skip_special_tokens=True)

    return Scorer(job.bench, draws.prompt_of, text_of)
