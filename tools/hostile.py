"""Run commands and readers on damaged input, chosen by a seed, and report what they do other than answer in a line.

    python tools/hostile.py inputs --seed 1 --count 1000     # files that the program reads, by its readers
    python tools/hostile.py folders --seed 1 --count 200     # run folders, by six commands

What counts as a fault: ``damage.py``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from damage import Case, run

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("inputs", "folders")
# imported once, before the first child
_MODULES = (
    "tlt_hpc.cli.main", "tlt_hpc.look.live.watch_run", "tlt_hpc.extras.report.write_report",
    "tlt_hpc.extras.report.figures.style",
    "tlt_hpc.evaluate.evaluate", "tlt_hpc.plan.memory.summary", "tlt_hpc.plan.inputs", "tlt_hpc.look.tracking",
    "tlt_hpc.models.drafter_file", "tlt_hpc.storage.feature_file",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--run", type=Path, help="a finished run of the embedded model to damage (default: makes one)")
    options = parser.parse_args(arguments)
    start, faults, num_calls = time.monotonic(), Counter[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory() as place:
        base = options.run.absolute() if options.run else make_run(Path(place))
        for command, fault in strike(options.kind, options.seed, options.count, base, Path(place)):
            num_calls += 1
            if fault:
                faults[command, fault] += 1
    for (command, fault), number in sorted(faults.items()):
        print(f"{command:10} {fault:20} {number}")
    print(
        f"{options.count} hostile {options.kind}, {num_calls} commands in {time.monotonic() - start:.0f} s: "
        f"{faults.total()} faults"
    )
    return 1 if faults else 0


def strike(kind: str, seed: int, count: int, base: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """Run every command on each case; yields its name and its fault, "" if there is none."""
    os.chdir(ROOT)
    for name in _MODULES:
        importlib.import_module(name)
    make: Callable[[int, Path, Path, random.Random], Case] = importlib.import_module(f"hostile_{kind}").make
    for number in range(count):
        case_seed = 1_000_003 * seed + number
        folder = scratch / f"case-{number:05d}"
        folder.mkdir()
        case = make(number, folder, base, random.Random(case_seed))
        for name in case.commands:
            fault, said = run(case, name, scratch / "said")
            if fault:
                print(f"{fault}: {name}, {case.kind}, seed {case_seed}: {said}", flush=True)
            yield name, fault
        remove(folder)


def make_run(scratch: Path) -> Path:
    """Train the embedded model for two steps on one rank; returns the run's folder."""
    command = [sys.executable, "-m", "tlt_hpc", "train", "jobs/tiny.toml", f"run.folder={scratch}", "run.num_steps=2"]
    small = ["rollout.prompts_per_step=4", "rollout.group_size=4", "run.ranks=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *small], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run to damage ended with status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return scratch / "tiny"


def remove(folder: Path) -> None:
    """Remove a case, whatever it did to permissions."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(ending("hostile", main))
