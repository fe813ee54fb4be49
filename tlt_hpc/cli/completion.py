"""``tlt completion``: prints what a shell needs to complete commands, options, files and the keys of a job."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from tlt_hpc.cli.main import make_parser
from tlt_hpc.config.keys import keys_of
from tlt_hpc.config.sections import SECTIONS

_FILES = ("CONFIG.toml", "JOB.toml", "RUN", "FOLDER", "CHECKPOINT", "FILE", "place")
_KEYS = {"bash": "_tlt_keys", "zsh": "_tlt_keys"}
_PREAMBLE = {
    "bash": '_tlt_keys() {{ compgen -S = -W "{keys}" -- "$1"; }}',
    "zsh": "_tlt_keys() {{ compadd -S = -- {keys} }}",
}

_NO_BLANK = """
_tlt() { _shtab_tlt "$@"; [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace; }
complete -o bashdefault -F _tlt tlt"""
"""A key's value follows its equals sign."""


def run(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    keys = " ".join(f"{section}.{key.name}" for section in SECTIONS for key in keys_of(section))
    parser = make_parser()
    _mark(parser)
    print(shtab.complete(parser, options.shell, preamble=_PREAMBLE[options.shell].format(keys=keys)))
    if options.shell == "bash":
        print(_NO_BLANK)
    return 0


def _mark(parser: argparse.ArgumentParser) -> None:
    """Say of each argument whether files or keys complete it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # else the library leaves the commands out, as our help does
            for each in action.choices.values():
                _mark(each)
        elif action.dest == "overrides":
            action.complete = _KEYS  # type: ignore[attr-defined]
        elif action.type is Path or action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
