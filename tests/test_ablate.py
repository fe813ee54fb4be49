"""tlt ablate: what its arms are, what it reads from their logs, and that it can be resumed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from logged import step_record

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import FinishReason, MicroStepRecord, Rollout, SampleKey
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.drafting.schedule import DraftCounts
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step, write_step
from tlt_hpc.studies.ablate import ablate as ablate_module
from tlt_hpc.studies.ablate.ablate import StoppedAblation, ablate
from tlt_hpc.studies.ablate.figures import (
    AblationFigures,
    ArmFigures,
    cells_of,
    read_figures,
    to_markdown,
    to_tree,
    verdict,
    write_report,
)
from tlt_hpc.studies.ablate.gains import Passes, gain_in_passes, ratio
from tlt_hpc.studies.ablate.plan import (
    ARMS,
    Ablation,
    digest_of,
    mark_done,
    plan_ablation,
    possible_arms,
    write_plan,
)
from tlt_hpc.studies.ablate.plot import plot, rolling_median
from tlt_hpc.train import RunResult

ROOT = Path(__file__).parent.parent
TINY = ROOT / "jobs" / "tiny.toml"


def job(*overrides: str):
    return load_config(TINY, overrides)


def plan(folder: Path, *overrides: str, ranks: int = 1, **asked) -> Ablation:
    options = Namespace(**{"steps": None, "arms": None, "resume": None, **asked})
    return plan_ablation(job(f"run.folder={folder}", *overrides), options, ranks)


# -- arms -----------------------------------------------------------------------------------------------------------


def test_arms_differ_in_what_they_are_named_after_and_in_nothing_else(tmp_path):
    config = job("drafter.schedule=falling")
    changed = {}
    for arm in ARMS:
        ours, theirs = Ablation(tmp_path, config, ARMS, 7, 1).config_of(arm).model_dump(), config.model_dump()
        changed[arm] = {
            f"{section}.{name}": value
            for section, values in ours.items()
            for name, value in values.items()
            if value != theirs[section][name]
        }
        # a replay would leave out the drafter's updates, which are what is compared
        place = {"run.name": arm, "run.folder": str(tmp_path), "run.num_steps": 7, "checkpoint.replay": False}
        assert {name: changed[arm].pop(name) for name in place} == place
    assert changed == {
        "plain": {"speculation.mode": "plain"},
        "ngram": {"speculation.mode": "ngram"},
        "frozen": {"drafter.train": False, "drafter.schedule": "always"},
        "tail": {},
        "tail-random": {"drafter.init": "random"},
    }


@pytest.mark.parametrize(
    ("override", "missing"),
    [
        ("run.seed=0", {"tail-random"}),
        ("drafter.init=random", {"tail-random", "frozen"}),
        ('speculation.strategies=["drafter-4"]', {"tail-random", "ngram"}),
        ('speculation.strategies=["ngram-4"]', set(ARMS) - {"plain", "ngram"}),
    ],
)
def test_arms_by_default_are_those_that_show_something(override, missing):
    assert set(ARMS) - set(possible_arms(job(override))) == missing


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "plain,tial"], "no arm 'tial'; use plain, ngram"),
        (["--arms", "frozen", "drafter.init=random"], "leaves nothing to freeze; run tlt warmup"),
        (["--arms", "tail", 'speculation.strategies=["ngram-4"]'], "no strategy of the job asks a learned drafter"),
        (["--steps", "0"], "--steps 0 compares nothing"),
        (["--resume", "nowhere"], "no plan.json there"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, said):
    assert main(["ablate", str(TINY), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_dry_run_names_the_arms_and_writes_nothing(capsys, tmp_path):
    assert main(["ablate", str(TINY), "--steps", "4", "--dry-run", f"run.folder={tmp_path}"]) == 0
    assert "4 steps of each arm on 2 ranks" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# -- plan and resume ------------------------------------------------------------------------------------------------


def test_a_resumed_ablation_may_grow_but_not_change(tmp_path):
    begun = plan(tmp_path, steps=4, arms="tail,plain")
    assert begun.arms == ("plain", "tail")
    write_plan(begun)
    assert plan(tmp_path, resume=begun.folder) == begun
    grown = plan(tmp_path, resume=begun.folder, steps=6, arms="frozen")
    assert (grown.num_steps, grown.arms) == (6, ("plain", "frozen", "tail"))
    mark_done(begun, "plain", "abc")
    assert digest_of(begun, "plain") == "abc"
    assert digest_of(grown, "plain") is None, "it has not taken the new steps yet"
    for changes, said in (({"steps": 3}, "has arms of 4 steps"), ({"ranks": 2}, "begun on 1 rank, now 2")):
        with pytest.raises(ConfigError, match=said):
            plan(tmp_path, resume=begun.folder, **changes)
    with pytest.raises(ConfigError, match=r"begun with drafter.micro_step_seconds = 0.03, now 0.1"):
        plan(tmp_path, "drafter.micro_step_seconds=0.1", resume=begun.folder)
    old = json.loads((begun.folder / "plan.json").read_text())
    (begun.folder / "plan.json").write_text(json.dumps({**old, "arms": ["plain", "control"], "tv_drafter": ""}))
    with pytest.raises(UserError, match="this version has no arm 'control'"):
        plan(tmp_path, resume=begun.folder)


class FakeRuns:
    """Stands for ``run``: leaves a small log, and may be stopped in one arm."""

    def __init__(self, stops_in: str = "") -> None:
        self.names: list[str] = []
        self._stops_in = stops_in

    def __call__(self, config, world, reporter) -> RunResult:
        name = config.run.name
        self.names.append(name)
        if name == self._stops_in:
            return RunResult(0, 1, False, "", "SIGTERM")
        write_run(config.folder, num_steps=config.run.num_steps)
        return RunResult(0, config.run.num_steps, True, "same", "")


def test_arms_run_in_order_and_a_second_start_does_only_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_module, "measure", lambda ablation, world: {})
    world, ablation = World.connect(), plan(tmp_path, steps=2, arms="plain,frozen,tail")
    first = FakeRuns(stops_in="frozen")
    monkeypatch.setattr(ablate_module, "run", first)
    assert isinstance(ablate(ablation, world, nullcontext), StoppedAblation)
    assert first.names == ["first-start-not-counted", "plain", "frozen"]
    assert not (ablation.folder / "first-start-not-counted").exists()
    for wanted in (["first-start-not-counted", "frozen", "tail"], []):
        monkeypatch.setattr(ablate_module, "run", again := FakeRuns())
        figures = ablate(plan(tmp_path, resume=ablation.folder), world, nullcontext)
        assert again.names == wanted
        assert isinstance(figures, AblationFigures) and all(figures.equal.values())


def test_a_drafter_that_does_not_fit_is_found_before_any_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_module, "run", runs := FakeRuns())
    ablation = plan(tmp_path, f"drafter.init={tmp_path / 'none'}", steps=1)
    with pytest.raises(UserError, match=r"drafter\.init"):
        ablate(ablation, World.connect(), nullcontext)
    assert not runs.names and not ablation.folder.exists()


# -- figures --------------------------------------------------------------------------------------------------------


def line_of(step: int, seconds: float, reward: float = 1.0, update: float = 2.0) -> dict[str, float]:
    return {
        "training/global_step": step,
        "rollout/seconds": seconds,
        "timing_s/update_actor": update,
        "timing_s/step": seconds + 3,
        "rollout/idle_rank_seconds": 1.0,
        "rollout/harvested_rank_seconds": 0.2,
        "drafter/steps": 2.0,
        "perf/total_num_tokens": 4.0,
        "drafter/spec_decode/mean_acceptance_length": 2.0,
        "critic/score/mean": reward,
        **DraftCounts((100.0, 50.0, 0.0, 0.0), (50.0, 25.0 * (1 + step), 0.0, 0.0)).to_metrics(),
    }


def write_run(path: Path, *, num_steps: int = 1, seconds: float = 4.0, token: int = 7, reward: float = 1.0) -> None:
    folder, lines = RunFolder(path), []
    folder.create()
    for step in range(num_steps):
        rollout = Rollout(
            key=SampleKey(0, 0, step, 0, 0),
            prompt_tokens=np.array([4, 5], np.int32),
            response_tokens=np.array([token, 8, 9, 1], np.int32),
            log_probs=np.zeros(4, np.float32),
            finish_reason=FinishReason.EOS,
            weight_version=0,
            num_target_passes=2,
            finished_seconds=0.0,
        )
        updates = (MicroStepRecord(3.0, 3.1, 50, 0.5), MicroStepRecord(3.1, 3.2, 60, 0.4))
        record = step_record(step, [rollout], [reward], micro_steps=updates, harvested_seconds=0.2)
        write_step(folder.rollout_log(step, 0), record)
        lines.append(json.dumps(line_of(step, seconds, reward)))
    folder.metrics.write_text("\n".join(lines) + "\n")


def fabricated(tmp_path: Path, *, digest: str = "same", **changes) -> AblationFigures:
    """Plain and tail, of which the tail has the changes."""
    ablation = plan(tmp_path, steps=2, arms="plain,tail")
    write_run(ablation.folder / "plain", num_steps=2, seconds=8.0)
    write_run(ablation.folder / "tail", num_steps=2, **changes)
    for arm, found in (("plain", "same"), ("tail", digest)):
        mark_done(ablation, arm, found)
    return read_figures(ablation, {"tail": Passes((4, 8), (2, 2))})


def test_figures_are_the_logs(tmp_path):
    figures = fabricated(tmp_path)
    tail = figures.find("tail")
    assert all(figures.equal.values())
    assert (figures.window, tail.total("num_updates"), tail.num_trained_tokens) == (1, 4, 220)
    # chances by position: 1/2, then 1/2 in the first step and 1 in the last; deeper ones are like the one before
    assert figures.first(tail) == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16)
    assert figures.last(tail) == pytest.approx(1 + 4 / 2)
    assert (tail.accept_length, figures.speedup(tail)) == (2.0, 2.0)
    rows = {row[0]: row[1:] for row in cells_of(figures)}
    assert rows[""] == ["plain", "tail"]
    assert rows["held-out accept length"] == ["-", "3.000"]
    head = "|  | plain | tail |\n| --- | --: | --: |\n| held-out accept length | - | 3.000 |\n"
    assert to_markdown(figures).startswith(head)


@pytest.mark.parametrize(
    ("change", "unequal"),
    [({"token": 6}, "tokens"), ({"reward": 0.0}, "rewards"), ({"digest": "other"}, "policy")],
)
def test_one_difference_is_seen_and_written(tmp_path, change, unequal):
    figures = fabricated(tmp_path, **change)
    names = [path.name for path in write_report(figures)]
    assert names == ["figures.json", "table.md", "ablation.png", "ablation.svg"]
    tree = json.loads((figures.folder / "figures.json").read_text())
    assert [name for name, equal in tree["equal"].items() if not equal] == [unequal]
    assert tree["arms"]["tail"]["mismatched_tokens"] == (2 if unequal == "tokens" else 0)
    assert (figures.folder / "ablation.svg").stat().st_size > 1000


def arm_figures(name: str, seconds: list[float], passes: list[int], update: float = 3.0) -> ArmFigures:
    lines = tuple(line_of(step, value, update=update) for step, value in enumerate(seconds))
    return ArmFigures(name, lines, "same", 0, True, 0, Passes((40,) * len(passes), tuple(passes)))


@pytest.mark.parametrize(
    ("tail_passes", "tail_seconds", "said"),
    [
        ([10, 11, 9, 10], [2.0, 2.1, 1.9] * 3, ("+100.0 %", "beats the frozen drafter in accept", "beats it in speed")),
        ([40, 41, 39, 40], [9.0, 9.1, 8.9] * 3, ("-50.0 %", "is behind the frozen drafter", "is behind it in speed")),
        ([20, 30, 10, 21], [4.0, 7.0, 1.5] * 3, ("does not differ, beyond the noise, from the frozen", "from it in")),
    ],
)
def test_the_verdict_follows_the_figures(tmp_path, tail_passes, tail_seconds, said):
    frozen = arm_figures("frozen", [4.0, 4.1, 3.9] * 3, [20, 22, 18, 20])
    figures = AblationFigures(tmp_path, 2, True, (frozen, arm_figures("tail", tail_seconds, tail_passes)))
    text = verdict(figures)
    assert all(part in text for part in said), text
    assert verdict(replace(figures, arms=(frozen,))) == ""


def test_speeds_are_not_compared_if_equal_updates_took_other_seconds(tmp_path):
    frozen = arm_figures("frozen", [4.0] * 9, [20, 22, 18, 20])
    tail = arm_figures("tail", [8.0] * 9, [20, 22, 18, 20], update=3.5)
    text = verdict(AblationFigures(tmp_path, 2, True, (frozen, tail)))
    assert "equal policy updates took 10.5 s beside the tail and 9.0 s beside the frozen drafter." in text
    assert "its rollouts" not in text


def paired(source: random.Random) -> tuple[float, float]:
    sizes = [source.uniform(1, 5) for _ in range(60)]
    gain = ratio([2 * s + source.gauss(0, 0.4) for s in sizes], [s + source.gauss(0, 0.3) for s in sizes])
    return gain.share, gain.error


def unpaired(source: random.Random) -> tuple[float, float]:
    def draw(accept_length: float) -> Passes:
        passes = [source.randint(10, 60) for _ in range(60)]
        return Passes(tuple(round(p * source.gauss(accept_length, 0.4)) for p in passes), tuple(passes))

    gain = gain_in_passes(draw(3.0), draw(2.0))
    return gain.share, gain.error


@pytest.mark.parametrize(("draw", "share"), [(paired, 1.0), (unpaired, 0.5)])
def test_the_error_of_a_gain_is_its_spread_over_repetitions(draw, share):
    source = random.Random(0)
    shares, errors = np.array([draw(source) for _ in range(400)]).T
    assert shares.mean() == pytest.approx(share, abs=0.01)
    assert errors.mean() == pytest.approx(shares.std(), rel=0.1)


def test_gains_need_two_pairs_for_an_error():
    gain = gain_in_passes(Passes((8,), (2,)), Passes((8,), (4,)))
    assert gain.share == 1.0 and math.isnan(gain.error) and gain.verb.startswith("does not differ")


@pytest.mark.parametrize(
    ("tie_guard", "said"), [(False, "as they may with the tie guard off"), (True, "although the tie guard is on")]
)
def test_texts_that_differ_are_an_error_only_with_the_tie_guard(tmp_path, tie_guard, said):
    frozen, tail = arm_figures("frozen", [4.0] * 3, [20, 22]), arm_figures("tail", [2.0] * 3, [10, 11])
    tail = replace(tail, policy_sha256="other", num_mismatched=7, held_out=Passes((40, 47), (10, 12)))
    figures = AblationFigures(tmp_path, 2, tie_guard, (frozen, tail))
    assert figures.as_promised is not tie_guard
    text = verdict(figures)
    assert text.startswith(f"The arms differ in texts, final policies, held-out texts, {said}; their seconds are")
    assert "accept lengths are compared unpaired" in text
    assert "3.955 on held-out prompts, the frozen one 1.905: +107.6 % (±" in text
    assert "| tokens unlike the first arm's | 0 | 7 |" in to_markdown(figures)
    assert figures.equal == {"tokens": False, "rewards": True, "policy": False, "held_out": False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_drafter_is_judged_with_its_own_policy_and_the_runs_guard(tmp_path, monkeypatch, dtype):
    ablation = plan(tmp_path, f"model.dtype={dtype}", steps=2, arms="plain,frozen,tail,tail-random")
    for arm, digest in (("frozen", "a"), ("tail", "a"), ("tail-random", "b")):
        (ablation.folder / arm).mkdir(parents=True)
        mark_done(ablation, arm, digest)
    loaded, guards = [], []
    monkeypatch.setattr(ablate_module, "load_policy", lambda ablation, arm, session: loaded.append(arm))
    monkeypatch.setattr(ablate_module, "answer", lambda *given: guards.append(given[1].tie_guard) or [])
    assert set(ablate_module.measure(ablation, World.connect())) == {"frozen", "tail", "tail-random"}
    assert loaded == ["frozen", "tail-random"], "the same weights are read once"
    assert guards == [dtype == "float32"] * 3


def test_the_picture_skips_what_an_arm_has_not(tmp_path):
    tree = to_tree(fabricated(tmp_path))
    for step in tree["arms"]["plain"]["steps"]:
        step["own_accept_length"] = None
    assert [path.suffix for path in plot(tree, tmp_path / "a.png")] == [".png", ".svg"]
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert rolling_median([1, 9, 2, 3, 8], 3) == [5, 2, 3, 3, 5.5]
    assert rolling_median([1, 9], 1) == [1, 9]


# -- the command ----------------------------------------------------------------------------------------------------

SMALL = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=120", "run.ranks=2",
    "warmup.responses=40", "warmup.validation_prompts=8", "speculation.profile_seconds=0.5",
]  # fmt: skip


def command_line(folder: Path, *extra: str) -> list[str]:
    asked = ["--steps", "2", "--arms", "frozen,tail"]
    return [sys.executable, "-m", "tlt_hpc", "ablate", str(TINY), *asked, f"run.folder={folder}", *SMALL, *extra]


@pytest.mark.mpi
@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_text(tmp_path):
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command_line(tmp_path), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        while not list(tmp_path.glob("*/tail/config.toml")):
            assert process.poll() is None, "it ended before"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (folder,) = tmp_path.glob("tiny-ablate-*")
    before = (folder / "frozen" / "metrics.jsonl").stat().st_mtime_ns
    again = command_line(tmp_path, "--resume", str(folder))
    done = subprocess.run(again, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "tokens equal: yes (0 mismatched); rewards equal: yes; final policy weights equal: yes" in done.stdout
    assert "Training in the tail" in done.stdout
    assert (folder / "frozen" / "metrics.jsonl").stat().st_mtime_ns == before
    tree = json.loads((folder / "figures.json").read_text())
    taken = sum(
        len(read_step(RunFolder(folder / "tail").rollout_log(step, rank)).micro_steps)
        for step in (0, 1)
        for rank in (0, 1)
    )
    assert tree["arms"]["tail"]["num_updates"] == taken > 0 == tree["arms"]["frozen"]["num_updates"]
    assert len({tuple(arm["held_out"]["tokens"]) for arm in tree["arms"].values()}) == 1, "one text for all drafters"
    assert all(arm["held_out_accept_length"] > 3 for arm in tree["arms"].values())
