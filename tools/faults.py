"""Strike a run of this project with faults, and look whether it keeps what it promises.

    python tools/faults.py moments --count 40           # kill -9, SIGUSR2 and SIGTERM at moments of a run
    python tools/faults.py system-calls --alike 1 --jobs 2       # each system call fails: one of a kind on each file
    python tools/faults.py power-loss --resumes 20      # what a power failure can leave, after each change of a file
    python tools/faults.py inputs --count 1000          # damaged files that the program reads, by its readers
    python tools/faults.py folders --count 200          # damaged run folders, by six commands

A line for each case is written to ``cases.jsonl`` in the folder; a case that is wrong is printed as well, and there is
a table at the end. ``moments`` and ``system-calls`` continue an earlier campaign whose folder they are given. Exit
status 1: a case is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
from fault_kinds.results import Results

KINDS = {
    "moments": "ranks are killed, and runs stopped, at moments of a run",
    "system-calls": "each system call of a short run fails",
    "power-loss": "a power failure after each change of a file",
    "inputs": "damaged files that the program reads, by its readers",
    "folders": "damaged run folders, by six commands",
}
COUNTS = {"moments": 40, "system-calls": 0, "inputs": 200, "folders": 200}
"""Cases by default; 0: all."""


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; returns 1 if a case is wrong."""
    options = make_parser().parse_args(arguments)
    folder: Path = (options.folder or Path(tempfile.mkdtemp(prefix=f"{options.kind}-"))).absolute()
    print(f"working in {folder}", flush=True)
    results, began = Results(folder), time.monotonic()
    module = "commands" if options.kind in ("inputs", "folders") else options.kind.replace("-", "_")
    import_module(f"fault_kinds.{module}").strike(options, results)
    seconds = time.monotonic() - began
    is_kept = options.folder is not None or results.num_wrong > 0
    place = f"; everything is in {folder}" if is_kept else ""
    print(f"{results.table()}{len(results.found)} cases in {seconds:.0f} s: {results.num_wrong} wrong{place}")
    if options.output:
        options.output.write_text(results.table())
    if not is_kept:
        shutil.rmtree(folder)
    return 1 if results.num_wrong else 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, what in KINDS.items():
        own = kinds.add_parser(kind, help=what, description=f"{what.capitalize()}.")
        own.add_argument("--seed", type=int, default=0)
        own.add_argument("--folder", type=Path, help="default: one in /tmp, removed if nothing is wrong")
        own.add_argument("--output", type=Path, help="for the table, in Markdown")
        if kind in COUNTS:
            own.add_argument("--count", type=int, default=COUNTS[kind], help=f"of cases ({COUNTS[kind] or 'all'})")
        if kind in ("system-calls", "power-loss"):
            own.add_argument("--ranks", type=int, default=1)
        if kind == "system-calls":
            own.add_argument("--only", help="a pattern of cases")
            own.add_argument("--rank", type=int, default=0, help="the one whose call fails")
            own.add_argument("--alike", type=int, default=0, metavar="M", help="at most M calls of a kind on a file")
            own.add_argument("--jobs", type=int, default=1, help="runs at a time")
        if kind == "power-loss":
            own.add_argument("--every", type=int, default=1, metavar="K", help="after each K-th write, and all else")
            own.add_argument("--random", type=int, default=2, metavar="N", help="states at random of each change")
            own.add_argument("--resumes", type=int, default=0, metavar="N", help="of these, from which a run resumes")
        if kind in ("inputs", "folders"):
            own.add_argument("--run", type=Path, help="a finished run of the embedded model (default: makes one)")
    return parser


if __name__ == "__main__":
    sys.exit(run_script("faults", main))
