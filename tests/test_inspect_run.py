"""The offline tool prints what the files hold, fast, and one line on a wrong path."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_rollout_log import make_record

from tlt_hpc.common.records import MicroStepRecord, RolloutTiming
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

TOOL = Path(__file__).parents[1] / "tools" / "inspect_run.py"
START = 1.8e9


def inspect(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """Two ranks, 12 steps: rank 0 idles from second 2 on and trains; rank 1 decodes until second 6."""
    folder = RunFolder(tmp_path / "run")
    updates = tuple(MicroStepRecord(START + at, START + at + 0.9, 100, 0.5) for at in (2.0, 3.0, 5.5))
    for step in range(12):
        for rank, last, micro_steps in ((0, 2.0, updates), (1, 6.0, ())):
            timing = RolloutTiming(START, START + last, START + 6.5)
            changes = {
                "num_ranks": 2,
                "timing": timing,
                "micro_steps": micro_steps,
                "harvested_seconds": 0.9 * len(micro_steps),
                "metrics": {"rollout/late_seconds": 0.01 + 0.02 * (step == 11 and rank == 1),
                            "rollout/rewards_in_tail": 4.0, "drafter/cut_rank_seconds": 0.125 * rank},
            }  # fmt: skip
            write_step(folder.rollout_log(step, rank), make_record(1, step=step, rank=rank, **changes))
    writer = FeatureCache(folder, 0, 1, 4, 10**6).begin_step(11, 3)
    writer.append(np.zeros(30, np.int32), 5, np.zeros((29, 1, 4), np.uint16))
    writer.close()
    return folder


def test_the_report(run_folder: RunFolder) -> None:
    done = inspect(run_folder.path, "--last", "3")
    assert done.returncode == 0, done.stderr
    assert "12 steps (0 to 11) in the rollout log (schema 2), showing 3" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("    11 ")).split()
    records = [make_record(1, step=11, rank=rank) for rank in (0, 1)]
    lengths = [len(rollout.response_tokens) for record in records for rollout in record.rollouts]
    p50, p90 = np.percentile(lengths, (50, 90))
    reward = np.concatenate([record.rewards for record in records]).mean()
    assert row[:7] == ["11", "2", "16", f"{p50:.0f}", f"{p90:.0f}", str(max(lengths)), f"{reward:.3f}"]
    assert row[8:12] == ["5.00", "2.70", "54%", "3"], "4.5 + 0.5 idle rank-seconds, three updates of 0.9 s"
    assert "feature cache, step 11: 1 file, 1 document, 30 tokens" in done.stdout


def test_the_proof_counts_only_updates_that_ended_while_another_rank_decoded(run_folder: RunFolder) -> None:
    lines = inspect(run_folder.path, "--last", "1").stdout.splitlines()
    place = lines.index("  step 11: 2 of 3 updates")
    assert "rank 0 updated from" in lines[place + 1] and "rank 1 decoded until" in lines[place + 1]
    seconds = [word[-6:] for word in lines[place + 1].replace(";", "").split() if word.count(":") == 2]
    assert seconds == [f"{START % 60 + at:06.3f}" for at in (3.0, 3.9, 6.0)]


def test_an_update_in_the_tail_of_a_refill_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    updates = (
        MicroStepRecord(START + 12.0, START + 12.9, 100, 0.5),
        MicroStepRecord(START + 7.0, START + 7.9, 100, 0.5),
    )
    for rank, last, micro_steps in ((0, 2.0, updates), (1, 6.0, ())):
        times = [RolloutTiming(START + at, START + at + last, START + at + 6.5) for at in (0.0, 8.0)]
        changes = {"num_ranks": 2, "timing": times[0], "refills": (times[1],), "micro_steps": micro_steps}
        write_step(folder.rollout_log(0, rank), make_record(1, step=0, rank=rank, **changes))
    done = inspect(folder.path)
    assert "  step 0: 1 of 2 updates" in done.stdout.splitlines(), done.stdout
    assert "rank 1 decoded until" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("     0 ")).split()
    assert row[8] == "10.00", "4.5 + 0.5 idle rank-seconds, twice"


def test_the_stop_latency_and_what_else_the_tail_was_used_for(run_folder: RunFolder) -> None:
    done = inspect(run_folder.path, "--last", "0").stdout
    latency = (
        "stop latency, release known to loop left, 24 releases of a rank: median 10.0 ms, 99 % 25.4 ms, longest 30.0"
    )
    assert latency in done and "micro-step's" not in done
    assert "beside harvesting: 96 rewards in the tail, 0 s for them, 1.5 s in micro-steps cut at the release" in done
    run_folder.config.write_text("[drafter]\nmicro_step_seconds = 0.02\n")
    assert "longest 30.0 ms; 95.8% under the micro-step's 20 ms" in inspect(run_folder.path, "--last", "0").stdout


def test_a_damaged_file_is_named_and_left_out(run_folder: RunFolder) -> None:
    path = run_folder.rollout_log(11, 1)
    path.write_bytes(path.read_bytes()[:-10])
    done = inspect(run_folder.path)
    assert done.returncode == 0
    assert f"{path}: damaged rollout log" in done.stdout and "\n    11   1/2         8 " in done.stdout


def test_a_wrong_path_is_one_line(tmp_path: Path) -> None:
    done = inspect(tmp_path / "missing")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.count("\n") == 1
        and str(tmp_path / "missing") in done.stderr
        and "give a run's folder" in done.stderr
    )


def test_it_imports_no_torch_and_answers_at_once(run_folder: RunFolder) -> None:
    program = f"import runpy, sys; sys.argv = ['inspect_run', {str(run_folder.path)!r}]\n"
    program += f"try: runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    program += "except SystemExit: sys.exit(bool({'torch', 'mpi4py', 'pydantic'} & {*sys.modules}))\n"
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    inspect(run_folder.path)
    # computing, not waiting for a core: 0.2 s, and importing pydantic or torch alone takes longer
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 0.8
