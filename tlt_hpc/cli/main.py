"""The commands: ``train``, ``evaluate``, ``compare``, ``ablate``, ``warmup``, ``bench``, ``plan``, ``simulate``,
``preflight``, ``data``, exports.

Heavy libraries are imported only once a command needs them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tlt_hpc import __version__
from tlt_hpc.cluster.caches import make_node_cache
from tlt_hpc.cluster.device import take_device
from tlt_hpc.cluster.local import (
    STARTED,
    become_ranks,
    given_job,
    launched_count,
    launched_rank,
    starting,
)
from tlt_hpc.cluster.stopping import Stop, StopFlag, await_preemption, know_limits, queue_again
from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.cluster.watch.watch import Watch
from tlt_hpc.common.files import has_remedy, told
from tlt_hpc.common.printable import PrintableStream, escape_streams, one_line
from tlt_hpc.common.words import count
from tlt_hpc.config import Config, UserError, check_learns, check_resumable, load_config, without_side_effects
from tlt_hpc.export import export_options
from tlt_hpc.look.arguments import add_report_arguments, add_watch_arguments
from tlt_hpc.plan import plan_options
from tlt_hpc.plan.plan_options import at_least_one, at_least_one_each
from tlt_hpc.resume.finished import finished_message
from tlt_hpc.storage.folder import RunFolder, WriteError
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies import ablation_plan

if TYPE_CHECKING:
    from tlt_hpc.look.tracking import Tracking
    from tlt_hpc.mpi.world import World
    from tlt_hpc.plan.inputs import ModelAssets

USER_ERROR = 2
"""Exit status of a mistake in the command or configuration; nothing was written."""
STOPPED_EARLY = 75
"""Exit status of a run that a signal stopped: the same command resumes from there."""
INTERRUPTED = 130
"""Exit status of a command that a Ctrl-C ended at once."""
_OVERRIDE = re.compile(r"[a-z_]+\.[a-z_]+=")
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
    module = COMMANDS[options.command].module
    if not module:
        flag.install()  # before the seconds that imports take: there, a signal ends the process without a word
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank or 0}] %(levelname)s %(name)s: %(message)s")
    if module:
        return run_alone(module, options)
    is_rank = rank is not None and not options.dry_run
    if rank == 0 and is_rank and STARTED not in os.environ:
        print(starting(launched_count(os.environ)), flush=True)
    if rank is None and not options.dry_run:
        print(f"checking {options.config}", flush=True)
    try:
        config = load_config(options.config, options.overrides, given_job(os.environ, options.config))
        num_ranks = launched_count(os.environ) or config.run.ranks
        config = config_of(config, options)
        plan = "" if is_rank else plan_command(config, options, num_ranks)  # ranks look once a node, in connect
        if rank is None and options.command in ("train", "compare", "ablate", "bench"):
            check_drafter(config)  # the ranks read it for themselves
        if rank is None and options.command == "train":
            finished = check_folder(config)
            if finished and not options.dry_run:
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


def be_rank(config: Config, options: argparse.Namespace, flag: StopFlag, rank: int | None) -> int:
    """Run a command's own work, as one of its ranks or alone; returns the exit status.

    Raises:
        OSError: not of a path that the user gave; where it comes from matters then.
    """
    try:
        if rank is not None:
            settle(config, rank)
        command = COMMANDS[options.command]
        progress = command.progress
        PrintableStream.outlives_reader = True  # what is trained is not lost with a terminal
        know_limits(flag, os.environ, rank or 0, config.folder, progress and partial(progress, config))
        with Watch(config.run.stall_factor, rank) as watch:
            assert command.run_on_ranks is not None
            return watch.ended(command.run_on_ranks(config, options, flag))
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
        return ablation_plan.describe(ablation_plan.plan_ablation(config, options), num_ranks)
    if options.command == "warmup":
        from tlt_hpc.studies.warmup import plan

        return plan.describe(config, assets.shape, num_ranks)
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
    read_lines(folder.metrics)
    return finished_message(config)


def check_drafter(config: Config) -> None:
    """Open the drafter that a run begins with.

    Raises:
        ValueError: it is not there, or another model's.
    """
    from tlt_hpc.models.drafter_file import initial_drafter
    from tlt_hpc.models.folder import find_model
    from tlt_hpc.models.shape import read_shape

    if config.speculation.mode == "full":
        initial_drafter(config.drafter.init, config.drafter.form, read_shape(find_model(config.model.path)))


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
    if config.evaluation.every_steps:
        open_checked_sets(config, assets.folder, assets.shape, assets.tokenizer)
    memory = summarise(config, assets.shape, num_ranks)
    return (f"memory      {memory}\n" if memory else "") + describe(config, assets.shape, num_ranks)


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


def leave_early(world: World, folder: Path, progress: Callable[[], str], tracking: Tracking | None = None) -> int:
    """End a job that was stopped and can continue: where its time was up, or it is preempted, Slurm queues it again.

    Collective.

    Args:
        folder: of what was worked on.
        progress: how far that has come; asked on rank 0.
        tracking: closed once Slurm has been asked, in the time that is left; what is not sent until then is left out.
    """
    from tlt_hpc.mpi.ending import end_within

    stop = world.agree_to_stop()
    world.flag.is_left = True
    BEAT.leave("stopped early")  # Slurm may kill any of the ranks from here on
    if stop is Stop.TIME and world.rank == 0:
        print(f"tlt: {queue_again(os.environ, folder, progress())}", flush=True)
    is_closed = tracking is None or tracking.close_within(lambda: world.flag.seconds_left - _LEAVING_SECONDS)
    if stop is Stop.KILL and world.rank == 0:
        await_preemption(os.environ)
    if not is_closed:  # the tracker's library would wait once more as the process ends
        end_within(_LEAVING_SECONDS, STOPPED_EARLY)
    world.leave()
    return STOPPED_EARLY


def run_progress(config: Config) -> str:
    """How far ``tlt train`` has come."""
    from tlt_hpc.resume.kept import describe_progress

    return describe_progress(config)


def written_bytes(config: Config) -> str:
    """How far a warm-up or an evaluation has come, where it cannot say so itself."""
    total = 0
    for path in config.folder.rglob("*.h5"):
        with suppress(FileNotFoundError):  # ranks are at work
            total += path.stat().st_size
    return f"{total} bytes of responses and features"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; overrides may stand anywhere after the configuration."""
    parser = make_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command in ("data", "plan", "preflight", "simulate") and not any(
        argument.startswith("-") for argument in rest
    ):
        options.overrides, rest = [*options.overrides, *rest], []
    if COMMANDS[options.command].module:
        if rest:
            parser.error(f"unknown argument {rest[0]}; see tlt {options.command} --help")
        return options
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; see tlt {options.command} --help")
    options.overrides = [*options.overrides, *rest]
    if options.command == "warmup" and options.sources is not None:
        take_sources(options)
    if options.command == "compare" and options.steps < 1:
        parser.error(f"--steps {options.steps} compares nothing; use 1 or more")
    if options.command in ("compare", "bench") and options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist; make it first")
    return options


def take_sources(options: argparse.Namespace) -> None:
    """``--from`` as the key that it sets; overrides that stand behind it are none of its folders."""
    folders = [word for word in options.sources if not _OVERRIDE.match(word)]
    overrides = [word for word in options.sources if _OVERRIDE.match(word)]
    options.overrides = [*options.overrides, *overrides, f"warmup.sources={json.dumps(folders)}"]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tlt", description="Reinforcement learning of reasoning models under MPI, drafter trained on idle ranks."
    )
    parser.add_argument("--version", action="version", version=f"tlt_hpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        each = commands.add_parser(name, help=command.help)
        each = command.add_options(each) or each
        if command.run_on_ranks is not None:
            each.add_argument("config", metavar="CONFIG.toml", help="the run, e.g. jobs/tiny.toml")
            each.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.temperature=0.9")
            each.add_argument("--dry-run", action="store_true", help="check, and print the plan; write nothing")
    return parser


def add_evaluate_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt evaluate``."""
    command.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a run's folder, one of its checkpoints, a Hugging Face folder, or "
        "embedded:tiny",
    )  # fmt: skip
    command.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step instead of the newest")
    command.add_argument("--output", type=Path, metavar="FOLDER", help="write there instead of beside the run")


def add_bench_options(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of ``tlt bench rollout``."""
    rollout = command.add_subparsers(dest="bench", required=True).add_parser(
        "rollout", help="tokens per second of a job's rollouts, plain and with each strategy"
    )
    rollout.add_argument("--batches", type=at_least_one_each, default=[1, 8, 32], metavar="N,...",
                         help="sequences of a rank at a time (1,8,32)")  # fmt: skip
    rollout.add_argument("--sequences", type=at_least_one, metavar="N", help="of a rank (default 4 of each batch)")
    rollout.add_argument("--repeats", type=at_least_one, default=3, metavar="N", help="of every measurement (3)")
    rollout.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    return rollout


def add_compare_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt compare``."""
    command.add_argument("--steps", type=int, default=6, help="steps of each mode (default 6)")
    command.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")


def add_warmup_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt warmup``."""
    command.add_argument(
        "--from", dest="sources", nargs="+", metavar="RUN", help="learn from the responses that these runs have logged"
    )


def add_keys_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt keys``."""
    command.add_argument("section", nargs="?", metavar="SECTION", help="e.g. rollout; without it all")
    command.add_argument("--markdown", action="store_true", help="as the page docs/configuration.md")


def add_data_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt data inspect``."""
    inspect = command.add_subparsers(dest="data", required=True).add_parser(
        "inspect", help="count rows, lengths and duplicates, and name broken rows; status 1: there are"
    )
    inspect.add_argument(
        "file", metavar="FILE", help="a file, folder, pattern or task as data.source has it, or a job's TOML"
    )
    inspect.add_argument("--model", metavar="FOLDER", help="counts tokens, and renders chats by this model's template")
    inspect.add_argument("overrides", nargs="*", metavar="data.key=value", help="e.g. data.prompt_key=problem")


def run_alone(module: str, options: argparse.Namespace) -> int:
    """Call ``run`` of a module; its user's mistakes end as one line."""
    try:
        return importlib.import_module(module).run(options) or 0
    except (ValueError, OSError) as error:
        print(f"tlt: {one_line(as_error(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("tlt: stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED


def start_rewards(config: Config) -> None:
    """Start what judges responses as the first thing that a rank does: a process that has MPI should start no other."""
    from tlt_hpc.rewards.scorer import standing_judge, without_form

    standing_judge(config.reward)
    if config.evaluation.every_steps:
        standing_judge(without_form(config.reward))


def connect(config: Config, options: argparse.Namespace, flag: StopFlag) -> World:
    """All ranks, on nodes that are alike and have the job's files; from here on they answer signals by a vote.

    Collective; one rank a node reads. To be called before torch is imported: MPICH tells the launcher its address with
    whatever lies in memory behind it, and in a process that has imported much that exceeds a line of Slurm's PMI 2.

    Raises:
        UserError: on all ranks, where a node differs or the ranks were started wrongly.
    """
    from tlt_hpc.mpi.world import World
    from tlt_hpc.plan.preflight.nodes import check_nodes

    world = World.connect(flag)
    plan = partial(plan_command, config, options, world.size)
    check_nodes(world, config, plan)  # before any other collective: a rank with an error of its own waits there
    world.answer_signals()
    world.say("loading libraries")
    return world


def run_train(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """``tlt train`` on this rank."""
    from tlt_hpc.look.tracking import Tracking, start_early

    start_rewards(config)
    if not launched_rank(os.environ):
        start_early(config.tracking)
    world = connect(config, options, flag)
    if told := world.once(lambda: finished_message(config)):
        if world.rank == 0:
            print(told)
        world.leave()
        return 0
    from tlt_hpc.cli.display import make_reporter, print_result
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    with nullcontext() if world.rank else Tracking(config, RunFolder(config.folder)) as tracking:
        with make_reporter(world.rank == 0, lambda: world.stop_requested) as reporter:
            result = run(config, world, reporter, tracking)
        leave_process_group()
        if world.rank == 0:
            print_result(config, result)
        if not result.finished:
            return leave_early(world, config.folder, partial(run_progress, config), tracking)
    world.leave()
    return 0


def run_compare(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """``tlt compare`` on this rank."""
    start_rewards(config)
    world = connect(config, options, flag)
    from tlt_hpc.cli.display import make_reporter, print_comparison
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.storage.records import write_json
    from tlt_hpc.studies.compare import compare, rows_of, to_tree

    with make_reporter(world.rank == 0, lambda: world.stop_requested) as reporter:
        comparison = compare(config, options.steps, world, reporter)
    leave_process_group()
    if comparison is None:
        if world.rank == 0:
            print("tlt: the comparison was stopped; a new one starts over", file=sys.stderr, flush=True)
        world.leave()
        return 1
    if world.rank == 0:
        if options.json is not None:
            write_json(options.json, to_tree(comparison))
        print_comparison(comparison, rows_of(comparison))
    world.leave()  # a non-zero status ends the other ranks: not before the last word is out
    return 0 if all(comparison.equal.values()) else 1


def run_warmup(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """``tlt warmup`` on this rank."""
    world = connect(config, options, flag)
    from tlt_hpc.cli.display import make_warmup_reporter, print_warmup
    from tlt_hpc.studies.warmup.warm_up import warm_up

    with make_warmup_reporter(world.rank == 0) as reporter:
        result = warm_up(config, world, reporter)
    if world.rank == 0:
        print_warmup(result, options.config, config.drafter.form)
    if not result.progress.is_finished:
        files, updates = len(list(result.folder.rglob("*.h5"))), result.progress.updates
        words = f"{count(files, 'file')} of features, {count(updates, 'update')}"
        return leave_early(world, result.folder, lambda: words)
    world.leave()
    return 0


def run_evaluate(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """``tlt evaluate`` on this rank."""
    start_rewards(config)
    world = connect(config, options, flag)
    from tlt_hpc.cli.show_evaluation import make_evaluation_reporter, print_evaluation
    from tlt_hpc.evaluate.evaluate import evaluate
    from tlt_hpc.evaluate.subject import find_subject
    from tlt_hpc.rl.distributed import leave_process_group

    with make_evaluation_reporter(world.rank == 0) as reporter:
        result = evaluate(config, find_subject(options.checkpoint, options.step, options.output), world, reporter)
    leave_process_group()
    if world.rank == 0:
        print_evaluation(result)
    if not result.finished:
        return leave_early(world, result.folder, lambda: f"{count(result.num_left, 'response')} before the end")
    world.leave()
    return 0


def run_ablate(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """``tlt ablate`` on this rank."""
    start_rewards(config)
    world = connect(config, options, flag)
    from tlt_hpc.cli.display import make_reporter, print_comparison
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.studies.ablate import ablate, write_figures

    figures = ablate(ablation_plan.plan_ablation(config, options), world, lambda: make_reporter(world.rank == 0))
    leave_process_group()
    if figures is None:
        reason = world.first_stop_reason()
        if world.rank == 0:
            print(f"stopped early ({reason}); the same command resumes", flush=True)
        world.leave()
        return STOPPED_EARLY
    if world.rank == 0:
        write_figures(figures)
        print_comparison(figures.comparison, figures.rows(), figures.verdict())
    world.leave()
    return 0 if figures.as_promised else 1


def run_bench(config: Config, options: argparse.Namespace, flag: StopFlag) -> int:
    """``tlt bench rollout`` on this rank."""
    world = connect(config, options, flag)
    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.storage.records import write_json
    from tlt_hpc.studies.bench import bench_rollout, table

    figures = bench_rollout(config, world, options.batches, options.sequences, options.repeats)
    leave_process_group()
    if world.rank == 0 and figures is not None:
        if options.json is not None:
            write_json(options.json, figures)
        print(table(figures))
    if world.rank == 0 and figures is None:
        print("tlt: the measurement was stopped; a new one starts over", file=sys.stderr, flush=True)
    world.leave()
    return 1 if figures is None else 0


def no_options(command: argparse.ArgumentParser) -> None:
    """The options of a command that has none of its own."""


@dataclass(frozen=True)
class Command:
    """A command of ``tlt``: with ``run_on_ranks`` it runs a configuration on all ranks, else it is one process."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]
    """Adds the options to the command's parser; returns the parser that takes the configuration, if it is another."""
    run_on_ranks: Callable[[Config, argparse.Namespace, StopFlag], int] | None = None
    module: str = ""
    """The module whose ``run`` is called with the options, imported when the command runs."""
    progress: Callable[[Config], str] | None = None
    """Of a command that is queued again at its time limit: how far it has come; the others start over."""


COMMANDS = {
    "train": Command(
        "train a policy; in a folder that has a checkpoint, resume it", no_options, run_train, progress=run_progress
    ),
    "compare": Command(
        "run the same steps plain, with n-gram speculation and in full; status 1: text, rewards or weights differ",
        add_compare_options,
        run_compare,
    ),
    "warmup": Command(
        "train the drafter before any reinforcement learning, or resume that",
        add_warmup_options,
        run_warmup,
        progress=written_bytes,
    ),
    "ablate": Command(
        "compare the drafter left out, frozen and trained in several ways",
        ablation_plan.add_ablate_options,
        run_ablate,
    ),
    "evaluate": Command(
        "judge a checkpoint or a model on data sets, or resume that",
        add_evaluate_options,
        run_evaluate,
        progress=written_bytes,
    ),
    "bench": Command("measure the rollout engine", add_bench_options, run_bench),
    "plan": Command(
        "predict the memory that a run takes, by phase; status 1: more than there is",
        plan_options.add_plan_options,
        module="tlt_hpc.plan.memory.summary",
    ),
    "simulate": Command(
        "predict seconds and GPU-hours of a run by number of nodes",
        plan_options.add_simulate_options,
        module="tlt_hpc.plan.simulate.predict",
    ),
    "preflight": Command(
        "find before a job what would end it; status 1: something would",
        plan_options.add_preflight_options,
        module="tlt_hpc.plan.preflight.checklist",
    ),
    "watch": Command(
        "follow a run by its files alone; status 1: it hangs or is dead",
        add_watch_arguments,
        module="tlt_hpc.look.live.watch_run",
    ),
    "report": Command(
        "one page of HTML: what a run learned, where its time went, what it gained",
        add_report_arguments,
        module="tlt_hpc.look.report.write_report",
    ),
    "keys": Command(
        "print every key of the configuration: values, default, unit, meaning",
        add_keys_options,
        module="tlt_hpc.cli.show_keys",
    ),
    "export-drafter": Command(
        "write a run's drafter as other engines load it",
        export_options.add_drafter_options,
        module="tlt_hpc.export.drafter",
    ),
    "export-policy": Command(
        "write a run's policy as a Hugging Face folder",
        export_options.add_policy_options,
        module="tlt_hpc.export.policy",
    ),
    "data": Command("look at what a run would train on", add_data_options, module="tlt_hpc.cli.inspect_data"),
}
