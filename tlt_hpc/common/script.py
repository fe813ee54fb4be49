"""Start and end of a script of the clone (``tools/``, ``jobs/``).

To be imported before any library: one that this Python lacks is then named in one line, with the Python that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.printable import escape_streams, one_line

_WRONG = 2


def run_script(name: str, work: Callable[[], int | None]) -> int:
    """Run a script; a user's mistake, or a place that cannot be read or written, is one line and status 2."""
    escape_streams()
    try:
        return work() or 0
    except UserError as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
    except OSError as error:
        from tlt_hpc.common.files import os_error_text  # has libraries of its own

        print(f"{name}: {one_line(os_error_text(error))}", file=sys.stderr)
    return _WRONG


def missing_library_message(library: str, python: str = sys.executable) -> str:
    """The message for a library that ``python`` lacks."""
    return f"no {library} in {python}: use this project's environment (README), e.g. .venv/bin/python of the clone"


def _print_missing_library(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        name = Path(sys.argv[0]).stem
        print(
            f"{'tlt' if name == '__main__' else name}: {missing_library_message(error.name.partition('.')[0])}",
            file=sys.stderr,
        )
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_missing_library
