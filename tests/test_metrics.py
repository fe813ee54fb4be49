"""A step's figures over ranks: sums, the field's names, and the lines that show them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from logged import make_rollout, step_record

from tlt_hpc.cli.display import Screen, StepReporter
from tlt_hpc.common.records import FinishReason, MicroStepRecord, RolloutTiming, SampleKey
from tlt_hpc.drafting.merge import MergeReport
from tlt_hpc.look.columns import step_cells
from tlt_hpc.look.metrics import extract_rank_part, gather_step_metrics
from tlt_hpc.rl.stats import PolicyStats, RolloutMismatch, Update
from tlt_hpc.rollout.acceptance import DraftCounts
from tlt_hpc.rollout.rounds import EngineCounts
from tlt_hpc.rollout.strategy import parse_strategies
from tlt_hpc.storage.rollout_log import StepRecord
from tlt_hpc.train import learned_drafter_counts

MISMATCH = RolloutMismatch(0.01, 0.04, 0.001, 0.002, 1.0, 0.0)
STATS = PolicyStats(0.1, 0.2, 0.3, 0.0, 0.0, 0.0, 0.5, 1e-4, 60, 0.1, 0.9, MISMATCH)

UPDATE = Update(
    np.arange(4), 0.5, np.array([1, 0, 0, 0], np.float32), np.array([1.5, -0.5, -0.5, -0.5], np.float32), 0.125, STATS
)


def record(rank: int, lengths: list[int], last_token: float, micro_steps: tuple[MicroStepRecord, ...]) -> StepRecord:
    rollouts = [
        make_rollout(
            SampleKey(0, 0, 4, draw, 0), range(3), range(length),
            finish_reason=FinishReason(int(length >= 20)), num_target_passes=length // 2,
        )
        for draw, length in enumerate(lengths)
    ]  # fmt: skip
    changes: dict[str, Any] = {
        "rank": rank,
        "num_ranks": 2,
        "timing": RolloutTiming(100.0, last_token, 108.0),
        "micro_steps": micro_steps,
        "harvested_seconds": sum(m.end_seconds - m.start_seconds for m in micro_steps),
        "strategy_names": ("off", "drafter-3"),
        "strategy_rounds": np.array([3, 4]),
        "strategy_tokens": np.array([10, 12 * rank]),
        "guarded_near_ties": rank,
        "metrics": {
            "rollout/preemptions": 2.0 + rank,
            "rollout/kept_tokens": 8.0 * rank,
            "rollout/late_seconds": 0.25 / (1 + rank),
            "reward/part/brevity/mean": 0.5 - rank,
            "reward/with_parts": 3.0 - 2 * rank,
            "drafter/merge_exposed_seconds": 0.5 + rank,
            **DraftCounts([10.0, 8.0, 0.0, 0.0], [8.0, 4.0, 0.0, 0.0]).to_summable_metrics(),
        },
    }
    return step_record(4, rollouts, [1.0] + [0.0] * (len(lengths) - 1), **changes)


RECORDS = [
    record(0, [10, 4], 103.0, (MicroStepRecord(103.5, 105.5, 900, 2.0), MicroStepRecord(105.5, 107.5, 900, 1.0))),
    record(1, [20, 6], 107.9, ()),
]


@pytest.fixture
def summary():
    world = SimpleNamespace(allgather=lambda item: [extract_rank_part(each) for each in RECORDS])
    return gather_step_metrics(world, RECORDS[0], UPDATE, MergeReport(9, 7, "", 0.5), {"gen": 8.0, "step": 10.0})


def test_figures_are_sums_over_the_ranks(summary):
    wanted = {
        "training/global_step": 5,
        "critic/score/mean": 0.5,
        "critic/rewards/mean": 0.25,
        "critic/advantages/max": 1.5,
        "actor/reward_kl_penalty": 0.125,
        "response_length/mean": 10,
        "response_length/max": 20,
        "response_length/clip_ratio": 0.25,
        "perf/total_num_tokens": 40,
        "perf/throughput": 3.2,  # less the 8 tokens that an earlier start has generated
        "drafter/spec_decode/mean_acceptance_length": 2.0,
        "drafter/steps": 2,
        "drafter/loss": 1.5,
        "rollout/idle_rank_seconds": 5.1,
        "rollout/harvested_rank_seconds": 4.0,
        "rollout/seconds": 8.0,
        "rollout/stop_latency_seconds": 0.1,
        "rollout/guarded_near_ties": 1,
        "rollout/preemptions": 5,
        "rollout/strategy_share/off": 20 / 32,
        "rollout/strategy_share/drafter-3": 12 / 32,
        "actor/grad_norm": 0.5,
        "timing_s/gen": 8.0,
        "rollout/late_seconds": 0.25,
        "drafter/merge_exposed_seconds": 1.5,
        "drafter/own_sequences": 20,
        "drafter/own_first_draft_share": 0.8,
        "drafter/own_accept_length": 1 + 0.8 * sum((9.6 / 18) ** i for i in range(4)),
        "drafter/version": 7,
        "reward/part/brevity/mean": (3 * 0.5 - 0.5) / 4,
        "reward/with_parts": 4,
    }
    for name, value in wanted.items():
        assert summary[name] == pytest.approx(value), name


def test_drafts_of_all_the_drafters_strategies_count_and_no_others() -> None:
    strategies = parse_strategies("full", ["ngram-4", "drafter-5x3v16", "drafter-4", "drafter-2a1.5"])
    counts = [DraftCounts() for _ in strategies]
    for place, own in enumerate(counts):
        own.add(2, [1] * 10**place)
    drafts = {strategy.family: own for strategy, own in zip(strategies, counts, strict=True)}
    settings = SimpleNamespace(strategies=strategies)
    found = learned_drafter_counts(settings, EngineCounts(drafts=drafts))
    names = [strategy.name for strategy in strategies]
    used = sum(10**place for place, name in enumerate(names) if name.startswith("drafter"))
    assert (found.reached[:3], found.accepted[:2]) == ([used, used, 0], [used, 0]) and used > 1000
    assert learned_drafter_counts(settings, EngineCounts()) == DraftCounts()


def test_a_line_a_step_shows_them(summary, capsys):
    StepReporter(Screen(True)).show_step(summary)
    line = capsys.readouterr().out
    assert line.split() == ["5", "0.500", "10", "20", "2.00", "5.10", "4.00", "7", "8.00", "10.00"]
    assert line.split() == list(step_cells(summary))
