"""Owns a run of the embedded model that all tests share which only read its folder; made once a test process."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_ranks import ROOT, tlt

STEPS, SAVED = 4, 2
SMALL = [
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=200",
    f"checkpoint.every_steps={SAVED}",
]  # fmt: skip
REFERENCE = [*SMALL, f"run.num_steps={STEPS}"]


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of ``output.txt`` and of ``tiny``,
    four steps on two ranks without a break. Whoever changes it takes a copy."""
    folder = tmp_path_factory.mktemp("reference")
    done = tlt(2, "train", str(ROOT / "jobs" / "tiny.toml"), f"run.folder={folder}", "run.ranks=2", *REFERENCE)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    return folder
