"""Prints what lies in a run's HDF5 files: steps, ranks, lengths, rewards, idle and harvested rank-seconds, the proof
that drafter updates ran while another rank still decoded, and whether the files are whole. Knows no torch and no MPI.

    python tools/inspect_run.py runs/tiny --last 10
    python tools/inspect_run.py runs/tiny --check     # reads every file whole, with its checksums
    python tools/inspect_run.py runs/tiny --repair    # takes a torn last line off metrics.jsonl, nothing else

Status 1: --check or --repair found what is not sound.

Times of different ranks are compared as their nodes' clocks gave them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
from look import open_run, write_json

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.files import read_toml
from tlt_hpc.common.records import MicroStepRecord, RolloutTiming
from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.integrity import analyse_integrity, repair
from tlt_hpc.storage.feature_file import FeatureCacheReader
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.no_run import no_run
from tlt_hpc.storage.rollout_log import KIND, StepSummary, read_summary

HEADER = (
    "  step ranks responses    p50    p90    max  reward accept   idle_s harvested_s  share updates guarded\n"
    "  (lengths in tokens; idle and harvested in rank-seconds; share = harvested / idle)"
)


def main(arguments: list[str] | None = None) -> int:
    """Print the report; exit status 2 and one line on a folder that holds no run."""
    parser = argparse.ArgumentParser(description="Print what a run's HDF5 files hold.")
    parser.add_argument("folder", type=Path, help="the run's folder, e.g. runs/tiny")
    parser.add_argument("--last", type=int, default=10, help="number of last steps to show (default 10, 0 for all)")
    parser.add_argument("--check", action="store_true", help="read every file whole, with its checksums")
    parser.add_argument("--repair", action="store_true", help="take a torn last line off metrics.jsonl, nothing else")
    parser.add_argument("--json", metavar="FILE", help="with --check: what it found, as JSON")
    options = parser.parse_args(arguments)
    return ending("inspect_run", lambda: look(options))


def look(options: argparse.Namespace) -> int:
    """Print what was asked for; 1 where something is not sound.

    Raises:
        UserError, OSError: there is no run, or its folder cannot be read.
    """
    folder = RunFolder(options.folder)
    if not folder.rollouts.is_dir() and not folder.cache.is_dir():
        raise UserError(no_run(options.folder))
    if options.check or options.repair:
        return check(options)
    steps = folder.rollout_steps()
    shown = steps[-options.last :] if options.last > 0 else steps
    print(f"{folder.path}: {_span(steps)} in the rollout log (schema {KIND.schema}), showing {len(shown)}")
    ranks = {step: read_ranks(folder, step) for step in shown}
    print_steps(ranks)
    print_tails([rank for step in shown for rank in ranks[step]], micro_step_seconds(folder))
    print_caches(folder)
    return 0


def check(options: argparse.Namespace) -> int:
    """Look at every file, after a repair where that is asked for; 1 where something is not sound."""
    if options.repair:
        repair(open_run(options.folder), print)
    found = analyse_integrity(open_run(options.folder), read_whole=options.check)
    if options.json:
        write_json(found.to_json(), options.json)
    say = functools.partial(print, file=sys.stderr) if options.json == "-" else print
    say(found.verdict)
    for fault in found.faults:
        say(f"  {fault}")
    for path in found.parts:
        say(f"  half written: {path}")
    return 0 if found.is_sound else 1


def micro_step_seconds(folder: RunFolder) -> float | None:
    """The time budget of a micro-step, as the run was configured; None where that cannot be read."""
    try:
        return float(read_toml(folder.config)["drafter"]["micro_step_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def print_tails(ranks: list[StepSummary], budget: float | None) -> None:
    """How soon ranks left the loop once they knew of the release, and what else their waiting was used for."""
    late = np.array([rank.metrics["rollout/late_seconds"] for rank in ranks if "rollout/late_seconds" in rank.metrics])
    if len(late) == 0:
        return
    middle, most = np.percentile(late, (50, 99))
    within = f"; {(late < budget).mean():.1%} under the micro-step's {1e3 * budget:.0f} ms" if budget else ""
    print(
        f"stop latency, release known to loop left, {len(late)} releases of a rank: median {1e3 * middle:.1f} ms, "
        f"99 % {1e3 * most:.1f} ms, longest {1e3 * late.max():.1f} ms{within}"
    )
    names = {
        "rollout/rewards_in_tail": "rewards in the tail",
        "rollout/rewards_in_tail_seconds": "s for them",
        "drafter/cut_rank_seconds": "s in micro-steps cut at the release",
        "drafter/serial_rank_seconds": "s in serial micro-steps",
    }
    sums = {text: sum(rank.metrics.get(name, 0.0) for rank in ranks) for name, text in names.items()}
    print("beside harvesting: " + ", ".join(f"{value:.3g} {text}" for text, value in sums.items()))


def read_ranks(folder: RunFolder, step: int) -> list[StepSummary]:
    """A step's files by rank; a damaged one is named and left out."""
    summaries = []
    for path in folder.rollout_logs(step):
        try:
            summaries.append(read_summary(path))
        except DamagedFile as error:
            print(f"  {error}")
    return summaries


def print_steps(steps: dict[int, list[StepSummary]]) -> None:
    """The table, one line per step, then the proof lines."""
    if not steps:
        return
    print(HEADER)
    for step, ranks in steps.items():
        print(step_line(step, ranks))
    print("drafter updates while another rank still decoded:")
    for step, ranks in steps.items():
        for line in proof_lines(step, ranks):
            print(line)


def step_line(step: int, ranks: list[StepSummary]) -> str:
    """One row of the table; ``ranks`` shows found/expected where files are missing."""
    lengths = np.concatenate([np.empty(0, np.int64), *[rank.response_lengths for rank in ranks]])
    if len(lengths) == 0:
        return f"{step:6d} {len(ranks):5d} no rollouts"
    rewards = np.concatenate([rank.rewards for rank in ranks])
    passes = sum(int(rank.num_target_passes.sum()) for rank in ranks)
    idle = sum(timing.idle_seconds for rank in ranks for timing in (rank.timing, *rank.refills))
    harvested = sum(rank.harvested_seconds for rank in ranks)
    found = str(len(ranks)) if len(ranks) == ranks[0].num_ranks else f"{len(ranks)}/{ranks[0].num_ranks}"
    p50, p90 = np.percentile(lengths, (50, 90))
    return (
        f"{step:6d} {found:>5} {len(lengths):9d} {p50:6.0f} {p90:6.0f} {lengths.max():6d} {rewards.mean():7.3f} "
        f"{lengths.sum() / max(1, passes):6.2f} {idle:8.2f} {harvested:11.2f} {harvested / idle if idle else 0:6.0%} "
        f"{sum(len(rank.micro_steps) for rank in ranks):7d} {sum(rank.guarded_near_ties for rank in ranks):7d}"
    )


def proof_lines(step: int, ranks: list[StepSummary]) -> list[str]:
    """How many updates had ended while another rank decoded, and the last of them with both timestamps."""
    pairs = [
        (micro_step, trainer, decoder)
        for trainer in ranks
        for micro_step in trainer.micro_steps
        if (decoder := _last_decoder(ranks, trainer, micro_step)) is not None
    ]
    total = sum(len(rank.micro_steps) for rank in ranks)
    lines = [f"  step {step}: {len(pairs)} of {count(total, 'update')}"]
    if pairs:
        micro_step, trainer, decoder = max(pairs, key=lambda pair: pair[0].end_seconds)
        lines.append(
            f"    rank {trainer.rank} updated from {_clock(micro_step.start_seconds)} to "
            f"{_clock(micro_step.end_seconds)} ({micro_step.num_tokens} tokens, loss {micro_step.loss:.3f}); "
            f"rank {decoder[0]} decoded until {_clock(decoder[1].last_token_seconds)}"
        )
    return lines


def print_caches(folder: RunFolder) -> None:
    """One line per step of the feature cache, and what was left half-written."""
    for step in folder.cache_steps():
        num_documents = num_tokens = num_bytes = num_files = 0
        for path in folder.feature_caches(step):
            try:
                with FeatureCacheReader(path) as reader:
                    num_documents, num_tokens = num_documents + len(reader), num_tokens + reader.num_tokens
            except DamagedFile as error:
                print(f"  {error}")
                continue
            num_bytes, num_files = num_bytes + path.stat().st_size, num_files + 1
        print(
            f"feature cache, step {step}: {count(num_files, 'file')}, {count(num_documents, 'document')}, "
            f"{count(num_tokens, 'token')}, "
            f"{num_bytes / 2**20:.1f} MiB"
        )
    if parts := folder.cache_parts():
        print(f"feature cache: {count(len(parts), 'file')} open or half-written")


def _last_decoder(
    ranks: list[StepSummary], trainer: StepSummary, micro_step: MicroStepRecord
) -> tuple[int, RolloutTiming] | None:
    """The rank that decoded longest beyond a micro-step, and in which of the step's rollouts."""
    decoding = [
        (rank.rank, timing)
        for rank in ranks
        for timing in (rank.timing, *rank.refills)
        if rank.rank != trainer.rank
        and timing.start_seconds <= micro_step.start_seconds
        and micro_step.end_seconds <= timing.last_token_seconds
    ]
    return max(decoding, key=lambda pair: pair[1].last_token_seconds, default=None)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _span(steps: list[int]) -> str:
    return f"{count(len(steps), 'step')} ({steps[0]} to {steps[-1]})" if steps else "no steps"


if __name__ == "__main__":
    sys.exit(main())
