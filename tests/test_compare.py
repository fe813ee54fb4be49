"""The comparison sees every difference: it is read back from logs that are made here with one planted in them."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from answers import TINY, refusal
from fake_world import on_threads
from logged import make_rollout, step_record

from tlt_hpc.cli import rank_commands
from tlt_hpc.common.records import MicroStepRecord, SampleKey
from tlt_hpc.config import load_config
from tlt_hpc.storage import folder as storage_folder
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step
from tlt_hpc.storage.step_lines import add_line
from tlt_hpc.studies import compare as study
from tlt_hpc.studies.compare import MODES, Comparison, num_mismatched, read_comparison, speed_rows, table_rows, to_tree
from tlt_hpc.train import RunResult

CONFIG = load_config(TINY)


def write_run(
    path: Path,
    num_steps: int = 1,
    seconds: float | Sequence[float] = 4.0,
    passes: int = 2,
    token: int = 7,
    reward: float = 1.0,
) -> None:
    """A run of two ranks whose responses have the same four tokens but the first, which is ``token`` on rank 1.

    ``seconds``: of the rollouts, or of each; a step takes 2 s more, and half of it is CPU time.
    """
    rollouts = seconds if isinstance(seconds, Sequence) else [seconds] * num_steps
    folder = RunFolder(path)
    folder.make_missing_folders()
    for step in range(num_steps):
        for rank in (0, 1):
            response = [token if rank else 7, 8, 9, 1]
            rollout = make_rollout(SampleKey(0, 0, step, rank, 0), [4, 5], response, num_target_passes=passes)
            updates = (MicroStepRecord(3.0, 3.1, 50, 0.5), MicroStepRecord(3.1, 3.2, 60, 0.4))
            scores = [reward if rank else 0.0]
            record = step_record(step, [rollout], scores, micro_steps=updates, harvested_seconds=0.5)
            write_step(folder.rollout_log(step, rank), record)
        seconds = rollouts[step]
        line = {"rollout/seconds": seconds, "timing_s/update_actor": 1.0, "timing_s/step": seconds + 2}
        line |= {"perf/rollout_cpu_seconds": seconds / 2, "perf/cpu_seconds": seconds / 2 + 1}
        line["rollout/decode_cpu_seconds"] = seconds / 4
        add_line(folder.metrics, {"training/global_step": step + 1, **line})


def compared(
    parent: Path, names: tuple[str, ...] = MODES, digest: str = "same", is_exact: bool = True, **changes
) -> Comparison:
    """Runs of which the last has the changes; the first is the slowest if it is plain."""
    for name in names:
        own = changes if name == names[-1] else {}
        write_run(parent / name, **{"seconds": 8.0, "passes": 4} if name == "plain" else own)
    model = {} if is_exact else {"dtype": "bfloat16", "batch_invariant": False}
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update=model)})
    return read_comparison(config, parent, 1, 2, {name: digest if name == names[-1] else "same" for name in names})


def test_equal_runs_are_equal_and_their_figures_are_the_logs(tmp_path):
    comparison = compared(tmp_path)
    assert all(comparison.equality_by_name.values()) and comparison.mismatched_tokens == 0
    assert comparison.speedups()["tail"]["rollout"].median == 2.0
    assert comparison.speedups()["ngram"]["step"].median == pytest.approx(10 / 6)
    plain, full = comparison.runs["plain"], comparison.runs["tail"]
    assert (plain.accept_length, full.accept_length, full.tokens, full.reward_mean) == (1.0, 2.0, 8, 0.5)
    assert (full.idle_rank_seconds, full.harvested_rank_seconds, full.drafter_steps) == (2.0, 1.0, 4)
    assert (full.rollout_seconds, full.step_seconds, full.update_seconds) == (4.0, 6.0, 1.0)
    assert (full.rollout_cpu_seconds, full.decode_cpu_seconds, full.step_cpu_seconds) == (2.0, 1.0, 3.0)
    assert table_rows(comparison)["accept length"] == ["1.000", "2.000", "2.000", "2.000"]
    assert speed_rows(comparison)["median rollout speed, plain = 1"] == ["1.00x", "2.00x", "2.00x", "2.00x"]


def test_speed_is_the_median_over_steps_and_no_slow_step_decides_it(tmp_path):
    """The machine becomes twice as slow with every step, and stalls twice for 60 s."""
    plain, full = [2.0**k for k in range(1, 8)], [2.0**k for k in range(7)]
    full[3] += 60
    full[5] += 60
    for name, seconds in (("plain", plain), ("tail", full)):
        write_run(tmp_path / name, 7, seconds)
    comparison = read_comparison(CONFIG, tmp_path, 7, 2, {"plain": "same", "tail": "same"})
    median, low, high = comparison.speedups()["tail"]["rollout"]
    assert median == high == 2.0 and 0.2 < low < 1.0
    assert speed_rows(comparison)["median rollout speed, plain = 1"] == ["1.00x", f"2.00x ({low:.2f} to 2.00)"]


def test_modes_take_each_step_in_turn_and_in_every_order(monkeypatch):
    taken = list[str]()

    def fake_steps(job, tracking, reporter):
        for _ in range(job.steps):
            yield None
            taken.append(job.name)
        yield RunResult(0, job.steps, job.steps == 6, f"digest of {job.name}", "")

    monkeypatch.setattr(study, "take_steps", fake_steps)
    monkeypatch.setattr(study, "wait_for_saves_all_ranks", lambda job: taken.append(f"{job.name} saved"))
    jobs = {name: SimpleNamespace(name=name, steps=6) for name in MODES[:3]}
    assert study.run_jobs_in_turn_all_ranks(jobs, 6, lambda mode: None) == {name: f"digest of {name}" for name in jobs}
    assert taken[:3] == [f"{name} saved" for name in jobs], "nothing is timed before all are ready"
    assert all(saved == f"{name} saved" for name, saved in zip(taken[3::2], taken[4::2], strict=True))
    rounds = [tuple(taken[start : start + 6 : 2]) for start in range(3, len(taken), 6)]
    assert sorted(rounds) == sorted(permutations(jobs))
    taken.clear()
    jobs["ngram"].steps = 2  # a signal
    assert study.run_jobs_in_turn_all_ranks(jobs, 6, lambda mode: None) == {}
    assert taken.count("ngram") == 2 and max(taken.count("plain"), taken.count("tail")) <= 3


@pytest.mark.parametrize(
    ("change", "unequal", "mismatched"),
    [({"token": 6}, "tokens", 1), ({"reward": 0.0}, "rewards", 0), ({"digest": "other"}, "policy", 0)],
)
def test_one_difference_is_seen_and_written(tmp_path, change, unequal, mismatched):
    equal = to_tree(compared(tmp_path, **change))["equal"]
    assert equal.pop("mismatched_tokens") == mismatched
    assert [name for name, is_equal in equal.items() if not is_equal] == [unequal]


def test_a_table_is_printed_though_its_json_cannot_be_written(tmp_path, monkeypatch, capsys):
    comparison = compared(tmp_path)
    monkeypatch.setattr(study, "compare", lambda *_: comparison)
    options, world = Namespace(without=[], steps=1, json=tmp_path), SimpleNamespace(rank=0)
    said = refusal(rank_commands.compare, CONFIG, options, world)
    assert said.startswith(f"cannot write {tmp_path}: Is a directory; the figures are above")
    assert "tokens equal: yes (0 mismatched)" in capsys.readouterr().out


def test_a_log_that_is_missing_in_all_runs_does_not_pass_for_equal(tmp_path, monkeypatch):
    """It is waited for first, since NFS may show it late."""
    monkeypatch.setattr(storage_folder, "NFS_SECONDS", 0.5)
    compared(tmp_path, ("plain", "tail"))
    logs = [RunFolder(tmp_path / name).rollout_log(0, 1) for name in ("plain", "tail")]
    for log in logs:
        log.rename(log.with_suffix(".away"))
    digests = dict.fromkeys(("plain", "tail"), "same")
    said = refusal(read_comparison, CONFIG, tmp_path, 1, 2, digests)
    assert "plain/rollouts/step-000001 lacks rank-0001.h5, so " in said
    for log in logs:
        threading.Timer(0.1, log.with_suffix(".away").rename, [log]).start()
    assert read_comparison(CONFIG, tmp_path, 1, 2, digests).runs["tail"].tokens == 8


def test_one_rank_reads_the_logs_for_all(tmp_path, monkeypatch):
    """Others may see them later: they would count differences, and end the command with another status."""
    readers = list[Path]()
    monkeypatch.setattr(study, "run_training", lambda *of: RunResult(0, 1, True, "", ""))
    monkeypatch.setattr(study, "build_job", lambda *of: nullcontext())
    monkeypatch.setattr(study, "closing", lambda job: job)
    monkeypatch.setattr(study, "run_jobs_in_turn_all_ranks", lambda *of: {"plain": "same"})
    monkeypatch.setattr(study, "read_comparison", lambda config, parent, *of: readers.append(parent) or parent)
    found = on_threads(3, lambda world: study.compare(CONFIG, ("plain",), 1, world, nullcontext))
    assert len(readers) == 1 and found == readers * 3


def test_mismatches_count_missing_tokens_and_samples():
    a, b, c = (SampleKey(0, 0, 0, draw, 0) for draw in range(3))
    left = {a: np.array([1, 2, 3]), b: np.array([4, 5])}
    right = {a: np.array([1, 9, 3, 4]), c: np.array([6])}
    assert num_mismatched(left, right) == 1 + 1 + 2 + 1
    assert num_mismatched(left, left) == 0
