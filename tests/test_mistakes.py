"""Typical mistakes in a command: each ends with one line on standard error, status 2, and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tlt_hpc.cli.main import main

ROOT = Path(__file__).resolve().parent.parent


def pairs() -> list[tuple[str, str]]:
    """Commands of mistakes.txt, and below each what it prints."""
    lines = (ROOT / "tests" / "mistakes.txt").read_text().splitlines()
    return list(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the shipped jobs and four that are wrong."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / "empty.toml").touch()
    (tmp_path / "number.toml").write_text("run = 3\n")
    (tmp_path / "section.toml").write_text('[run]\nname = "x"\nnum_steps = 1\n[modell]\npath = "m"\n')
    (tmp_path / "broken.toml").write_text("run = \n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "line"), pairs())
def test_a_mistake_is_one_line(command: str, line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    try:
        status = main(command.split())
    except SystemExit as end:
        status = int(end.code or 0)
    assert (capsys.readouterr().err, status) == (line + "\n", 2)
    assert sorted(place.rglob("*")) == before


def test_a_single_key_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "run.num_steps"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[run] ") and "\nnum_steps: " in out and "\nseed: " not in out
    assert main(["keys", "run.num_step"]) == 2
    assert capsys.readouterr().err == "tlt: unknown key 'run.num_step'; did you mean 'run.num_steps'?\n"


def test_no_line_of_the_keys_ends_with_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 300 and [line for line in lines if line != line.rstrip() or len(line) > 80] == []


def test_tlt_alone_prints_its_commands_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "\nrun:\n  train " in out and "\non a cluster:\n  submit " in out and "\nexamples:\n  tlt train " in out
