"""tlt ablate: its arms, the figures that it reads from their logs, and how it is resumed."""

from __future__ import annotations

import json
import math
import random
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from answers import TINY, mistake, python, refusal
from test_compare import CONFIG, compared, write_run
from test_environment import ENVIRONMENT

from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.ablate import ablate as study
from tlt_hpc.extras.ablate.ablate import AblationFigures, Passes, accept_length_gain
from tlt_hpc.extras.ablate.ablation_plan import ARMS, Ablation, _flatten_config, check_ranks, describe, plan_ablation
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import add_environment, record_finished
from tlt_hpc.studies.compare import read_comparison
from tlt_hpc.train import RunResult


def plan(folder: Path, *overrides: str, steps: int = 2, arms: str | None = None) -> Ablation:
    return plan_ablation(load_config(TINY, [f"run.folder={folder}", *overrides]), Namespace(steps=steps, arms=arms))


def test_arms_differ_only_in_the_keys_that_they_are_named_after():
    config = load_config(TINY, ["algorithm.rollout_correction=tis"])
    off, on = ({"speculation.ahead": word} for word in ("off", "on"))
    own = {
        "plain": {"speculation.mode": "plain", **off},
        "ngram": {"speculation.mode": "ngram", **off},
        "frozen": {"speculation.mode": "frozen", **off},
        "tail": off,
        "ahead": {"speculation.mode": "frozen", **on},
        "ahead-tail": on,
    }
    # a correction reads the last bits of the rollout
    common = {"run.folder": "runs/tiny-ablate", "run.num_steps": 7, "algorithm.rollout_correction": "none"}
    theirs = _flatten_config(config)
    for arm in ARMS:
        ours = _flatten_config(Ablation(config, tuple(ARMS), 7).config_of(arm))
        assert {key: value for key, value in ours.items() if value != theirs[key]} == {
            "run.name": arm,
            **common,
            **own[arm],
        }


@pytest.mark.parametrize(
    ("override", "missing"),
    [
        ("run.seed=0", set()),
        ("drafter.init=random", {"frozen", "ahead"}),
        ('speculation.strategies=["drafter-4"]', {"ngram"}),
        ('speculation.strategies=["ngram-4"]', set(ARMS) - {"plain", "ngram"}),
    ],
)
def test_default_arms_leave_out_those_that_change_nothing(tmp_path, override, missing):
    ablation = plan(tmp_path, override)
    assert set(ARMS) - set(ablation.arms) == missing
    assert f"{ablation.folder}: 2 steps of each arm on 4 ranks" in describe(ablation, 4)


def test_mistakes_are_one_line(capsys, tmp_path):
    for words, said in (
        (["--arms", "plain,tial"], "no arm 'tial'; use plain, ngram"),
        (["--arms", "frozen", "drafter.init=random"], "leaves nothing to freeze"),
    ):
        assert said in mistake(capsys, "ablate", TINY, f"run.folder={tmp_path}", *words)
    assert not list(tmp_path.iterdir())


def test_an_ablation_may_grow_but_not_change(tmp_path):
    begun = plan(tmp_path, steps=4, arms="tail,plain")
    assert begun.arms == ("plain", "tail") and begun.folder == tmp_path / "tiny-ablate"
    folder = RunFolder(begun.folder / "tail")
    folder.make_missing_folders()
    folder.config.write_text(to_toml(begun.config_of("tail")))
    record_finished(RunFolder(begun.config_of("tail").folder).finished, 4, "abc")
    assert study.read_finished_digests(begun) == {"tail": "abc"}
    grown = plan(tmp_path, steps=6, arms="tail,frozen")
    assert grown.arms == ("frozen", "tail")
    assert study.read_finished_digests(grown) == {}, "the new steps are missing"
    assert "is of 4 steps; give --steps 4 or more" in refusal(plan, tmp_path, steps=3)
    other = refusal(plan, tmp_path, "drafter.micro_step_tokens=512", steps=4)
    assert "has drafter.micro_step_tokens = 1024, now 512" in other
    world = SimpleNamespace(size=4, run_first_and_broadcast=lambda read: read())
    add_environment(folder.environment, ENVIRONMENT)
    told = "ablate/tail was begun on 12 ranks, now 4; start 12, or give another run"
    assert told in refusal(study.ablate, grown, world, nullcontext)
    check_ranks(grown, 12)


def test_arms_run_in_order_and_a_second_start_runs_only_the_missing_ones(tmp_path, monkeypatch):
    names: list[str] = []

    def fake_run(config, world, reporter) -> RunResult:
        """Leave a small log; a signal stops the first run of the arm "frozen"."""
        name = config.run.name
        names.append(name)
        if name == "frozen" and names.count(name) == 1:
            return RunResult(0, 1, False, "", "SIGTERM")
        write_run(config.folder, num_steps=config.run.num_steps)
        record_finished(RunFolder(config.folder).finished, config.run.num_steps, "same")
        return RunResult(0, config.run.num_steps, True, "same", "")

    monkeypatch.setattr(study, "run_training", fake_run)
    monkeypatch.setattr(study, "measure_accept_lengths_all_ranks", lambda ablation, world: {})
    world, ablation = World.connect(), plan(tmp_path, arms="plain,frozen,tail")
    assert study.ablate(ablation, world, nullcontext) is None
    for wanted in (["warm-up", "plain", "frozen", "warm-up", "frozen", "tail"], []):
        figures = study.ablate(ablation, world, nullcontext)
        assert names == wanted
        assert (
            figures is not None
            and figures.arms_equal_as_promised
            and list(figures.comparison.runs) == list(ablation.arms)
        )
        assert not (ablation.folder / "warm-up").exists()
        names.clear()


def figures_of(tmp_path, held_out: dict[str, Passes], *, is_exact: bool = True, **changes) -> AblationFigures:
    """Figures of the arms ``frozen`` and ``tail``; the changes apply to ``tail``."""
    comparison = compared(tmp_path, ("frozen", "tail"), is_exact=is_exact, **changes)
    return AblationFigures(comparison, held_out)


@pytest.mark.parametrize(
    ("tail_passes", "said"),
    [
        ((10, 11, 9, 10), ("4.000 on held-out prompts, the frozen one 2.000: +100.0 %", "beats the frozen drafter")),
        ((40, 41, 39, 40), ("-50.0 %", "is behind the frozen drafter")),
        ((20, 30, 10, 21), ("does not differ, beyond the noise, from the frozen",)),
    ],
)
def test_the_verdict_follows_the_figures(tmp_path, tail_passes, said):
    held_out = {"frozen": Passes((40,) * 4, (20, 22, 18, 20)), "tail": Passes((40,) * 4, tail_passes)}
    figures = figures_of(tmp_path, held_out)
    assert all(part in figures.verdict() for part in said), figures.verdict()
    study.write_figures(figures)
    tree = json.loads((figures.comparison.folder / "figures.json").read_text())
    assert tree["verdict"] == figures.verdict() and tree["held_out"]["frozen"]["accept_length"] == 2.0
    table = (figures.comparison.folder / "table.md").read_text().splitlines()
    assert table[0] == "|  | frozen | tail |"
    assert table[2] == f"| held-out accept length | 2.000 | {160 / sum(tail_passes):.3f} |"
    assert AblationFigures(figures.comparison, {}).verdict() == ""


@pytest.mark.parametrize(
    ("tail", "ahead", "said"),
    [
        ([2.0, 4.0, 4.0, 5.0], [1.0, 2.1, 1.9, 2.0], "gains more than training in the tail: tail takes 2.05 times as"),
        ([3.0] * 5, [4.0] * 5, "gains less than training in the tail: tail takes 0.75 times as"),
        ([2.0, 3.0, 4.0, 3.0], [2.1, 2.9, 3.9, 3.1], "does not clearly differ from training in the tail"),
        ([2.0], [1.0], "2.00 times as long as ahead (median of the steps' ratios, noise unknown; "),
    ],
)
def test_the_verdict_says_which_use_of_the_tail_gains_more(tmp_path, tail, ahead, said):
    for name, seconds in (("tail", tail), ("ahead", ahead)):
        write_run(tmp_path / name, len(seconds), seconds)
    comparison = read_comparison(CONFIG, tmp_path, len(tail), 2, dict.fromkeys(("tail", "ahead"), "same"))
    verdict = AblationFigures(comparison, {}).verdict()
    assert said in verdict and "the same work, took 1.00 times as long" in verdict


@pytest.mark.parametrize(
    ("is_exact", "said"), [(False, "as they may without batch_invariant"), (True, "which should be equal")]
)
def test_texts_that_differ_are_an_error_only_with_the_is_exact(tmp_path, is_exact, said):
    held_out = {"frozen": Passes((40, 40), (20, 22)), "tail": Passes((40, 47), (10, 12))}
    figures = figures_of(tmp_path, held_out, is_exact=is_exact, token=6, digest="other")
    assert figures.arms_equal_as_promised is not is_exact
    assert figures.verdict().startswith(f"The arms differ in tokens, policy, held-out texts, {said}.")
    assert "3.955 on held-out prompts, the frozen one 1.905: +107.6 % (±" in figures.verdict()


def test_the_error_of_a_gain_is_its_spread_over_repetitions():
    source = random.Random(0)

    def draw(accept_length: float) -> Passes:
        passes = [source.randint(10, 60) for _ in range(60)]
        return Passes(tuple(round(p * source.gauss(accept_length, 0.4)) for p in passes), tuple(passes))

    gains = [accept_length_gain(draw(3.0), draw(2.0)) for _ in range(400)]
    shares, errors = [gain.share for gain in gains], [gain.error for gain in gains]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.01)
    assert np.mean(errors) == pytest.approx(np.std(shares), rel=0.1)
    gain = accept_length_gain(Passes((8,), (2,)), Passes((8,), (4,)))
    assert gain.share == 1.0 and math.isnan(gain.error) and gain.verb.startswith("does not differ")


SMALL = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=120", "run.ranks=2",
    "warmup.responses=40",
]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ci
def test_an_ablation_on_two_ranks(tmp_path):
    """One prompt is held out, so that a rank has none to measure with."""
    asked = ["--steps", "2", "--arms", "frozen,tail,ahead", f"run.folder={tmp_path}", *SMALL]
    done = python("-m", "tlt_hpc", "ablate", TINY, *asked, timeout=240)
    assert "tokens equal: yes (0 mismatched); rewards equal: yes; final policy weights equal: yes" in done.stdout
    assert "Training in the tail" in done.stdout and "In rollout seconds draft-ahead" in done.stdout
    tree = json.loads((tmp_path / "tiny-ablate" / "figures.json").read_text())
    assert tree["runs"]["tail"]["drafter_steps"] > 0 == tree["runs"]["frozen"]["drafter_steps"]
    assert tree["held_out"]["tail"]["tokens"] == tree["held_out"]["frozen"]["tokens"]
    assert tree["held_out"]["ahead"] == tree["held_out"]["frozen"], "the same drafter"
    assert all(found["accept_length"] > 3 for found in tree["held_out"].values())
