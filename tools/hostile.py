"""Runs the commands that read a run on hostile run folders and configurations, by a seed, and reports what they do
other than answer in a line: a traceback, a hang, a death by signal, gigabytes of memory, many lines, a false success.

python tools/hostile.py folders --seed 1 --count 200
python tools/hostile.py configurations --seed 1 --count 200
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faults import ROOT, make_run
from faulty_inputs import wait_for
from hostile_case import Case

KINDS = ("folders", "configurations")
SECONDS = 90.0
"""That a command may take; ``watch --once`` looks for eight at a run that does not move."""
MEMORY_BYTES = 3 * 2**30
"""More address space than before that a command may ask for."""
MOST_LINES = 5
"""Of errors and warnings."""
MOST_LETTERS = 1500
_STATUSES = (0, 1, 2)
_CAPABILITIES = (0x20080522, 0)
"""Version 3 of the call's structure, and this process."""


@dataclass(frozen=True)
class Fault:
    """What a command did that it may not do."""

    seed: int
    kind: str
    command: str
    what: str
    said: str


def train(case: Case, out: Path) -> int:
    from tlt_hpc.cli import main as cli

    return cli.main(["train", str(case.config), *case.overrides, "--dry-run"])


def watch(case: Case, out: Path) -> int:
    from tlt_hpc.cli import main as cli

    return cli.main(["watch", str(case.run), "--once"])


def report(case: Case, out: Path) -> int:
    from tlt_hpc.cli import main as cli

    return cli.main(["report", str(case.run), "--out", str(out / "report.html")])


def evaluate(case: Case, out: Path) -> int:
    from tlt_hpc.cli import main as cli

    return cli.main(["evaluate", str(case.run), str(case.config), *case.overrides, "--dry-run"])


def inspect(case: Case, out: Path) -> int:
    import inspect_run

    return inspect_run.main([str(case.run)])


def check(case: Case, out: Path) -> int:
    import inspect_run

    return inspect_run.main([str(case.run), "--check"])


COMMANDS: dict[str, Callable[[Case, Path], int]] = {
    command.__name__: command for command in (train, watch, report, evaluate, inspect, check)
}
_MODULES = (
    "inspect_run", "tlt_hpc.cli.main", "tlt_hpc.look.live.watch_run", "tlt_hpc.look.report.write_report",
    "tlt_hpc.look.figures.style", "tlt_hpc.evaluate.evaluate", "tlt_hpc.plan.memory.summary", "tlt_hpc.plan.inputs",
    "tlt_hpc.look.trackers", "tlt_hpc.models.drafter_file", "tlt_hpc.look.analysis.integrity",
    "tlt_hpc.storage.feature_file",
)  # fmt: skip
"""Imported once, before the first child."""


def main(arguments: list[str] | None = None) -> int:
    """The campaign; status 1 where a command did what it may not do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--run", type=Path, help="a finished run of the embedded model to damage; else one is made")
    options = parser.parse_args(arguments)
    start, faults, num_calls = time.monotonic(), list[Fault](), 0
    with tempfile.TemporaryDirectory() as place:
        base = options.run.absolute() if options.run else make_run(Path(place))
        for fault in strike(options.kind, options.seed, options.count, base, Path(place)):
            num_calls += 1
            if fault is not None:
                faults.append(fault)
                print(f"{fault.what}: {fault.command}, {fault.kind}, seed {fault.seed}: {fault.said}", flush=True)
    table = Counter((fault.command, fault.what) for fault in faults)
    for (command, what), number in sorted(table.items()):
        print(f"{command:10} {what:20} {number}")
    print(
        f"{options.count} hostile {options.kind}, {num_calls} commands in {time.monotonic() - start:.0f} s: "
        f"{len(faults)} faults"
    )
    return 1 if faults else 0


def strike(kind: str, seed: int, count: int, base: Path, scratch: Path) -> Iterator[Fault | None]:
    """Each command on each of the cases: what it did wrong, or None."""
    os.chdir(ROOT)
    for name in _MODULES:
        importlib.import_module(name)
    make: Callable[[int, Path, Path, random.Random], Case] = importlib.import_module(f"hostile_{kind}").make
    for number in range(count):
        own = 1_000_003 * seed + number
        folder = scratch / f"case-{number:05d}"
        folder.mkdir()
        case = make(number, folder, base, random.Random(own))
        for name, command in COMMANDS.items():
            what, said = try_one(case, name, command, scratch / "said")
            yield Fault(own, case.kind, name, what, said) if what else None
        remove(folder)


def try_one(case: Case, name: str, command: Callable[[Case, Path], int], out: Path) -> tuple[str, str]:
    """Run a command in a process of its own: what it did wrong and what it said, both empty where nothing."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    child = os.fork()
    if child == 0:
        try:
            os._exit(in_child(case, command, out))
        finally:
            os._exit(1)
    status, is_late = wait_for(child, time.monotonic() + SECONDS)
    shown = (out / "stdout").read_bytes().decode(errors="replace") if (out / "stdout").exists() else ""
    errors = (out / "stderr").read_bytes().decode(errors="replace") if (out / "stderr").exists() else ""
    if is_late:
        return "hang", f"no answer after {SECONDS:.0f} s"
    if os.WIFSIGNALED(status):
        return "signal", f"{os.WTERMSIG(status)}"
    what = fault_of(os.WEXITSTATUS(status), shown, errors, name in case.must_fail)
    return what, " | ".join((errors or shown).splitlines()[-4:])[-700:] if what else ""


def fault_of(status: int, shown: str, errors: str, must_fail: bool) -> str:
    """What is wrong with an answer; empty where nothing is."""
    if "Traceback (most recent call last)" in shown + errors:
        return "traceback"
    if status not in _STATUSES:
        return f"status {status}"
    if status == 2 and not errors.strip():
        return "no word"
    if len(errors.splitlines()) > MOST_LINES or len(errors) > MOST_LETTERS:
        return "many words"
    return "false success" if must_fail and status == 0 else ""


def be_bound_by_permissions() -> None:
    """As any user: root gives up all capabilities, and stays the owner of its files."""
    if os.getuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(*_CAPABILITIES), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, none):
            raise OSError(ctypes.get_errno(), "capset")


def in_child(case: Case, command: Callable[[Case, Path], int], out: Path) -> int:
    """The command's status; what it writes goes to files in ``out``."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGESIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    be_bound_by_permissions()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        status = command(case, out)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 (that anything comes out is what is looked for)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def remove(folder: Path) -> None:
    """Remove a case, whatever it may do to its permissions."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
