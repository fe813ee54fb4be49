"""The report: its figures can be reckoned in the head, its words say what they say, and it is one file."""

from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from small_run import LAST_TOKENS, line_of, small_record, small_run

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.look.figures.inline_svg import NAMES, as_element, variables
from tlt_hpc.look.report.advice import advise
from tlt_hpc.look.report.findings import find, typical_steps
from tlt_hpc.look.report.gain import interval
from tlt_hpc.look.report.verdict import answers, cards
from tlt_hpc.look.report.write_report import gain_of
from tlt_hpc.storage.folder import RunFolder
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


def make(path: Path, **lines: float) -> RunFolder:
    folder = small_run(path)
    folder.config.write_text(CONFIG)
    folder.metrics.write_text("".join(json.dumps(line_of(step, **lines)) + "\n" for step in range(3)))
    return folder


def make_plain(path: Path, seconds: float = 13.0, num_steps: int = 3) -> RunFolder:
    """The same responses in other seconds, without speculation."""
    folder = make(path, **{"rollout/seconds": seconds, "timing_s/step": seconds + 3.1})
    folder.config.write_text(CONFIG.replace('"full"', '"plain"'))
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:num_steps]))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path / "run")


def card_texts(path: Path, against: Path | None = None) -> dict[str, tuple[str, str, str]]:
    found = find(path, against)
    return {card.label: (card.value, card.words, card.tone) for card in cards(found, gain_of(found)[0])}


def words_of(path: Path, against: Path | None = None) -> dict[str, str]:
    found = find(path, against)
    return {answer.question: answer.words for answer in answers(found, *gain_of(found))}


def test_cards_are_what_the_files_say(tmp_path: Path, run: RunFolder) -> None:
    """Of 2 x 6.5 rank-seconds 5.0 are idle (4.5 and 0.5), of which 1.8 trained; 13 s without are 2 times as many."""
    told = card_texts(run.path, make_plain(tmp_path / "plain").path)
    assert told["Idle"][0] == "38 %" and "15.0 s together, 26 % of whole steps" in told["Idle"][1]
    assert told["Harvested"][0] == "36 %" and "6 updates" in told["Harvested"][1]
    assert told["Gained"][0] == "2.00\u00d7" and "(measured in 3 steps)" in told["Gained"][1]
    assert told["Gained"][1].endswith(f"whole steps: {16.1 / 9.6:.2f}\u00d7") and told["Gained"][2] == "good"
    assert told["Text"] == ("the same", "token for token, with and without speculation (3 steps compared)", "good")
    assert told["Score"] == ("0.50 \u2192 0.52", "mean score, first and last step; too few steps to tell", "plain")


def test_a_gain_is_of_the_steps_that_both_have(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain", seconds=19.5, num_steps=1)
    assert card_texts(run.path, plain.path)["Gained"][0] == "3.00\u00d7"
    assert "1 step took" in words_of(run.path, plain.path)["What did speculation gain?"]


def test_a_step_that_an_earlier_start_had_begun_is_not_timed(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    lines = [line_of(0, **{"rollout/kept_tokens": 9.0, "rollout/seconds": 0.1}), line_of(1), line_of(2)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "2 steps took" in words_of(run.path, plain.path)["What did speculation gain?"]
    assert card_texts(run.path, plain.path)["Gained"][0] == "2.00\u00d7"


def test_only_a_plain_run_of_the_same_job_measures_speculation(tmp_path: Path, run: RunFolder) -> None:
    """Full against full, or plain against plain, compares machines or settings; no text is with and without."""
    full = make(tmp_path / "full", **{"rollout/seconds": 13.0})
    told = card_texts(run.path, full.path)
    assert "Gained" not in told and told["Against full"][:1] == ("2.00\u00d7",) and told["Against full"][2] == "plain"
    assert told["Text"][1] == "token for token, as in full (3 steps compared)"
    assert not any("pay" in seen for seen, _ in advice_of(run.path, full.path))
    told = card_texts(make_plain(tmp_path / "a").path, make_plain(tmp_path / "b").path)
    assert "Gained" not in told and "with and without" not in told["Text"][1]


def test_another_job_is_no_fault_of_speculation(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    plain.config.write_text(plain.config.read_text().replace("questions", "others"))
    record = small_record(0, 0)
    changed = Rollout(**{**vars(record.rollouts[0]), "response_tokens": record.rollouts[0].response_tokens + 1})
    write_step(plain.rollout_log(0, 0), small_record(0, 0, rollouts=(changed, *record.rollouts[1:])))
    told, words = card_texts(run.path, plain.path), words_of(run.path, plain.path)
    assert "Text" not in told and "another job (data.source differ)" in words["Is the text that of plain?"]


def test_a_machine_that_others_used_is_told(tmp_path: Path, run: RunFolder) -> None:
    """The updates are the same work: where they took twice as long, a whole step's gain is no speculation's."""
    make(run.path, **{"timing_s/update_actor": 2.0})
    plain = make_plain(tmp_path / "plain")
    lines = [
        line_of(s, **{"rollout/seconds": 13.0, "timing_s/step": 19.2, "timing_s/update_actor": 4.0}) for s in range(3)
    ]
    plain.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = words_of(run.path, plain.path)["What did speculation gain?"]
    assert "not equally fast" in words and "took 2.00 times as long there" in words
    card = card_texts(run.path, plain.path)["Gained"][1]
    assert f"whole steps: {16.1 / 9.6:.2f}" in card, "at this run's own pace"
    assert "on a machine that others used" in card
    lines = [{**line, "timing_s/update_actor": 2.1} for line in lines]
    plain.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "not equally fast" not in words_of(run.path, plain.path)["What did speculation gain?"]
    assert f"whole steps: {19.2 / 9.6:.2f}" in card_texts(run.path, plain.path)["Gained"][1]


def test_an_interval_is_as_wide_as_steps_differ() -> None:
    ours = np.full(8, 1.0)
    assert interval(ours * 2, ours) == (2.0, 2.0)
    low, high = interval(np.array([1.0, 3.0] * 4), ours)
    assert 1.0 < low < 1.7 and 2.3 < high < 3.0
    assert interval(ours[:2], ours[:2]) == (0.0, float("inf"))


def test_what_cannot_be_told_from_the_steps_is_no_good_news(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    lines = [line_of(s, **{"rollout/seconds": took, "timing_s/step": 20.0}) for s, took in enumerate((3.0, 6.5, 14.0))]
    plain.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = card_texts(run.path, plain.path)["Gained"]
    assert told[0] == "1.21\u00d7" and told[2] == "plain"
    assert "(0.46 to 2.15, by how much steps differ)" in words_of(run.path, plain.path)["What did speculation gain?"]


def test_a_step_without_seconds_is_left_out(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    lines = [
        line_of(s, **{"rollout/seconds": took, "timing_s/step": 20.0})
        for s, took in enumerate((13.0, float("nan"), 13.0))
    ]
    plain.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "2 steps took" in words_of(run.path, plain.path)["What did speculation gain?"]


def test_steps_of_other_numbers_of_ranks_are_not_compared(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    for rank in range(4):
        write_step(plain.rollout_log(2, rank), small_record(2, rank, 4))
    assert "2 steps took" in words_of(run.path, plain.path)["How fast is it against plain?"]
    for step in (0, 1):
        for rank in range(4):
            write_step(plain.rollout_log(step, rank), small_record(step, rank, 4))
    assert "it ran on 4 ranks, this on 2" in words_of(run.path, plain.path)["How fast is it against plain?"]


def test_the_last_steps_say_that_they_are_not_all(run: RunFolder) -> None:
    found = find(run.path, last=2)
    words = answers(found, *gain_of(found))[0].words
    assert "the last 2 steps of 3 are shown here" in words and "42 response tokens" in words


def test_logs_that_are_not_here_are_missed(run: RunFolder) -> None:
    for step in (1, 2):
        shutil.rmtree(run.rollout_log(step, 0).parent)
    words = words_of(run.path)["What was trained?"]
    assert "63 response tokens, in 28.8 s of steps" in words and "Of 3 steps only 1 have their logs here" in words


def test_idle_and_harvested_are_of_the_same_steps(run: RunFolder) -> None:
    run.rollout_log(1, 1).unlink()
    told = card_texts(run.path)
    assert told["Harvested"][0] == "36 %" and any("36 %" in seen for seen, _ in advice_of(run.path))


def test_what_the_training_brought_is_said(run: RunFolder) -> None:
    def words(values: list[float]) -> str:
        lines = [line_of(step, **{"drafter/own_accept_length": value}) for step, value in enumerate(values)]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in range(3, len(values)):
            for rank in range(2):
                write_step(run.rollout_log(step, rank), small_record(step, rank))
        return words_of(run.path)["What did the harvested training bring?"]

    assert "2.00 tokens a pass in the first 2 steps and 3.00 in the last: 50 % more" in words(
        [2, 2, 2.1, 2.2, 2.5, 2.8, 3, 3]
    )
    assert "hardly anything in this run" in words([2, 2.02, 2, 2.01, 2, 2.01, 2.02, 2.02])


def test_a_page_that_was_held_against_a_run_is_so_again(
    tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_plain(tmp_path / "plain & more")
    assert report(run.path, "--against", plain.path) == 0 and report(run.path) == 0
    out = capsys.readouterr().out
    assert out.count("2.00\u00d7") == 2 and f"against    {plain.path}, as the page that stood there" in out
    shutil.rmtree(plain.path)
    assert report(run.path) == 0 and "against" not in capsys.readouterr().out.replace("--against", "")


def test_slower_and_as_fast_are_said(tmp_path: Path, run: RunFolder) -> None:
    slower = card_texts(run.path, make_plain(tmp_path / "a", seconds=3.25).path)
    assert slower["Gained"][0] == "0.50\u00d7" and slower["Gained"][2] == "bad"
    words = words_of(run.path, tmp_path / "a")["What did speculation gain?"]
    assert "they are slower by a factor of 2.00" in words
    assert (
        "they are equally fast"
        in words_of(run.path, make_plain(tmp_path / "b", 6.5).path)["What did speculation gain?"]
    )


def test_other_tokens_are_no_equal_work(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    record = small_record(1, 0)
    first = record.rollouts[0]
    changed = Rollout(**{**vars(first), "response_tokens": first.response_tokens + 1})
    assert isinstance(first.key, SampleKey)
    write_step(plain.rollout_log(1, 0), small_record(1, 0, rollouts=(changed, *record.rollouts[1:])))
    told = card_texts(run.path, plain.path)
    assert told["Text"][0] == "differs" and told["Text"][2] == "bad"
    assert "Gained" not in told and told["Against plain"][2] == "plain", "no gain of speculation"
    words = words_of(run.path, plain.path)
    assert "differ from step 1 on" in words["Is the text that of plain?"]
    assert "the work was not the same" in words["How fast is it against plain?"]


def test_what_is_not_alike_is_said(tmp_path: Path, run: RunFolder) -> None:
    """Settings of speculation and places may differ; another batch, machine or number of ranks makes it unfair."""
    gained, question = "What did speculation gain?", "How fast is it against plain?"
    plain = make_plain(tmp_path / "plain")
    text = plain.config.read_text()
    plain.config.write_text(text.replace("num_steps = 3", 'num_steps = 9\nname = "other"') + "[checkpoint]\nkeep = 9\n")
    assert "Not like for like" not in words_of(run.path, plain.path)[gained]
    plain.config.write_text(text.replace("max_new_tokens = 100", "max_new_tokens = 99"))
    assert "settings besides speculation differ (rollout.max_new_tokens)" in words_of(run.path, plain.path)[question]
    plain.config.write_text(text)
    for folder, processor in ((run, "Fast"), (plain, "Slow")):
        host = {"name": "a", "num_ranks": 2, "processor": processor, "num_cores": 2, "memory_bytes": 1, "gpus": {}}
        folder.environment.write_text(json.dumps({**START_LINE, "hosts": [host]}) + "\n")
    assert "it ran on Slow, this on Fast" in words_of(run.path, plain.path)[question]


def test_equal_weights_are_told_where_both_have_ended_together(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    question = "Is the text that of plain?"
    assert "weights" not in words_of(run.path, plain.path)[question]
    for folder, steps in ((run, 3), (plain, 2)):
        folder.finished.write_text(json.dumps({"num_steps": steps, "policy_sha256": "ab" * 32}))
    assert "weights" not in words_of(run.path, plain.path)[question]
    plain.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "ab" * 32}))
    assert "equal to the last bit" in words_of(run.path, plain.path)[question]
    plain.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "cd" * 32}))
    assert "weights" not in words_of(run.path, plain.path)[question]


def test_text_is_not_promised_where_near_ties_may_fall_either_way(run: RunFolder) -> None:
    question = "Is the text the same as without it?"
    assert words_of(run.path)[question].startswith("By construction, yes")
    run.config.write_text(CONFIG.replace("float32", "bfloat16"))
    assert words_of(run.path)[question].startswith("Nearly") and card_texts(run.path)["Text"][0] == "exact samples"
    run.config.write_text(CONFIG.replace('mode = "full"', 'mode = "plain"'))
    assert "no speculation" in words_of(run.path)[question] and "Gained" not in card_texts(run.path)


def test_trained_says_what_and_whether_it_has_ended(run: RunFolder) -> None:
    words = words_of(run.path)["What was trained?"]
    assert "0.03 rank-hours" in words
    assert words.startswith(
        "models/small on questions.parquet with dapo: 3 steps, 2 prompts with 2 responses each, on 2"
    )
    assert (
        "63 response tokens, in 28.8 s of steps" in words
        and "By the clock 49.5 s" in words
        and "has not finished" in words
    )
    run.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "ab" * 32}))
    assert "has finished; the policy's digest is abababababab" in words_of(run.path)["What was trained?"]


ADVICE: dict[str, tuple[dict[str, float], str, str]] = {
    "taught": ({"rollout/teaching_share": 0.25}, "25 % of the groups", "algorithm.max_refills"),
    "preempted": ({"rollout/preemptions": 9.0, "rollout/samples": 64.0}, "9 responses a step", "rollout.max_live"),
    "mismatch": ({"training/rollout_probs_diff_mean": 0.05}, "by 0.050 on average", "rollout_correction"),
    "faults": ({"rollout/drafter_faults": 1.0}, "not finite", "drafter.learning_rate"),
    "not finite": (
        {"actor/grad_norm": float("nan")},
        "grad_norm is not finite from step 0",
        "checkpoint before step 0",
    ),
}


def advice_of(path: Path, against: Path | None = None) -> list[tuple[str, str]]:
    found = find(path, against)
    return [(piece.seen, piece.change) for piece in advise(found, gain_of(found)[0])]


@pytest.mark.parametrize("case", ADVICE)
def test_advice_comes_with_what_was_seen(tmp_path: Path, run: RunFolder, case: str) -> None:
    lines, seen, change = ADVICE[case]
    before = advice_of(run.path)
    assert not any(seen in what for what, _ in before)
    after = advice_of(make(tmp_path / "other", **lines).path)
    assert [1 for what, todo in after if seen in what and change in todo] == [1]


def test_advice_from_logs_and_settings(tmp_path: Path, run: RunFolder) -> None:
    """38 % waiting and 36 % of it used are both too far off; a cap of 8 cuts a third of the responses."""
    told = advice_of(run.path)
    assert any("38 %" in seen and 'rollout.shard = "sample"' in change for seen, change in told)
    assert any("36 %" in seen and "drafter.min_idle" in change for seen, change in told)
    assert any("25 % of the responses were cut" in seen for seen, _ in told)
    run.config.write_text(CONFIG.replace('"group"', '"sample"').replace('"warm"', '"random"'))
    told = advice_of(run.path)
    assert any("prompts_per_step" in change for _, change in told) and any("random" in seen for seen, _ in told)
    run.config.write_text(CONFIG.replace('"full"', '"plain"'))
    assert any("Speculation was off" in seen for seen, _ in advice_of(run.path))
    run.config.write_text(CONFIG)
    slow = make_plain(tmp_path / "plain", seconds=5.0)
    assert any("does not pay: rollouts take 1.30 times" in seen for seen, _ in advice_of(run.path, slow.path))
    slow.config.write_text(slow.config.read_text().replace("dapo", "rloo"))
    assert not any("pay" in seen for seen, _ in advice_of(run.path, slow.path)), "another job says nothing of it"


def test_the_typical_step_is_drawn(run: RunFolder) -> None:
    """Waiting nearest to the run's mean, and not the step of most or least."""
    timings = {0: (6.4, 6.4), 1: (2.0, 6.0), 2: (6.0, 6.0)}
    from tlt_hpc.common.records import RolloutTiming

    for step, lasts in timings.items():
        for rank, last in enumerate(lasts):
            at = small_record(step, rank).timing.start_seconds
            record = small_record(step, rank, timing=RolloutTiming(at, at + last, at + 6.5), micro_steps=())
            write_step(run.rollout_log(step, rank), record)
    assert LAST_TOKENS == (2.0, 6.0)
    found = find(run.path)
    assert typical_steps(found.throughput) == [2, 0, 1] and found.timeline is not None and found.timeline.step == 2
    chosen = find(run.path, step=0).timeline
    assert chosen is not None and chosen.step == 0


# -- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What is on it: ids, links, and whether every element is closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

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


def test_the_page_is_one_file(tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(run.path, "--against", make_plain(tmp_path / "plain").path) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"report     {run.path / 'report.html'}" and "2.00\u00d7" in out
    text = (run.path / "report.html").read_text()
    page = Page(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) > 0
    assert all(source.startswith(("#", "data:")) for source in page.sources), "it loads something"
    assert all(source[1:] in page.ids for source in page.sources if source.startswith("#"))
    assert not re.search(r"@import|<script|url\((?!#)", text)
    assert "http" not in re.sub(r"http://www\.w3\.org/1999/xlink|http-equiv", "", text)
    shown = " ".join(page.text)
    for heading in ("What was trained?", "What to change", "Where the seconds go", "Against plain", "Strategies"):
        assert heading in shown
    assert shown.index("2.00\u00d7") < shown.index("One step"), "the verdict comes first"
    assert not re.search(r"\bnan\b|\bNone\b(?! was cut)|Undefined", shown)


def test_both_themes_are_one_drawing(run: RunFolder) -> None:
    """Every colour of a figure is a variable, which both themes have."""
    assert report(run.path) == 0
    text = (run.path / "report.html").read_text()
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}", pictures), "a colour of one theme"
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used & set(variables("light")) and used <= {*NAMES, "card", "good", "bad", "link"}
    assert set(variables("light")) == set(variables("dark")) == set(NAMES)
    for theme in ("light", "dark"):
        assert all(f"--{name}: {value};" in text for name, value in variables(theme).items())


def test_figures_in_text_keep_their_digits() -> None:
    """Places are cut to hundredths of a point; what is written is not."""
    svg = '<svg viewBox="0 0 9 9"><path d="M 1.23456 7"/><text x="2.34567" style="fill: #f1e001">0.04567</text></svg>'
    element = as_element(svg, "a", "b")
    assert 'd="M 1.23 7"' in element and 'x="2.35"' in element and ">0.04567<" in element
    assert "var(--ink)" in element


def test_the_environment_of_every_start_is_on_the_page(run: RunFolder) -> None:
    host = {
        "name": "node-7",
        "num_ranks": 2,
        "processor": "EPYC",
        "num_cores": 64,
        "memory_bytes": 500 * 10**9,
        "gpus": {"H200": 2},
    }
    lines = [{**START_LINE, "hosts": [host]}, {**START_LINE, "hosts": [host], "slurm": {"job": "18"}}]
    run.environment.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report(run.path) == 0
    shown = " ".join(" ".join(Page((run.path / "report.html").read_text()).text).split())
    assert "Start 2 of 2" in shown and "Start 1 of 2" in shown and shown.index("Start 2") < shown.index("Start 1")
    assert "2 ranks, 64 cores of EPYC, 500 GB, 2 x H200" in shown and "tlt train 'jobs/a b.toml'" in shown


@pytest.mark.parametrize("name", ("a<b>&amp;c", "$x_$ $y", "#f1e0ff", os.fsdecode(b"caf\xe9")))
def test_names_from_files_are_only_text(tmp_path: Path, name: str) -> None:
    run = make(tmp_path / name)
    run.config.write_text(CONFIG.replace("models/small", "<script>alert(1)</script>"))
    assert report(run.path, "--against", make_plain(tmp_path / (name + "-plain")).path) == 0
    text = (run.path / "report.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text and Page(text).open == []


ODD = {"latin": b'[run]\nname = "caf\xe9"\n', "mode": b'[speculation]\nmode = "eagle"\n'}
CASES = (
    "begun",
    "no config",
    "damaged",
    "lacking",
    "one rank",
    "lines only",
    "logs only",
    "empty folder",
    "start",
    *ODD,
)


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_which_little_is_known(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    if case == "lacking":  # whole but for what only the timeline reads
        with h5py.File(folder.rollout_log(2, 0), "r+") as file:
            del file["micro_steps"]
    if case == "logs only":
        folder.metrics.unlink()
    if case == "empty folder":
        for path in folder.rollout_log(1, 0).parent.iterdir():
            path.unlink()
    if case == "start":
        host = {"name": "a", "num_ranks": "2", "processor": None, "num_cores": 2, "memory_bytes": None, "gpus": {}}
        lines = [{**START_LINE, "hosts": [host]}, {**START_LINE, "hosts": [], "mpi": None, "commit": 3}]
        folder.environment.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if case in ODD:
        folder.config.write_bytes(ODD[case])
    if case == "lines only":
        shutil.rmtree(folder.rollouts)
    assert report(folder.path) == 0, capsys.readouterr().err
    page = Page((folder.path / "report.html").read_text())
    shown = " ".join(page.text)
    assert not re.search(r"\bnan\b|\bNone\b(?! was cut)|Undefined", shown)
    if case == "damaged":
        assert "Not everything could be read" in shown and "step-000001/rank-0000.h5" in shown
    if case == "begun":
        assert "no step is committed yet" in shown
    if case in ("lacking", "start"):
        assert "Not everything could be read" in shown
    if case in ("no config", "one rank"):
        assert "exact sample" not in shown and "the same" not in shown, "nothing is known of the precision"


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """200 steps of 64 ranks' worth of lines, with a timeline of 64 ranks: under 3 MB."""
    folder = RunFolder(tmp_path / "run")
    for rank in range(64):
        write_step(folder.rollout_log(199, rank), small_record(199, rank, 64))
    for step in range(199):
        for rank in range(2):
            write_step(folder.rollout_log(step, rank), small_record(step, rank))
    rng = np.random.default_rng(0)
    lines = [line_of(step, **{"critic/score/mean": float(rng.random())}) for step in range(200)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.config.write_text(CONFIG)
    assert report(folder.path, "--step", 199) == 0
    text = (folder.path / "report.html").read_text()
    assert len(text) < 3_000_000 and "32 of 64 ranks are drawn" in text and "means of 4 neighbours" in text


def test_mistakes_are_one_line(tmp_path: Path, run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for arguments, told in (
        ([tmp_path / "no"], "does not exist"),
        ([tmp_path / "file"], "is a file"),
        ([tmp_path], "it holds some; give one of them: run"),
        ([run.path / "rollouts"], "holds no rollouts/"),
        ([run.path, "--out", run.path / "metrics.jsonl"], "give a file that ends in .html"),
        ([run.path, "--json", run.path / "config.toml"], "give a file that ends in .json"),
        ([run.path, "--against", run.path], "that is the run itself"),
        ([run.path, "--against", tmp_path / "no"], "does not exist"),
        ([run.path, "--step", 9], "no step 9"),
        ([run.path, "--last", 0], "--last 0: give 1 or more"),
        ([run.path, "--out", tmp_path / "none" / "a.html"], "its folder does not exist"),
        ([run.path, "--json", tmp_path / "none" / "a.json"], "its folder does not exist"),
        ([run.path, "--out", tmp_path], "is a folder"),
    ):
        assert report(*arguments) == 2, arguments
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and told in captured.err and captured.out == ""
    assert not (run.path / "report.html").exists()
    assert run.metrics.read_text().startswith("{")


def test_json_has_what_the_page_says(tmp_path: Path, run: RunFolder) -> None:
    plain = make_plain(tmp_path / "plain")
    assert report(run.path, "--against", plain.path, "--json", tmp_path / "a.json", "--out", tmp_path / "b.html") == 0
    tree = json.loads((tmp_path / "a.json").read_text())
    assert tree["gain"]["rollout"] == 2.0
    assert tree["lengths"]["longest"] == [8, 8, 8] and tree["comparison"]["first_difference"] == {"run": None}
    assert (tmp_path / "b.html").is_file() and not (run.path / "report.html").exists()
