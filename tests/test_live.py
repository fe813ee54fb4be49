"""``tlt watch`` shows the state of a run on a screen of 80 by 24 and changes nothing in the run's folder."""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from logged import step_record
from rich.console import Console
from tiny import byte_tokenizer

from tlt_hpc.cli.main import main
from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.cluster.status import resubmitted_by
from tlt_hpc.cluster.submission import Submission, SubmittedRun, save
from tlt_hpc.cluster.watch.record import Record, claim_verdict, status_file, write_record
from tlt_hpc.common.records import FinishReason, Rollout, SampleKey
from tlt_hpc.look.live import watch_run
from tlt_hpc.look.live.samples import DRAFTED, sample_text, show_samples
from tlt_hpc.look.live.state import read_state
from tlt_hpc.look.live.view import render
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.models.tokenizer import find_model, load_tokenizer
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

CONFIG = """
[run]
name = "a-long-name-of-a-run-in-a-sweep-seed17"
num_steps = 40
[model]
path = "embedded:tiny"
[speculation]
mode = "full"
[rollout]
prompts_per_step = 16
group_size = 8
"""


def record(rank: int = 0, **changes: object) -> Record:
    """The record of a rank in the rollout of step 13 that has seven responses left."""
    usual = Record(
        start="now", rank=rank, host=f"a-long-host-name-{rank // 4}", pid=rank + 1, heartbeat=5, phase="rollout",
        step=13, part="7 sequences left", part_number=0, waiting="", number=0, progress=9, still=0, limit=600,
        seconds=0.0, sequences_left=7,
    )  # fmt: skip
    return replace(usual, **changes)


def line(step: int, **changes: float) -> dict[str, float]:
    names = {
        "training/global_step": float(step + 1), "critic/score/mean": 0.5, "response_length/mean": 12_345.0,
        "response_length/max": 32_768.0, "drafter/spec_decode/mean_acceptance_length": 3.21,
        "rollout/idle_rank_seconds": 12_345.6, "rollout/harvested_rank_seconds": 9_876.5, "rollout/seconds": 2_345.6,
        "timing_s/step": 3_000.0, "perf/total_num_tokens": 1.6e6,
    }  # fmt: skip
    return names | changes


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of forty steps on two ranks: twelve are done, and the next one is in its rollout."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(CONFIG)
    folder.metrics.write_text("".join(json.dumps(line(step)) + "\n" for step in range(12)))
    owner = {"start": "now", "host": "a-long-host-name-0", "pid": 1, "job": "1234567", "restarts": ""}
    (folder.status / "owner").write_text(json.dumps(owner | {"ends_at": time.time() + 7200}))
    for rank in range(2):
        write_record(folder.status, record(rank))
    return folder


def screen(run: RunFolder, is_alive: bool | None = True, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False, record=True, file=io.StringIO())
    console.print(render(read_state(run.path), is_alive, height))
    return console.export_text().splitlines()


def test_a_run_at_work_fits_a_small_terminal(run: RunFolder) -> None:
    lines = screen(run)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "a-long-name-of-a-run-in-a-sweep-seed17  full, 2 ranks on 1 node" in text
    assert "12 of 40 steps, about 23 h 20 min to go" in text, "28 steps of 3,000 seconds"
    assert "step 13: 14 of 128 responses to go, 2 of 2 ranks decoding" in text
    assert lines[-1] == "running"
    assert "rank-hour" not in text, "the number of ranks of the steps is not known"
    assert "32768" in text and "12345.6" in text and "3.21" in text, "whole figures, none cut"


def test_the_cost_so_far_is_estimated_for_steps_that_are_not_read(run: RunFolder) -> None:
    hosts = [{"name": "a", "num_ranks": 2, "processor": "b", "num_cores": 1, "memory_bytes": 1, "gpus": {"H200": 2}}]
    texts = dict.fromkeys(("time", "version", "commit", "source", "python", "cuda", "mpi", "threads"), "")
    start = {**texts, "packages": {}, "hosts": hosts, "slurm": {}, "command": []}
    run.environment.write_text(json.dumps(start) + "\n")
    assert "about 20 GPU-hours, 960,000 tokens per GPU-hour" in screen(run), "12 steps of 3,000 s on 2 GPUs"
    run.metrics.write_text("".join(json.dumps(line(step)) + "\n" for step in range(2000)))
    state = read_state(run.path)
    assert len(state.log.lines) < 2000
    assert "about 3,330 GPU-hours, 960,000 tokens per GPU-hour" in screen(run)
    assert len(screen(run)) <= 24


def test_of_many_ranks_those_that_hold_up_the_others_are_shown(run: RunFolder) -> None:
    for rank in range(64):
        left = 60 if rank == 41 else 0
        write_record(run.status, record(rank, sequences_left=left, part=f"{left} sequences left"))
    lines = screen(run)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "64 ranks on 16 nodes" in text and "60 of 128 responses to go, 1 of 64 ranks decoding" in text
    assert any(row.split()[:1] == ["41"] and "60 sequences left" in row for row in lines)
    assert "+57" in text and "others, none of them further behind" in text
    low = screen(run, height=14)
    assert "+63" in "\n".join(low) and len(low) <= 19, "a terminal of 14 lines does not get all 64"


def end_all(status: Path, ending: str) -> None:
    for rank in range(2):
        write_record(status, record(rank, ending=ending))


def test_once_says_how_a_run_stands(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status and the last line depend on the status files; no file is changed."""
    monkeypatch.setattr(watch_run, "_ONCE_SECONDS", 0.3)
    queued = "if Slurm has queued it again (job 1234567), it resumes by itself, else by the same command"
    killed = "rank 1 on b was killed by signal 9"
    stalled = record(1, still=700, seconds=700.0, waiting="gather of rewards")
    cases: list[tuple[Callable[[], object], int, str]] = [
        (lambda: write_record(run.status, stalled), 1, "a rank hangs"),
        (lambda: end_all(run.status, "stopped early"), 0, f"ended: stopped early; {queued}"),
        (lambda: end_all(run.status, "finished"), 0, "finished"),
        (lambda: end_all(run.status, ""), 1, f"no rank gives a sign of life; {queued}"),
        (lambda: claim_verdict(run.status, "now", killed), 1, f"no rank gives a sign of life: {killed}; the same"),
        (lambda: [status_file(run.status, rank).unlink() for rank in range(2)], 0, "a start has begun, and no rank"),
        (lambda: os.utime(run.status / "owner", (time.time() - 600,) * 2), 1, "nobody is at work here"),
    ]
    for change, status, words in cases:
        change()
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        assert main(["watch", str(run.path), "--once"]) == status
        assert words in " ".join(capsys.readouterr().out.split())
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_run_of_a_submission_is_resumed_by_its_job(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not by the submission's name, which would submit other members too, and only while the last job is of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch_run, "_ONCE_SECONDS", 0.3)
    folder = tmp_path / "runs" / "submitted" / "sweep"
    end_all(run.status, "stopped early")
    for job, words in (("1234567", "else by `tlt submit resubmit 1234567`"), ("17", "else by the same command")):
        member = SubmittedRun("tiny", str(run.path), ("train", "x.toml"), jobs=(job,))
        save(Submission(folder, tmp_path, tmp_path, "sweep", "x.toml", SlurmRequest(), (member,), 0.0))
        resubmitted_by.cache_clear()
        assert main(["watch", str(run.path), "--once"]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


def test_damaged_records_and_those_of_an_earlier_start_are_left_out(run: RunFolder) -> None:
    write_record(run.status, record(2))
    write_record(run.status, record(3, start="before"))
    (run.status / "rank-0000").write_bytes(b"torn")
    assert [one.rank for one in read_state(run.path).records] == [1, 2]


def test_only_the_end_of_a_long_metrics_file_is_read(run: RunFolder) -> None:
    run.metrics.write_text("no line\n" + "".join(json.dumps(line(step)) + "\n" for step in range(2000)))
    state = read_state(run.path)
    assert state.num_done == 2000 and 100 < len(state.log.lines) < 2000 and not state.log.problems
    assert list(state.log.lines) == list(range(min(state.log.lines), 2000))


def test_a_mistake_is_one_line(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run.path), "--sample", "3"]) == 2
    err = capsys.readouterr().err
    assert "no committed step" in err and err.startswith("tlt: ") and err.count("\n") == 1
    run.training.mkdir()
    assert main(["watch", str(run.path), "--sample", "3"]) == 2
    assert "warm-up" in capsys.readouterr().err, "it has no steps to wait for"
    for words in (["watch", "a", "--sample=0"], ["report", "a", "--last=0"], ["ablate", "a.toml", "--steps=0"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        err = capsys.readouterr().err
        assert "'0': use whole numbers of 1 or more" in err and err.count("\n") == 1


# --- samples ---


def response(text: str, pass_lengths: list[int]) -> Rollout:
    tokenizer = load_tokenizer(find_model("embedded:tiny"))
    tokens = np.array(tokenizer.encode(text).ids, np.int32)
    prompt = np.array(tokenizer.encode("gcd(4,6)=").ids, np.int32)
    return Rollout(
        SampleKey(0, 0, 3, 0, 0), prompt, tokens, np.zeros(len(tokens), np.float32), FinishReason.EOS, 3,
        len(pass_lengths), 0.0, np.array(pass_lengths, np.uint8),
    )  # fmt: skip


def test_drafted_tokens_are_the_coloured_ones(run: RunFolder) -> None:
    rollout = response("12345", [1, 3, 1])
    write_step(run.rollout_log(3, 0), step_record(3, [rollout], [1.0]))
    (text,) = show_samples(RunLog(run.path), 5)
    assert text.plain.splitlines()[0].startswith("step 4, prompt 0, sample 0, rank 0  reward 1  5 tokens in 3 passes")
    assert text.plain.endswith("gcd(4,6)=\n12345")
    coloured = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == DRAFTED)
    assert coloured == "23", "the last token of a pass is the policy's own"


@pytest.mark.parametrize("pass_lengths", [[1] * 15, [5, 5, 5]])
def test_a_character_of_several_tokens_is_shown_whole(pass_lengths: list[int]) -> None:
    tokenizer = byte_tokenizer(["a"], 256, [])
    tokens = np.array(tokenizer.encode("a\u4f60\u597db\U0001f600c\xf6").ids, np.int32)
    rollout = replace(response("1", []), prompt_tokens=tokens[:1], pass_lengths=np.array(pass_lengths, np.uint8))
    for end in (15, 14):  # the latter within a character
        text = sample_text(0, 0, replace(rollout, response_tokens=tokens[:end]), 1.0, tokenizer)
        assert text.plain.splitlines()[2] == tokenizer.decode(tokens[:end].tolist())


def watched(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, first: str | None, *changes: Callable[[], object]
) -> tuple[int, str, int]:
    """Exit status of ``tlt watch``, what it showed, and how many of the changes, one before each look, came before
    its end. ``first``: what squeue prints, until a change; None: there is no squeue."""
    tools = run.path.parent / "bin"
    tools.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    (tools / "squeue").unlink(missing_ok=True)
    if first is not None:
        squeue_prints(run, first)
    for name, value in (("ASK_SECONDS", 0.0), ("DEAD_SECONDS", 0.0)):
        monkeypatch.setattr(watch_run, name, value)
    left = list(changes)

    def sleep(_: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    monkeypatch.setattr(watch_run, "time", SimpleNamespace(sleep=sleep))  # subprocess sleeps, too
    shown = io.StringIO()
    status = watch_run.follow(
        Console(file=shown, width=100, height=40, force_terminal=True), argparse.Namespace(run=run.path)
    )
    return status, shown.getvalue(), len(changes) - len(left)


def squeue_prints(run: RunFolder, text: str) -> None:
    place = run.path.parent / "bin" / "squeue"
    place.write_text(f"#!/bin/sh\necho '{text}'\n")
    place.chmod(0o755)


def test_watch_follows_a_job_that_slurm_queues_again_until_it_has_finished(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_again() -> None:
        owner = json.loads((run.status / "owner").read_text()) | {"start": "later", "restarts": "1"}
        (run.status / "owner").write_text(json.dumps(owner))
        for rank in range(2):
            write_record(run.status, record(rank, start="later", heartbeat=1))

    def finish() -> None:
        for rank in range(2):
            write_record(run.status, record(rank, start="later", heartbeat=2, ending="finished"))

    end_all(run.status, "stopped early")
    status, shown, looks = watched(
        run, monkeypatch, "1234567|RUNNING|None",
        lambda: squeue_prints(run, "1234567|PENDING|BeginTime"), start_again, finish, lambda: None,
    )  # fmt: skip
    assert (status, looks) == (0, 3)
    assert "ended: stopped early; job 1234567 is running, and resumes it" in shown
    assert "ended: stopped early; job 1234567 is pending (BeginTime), and resumes it" in shown


@pytest.mark.parametrize(
    ("ending", "queue", "status", "looks"),
    [
        ("stopped early", "9|RUNNING|None", 0, 0),
        ("stopped early", "1234567|COMPLETED|None", 0, 0),
        ("stopped early", None, 0, 2),
        ("", "1234567|NODE_FAIL|None", 1, 1),
        ("", "1234567|PENDING|BeginTime", 0, 2),
        ("error: no memory", "1234567|RUNNING|None", 1, 0),
    ],
)
def test_watch_ends_once_slurm_no_longer_has_the_job(
    ending: str, queue: str | None, status: int, looks: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the third look ends it otherwise; nobody knows where there is no squeue."""
    end_all(run.status, ending)
    found, shown, num_looks = watched(run, monkeypatch, queue, lambda: None, lambda: None)
    assert (found, num_looks) == (status, looks)
    assert ("is pending" in shown) == (queue is not None and "PENDING" in queue)
