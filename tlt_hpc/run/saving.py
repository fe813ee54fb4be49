"""Checkpoints of a run: what is saved and when, and how the next start restores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tlt_hpc.checkpoint.manifest import FlatRange
from tlt_hpc.checkpoint.store import ASK_EVERY_SECONDS, CheckpointStore, Shard
from tlt_hpc.cluster.stopping import Stop
from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.models.drafter_file import write_drafter
from tlt_hpc.models.piece import Piece, own_tensor_pieces, read_and_broadcast_each
from tlt_hpc.mpi.owner import check_owner_all_ranks
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.run.job import Drafting, Job
from tlt_hpc.run.replay import replay
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import drop_lines

logger = logging.getLogger(__name__)


def reserve_copy(job: Job) -> None:
    """Collective. Allocate the host memory for copies of this rank's state, before the first step."""
    pinned = job.engine.decoder.device.type == "cuda"
    drafter_bytes = sum(piece.num_bytes for _, piece in drafter_shard(job.drafting, job.world)) if job.drafting else 0
    job.checkpoints.reserve_copy_memory_all_ranks(job.world, job.policy.num_shard_bytes + drafter_bytes, pinned)
    if job.drafting and job.config.speculation.trains_drafter:
        job.drafting.checkpoints.reserve_copy_memory_all_ranks(job.world, drafter_bytes, pinned)


def drafter_shard(drafting: Drafting, world: World) -> Iterator[tuple[str, Piece]]:
    """Yield this rank's share of the drafter's state, which is the same on all ranks after a merge."""
    return own_tensor_pieces(drafting.spot.trained.live_state().items(), world.rank, world.size)


def agree_to_continue(world: World, checkpoints: CheckpointStore) -> bool:
    """Collective. Return False if a rank was asked to stop; also advances a checkpoint that is being written."""
    reports, stop = world.allgather_with_stop_vote(checkpoints.poll_save_state())
    checkpoints.end_save_if_all_done(reports)
    return not stop


def save_checkpoint(job: Job, step: int, saved: int) -> int:
    """Collective. Begin to save what the next step needs, after the save of step ``saved`` has ended.

    Returns the step of the last save that was not given up: ``saved`` if a stop left no time to wait for that one.

    Raises:
        CheckpointError: on all ranks, where one could not write.
    """
    if not wait_for_saves(job.world, [job.checkpoints]).is_whole:
        return saved
    begin_save(job, step)
    return step


@BEAT.in_phase(Phase.SAVING)
def begin_save(job: Job, step: int) -> None:
    """Collective. Copy what the next step needs, and begin to write it; nothing else may be being saved."""
    check_owner_all_ranks(job.world, job.folder.status, BEAT.start_name)
    shards: dict[str, Shard] = {"policy": job.policy.state_shard()}
    if job.drafting:
        shards["drafter"] = drafter_shard(job.drafting, job.world)
    state = {
        "optimizer_steps": job.policy.optimizer_step_count,
        "strategies": job.engine.chooser.acceptance.state(),
        "seed": job.config.run.seed,
    }
    job.checkpoints.begin_save_all_ranks(step, job.world, shards, state)


@BEAT.in_phase(Phase.SAVING)
def begin_drafter_save_if_due(job: Job, step: int) -> None:
    """Collective. Begin to save the drafter alone, if it is trained, and the chooser's counts.

    No step waits for it: if the last one is still being written, this one is left out, with one warning in a run.
    """
    if job.drafting is None or not job.config.speculation.trains_drafter:
        return
    store = job.drafting.checkpoints
    store.end_save_if_all_done(job.world.allgather(store.poll_save_state()))
    if store.is_saving:
        if job.world.rank == 0 and not job.drafting.warned:
            job.drafting.warned.append(step)
            logger.warning(
                "step %d: the drafter of an earlier step is still being written to %s, so this step's is not saved; "
                "a kill would cost it what it learned since",
                step, job.folder.drafter_checkpoints,
            )  # fmt: skip
        return
    store.begin_save_all_ranks(
        step,
        job.world,
        {"drafter": drafter_shard(job.drafting, job.world)},
        {"strategies": job.engine.chooser.acceptance.state()},
    )


class Waited(NamedTuple):
    """The end of a wait for saves, the same on all ranks."""

    stop: Stop
    """The stop that ranks agreed on last."""
    is_whole: bool
    """Nothing is being saved any more, and nothing was given up."""
    is_late: bool
    """A stop leaves no more time."""


def save_at_end(job: Job, saved: int, step: int) -> tuple[Stop, bool]:
    """Collective. Save the step if no checkpoint has it, and wait for all saves, as long as a stop leaves time.

    The next start repeats from the log what was given up. Returns the stop that ended the run, and True if all was
    saved; the same on all ranks.

    Raises:
        CheckpointError: on all ranks, where one could not write.
    """
    waited = wait_for_saves_all_ranks(job)
    if saved == step or waited.stop is Stop.KILL or waited.is_late:
        return waited.stop, saved == step and waited.is_whole
    begin_save(job, step)
    return wait_for_saves_all_ranks(job)[:2]


def wait_for_saves_all_ranks(job: Job) -> Waited:
    """Collective. Wait for the saves of all stores, as ``wait_for_saves``."""
    return wait_for_saves(job.world, [job.checkpoints, *([job.drafting.checkpoints] if job.drafting else [])])


@BEAT.in_phase(Phase.SAVING)
def wait_for_saves(world: World, stores: Sequence[CheckpointStore]) -> Waited:
    """Collective. Wait until these stores save nothing any more, or give up saves that a stop leaves no time for.

    Raises:
        CheckpointError: on all ranks, where one could not write.
    """
    while True:
        reports = [store.poll_save_state() for store in stores]
        with BEAT.in_save_polling():
            told, stop = world.allgather_with_stop_vote((reports, world.flag.is_late))
        for number, store in enumerate(stores):
            store.end_save_if_all_done([every[number] for every, _ in told])
        under_way = [store for store in stores if store.is_saving]
        late = any(is_late for _, is_late in told)
        if not under_way:
            return Waited(stop, True, late)
        if late:
            for store in under_way:
                store.abandon_save()
            if world.rank == 0:
                logger.warning("no time is left to save: the next start repeats what was logged since the last save")
            return Waited(stop, False, late)
        time.sleep(ASK_EVERY_SECONDS)


@BEAT.in_phase(Phase.LOADING)
def resume(job: Job, shown: Callable[[int], None]) -> tuple[int, int]:
    """Collective. Load the newest checkpoint, repeat the steps logged since, and load the engine's weights.

    ``shown`` is called on rank 0 with every step that was repeated.
    Returns the step of the checkpoint (0 without one) and the first step to do.

    Raises:
        CheckpointError: on all ranks, where there are checkpoints and none is good.
    """
    checkpoint = job.world.run_first_and_broadcast(job.checkpoints.open_newest)
    saved = 0
    if checkpoint is not None:
        saved = checkpoint.step
        job.world.print_once(f"loading the checkpoint of step {saved}")
        node = job.world.node_group
        with checkpoint.open_tensor_reader("policy") as read:
            whole, steps = partial(read_and_broadcast_each, node, read=read), checkpoint.state["optimizer_steps"]
            job.policy.load_state(whole, lambda name, *span: read(name, span=FlatRange(*span)), steps)
        if job.drafting:
            job.drafting.load(checkpoint, node)
    step, alone = replay(job, saved, shown)
    newest = alone or checkpoint
    if job.drafting:
        job.load_engine_drafter()
    job.load_policy(step)
    own = job.own_replica_requests(StepDraws(job.config, job.prompts, step).first_requests())
    job.calibrate(job.engine, own[:: job.config.rollout.group_size])
    if newest is not None:
        job.engine.chooser.acceptance.load_state(newest.state["strategies"])
    return saved, step


def drop_steps_after(folder: RunFolder, drafting: Drafting | None, step: int) -> None:
    """Drop the lines and drafter checkpoints of steps after ``step``, which are generated again; on rank 0.

    The lines go first: a drafter checkpoint without lines is not loaded, while lines without it would be replayed.

    Raises:
        CheckpointError: a drafter's checkpoint cannot be removed.
    """
    if dropped := drop_lines(folder.metrics, step):
        logger.warning(
            "%d steps that were committed (%d to %d) are generated again: no checkpoint has them; their lines are "
            "kept beside %s", len(dropped), dropped[0] + 1, dropped[-1] + 1, folder.metrics,
        )  # fmt: skip
    if drafting:
        drafting.checkpoints.drop_after(step)


def write_final_drafter(folder: RunFolder, drafting: Drafting | None) -> None:
    """Write the drafter to the run's folder, for ``drafter.init`` of another run; for rank 0.

    Raises:
        WriteError: no room or no permission.
    """
    if drafting is not None:
        write_drafter(folder.path / "drafter", drafting.spot.trained.host_state_copy())
