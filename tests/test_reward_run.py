"""Rewards by a server in a whole run under mpiexec: the same rewards, whatever happens to the server."""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from pathlib import Path

import pytest
from launch_ranks import ROOT, tlt

from tlt_hpc.cli import main as cli
from tlt_hpc.cluster.stopping import StopFlag
from tlt_hpc.common.records import Rollout
from tlt_hpc.config import load_config
from tlt_hpc.models.tokenizer import find_model, load_tokenizer
from tlt_hpc.rewards.text import boxed_verdict
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

SMALL = [
    "run.num_steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200",
    "speculation.mode=plain",
]  # fmt: skip

# As boxed says; no rank's variable may reach it, and of all answers the first two to come kill their server.
OWN = """
import os, signal, sys
from pathlib import Path

ranks = [name for name in os.environ if name.startswith(("PMI", "OMPI_", "SLURM_", "HYDI_"))]
assert not ranks, ranks
assert "mpi4py" not in sys.modules and "torch" not in sys.modules

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gcd" and extra_info is None
    for name in "first", "second":
        try:
            os.close(os.open(Path(__file__).parent / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return float(solution_str.endswith("\\\\boxed{" + ground_truth + "}"))
"""


def train(folder: Path, ranks: int, *overrides: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    arguments = [str(ROOT / "jobs" / "tiny.toml"), f"run.folder={folder}", f"run.ranks={ranks}", *SMALL, *overrides]
    return tlt(ranks, "train", *arguments, timeout=120, status=status)


@pytest.mark.mpi
def test_a_run_whose_server_is_killed_twice_has_the_rewards_that_the_text_deserves(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    spec = f"{tmp_path / 'own.py'}:compute_score"
    train(tmp_path, 2, f"reward.default={spec}")
    assert (tmp_path / "first").exists() and (tmp_path / "second").exists()
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    num_lost = sum(row["reward/failed/server"] for row in rows)
    assert num_lost <= 1, "of an answer that was alone there both times"
    deserved, given = [], []
    for step in range(2):
        for rank in range(2):
            record = read_step(RunFolder(tmp_path / "tiny").rollout_log(step, rank))
            given += record.rewards.tolist()
            deserved += [judged(rollout) for rollout in record.rollouts]
    assert sum(a != b for a, b in zip(deserved, given, strict=True)) <= num_lost
    assert len(given) == 32 and 0 < sum(given) < 32
    assert sum(row["rollout/rewards_in_tail"] for row in rows) > 0
    assert all(row[f"reward/failed/{reason}"] == 0 for row in rows for reason in ("error", "crash", "cpu", "wall"))


def judged(rollout: Rollout) -> float:
    """The reward of a response of the embedded task by the strict box."""
    tokenizer = load_tokenizer(find_model("embedded:tiny"))
    prompt, response = (
        tokenizer.decode(tokens.tolist()) for tokens in (rollout.prompt_tokens, rollout.response_tokens)
    )
    first, second = map(int, re.findall(r"\d+", prompt))
    return boxed_verdict(response, str(math.gcd(first, second))).reward


@pytest.mark.mpi
def test_a_function_that_judges_no_response_ends_the_run(tmp_path: Path) -> None:
    """It would continue to its end and learn nothing."""
    (tmp_path / "own.py").write_text("def compute_score(**given): return 1 / 0\n")
    function = f"reward.default={tmp_path / 'own.py'}:compute_score"
    short = ["rollout.max_new_tokens=32", "run.num_steps=1"]
    done = train(tmp_path, 1, function, *short, status=2)
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("tlt: ")]
    assert line == (
        "tlt: none of the 16 responses of step 1 could be judged: a reward function failed (for example: "
        "ZeroDivisionError: division by zero (own.py, line 1)); fix it; then start again"
    )
    assert not (tmp_path / "tiny" / "metrics.jsonl").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_server_starts_before_mpi_does(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class ConnectedError(Exception):
        pass

    def connect(flag: StopFlag) -> None:
        calls.append("connect")
        raise ConnectedError

    calls: list[str] = []
    monkeypatch.setattr("tlt_hpc.mpi.world.World.connect", connect)
    monkeypatch.setattr("tlt_hpc.rewards.scorer.open_process_judge", lambda section: calls.append(section.default))
    with pytest.raises(ConnectedError):
        config = load_config(ROOT / "jobs" / "tiny.toml", ["reward.default=math"])
        cli.run_on_all_ranks(config, argparse.Namespace(command=command), StopFlag())
    assert calls == ["math", "connect"]
