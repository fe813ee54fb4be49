"""Parses what a user types: the parser, its help by group, suggestions for mistyped words, options of some commands.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tlt_hpc import __version__
from tlt_hpc.common.printable import one_line
from tlt_hpc.common.source import load_extra
from tlt_hpc.export.export_options import add_step_option
from tlt_hpc.plan.plan_options import GPU_MEMORY, parse_gpu_gigabytes, parse_positive_integer

if TYPE_CHECKING:
    from tlt_hpc.config import Config
    from tlt_hpc.mpi.world import World


class Command(NamedTuple):
    """A command of ``tlt``."""

    group: str
    """The heading that it stands under in the help."""
    help: str
    add_options: str | Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]
    """Adds the options to the command's parser; returns the parser that takes the configuration, if it is another. Of
    an extra, the module whose ``add_options`` does it."""
    work: str | Callable[[Config, argparse.Namespace, World], int]
    """A function that all ranks run, or a module whose ``run`` is called in one process."""
    progress: Callable[[Config], str] | None = None
    """Progress of a command that is queued again at its time limit; None for commands that start over."""


_EXAMPLES = """\
examples:
  tlt train jobs/tiny.toml run.num_steps=5          any key of the job may follow it
  tlt preflight jobs/qwen7b.toml --script sbatch/train_qwen7b.sh
  tlt submit jobs/qwen7b.toml --script sbatch/train_qwen7b.sh --account A --partition P
  tlt watch runs/tiny

`tlt COMMAND --help` shows a command's options, `tlt keys SECTION` the keys of a job.
"""
_CHOICE = re.compile(r"argument (.+?): invalid choice: (.+) \(choose from (.+)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Ends at a mistake with one line, which names the option or word that was probably meant."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)  # an abbreviation could change its meaning with a new option

    def error(self, message: str) -> NoReturn:
        """Print one line that begins with the command, and exit with status 2."""
        if match := _CHOICE.fullmatch(message):
            name, given, known = match[1], match[2].strip("'\""), re.findall(r"'([^']*)'", match[3])
            what = f"no command {given!r}" if name == "COMMAND" or "|" in name else f"{name} has no {given!r}"
            submit = f"; did you mean tlt submit {given}?" if name == "COMMAND" and f"submit {given}" in known else ""
            message = what + (submit or did_you_mean(given, known) or f"; choose from {', '.join(known)}")
        message = re.sub(r", \w+\.key=value$", "", message)  # they may be left out
        self.exit(2, f"{self.prog}: {one_line(ValueError(message))} (see {self.prog} --help)\n")

    @property
    def option_names(self) -> list[str]:
        """All options, such as ``--steps``."""
        return list(self._option_string_actions)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: what is alike among the known ones; empty if nothing is."""
    known = list(known)
    close = [each for each in known if each.startswith(word)] or difflib.get_close_matches(word, known, 1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def make_parser(commands: Mapping[str, Command], given: Sequence[str] | None = None) -> Parser:
    """The command line of these commands; with the words that were ``given``, only their command has its options."""
    parser = Parser(
        prog="tlt",
        usage="tlt COMMAND ...",
        description="Trains reasoning models by reinforcement learning, as one MPI program under Slurm.",
        epilog=_help_by_group(commands) + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tlt_hpc {__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS)
    for name, command in commands.items():
        each: argparse.ArgumentParser = parsers.add_parser(
            name, help=command.help, description=command.help, prog=f"tlt {name}"
        )
        if given is not None and name not in (" ".join(given[:1]), " ".join(given[:2])):
            continue
        each = add_options(each, command) or each
        if not isinstance(command.work, str):
            nargs, words = ("?", "; a run has its own") if name == "evaluate" else (None, "")
            each.add_argument("config", metavar="CONFIG.toml", nargs=nargs, help=f"the job, e.g. jobs/tiny.toml{words}")
            each.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. rollout.temperature=0.9")
            each.add_argument("--dry-run", action="store_true", help="check, and print the plan; write nothing")
    return parser


def add_options(parser: argparse.ArgumentParser, command: Command) -> argparse.ArgumentParser | None:
    """Add a command's own options; returns the parser that takes the configuration, if it is another."""
    if not isinstance(command.add_options, str):
        return command.add_options(parser)
    parser_of_config: argparse.ArgumentParser | None = load_extra(command.add_options).add_options(parser)
    return parser_of_config


def _help_by_group(commands: Mapping[str, Command]) -> str:
    lines = []
    for group in dict.fromkeys(command.group for command in commands.values()):
        lines += [f"{group}:", *(f"  {name:16}{each.help}" for name, each in commands.items() if each.group == group)]
    return "\n".join(lines) + "\n"


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options; overrides may stand anywhere after the configuration. A command may have two words."""
    if (both := " ".join(arguments[:2])) in _parsers(parser):
        arguments = [both, *arguments[2:]]
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        parser.exit(0)
    command = parser_of(parser, options.command)
    for word in rest:
        if word.startswith("-") or "overrides" not in options:
            command.error(_unknown_option_message(word, command))
    if rest:
        options.overrides = [*options.overrides, *rest]
    if options.command == "evaluate":
        set_evaluation_config(options)
    return options


def set_evaluation_config(options: argparse.Namespace) -> None:
    """Take the run's own configuration for ``tlt evaluate`` if none is given.

    argparse cannot distinguish an optional configuration from the overrides, which may stand before it.
    """
    words = [*filter(None, [options.config]), *options.overrides]
    given = next((word for word in words if not _is_override(word)), None)
    options.config = given or str(Path(options.checkpoint, "config.toml"))
    options.overrides = [word for word in words if word is not given]


def _is_override(word: str) -> bool:
    """Return True for an override, perhaps a mistyped one, and False for a file."""
    return bool(re.match(r"[\w.]+(=|$)", word)) and not word.endswith(".toml") and not Path(word).is_file()


def parser_of(parser: Parser, command: str) -> Parser:
    """The parser of one command."""
    return _parsers(parser)[command]


def _parsers(parser: Parser) -> Mapping[str, Parser]:
    action = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def _unknown_option_message(word: str, command: Parser) -> str:
    name, equals, _ = word.partition("=")
    if re.fullmatch(r"--\w+\.\w+", name):
        return f"unknown option {word}; leave out the dashes: {word[2:] if equals else f'{name[2:]}=VALUE'}"
    if not word.startswith("-"):
        return f"unknown argument {word}"
    return f"unknown option {name}{did_you_mean(name, command.option_names)}"


# --- options of commands that have no module of their own for them ---


def add_evaluate_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt evaluate``."""
    command.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a run's folder, a Hugging Face folder, or embedded:tiny"
    )
    add_step_option(command, "the checkpoint of that step instead of the newest")
    command.add_argument("--output", type=Path, metavar="FOLDER", help="write there instead of beside the run")


def add_compare_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt compare``."""
    command.add_argument("--steps", type=parse_positive_integer, default=6, help="steps of each mode (default 6)")
    words = "leave this mode out, as all modes are in memory at once; may be given several times"
    command.add_argument("--without", choices=("ngram", "tail", "ahead-tail"), action="append", default=[], help=words)
    command.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")


def add_warmup_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt warmup``."""
    words = "learn from the responses that this run has logged; may be given several times"
    command.add_argument("--from", dest="sources", action="append", metavar="RUN", help=words)


def add_init_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt init``."""
    command.add_argument("folder", type=Path, metavar="FOLDER", help="where jobs/ and sbatch/ go; made if missing")


def add_submit_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt submit``."""
    command.usage = (
        "tlt submit JOB.toml [section.key=value ...] [options]\n"
        "       tlt submit list|status|resubmit|collect|cancel, which have options of their own"
    )
    add = command.add_argument
    add("config", metavar="JOB.toml", help="the job")
    add("overrides", nargs="*", metavar="section.key=value", help="for every member")
    add("--sweep", action="append", default=[], metavar="section.key=A,B,..", help="a member each; repeat for a grid")
    add("--script", type=Path, metavar="X.sh", help="take what these options leave open from its #SBATCH lines")
    words = "wait until this job, or the submission in this folder, has finished; may be given several times"
    add("--after", action="append", default=[], metavar="JOB", help=words)
    words = "what the job runs (default train)"
    add("--command", dest="command_of_job", choices=("train", "warmup"), default="train", help=words)
    add("--folder", type=Path, help="of logs and records (default runs/submitted/NAME-TIME)")
    add("--gpu-memory", type=parse_gpu_gigabytes, metavar="GB", help=f"of each GPU, for preflight: {GPU_MEMORY}")
    _add_slurm_options(command, "default 1", "default 24:00:00")


def add_resubmit_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt submit resubmit``."""
    add_submission_argument(command)
    _add_slurm_options(command, "default: as before", "default: as before")


def add_cancel_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt submit cancel``."""
    add_submission_argument(command)
    command.add_argument("--dry-run", action="store_true", help="print what would be cancelled; cancel nothing")


def add_collect_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt submit collect``."""
    add_submission_argument(command)
    command.add_argument("--output", type=Path, metavar="FILE.csv", help="write the table there as well")


def add_list_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt submit list``."""
    words = "also those in this folder, beside those in runs/submitted"
    command.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=words)


def add_submission_argument(command: argparse.ArgumentParser) -> None:
    """The submission that a command is about."""
    words = "the submission's folder, its name in runs/submitted, or a job's number (default: the newest)"
    command.add_argument("submission", nargs="?", metavar="SUBMISSION", help=words)


def _add_slurm_options(command: argparse.ArgumentParser, default: str, default_time: str) -> None:
    add = command.add_argument
    add("--dry-run", action="store_true", help="check everything and print it; submit nothing")
    add("--no-preflight", action="store_true", help="make only the checks of `tlt train --dry-run`")
    slurm = command.add_argument_group("of Slurm", argument_default=argparse.SUPPRESS)
    add = slurm.add_argument
    add("--nodes", "-N", type=parse_positive_integer, metavar="N", help=f"of each member ({default})")
    add("--gpus-per-node", type=parse_positive_integer, metavar="N", help="one rank each; without: CPUs")
    add("--ranks-per-node", type=parse_positive_integer, metavar="N", help="where it is not the number of GPUs")
    add("--cpus-per-rank", type=parse_positive_integer, metavar="N", help=f"cores, and threads ({default})")
    add("--partition", "-p", metavar="P")
    add("--account", "-A", metavar="A")
    add("--time", "-t", metavar="T", help=f"limit of each job ({default_time})")
    add("--mem", metavar="M", help="memory of a node; 0: all of it")
    words = "a further option: --sbatch=--qos=long"
    add("--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help=words)


def add_keys_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt keys``."""
    command.add_argument("section", nargs="?", metavar="SECTION[.KEY]", help="e.g. rollout; without it all")
    command.add_argument("--markdown", action="store_true", help="as the page docs/configuration.md")


def add_data_options(command: argparse.ArgumentParser) -> None:
    """The options of ``tlt data inspect``; ``tlt data prepare`` is a command of its own."""
    parts = command.add_subparsers(dest="data", required=True, metavar="inspect|prepare")
    inspect = parts.add_parser(
        "inspect",
        help="count rows, lengths and duplicates, and name rows that are broken or never right; status 1: there are",
    )
    inspect.add_argument(
        "file", metavar="FILE", help="a file, folder, pattern or task as data.source has it, or a job's TOML"
    )
    inspect.add_argument("--model", metavar="FOLDER", help="counts tokens, and renders chats by this model's template")
    inspect.add_argument("overrides", nargs="*", metavar="data.key=value", help="e.g. data.prompt_key=problem")
    parts.add_parser("prepare", help="turn a data set of the hub, downloaded before, into what a job reads")
