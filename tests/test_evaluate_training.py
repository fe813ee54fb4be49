"""Evaluation between the steps of a run: no training token changes, it survives kills, a checkpoint says the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from launch_ranks import tlt as ranks_tlt

from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step
from tlt_hpc.storage.step_lines import add_line, read_lines

pytestmark = [pytest.mark.mpi, pytest.mark.ci]

ROOT = Path(__file__).parent.parent
SMALL = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=120", "checkpoint.every_steps=1",
    "run.ranks=2", "evaluation.limit=6", "evaluation.samples=2", "checkpoint.keep=9",
]  # fmt: skip


def tlt(what: str, folder: Path, *overrides: str, place: tuple[str, ...] = ()) -> str:
    ranks = 1 if "run.ranks=1" in overrides else 2
    done = ranks_tlt(ranks, what, *place, "jobs/tiny.toml", f"run.folder={folder}", *SMALL, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def policy_of(said: str) -> str:
    found = re.search(r"policy (\w{12})", said)
    assert found, said
    return found[1]


def tokens_of(folder: Path, num_steps: int) -> dict:
    return {
        rollout.key: rollout.response_tokens.tolist()
        for step in range(num_steps)
        for path in RunFolder(folder / "tiny").rollout_logs(step)
        for rollout in read_step(path).rollouts
    }


def lines(folder: Path) -> dict:
    return read_lines(folder / "tiny" / "metrics.jsonl")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> tuple[Path, str]:
    """Three steps, evaluated after the second and at the end."""
    folder = tmp_path_factory.mktemp("evaluated")
    return folder, tlt("train", folder, "run.num_steps=3", "evaluation.every_steps=2")


def test_no_training_token_and_no_weight_changes(evaluated, tmp_path):
    folder, said = evaluated
    assert policy_of(tlt("train", tmp_path, "run.num_steps=3")) == policy_of(said)
    assert tokens_of(tmp_path, 3) == tokens_of(folder, 3)
    assert not any("timing_s/testing" in line for line in lines(tmp_path).values())


def test_the_figures_stand_in_the_steps_lines(evaluated):
    folder, said = evaluated
    own = lines(folder)
    assert [step for step, line in own.items() if "val-core/gcd/acc/mean@2" in line] == [1, 2]
    assert all(line["timing_s/testing"] > 0 for step, line in own.items() if step)
    assert f"evaluated after 2 steps, %: gcd/acc/greedy {100 * own[1]['val-core/gcd/acc/greedy']:.1f}" in said
    logged = [json.loads(line) for line in (folder / "tiny" / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["num_steps"], line["val-core/gcd/acc/mean@2"]) for line in logged] == [
        (step, own[step - 1]["val-core/gcd/acc/mean@2"]) for step in (2, 3)
    ]
    # features, counts and tallies of the evaluation are none of the next step's
    record = read_step(RunFolder(folder / "tiny").rollout_logs(2)[0])
    assert record.strategy_tokens.sum() == sum(len(rollout.response_tokens) for rollout in record.rollouts)


def test_a_checkpoint_of_the_run_says_the_same(evaluated, tmp_path):
    folder, _ = evaluated
    place = folder / "tiny"
    tlt("evaluate", folder, "run.ranks=1", place=(str(place), "--step", "2", "--output", str(tmp_path / "two")))
    again, first = EvaluationFolder(tmp_path / "two"), EvaluationFolder(place / "evaluation" / "step-000002")
    assert json.loads(again.results.read_text())["sets"] == json.loads(first.results.read_text())["sets"]
    assert {k: r.tokens.tolist() for k, r in again.read_all_responses().items()} == {
        k: r.tokens.tolist() for k, r in first.read_all_responses().items()
    }


def test_an_evaluation_that_was_cut_short_is_taken_up_again(evaluated, tmp_path):
    """As a kill leaves it: the step committed, some of the responses there, no figures."""
    folder, _ = evaluated
    shutil.copytree(folder / "tiny", tmp_path / "tiny")
    line = lines(tmp_path)[2]
    kept = {name: value for name, value in line.items() if not name.startswith(("val-", "timing_s/testing"))}
    add_line(tmp_path / "tiny" / "metrics.jsonl", kept)
    evaluation = EvaluationFolder(tmp_path / "tiny" / "evaluation" / "step-000003")
    evaluation.results.unlink()
    next(iter(evaluation.responses.glob("*.h5"))).unlink()
    assert 0 < len(evaluation.read_all_responses()) < 18
    again = tlt("train", tmp_path, "run.num_steps=3", "evaluation.every_steps=2")
    assert "evaluated after 3 steps, %: gcd/acc/greedy" in again
    figures = {name: value for name, value in lines(tmp_path)[2].items() if name.startswith("val-")}
    assert figures == {name: value for name, value in line.items() if name.startswith("val-")} != {}
