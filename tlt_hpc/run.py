"""The main loop: roll out, reward, update, refresh. Every rank runs it from the first step not on disk to the last."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.checkpoint.manifest import Checkpoint, CheckpointError
from tlt_hpc.checkpoint.store import Shard
from tlt_hpc.config import Config
from tlt_hpc.drafting.spot import MergeReport
from tlt_hpc.job import DRAFTER_FILE, Job, assemble
from tlt_hpc.metrics import StepSummary, summarise
from tlt_hpc.models.piece import deal
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World
from tlt_hpc.records import Request, Rollout, RolloutTiming, SampleKey, Stream
from tlt_hpc.rl.advantage import group_advantages
from tlt_hpc.rl.reward import score_rollouts
from tlt_hpc.rollout.engine import EngineCounts
from tlt_hpc.storage.folder import rank_of, writing_beside
from tlt_hpc.storage.rollout_log import StepRecord, write_step
from tlt_hpc.timing import PhaseTimer

_CALIBRATION_RESPONSES = 8


class Reporter(Protocol):
    """Whoever shows a run to its user; called on rank 0 alone."""

    def started(self, config: Config, first_step: int, memory: Mapping[str, int]) -> None: ...

    def rolling(self, step: int, roster: Roster) -> None: ...

    def phase(self, step: int, name: str) -> None: ...

    def stepped(self, summary: StepSummary) -> None: ...


@dataclass(frozen=True)
class RunResult:
    """Where a run stood when it ended; the same on every rank."""

    first_step: int
    """The step it began with, after a checkpoint if there was one."""
    num_steps: int
    finished: bool
    policy_sha256: str
    stop_reason: str
    """Empty unless a signal or a vote ended the run early."""


@dataclass(frozen=True)
class Tail:
    """What a rollout left on this rank: its shard, its times, and whether a stop vote cut it short."""

    rollouts: list[Rollout]
    timing: RolloutTiming
    stopped: bool


def run(config: Config, world: World, reporter: Reporter) -> RunResult:
    """Run, or go on with, the job that ``config`` describes; collective.

    Raises:
        ValueError: the user's mistake (configuration, model folder, data), before any step.
    """
    job = assemble(config, world)
    try:
        step = resume(job)
        first = saved = step
        reserve_copy(job)
        if world.rank == 0:
            reporter.started(config, step, job.engine.memory_table())
        while step < config.run.num_steps and goes_on(job):
            if not take_step(job, step, reporter):
                break
            step += 1
            if step % config.checkpoint.every_steps == 0:
                saved = save_checkpoint(job, step)
        if saved < step:
            save_checkpoint(job, step)
        job.checkpoints.finish(world)
        finished = step >= config.run.num_steps
        if finished:
            save_drafter(job)
        reason = next(filter(None, world.allgather(world.stop_reason)), "") if not finished else ""
        return RunResult(first, step, finished, job.policy.sha256(), reason)
    finally:
        job.close()


def take_step(job: Job, step: int, reporter: Reporter) -> bool:
    """One step of the run; False where a stop vote ended it before the policy changed."""
    timer = PhaseTimer()
    shows = job.world.rank == 0
    with timer("gen"):
        tail = roll_out(job, step, reporter)
    merge = start_merge(job)
    if tail.stopped:
        if shows:
            reporter.phase(step, "stopping: saving a checkpoint")
        if merge:
            finish_merge(job)  # what was trained so far belongs to the checkpoint, and to all ranks alike
        return False
    if shows:
        reporter.phase(step, "reward")
    with timer("reward"):
        rewards = score(job, tail.rollouts, step)
        rollouts, all_rewards = gather(job, tail.rollouts, rewards)
        advantages = group_advantages(all_rewards, job.config.rollout.group_size)
    if shows:
        reporter.phase(step, "update")
    # the merge has no other MPI call to make progress in while torch communicates
    with timer("update_actor"), job.pulse.progressing():
        stats = job.policy.update(rollouts, advantages)
    with timer("refresh"):
        merged = finish_merge(job) if merge else None
        load_policy(job, step + 1)
    own = {rollout.key for rollout in tail.rollouts}
    record = make_record(
        job, step, tail, rewards, np.array([a for r, a in zip(rollouts, advantages, strict=True) if r.key in own])
    )
    summary = summarise(job.world, record, stats, merged, timer.take())
    write_step(job.folder.rollout_log(step, job.world.rank), record)
    job.world.barrier()
    if shows:
        drop_foreign_logs(job, step)
        append_metrics(job, summary)
        reporter.stepped(summary)
    return True


# -- rollout --------------------------------------------------------------------------------------------------------


def roll_out(job: Job, step: int, reporter: Reporter) -> Tail:
    """Generate; once this rank runs dry, train the drafter until the last rank has finished."""
    engine, pulse, world = job.engine, job.pulse, job.world
    spot = job.drafting.spot if job.drafting else None
    if job.drafting:
        writer = job.drafting.cache.begin_step(step, engine.decoder.version)
        engine.feature_sink = writer.append
        job.drafting.spot.begin(step)
    trains = spot is not None and job.config.drafter.train
    start = last_token = time.time()
    engine.submit(shard(job, step))
    pulse.begin(step)
    while not (roster := pulse.poll(status(job))).over:
        if engine.has_work:
            decode(job)
            last_token = time.time()
        elif not (trains and spot and roster.worth_training(job.config.drafter.min_idle) and train(job)):
            pulse.back_off()
        if world.rank == 0:
            reporter.rolling(step, roster)
    timing = RolloutTiming(start, last_token, time.time())
    if roster.stopping:
        engine.abort()
    if job.drafting:
        job.drafting.spot.end()
        if roster.stopping:
            job.drafting.cache.abandon_step()
        else:
            job.drafting.cache.end_step()
    return Tail(engine.collect(), timing, roster.stopping)


def decode(job: Job) -> None:
    """One round of decoding; a prefill may take long, and the others' rounds go on meanwhile."""
    if not job.engine.has_waiting:
        job.engine.step()
        return
    with job.pulse.progressing():
        job.engine.step()


def train(job: Job) -> bool:
    """One micro-step of the drafter; the pulse goes on meanwhile, so that the release is known when it ends."""
    assert job.drafting is not None
    with job.pulse.progressing(replace(status(job), state=State.TRAINING)):
        return job.drafting.spot.micro_step()


def status(job: Job) -> Status:
    """What this rank tells the others."""
    engine = job.engine
    steps = len(job.drafting.spot.records) if job.drafting else 0
    state = State.BUSY if engine.has_work else State.TRAINING if steps else State.IDLE
    return Status(state, engine.num_unfinished, engine.num_tokens, steps, job.world.stop_requested)


def shard(job: Job, step: int) -> list[Request]:
    """This rank's requests of a step: whole groups, or single samples of all groups."""
    config, world = job.config, job.world
    prompts = job.prompts.batch(step)
    size = config.rollout.group_size
    requests = [
        Request(SampleKey(config.run.seed, Stream.TRAIN, step, draw, sample), prompt.tokens)
        for draw, prompt in enumerate(prompts)
        for sample in range(size)
    ]
    unit = size if config.rollout.shard == "group" else 1
    return [request for i, request in enumerate(requests) if i // unit % world.size == world.rank]


# -- reward and update ----------------------------------------------------------------------------------------------


def score(job: Job, rollouts: list[Rollout], step: int) -> NDArray[np.float32]:
    """Rewards [N] of this rank's rollouts."""
    prompts = job.prompts.batch(step)
    texts = [job.tokenizer.decode(rollout.response_tokens.tolist(), skip_special_tokens=True) for rollout in rollouts]
    answers = [prompts[rollout.key.draw].answer for rollout in rollouts]
    return score_rollouts(texts, answers, job.config.data.reward)


def gather(
    job: Job, rollouts: list[Rollout], rewards: NDArray[np.float32]
) -> tuple[list[Rollout], NDArray[np.float32]]:
    """All ranks' rollouts and rewards, ordered by key: what the update reads does not depend on who finished when."""
    pairs = [
        pair for shard_pairs in job.world.allgather(list(zip(rollouts, rewards, strict=True))) for pair in shard_pairs
    ]
    pairs.sort(key=lambda pair: pair[0].key)
    return [rollout for rollout, _ in pairs], np.array([reward for _, reward in pairs], dtype=np.float32)


def start_merge(job: Job) -> bool:
    """Post the drafters' merge, to be awaited after the update."""
    if job.drafting is None or not job.config.drafter.train:
        return False
    job.drafting.spot.start_merge(job.world)
    return True


def finish_merge(job: Job) -> MergeReport:
    """Await the merge and hand the engine the merged drafter."""
    assert job.drafting is not None
    report = job.drafting.spot.finish_merge(job.world)
    serve_drafter(job)
    return report


def serve_drafter(job: Job) -> None:
    """Copy the trained drafter into the engine's."""
    assert job.drafting is not None
    job.engine.load_drafter(job.drafting.spot.drafter.state_dict(), job.drafting.spot.is_trained)


def load_policy(job: Job, version: int) -> None:
    """Put the policy's weights into the decoder; the drafter reads its embedding and head there."""
    job.engine.load_policy(job.policy.named_weights(), version)


# -- records --------------------------------------------------------------------------------------------------------


def make_record(
    job: Job, step: int, tail: Tail, rewards: NDArray[np.float32], advantages: NDArray[np.float32]
) -> StepRecord:
    """What this rank's log keeps of a step."""
    counts = job.engine.take_counts()
    micro_steps = tuple(job.drafting.spot.records) if job.drafting else ()
    names = tuple(counts.strategies)
    return StepRecord(
        step=step,
        rank=job.world.rank,
        num_ranks=job.world.size,
        rollouts=tuple(tail.rollouts),
        rewards=rewards,
        advantages=advantages.astype(np.float32),
        timing=tail.timing,
        micro_steps=micro_steps,
        harvested_seconds=sum(m.end_seconds - m.start_seconds for m in micro_steps),
        strategy_names=names,
        strategy_rounds=np.array([counts.strategies[name][0] for name in names], dtype=np.int64),
        strategy_tokens=np.array([counts.strategies[name][1] for name in names], dtype=np.int64),
        decisions=decisions_of(counts),
        guarded_near_ties=counts.num_guarded,
        metrics={
            "rollout/preemptions": float(counts.num_preempted),
            "rollout/drafter_faults": float(counts.num_drafter_faults),
            **{f"rollout/{name}_seconds": seconds for name, seconds in vars(counts.seconds).items()},
        },
    )


def decisions_of(counts: EngineCounts) -> NDArray[np.int32]:
    """Live sequences and index of the strategy [D, 2] of every round."""
    assert counts.decisions is not None
    return np.stack([counts.decisions.num_live, counts.decisions.strategy_index.astype(np.int32)], 1)


def drop_foreign_logs(job: Job, step: int) -> None:
    """Remove a step's files of ranks that are no more: a run resumed on fewer of them has written the step anew."""
    for path in job.folder.rollout_logs(step):
        if rank_of(path) >= job.world.size:
            path.unlink()


def append_metrics(job: Job, summary: StepSummary) -> None:
    """One line of metrics.jsonl a step; lines of steps that a resume repeats are dropped first."""
    path = job.folder.metrics
    kept = [line for line in path.read_text().splitlines() if line] if path.exists() else []
    kept = [line for line in kept if json.loads(line)["training/global_step"] < summary.step]
    with writing_beside(path) as part:
        part.write_text("\n".join([*kept, json.dumps(summary.metrics)]) + "\n")


# -- checkpoints ----------------------------------------------------------------------------------------------------


def reserve_copy(job: Job) -> None:
    """Take the host memory for copies of this rank's state before the first step; collective."""
    dealt = deal(job.drafting.spot.live_state().items(), job.world.rank, job.world.size) if job.drafting else ()
    num_bytes = job.policy.num_shard_bytes + sum(piece.num_bytes for _, piece in dealt)
    job.checkpoints.reserve(job.world, num_bytes, pinned=job.engine.decoder.device.type == "cuda")


def goes_on(job: Job) -> bool:
    """Whether nobody was asked to stop; in the same collective all learn how a save goes on."""
    reports, stop = job.world.exchange(job.checkpoints.report())
    job.checkpoints.advance(reports)
    return not stop


def save_checkpoint(job: Job, step: int) -> int:
    """Begin to save what the next step needs; collective. Returns the step.

    Waits for the save before, and no longer than the copy takes, unless ``checkpoint.background`` is off.
    """
    job.checkpoints.finish(job.world)
    shards: dict[str, Shard] = {"policy": job.policy.state_shard()}
    if job.drafting:  # the same on all ranks after the merge
        shards["drafter"] = deal(job.drafting.spot.live_state().items(), job.world.rank, job.world.size)
    state = {
        "optimizer_steps": job.policy.optimizer_step_count,
        "strategies": job.engine.chooser.state(),
        "seed": job.config.run.seed,
    }
    job.checkpoints.begin(step, job.world, shards, state)
    if not job.config.checkpoint.background:
        job.checkpoints.finish(job.world)
    return step


def resume(job: Job) -> int:
    """Load the newest checkpoint if there is one, the decoder's weights in any case; returns the first step to do."""
    checkpoint = newest_checkpoint(job)
    step = 0
    if checkpoint is not None:
        step = checkpoint.step
        job.policy.load_state(lambda name: checkpoint.read("policy", name), checkpoint.state["optimizer_steps"])
        if job.drafting:
            names = checkpoint.names("drafter")
            job.drafting.spot.load_state({name: checkpoint.read("drafter", name) for name in names})
    if job.drafting:
        serve_drafter(job)
    load_policy(job, step)
    requests = calibration_requests(job, step)
    job.engine.calibrate(requests)
    if job.config.speculation.mode != "plain" and job.config.speculation.profile_seconds:
        job.engine.profile(requests, job.config.speculation.profile_seconds)
    if checkpoint is not None:
        job.engine.chooser.load_state(checkpoint.state["strategies"])
    return step


def calibration_requests(job: Job, step: int) -> list[Request]:
    """A few of this rank's prompts under keys of another stream: the coming step's own would give its text away."""
    requests = shard(job, step)[:: job.config.rollout.group_size][:_CALIBRATION_RESPONSES]
    return [replace(request, key=replace(request.key, stream=Stream.CALIBRATION)) for request in requests]


def newest_checkpoint(job: Job) -> Checkpoint | None:
    """What rank 0 finds, on all ranks; collective.

    Raises:
        CheckpointError: there are checkpoints and none is good.
    """
    found: Checkpoint | CheckpointError | None = None
    if job.world.rank == 0:
        try:
            found = job.checkpoints.newest()
        except CheckpointError as error:
            found = error
    found = job.world.broadcast(found)
    if isinstance(found, CheckpointError):
        raise found
    return found


def save_drafter(job: Job) -> None:
    """Leave the drafter beside the run, where ``drafter.init`` of another run finds it."""
    if job.drafting is None or job.world.rank != 0:
        return
    from safetensors.torch import save_file

    target = job.folder.path / "drafter" / DRAFTER_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing_beside(target) as path:
        save_file(job.drafting.spot.state(), path)
