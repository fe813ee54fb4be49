"""The tools that read a run need only numpy, h5py and matplotlib."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import h5py
import pytest
from answers import python
from launch_ranks import ROOT
from small_run import small_record, small_run

from tlt_hpc.look.run_log import RunLog
from tlt_hpc.storage.folder import RunFolder, part_path
from tlt_hpc.storage.rollout_log import write_step

TOOLS = ROOT / "tools"
ANALYSES = ("timeline", "lengths", "acceptance", "learning", "throughput", "compare")
FORBIDDEN = ("torch", "mpi4py", "pydantic", "transformers", "deepspeed", "pyarrow")
WITHOUT = f"""
import runpy, sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN}:
            raise ImportError("forbidden here: " + name)
sys.meta_path.insert(0, Forbid())
sys.path[0] = {str(TOOLS)!r}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(tool: str, *arguments: str | Path, status: int = 0) -> CompletedProcess[str]:
    """Run a tool in another folder, where the forbidden libraries cannot be imported."""
    return python("-c", WITHOUT, TOOLS / f"{tool}.py", *arguments, status=status, cwd="/", env={"HOME": "/tmp"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(tmp_path / "run")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.mark.parametrize("what", ANALYSES)
def test_verdict_figure_and_json(tmp_path: Path, folder: RunFolder, what: str) -> None:
    runs = [folder.path, small_run(tmp_path / "other").path] if what == "compare" else [folder.path]
    out = tmp_path / "out"
    done = start("look", what, *runs, "--output", out, "--theme", "dark", "--json", tmp_path / "found.json")
    assert done.stderr == ""
    found = json.loads((tmp_path / "found.json").read_text())
    lines = done.stdout.splitlines()
    assert lines[0] == found["verdict"] and all(line.startswith("wrote ") for line in lines[1:])
    assert sorted(path.name for path in out.iterdir()) == [f"{what}-dark.png", f"{what}-dark.svg"]


def test_no_text_of_a_csv_is_a_formula(tmp_path: Path, tool: Any) -> None:
    part = {"text": ["=1+1", "-x", "a=b"], "=score": [-1.0, 2.0, 3.0]}
    assert tool("export_run").put_csv(tmp_path / "a.csv", iter([part])) == 3
    assert (tmp_path / "a.csv").read_text().split() == ["text,'=score", "'=1+1,-1.0", "'-x,2.0", "a=b,3.0"]


def test_mistakes_are_one_line(tmp_path: Path, folder: RunFolder) -> None:
    run, no = folder.path, tmp_path / "no"
    for tool, *arguments in (
        ("look", "timeline", run, "--step", "99"),
        ("look", "compare", run),
        ("inspect_run", no),
        ("export_run", run, "--steps", "7:9"),
    ):
        done = start(tool, *arguments, status=2)
        assert done.stderr.startswith(f"{tool}: ") and done.stderr.count("\n") == 1, done.stderr


def test_export(tmp_path: Path, folder: RunFolder) -> None:
    start("export_run", folder.path, "--output", tmp_path / "csv")

    def table(name: str) -> list[dict[str, str]]:
        with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    assert [row["training/global_step"] for row in table("steps")] == ["1.0", "2.0", "3.0"]
    responses, rounds = table("responses"), table("rounds")
    assert len(responses) == 12 and [row["response_length"] for row in responses[:4]] == ["4", "4", "8", "5"]
    assert [(row["step"], row["rank"]) for row in responses[::2]] == [(s, r) for s in "123" for r in "01"]
    assert len(table("micro_steps")) == 6 and len(table("phases")) == 8 + 10 + 10
    assert [row["strategy"] for row in rounds[:3]] == ["prefill", "off", "drafter-4"] and len(rounds) == 18
    events = json.loads((tmp_path / "csv" / "trace.json").read_text())["traceEvents"]
    engine = [e for e in events if e["ph"] == "X" and e["tid"] == "engine" and e["pid"] == 1]
    assert [(e["name"], e["dur"]) for e in engine] == [("prefill", 1e6), ("drafter-4", 3e6), ("drafter-4", 2e6)]
    assert {e["pid"] for e in events} == {0, 1} and min(e["ts"] for e in events if "ts" in e) >= 0
    few = start("export_run", folder.path, "--output", tmp_path / "few", "--steps", "2")
    assert "responses.csv (4 rows)" in few.stdout and "step 2;" in few.stdout


# -- inspect_run ----------------------------------------------------------------------------------------------------


def test_inspect_names_what_is_wrong(folder: RunFolder) -> None:
    assert "All of these are sound." in start("inspect_run", folder.path, "--check").stdout
    part = part_path(folder.rollout_log(2, 0))
    part.write_bytes(b"half")
    write_step(folder.rollout_log(3, 0), small_record(3, 0))
    done = start("inspect_run", folder.path)
    assert f"half written: {part}" in done.stdout and "not committed yet: step 4" in done.stdout
    told = start("look", "timeline", folder.path).stdout
    assert told.startswith("Step 3,"), "the last with the logs of all ranks"
    path = folder.rollout_log(0, 0)
    path.write_bytes(path.read_bytes()[:-50])
    folder.rollout_log(1, 0).unlink()
    for rank in range(2):
        folder.rollout_log(2, rank).unlink()
    folder.metrics.write_bytes(folder.metrics.read_bytes() + b'{"torn')
    done = start("inspect_run", folder.path, "--check", status=1)
    assert f"{path}: damaged rollout log" in done.stdout
    for fault in ("step 2: no log of rank 0", "committed steps without logs: 3", "metrics.jsonl:4 is cut off"):
        assert fault in done.stdout


def test_a_flipped_bit_is_found_only_if_files_are_read_completely(folder: RunFolder, tool: Any) -> None:
    path = folder.rollout_log(1, 0)
    with h5py.File(path) as file:
        place = file["rollouts/response_tokens"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[place + 2] ^= 4
    path.write_bytes(data)
    faults = tool("inspect_run").faults
    assert not list(faults(RunLog(folder.path), read_whole=False))
    (fault,) = faults(RunLog(folder.path))
    assert str(path) in fault


def test_the_notebook_reads_a_runs_responses(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, on another run than the one that it names."""
    cells = json.loads((TOOLS.parent / "docs" / "responses.ipynb").read_text())["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert program.count('Path("runs/demo")') == 1
    names: dict[str, Any] = {}
    exec(program.replace('Path("runs/demo")', f"Path({str(folder.path)!r})"), names)
    log = RunLog(folder.path)
    table = names["by_step"]
    assert list(table.index) == [1, 2, 3] and len(names["responses"]) == sum(
        len(record.rollouts) for step in log.steps for record in log.read_rank_records(step)
    )
    longest = log.metric("response_length/max")
    assert not len(longest) or table["tail"].min() >= 1
    assert list(names["metrics"].index) == [1, 2, 3]
