"""The command line: parses it, starts the ranks of a command that has ranks, and turns its end into an exit status.

Heavy libraries are imported only once a command needs them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc.cli import command_line
from tlt_hpc.cli.commands import COMMANDS
from tlt_hpc.cli.plans import check_folder, command_config, plan_command
from tlt_hpc.cluster.caches import make_node_cache, memory_cache_warning
from tlt_hpc.cluster.device import GIVEN, restrict_to_one_gpu
from tlt_hpc.cluster.launcher import (
    STARTED,
    crowded_cores_note,
    exec_mpiexec,
    job_text_from_launcher,
    launch_time,
    launched_count,
    launched_rank,
    local_rank,
    single_rank_hint,
    starting_ranks_message,
)
from tlt_hpc.cluster.stopping import StopFlag, start_time_limit_timers
from tlt_hpc.cluster.watch.exit_monitor import ExitMonitor
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.cluster.watch.watch import Watch
from tlt_hpc.common.files import has_remedy, os_error_text
from tlt_hpc.common.host_memory import without_garbage_collection
from tlt_hpc.common.printable import PrintableStream, escape_streams, one_line
from tlt_hpc.common.source import load_extra
from tlt_hpc.config import EMBEDDED_MODEL, Config, UserError, load_config
from tlt_hpc.storage.folder import WriteError, no_run_message

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

USER_ERROR = 2
"""Exit status of a mistake in the command or configuration; nothing was written."""
INTERRUPTED = 130
"""Exit status of a command that a Ctrl-C ended at once."""
_FIRST_WORD_SECONDS = 10.0
"""How long the other ranks leave it to rank 0 to name an error that all of them met."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    escape_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    options.environment = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: ranks on shared cores would fight
    rank = launched_rank(os.environ)
    BEAT.began = launch_time(os.environ) or BEAT.began
    flag = StopFlag()
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank or 0}] %(levelname)s %(name)s: %(message)s")
    work = COMMANDS[options.command].work
    if isinstance(work, str):
        return run_single_process_command(work, options)
    flag.install_signal_handlers()  # before the seconds of imports, in which a signal ends the process without a word
    is_rank = rank is not None and not options.dry_run
    if rank == 0 and is_rank and STARTED not in os.environ:
        print(starting_ranks_message(launched_count(os.environ)), flush=True)
    if rank is None:
        print_before_imports(f"checking {options.config}", is_result=not options.dry_run)
    try:
        if options.command == "evaluate":
            refuse_evaluation_without_config(options)
        config = load_config(options.config, options.overrides, job_text_from_launcher(os.environ, options.config))
        num_ranks = launched_count(os.environ) or config.run.ranks
        config = command_config(config, options)
        if not rank and (alone := single_rank_hint(os.environ, config.run.ranks, given)):
            print(alone, flush=True)
        plan = "" if is_rank else plan_command(config, options, num_ranks)  # ranks look once a node, in connect
        if rank is None and options.command == "train" and (finished := check_folder(config)) and not options.dry_run:
            print(finished)
            return 0
        if options.dry_run:
            if not rank:
                print(plan)
            return 0
        if rank is None:
            print(
                starting_ranks_message(num_ranks) + crowded_cores_note(num_ranks, len(os.sched_getaffinity(0))),
                flush=True,
            )
        if rank is None and config.run.ranks > 1:
            exec_mpiexec(config.run.ranks, given, options.config)
    except (ValueError, OSError) as caught:
        error = to_user_error(caught)
        if is_rank and rank is not None:
            return broadcast_error_and_exit(error, rank)
        if not rank:
            print(f"tlt: {one_line(error)}", file=sys.stderr)
        return USER_ERROR
    return run_as_rank(config, options, flag, rank)


def refuse_evaluation_without_config(options: argparse.Namespace) -> None:
    """Refuse to evaluate a model without a configuration, since only a run has its own.

    Raises:
        UserError: there is no run.
    """
    place = Path(options.checkpoint)
    own = place / "config.toml"
    if options.config != str(own) or own.is_file():
        return
    if options.checkpoint == EMBEDDED_MODEL or (place / "config.json").is_file():
        raise UserError(f"{options.checkpoint} is a model; give the job's file too, such as jobs/tiny.toml")
    raise UserError(no_run_message(place, own.name))


def print_before_imports(words: str, is_result: bool) -> None:
    """Print a line before the seconds that imports take; if it is not part of the result, on a terminal alone."""
    if is_result or sys.stderr.isatty():
        print(words, file=sys.stdout if is_result else sys.stderr, flush=True)


def run_as_rank(config: Config, options: argparse.Namespace, flag: StopFlag, rank: int | None) -> int:
    """Run a command's own work, as one of its ranks or alone; returns the exit status.

    Raises:
        OSError: not of a path that the user gave; where it comes from matters then.
    """
    try:
        if rank is not None:
            set_up_caches_and_gpu(config, rank)
        progress = COMMANDS[options.command].progress
        PrintableStream.outlives_reader = True  # what is trained is not lost with a terminal
        # before threads
        monitor = None if rank is None else ExitMonitor() if local_rank(os.environ) else ExitMonitor.fork()
        start_time_limit_timers(flag, os.environ, rank or 0, config.folder, progress and partial(progress, config))
        with Watch(config.run.stall_factor, rank, monitor) as watch:
            return watch.record_exit_status(run_on_all_ranks(config, options, flag))
    except (UserError, OSError) as caught:
        if isinstance(caught, OSError) and not (isinstance(caught, WriteError) or has_remedy(caught)):
            raise  # of a library, a program or a disk
        return end_ranks_with_error(to_user_error(caught), rank or 0)
    except KeyboardInterrupt:
        interrupted = UserError("interrupted; the same command resumes from what was saved")
        return end_ranks_with_error(interrupted, rank or 0, INTERRUPTED)


def set_up_caches_and_gpu(config: Config, rank: int) -> None:
    """Give a rank a folder for caches and one GPU of its node, before torch looks for GPUs.

    Raises:
        UserError: the folder cannot be made, or the node has more ranks than GPUs.
    """
    make_node_cache(os.environ)
    if rank == 0 and (words := memory_cache_warning(os.environ)):
        print(words, flush=True)
    own = None if config.model.device == "cpu" else restrict_to_one_gpu(os.environ, rank)
    if own is not None and rank == 0:
        print(f"a GPU for each rank; rank 0 on {socket.gethostname()} uses GPU {own}", flush=True)


def broadcast_error_and_exit(error: ValueError, rank: int) -> int:
    """Collective. End all ranks with an error that this one alone may have met, such as a node without the data."""
    from tlt_hpc.mpi.world import LaunchError, World
    from tlt_hpc.plan.nodes import broadcast_error

    try:
        broadcast_error(World.connect(), error)
    except LaunchError:  # single ranks: each has its own to say
        return end_ranks_with_error(UserError(str(error)), rank)
    except UserError as shared:
        return end_ranks_with_error(shared, rank)
    raise AssertionError("broadcast_error always raises")


def to_user_error(error: ValueError | OSError) -> ValueError:
    """A mistake as it is, and what the system refuses as one line with its path, as for a file that may not be read.

    Raises:
        OSError: it is of no path, so nothing that a user could see to.
    """
    if isinstance(error, ValueError):
        return error
    if error.filename is None and not isinstance(error, WriteError):
        raise error
    return UserError(os_error_text(error))


def end_ranks_with_error(error: ValueError, rank: int, status: int = USER_ERROR) -> int:
    """End all ranks with one line: rank 0's, or of another that stands alone with its error."""
    from tlt_hpc.mpi.ending import all_ranks_arrive, exit_now, is_alone

    if not rank:
        print(f"tlt: {one_line(error)}", file=sys.stderr, flush=True)
        if is_alone():
            return status
        all_ranks_arrive(_FIRST_WORD_SECONDS)
    elif not all_ranks_arrive(_FIRST_WORD_SECONDS):
        print(f"tlt: rank {rank}: {one_line(error)}", file=sys.stderr, flush=True)
    return exit_now(status)


def make_parser() -> command_line.Parser:
    """The command line, all commands with their options."""
    return command_line.make_parser(COMMANDS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; a mistake ends the process with one line."""
    try:
        parser = command_line.make_parser(COMMANDS, arguments)
    except UserError as missing:  # a part of the package is not installed
        print(f"tlt: {one_line(missing)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    options = command_line.parse(parser, arguments)
    if options.command == "warmup" and options.sources:
        options.overrides.append(f"warmup.sources={json.dumps(options.sources)}")
    if options.command == "compare" and options.json is not None:
        refuse = command_line.parser_of(parser, "compare").error
        if not options.json.parent.is_dir():
            refuse(f"--json {options.json}: its folder does not exist; make it first")
        if options.json.is_dir():
            refuse(f"--json {options.json} is a folder; give a file")
    return options


def run_single_process_command(module: str, options: argparse.Namespace) -> int:
    """Call ``run`` of a module; its user's mistakes end as one line."""
    try:
        if options.command.startswith("export"):
            print_before_imports(f"reading {options.place}", is_result=False)
        return load_extra(module).run(options) or 0
    except (ValueError, OSError) as error:
        print(f"tlt: {one_line(to_user_error(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("tlt: interrupted before it finished", file=sys.stderr)  # a rehearsal or a submission may have written
        return INTERRUPTED


def start_judge_and_tracker_processes(config: Config, options: argparse.Namespace) -> None:
    """Start what judges responses, and a tracker's process: a process that has MPI should start no other."""
    from tlt_hpc.look.tracking import start_early
    from tlt_hpc.rewards.scorer import open_process_judge, without_reward_parts

    if options.command in ("train", "compare", "evaluate", "ablate"):
        open_process_judge(config.reward)
        if config.evaluation.every_steps:
            open_process_judge(without_reward_parts(config.reward))
    if options.command == "train" and not launched_rank(os.environ):
        start_early(config.run)


def connect_all_ranks(config: Config, options: argparse.Namespace, flag: StopFlag) -> World:
    """All ranks, on nodes that are alike and have the job's files; from here on they answer signals by a vote.

    Collective; one rank a node reads. To be called before torch is imported: MPICH tells the launcher its address with
    whatever lies in memory behind it, and in a process that has imported much that exceeds a line of Slurm's PMI 2.

    Raises:
        UserError: on all ranks, where a node differs or the ranks were started wrongly.
    """
    from tlt_hpc.mpi.placing import place_ranks
    from tlt_hpc.mpi.world import World
    from tlt_hpc.plan.nodes import check_nodes

    world = World.connect(flag)
    plan = partial(plan_command, config, options, world.size)
    check_nodes(world, config, plan)  # before any other collective: a rank with an error of its own waits there
    has_gpu = config.model.device == "cuda" or GIVEN in os.environ
    place_ranks(world, config.model.device != "cpu", config.optimizer.offload and has_gpu)
    world.answer_signals()
    world.print_once("loading libraries")
    return world


def run_on_all_ranks(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """Run a command on all ranks, from their meeting to their end; returns the exit status."""
    work = COMMANDS[options.command].work
    assert not isinstance(work, str)
    start_judge_and_tracker_processes(config, options)
    world = connect_all_ranks(config, options, flag)
    with without_garbage_collection():
        import tlt_hpc.run.job  # noqa: F401  with torch; what is left are modules of this package
    status = work(config, options, world)
    from tlt_hpc.rl.distributed import leave_process_group

    leave_process_group()
    world.finalise_mpi_all_ranks()  # a non-zero status ends the other ranks: not before the last word is out
    return status
