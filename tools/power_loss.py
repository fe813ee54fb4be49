"""Record the changes that a short run makes to its files, build what a power failure can leave of them, and open it.

    python tools/power_loss.py --output table.md                              # one rank, after each change
    python tools/power_loss.py --ranks 2 --every 10 --random 1 --resumes 20

After each change there are states with all that was done, without what was not synced, with names of files alone (or
with zeros for their bytes), with bytes alone, and at random (``power_loss_disk.py``). Each is read as the next start
would read it: what was acknowledged must be there, and what was not may be lost but must not look valid. From some
states the run is resumed, and must end as the unbroken one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from power_loss_disk import Disk, State, content, everything
from power_loss_rank import NOT_RECORDED, Change, read_changes
from power_loss_states import Builder, Trial, wrong_of
from system_call_faults import warm_launcher
from system_call_rank import Fault, unavailable
from system_call_runs import STEPS, Campaign, texts

from tlt_hpc.common.errors import UserError
from tlt_hpc.storage.folder import RunFolder


def record(campaign: Campaign, ranks: int) -> tuple[Path, list[Change]]:
    """A run in an empty folder, and the changes that it made there.

    Raises:
        UserError: it fails.
    """
    place, report = campaign.folder / "recorded", campaign.folder / "report.json"
    place.mkdir(parents=True)
    told = json.dumps({"fault": asdict(Fault("step")), "roots": [str(place)], "report": str(report)})
    status, text = campaign.run(ranks, place, "tools/power_loss_rank.py", {"TLT_SYSTEM_CALL": told})
    if status:
        raise UserError(f"the recorded run in {place} ended with status {status}: {text[-500:]}")
    return place, read_changes(report)


def trial_of(folder: Path, place: Path, changes: Sequence[Change], ranks: int) -> Trial:
    """A trial of a recorded run."""
    wanted = [found for step in range(STEPS) if isinstance(found := texts(RunFolder(place / "run"), step), dict)]
    return Trial(folder, Disk(place), changes, lambda found: wrong_of(RunFolder(found / "run"), ranks, wanted))


def not_recorded(disk: Disk, place: Path) -> list[str]:
    """Files that are otherwise than the recording has them."""
    state = disk.state(everything)
    held = {name: content(part) for name, part in state.items() if part is not None}
    there = {f"/{path.relative_to(place)}": path for path in place.rglob("*") if path.is_file()}
    there = {name: path for name, path in there.items() if not NOT_RECORDED.search(name)}
    return sorted(name for name in held.keys() | there.keys() if held.get(name) != _read(there.get(name)))


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path else None


def resumes(campaign: Campaign, place: Path, states: Sequence[State], ranks: int) -> Iterator[str]:
    """What is wrong with the ends of runs that are resumed from these states."""
    word = json.loads(RunFolder(place / "run").finished.read_text())
    for number, state in enumerate(states):
        again = campaign.folder / f"resumed-{number}"
        Builder(campaign.folder / f"files-{number}").build(state, again)
        status, text = campaign.run(ranks, again, "-m tlt_hpc")
        finished = RunFolder(again / "run").finished
        if status or "Traceback" in text:
            yield f"resume {number} ended with status {status}: {text[-500:]}"
        elif json.loads(finished.read_text()) != word:
            yield f"resume {number} ended with another policy"


def main() -> int:
    """Record, build, open; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, metavar="K", help="after each K-th write, and all else")
    parser.add_argument("--random", type=int, default=2, metavar="N", help="states at random of each kind and change")
    parser.add_argument("--resumes", type=int, default=0, metavar="N", help="of these, from which the run is resumed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="for the table")
    options = parser.parse_args()
    if why := unavailable():
        raise UserError(why)
    with tempfile.TemporaryDirectory(prefix="power-") as name, warm_launcher() as launcher:
        campaign = Campaign(Path(name), launcher)
        place, changes = record(campaign, options.ranks)
        trial = trial_of(Path(name) / "trial", place, changes, options.ranks)
        trial.run(options.every, options.random, options.seed)
        states = random.Random(options.seed).sample(trial.sample, options.resumes)
        wrong = trial.wrong + [f"not recorded: {each}" for each in not_recorded(trial.disk, place)]
        wrong += resumes(campaign, place, states, options.ranks)
    kinds = Counter(change.kind for change in changes)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(trial.table(), *wrong, f"{len(states)} resumed", sep="\n")
    if options.output:
        options.output.write_text(trial.table())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ending("power_loss", main))
