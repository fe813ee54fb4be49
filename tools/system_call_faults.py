"""Let every system call of a short run fail in turn, resume the run, and compare its end with that of an unbroken one.

    python tools/system_call_faults.py --output table.md                            # all calls: hours
    python tools/system_call_faults.py --parts checkpoint --calls fsync,rename --errors EIO
    python tools/system_call_faults.py --ranks 2 --rank 1 --every 20 --jobs 2       # each 20th call of rank 1

A case is the Nth call of a kind, on the run's own files, the model's or the job's, in one part of a run: a ``start`` in
an empty folder, a ``resume`` with a step to repeat, one ``step``, the ``checkpoint`` after it, and the ``watch`` over
the rank. It fails once or from then on, or a write is cut short, once or on a disk that is full from then on
(``system_call_rank.py``). ``cases.jsonl`` in the folder gets a line for each; a call with the same folder continues.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from system_call_rank import CALLS, Fault, unavailable
from system_call_runs import ROOT, STARTS, Campaign, Case, Result

from tlt_hpc.common.errors import UserError

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "short")
ERRORS_OF = {"write": ERRORS, **dict.fromkeys(("mmap", "read", "chmod"), ERRORS[:1])}
"""The errors that kinds of calls can meet; all others: those but the last."""


@contextmanager
def warm_launcher() -> Iterator[list[str]]:
    """What stands for ``python -m mpi4py``: ranks are forks of a process that has the libraries (``rank_forks.py``)."""
    with tempfile.TemporaryDirectory(prefix="tlt-ranks-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/0")
        listener.listen(64)
        fixed = {"OMP_NUM_THREADS": "1", "HYDRA_BOOTSTRAP": "fork", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "tests" / "rank_forks.py"), str(listener.fileno())]
        forking = subprocess.Popen(
            command, env=os.environ | fixed, pass_fds=[listener.fileno()], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            yield [sys.executable, "-IS", str(ROOT / "tests" / "forked_rank.py"), folder]
        finally:
            forking.kill()
            forking.wait()


def cases_of(campaign: Campaign, options: argparse.Namespace) -> Iterator[Case]:
    """All cases that the options ask for, after a line for each part."""
    for part in options.parts:
        files = campaign.count(part)
        print(f"{part}: {', '.join(f'{len(found)} {call}' for call, found in files.items())}", flush=True)
        for call in options.calls:
            numbers = [n for place in dict.fromkeys(files[call]) for n in few(files[call], place, options.alike)]
            for place, number in enumerate(sorted(numbers)[:: options.every]):
                errors = [error for error in options.errors if error in ERRORS_OF.get(call, ERRORS[:-1])]
                hows = [(error, stays) for error in errors for stays in (False, True)]
                for error, stays in hows if options.every == 1 else hows[place % max(1, len(hows)) :][:1]:
                    yield Case(part, options.ranks, Fault(part, call, number, error, stays, options.rank))


def few(files: list[str], file: str, most: int) -> list[int]:
    """The numbers of the calls on a file, at most so many (0: all), the first and the last among them."""
    found = [number for number, each in enumerate(files, 1) if each == file]
    if not most or len(found) <= most:
        return found
    return sorted({found[round(place * (len(found) - 1) / max(1, most - 1))] for place in range(most)})


def table(results: Iterable[Result], separator: str = " | ") -> str:
    """Rows of parts and calls: cases, and their outcomes."""
    outcomes = ("ended", "continued, told", "continued", "wrong", "not reached")
    counts: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        ranks, _, part, call, *_ = result.name.split("-")
        counts.setdefault((f"{part}, {ranks} rank{'s' * (ranks != '1')}", call), Counter())[result.outcome] += 1
    rows: list[tuple[str, ...]] = [("part", "call", "cases", *outcomes)]
    rows += [(*key, str(found.total()), *(str(found[name]) for name in outcomes)) for key, found in counts.items()]
    if separator == ",":
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        return text.getvalue()
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([lines[0], "|" + "---|" * len(rows[0]) + "\n", *lines[1:]])


def main() -> int:
    """Run the campaign; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(known: Iterable[str]) -> dict[str, Any]:
        return {"type": lambda text: text.split(","), "default": [*known], "help": f"of {','.join(known)}"}

    parser.add_argument("--parts", **names(STARTS))
    parser.add_argument("--calls", **names(CALLS))
    parser.add_argument("--errors", **names(ERRORS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="the one whose call fails")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="each K-th call, with one error by turns")
    parser.add_argument("--alike", type=int, default=0, metavar="M", help="at most M calls of a kind on the same file")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, help="of an earlier call, to continue it (default: a new one in /tmp)")
    parser.add_argument("--output", type=Path, help="for the table: .md or .csv")
    options = parser.parse_args()
    if why := unavailable():
        raise UserError(why)
    folder: Path = (options.folder or Path(tempfile.mkdtemp(prefix="calls-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "cases.jsonl"
    lines.touch()
    done = {line["name"]: Result(**line) for line in map(json.loads, lines.read_text().splitlines())}
    began = time.monotonic()
    with warm_launcher() as launcher, ThreadPoolExecutor(options.jobs) as runs, lines.open("a") as file:
        campaign = Campaign(folder, launcher)
        campaign.prepare(options.ranks, options.rank, {STARTS[part] for part in options.parts})
        cases = [case for case in cases_of(campaign, options) if case.name not in done]
        print(f"{len(cases)} cases", flush=True)
        for result in runs.map(campaign.judge, cases):
            done[result.name] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            if result.wrong:
                print(result, flush=True)
    seconds = time.monotonic() - began
    print(table(done.values()), f"{len(cases)} cases in {seconds:.0f} s; everything is in {folder}", sep="\n")
    if options.output:
        options.output.write_text(table(done.values(), "," if options.output.suffix == ".csv" else " | "))
    return 1 if any(result.wrong for result in done.values()) else 0


if __name__ == "__main__":
    sys.exit(ending("system_call_faults", main))
