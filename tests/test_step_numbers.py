"""Everything that a run writes, and all that shows it, has the same number for its last step: steps count from 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import pytest
from launch_ranks import tlt
from small_run import small_run

from tlt_hpc.cli.main import main
from tlt_hpc.common.errors import UserError
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import read_lines

ROOT = Path(__file__).parents[1]
SMALL = ("run.num_steps=2", "run.ranks=1", "rollout.prompts_per_step=2", "rollout.group_size=4",
         "rollout.max_new_tokens=64", "checkpoint.every_steps=1", "run.trackers=tensorboard")  # fmt: skip


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.mpi
@pytest.mark.ci
def test_the_last_of_two_steps_is_step_2_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = tlt(1, "train", "jobs/tiny.toml", *SMALL, f"run.folder={tmp_path}").stdout
    run, both = tmp_path / "tiny", ["step-000001", "step-000002"]
    assert re.findall(r"^ +(\d+) +[01]\.\d", said, re.MULTILINE) == ["1", "2"], "the progress table"

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["training/global_step"] for line in lines] == [1, 2]
    assert json.loads((run / "finished.json").read_text())["num_steps"] == 2
    assert all(names_in(run / folder) == both for folder in ("rollouts", "cache", "checkpoints"))
    for name in ("rollouts", "cache"):
        with h5py.File(run / name / "step-000002" / "rank-0000.h5") as file:
            assert file.attrs["step"] == 2 and set(file["rollouts/step"][:] if name == "rollouts" else [2]) == {2}
    assert json.loads((run / "status" / "rank-0000").read_text().partition(" ")[2])["step"] == 2
    assert told_to_tensorboard(run) == {1: 1, 2: 2}

    assert main(["watch", str(run), "--once"]) == 0
    assert re.search(r"^ *2 +[01]\.\d", capsys.readouterr().out, re.MULTILINE)
    assert main(["watch", str(run), "--sample=1"]) == 0
    assert capsys.readouterr().out.startswith("step 2, prompt ")
    assert main(["report", str(run)]) == 0
    assert "2 steps, 1 to 2." in (run / "report.html").read_text()
    assert RunFolder(run).kept_responses_path(1, 0, 0).parent.name == "step-000002"


def told_to_tensorboard(run: Path) -> dict[int, float]:
    """Number of the step -> the number that the tracker's figure of it has."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = reading.EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    return {event.step: event.value for event in reader.Scalars("training/global_step")}


def test_a_run_whose_files_count_from_0_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By each that reads its lines, from the first on or the last alone, and by its next start."""
    folder = small_run(tmp_path / "tiny")
    lines = [{**line, "training/global_step": float(step)} for step, line in read_lines(folder.metrics).items()]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = r"metrics\.jsonl is of an earlier version, which counted steps from 0: use that version for this run .*, or"
    for read in (
        lambda: read_lines(folder.metrics),
        lambda: read_lines(folder.metrics, 2),
        lambda: RunLog(folder.path),
        lambda: RunLog(folder.path, tail_bytes=10),
    ):
        with pytest.raises(UserError, match=words):
            read()
    folder.config.unlink()
    for command in (["watch", folder.path, "--once"], ["report", folder.path],
                    ["train", ROOT / "jobs" / "tiny.toml", f"run.folder={tmp_path}", "--dry-run"]):  # fmt: skip
        assert main([str(word) for word in command]) == 2
        errors = capsys.readouterr().err
        assert re.search(words, errors) and len(errors.splitlines()) == 1, errors
