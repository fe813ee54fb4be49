"""The commands that all ranks run, each as one of them, and how one ends that was stopped before its end.

Heavy libraries are imported only once a command needs them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc.cli.plans import finished_message
from tlt_hpc.cluster.stopping import STOPPED_EARLY, Stop, await_preemption, requeue_job_if_progress
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.source import load_extra
from tlt_hpc.config import Config, UserError
from tlt_hpc.storage.folder import RunFolder, WriteError

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

_LEAVING_SECONDS = 3.0
"""Time in which the ranks end together once nothing else is to be done."""


def train(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt train`` on this rank."""
    if told := world.run_first_and_broadcast(lambda: finished_message(config)):
        if world.rank == 0:
            print(told)
        return 0
    from tlt_hpc.cli.display import Screen, StepReporter, print_result
    from tlt_hpc.look.tracking import Tracking
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run_training

    with nullcontext() if world.rank else Tracking(config, RunFolder(config.folder)) as tracking:
        follow = tracking.send_new_steps if tracking else None
        result = run_training(config, world, StepReporter(Screen(world.rank == 0), stages=world.stages), follow)
        leave_process_group()
        if world.rank == 0:
            print_result(config, result)
        if not result.finished:
            return requeue_stopped_job(
                world, config.folder, partial(run_progress, config), tracking.close if tracking else None
            )
    return 0


def compare(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt compare`` on this rank."""
    from tlt_hpc.cli.display import Screen, StepReporter, print_comparison
    from tlt_hpc.look.series import to_json_types
    from tlt_hpc.storage.records import write_json
    from tlt_hpc.studies.compare import MODES, compare, speed_rows, table_rows, to_tree

    modes, screen = [mode for mode in MODES if mode not in options.without], Screen(world.rank == 0)
    comparison = compare(config, modes, options.steps, world, partial(StepReporter, screen))
    if comparison is None:
        if world.rank == 0:
            print("tlt: the comparison was stopped; a new one starts over", file=sys.stderr, flush=True)
        return 1
    if world.rank == 0:
        print_comparison(comparison, table_rows(comparison) | speed_rows(comparison))
        if options.json is not None:
            ratios = {
                name: {what: ratio._asdict() for what, ratio in found.items()}
                for name, found in comparison.speedups().items()
            }
            try:
                write_json(options.json, {**to_tree(comparison), "speedup": to_json_types(ratios)})
            except WriteError as error:
                raise UserError(
                    f"{error.fact}; the figures are above, and the runs' own in {comparison.folder}"
                ) from None
    return 0 if all(comparison.equality_by_name.values()) else 1


def warmup(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt warmup`` on this rank."""
    from tlt_hpc.cli.display import Screen, WarmupScreen, print_warmup
    from tlt_hpc.studies.warmup.warm_up import warm_up

    result = warm_up(config, world, WarmupScreen(Screen(world.rank == 0)))
    if world.rank == 0:
        print_warmup(result, options.config, config.drafter.form)
    if result.progress.is_finished:
        return 0
    updates = format_count(result.progress.updates, "update")
    return requeue_stopped_job(world, result.folder, lambda: f"{describe_written_files(config)}, {updates}")


def evaluate(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt evaluate`` on this rank."""
    from tlt_hpc.cli.display import Screen
    from tlt_hpc.cli.show_evaluation import EvaluationScreen, print_evaluation
    from tlt_hpc.evaluate.evaluate import run_evaluation_all_ranks
    from tlt_hpc.evaluate.subject import find_subject

    subject = find_subject(options.checkpoint, options.step, options.output)
    result = run_evaluation_all_ranks(config, subject, world, EvaluationScreen(Screen(world.rank == 0)))
    if world.rank == 0:
        print_evaluation(result)
    if result.finished:
        return 0
    return requeue_stopped_job(
        world, result.folder, lambda: f"{format_count(result.num_left, 'response')} before the end"
    )


def ablate(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt ablate`` on this rank."""
    status: int = load_extra("tlt_hpc.extras.ablate.ablate").run_ablate_command(config, options, world)
    return status


def requeue_stopped_job(
    world: World, folder: Path, progress: Callable[[], str], close: Callable[[Callable[[], float]], bool] | None = None
) -> int:
    """The end of a job that was stopped and can continue: at its time limit, or if preempted, Slurm queues it again.

    Collective; returns the exit status.

    Args:
        folder: of what was worked on.
        progress: how far that has come; asked on rank 0.
        close: ends the trackers within the seconds that its argument tells, and returns whether they have ended.
    """
    from tlt_hpc.mpi.ending import end_process_within

    stop = world.agree_to_stop()
    BEAT.record_ending("stopped early")  # Slurm may kill any of the ranks from here on

    def at_last() -> None:
        if stop is Stop.TIME and world.rank == 0:
            print(f"tlt: {requeue_job_if_progress(os.environ, folder, progress())}", flush=True)

    world.flag.call_once_at_end(at_last)
    is_closed = close is None or close(lambda: world.flag.seconds_left - _LEAVING_SECONDS)
    if stop is Stop.KILL and world.rank == 0:
        await_preemption(os.environ)
    if not is_closed:  # the tracker's library would wait once more as the process ends
        end_process_within(_LEAVING_SECONDS, STOPPED_EARLY)
    return STOPPED_EARLY


def run_progress(config: Config) -> str:
    """Return the progress of ``tlt train`` as words."""
    from tlt_hpc.run.kept_responses import describe_progress

    return describe_progress(config)


def describe_written_files(config: Config) -> str:
    """Return the progress of a warm-up or an evaluation by the files that it has written, as words."""
    return f"{len(list(config.folder.rglob('*.h5')))} files of responses and features"
