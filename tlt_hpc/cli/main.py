"""The commands: ``train``, ``evaluate``, ``compare``, ``ablate``, ``warmup``, ``plan``, ``simulate``, ``preflight``,
``data``, exports.

Heavy libraries are imported only once a command needs them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc.cli import command_line
from tlt_hpc.cli.command_line import Command
from tlt_hpc.cluster.caches import in_memory, make_node_cache
from tlt_hpc.cluster.device import take_device
from tlt_hpc.cluster.local import STARTED, become_ranks, given_job, launched_count, launched_rank, starting
from tlt_hpc.cluster.stopping import Stop, StopFlag, await_preemption, know_limits, queue_again
from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.cluster.watch.watch import Watch
from tlt_hpc.common.files import has_remedy, told
from tlt_hpc.common.printable import PrintableStream, escape_streams, one_line
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, UserError, check_learns, check_resumable, load_config, without_side_effects
from tlt_hpc.export import export_options
from tlt_hpc.look.arguments import add_report_arguments, add_runs_arguments, add_watch_arguments
from tlt_hpc.plan import plan_options
from tlt_hpc.resume.finished import finished_message
from tlt_hpc.storage.folder import RunFolder, WriteError
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies import ablation_plan

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World
    from tlt_hpc.plan.inputs import ModelAssets

USER_ERROR = 2
"""Exit status of a mistake in the command or configuration; nothing was written."""
STOPPED_EARLY = 75
"""Exit status of a run that a signal stopped: the same command resumes from there."""
INTERRUPTED = 130
"""Exit status of a command that a Ctrl-C ended at once."""
_LEAVING_SECONDS = 3.0
"""What the ranks take to end together, once nothing else is to be done."""
_FIRST_WORD_SECONDS = 10.0
"""How long the other ranks leave it to rank 0 to name an error that all of them met."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    escape_streams()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: ranks on shared cores would fight
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    rank = launched_rank(os.environ)
    flag = StopFlag()
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank or 0}] %(levelname)s %(name)s: %(message)s")
    work = COMMANDS[options.command].work
    if isinstance(work, str):
        return run_alone(work, options)
    flag.install()  # before the seconds that imports take: there, a signal ends the process without a word
    is_rank = rank is not None and not options.dry_run
    if rank == 0 and is_rank and STARTED not in os.environ:
        print(starting(launched_count(os.environ)), flush=True)
    if rank is None:
        say_soon(f"checking {options.config}", is_result=not options.dry_run)
    try:
        config = load_config(options.config, options.overrides, given_job(os.environ, options.config))
        num_ranks = launched_count(os.environ) or config.run.ranks
        config = config_of(config, options)
        plan = "" if is_rank else plan_command(config, options, num_ranks)  # ranks look once a node, in connect
        if rank is None and options.command == "train" and (finished := check_folder(config)) and not options.dry_run:
            print(finished)
            return 0
        if options.dry_run:
            if not rank:
                print(plan)
            return 0
        if rank is None:
            print(starting(num_ranks), flush=True)
        if rank is None and config.run.ranks > 1:
            become_ranks(config.run.ranks, given, options.config)
    except (ValueError, OSError) as caught:
        error = as_error(caught)
        if is_rank and rank is not None:
            return tell_all_ranks(error, rank)
        if not rank:
            print(f"tlt: {one_line(error)}", file=sys.stderr)
        return USER_ERROR
    return be_rank(config, options, flag, rank)


def say_soon(words: str, is_result: bool) -> None:
    """Print a line before the seconds that imports take; if it is not part of the result, on a terminal alone."""
    if is_result or sys.stderr.isatty():
        print(words, file=sys.stdout if is_result else sys.stderr, flush=True)


def be_rank(config: Config, options: argparse.Namespace, flag: StopFlag, rank: int | None) -> int:
    """Run a command's own work, as one of its ranks or alone; returns the exit status.

    Raises:
        OSError: not of a path that the user gave; where it comes from matters then.
    """
    try:
        if rank is not None:
            settle(config, rank)
        progress = COMMANDS[options.command].progress
        PrintableStream.outlives_reader = True  # what is trained is not lost with a terminal
        know_limits(flag, os.environ, rank or 0, config.folder, progress and partial(progress, config))
        with Watch(config.run.stall_factor, rank) as watch:
            return watch.ended(work_together(config, options, flag))
    except (UserError, OSError) as caught:
        if isinstance(caught, OSError) and not (isinstance(caught, WriteError) or has_remedy(caught)):
            raise  # of a library, a program or a disk
        return fail_together(as_error(caught), rank or 0)
    except KeyboardInterrupt:
        interrupted = UserError("interrupted; the same command resumes from what was saved")
        return fail_together(interrupted, rank or 0, INTERRUPTED)


def settle(config: Config, rank: int) -> None:
    """What a rank needs of its node before torch looks at it: a folder for caches, and one GPU.

    Raises:
        UserError: the folder cannot be made, or the node has more ranks than GPUs.
    """
    make_node_cache(os.environ)
    if rank == 0 and (words := in_memory(os.environ)):
        print(words, flush=True)
    own = None if config.model.device == "cpu" else take_device(os.environ, rank)
    if own is not None and rank == 0:
        print(f"a GPU for each rank; rank 0 on {socket.gethostname()} uses GPU {own}", flush=True)


def config_of(config: Config, options: argparse.Namespace) -> Config:
    """The configuration that a command runs.

    Raises:
        ValueError: it is none that the command can run, or there is no such run or model to evaluate.
    """
    if options.command == "warmup":
        from tlt_hpc.studies.warmup import plan

        return plan.config_of(config)
    if options.command == "evaluate":
        from tlt_hpc.evaluate.subject import evaluation_config, find_subject

        return evaluation_config(config, find_subject(options.checkpoint, options.step, options.output))
    if options.command == "compare":
        return without_side_effects(config)
    if options.command == "train":
        check_learns(config)
    return config


def plan_command(config: Config, options: argparse.Namespace, num_ranks: int) -> str:
    """The plan in words, after ``config_of``'s configuration has been held against the files that it names.

    Raises:
        ValueError: a file is missing or broken, or a limit is exceeded; nothing has been written.
    """
    from tlt_hpc.plan.inputs import read_assets

    if options.command == "evaluate":
        return plan_evaluation(config, options, num_ranks)
    assets = read_assets(config, num_ranks)
    if options.command == "ablate":
        ablation = ablation_plan.plan_ablation(config, options)
        check_drafter(config, assets)
        return ablation_plan.describe(ablation, num_ranks)
    if options.command == "warmup":
        from tlt_hpc.studies.warmup import plan

        return plan.describe(config, assets.shape, num_ranks)
    if options.command == "compare":
        modes = 4 - len(set(options.without))
        in_turn = f"compare     {modes} modes in turn, all in memory at once: {modes} times what one run needs\n"
        return in_turn + plan_run(config, assets, num_ranks)
    return plan_run(config, assets, num_ranks)


def check_folder(config: Config) -> str:
    """See whether a run can begin in its folder, or continue; returns the line of one that has finished, else nothing.

    Raises:
        ValueError, OSError: what is there is of another job, damaged, or cannot be read.
    """
    folder = RunFolder(config.folder)
    check_resumable(folder.config, config)
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"run.folder and run.name give {folder.path}, which is a file; move it away or give another")
    there = next(place for place in (folder.path, *folder.path.absolute().parents) if place.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"run.folder gives {folder.path}, and {there} cannot be written; set run.folder to another place"
        )
    read_lines(folder.metrics)
    return finished_message(config)


def tell_all_ranks(error: ValueError, rank: int) -> int:
    """End all ranks with an error that this one met before they meet, and maybe no other: a node without the data."""
    from tlt_hpc.mpi.world import LaunchError, World
    from tlt_hpc.plan.preflight.nodes import report_error

    try:
        report_error(World.connect(), error)
    except LaunchError:  # single ranks: each has its own to say
        return fail_together(UserError(str(error)), rank)
    except UserError as shared:
        return fail_together(shared, rank)
    raise AssertionError("report_error always raises")


def plan_run(config: Config, assets: ModelAssets, num_ranks: int) -> str:
    """The plan of a run or a comparison in words.

    Raises:
        ValueError: as ``plan_command``.
    """
    from tlt_hpc.plan.inputs import describe, open_checked_sets
    from tlt_hpc.plan.memory.summary import summarise

    config.tracking.check_installed()
    check_drafter(config, assets)
    if config.evaluation.every_steps:
        open_checked_sets(config, assets.folder, assets.shape, assets.tokenizer)
    memory = summarise(config, assets.shape, num_ranks)
    return (f"memory      {memory}\n" if memory else "") + describe(config, assets.shape, num_ranks)


def check_drafter(config: Config, assets: ModelAssets) -> None:
    """Open the file of the drafter that a run starts with; ranks open it for themselves.

    Raises:
        ValueError: it is missing, broken or of another model.
    """
    from tlt_hpc.models.drafter_file import initial_drafter

    if config.speculation.mode == "full" and launched_rank(os.environ) is None:
        initial_drafter(config.drafter.init, config.drafter.form, assets.shape)


def plan_evaluation(config: Config, options: argparse.Namespace, num_ranks: int) -> str:
    """The same for an evaluation, which reads nothing of what the job trains on.

    Raises:
        ValueError: as ``plan_command``, or no such run or model.
    """
    from tlt_hpc.evaluate.evaluate import describe, read_assets
    from tlt_hpc.evaluate.subject import find_subject
    from tlt_hpc.models.folder import check_weights

    subject = find_subject(options.checkpoint, options.step, options.output)
    assets, sets = read_assets(config, num_ranks)
    if subject.run is None:
        check_weights(assets.folder, assets.shape)
    return describe(config, subject, sets, assets.shape, num_ranks)


def as_error(error: ValueError | OSError) -> ValueError:
    """A mistake as it is, and what the system refuses as one line with its path, as for a file that may not be read.

    Raises:
        OSError: it is of no path, so nothing that a user could see to.
    """
    if isinstance(error, ValueError):
        return error
    if error.filename is None and not isinstance(error, WriteError):
        raise error
    return UserError(told(error))


def fail_together(error: ValueError, rank: int, status: int = USER_ERROR) -> int:
    """End all ranks with one line: rank 0's, or of another that stands alone with its error."""
    from tlt_hpc.mpi.ending import all_come_here, exit_now, is_alone

    if not rank:
        print(f"tlt: {one_line(error)}", file=sys.stderr, flush=True)
        if is_alone():
            return status
        all_come_here(_FIRST_WORD_SECONDS)
    elif not all_come_here(_FIRST_WORD_SECONDS):
        print(f"tlt: rank {rank}: {one_line(error)}", file=sys.stderr, flush=True)
    return exit_now(status)


def stop_early(
    world: World, folder: Path, progress: Callable[[], str], close: Callable[[Callable[[], float]], bool] | None = None
) -> int:
    """The end of a job that was stopped and can continue: at its time limit, or if preempted, Slurm queues it again.

    Collective; returns the exit status.

    Args:
        folder: of what was worked on.
        progress: how far that has come; asked on rank 0.
        close: ends the trackers within the seconds that its argument tells, and returns whether they have ended.
    """
    from tlt_hpc.mpi.ending import end_within

    stop = world.agree_to_stop()
    world.flag.is_left = True
    BEAT.leave("stopped early")  # Slurm may kill any of the ranks from here on
    if stop is Stop.TIME and world.rank == 0:
        print(f"tlt: {queue_again(os.environ, folder, progress())}", flush=True)
    is_closed = close is None or close(lambda: world.flag.seconds_left - _LEAVING_SECONDS)
    if stop is Stop.KILL and world.rank == 0:
        await_preemption(os.environ)
    if not is_closed:  # the tracker's library would wait once more as the process ends
        end_within(_LEAVING_SECONDS, STOPPED_EARLY)
    return STOPPED_EARLY


def run_progress(config: Config) -> str:
    """How far ``tlt train`` has come."""
    from tlt_hpc.resume.kept import describe_progress

    return describe_progress(config)


def written_files(config: Config) -> str:
    """How far a warm-up or an evaluation has come, where it cannot say so itself."""
    return f"{len(list(config.folder.rglob('*.h5')))} files of responses and features"


def make_parser() -> command_line.Parser:
    """The command line."""
    return command_line.make_parser(COMMANDS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; a mistake ends the process with one line."""
    parser = make_parser()
    options = command_line.parse(parser, arguments)
    if options.command == "warmup" and options.sources:
        options.overrides.append(f"warmup.sources={json.dumps(options.sources)}")
    if options.command == "compare" and options.json is not None and not options.json.parent.is_dir():
        command_line.parser_of(parser, "compare").error(
            f"--json {options.json}: its folder does not exist; make it first"
        )
    return options


def run_alone(module: str, options: argparse.Namespace) -> int:
    """Call ``run`` of a module; its user's mistakes end as one line."""
    try:
        if options.command.startswith("export"):
            say_soon(f"reading {options.place}", is_result=False)
        return importlib.import_module(module).run(options) or 0
    except (ValueError, OSError) as error:
        print(f"tlt: {one_line(as_error(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("tlt: stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED


def start_processes(config: Config, options: argparse.Namespace) -> None:
    """Start what judges responses, and a tracker's process: a process that has MPI should start no other."""
    from tlt_hpc.look.tracking import start_early
    from tlt_hpc.rewards.scorer import standing_judge, without_form

    if options.command in ("train", "compare", "evaluate", "ablate"):
        standing_judge(config.reward)
        if config.evaluation.every_steps:
            standing_judge(without_form(config.reward))
    if options.command == "train" and not launched_rank(os.environ):
        start_early(config.tracking)


def connect(config: Config, options: argparse.Namespace, flag: StopFlag) -> World:
    """All ranks, on nodes that are alike and have the job's files; from here on they answer signals by a vote.

    Collective; one rank a node reads. To be called before torch is imported: MPICH tells the launcher its address with
    whatever lies in memory behind it, and in a process that has imported much that exceeds a line of Slurm's PMI 2.

    Raises:
        UserError: on all ranks, where a node differs or the ranks were started wrongly.
    """
    from tlt_hpc.mpi.placing import place_ranks
    from tlt_hpc.mpi.world import World
    from tlt_hpc.plan.preflight.nodes import check_nodes

    world = World.connect(flag)
    plan = partial(plan_command, config, options, world.size)
    check_nodes(world, config, plan)  # before any other collective: a rank with an error of its own waits there
    place_ranks(world, uses_gpu=config.model.device != "cpu")
    world.answer_signals()
    world.say("loading libraries")
    return world


def work_together(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """Run a command on all ranks, from their meeting to their end; returns the exit status."""
    work = COMMANDS[options.command].work
    assert not isinstance(work, str)
    start_processes(config, options)
    world = connect(config, options, flag)
    status = work(config, options, world)
    from tlt_hpc.rl.distributed import leave_process_group

    leave_process_group()
    world.leave()  # a non-zero status ends the other ranks: not before the last word is out
    return status


def train(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt train`` on this rank."""
    if told := world.once(lambda: finished_message(config)):
        if world.rank == 0:
            print(told)
        return 0
    from tlt_hpc.cli.display import Screen, StepReporter, print_result
    from tlt_hpc.look.tracking import Tracking
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    with nullcontext() if world.rank else Tracking(config, RunFolder(config.folder)) as tracking:
        result = run(config, world, StepReporter(Screen(world.rank == 0)), tracking)
        leave_process_group()
        if world.rank == 0:
            print_result(config, result)
        if not result.finished:
            return stop_early(world, config.folder, partial(run_progress, config), tracking.close if tracking else None)
    return 0


def compare(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt compare`` on this rank."""
    from tlt_hpc.cli.display import Screen, StepReporter, print_comparison
    from tlt_hpc.storage.records import write_json
    from tlt_hpc.studies.compare import MODES, compare, rows_of, speed_rows, to_tree

    modes, screen = [mode for mode in MODES if mode not in options.without], Screen(world.rank == 0)
    comparison = compare(config, modes, options.steps, world, partial(StepReporter, screen))
    if comparison is None:
        if world.rank == 0:
            print("tlt: the comparison was stopped; a new one starts over", file=sys.stderr, flush=True)
        return 1
    if world.rank == 0:
        if options.json is not None:
            ratios = {
                name: {
                    what: {part: value if math.isfinite(value) else None for part, value in ratio._asdict().items()}
                    for what, ratio in found.items()
                }
                for name, found in comparison.speedups().items()
            }
            write_json(options.json, {**to_tree(comparison), "speedup": ratios})
        print_comparison(comparison, rows_of(comparison) | speed_rows(comparison))
    return 0 if all(comparison.equal.values()) else 1


def warmup(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt warmup`` on this rank."""
    from tlt_hpc.cli.display import Screen, WarmupScreen, print_warmup
    from tlt_hpc.studies.warmup.warm_up import warm_up

    result = warm_up(config, world, WarmupScreen(Screen(world.rank == 0)))
    if world.rank == 0:
        print_warmup(result, options.config, config.drafter.form)
    if result.progress.is_finished:
        return 0
    updates = count(result.progress.updates, "update")
    return stop_early(world, result.folder, lambda: f"{written_files(config)}, {updates}")


def evaluate(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt evaluate`` on this rank."""
    from tlt_hpc.cli.display import Screen
    from tlt_hpc.cli.show_evaluation import EvaluationScreen, print_evaluation
    from tlt_hpc.evaluate.evaluate import evaluate
    from tlt_hpc.evaluate.subject import find_subject

    subject = find_subject(options.checkpoint, options.step, options.output)
    result = evaluate(config, subject, world, EvaluationScreen(Screen(world.rank == 0)))
    if world.rank == 0:
        print_evaluation(result)
    if result.finished:
        return 0
    return stop_early(world, result.folder, lambda: f"{count(result.num_left, 'response')} before the end")


def ablate(config: Config, options: argparse.Namespace, world: World) -> int:
    """``tlt ablate`` on this rank."""
    from tlt_hpc.cli.display import Screen, StepReporter, print_comparison
    from tlt_hpc.studies.ablate import ablate, write_figures

    figures = ablate(ablation_plan.plan_ablation(config, options), world, StepReporter(Screen(world.rank == 0)))
    if figures is None:
        reason = world.first_stop_reason()
        if world.rank == 0:
            print(f"stopped early ({reason}); the same command resumes", flush=True)
        return STOPPED_EARLY
    if world.rank == 0:
        write_figures(figures)
        print_comparison(figures.comparison, figures.rows(), figures.verdict())
    return 0 if figures.as_promised else 1


_TRAIN = "train a policy; in a folder that has a checkpoint, resume it"
_COMPARE = "run the same steps plain, with n-gram speculation and in full; status 1: text, rewards or weights differ"
_WARMUP = "train the drafter before any reinforcement learning, or resume that"
_ABLATE = "compare the drafter left out, frozen and trained in several ways"
_EVALUATE = "judge a checkpoint or a model on data sets, or resume that"
_PLAN = "predict the memory that a run takes, by phase; status 1: more than there is"
_SIMULATE = "predict seconds and GPU-hours of a run by number of nodes"
_PREFLIGHT = "find before a job what would end it; status 1: something would"
_INIT = "copy the shipped job files and batch scripts into a folder"
_COMPLETION = "print what a shell needs to complete commands, options, files and keys"
_SUBMIT = "check a run or a sweep, submit it to Slurm, look after it (status, resubmit, collect)"
_RUNS = "list runs with step, score, state and cost"
_WATCH = "follow a run by its files alone; status 1: it hangs or is dead"
_REPORT = "one page of HTML: what a run learned, where its time went, what it gained"
_KEYS = "print every key of the configuration: values, default, unit, meaning"
_DRAFTER = "write a run's drafter as other engines load it"
_POLICY = "write a run's policy as a Hugging Face folder"
_DATA = "inspect what a run would train on, or prepare a data set of the hub for it"
COMMANDS = {
    "train": Command("run", _TRAIN, lambda command: None, train, run_progress),
    "evaluate": Command("run", _EVALUATE, command_line.add_evaluate_options, evaluate, written_files),
    "warmup": Command("run", _WARMUP, command_line.add_warmup_options, warmup, written_files),
    "compare": Command("run", _COMPARE, command_line.add_compare_options, compare),
    "ablate": Command("run", _ABLATE, ablation_plan.add_ablate_options, ablate),
    "data": Command("prepare and check", _DATA, command_line.add_data_options, "tlt_hpc.cli.inspect_data"),
    "keys": Command("prepare and check", _KEYS, command_line.add_keys_options, "tlt_hpc.cli.show_keys"),
    "plan": Command("prepare and check", _PLAN, plan_options.add_plan_options, "tlt_hpc.plan.memory.summary"),
    "simulate": Command(
        "prepare and check", _SIMULATE, plan_options.add_simulate_options, "tlt_hpc.plan.simulate.predict"
    ),
    "preflight": Command(
        "prepare and check", _PREFLIGHT, plan_options.add_preflight_options, "tlt_hpc.plan.preflight.checklist"
    ),
    "submit": Command("on a cluster", _SUBMIT, command_line.add_submit_options, "tlt_hpc.cli.submit"),
    "runs": Command("look at runs", _RUNS, add_runs_arguments, "tlt_hpc.look.live.list_runs"),
    "watch": Command("look at runs", _WATCH, add_watch_arguments, "tlt_hpc.look.live.watch_run"),
    "report": Command("look at runs", _REPORT, add_report_arguments, "tlt_hpc.look.report.write_report"),
    "export-policy": Command("use the results", _POLICY, export_options.add_policy_options, "tlt_hpc.export.policy"),
    "export-drafter": Command(
        "use the results", _DRAFTER, export_options.add_drafter_options, "tlt_hpc.export.drafter"
    ),
    "init": Command("set up", _INIT, command_line.add_init_options, "tlt_hpc.cli.init_folder"),
    "completion": Command("set up", _COMPLETION, command_line.add_completion_options, "tlt_hpc.cli.completion"),
}
