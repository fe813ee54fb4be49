"""The comparison sees every difference: it is read back from logs that are made here with one planted in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from logged import step_record

from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.config import load_config
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step
from tlt_hpc.storage.step_lines import add_line
from tlt_hpc.studies.compare import MODES, num_mismatched, read_comparison, write_json

JOB = Path(__file__).parent.parent / "jobs" / "tiny.toml"
CONFIG = load_config(JOB)
SECONDS = {"plain": 8.0, "ngram": 5.0, "full": 4.0}


def write_run(parent: Path, mode: str, tokens: list[list[int]], rewards: list[float]) -> None:
    rollouts = tuple(
        Rollout(
            key=SampleKey(0, 0, 0, draw, 0),
            prompt_tokens=np.array([4, 5], np.int32),
            response_tokens=np.array(response, np.int32),
            log_probs=np.zeros(len(response), np.float32),
            finish_reason=FinishReason.EOS,
            weight_version=0,
            num_target_passes=len(response) if mode == "plain" else 1,
            finished_seconds=0.0,
        )
        for draw, response in enumerate(tokens)
    )
    record = step_record(0, list(rollouts), rewards, harvested_seconds=0.5)
    folder = RunFolder(parent / mode)
    folder.create()
    write_step(folder.rollout_log(0, 0), record)
    add_line(
        folder.metrics,
        {"training/global_step": 0, "rollout/seconds": SECONDS[mode], "timing_s/step": SECONDS[mode] + 2},
    )


def compare(parent: Path, *, change_token=False, change_reward=False, change_policy=False):
    for mode in MODES:
        tokens, rewards = [[7, 8, 1], [9, 1]], [1.0, 0.0]
        if mode == "full":
            tokens[0][1] += change_token
            rewards[1] += change_reward
        write_run(parent, mode, tokens, rewards)
    digests = {mode: "b" if change_policy and mode == "ngram" else "a" for mode in MODES}
    return read_comparison(CONFIG, parent, 1, 1, digests)


def test_equal_runs_are_equal(tmp_path):
    comparison = compare(tmp_path)
    assert comparison.all_equal
    assert comparison.mismatched_tokens == 0
    assert comparison.speedup("full", "rollout") == 2.0
    assert comparison.speedup("ngram", "step") == pytest.approx(10 / 7)
    assert comparison.modes["plain"].accept_length == 1.0
    assert comparison.modes["full"].accept_length == 2.5
    assert comparison.modes["full"].idle_rank_seconds == 1.0


@pytest.mark.parametrize("change", ["change_token", "change_reward", "change_policy"])
def test_one_difference_is_seen_and_written(tmp_path, change):
    comparison = compare(tmp_path, **{change: True})
    assert not comparison.all_equal
    write_json(comparison, tmp_path / "figures.json")
    equal = json.loads((tmp_path / "figures.json").read_text())["equal"]
    assert equal == {
        "tokens": change != "change_token",
        "mismatched_tokens": int(change == "change_token"),
        "rewards": change != "change_reward",
        "policy": change != "change_policy",
    }


def test_mismatches_count_missing_tokens_and_samples():
    a, b, c = (SampleKey(0, 0, 0, draw, 0) for draw in range(3))
    left = {a: np.array([1, 2, 3]), b: np.array([4, 5])}
    right = {a: np.array([1, 9, 3, 4]), c: np.array([6])}
    assert num_mismatched(left, right) == 1 + 1 + 2 + 1
    assert num_mismatched(left, left) == 0


class FinalWeights:
    """Stands in for a mode's last checkpoint."""

    def __init__(self, value: float) -> None:
        self._value = value

    def names(self, part: str) -> list[str]:
        return [f"{part}.a.exp_avg", f"{part}.a.master", f"{part}.b.master"]

    def read(self, part: str, name: str) -> torch.Tensor:
        assert name.endswith(".master")
        return torch.tensor([1.0, self._value if name == f"{part}.b.master" else 0.0])


@pytest.mark.parametrize(("distance", "is_equal"), [(0.5, True), (2.0, False)])
def test_a_policy_that_read_the_rollouts_probabilities_is_equal_within_a_tolerance(
    distance: float, is_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(JOB, ["algorithm.rollout_correction=tis"])
    allowed = 0.001 * config.optimizer.learning_rate * config.algorithm.updates_per_step
    ends = {"plain": 1.0, "ngram": 1.0 + 2 * distance * allowed, "full": 1.0}
    monkeypatch.setattr("tlt_hpc.studies.compare.last_checkpoint", lambda _, mode, __: FinalWeights(ends[mode]))
    for mode in MODES:
        write_run(tmp_path, mode, [[7, 8, 1]], [1.0])
    comparison = read_comparison(config, tmp_path, 1, 1, {"plain": "a", "ngram": "b", "full": "a"})
    assert comparison.policy_tolerance == pytest.approx(allowed)
    assert comparison.policy_difference == pytest.approx(distance * allowed, rel=1e-2)
    assert comparison.all_equal is is_equal
