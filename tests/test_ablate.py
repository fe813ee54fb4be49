"""tlt ablate: what its arms are, what it reads out of their logs, and that it goes on where it was killed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launch_ranks import run_on_ranks
from logged import step_record

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import FinishReason, MicroStepRecord, Rollout, SampleKey
from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.drafting.schedule import DraftCounts
from tlt_hpc.drafting.tail import IN_TAIL
from tlt_hpc.mpi.world import World
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import read_step, write_step
from tlt_hpc.storage.step_lines import read_lines
from tlt_hpc.studies.ablate import ablate as ablate_module
from tlt_hpc.studies.ablate import held_out
from tlt_hpc.studies.ablate.ablate import Stopped, ablate
from tlt_hpc.studies.ablate.ablate_options import ARMS, AblateOptions
from tlt_hpc.studies.ablate.arms import config_of, possible_arms
from tlt_hpc.studies.ablate.figures import ArmFigures, Figures, StepFigures, read_figures, to_tree, verdict
from tlt_hpc.studies.ablate.plan import Ablation, digest_of, mark_done, plan_ablation, write_plan
from tlt_hpc.studies.ablate.plot import plot, rolling_median
from tlt_hpc.studies.ablate.serial import ControlTraining, SerialTraining
from tlt_hpc.studies.ablate.statistics import Passes, gain_in_passes, ratio
from tlt_hpc.studies.ablate.table import cells_of, to_markdown
from tlt_hpc.studies.ablate.write import write_report
from tlt_hpc.train import RunResult

ROOT = Path(__file__).parent.parent
TINY = ROOT / "jobs" / "tiny.toml"
NOTHING_ASKED = AblateOptions(None, None, None, None, None, None)


def job(*overrides: str):
    return load_config(TINY, overrides)


def plan(folder: Path, *overrides: str, ranks: int = 1, **asked) -> Ablation:
    return plan_ablation(job(f"run.folder={folder}", *overrides), replace(NOTHING_ASKED, **asked), ranks)


# -- arms -----------------------------------------------------------------------------------------------------------


def test_arms_differ_in_what_they_are_named_after_and_in_nothing_else(tmp_path):
    config = job("drafter.schedule=falling")
    changed = {}
    for arm in ARMS:
        ours, theirs = config_of(config, arm, 7, tmp_path, "elsewhere").model_dump(), config.model_dump()
        changed[arm] = {
            f"{section}.{name}": value
            for section, values in ours.items()
            for name, value in values.items()
            if value != theirs[section][name]
        }
        # a replay would leave out the drafter's updates, which are what is compared
        place = {"run.name": arm, "run.folder": str(tmp_path), "run.num_steps": 7, "checkpoint.replay": False}
        assert {name: changed[arm].pop(name) for name in place} == place
    frozen = {"drafter.train": False, "drafter.schedule": "always"}
    control = {
        "drafter.schedule": "always",
    }  # fmt: skip
    assert changed == {
        "plain": {"speculation.mode": "plain"},
        "ngram": {"speculation.mode": "ngram"},
        "frozen": frozen,
        "frozen-tv": frozen | {"drafter.init": "elsewhere"},
        "serial": {},
        "tail": {},
        "control": control,
        "tail-random": {"drafter.init": "random"},
    }


def test_the_control_keeps_its_first_step_with_the_run(tmp_path):
    config = job("drafter.cache_folder=/local")
    assert config_of(config, "control", 7, tmp_path, "elsewhere").drafter.cache_folder == ""
    assert config_of(config, "tail", 7, tmp_path, "elsewhere").drafter.cache_folder == "/local"


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
        (["--arms", "frozen,control"], "control repeats the tail's updates on other rollouts; add tail"),
        (["--arms", "frozen", "drafter.init=random"], "leaves nothing to freeze; run tlt warmup"),
        (["--arms", "tail", 'speculation.strategies=["ngram-4"]'], "no strategy of the job asks a learned drafter"),
        (["--steps", "0"], "--steps 0 compares nothing"),
        (["--plot", "picture.pdf"], "give a name that ends in .png"),
        (["--json", "nowhere/figures.json"], "its folder does not exist"),
        (["--resume", "nowhere"], "no plan.json there"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, said):
    assert main(["ablate", str(TINY), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_dry_run_names_the_arms_and_writes_nothing(capsys, tmp_path):
    assert main(["ablate", str(TINY), "--steps", "4", "--dry-run", f"run.folder={tmp_path}"]) == 0
    assert "4 steps of each arm on 2 ranks" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# -- plan and resume ------------------------------------------------------------------------------------------------


def test_a_resumed_ablation_may_grow_but_not_change(tmp_path):
    begun = plan(tmp_path, num_steps=4, arms=("plain", "tail"))
    write_plan(begun)
    assert plan(tmp_path, resume=begun.folder) == begun
    grown = plan(tmp_path, resume=begun.folder, num_steps=6, arms=("frozen",))
    assert (grown.num_steps, grown.arms) == (6, ("plain", "frozen", "tail"))
    mark_done(begun, "plain", "abc")
    assert digest_of(begun, "plain") == "abc"
    assert digest_of(grown, "plain") is None, "it has not taken the new steps yet"
    for changes, said in (
        ({"num_steps": 3}, "has arms of 4 steps"),
        ({"ranks": 2}, "begun on 1 rank, now 2"),
        ({"tv_drafter": "other"}, "was begun without it"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan(tmp_path, resume=begun.folder, **changes)
    with pytest.raises(ConfigError, match=r"begun with drafter.micro_step_seconds = 0.03, now 0.1"):
        plan(tmp_path, "drafter.micro_step_seconds=0.1", resume=begun.folder)


class Screens:
    """Shows nothing, keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def run(self):
        return nullcontext()

    warmup = run

    def say(self, text: str) -> None:
        self.said.append(text)


class FakeRuns:
    """Stands for ``run``: leaves a small log, and may be stopped in one arm."""

    def __init__(self, stops_in: str = "") -> None:
        self.names: list[str] = []
        self._stops_in = stops_in

    def __call__(self, config, world, reporter, training) -> RunResult:
        assert training is IN_TAIL, "none of these arms is trained otherwise"
        name = config.run.name
        self.names.append(name)
        if name == self._stops_in:
            return RunResult(0, 1, False, "", "SIGTERM")
        write_run(config.folder, num_steps=config.run.num_steps)
        return RunResult(0, config.run.num_steps, True, "same", "")


def test_arms_run_in_order_and_a_second_start_does_only_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_module, "measure", lambda ablation, world: {})
    world, ablation = World.connect(), plan(tmp_path, num_steps=2, arms=("plain", "frozen", "tail"))
    first = FakeRuns(stops_in="frozen")
    monkeypatch.setattr(ablate_module, "run", first)
    assert isinstance(ablate(ablation, world, Screens()), Stopped)
    assert first.names == ["first-start-not-counted", "plain", "frozen"]
    assert not (ablation.folder / "first-start-not-counted").exists()
    for wanted in (["first-start-not-counted", "frozen", "tail"], []):
        monkeypatch.setattr(ablate_module, "run", again := FakeRuns())
        figures = ablate(plan(tmp_path, resume=ablation.folder), world, Screens())
        assert again.names == wanted
        assert isinstance(figures, Figures)
        assert figures.all_equal


def test_a_drafter_that_does_not_fit_is_found_before_any_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_module, "run", runs := FakeRuns())
    ablation = plan(tmp_path, num_steps=1, tv_drafter=str(tmp_path / "none"))
    with pytest.raises(UserError, match="--tv-drafter"):
        ablate(ablation, World.connect(), Screens())
    assert not runs.names
    assert not ablation.folder.exists()


# -- figures --------------------------------------------------------------------------------------------------------


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
        row = {
            "training/global_step": step,
            "rollout/seconds": seconds,
            "timing_s/drafter": 1.0,
            "timing_s/update_actor": 2.0,
            "timing_s/step": seconds + 3,
            "rollout/idle_rank_seconds": 1.0,
            "rollout/harvested_rank_seconds": 0.2,
            "drafter/steps": 2.0,
            "perf/total_num_tokens": 4.0,
            "drafter/spec_decode/mean_acceptance_length": 2.0,
            "critic/score/mean": reward,
            **DraftCounts((100.0, 50.0, 0.0, 0.0), (50.0, 25.0 * (1 + step), 0.0, 0.0)).to_metrics(),
        }
        lines.append(json.dumps(row))
    folder.metrics.write_text("\n".join(lines) + "\n")


def fabricated(tmp_path: Path, *, digest: str = "same", **changes) -> Figures:
    """Plain and tail, of which the tail has the changes."""
    ablation = plan(tmp_path, num_steps=2, arms=("plain", "tail"))
    write_run(ablation.folder / "plain", num_steps=2, seconds=8.0)
    write_run(ablation.folder / "tail", num_steps=2, **changes)
    for arm, found in (("plain", "same"), ("tail", digest)):
        mark_done(ablation, arm, found)
    return read_figures(ablation, {"tail": Passes((4, 8), (2, 2))})


def test_figures_are_the_logs(tmp_path):
    figures = fabricated(tmp_path)
    tail = figures.find("tail")
    assert figures.all_equal
    assert (figures.window, tail.total("num_updates"), tail.num_trained_tokens) == (1, 4, 220)
    # chances by position: 1/2, then 1/2 in the first step and 1 in the last; deeper ones are like the one before
    assert figures.first(tail) == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16)
    assert figures.last(tail) == pytest.approx(1 + 4 / 2)
    assert tail.accept_length == 2.0
    assert figures.speedup(tail) == 2.0
    assert figures.speedup(tail, with_serial=True) == 1.6
    rows = {row[0]: row[1:] for row in cells_of(figures)}
    assert rows[""] == ["plain", "tail"]
    assert rows["held-out accept length"] == ["-", "3.000"]
    assert rows["serial training seconds"] == ["2.00", "2.00"]
    head = "|  | plain | tail |\n| --- | --: | --: |\n| held-out accept length | - | 3.000 |\n"
    assert to_markdown(figures).startswith(head)


@pytest.mark.parametrize(
    ("change", "unequal"),
    [({"token": 6}, "tokens"), ({"reward": 0.0}, "rewards"), ({"digest": "other"}, "policy")],
)
def test_one_difference_is_seen_and_written(tmp_path, change, unequal):
    figures = fabricated(tmp_path, **change)
    assert not figures.all_equal
    write_report(figures, tmp_path / "copy.json", tmp_path / "copy.png")
    tree = json.loads((tmp_path / "copy.json").read_text())
    assert [name for name, equal in tree["equal"].items() if not equal] == [unequal]
    assert tree["arms"]["tail"]["mismatched_tokens"] == (2 if unequal == "tokens" else 0)
    assert (tmp_path / "copy.svg").stat().st_size > 1000
    assert json.loads((figures.folder / "figures.json").read_text()) == tree


def arm_figures(name: str, seconds: list[float], passes: list[int], update: float = 3.0) -> ArmFigures:
    counts = DraftCounts((10.0,) * 4, (5.0,) * 4)
    steps = tuple(StepFigures(s, 0.0, update, s, 0.0, 0.0, 0, 10, 5.0, 1.0, counts) for s in seconds)
    return ArmFigures(name, steps, "same", 0, True, 0, Passes((40,) * len(passes), tuple(passes)))


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
    control = arm_figures("control", [4.0] * 9, [16, 16, 16, 16])
    figures = Figures(tmp_path, 2, True, (frozen, arm_figures("tail", tail_seconds, tail_passes), control))
    text = verdict(figures)
    assert all(part in text for part in said), text
    assert "come to 2.500" in text
    assert verdict(replace(figures, arms=(frozen,))) == ""


def test_speeds_are_not_compared_where_equal_updates_took_other_seconds(tmp_path):
    frozen = arm_figures("frozen", [4.0] * 9, [20, 22, 18, 20])
    tail = arm_figures("tail", [8.0] * 9, [20, 22, 18, 20], update=3.5)
    text = verdict(Figures(tmp_path, 2, True, (frozen, tail)))
    assert "equal policy updates took 10.5 s beside the tail and 9.0 s beside the frozen drafter." in text
    assert "speed." not in text and "its rollouts" not in text


def test_the_error_of_a_ratio_is_its_spread_over_repetitions():
    source = random.Random(0)

    def draw() -> tuple[list[float], list[float]]:
        sizes = [source.uniform(1, 5) for _ in range(60)]
        return [2 * s + source.gauss(0, 0.4) for s in sizes], [s + source.gauss(0, 0.3) for s in sizes]

    gains = [ratio(*draw()) for _ in range(400)]
    assert np.mean([gain.share for gain in gains]) == pytest.approx(1.0, abs=0.01)
    assert np.mean([gain.error for gain in gains]) == pytest.approx(np.std([gain.share for gain in gains]), rel=0.1)
    assert 0.9 < np.mean([abs(gain.share - 1.0) < 2 * gain.error for gain in gains]) < 0.99


def test_gains_need_two_pairs_for_an_error():
    gain = gain_in_passes(Passes((8,), (2,)), Passes((8,), (4,)))
    assert gain.share == 1.0
    assert math.isnan(gain.error)
    assert not gain.is_clear


def test_the_error_of_a_gain_between_texts_is_its_spread_over_repetitions():
    source = random.Random(1)

    def draw(accept_length: float) -> Passes:
        passes = [source.randint(10, 60) for _ in range(60)]
        return Passes(tuple(round(p * source.gauss(accept_length, 0.4)) for p in passes), tuple(passes))

    gains = [gain_in_passes(draw(3.0), draw(2.0)) for _ in range(400)]
    assert np.mean([gain.share for gain in gains]) == pytest.approx(0.5, abs=0.01)
    assert np.mean([gain.error for gain in gains]) == pytest.approx(np.std([gain.share for gain in gains]), rel=0.1)


@pytest.mark.parametrize(
    ("tie_guard", "said"), [(False, "as they may with the tie guard off"), (True, "although the tie guard is on")]
)
def test_texts_that_differ_are_said_and_an_error_only_where_the_guard_promised_none(tmp_path, tie_guard, said):
    frozen, tail = arm_figures("frozen", [4.0] * 3, [20, 22]), arm_figures("tail", [2.0] * 3, [10, 11])
    tail = replace(tail, policy_sha256="other", num_mismatched=7, held_out=Passes((40, 47), (10, 12)))
    figures = Figures(tmp_path, 2, tie_guard, (frozen, tail))
    assert figures.as_promised is not tie_guard
    text = verdict(figures)
    assert text.startswith(f"The arms differ in texts, final policies, held-out texts, {said}; their seconds are")
    assert "accept lengths are compared unpaired" in text
    assert "3.955 on held-out prompts, the frozen one 1.905: +107.6 % (±" in text
    assert "| tokens unlike the first arm's | 0 | 7 |" in to_markdown(figures)
    assert to_markdown(figures).endswith(f"{text}\n")
    assert figures.equal == {"tokens": False, "rewards": True, "policy": False, "held_out": False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_drafter_is_judged_with_its_own_policy_and_the_runs_guard(tmp_path, monkeypatch, dtype):
    ablation = plan(tmp_path, f"model.dtype={dtype}", num_steps=2, arms=("plain", "frozen", "serial", "tail"))
    for arm, digest in (("frozen", "a"), ("serial", "a"), ("tail", "b")):
        (ablation.folder / arm).mkdir(parents=True)
        mark_done(ablation, arm, digest)
    loaded, guards = [], []
    monkeypatch.setattr(held_out, "load_policy", lambda ablation, arm, decoder, node: loaded.append(arm))
    monkeypatch.setattr(held_out, "answer", lambda *given: guards.append(given[3].tie_guard) or [])
    assert set(held_out.measure(ablation, World.connect())) == {"frozen", "serial", "tail"}
    assert loaded == ["frozen", "tail"], "the same weights are read once"
    assert guards == [dtype == "float32"] * 3


def test_the_picture_skips_what_an_arm_has_not(tmp_path):
    figures = fabricated(tmp_path)
    tree = to_tree(figures)
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
    asked = ["--steps", "2", "--arms", "frozen,tail,control"]
    return [sys.executable, "-m", "tlt_hpc", "ablate", str(TINY), *asked, f"run.folder={folder}", *SMALL, *extra]


@pytest.mark.mpi
@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_text_and_as_many_updates_on_old_rollouts(tmp_path):
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(command_line(tmp_path), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    wait_for(tmp_path, "*/tail/config.toml", process)
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
    assert num_micro_steps(folder / "control") == num_micro_steps(folder / "tail")
    tree = json.loads((folder / "figures.json").read_text())
    assert tree["arms"]["control"]["num_updates"] == tree["arms"]["tail"]["num_updates"] > 0
    assert tree["arms"]["frozen"]["num_updates"] == 0
    assert len({tuple(arm["held_out"]["tokens"]) for arm in tree["arms"].values()}) == 1, "one text for all drafters"
    assert all(arm["held_out_accept_length"] > 3 for arm in tree["arms"].values())


def num_micro_steps(run: Path) -> list[int]:
    """By step and rank."""
    return [len(read_step(RunFolder(run).rollout_log(step, rank)).micro_steps) for step in (0, 1) for rank in (0, 1)]


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while not list(folder.glob(pattern)):
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline, f"no {pattern} in {folder}"
        time.sleep(0.02)


def train_serially(folder: str, num_steps: int, tail: str) -> str:
    """Steps of a run whose drafter is trained after the rollout, as much as the run ``tail`` took; the policy."""
    from test_resume import Silent

    from tlt_hpc.rl.distributed import leave_process_group
    from tlt_hpc.train import run

    training = ControlTraining(Path(tail)) if tail else SerialTraining(micro_steps=3)
    config = load_config(
        TINY, [*SMALL, f"run.folder={folder}", f"run.num_steps={num_steps}", "checkpoint.replay=false"]
    )
    result = run(config, World.connect(), Silent(), training=training)
    leave_process_group()
    return result.policy_sha256


@pytest.mark.mpi
@pytest.mark.slow
def test_serial_training_is_after_the_rollout_and_the_control_repeats_it_on_the_first_step(tmp_path):
    digests = run_on_ranks(2, train_serially, str(tmp_path / "serial"), 2, "")
    serial = tmp_path / "serial" / "tiny"
    assert num_micro_steps(serial) == [3, 3, 3, 3]
    for step, row in read_lines(serial / "metrics.jsonl").items():
        assert row["rollout/harvested_rank_seconds"] == 0 < row["drafter/serial_rank_seconds"]
        for rank in (0, 1):
            record = read_step(RunFolder(serial).rollout_log(step, rank))
            assert all(m.start_seconds >= record.timing.release_seconds for m in record.micro_steps)
    control = tmp_path / "control" / "tiny"
    for num_steps in (1, 2):  # resumed in between
        repeated = run_on_ranks(2, train_serially, str(tmp_path / "control"), num_steps, str(serial))
    assert num_micro_steps(control) == num_micro_steps(serial) and repeated == digests
    assert sorted(path.name for path in (control / "first").iterdir()) == ["rank-0000.h5", "rank-0001.h5"]
    assert not (serial / "first").exists()
