"""The report: the figures and advice computed from hand-made files, and the page, which is one file."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from answers import TINY, mistake
from small_run import set_lines, small_record, small_run

from tlt_hpc.cli.display import print_result
from tlt_hpc.cli.main import main
from tlt_hpc.common.records import Rollout, RolloutTiming
from tlt_hpc.config import load_config
from tlt_hpc.extras.report.figures.style import THEMES
from tlt_hpc.extras.report.findings import read_findings, typical_step
from tlt_hpc.extras.report.page import render
from tlt_hpc.extras.report.verdict import KeyFigure, RunGain, gain_of, key_figures
from tlt_hpc.look.cost import Cost, cost_of
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.look.series import paired_ratio
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step
from tlt_hpc.storage.step_lines import add_line, drop_lines, read_lines
from tlt_hpc.train import RunResult

CONFIG = """
run.num_steps = 3
model = {path = "models/small", dtype = "float32"}
data.source = "questions.parquet"
algorithm.name = "dapo"
rollout = {max_new_tokens = 100, shard = "group"}
speculation.mode = "full"
"""
START_LINE: dict[str, Any] = {
    "time": "2026-11-22T10:00:00+00:00", "version": "0.1.0", "commit": "", "source": "ab", "python": "3.11",
    "packages": {"torch": "2.13.0"}, "cuda": "", "mpi": "MPICH 5", "threads": "1",
    "command": ["tlt", "train", "jobs/a b.toml"],
}  # fmt: skip
HOST = {"name": "node-7", "num_ranks": 2, "processor": "EPYC", "num_cores": 64, "memory_bytes": 500 * 10**9, "gpus": {}}


def begin(folder: RunFolder, *hosts: dict[str, Any]) -> None:
    """Starts of the run, each on a node with these changes, as Slurm jobs 17, 18, ..."""
    starts = [
        {**START_LINE, "hosts": [{**HOST, **host}], "slurm": {"job": f"{17 + i}"}} for i, host in enumerate(hosts)
    ]
    folder.environment.write_text("".join(json.dumps(start) + "\n" for start in starts))


def make(path: Path, **lines: float) -> RunFolder:
    folder = small_run(path)
    folder.config.write_text(CONFIG)
    set_lines(folder, *[lines] * 3)
    return folder


def make_plain(path: Path, seconds: float = 13.0, num_steps: int = 3) -> RunFolder:
    """The same responses without speculation, with other times."""
    folder = make(path)
    folder.config.write_text(CONFIG.replace('"full"', '"plain"'))
    set_lines(folder, *[{"rollout/seconds": seconds, "timing_s/step": seconds + 3.1}] * num_steps)
    return folder


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Draw figures, which takes seconds, only in the test of the whole page."""
    if "two_themes" not in request.node.name:
        monkeypatch.setattr("tlt_hpc.extras.report.page.inline_svg", lambda *words: "<svg></svg>")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path / "run")


@pytest.fixture
def plain(tmp_path: Path) -> RunFolder:
    """A run with the same responses, of 13 s a rollout and without speculation."""
    return make_plain(tmp_path / "plain")


def cards_of(folder: RunFolder, against: RunFolder | None = None) -> dict[str, KeyFigure]:
    found = read_findings(folder.path, against.path if against else None)
    return {card.label: card for card in key_figures(found, gain_of(found))}


def gain(folder: RunFolder, against: RunFolder) -> RunGain:
    found = gain_of(read_findings(folder.path, against.path))
    assert found is not None
    return found


def advice_of(folder: RunFolder, against: RunFolder | None = None) -> str:
    found = read_findings(folder.path, against.path if against else None)
    page = render(replace(found, timeline=None, comparison=None), gain_of(found), 0.0)
    return html.unescape(page.partition('<ul class="advice">')[2].partition("</ul>")[0])


def test_the_score_on_held_out_data_is_a_card(run: RunFolder) -> None:
    assert "Evaluated" not in cards_of(run)
    name = "val-core/test/acc/mean@4"
    set_lines(run, {}, {name: 0.25}, {}, {name: 0.5, "val-core/test/acc/greedy": 0.9}, {})
    assert cards_of(run)["Evaluated"] == KeyFigure("Evaluated", "0.25 \u2192 0.50", "test, mean@4, after step 2 and 4")
    set_lines(run, {name: 0.25}, {})
    assert cards_of(run)["Evaluated"] == KeyFigure("Evaluated", "0.25", "test, mean@4, after step 1")


def test_cards_are_what_the_files_say(run: RunFolder, plain: RunFolder) -> None:
    """Of 2 x 6.5 rank-seconds 5.0 are idle (4.5 and 0.5), of which 1.8 trained; 13 s without are 2 times as many."""
    told = cards_of(run, plain)
    assert told["Idle"].value == "38 %" and "15.0 s together" in told["Idle"].words
    assert told["Harvested"].value == "36 %" and "6 updates" in told["Harvested"].words
    assert told["Gained"].value == "2.00\u00d7" and told["Gained"].tone == "good"
    assert "(median of 3 steps)" in told["Gained"].words and f"steps: {16.1 / 9.6:.2f}\u00d7" in told["Gained"].words
    what = "token for token, with and without speculation (3 steps compared)"
    assert told["Text"] == KeyFigure("Text", "the same", what, "good")
    assert told["Score"].value == "0.50 \u2192 0.52" and "too few steps" in told["Score"].words
    set_lines(run, *[{"critic/score/mean": 0.0}] * 8)
    assert "within what steps vary by" in cards_of(run)["Score"].words, "a score that never changes, in enough steps"
    run.rollout_log(1, 1).unlink()
    assert cards_of(run)["Harvested"].value == "36 %", "idle and harvested time are of the same steps"


def test_a_gain_is_of_the_steps_that_both_have_timed(tmp_path: Path, run: RunFolder, plain: RunFolder) -> None:
    few = make_plain(tmp_path / "few", seconds=19.5, num_steps=1)
    assert (gain(run, few).speed.rollout, gain(run, few).speed.steps.tolist()) == (3.0, [1])
    set_lines(run, {"rollout/kept_tokens": 9.0, "rollout/seconds": 0.1}, {}, {"rollout/seconds": float("nan")})
    assert (gain(run, plain).speed.rollout, gain(run, plain).speed.steps.tolist()) == (2.0, [2])
    set_lines(run, *[{"rollout/kept_tokens": 9.0}] * 3)
    assert gain_of(read_findings(run.path, plain.path)) is None


def test_only_a_plain_run_of_the_same_job_measures_speculation(
    tmp_path: Path, run: RunFolder, plain: RunFolder
) -> None:
    full = make(tmp_path / "full", **{"rollout/seconds": 13.0})
    told = cards_of(run, full)
    assert "Gained" not in told and told["Against full"].value == "2.00\u00d7" and told["Against full"].tone == "plain"
    assert not gain(make_plain(tmp_path / "a"), make_plain(tmp_path / "b")).is_of_speculation
    text = plain.config.read_text()
    plain.config.write_text(
        text.replace("num_steps = 3", 'num_steps = 9\nrun.name = "other"') + "checkpoint.keep = 9\n"
    )
    assert gain(run, plain).is_of_speculation and not gain(run, plain).unlike
    plain.config.write_text(text.replace("max_new_tokens = 100", "max_new_tokens = 99"))
    assert gain(run, plain).unlike == ("settings besides speculation differ (rollout.max_new_tokens)",)
    plain.config.write_text(text)
    begin(run, {"processor": "Fast"})
    begin(plain, {"processor": "Slow"})
    assert gain(run, plain).unlike == ("it ran on Slow, this on Fast",)
    for rank in range(4):
        write_step(plain.rollout_log(0, rank), small_record(0, rank, 4))
    assert gain(run, plain).unlike[0] == "it ran on 4 ranks, this on 2" and not gain(run, plain).is_of_speculation


@pytest.mark.parametrize(
    ("precision", "value"),
    [
        ("batch_invariant = true", "not compared"),
        ('device = "cpu"', "not compared"),
        ('device = "cuda"', "exact samples"),
    ],
)
def test_what_is_promised_of_the_text_follows_from_the_model(run: RunFolder, precision: str, value: str) -> None:
    run.config.write_text(CONFIG.replace('dtype = "float32"', f'dtype = "bfloat16", {precision}'))
    assert cards_of(run)["Text"].value == value


def test_different_tokens_are_not_the_same_work(run: RunFolder, plain: RunFolder) -> None:
    record = small_record(1, 0)
    changed = Rollout(**{**vars(record.rollouts[0]), "response_tokens": record.rollouts[0].response_tokens + 1})
    write_step(plain.rollout_log(1, 0), small_record(1, 0, rollouts=(changed, *record.rollouts[1:])))
    told = cards_of(run, plain)
    assert cards_of(run)["Text"].value == "not compared"
    assert told["Text"].value == "differs" and told["Text"].tone == "bad" and told["Against plain"].tone == "plain"
    assert "from step 2 on" in told["Text"].words
    assert gain(run, plain).unlike == ("the responses differ, so the work was not the same",)


def test_a_gain_within_its_interval_is_neither_good_nor_bad(tmp_path: Path, run: RunFolder, plain: RunFolder) -> None:
    ours = np.full(8, 1.0)
    assert paired_ratio(ours * 2, ours) == (2.0, 2.0, 2.0)
    assert paired_ratio(ours[:2], ours[:2]) == (1.0, 0.0, float("inf"))
    median, low, high = paired_ratio(np.arange(1.0, 102.0), np.ones(101))
    assert median == 51 and 38 <= low <= 44 and 58 <= high <= 64, "by order statistics: the 41st to the 61st"
    set_lines(plain, *({"rollout/seconds": took, "timing_s/step": 20.0} for took in (3.0, 6.5, 14.0)))
    told, speed = cards_of(run, plain)["Gained"], gain(run, plain).speed
    assert told.value == "1.00\u00d7" and told.tone == "plain"
    assert (round(speed.low, 2), round(speed.high, 2), speed.is_faster) == (0.46, 2.15, None)
    slower = make_plain(tmp_path / "slower", seconds=3.25)
    assert cards_of(run, slower)["Gained"].tone == "bad" and gain(run, slower).speed.is_faster is False
    assert "Speculation does not pay: rollouts take 2.00 times" in advice_of(run, slower)


def test_cost_is_of_all_steps_that_a_line_tells_of(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps of 9.6 s and 21 tokens on two ranks are 57.6 rank-seconds."""
    assert cost_of(RunLog(run.path)) == Cost(pytest.approx(57.6 / 3600), "rank-hours", 0.0, 63)
    config = load_config(TINY, [f"run.folder={run.path.parent}", f"run.name={run.path.name}", "run.num_steps=3"])
    print_result(config, RunResult(first_step=0, num_steps=3, finished=True, policy_sha256="ab" * 32, stop_reason=""))
    first, last = capsys.readouterr().out.splitlines()
    assert first == "cost: 0.016 rank-hours, 3,940 tokens per rank-hour" and last.startswith("finished: 3 steps, ")
    begin(run, *[{"gpus": {"H200": 2}}] * 2)
    set_lines(run, *[{"timing_s/testing": 0.4}] * 3)
    add_line(run.metrics, {**read_lines(run.metrics)[2], "training/global_step": 4.0})
    drop_lines(run.metrics, 3)
    words = "GPU-hours (0.00556 in lost steps), 2,840 tokens per GPU-hour"
    assert cards_of(run)["Cost"] == KeyFigure("Cost", "0.0222", words)
    last_two = cost_of(RunLog(run.path, last=2))
    assert last_two == Cost(pytest.approx(40 / 3600), "GPU-hours", 0.0, 42)
    assert cost_of(RunLog(run.path, until=3)) == cost_of(RunLog(run.path, last=3))


def test_cost_counts_the_ranks_of_each_step(run: RunFolder) -> None:
    """Step 1 ran on four ranks; where starts differ, a step has as many as it has logs."""
    begin(run, {"num_ranks": 2}, {"num_ranks": 4})
    for rank in range(4):
        write_step(run.rollout_log(1, rank), small_record(1, rank, 4))
    cost = cost_of(RunLog(run.path))
    assert cost is not None and cost.hours == pytest.approx(9.6 * (2 + 4 + 2) / 3600)
    shutil.rmtree(run.rollouts)
    run.environment.unlink()
    assert cost_of(RunLog(run.path)) is None and "Cost" not in cards_of(run), "the number of ranks is unknown"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ({"rollout/teaching_share": 0.25}, "25 % of the groups.*algorithm.max_refills"),
        ({"training/rollout_probs_diff_mean": 0.05}, "by 0.050 on average.*rollout_correction"),
        ({"actor/grad_norm": float("nan")}, "grad_norm is not finite from step 1.*before step 1"),
    ],
)
def test_advice_follows_from_metrics(tmp_path: Path, run: RunFolder, lines: dict[str, float], expected: str) -> None:
    assert not re.search(expected, advice_of(run))
    other = make(tmp_path / "other", **lines)
    assert re.search(expected, advice_of(other))
    other.config.write_text(CONFIG.replace('"dapo"', '"reinforce++"'))
    assert "max_refills" not in advice_of(other), "it learns from equal rewards, too"


def test_advice_follows_from_logs_and_settings(run: RunFolder) -> None:
    """38 % waiting is too much, and 36 % of it used too little; a quarter of the responses ended at the cap."""
    advice = advice_of(run)
    assert re.search('38 %.*rollout.shard = "sample"', advice) and re.search("36 %.*micro_step_tokens", advice)
    assert "25 % of the responses were cut" in advice


def test_the_typical_step_is_drawn(run: RunFolder) -> None:
    """The step whose waiting is nearest to the run's mean, not the one with the most or the least."""
    for step, lasts in {0: (6.4, 6.4), 1: (2.0, 6.0), 2: (6.0, 6.0)}.items():
        for rank, last in enumerate(lasts):
            at = small_record(step, rank).timing.start_seconds
            record = small_record(step, rank, timing=RolloutTiming(at, at + last, at + 6.5), micro_steps=())
            write_step(run.rollout_log(step, rank), record)
    found = read_findings(run.path)
    assert typical_step(found.throughput) == 3 and found.timeline is not None and found.timeline.step == 3


# -- the page -------------------------------------------------------------------------------------------------------


def shown_of(text: str) -> str:
    """The visible text of a page."""
    words = re.sub(r"<[^>]+>", " ", re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL))
    return " ".join(html.unescape(words).split())


def report(*arguments: Any) -> int:
    return main(["report", *map(str, arguments)])


def test_a_run_of_a_comparison_is_compared_with_the_plain_one_beside_it(tmp_path: Path) -> None:
    for folder, expected in (("job-compare-20261127-101500", "2.00\u00d7"), ("runs", "not measured")):
        make(tmp_path / folder / "ahead-tail")
        make_plain(tmp_path / folder / "plain")
        assert report(tmp_path / folder / "ahead-tail") == 0 and report(tmp_path / folder / "plain") == 0
        assert expected in shown_of((tmp_path / folder / "ahead-tail" / "report.html").read_text()).lower()


def test_the_page_is_one_file_in_two_themes(run: RunFolder, plain: RunFolder) -> None:
    begin(run, *[{"gpus": {"H200": 2}}] * 2)
    run.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "ab" * 32}))
    run.config.write_text(CONFIG.replace("models/small", "<script>alert(1)</script>"))
    shutil.rmtree(run.rollout_log(2, 0).parent)
    assert report(run.path, "--against", plain.path) == 0
    text = (run.path / "report.html").read_text()
    ids, shown = re.findall(r'\bid="(.*?)"', text), shown_of(text)
    sources = re.findall(r'\b(?:src|href|srcset|data)="(.*?)"', text)
    assert len(ids) == len(set(ids)) > 0 and sources
    assert all(source.startswith("data:") or source[1:] in ids for source in sources), "it loads something"
    assert not re.search(r"@import|<script|url\((?!#)", text)
    assert "http" not in re.sub(r"http://www\.w3\.org/1999/xlink|http-equiv", "", text)
    for words in (
        "<script>alert(1)</script> on questions.parquet with dapo: 3 steps of 3, 63 response tokens, 28.8 s of steps",
        "Only 2 of", "digest is abababababab", "plain took 2.00 times as long in rollouts", "fast is it against plain?",
        "2 ranks on 1 node (64 cores of EPYC, 2 x H200) in Slurm job 18", "jobs/a b.toml", "What to change",
    ):  # fmt: skip
        assert words in shown, words
    assert not re.search(r"\bnan\b|\bNone\b(?! was cut)|Undefined", shown)
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not any(code in pictures for code in THEMES["light"].values()), "a colour of one theme"
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used == {*THEMES["light"], "card", "good", "bad"} and THEMES["light"].keys() == THEMES["dark"].keys()


def damage(folder: RunFolder) -> None:
    folder.rollout_log(1, 0).write_bytes(b"no HDF5")
    with h5py.File(folder.rollout_log(2, 0), "r+") as file:
        del file["micro_steps"]
    begin(folder, {"num_ranks": "2"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: (shutil.rmtree(run.path), run.make_missing_folders()), "no step is committed yet"),
        (damage, "Not everything could be read"),
        (lambda run: run.config.unlink(), ""),
        (lambda run: shutil.rmtree(run.rollouts), ""),
        (lambda run: run.metrics.unlink(), ""),
    ],
    ids=["only begun", "damaged", "no config", "metrics only", "logs only"],
)
def test_a_run_of_which_little_is_known(run: RunFolder, change: Callable[[RunFolder], object], expected: str) -> None:
    change(run)
    found = read_findings(run.path)
    shown = shown_of(render(found, gain_of(found), 0.0))
    assert not re.search(r"\bnan\b|\bNone\b(?! was cut)|Undefined", shown) and expected in shown
    assert "exact sample" not in shown or run.config.exists(), "the precision is unknown"


def test_mistakes_are_one_line(tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        ([tmp_path], "runs in"),
        ([run.path, "--output", run.path / "metrics.jsonl"], "give a file that ends in .html"),
    ):
        assert expected in mistake(capsys, "report", *arguments)
    assert not (run.path / "report.html").exists() and run.metrics.read_text().startswith("{")
