"""What takes minutes: learning on three seeds, and exactness over ten comparisons. Run by `make test-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_on_held_out_problems_rises_within_30_steps(tmp_path, seed):
    command = [sys.executable, "-m", "tlt_hpc", "train", "jobs/tiny.toml", f"run.seed={seed}", f"run.folder={tmp_path}"]
    subprocess.run(command, check=True, cwd=ROOT)
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    rewards = np.array([row["critic/score/mean"] for row in rows])
    assert len(rewards) == 30
    rise = rewards[-5:].mean() - rewards[:2].mean()
    print(f"seed {seed}: {rewards[:2].mean():.3f} -> {rewards[-5:].mean():.3f}")
    assert rise >= 0.15
    lengths = [(row["response_length/max"], row["response_length/p50"]) for row in rows]
    assert max(longest for longest, _ in lengths) >= 4 * np.median([middle for _, middle in lengths])


def test_ten_comparisons_are_equal(tmp_path):
    path = tmp_path / "repeat.json"
    command = [sys.executable, "tools/repeat_compare.py", "--times", "10", "--json", str(path)]
    subprocess.run([*command, "--", "jobs/tiny.toml", "--steps", "6", f"run.folder={tmp_path}"], check=True, cwd=ROOT)
    summary = json.loads(path.read_text())["summary"]
    print(json.dumps(summary))
    assert summary["equal"] == {"tokens": 10, "rewards": 10, "policy": 10}
    assert len(summary["policies"]) == 1
    assert summary["harvested_share"] > 0.3
    accept_length = summary["accept_length"]
    assert accept_length["full"] > 2 and accept_length["full"] > accept_length["ngram"] > accept_length["plain"] == 1
