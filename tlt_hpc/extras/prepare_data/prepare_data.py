"""``tlt data prepare``: a data set as it is on the hub becomes the file that a job reads. One process, no network."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from tlt_hpc.common.formatting import format_count
from tlt_hpc.config import ConfigError, UserError
from tlt_hpc.data.files import ARGUMENT, KNOWN, KnownSet, config_for_data, open_rows
from tlt_hpc.data.rows import Rows, digest_of
from tlt_hpc.extras.prepare_data.prepare import ColumnError, Prepared, collect_questions, to_jsonl, top_columns
from tlt_hpc.storage.folder import WriteError, writing_atomically

_SHOWN_CONFLICTS = 5
_SHOWN_CHARACTERS = 40


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``tlt data prepare``."""
    command.add_argument("name", metavar="NAME", choices=tuple(KNOWN), help=f"one of {', '.join(KNOWN)}")
    command.add_argument("files", metavar="FILE", nargs="+", help="files, folders or patterns as data.source has them")
    command.add_argument("--output", metavar="PATH", help="a name that ends in .jsonl (default data/NAME.jsonl)")


def run(options: argparse.Namespace) -> None:
    """Read a data set's files, write the prompts and answers, and print the counts.

    Raises:
        ValueError: no such file, other columns, a row that cannot be read, or no place to write.
    """
    known = KNOWN[options.name]
    output = Path(options.output or known.output)
    if output.suffix != ".jsonl":
        raise UserError(f"--output {output}: a job reads JSON lines; give a name that ends in .jsonl")
    files = options.files
    print(f"reading {files[0] if len(files) == 1 else f'{len(files)} files and folders'}", flush=True)
    rows = _open_rows(files, known, top_columns(known))
    print(f"{format_count(len(rows), 'row')}", flush=True)
    try:
        prepared = collect_questions(rows, known)
    except ColumnError as error:
        found = sorted(_open_rows(files, known, frozenset())[error.index])  # all columns, not just those wanted
        raise UserError(
            f"{rows.row_location(error.index)} has the columns {', '.join(found) or '(none)'}, and {known.name!r} has "
            f"{known.question}, {known.answer}; give files of {known.repository}, or another NAME"
        ) from None
    content = to_jsonl(prepared, known)
    _print_counts(prepared, rows)
    if not prepared.kept:
        raise UserError(f"no row is left, and {output} was not written; give files of {known.repository}")
    is_new = _write(output, content)
    print(f"{'wrote' if is_new else 'unchanged:'} {output}, sha256 {_fingerprint(content)}")
    print(f"for the job: data.source={shlex.quote(str(output))}")


def _open_rows(files: Sequence[str], known: KnownSet, wanted: frozenset[str]) -> Rows:
    download = f"on the login node: {known.download_command}"
    if not all(files):
        raise UserError("FILE = '' names no file", download)
    try:
        return open_rows(config_for_data(files).data, wanted, ARGUMENT)
    except ConfigError as error:
        raise UserError(error.message_without_remedy, download) from None


def _print_counts(prepared: Prepared, rows: Rows) -> None:
    questions = f" (rows of {format_count(len(prepared.conflicts), 'question')} with several answers)"
    for name, number, note in (
        ("rows read", prepared.num_rows, ""),
        ("duplicates", prepared.num_duplicates, ""),
        ("conflicts", prepared.num_conflicting, questions if prepared.conflicts else ""),
        ("without answer", prepared.num_unanswered, ""),
        ("rows written", len(prepared.kept), ""),
    ):
        print(f"{name:14} {number:>11,}{note}")
    for each in prepared.conflicts[:_SHOWN_CONFLICTS]:
        assert each.other is not None
        print(
            f"left out: {rows.row_location(each.first)} has the answer {each.answer[:_SHOWN_CHARACTERS]!r}, "
            f"{rows.row_location(each.other)} for the same question {each.other_answer[:_SHOWN_CHARACTERS]!r}"
        )
    if len(prepared.conflicts) > _SHOWN_CONFLICTS:
        print(f"... and {format_count(len(prepared.conflicts) - _SHOWN_CONFLICTS, 'more such question')}")


def _write(output: Path, content: bytes) -> bool:
    """Write the file; False if it is there with this content.

    Raises:
        UserError: it is there with other content, or the disk refused.
    """
    if output.is_file():
        there = digest_of(output)
        if there == hashlib.sha256(content).hexdigest():
            return False
        raise UserError(
            f"{output} exists and differs (sha256 {there[:12]} there, {_fingerprint(content)} now); a run that "
            "reads it would not resume: give another --output, or remove it"
        )
    try:
        with writing_atomically(output) as part:
            part.write_bytes(content)
    except WriteError as error:
        raise UserError(f"{error.fact}; make room there or give another --output") from None
    return True


def _fingerprint(content: bytes) -> str:
    """As a run records it of its data, shortened."""
    return hashlib.sha256(content).hexdigest()[:12]
