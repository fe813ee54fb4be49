"""``tlt completion``: prints what a shell needs to complete commands, options, files and the keys of a job."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import shtab

from tlt_hpc.cli import command_line
from tlt_hpc.cli.commands import COMMANDS
from tlt_hpc.cli.submissions import LATER
from tlt_hpc.cluster.submission import FILE, SUBMITTED
from tlt_hpc.config.keys import Key, keys_of
from tlt_hpc.config.sections import SECTIONS

_FILES = ("CONFIG.toml", "RUN", "FOLDER", "CHECKPOINT", "FILE", "place")
_KEYS, _JOBS, _AFTER = (
    dict.fromkeys(("bash", "zsh"), name) for name in ("_tlt_keys", "_tlt_job_files", "_tlt_sent_dirs")
)
_WORDS = {"bash": "_tlt_keys", "zsh": "_tlt_words"}
"""After ``tlt submit``; for zsh, a submission's commands have the options of ``tlt submit JOB``."""
_PREAMBLE = {
    "bash": r"""
_tlt_keys() {
    local at=$COMP_CWORD word="$1" each
    [[ $word == = ]] && word= || at=$((at - 1)) # bash makes a word of an equals sign
    [[ ${COMP_WORDS[at]} == = ]] || { compgen -S = -W "@keys" -- "$1"; return; }
    local key="${COMP_WORDS[at - 1]}="
    for each in $(compgen -W "@values" -- "$key$word"); do echo "${each#"$key"}"; done
}
_tlt_job_files() { compgen -f -- "$1"; }
_shtab_tlt_submit_pos_0_COMPGEN=_tlt_job_files
_tlt_sent_dirs() {
    local path
    for path in @submitted/*/@file "$1"*/@file; do
        [[ ! -e $path || $path != "$1"* ]] || echo "${path%/@file}"
    done | sort -u | grep . || compgen -d -- "$1"
}
""",
    "zsh": r"""
_tlt_keys() {
    local key="${PREFIX%%=*}" values=(@values)
    if compset -P "*="; then compadd -- ${${(M)values:#$key=*}#*=}; else compadd -S = -- @keys; fi
}
_tlt_job_files() { compadd -- @later; _files; }
_tlt_sent_dirs() { compadd -- @submitted/*/@file(N:h); _files -/; }
_tlt_words() {
    case " ${words[*]} " in
    @cases) _tlt_sent_dirs ;;
    *) _tlt_keys ;;
    esac
}""",
}

_NO_BLANK = """
_tlt() { _shtab_tlt "$@"; [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace; }
complete -o bashdefault -F _tlt tlt"""
"""A key's value follows its equals sign."""


def run(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    keys = [(f"{section}.{key.name}", key) for section in SECTIONS for key in keys_of(section)]
    words = {
        "@keys": " ".join(name for name, _ in keys),
        "@values": " ".join(f"{name}={value}" for name, key in keys for value in _choices(key)),
        "@later": " ".join(LATER),
        "@cases": "|".join(f'*" {word} "*' for word in LATER),
        "@submitted": str(SUBMITTED),
        "@file": FILE,
    }
    preamble = re.sub("|".join(words), lambda match: words[match[0]], _PREAMBLE[options.shell])
    parser = command_line.make_parser({name: command for name, command in COMMANDS.items() if " " not in name})
    prepare = command_line.parser_of(command_line.parser_of(parser, "data"), "prepare")
    command_line.add_options(prepare, COMMANDS["data prepare"])
    if options.shell == "bash":
        _add_later(command_line.parser_of(parser, "submit"))
    _mark(parser)
    print(shtab.complete(parser, options.shell, preamble=preamble))
    if options.shell == "bash":
        print(_NO_BLANK)
    return 0


def _add_later(submit: command_line.Parser) -> None:
    """Let ``list``, ``status`` and the others stand where a job's file may: with options of their own."""
    later = submit.add_subparsers(dest="config")
    later.nargs = None
    for name in LATER:
        command = COMMANDS[f"submit {name}"]
        command_line.add_options(later.add_parser(name, help=command.help), command)
    job = next(action for action in submit._actions if action.dest == "config")
    submit._actions.remove(later)
    submit._actions[submit._actions.index(job)] = later


def _choices(key: Key) -> list[str]:
    """The values of a key that are words; none where it takes a list or a table of them."""
    return [] if " of " in key.values else re.findall(r'(?<=")[^", ]+(?=")|true|false', key.values)


def _mark(parser: argparse.ArgumentParser) -> None:
    """Say of each argument what completes it: files, keys and their values, or folders of submissions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # else the library leaves the commands out, as our help does
            for each in action.choices.values():
                _mark(each)
        elif action.dest in ("overrides", "sweep"):
            is_for_submit = parser.prog == "tlt submit" and action.dest == "overrides"
            action.complete = _WORDS if is_for_submit else _KEYS  # type: ignore[attr-defined]
        elif action.metavar == "JOB.toml":
            action.complete = _JOBS  # type: ignore[attr-defined]
        elif action.dest in ("after", "submission"):
            action.complete = _AFTER  # type: ignore[attr-defined]
        elif action.dest == "section":
            action.choices = tuple(SECTIONS)
        elif action.type is Path or action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
