"""The report: its figures are those of hand-made files, its words follow from them, and it is one file."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from small_run import set_lines, small_record, small_run

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import Rollout, RolloutTiming
from tlt_hpc.look.analysis.comparison import interval
from tlt_hpc.look.figures.style import THEMES
from tlt_hpc.look.report.findings import find, typical_step
from tlt_hpc.look.report.page import render
from tlt_hpc.look.report.verdict import KeyFigure, RunGain, cards, gain_of
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import CommittedFile
from tlt_hpc.storage.rollout_log import write_step

CONFIG = """[run]
num_steps = 3
[model]
path = "models/small"
dtype = "float32"
[data]
source = "questions.parquet"
[algorithm]
name = "dapo"
[rollout]
max_new_tokens = 100
prompts_per_step = 2
group_size = 2
shard = "group"
tie_guard = "auto"
[speculation]
mode = "full"
[drafter]
init = "warm"
train = true
place = "tail"
"""
START_LINE: dict[str, Any] = {
    "time": "2026-11-22T10:00:00+00:00", "version": "0.1.0", "commit": "", "source": "ab", "python": "3.11",
    "packages": {"torch": "2.13.0"}, "cuda": "", "mpi": "MPICH 5", "threads": "1", "slurm": {"job": "17"},
    "launcher": "mpiexec", "command": ["tlt", "train", "jobs/a b.toml"], "energy": {},
}  # fmt: skip
HOST = {"name": "node-7", "num_ranks": 2, "processor": "EPYC", "num_cores": 64, "memory_bytes": 500 * 10**9, "gpus": {}}


def make(path: Path, **lines: float) -> RunFolder:
    folder = small_run(path)
    folder.config.write_text(CONFIG)
    set_lines(folder, *[lines] * 3)
    return folder


def make_plain(path: Path, seconds: float = 13.0, num_steps: int = 3) -> RunFolder:
    """The same responses in other seconds, without speculation."""
    folder = make(path)
    folder.config.write_text(CONFIG.replace('"full"', '"plain"'))
    set_lines(folder, *[{"rollout/seconds": seconds, "timing_s/step": seconds + 3.1}] * num_steps)
    return folder


@pytest.fixture(autouse=True)
def draws(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Draw figures, which takes seconds, only in the test of the whole page."""
    if "two_themes" not in request.node.name:
        monkeypatch.setattr("tlt_hpc.look.report.page.inline_svg", lambda *words: "<svg></svg>")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path / "run")


@pytest.fixture
def plain(tmp_path: Path) -> RunFolder:
    return make_plain(tmp_path / "plain")


def cards_of(folder: RunFolder, against: RunFolder | None = None) -> dict[str, KeyFigure]:
    found = find(folder.path, against.path if against else None)
    return {card.label: card for card in cards(found, gain_of(found))}


def gain(folder: RunFolder, against: RunFolder) -> RunGain:
    found = gain_of(find(folder.path, against.path))
    assert found is not None
    return found


def advice_of(folder: RunFolder, against: RunFolder | None = None) -> str:
    found = find(folder.path, against.path if against else None)
    page = render(replace(found, timeline=None, comparison=None), gain_of(found), 0.0)
    return html.unescape(page.partition('<ul class="advice">')[2].partition("</ul>")[0])


def test_cards_are_what_the_files_say(run: RunFolder, plain: RunFolder) -> None:
    """Of 2 x 6.5 rank-seconds 5.0 are idle (4.5 and 0.5), of which 1.8 trained; 13 s without are 2 times as many."""
    told = cards_of(run, plain)
    assert told["Idle"].value == "38 %" and "15.0 s together" in told["Idle"].words
    assert told["Harvested"].value == "36 %" and "6 updates" in told["Harvested"].words
    assert told["Gained"].value == "2.00\u00d7" and told["Gained"].tone == "good"
    assert "(measured in 3 steps)" in told["Gained"].words and f"steps: {16.1 / 9.6:.2f}\u00d7" in told["Gained"].words
    what = "token for token, with and without speculation (3 steps compared)"
    assert told["Text"] == KeyFigure("Text", "the same", what, "good")
    assert told["Score"].value == "0.50 \u2192 0.52" and "too few steps" in told["Score"].words
    run.rollout_log(1, 1).unlink()
    assert cards_of(run)["Harvested"].value == "36 %", "idle and harvested time are of the same steps"


def test_a_gain_is_of_the_steps_that_both_have_timed(tmp_path: Path, run: RunFolder, plain: RunFolder) -> None:
    few = make_plain(tmp_path / "few", seconds=19.5, num_steps=1)
    assert (gain(run, few).speed.rollout, gain(run, few).speed.steps.tolist()) == (3.0, [0])
    set_lines(run, {"rollout/kept_tokens": 9.0, "rollout/seconds": 0.1}, {}, {"rollout/seconds": float("nan")})
    assert (gain(run, plain).speed.rollout, gain(run, plain).speed.steps.tolist()) == (2.0, [1])
    set_lines(run, *[{"rollout/kept_tokens": 9.0}] * 3)
    assert gain_of(find(run.path, plain.path)) is None


def test_only_a_plain_run_of_the_same_job_measures_speculation(
    tmp_path: Path, run: RunFolder, plain: RunFolder
) -> None:
    full = make(tmp_path / "full", **{"rollout/seconds": 13.0})
    told = cards_of(run, full)
    assert "Gained" not in told and told["Against full"].value == "2.00\u00d7" and told["Against full"].tone == "plain"
    assert "as in full" in told["Text"].words and "pay" not in advice_of(run, full)
    assert not gain(make_plain(tmp_path / "a"), make_plain(tmp_path / "b")).is_of_speculation
    text = plain.config.read_text()
    plain.config.write_text(text.replace("num_steps = 3", 'num_steps = 9\nname = "other"') + "[checkpoint]\nkeep = 9\n")
    assert gain(run, plain).is_of_speculation and not gain(run, plain).unlike
    plain.config.write_text(text.replace("max_new_tokens = 100", "max_new_tokens = 99"))
    assert gain(run, plain).unlike == ("settings besides speculation differ (rollout.max_new_tokens)",)
    plain.config.write_text(text)
    for folder, processor in ((run, "Fast"), (plain, "Slow")):
        start = {**START_LINE, "hosts": [{**HOST, "processor": processor}]}
        folder.environment.write_text(json.dumps(start) + "\n")
    assert gain(run, plain).unlike == ("it ran on Slow, this on Fast",)
    for rank in range(4):
        write_step(plain.rollout_log(0, rank), small_record(0, rank, 4))
    assert gain(run, plain).unlike[0] == "it ran on 4 ranks, this on 2" and not gain(run, plain).is_of_speculation


def test_other_tokens_are_not_the_same_work(run: RunFolder, plain: RunFolder) -> None:
    record = small_record(1, 0)
    changed = Rollout(**{**vars(record.rollouts[0]), "response_tokens": record.rollouts[0].response_tokens + 1})
    write_step(plain.rollout_log(1, 0), small_record(1, 0, rollouts=(changed, *record.rollouts[1:])))
    told = cards_of(run, plain)
    run.config.write_text(run.config.read_text().replace("float32", "bfloat16"))
    assert cards_of(run)["Text"].value == "exact samples"
    run.config.write_text(CONFIG)
    assert cards_of(run)["Text"].value == "not compared"
    assert told["Text"].value == "differs" and told["Text"].tone == "bad" and told["Against plain"].tone == "plain"
    assert "from step 1 on" in told["Text"].words
    assert gain(run, plain).unlike == ("the responses differ, so the work was not the same",)
    plain.config.write_text(plain.config.read_text().replace("questions", "others"))
    assert "Text" not in cards_of(run, plain), "another job has other texts"


def test_a_gain_within_its_interval_is_neither_good_nor_bad(tmp_path: Path, run: RunFolder, plain: RunFolder) -> None:
    ours = np.full(8, 1.0)
    assert interval(ours * 2, ours) == (2.0, 2.0) and interval(ours[:2], ours[:2]) == (0.0, float("inf"))
    low, high = interval(np.array([1.0, 3.0] * 4), ours)
    assert 1.0 < low < 1.7 and 2.3 < high < 3.0
    set_lines(plain, *({"rollout/seconds": took, "timing_s/step": 20.0} for took in (3.0, 6.5, 14.0)))
    told, speed = cards_of(run, plain)["Gained"], gain(run, plain).speed
    assert told.value == "1.21\u00d7" and told.tone == "plain"
    assert (round(speed.low, 2), round(speed.high, 2), speed.is_faster) == (0.46, 2.15, None)
    slower = make_plain(tmp_path / "slower", seconds=3.25)
    assert cards_of(run, slower)["Gained"].tone == "bad" and gain(run, slower).speed.is_faster is False
    assert "Speculation does not pay: rollouts take 2.00 times" in advice_of(run, slower)


ADVICE = {
    "informative": ({"rollout/teaching_share": 0.25}, "25 % of the groups.*algorithm.max_refills"),
    "mismatch": ({"training/rollout_probs_diff_mean": 0.05}, "by 0.050 on average.*rollout_correction"),
    "not finite": ({"actor/grad_norm": float("nan")}, "grad_norm is not finite from step 0.*before step 0"),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_follows_from_metrics(tmp_path: Path, run: RunFolder, case: str) -> None:
    lines, expected = ADVICE[case]
    assert not re.search(expected, advice_of(run))
    assert re.search(expected, advice_of(make(tmp_path / "other", **lines)))


def test_advice_follows_from_logs_and_settings(run: RunFolder) -> None:
    """38 % waiting and 36 % of it used are both too far off; a quarter of the responses ended at the cap."""
    told = advice_of(run)
    for expected in ('38 %.*rollout.shard = "sample"', "36 %.*drafter.min_idle", "25 % of the responses were cut"):
        assert re.search(expected, told)
    run.config.write_text(CONFIG.replace('"group"', '"sample"').replace('"warm"', '"random"'))
    told = advice_of(run)
    assert "prompts_per_step" in told and "random weights" in told
    run.config.write_text(CONFIG.replace('"full"', '"plain"'))
    assert "Speculation was off" in advice_of(run)


def test_the_typical_step_is_drawn_and_each_log_is_read_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting nearest to the run's mean, and not the step of most or least."""
    for step, lasts in {0: (6.4, 6.4), 1: (2.0, 6.0), 2: (6.0, 6.0)}.items():
        for rank, last in enumerate(lasts):
            at = small_record(step, rank).timing.start_seconds
            record = small_record(step, rank, timing=RolloutTiming(at, at + last, at + 6.5), micro_steps=())
            write_step(run.rollout_log(step, rank), record)
    opened, original = Counter[Path](), CommittedFile.__init__

    def counting(self: CommittedFile, path: Path, *more: Any) -> None:
        opened[path] += 1
        original(self, path, *more)

    monkeypatch.setattr(CommittedFile, "__init__", counting)
    found = find(run.path)
    assert typical_step(found.throughput) == 2 and found.timeline is not None and found.timeline.step == 2
    again = [path for path, times in opened.items() if times > 1]
    assert again == [run.rollout_log(2, rank) for rank in range(2)] and len(opened) == 6


# -- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Links and text of a page; fails if an element is not closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.sources, self.open, self.text = list[str](), list[str](), list[str](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []
        self.shown = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids += [values["id"]] if "id" in values else []
        self.sources += [values[name] for name in ("src", "href", "xlink:href", "srcset", "data") if name in values]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def report(*arguments: Any) -> int:
    return main(["report", *map(str, arguments)])


def page_of(folder: RunFolder, *arguments: Any) -> Page:
    assert report(folder.path, *arguments) == 0
    return Page((folder.path / "report.html").read_text())


def test_the_page_is_one_file_in_two_themes(
    run: RunFolder, plain: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {**HOST, "gpus": {"H200": 2}}
    lines = [{**START_LINE, "hosts": [host]}, {**START_LINE, "hosts": [host], "slurm": {"job": "18"}}]
    run.environment.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "ab" * 32}))
    run.config.write_text(CONFIG.replace("models/small", "<script>alert(1)</script>"))
    shutil.rmtree(run.rollout_log(2, 0).parent)
    page = page_of(run, "--against", plain.path)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"reading    {run.path}" and out[-1] == f"report     {run.path / 'report.html'}"
    text = (run.path / "report.html").read_text()
    assert len(page.ids) == len(set(page.ids)) > 0
    assert all(source.startswith(("#", "data:")) for source in page.sources), "it loads something"
    assert all(source[1:] in page.ids for source in page.sources if source.startswith("#"))
    assert not re.search(r"@import|<script|url\((?!#)", text)
    assert "http" not in re.sub(r"http://www\.w3\.org/1999/xlink|http-equiv", "", text)
    for words in (
        "<script>alert(1)</script> on questions.parquet with dapo: 3 steps of 3, 63 response tokens, 28.8 s of steps",
        "Only 2 of", "digest is abababababab", "plain took 2.00 times as long in rollouts", "fast is it against plain?",
        "2 ranks on 1 node (64 cores of EPYC, 2 x H200), by mpiexec in Slurm job 18", "jobs/a b.toml", "What to change",
    ):  # fmt: skip
        assert words in page.shown, words
    assert page.shown.index("2.00\u00d7") < page.shown.index("One step"), "the verdict comes first"
    assert page.shown.index("Start 2 of 2") < page.shown.index("Start 1 of 2")
    assert not re.search(r"\bnan\b|\bNone\b(?! was cut)|Undefined", page.shown)
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not any(code in pictures for code in THEMES["light"].values()), "a colour of one theme"
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used == {*THEMES["light"], "card", "good", "bad"} and THEMES["light"].keys() == THEMES["dark"].keys()


CASES = ("begun", "no config", "damaged", "one rank", "lines only", "logs only", "empty folder", "start", "odd")


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_which_little_is_known(tmp_path: Path, case: str) -> None:
    folder = RunFolder(tmp_path / "run")
    if case == "begun":
        folder.create()
    elif case == "one rank":
        small_run(folder.path, num_ranks=1)
    else:
        make(folder.path)
    if case == "no config":
        folder.config.unlink()
    if case == "damaged":
        folder.rollout_log(1, 0).write_bytes(b"no HDF5")
        with h5py.File(folder.rollout_log(2, 0), "r+") as file:
            del file["micro_steps"]
    if case == "logs only":
        folder.metrics.unlink()
    if case == "empty folder":
        for path in folder.rollout_log(1, 0).parent.iterdir():
            path.unlink()
    if case == "start":
        lines = [{**START_LINE, "hosts": [{**HOST, "num_ranks": "2"}]}, {**START_LINE, "hosts": [], "mpi": None}]
        folder.environment.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if case == "odd":
        folder.config.write_bytes(b'[run]\nname = "caf\xe9"\n[speculation]\nmode = "eagle"\n')
    if case == "lines only":
        shutil.rmtree(folder.rollouts)
    found = find(folder.path)
    shown = Page(render(found, gain_of(found), 0.0)).shown
    assert not re.search(r"\bnan\b|\bNone\b(?! was cut)|Undefined", shown)
    assert ("Not everything could be read" in shown) or case not in ("damaged", "start")
    assert "no step is committed yet" in shown or case != "begun"
    if case in ("no config", "one rank"):
        assert "exact sample" not in shown and "the same" not in shown, "nothing is known of the precision"


def test_mistakes_are_one_line(tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        ([tmp_path], "runs in"),
        ([run.path, "--output", run.path / "metrics.jsonl"], "give a file that ends in .html"),
        ([run.path, "--against", run.path], "that is the run itself"),
        ([run.path, "--last", 0], "--last 0: give 1 or more"),
    ):
        assert report(*arguments) == 2, arguments
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and expected in errors
    assert not (run.path / "report.html").exists() and run.metrics.read_text().startswith("{")
