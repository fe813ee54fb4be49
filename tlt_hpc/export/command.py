"""Runs ``tlt export-drafter``: finds the drafter, lays it out, writes it, says what was written."""

from __future__ import annotations

from tlt_hpc.export.card import advice, card, form_name, next_command, record_rows, tensor_table, weights_line
from tlt_hpc.export.formats import PORTABLE, Files, eagle3_only, speculators
from tlt_hpc.export.options import ExportOptions
from tlt_hpc.export.source import Source, open_source
from tlt_hpc.export.writer import check_output, write


def run(options: ExportOptions) -> None:
    """Export one drafter.

    Raises:
        ValueError: nothing to export, a format that cannot carry it, or no place to write; nothing was written.
    """
    check_output(options.output)
    source = open_source(options)
    files, embedding = lay_out(source, options.format)
    command = next_command(source, options.format, options.output)
    write(options.output, files, card(source, files, options.format, command, embedding))
    print(f"wrote {options.output}: {form_name(source.drafter)} drafter for {options.format}, {weights_line(files)}")
    print("\n".join(tensor_table(files)))
    rows = [("from", str(source.origin)), *record_rows(source), *([("embedding", embedding)] if embedding else [])]
    print("\n".join(f"{name:15} {value}" for name, value in rows))
    print(f"next: {command}\n{advice(source)}")


def lay_out(source: Source, kind: str) -> tuple[Files, str | None]:
    """An export's files in a format, and where the copy of the target's embedding is from, if it holds one.

    Raises:
        ValueError: the format cannot carry this drafter.
    """
    if kind != "speculators":
        return PORTABLE[kind](source.drafter, source.target), None
    drafter = eagle3_only(source.drafter)
    embedding, origin = source.embedding()
    return speculators(drafter, source.target, embedding), origin
