"""Programs that read a run's folder leave out damaged files, or end with one line."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from small_run import line_of, small_run

from tlt_hpc.cli import main as cli
from tlt_hpc.cluster.watch.record import Record
from tlt_hpc.common.files import read_bytes
from tlt_hpc.config import load_config, to_toml
from tlt_hpc.extras.report.findings import read_findings
from tlt_hpc.extras.report.verdict import gain_of, key_figures
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder, WriteError, make_folder

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = small_run(tmp_path / "runs" / "tiny")
    config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={folder.path.parent}", "run.name=tiny"])
    folder.config.write_text(to_toml(config))
    folder.finished.write_text(json.dumps({"num_steps": 3, "policy_sha256": "a" * 64}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Let a test fail, rather than fill the machine's memory, if it reads an endless file."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def answer(*command: str | Path) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = cli.main([str(word) for word in command])
    return status, out.getvalue(), errors.getvalue()


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def folder_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


UNFIT = {
    fifo: "it is not a regular file; move it away",
    endless: "it is not a regular file; move it away",
    loop: "Too many levels of symbolic links; a link on the way leads back to itself: remove that link",
    folder_instead: "Is a directory; a folder is where a file should be: move that folder away",
}


@pytest.mark.parametrize("damage", UNFIT)
def test_a_path_that_is_no_regular_file_is_left_out(run: RunFolder, damage: Callable[[Path], None]) -> None:
    log = run.rollout_log(1, 0)
    damage(run.metrics)
    damage(log)
    status, shown, errors = answer("watch", run.path, "--once")
    words = " ".join(shown.split())
    assert (status, errors) == (0, "") and UNFIT[damage][:12] in words and "left out" in words
    found = read_findings(run.path)
    assert f"{run.metrics}: {UNFIT[damage]}" in found.log.problems and f"{log}: {UNFIT[damage]}" in found.log.problems
    assert [rank.rank for rank in found.log.read_rank_summaries(1)] == [1]


@pytest.mark.parametrize("value", ("text", -1e308, float("nan"), 10**400, None))
def test_a_hostile_figure(run: RunFolder, value: object) -> None:
    for key in ("training/global_step", "critic/score/mean", "timing_s/step"):
        lines = [line_of(0), line_of(1), {**line_of(2), key: value}]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        status, shown, errors = answer("watch", run.path, "--once")
        assert status in (0, 1) and not errors, shown
        found = read_findings(run.path)
        assert key_figures(found, gain_of(found)) and found.learning.verdict


@pytest.mark.parametrize("change", ({"still": "x"}, {"step": 1e300}, {"seconds": float("nan")}, {"rank": True}))
def test_a_damaged_status(run: RunFolder, change: dict[str, object]) -> None:
    record = asdict(Record("s", 0, "node1", 1, 1, "update", 1, "", 0, "", 0, 1, 0, 10, 0.0, ending="finished"))
    text = json.dumps({**record, **change}).encode()
    run.status.mkdir()
    (run.status / "rank-0000").write_bytes((f"{zlib.crc32(text):08x} ".encode() + text).ljust(2047) + b"\n")
    (run.status / "owner").write_text("[" * 100_000)
    status, _, errors = answer("watch", run.path, "--once")
    assert status in (0, 1) and not errors


@pytest.mark.parametrize("damage", UNFIT)
def test_a_start_ends_with_a_line_where_metrics_are_no_file(run: RunFolder, damage: Callable[[Path], None]) -> None:
    damage(run.metrics)
    status, _, errors = answer("train", run.config, "--dry-run")
    assert (status, errors) == (2, f"tlt: {run.metrics}: {UNFIT[damage]}\n")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("inspect_run").faults


@pytest.mark.parametrize(
    ("change", "fault"),
    (
        (lambda lines: [lines[0], lines[2]], ":2 is of step 3, and the line before it of step 1"),
        (lambda lines: [*lines[:2], {**lines[2], "critic/score/mean": "high"}], ":3 .*critic/score/mean is no number"),
        (lambda lines: [{"training/global_step": 1.0}, *lines[1:]], ":1 has no critic/score/mean, "),
    ),
)
def test_check_looks_at_every_line(run: RunFolder, change: Callable[[list[dict[str, float]]], list[dict[str, float]]],
                                   fault: str, faults: Any) -> None:  # fmt: skip
    lines = [line_of(step) for step in range(3)]
    assert not list(faults(RunLog(run.path)))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    assert any(re.search(fault, found) for found in faults(RunLog(run.path)))


def test_a_name_that_is_too_long_has_a_remedy_that_fits(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"File name too long; .*set run\.folder to another place"):
        make_folder(tmp_path / ("x" * 300))


def test_the_limit_holds_for_a_file_whose_size_reads_as_zero() -> None:
    assert Path("/proc/self/smaps").stat().st_size == 0
    with pytest.raises(OSError, match="such a file 1,000 at most"):
        read_bytes(Path("/proc/self/smaps"), 1000)
