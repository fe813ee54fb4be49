"""Owns how tests ask for an answer: a call that refuses, a command that is a mistake, a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from launch_ranks import ROOT

from tlt_hpc.cli.main import main
from tlt_hpc.config import UserError

TINY = ROOT / "jobs" / "tiny.toml"


def refusal(call: Callable[..., object], *given: Any, **options: Any) -> str:
    """The one line that a call refuses with."""
    with pytest.raises(UserError) as caught:
        call(*given, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a command prints which ends with status 2."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tlt: ") and said.count("\n") == 1
    return said


def python(*words: object, status: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a Python of its own did that imports this tree; None: with any status."""
    given = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "encoding": "utf-8"} | options
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, check=False, **given)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def loaded_by(code: str, *words: object, **options: Any) -> set[str]:
    """The libraries that a program has loaded at its end."""
    shows = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    return set(python("-c", f"{code}\n{shows}", *words, **options).stdout.splitlines()[-1].split())
