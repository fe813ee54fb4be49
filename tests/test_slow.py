"""What takes minutes: learning on three seeds, and exactness over a long comparison. Run by `make test-slow`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from answers import python

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_on_held_out_problems_rises_within_30_steps(tmp_path, seed):
    python("-m", "tlt_hpc", "train", "jobs/tiny.toml", f"run.seed={seed}", f"run.folder={tmp_path}")
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    rewards = np.array([row["critic/score/mean"] for row in rows])
    assert len(rewards) == 30
    rise = rewards[-5:].mean() - rewards[:2].mean()
    print(f"seed {seed}: {rewards[:2].mean():.3f} -> {rewards[-5:].mean():.3f}")
    assert rise >= 0.15
    lengths = [(row["response_length/max"], row["response_length/p50"]) for row in rows]
    assert max(longest for longest, _ in lengths) >= 4 * np.median([middle for _, middle in lengths])


def test_a_long_comparison_is_equal(tmp_path):
    path = tmp_path / "compare.json"
    options = ["--steps", "30", "--json", str(path), f"run.folder={tmp_path}"]
    python("-m", "tlt_hpc", "compare", "jobs/tiny.toml", *options)
    found = json.loads(path.read_text())
    print(json.dumps(found["speedup"]))
    assert found["equal"] == {"tokens": True, "rewards": True, "policy": True, "mismatched_tokens": 0}
    full = found["runs"]["tail"]
    assert full["harvested_rank_seconds"] > 0.3 * full["idle_rank_seconds"]
    accept_length = {mode: run["accept_length"] for mode, run in found["runs"].items()}
    assert accept_length["tail"] > 2 and accept_length["tail"] > accept_length["ngram"] > accept_length["plain"] == 1
    assert found["speedup"]["tail"]["decode_cpu"]["low"] > 1
