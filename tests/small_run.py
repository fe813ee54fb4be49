"""A run's folder by hand, small enough that every figure of it can be calculated mentally."""

from __future__ import annotations

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from tlt_hpc.common.records import (
    EngineSpans,
    FinishReason,
    MicroStepRecord,
    PhaseSpan,
    Rollout,
    RolloutTiming,
    SampleKey,
)
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import StepRecord, write_step

START = 1.8e9
NAMES = ("off", "drafter-4")
# what each rank's responses are: tokens, why they ended, target passes
RESPONSES = (((4, 0, 3), (4, 0, 3)), ((8, 1, 3), (5, 0, 2)))
# strategy (-1: prefill), live sequences, tokens, start, seconds
SPANS = (
    ((-1, 2, 20, 0.0, 0.5), (0, 2, 2, 0.5, 0.5), (1, 2, 6, 1.0, 1.0)),
    ((-1, 2, 30, 0.0, 1.0), (1, 2, 8, 1.0, 3.0), (1, 1, 5, 4.0, 2.0)),
)
LAST_TOKENS, RELEASE = (2.0, 6.0), 6.5
UPDATES = ((2.0, 2.9), (3.0, 3.9))
PHASES = (("gen", -0.1, 6.6), ("reward", 6.6, 7.0), ("update_actor", 7.0, 9.0), ("refresh", 9.0, 9.5))


def spans_of(rows: tuple[tuple[float, ...], ...], at: float) -> EngineSpans:
    columns = np.array(rows, np.float64).reshape(-1, 5).T
    kinds = (np.int16, np.int32, np.int32, np.float64, np.float32)
    index, live, tokens, start, seconds = (c.astype(kind) for c, kind in zip(columns, kinds, strict=True))
    return EngineSpans(index, live, tokens, start + at, seconds)


def small_record(step: int, rank: int, num_ranks: int = 2, **changes: Any) -> StepRecord:
    """Rank 0 idles from second 2 on and trains for 1.8 of its 4.5 idle seconds; rank 1 decodes until second 6."""
    at = START + 20.0 * step
    rollouts = []
    for number, (length, reason, passes) in enumerate(RESPONSES[rank % 2]):
        key = SampleKey(0, 0, step, rank, number)
        tokens = np.arange(length, dtype=np.int32) + 100 * step
        prompt, log_probs = np.arange(3, dtype=np.int32), np.zeros(length, np.float32)
        rollouts.append(Rollout(key, prompt, tokens, log_probs, FinishReason(reason), step, passes, at + 1))
    spans = spans_of(SPANS[rank % 2], at)
    rounds = spans.strategy_index >= 0
    index = spans.strategy_index[rounds].astype(np.int64)
    trains = rank == 0 and num_ranks > 1
    phases = [PhaseSpan(name, at + start, at + end) for name, start, end in PHASES]
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "num_ranks": num_ranks,
        "rollouts": tuple(rollouts),
        "rewards": np.ones(len(rollouts), np.float32),
        "advantages": np.zeros(len(rollouts), np.float32),
        "timing": RolloutTiming(at, at + LAST_TOKENS[rank % 2], at + RELEASE),
        "micro_steps": tuple(MicroStepRecord(at + a, at + b, 10, 0.5) for a, b in UPDATES) if trains else (),
        "harvested_seconds": 1.8 if trains else 0.0,
        "strategy_names": NAMES,
        "strategy_rounds": np.bincount(index, minlength=2).astype(np.int64),
        "strategy_tokens": np.bincount(index, spans.num_tokens[rounds], 2).astype(np.int64),
        "decisions": np.stack([spans.num_live[rounds], index], 1).astype(np.int32),
        "guarded_near_ties": 0,
        "metrics": {},
        "spans": spans,
        "phases": tuple([PhaseSpan("save_checkpoint", at - 1.0, at - 0.5)] if step else []) + tuple(phases),
    }
    return StepRecord(**(values | changes))


def line_of(step: int, **more: float) -> dict[str, float]:
    """What a run writes of a step, as far as it is read here."""
    return {
        "training/global_step": float(step + 1),
        "critic/score/mean": 0.5 + 0.01 * step,
        "critic/rewards/mean": 0.5 + 0.01 * step,
        "actor/entropy": 1.0,
        "actor/grad_norm": 0.25,
        "response_length/mean": 5.25,
        "response_length/max": 8.0,
        "drafter/spec_decode/mean_acceptance_length": 21 / 11,
        "drafter/own_accept_length": 2.0 + 0.1 * step,
        "drafter/version": 2.0 * (step + 1),
        "perf/total_num_tokens": 21.0,
        "drafter/steps": 2.0,
        "rollout/seconds": 6.5,
        "timing_s/step": 9.6,
        "rollout/idle_rank_seconds": 5.0,
        "rollout/harvested_rank_seconds": 1.8,
        **more,
    }


def small_run(path: Path, num_steps: int = 3, num_ranks: int = 2) -> RunFolder:
    """Such steps, with their lines and a configuration. Copied, as each log that is written waits for the disk."""
    shutil.copytree(_written_once(num_steps, num_ranks), path, copy_function=shutil.copy, dirs_exist_ok=True)
    return RunFolder(path)


@cache
def _written_once(num_steps: int, num_ranks: int) -> Path:
    folder = RunFolder(Path(mkdtemp(prefix="small-run-")))
    atexit.register(shutil.rmtree, folder.path)
    for step in range(num_steps):
        for rank in range(num_ranks):
            write_step(folder.rollout_log(step, rank), small_record(step, rank, num_ranks))
    folder.rollouts.mkdir(parents=True, exist_ok=True)
    folder.metrics.write_text("".join(json.dumps(line_of(step)) + "\n" for step in range(num_steps)))
    folder.config.write_text("[rollout]\nmax_new_tokens = 8\n[drafter]\nmicro_step_tokens = 1024\n")
    return folder.path


def set_lines(folder: RunFolder, *changes: dict[str, float]) -> None:
    """Replace the lines by one for each of these changes."""
    folder.metrics.write_text("".join(json.dumps(line_of(step, **more)) + "\n" for step, more in enumerate(changes)))
