"""Steps that the log has and no checkpoint are repeated from the log; what the log lacks is generated again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fake_world import OneRank
from launch_ranks import ROOT
from logged import make_rollout, step_record

from tlt_hpc.common.records import Prompt
from tlt_hpc.config import UserError, load_config
from tlt_hpc.rl.draws import StepDraws
from tlt_hpc.rl.stats import PolicyStats, RolloutMismatch
from tlt_hpc.run.replay import ReplayError, check_update, gather_logged_step, is_committed
from tlt_hpc.storage import folder as storage_folder
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step, write_step
from tlt_hpc.storage.step_lines import add_line, drop_lines, read_lines, replace_line

# -- the lines that commit a step ----------------------------------------------------------------------------------


def line(step: int, value: float = 0.0) -> dict[str, float]:
    return {"training/global_step": float(step + 1), "value": value}


def test_no_line_is_lost_but_those_that_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert drop_lines(path, 0) == [] and read_lines(path) == {}
    for step in (0, 1, 2, 3, 3):
        add_line(path, line(step, 0.5 * step))
    whole = {step: line(step, 0.5 * step) for step in range(4)}
    assert read_lines(path) == whole
    with pytest.raises(UserError, match=r"lines of steps after 2, .* another one has; start again"):
        add_line(path, line(1, 9.0))
    replace_line(path, line(1, 9.0))
    assert read_lines(path) == whole | {1: line(1, 9.0)}, "figures of an evaluation, of a step before others"
    before = path.stat().st_ino
    assert drop_lines(path, 4) == [] and path.stat().st_ino == before, "nothing to drop, yet written again"
    assert drop_lines(path, 2) == [2, 3] and list(read_lines(path)) == [0, 1]
    beside = tmp_path / "metrics.dropped-000003.jsonl"
    assert list(read_lines(beside)) == [2, 3] and set(tmp_path.iterdir()) == {path, beside}, "nothing is lost"
    for number in (2, 3):
        add_line(path, line(2, float(number)))
        assert drop_lines(path, 2) == [2]
        assert read_lines(tmp_path / f"metrics.dropped-000003-{number}.jsonl") == {2: line(2, float(number))}
    assert list(read_lines(beside)) == [2, 3]


@pytest.mark.parametrize("text", ["{", '{"no": 1}', "[1]", '{"training/global_step": "x"}'])
def test_a_line_that_no_run_wrote_is_named_and_none_is_lost(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before := json.dumps(line(0)) + "\n" + text + "\n" + json.dumps(line(1)) + "\n")
    replaces = partial(replace_line, line=line(1, 5.0))
    for attempt in (read_lines, partial(drop_lines, step=1), replaces, partial(add_line, line=line(1, 5.0))):
        with pytest.raises(UserError, match=r"metrics\.jsonl:2 is no line that a run writes .*; restore it, or remove"):
            attempt(path)
    assert path.read_text() == before
    add_line(path, line(2))
    before += json.dumps(line(2)) + "\n"
    assert path.read_text() == before, "a later step is committed meanwhile"
    path.write_text(before + text + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is no line"):
        add_line(path, line(3))


def test_a_last_line_that_was_cut_off_commits_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(line(0)) + "\n" + json.dumps(line(1)) + "\n"
    path.write_text(whole[:-5])
    assert list(read_lines(path)) == [0]
    assert "metrics.jsonl:2 is cut off and not counted" in caplog.text
    add_line(path, line(1))
    assert path.read_text() == whole


# -- what does not fit -------------------------------------------------------------------------------------------------

STATS = PolicyStats(
    pg_loss=0.1, entropy=0.5, ppo_kl=0.0, pg_clipfrac=0.0, kl_loss=0.0, router_aux_loss=0.0, grad_norm=2.0,
    lr=1e-3, num_tokens=100, old_log_prob_seconds=0.0, update_seconds=1.0,
    mismatch=RolloutMismatch(1e-7, 1e-6, 0.0, 1e-12, 1.0, 0.0),
)  # fmt: skip
LINE = {"training/rollout_probs_diff_mean": 1e-7, "critic/score/mean": 0.5, "actor/num_tokens": 100.0}
REWARDS = np.array([0, 1], np.float32)


def apart(diff: float) -> dict[str, Any]:
    return {"mismatch": replace(STATS.mismatch, rollout_probs_diff_mean=diff)}


def test_another_runs_update_is_refused_with_both_values() -> None:
    check = partial(check_update, RunFolder(Path("run")), 7)
    check(REWARDS, replace(STATS, grad_norm=2.001, **apart(1e-5)), LINE)  # whose last bits differ
    for changes, rewards, found in (
        (apart(0.002), REWARDS, "training/rollout_probs_diff_mean 0.002 where run/metrics.jsonl has 1e-07: log and"),
        (apart(float("nan")), REWARDS, "training/rollout_probs_diff_mean nan"),
        ({"num_tokens": 99}, REWARDS, "actor/num_tokens 99"),
        ({}, np.array([1, 1], np.float32), "critic/score/mean 1"),
    ):
        with pytest.raises(ReplayError, match=f"step 8, repeated from run/rollouts, has {re.escape(found)}"):
            check(rewards, replace(STATS, **changes), LINE)


def make_job(folder: Path, prompts: list[list[int]]) -> Any:
    """What reading the log asks of a job: its folder, its world, and the requests of a step."""
    drawn = [Prompt(np.array(tokens, np.int32), "", "", "test") for tokens in prompts]
    config = load_config(ROOT / "jobs" / "tiny.toml", ["rollout.group_size=2"])
    return SimpleNamespace(
        world=OneRank(),
        folder=RunFolder(folder),
        config=config,
        prompts=SimpleNamespace(draw_step_prompts=lambda step: drawn),
        assets=SimpleNamespace(excluded_token_ids=(0, 20, 21)),
    )


def log_step(job: Any, step: int, weights: int, lacking: int = 0, response: Sequence[int] = (7,)) -> Path:
    requests = StepDraws(job.config, job.prompts, step).first_requests()[lacking:]
    rollouts = [make_rollout(r.key, r.prompt_tokens, response, weight_version=weights) for r in requests]
    record = step_record(step, rollouts, np.arange(len(rollouts)))
    job.folder.make_missing_folders()
    path: Path = job.folder.rollout_log(step, 0)
    write_step(path, record)
    return path


def test_a_whole_step_is_read_in_the_order_of_its_keys(tmp_path: Path) -> None:
    job = make_job(tmp_path, [[3, 4], [5]])
    log_step(job, 2, weights=2)
    logged = gather_logged_step(job, 2)
    assert logged is not None
    rollouts, rewards, num_micro_steps = logged
    assert [(r.key.draw, r.key.sample) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rewards.tolist() == [0, 1, 2, 3] and num_micro_steps == 0


@pytest.mark.parametrize(
    ("weights", "lacking", "why"), [(1, 0, "responses of weights 1"), (2, 3, "lacks 3 of the 4 responses of step 3")]
)
def test_what_a_step_lacks_is_generated_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: int, lacking: int, why: str
) -> None:
    job = make_job(tmp_path, [[3, 4], [5]])
    log_step(job, 2, weights, lacking)
    assert gather_logged_step(job, 2) is None
    assert "step 3 and those after it are generated again" in caplog.text and why in caplog.text


def test_logs_that_a_client_of_nfs_does_not_list_yet_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A committed step has the logs of all its ranks; without one its steps would be generated again."""
    job = make_job(tmp_path, [[3, 4], [5]])
    first, second = log_step(job, 2, weights=2), job.folder.rollout_log(2, 1)
    whole = read_step(first)
    for rank, path in enumerate((first, second)):
        mine = slice(rank, None, 2)
        rollouts, rewards, advantages = whole.rollouts[mine], whole.rewards[mine], whole.advantages[mine]
        own = {"rollouts": rollouts, "rewards": rewards, "advantages": advantages}
        write_step(path, replace(whole, rank=rank, num_ranks=2, **own))
    looks, true_names = [[], [first.name], [first.name]], storage_folder._list_names

    def names(folder: Path) -> list[str]:
        return looks.pop(0) if folder == first.parent and looks else true_names(folder)

    monkeypatch.setattr(storage_folder, "_list_names", names)
    monkeypatch.setattr(storage_folder.time, "sleep", lambda seconds: None)
    logged = gather_logged_step(job, 2)
    assert logged is not None and len(logged[0]) == 4 and not looks and not caplog.records
    second.unlink()
    monkeypatch.setattr(storage_folder, "NFS_SECONDS", 0.0)
    assert gather_logged_step(job, 2) is None and "lacks 2 of the 4 responses" in caplog.text, "one that is not there"


def test_a_damaged_log_has_nothing_that_can_be_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(tmp_path, [[3, 4]])
    path = log_step(job, 2, weights=2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert gather_logged_step(job, 2) is None
    assert f"generated again: {path}" in caplog.text


def test_a_file_that_cannot_be_read_now_is_no_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, [[3, 4]])
    path = log_step(job, 2, weights=2)
    stale = Mock(side_effect=OSError(116, "Stale file handle", str(path)))
    monkeypatch.setattr("tlt_hpc.storage.hdf5.open_regular", stale)
    with pytest.raises(UserError, match=rf"^{path}: Stale file handle; .* start again; nothing was changed$"):
        gather_logged_step(job, 2)


def test_responses_to_other_prompts_end_the_run(tmp_path: Path) -> None:
    log_step(make_job(tmp_path, [[3, 4]]), 2, weights=2)
    with pytest.raises(ReplayError, match=r"another prompt than data\.source = 'embedded:gcd' gives; restore that, or"):
        gather_logged_step(make_job(tmp_path, [[3, 5]]), 2)


def test_a_token_that_is_never_sampled_now_ends_the_run(tmp_path: Path) -> None:
    """As in a log of a version that sampled all ids: the update gives it no probability."""
    job = make_job(tmp_path, [[20, 4]])
    log_step(job, 2, weights=2, response=(19, 21, 1))
    told = (
        f"{tmp_path}/rollouts has a response of step 3 with the token id 21, which is never sampled now; restore the "
        f"model's tokenizer files, or remove {tmp_path}/rollouts/step-000003 to generate this step and those after it "
        "again"
    )
    with pytest.raises(ReplayError, match=f"^{re.escape(told)}$"):
        gather_logged_step(job, 2)
    job.assets.excluded_token_ids = ()
    assert gather_logged_step(job, 2) is not None


def test_a_line_of_an_earlier_version_commits_nothing() -> None:
    assert is_committed(LINE) and not is_committed({"critic/rewards/mean": 0.5}) and not is_committed(None)
