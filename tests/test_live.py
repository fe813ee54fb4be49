"""``tlt watch`` shows the state of a run on a screen of 80 by 24 and changes nothing in the run's folder."""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from answers import mistake
from logged import make_rollout, step_record
from rich.console import Console
from tiny import byte_tokenizer

from tlt_hpc.cli.main import main
from tlt_hpc.cluster.request import SlurmRequest
from tlt_hpc.cluster.status import resubmit_command
from tlt_hpc.cluster.submission import Submission, SubmittedRun, save
from tlt_hpc.cluster.watch.record import Record, status_file, write_record, write_verdict_if_first
from tlt_hpc.common.records import Rollout, SampleKey
from tlt_hpc.look.live import watch_run
from tlt_hpc.look.live.samples import DRAFTED, read_samples_as_text, sample_text
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


def lines_of(steps: int) -> str:
    names = {
        "critic/score/mean": 0.5, "response_length/mean": 12_345.0, "response_length/max": 32_768.0,
        "drafter/spec_decode/mean_acceptance_length": 3.21, "rollout/idle_rank_seconds": 12_345.6,
        "rollout/harvested_rank_seconds": 9_876.5, "rollout/seconds": 2_345.6, "timing_s/step": 3_000.0,
        "perf/total_num_tokens": 1.6e6,
    }  # fmt: skip
    return "".join(json.dumps({"training/global_step": step + 1, **names}) + "\n" for step in range(steps))


def own(run: RunFolder, **changes: object) -> None:
    owner = {"start": "now", "host": "a-long-host-name-0", "pid": 1, "job": "1234567", "restarts": ""}
    (run.status / "owner").write_text(json.dumps({**owner, "ends_at": time.time() + 7200, **changes}))


def report(run: RunFolder, **changes: object) -> None:
    """What both ranks write."""
    for rank in range(2):
        write_record(run.status, record(rank, **changes))


@pytest.fixture
def run(tmp_path):
    """A run of forty steps on two ranks: twelve are done, and the next one is in its rollout."""
    folder = RunFolder(tmp_path / "run")
    folder.make_missing_folders()
    folder.config.write_text(CONFIG)
    folder.metrics.write_text(lines_of(12))
    own(folder)
    report(folder)
    return folder


def screen(run: RunFolder, height: int = 24) -> list[str]:
    console = Console(width=80, height=height, force_terminal=False, record=True, file=io.StringIO())
    console.print(render(read_state(run.path), True, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= max(height, 19) and max(map(len, lines)) <= 80
    return lines


def test_a_run_at_work_fits_a_small_terminal(run):
    """What is damaged, or of an earlier start, is left out."""
    write_record(run.status, record(2, start="before"))
    (run.status / "rank-0003").write_bytes(b"torn")
    lines = screen(run)
    text = "\n".join(lines)
    assert "a-long-name-of-a-run-in-a-sweep-seed17  full, 2 ranks on 1 node" in text
    assert "12 of 40 steps, about 23 h 20 min to go" in text, "28 steps of 3,000 seconds"
    assert "step 13: 14 of 128 responses to go, 2 of 2 ranks decoding" in text
    assert lines[-1] == "running"
    assert "rank-hour" not in text, "the number of ranks of the steps is not known"
    assert "32768" in text and "12345.6" in text and "3.21" in text, "whole figures, none cut"


def test_the_cost_so_far_is_estimated_for_steps_that_are_not_read(run):
    hosts = [{"name": "a", "num_ranks": 2, "processor": "b", "num_cores": 1, "memory_bytes": 1, "gpus": {"H200": 2}}]
    texts = dict.fromkeys(("time", "version", "commit", "source", "python", "cuda", "mpi", "threads"), "")
    start = {**texts, "packages": {}, "hosts": hosts, "slurm": {}, "command": []}
    run.environment.write_text(json.dumps(start) + "\n")
    assert "about 20 GPU-hours, 960,000 tokens per GPU-hour" in screen(run), "12 steps of 3,000 s on 2 GPUs"
    run.metrics.write_text("no line\n" + lines_of(2000))
    state = read_state(run.path)
    assert state.num_done == 2000 and 100 < len(state.log.lines) < 2000 and not state.log.problems
    assert list(state.log.lines) == list(range(min(state.log.lines), 2000)), "the end of the file"
    assert "about 3,330 GPU-hours, 960,000 tokens per GPU-hour" in screen(run)


def test_of_many_ranks_those_that_hold_up_the_others_are_shown(run):
    for rank in range(64):
        left = 60 if rank == 41 else 0
        write_record(run.status, record(rank, sequences_left=left, part=f"{left} sequences left"))
    lines = screen(run)
    text = "\n".join(lines)
    assert "64 ranks on 16 nodes" in text and "60 of 128 responses to go, 1 of 64 ranks decoding" in text
    assert any(row.split()[:1] == ["41"] and "60 sequences left" in row for row in lines)
    assert "+57" in text and "others, none of them further behind" in text
    assert "+63" in "\n".join(screen(run, height=14)), "a terminal of 14 lines does not get all 64"


KILLED = "rank 1 on b was killed by signal 9"
QUEUED = "if Slurm has queued it again (job 1234567), it resumes by itself, else by the same command"
STANDS = [
    (lambda run: report(run, still=700, seconds=700.0, waiting="gather of rewards"), 1, "a rank hangs"),
    (lambda run: report(run, ending="stopped early"), 0, f"ended: stopped early; {QUEUED}"),
    (lambda run: report(run, ending="finished"), 0, "finished"),
    (report, 1, f"no rank gives a sign of life; {QUEUED}"),
    (
        lambda run: write_verdict_if_first(run.status, "now", KILLED),
        1,
        f"no rank gives a sign of life: {KILLED}; the same",
    ),
    (lambda run: [status_file(run.status, rank).unlink() for rank in range(2)], 0, "a start has begun, and no rank"),
    (lambda run: os.utime(run.status / "owner", (time.time() - 600,) * 2), 1, "nobody is at work here"),
]
"""A change, and then the exit status of ``tlt watch --once``, and what its last line says."""


def test_once_says_how_a_run_stands(run, monkeypatch, capsys):
    monkeypatch.setattr(watch_run, "_ONCE_SECONDS", 0.3)
    for change, status, words in STANDS:
        change(run)
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        assert main(["watch", str(run.path), "--once"]) == status
        assert words in " ".join(capsys.readouterr().out.split())
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_run_of_a_submission_is_resumed_by_its_job(run, monkeypatch, capsys, tmp_path):
    """Not by the submission's name, which would submit other members too, and only while the last job is of it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "submitted" / "sweep"
    report(run, ending="stopped early")
    for job, words in (("1234567", "else by `tlt submit resubmit 1234567`"), ("17", "else by the same command")):
        member = SubmittedRun("tiny", str(run.path), ("train", "x.toml"), jobs=(job,))
        save(Submission(folder, tmp_path, tmp_path, "sweep", "x.toml", SlurmRequest(), (member,), 0.0))
        resubmit_command.cache_clear()
        assert main(["watch", str(run.path), "--once"]) == 0
        assert words in " ".join(capsys.readouterr().out.split())


# --- samples ---


def response(text: str, pass_lengths: list[int]) -> Rollout:
    prompt, tokens = (load_tokenizer(find_model("embedded:tiny")).encode(each).ids for each in ("gcd(4,6)=", text))
    passes = {"num_target_passes": len(pass_lengths), "pass_lengths": np.array(pass_lengths, np.uint8)}
    return make_rollout(SampleKey(0, 0, 3, 0, 0), prompt, tokens, **passes)


def test_samples_of_a_run_without_steps_are_a_mistake_of_one_line(run, capsys):
    for words in ("no committed step", "warm-up"):  # which has no steps to wait for
        assert words in mistake(capsys, "watch", run.path, "--sample", 3)
        run.training.mkdir(exist_ok=True)


def test_drafted_tokens_are_the_coloured_ones(run):
    write_step(run.rollout_log(3, 0), step_record(3, [response("12345", [1, 3, 1])], [1.0]))
    (text,) = read_samples_as_text(RunLog(run.path), 5)
    assert text.plain.splitlines()[0].startswith("step 4, prompt 0, sample 0, rank 0  reward 1  5 tokens in 3 passes")
    assert text.plain.endswith("gcd(4,6)=\n12345")
    coloured = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == DRAFTED)
    assert coloured == "23", "the last token of a pass is the policy's own"


@pytest.mark.parametrize("pass_lengths", [[1] * 15, [5, 5, 5]])
def test_a_character_of_several_tokens_is_shown_whole(pass_lengths):
    tokenizer = byte_tokenizer(["a"], 256, [])
    tokens = np.array(tokenizer.encode("a\u4f60\u597db\U0001f600c\xf6").ids, np.int32)
    rollout = replace(response("1", []), prompt_tokens=tokens[:1], pass_lengths=np.array(pass_lengths, np.uint8))
    for end in (15, 14):  # the latter within a character
        text = sample_text(0, 0, replace(rollout, response_tokens=tokens[:end]), 1.0, tokenizer)
        assert text.plain.splitlines()[2] == tokenizer.decode(tokens[:end].tolist())


# --- following ---


def squeue_prints(run: RunFolder, text: str) -> None:
    place = run.path.parent / "bin" / "squeue"
    place.write_text(f"#!/bin/sh\necho '{text}'\n")
    place.chmod(0o755)


@pytest.fixture
def watched(run, monkeypatch):
    """Exit status of ``tlt watch``, what it showed, and how many of the changes, one before each look, came before
    its end. ``first``: what squeue prints, until a change; None: there is no squeue."""
    tools = run.path.parent / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    for name in ("ASK_SECONDS", "DEAD_SECONDS"):
        monkeypatch.setattr(watch_run, name, 0.0)

    def follow(first, *changes):
        if first is not None:
            squeue_prints(run, first)
        left = list(changes)

        def sleep(_: float) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(watch_run, "time", SimpleNamespace(sleep=sleep))  # subprocess sleeps, too
        shown = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
        status = watch_run.redraw_until_end(shown, argparse.Namespace(run=run.path))
        return status, shown.file.getvalue(), len(changes) - len(left)

    return follow


def test_watch_follows_a_job_that_slurm_queues_again_until_it_has_finished(run, watched):
    def start_again() -> None:
        own(run, start="later", restarts="1")
        report(run, start="later", heartbeat=1)

    report(run, ending="stopped early")
    status, shown, looks = watched(
        "1234567|RUNNING|None", lambda: squeue_prints(run, "1234567|PENDING|BeginTime"), start_again,
        lambda: report(run, start="later", heartbeat=2, ending="finished"), lambda: None,
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
def test_watch_ends_once_slurm_no_longer_has_the_job(ending, queue, status, looks, run, watched):
    """Ctrl-C at the third look ends it otherwise; nobody knows where there is no squeue."""
    report(run, ending=ending)
    found, shown, num_looks = watched(queue, lambda: None, lambda: None)
    assert (found, num_looks) == (status, looks)
    assert ("is pending" in shown) == (queue is not None and "PENDING" in queue)
