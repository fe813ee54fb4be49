"""The whole job under mpiexec: equal text, exact resume, clean stops, and a log that proves the tail was used."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from launch_ranks import ROOT, tlt
from whole_run import SMALL

from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step

pytestmark = [pytest.mark.mpi]

CAPTURED = {"capture_output": True, "text": True, "cwd": ROOT}


def command(
    folder: Path, *overrides: str, what: str = "train", ranks: int = 2, extra: tuple[str, ...] = ()
) -> list[str]:
    options = [f"run.folder={folder}", f"run.ranks={ranks}", *SMALL, *overrides]
    return [sys.executable, "-m", "tlt_hpc", what, str(ROOT / "jobs" / "tiny.toml"), *options, *extra]


def run_tlt(
    *arguments, status: int = 0, own: bool = False, ranks: int = 2, **options
) -> subprocess.CompletedProcess[str]:
    """``own``, or if it should fail: as a user starts it, by a process that starts the ranks; else on forks."""
    words = command(*arguments, ranks=ranks, **options)
    done = subprocess.run(words, check=False, **CAPTURED, timeout=240) if own or status else tlt(ranks, *words[3:])
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def records(folder: Path, step: int, ranks: int = 2):
    return [read_step(RunFolder(folder).rollout_log(step, rank)) for rank in range(ranks)]


def tokens_of(folder: Path, step: int, ranks: int = 2):
    return {
        rollout.key: (rollout.response_tokens.tolist(), float(reward))
        for record in records(folder, step, ranks)
        for rollout, reward in zip(record.rollouts, record.rewards, strict=True)
    }


@pytest.fixture
def straight(reference_run) -> Path:
    """Four steps without a break."""
    return reference_run / "tiny"


def test_the_log_proves_that_ranks_trained_while_another_still_decoded(straight):
    proofs = 0
    for step in range(4):
        first, second = records(straight, step)
        for trained, decoded in ((first, second), (second, first)):
            for micro_step in trained.micro_steps:
                assert micro_step.start_seconds >= trained.timing.last_token_seconds - 1e-3
                proofs += micro_step.end_seconds < decoded.timing.last_token_seconds
    assert proofs > 0
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    idle = sum(row["rollout/idle_rank_seconds"] for row in rows)
    harvested = sum(row["rollout/harvested_rank_seconds"] for row in rows)
    assert 0 < harvested <= idle
    assert rows[-1]["drafter/version"] > 0
    assert sum(row["rollout/rewards_in_tail"] for row in rows) > 0
    assert all(row["drafter/why"] in ("always", "trained") and row["drafter/due"] == 1 for row in rows)
    # how often the drafter is asked is the chooser's affair, which goes by the clock
    assert sum(row["drafter/own_sequences"] for row in rows) > 0
    assert all(row["drafter/own_accept_length"] > 2 for row in rows if row["drafter/own_sequences"] > 50)
    for step, row in enumerate(rows):
        for name in ("rollout/late_seconds", "rollout/decode_cpu_seconds"):
            assert 0 <= max(record.metrics[name] for record in records(straight, step)) == row[name]
        decoding = sum(record.metrics["rollout/decode_cpu_seconds"] for record in records(straight, step))
        assert decoding < row["perf/rollout_cpu_seconds"] < row["perf/cpu_seconds"]
        assert 0 <= row["rollout/stop_latency_seconds"] < row["rollout/seconds"]


def test_rollouts_and_trainer_have_the_same_weights_at_every_step(straight):
    """A part that is not refreshed after a step would show in probabilities, and the tie guard would hide it."""
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["training/rollout_probs_diff_mean"] < 1e-5 for row in rows)
    assert all(row["training/rollout_probs_diff_max"] < 1e-2 for row in rows)
    assert "tie guard" not in (straight.parent / "output.txt").read_text()


def test_the_log_tells_what_each_rank_did_when(straight):
    for step in range(4):
        for record in records(straight, step):
            spans, timing = record.spans, record.timing
            assert timing.start_seconds - 1e-3 < spans.start_seconds[0]
            ends = spans.start_seconds + spans.seconds
            assert (np.diff(ends) >= 0).all() and ends[-1] < timing.last_token_seconds + 1e-2
            assert (spans.start_seconds[1:] > ends[:-1] - 2e-3).all(), "one pass after the other"
            rounds = spans.strategy_index >= 0
            assert spans.num_tokens[rounds].sum() == sum(len(r.response_tokens) for r in record.rollouts)
            for rollout in record.rollouts:
                assert rollout.pass_lengths.sum() == len(rollout.response_tokens)
                assert len(rollout.pass_lengths) == rollout.num_target_passes
            assert (np.stack([spans.num_live, spans.strategy_index], 1)[rounds] == record.decisions).all()
            phases = [phase for phase in record.phases if phase.name != "ahead"]
            names = [phase.name for phase in phases]
            own = ["gen", "refresh", "reward", "update_actor", "refresh"]
            assert names == [*["save_checkpoint", "testing"] * (step > 0), *own]
            assert all(a.end_seconds <= b.start_seconds + 1e-3 for a, b in pairwise(phases))
            assert phases[-len(own)].start_seconds <= timing.start_seconds


@pytest.mark.ci
def test_a_run_of_all_modes_is_equal(tmp_path):
    done = run_tlt(tmp_path, what="compare", extra=("--steps", "2"))
    assert "tokens equal: yes (0 mismatched); rewards equal: yes; final policy weights equal: yes" in done.stdout


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "shard"), [(1, "group"), (4, "sample")])
def test_the_first_rollout_is_the_same_on_any_rank_count_and_shard(straight, tmp_path, ranks, shard):
    run_tlt(tmp_path, "run.num_steps=1", "speculation.mode=plain", f"rollout.shard={shard}", ranks=ranks)
    assert tokens_of(tmp_path / "tiny", 0, ranks) == tokens_of(straight, 0)


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_resumable_run(straight, tmp_path, number):
    process = subprocess.Popen(
        command(tmp_path, "run.num_steps=100", "checkpoint.every_steps=50"), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(RunFolder(tmp_path / "tiny").rollout_log(0, 0), process)
    process.send_signal(number)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 75, f"{process.returncode}\n{out}\n{errors}"
    assert re.search(rf"stopped early \(.*{number.name}.*\) after \d+ of 100 steps; the same command resumes", out)
    assert "Traceback" not in errors
    assert "Abort" not in errors and "BAD TERMINATION" not in out + errors
    reached = len((tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines())
    saved = [path.name for path in (tmp_path / "tiny" / "checkpoints").glob("step-*")]
    assert saved == ([] if number == signal.SIGTERM else [f"step-{reached:06d}"]), "SIGKILL is near: nothing is saved"
    run_tlt(tmp_path, f"run.num_steps={reached + 1}", "checkpoint.every_steps=50")
    for step in range(min(4, reached + 1)):
        assert tokens_of(tmp_path / "tiny", step) == tokens_of(straight, step)


@pytest.mark.ci
def test_a_finished_run_says_so_and_a_changed_one_is_refused(tmp_path):
    run_tlt(tmp_path, "run.num_steps=1")
    done = run_tlt(tmp_path, "run.num_steps=1", own=True)
    assert re.fullmatch(
        r"checking \S+\nalready finished: 1 step in \S+, policy [0-9a-f]{12}; raise run.num_steps to continue\n",
        done.stdout,
    )
    word = tmp_path / "tiny" / "finished.json"
    told = word.read_text()
    word.write_text(told[:20])
    refused = run_tlt(tmp_path, "run.num_steps=1", status=2)
    assert re.fullmatch(rf"tlt: {word} is damaged \(.*\); remove it, and the run looks for itself\n", refused.stderr)
    word.write_text(told)
    refused = run_tlt(tmp_path, "run.num_steps=2", "rollout.temperature=0.9", status=2)
    lines = [line for line in refused.stderr.splitlines() if line.startswith("tlt: ")]
    assert len(lines) == 1
    assert "rollout.temperature = 1.0, now 0.9" in lines[0]


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)
