"""Writes the log of a run that never ran, as large as asked for: to measure what looks at runs, or to try it out.

    python tools/make_log.py /tmp/large                      # 100 steps of 32 ranks: 3,200 files, 2 GB
    python tools/make_log.py /tmp/small --steps 10 --ranks 4

Lengths have a long tail, rounds become few as responses end, ranks wait for the last and train meanwhile; tokens are
random, and no model is behind any of it. The same arguments give the same figures. Imports neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import (
    PREFILL,
    EngineSpans,
    FinishReason,
    MicroStepRecord,
    PhaseSpan,
    Rollout,
    RolloutTiming,
)
from tlt_hpc.common.records import SampleKey as Key
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, write_step

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("off", "ngram-4", "drafter-4", "drafter-8")
CHANCE = (0.0, 0.3, 0.7, 0.7)
"""That the next token of a draft is accepted, by strategy."""
LONGEST_DRAFT = (0, 4, 4, 8)
GROUP, CAP, VOCABULARY, PROMPT = 8, 8192, 150_000, 200
MEDIAN_LENGTH, SPREAD = 900.0, 0.9
"""Of response lengths: tokens, and the standard deviation of their logarithm."""
START, STEP_SECONDS, REST_SECONDS = 1.8e9, 300.0, 60.0
MICRO_STEP_SECONDS = 0.2


@dataclass(frozen=True)
class Rounds:
    """One rank's rounds, [K] each, and what each pass of each response gave."""

    index: NDArray[np.int16]
    live: NDArray[np.int32]
    tokens: NDArray[np.int32]
    seconds: NDArray[np.float32]
    passes: list[NDArray[np.uint8]]


@dataclass(frozen=True)
class Shape:
    """How large a log is."""

    ranks: int
    responses: int
    """Of a rank and step."""


def rounds_of(lengths: NDArray[np.int64], rng: np.random.Generator) -> Rounds:
    """Decode responses of such lengths together: the fewer are left, the longer the drafts."""
    left, number = lengths.copy(), 0
    rows, given = list[tuple[int, int, int]](), list[NDArray[np.int64]]()
    while (num_live := int((left > 0).sum())) > 0:
        strategy = 0 if num_live > 32 or number % 50 == 0 else 3 if num_live <= 4 else 2 if number % 7 else 1
        drafted = rng.geometric(1 - CHANCE[strategy], len(left)) if CHANCE[strategy] else np.ones(len(left), np.int64)
        emitted = np.minimum(np.minimum(drafted, 1 + LONGEST_DRAFT[strategy]), left)
        left, number = left - emitted, number + 1
        rows.append((strategy, num_live, int(emitted.sum())))
        given.append(emitted)
    index, live, tokens = np.array(rows, np.int64).T
    seconds = (0.02 + 0.0004 * live * (1 + np.array(LONGEST_DRAFT)[index] / 4)) * rng.lognormal(0, 0.1, len(live))
    table = np.array(given, np.uint8)
    passes = [column[column > 0] for column in table.T]
    return Rounds(
        index.astype(np.int16), live.astype(np.int32), tokens.astype(np.int32), seconds.astype(np.float32), passes
    )


def responses_of(
    step: int, rank: int, lengths: NDArray[np.int64], rounds: Rounds, rng: np.random.Generator
) -> tuple[Rollout, ...]:
    """One rank's, ordered by key."""
    at = START + STEP_SECONDS * step
    found = []
    for number, length in enumerate(lengths.tolist()):
        key = Key(0, 0, step, rank * (len(lengths) // GROUP) + number // GROUP, number % GROUP)
        tokens = np.minimum(rng.zipf(1.2, length), VOCABULARY).astype(np.int32)
        log_probs = -rng.exponential(0.3, length).astype(np.float32)
        reason = FinishReason.LENGTH if length == CAP else FinishReason.EOS
        prompt = rng.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        passes = rounds.passes[number]
        found.append(Rollout(key, prompt, tokens, log_probs, reason, step, len(passes), at, passes))
    return tuple(found)


def record_of(step: int, rank: int, shape: Shape) -> StepRecord:
    """One rank's step."""
    rng = np.random.default_rng((step, rank))
    lengths = np.minimum(CAP, np.ceil(MEDIAN_LENGTH * rng.lognormal(0, SPREAD, shape.responses))).astype(np.int64)
    rounds = rounds_of(lengths, rng)
    at = START + STEP_SECONDS * step
    last, release = 1.0 + float(rounds.seconds.sum(dtype=np.float64)), STEP_SECONDS - REST_SECONDS
    starts = at + 1.0 + np.cumsum(rounds.seconds, dtype=np.float64) - rounds.seconds
    updates = tuple(
        MicroStepRecord(at + begin, at + begin + MICRO_STEP_SECONDS, 512, 1.0)
        for begin in np.arange(last, release - MICRO_STEP_SECONDS, 2 * MICRO_STEP_SECONDS).tolist()
    )
    times = {"gen": (0.0, release), "reward": (release, release + 2), "update_actor": (release + 2, STEP_SECONDS - 5)}
    times["refresh"] = (STEP_SECONDS - 5, STEP_SECONDS - 1)
    rewards = rng.integers(0, 2, shape.responses).astype(np.float32)
    counts = np.bincount(rounds.index, minlength=len(NAMES)).astype(np.int64)
    return StepRecord(
        step=step,
        rank=rank,
        num_ranks=shape.ranks,
        rollouts=responses_of(step, rank, lengths, rounds, rng),
        rewards=rewards,
        advantages=rewards - rewards.mean(),
        timing=RolloutTiming(at, at + last, at + release),
        micro_steps=updates,
        harvested_seconds=MICRO_STEP_SECONDS * len(updates),
        strategy_names=NAMES,
        strategy_rounds=counts,
        strategy_tokens=np.bincount(rounds.index, rounds.tokens, len(NAMES)).astype(np.int64),
        decisions=np.stack([rounds.live, rounds.index.astype(np.int32)], 1),
        guarded_near_ties=0,
        metrics={"rollout/kept_tokens": 0.0, "rollout/late_seconds": 0.01},
        spans=EngineSpans(
            np.concatenate([[PREFILL], rounds.index]).astype(np.int16),
            np.concatenate([[shape.responses], rounds.live]).astype(np.int32),
            np.concatenate([[PROMPT * shape.responses], rounds.tokens]).astype(np.int32),
            np.concatenate([[at], starts]),
            np.concatenate([[1.0], rounds.seconds]).astype(np.float32),
        ),
        phases=tuple(PhaseSpan(name, at + begin, at + end) for name, (begin, end) in times.items()),
    )


def write_ranks(folder: RunFolder, step: int, shape: Shape) -> dict[str, float]:
    """A step's logs; returns its line."""
    records = []
    for rank in range(shape.ranks):
        record = record_of(step, rank, shape)
        write_step(folder.rollout_log(step, rank), record)
        idle, tokens = record.timing.idle_seconds, int(record.strategy_tokens.sum())
        longest = max(len(rollout.response_tokens) for rollout in record.rollouts)
        passes = sum(rollout.num_target_passes for rollout in record.rollouts)
        records.append((idle, record.harvested_seconds, record.rewards.mean(), tokens, longest, passes))
    idle, harvested, score, tokens, longest, passes = np.array(records, np.float64).T
    return {
        "training/global_step": float(step),
        "critic/score/mean": float(score.mean()),
        "critic/rewards/mean": float(score.mean()),
        "response_length/mean": float(tokens.sum()) / (shape.ranks * shape.responses),
        "response_length/max": float(longest.max()),
        "drafter/spec_decode/mean_acceptance_length": float(tokens.sum() / passes.sum()),
        "perf/total_num_tokens": float(tokens.sum()) + PROMPT * shape.ranks * shape.responses,
        "drafter/version": float(step),
        "drafter/own_accept_length": 2.5,
        "drafter/own_sequences": 100.0,
        "rollout/seconds": STEP_SECONDS - REST_SECONDS,
        "rollout/stop_latency_seconds": 0.01,
        "rollout/idle_rank_seconds": float(idle.sum()),
        "rollout/harvested_rank_seconds": float(harvested.sum()),
        "timing_s/step": STEP_SECONDS,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write logs, lines and configuration."""
    parser = argparse.ArgumentParser(description="Write the log of a run that never ran, as large as asked for.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder to make")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--responses", type=int, default=80, help=f"of a rank and step, a multiple of {GROUP}")
    options = parser.parse_args(arguments)
    if min(options.steps, options.ranks, options.responses) < 1 or options.responses % GROUP:
        raise UserError(f"--steps, --ranks, --responses: give 1 or more, of responses a multiple of {GROUP}")
    if options.run.exists():
        raise UserError(f"{options.run} is there already; give another folder, or delete it first")
    folder, shape = RunFolder(options.run), Shape(options.ranks, options.responses)
    folder.create()
    given = (
        f"rollout.prompts_per_step={shape.ranks * shape.responses // GROUP}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_new_tokens={CAP}",
        f"rollout.max_live={shape.responses}",
        f"run.num_steps={options.steps}",
    )
    folder.config.write_text(to_toml(load_config(str(ROOT / "jobs" / "tiny.toml"), list(given))), encoding="utf-8")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(write_ranks, folder, step, shape) for step in range(options.steps)]
        lines = [job.result() for job in jobs]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    sizes = [path.stat().st_size for path in folder.rollouts.rglob("*.h5")]
    print(f"wrote {options.run}: {len(sizes):,} files, {sum(sizes) / 1e9:.2f} GB")


if __name__ == "__main__":
    sys.exit(ending("make_log", main))
