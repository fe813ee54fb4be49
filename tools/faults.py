"""Strikes a run, or its inputs, by a seed, and counts what was lost.

python tools/faults.py inputs --count 1000             # corrupted inputs, each read in a process of its own
python tools/faults.py run --count 40 --folder faults  # a run: killed, stopped, on a full disk

A run that is struck goes on where it was left when it is called again with its folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from fault_campaign import hold_against_straight, results_in, standing, strike_again
from faulty_inputs import Outcome, make_inputs, try_one

ROOT = Path(__file__).resolve().parent.parent
_SMALL = ["rollout.prompts_per_step=4", "rollout.group_size=4", "speculation.profile_seconds=0", "run.ranks=1"]


def main() -> int:
    """The campaign; status 1 where anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    campaigns = parser.add_subparsers(dest="campaign", required=True)
    inputs = campaigns.add_parser("inputs", help="corrupted configuration, data, model, checkpoint, HDF5")
    inputs.add_argument("--count", type=int, default=1000)
    inputs.add_argument("--seed", type=int, default=0)
    inputs.add_argument("--run", type=Path, help="a finished run of the embedded model to corrupt; else one is made")
    run = campaigns.add_parser("run", help="kill -9, SIGUSR2, SIGTERM and full disks on runs of two and four ranks")
    run.add_argument("--count", type=int, default=40)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--folder", type=Path, help="of an earlier call, to continue it (default: a new one in /tmp)")
    options = parser.parse_args()
    if options.campaign == "inputs":
        return corrupt_inputs(options.count, options.seed, options.run)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"everything is kept in {folder}", flush=True)
    return strike_run(folder.absolute(), options.count, options.seed)


def strike_run(folder: Path, count: int, seed: int) -> int:
    """Strike runs so many more times, and hold their ends against some that were left alone."""
    begin, num_before = time.monotonic(), len(results_in(folder))
    strike_again(folder, seed, count)
    num_wrong = sum(bool(result["wrong"]) for result in results_in(folder)[num_before:])
    differing = hold_against_straight(folder)
    print(standing(folder))
    print(
        f"{count} faults in {time.monotonic() - begin:.0f} s: {num_wrong} went wrong; differs from runs that were left "
        f"alone in: {', '.join(differing) or 'nothing'}"
    )
    return 1 if num_wrong or differing else 0


def corrupt_inputs(count: int, seed: int, run: Path | None) -> int:
    """Corrupt so many inputs, the kinds in turn, and tell what came of them."""
    start, outcomes = time.monotonic(), list[Outcome]()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        subjects = make_inputs(scratch / "pristine", run or make_run(scratch))
        wanted = {subject.name: subject.read(scratch / "pristine") for subject in subjects}
        for number in range(count):
            subject = subjects[number % len(subjects)]
            outcome = try_one(subject, scratch / "pristine", wanted[subject.name], scratch, 1_000_003 * seed + number)
            outcomes.append(outcome)
            if outcome.is_fault:
                print(f"{outcome.verdict}: {outcome.file}, {outcome.corruption}, seed {outcome.seed}: {outcome.said}")
    table = Counter((outcome.subject, outcome.verdict) for outcome in outcomes)
    for (subject_name, verdict), number in sorted(table.items()):
        print(f"{subject_name:20} {verdict:10} {number}")
    num_faults = sum(outcome.is_fault for outcome in outcomes)
    print(f"{count} corrupted inputs in {time.monotonic() - start:.0f} s: {num_faults} faults")
    return 1 if num_faults else 0


def make_run(scratch: Path) -> Path:
    """A run of the embedded model, of two steps on one rank."""
    command = [sys.executable, "-m", "tlt_hpc", "train", "jobs/tiny.toml", "run.num_steps=2", *_SMALL]
    done = subprocess.run(
        [*command, f"run.folder={scratch}"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run to corrupt ended with status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return scratch / "tiny"


if __name__ == "__main__":
    sys.exit(ending("faults", main))
