"""The first minutes on a GPU: its parts, their limits and the page, and the whole of it as far as a CPU goes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from launch_ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import gpu_first
from gpu_first import Outcome, Part, page_of, run

from tlt_hpc.cli.init_folder import PATTERNS
from tlt_hpc.kernels.dispatch import has_triton

PYTHON = [sys.executable, "-c"]


def test_a_part_that_fails_or_hangs_is_named_and_the_others_run(tmp_path):
    hangs = "import time; print('begun', flush=True); time.sleep(60)"
    commands = {"good": "print('7 GB/s')", "bad": "raise SystemExit(3)", "endless": hangs}
    found = []
    for name, code in commands.items():
        part = Part(name, f"Is it {name}?", [*PYTHON, code], seconds=2)
        found.append(run(part, part.command, tmp_path, 30.0))
    assert [outcome.verdict for outcome in found] == ["passed", "FAILED (status 3)", "ended after 2 s"]
    assert found[2].seconds < 10 and list(found[2].lines) == ["begun"]
    unasked = Outcome(Part("last", "Is it there?", [], 1), None, 0.0, ["not on this machine"])
    page = page_of([*found, unasked], "cuda", "a GPU")
    assert "| good | Is it good? | passed | 0 |" in page and "7 GB/s" in page
    assert "| last | Is it there? | did not run | 0 |" in page


def test_tools_that_are_copied_import_no_others():
    """``tlt init`` copies some tools alone, and the wheel has no more."""
    copied = {Path(pattern).stem for pattern in PATTERNS if pattern.startswith("tools/")}
    assert "gpu_first" in copied
    for name in copied:
        top = ast.parse((ROOT / "tools" / f"{name}.py").read_text()).body
        imported = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in top if isinstance(node, ast.ImportFrom)}
        assert not {path.stem for path in (ROOT / "tools").glob("*.py")} & imported - copied, name


@pytest.mark.ci
@pytest.mark.skipif(not has_triton(), reason="needs triton, which a tool asks for first")
def test_the_commands_of_a_gpu_are_accepted_by_their_tools(tmp_path):
    """As far as arguments go: without a GPU each of them ends with its one line about that, or asks for its help."""
    for part in gpu_first.parts_of(tmp_path):
        if part.name in ("compare", "two ranks", "memory errors"):
            continue
        done = subprocess.run([*part.command], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
        assert done.returncode and "no CUDA device" in done.stderr, (part.name, done.stderr)
