"""Hostile configurations: each is refused in one line, or accepted where it may be."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tlt_hpc.cli.main import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import hostile_configurations

NUMBERS = range(20, 60)
"""Of cases of every kind; the whole of them takes minutes."""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_hostile_configuration_is_refused_in_one_line(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "case").mkdir()
    (tmp_path / "run").mkdir()
    case = hostile_configurations.make(number, tmp_path / "case", tmp_path / "run", random.Random(number))
    status = main(["train", str(case.config), *case.overrides, "--dry-run"])
    _, err = capfd.readouterr()
    assert status == 2 if "train" in case.must_fail else status in (0, 2), case.kind
    assert (err == "") == (status == 0)
    assert status == 0 or (err.startswith("tlt: ") and err.count("\n") == 1 and len(err) < 1500), err
