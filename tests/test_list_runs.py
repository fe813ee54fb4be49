"""``tlt runs``."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from answers import mistake

from tlt_hpc.cli.main import main
from tlt_hpc.cluster.watch.record import Record, write_record, write_verdict_if_first
from tlt_hpc.look.live import list_runs
from tlt_hpc.storage.records import CurvePoint, DrafterFacts, write_json
from tlt_hpc.storage.step_lines import add_line

Listed = Callable[..., tuple[list[str], str]]


def a_run(folder: Path, num_steps: int, age: float) -> Path:
    """A run's folder with some steps, last written ``age`` seconds ago."""
    folder.mkdir(parents=True)
    for step in range(num_steps):
        line = {"training/global_step": step + 1, "critic/score/mean": step / 4, "perf/total_num_tokens": 1000}
        add_line(folder / "metrics.jsonl", line)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Listed:
    """``tlt runs`` in an empty folder: the lines of its table, and its warning."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[list[str], str]:
        assert main(["runs", *words]) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), err

    return call


def first_words(listed: Listed) -> list[str]:
    return [line.split()[0] for line in listed()[0]]


def test_runs_at_any_depth_are_listed_the_newest_last(listed: Listed, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(Path("runs/compare-1/plain"), 4, 7200)
    finished = a_run(Path("runs/done"), 2, 60)
    write_json(finished / "finished.json", {"num_steps": 2, "policy_sha256": "ab"})
    os.utime(finished, (time.time() - 60,) * 2)
    a_run(Path("runs/done/checkpoints/step-000002"), 1, 1)  # within a run nothing is looked for
    (head, first, second, written), _ = listed("--output", "all.csv")
    assert head.split() == ["run", "state", "steps", "score", "tokens", "rank-hours", "tokens", "an", "hour"]
    words = ["runs/compare-1/plain", "no", "sign", "for", "2", "h", "0", "min", "4", "0.000", "->", "0.750"]
    assert first.split()[: len(words)] == words
    assert second.split()[:3] == ["runs/done", "finished", "2"] and written == "written to all.csv"
    assert Path("all.csv").read_text().splitlines()[2].startswith("runs/done,finished,2,,0.0,0.25,")
    warned = "tlt: cannot write runs: Is a directory; make room there or give another --output\n"
    assert mistake(capsys, "runs", "--output", "runs") == warned


def test_a_folder_that_is_no_run_is_named_and_the_others_are_listed(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs write a metrics.jsonl, too; and a run may be removed while it is looked at."""
    a_run(Path("runs/own"), 2, 60)
    foreign = Path("runs/theirs/metrics.jsonl")
    foreign.parent.mkdir()
    foreign.write_text('{"loss": 1.0}\n')
    lines, warned = listed()
    assert [line.split()[0] for line in lines] == ["run", "runs/own"]
    assert warned.startswith("tlt: left out: runs/theirs is no run's folder") and warned.count("\n") == 1
    monkeypatch.setattr(list_runs, "find_runs", lambda folder: [Path("runs/own"), Path("runs/gone")])
    assert "left out: runs/gone does not exist" in listed()[1]


def test_a_run_that_a_link_leads_to_is_listed(listed: Listed, tmp_path: Path) -> None:
    """As where the disk of ``runs/`` is small; a link to a folder above is not followed."""
    Path("runs").mkdir()
    Path("runs/far").symlink_to(a_run(tmp_path / "scratch" / "far", 2, 60))
    Path("runs/up").symlink_to(tmp_path)
    assert first_words(listed) == ["run", "runs/far"]


def test_a_folder_that_may_not_be_looked_into_hides_no_other(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names may be read, and nothing else, as after ``chmod -R 744``. Root may do all: the answer is made here."""
    a_run(Path("runs/own"), 2, 60)
    a_run(Path("runs/theirs"), 2, 60)
    Path("runs/theirs/below").mkdir()
    stat = Path.stat

    def refuse(path: Path, **how: bool) -> os.stat_result:
        if path.parent == Path("runs/theirs"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("runs/theirs"))
    assert first_words(listed) == ["run", "runs/own"]


def test_runs_at_work_keep_their_order_and_a_job_may_be_queued_again(listed: Listed) -> None:
    """By name, whichever wrote last; one that has stopped in a job of Slurm does not ask to be started again."""
    for name, age in (("a", 0.0), ("b", 2.0), ("c", 600.0)):
        a_run(Path("runs", name), 1, age)
    status = Path("runs/c/status")
    status.mkdir()
    owner = {"start": "now", "host": "h", "pid": 1, "job": "4_1", "restarts": "", "ends_at": None}
    write_json(status / "owner", owner)
    write_record(status, Record("now", 0, "h", 1, 5, "saving", 1, "", 0, "", 0, 9, 0, 9, 0.0, ending="stopped early"))
    for path in (status / "owner", status / "rank-0000", status.parent):
        os.utime(path, (time.time() - 600,) * 2)
    rows = listed()[0][1:]
    assert [row.split()[0] for row in rows] == ["runs/c", "runs/a", "runs/b"]
    assert rows[0].endswith("stopped early (job 4_1 may be queued again)  1")


def test_a_run_whose_rank_was_killed_is_not_said_to_run(listed: Listed) -> None:
    """From the moment that another process has said so, whatever the other ranks' last words were."""
    status = a_run(Path("runs/own"), 1, 0.0) / "status"
    status.mkdir()
    write_record(status, Record("now", 0, "h", 1, 5, "rollout", 1, "", 0, "", 0, 9, 0, 9, 0.0))
    assert "running (rollout)" in listed()[0][1]
    write_verdict_if_first(status, "now", "rank 1 on h was killed or crashed, last seen in a rollout")
    row = listed()[0][1]
    assert "rank 1 on h was killed or crashed" in row and "running" not in row


def test_a_warm_up_is_told_from_a_run(listed: Listed, capsys: pytest.CaptureFixture[str]) -> None:
    """In the list, in ``tlt watch`` and in ``tlt report``, before and after its first validation."""

    def watched() -> str:
        main(["watch", "--once", str(folder)])
        return capsys.readouterr().out

    folder = Path("runs/warm")
    for name in ("rollouts", "features"):
        (folder / name).mkdir(parents=True)
    (folder / "config.toml").write_text('[warmup]\nupdates = 400\n[drafter]\nform = "eagle"\n')
    assert "runs/warm  warm-up: no sign for " in listed()[0][1]
    assert "warm-up: not validated yet" in watched()
    (folder / "drafter").mkdir()
    curve = (CurvePoint(100, 9, 1.0, 0.5, 2.25), CurvePoint(200, 9, 1.0, 0.5, 2.0))
    facts = DrafterFacts("tiny", "gcd", 4, 9, 100, 2.25, "drafter-5", 1.0, 4, curve)
    write_json(folder / "drafter" / "facts.json", asdict(facts))
    (folder / "features").rename(folder / "training")  # features may be deleted
    assert listed("--output", "all.csv")[0][1].endswith(", accept length 2.250")
    assert 'accept length 2.250",,,,,,,' in Path("all.csv").read_text().splitlines()[1]
    assert "warm-up: 200 of 400 updates, accept length 2.250" in watched()
    warned = f"tlt: {folder} holds a warm-up, which has no steps to report; see `tlt watch {folder}`\n"
    assert mistake(capsys, "report", folder) == warned
