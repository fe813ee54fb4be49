"""``tlt export-drafter``: finds the drafter, lays it out, writes it, and prints what was written."""

from __future__ import annotations

from tlt_hpc.export.card import MARK, advice, card, form_name, next_command, record_rows, tensor_table, weights_line
from tlt_hpc.export.export_options import ExportOptions
from tlt_hpc.export.formats import lay_out
from tlt_hpc.export.source import open_source
from tlt_hpc.export.writer import FILES, check_output, write


def run(options: ExportOptions) -> None:
    """Export one drafter.

    Raises:
        ValueError: nothing to export, a format that cannot carry it, or no place to write; nothing was written.
    """
    check_output(options.output, MARK, FILES.__contains__)
    source = open_source(options)
    files, embedding = lay_out(options.format, source.drafter, source.target, source.embedding)
    command = next_command(source, options.format, options.output)
    write(options.output, files, card(source, files, options.format, command, embedding))
    print(f"wrote {options.output}: {form_name(source.drafter)} drafter for {options.format}, {weights_line(files)}")
    print("\n".join(tensor_table(files)))
    rows = [("from", str(source.origin)), *record_rows(source), *([("embedding", embedding)] if embedding else [])]
    print("\n".join(f"{name:15} {value}" for name, value in rows))
    print(f"next: {command}\n{advice(source)}")
