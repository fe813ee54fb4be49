"""The tools that look at a run, as a user starts them: on a machine that has numpy, h5py and matplotlib and no more."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from small_run import small_record, small_run

from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

TOOLS = Path(__file__).parents[1] / "tools"
DRAWING = ("timeline", "lengths", "acceptance", "learning", "throughput", "compare_runs")
ALL = (*DRAWING, "export_run", "inspect_run")
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


def start(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In another folder, and where the forbidden libraries cannot be had."""
    command = [sys.executable, "-c", WITHOUT, TOOLS / f"{tool}.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env={"HOME": "/tmp"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(tmp_path / "run")


@pytest.mark.parametrize("tool", DRAWING)
def test_verdict_figure_and_json(tmp_path: Path, folder: RunFolder, tool: str) -> None:
    runs = [folder.path, small_run(tmp_path / "other").path] if tool == "compare_runs" else [folder.path]
    done = start(tool, *runs, "--out", tmp_path / "out", "--theme", "both", "--json", tmp_path / "found.json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    lines = done.stdout.splitlines()
    assert lines[0] == found["verdict"] and all(line.startswith("wrote ") for line in lines[1:])
    assert sorted(path.name.partition("-")[2] for path in (tmp_path / "out").iterdir()) == [
        "dark.png", "dark.svg", "light.png", "light.svg"
    ]  # fmt: skip


def test_json_to_standard_output_stands_there_alone(folder: RunFolder) -> None:
    done = start("lengths", folder.path, "--json", "-")
    assert json.loads(done.stdout)["longest"] == [8, 8, 8] and "responses in steps" in done.stderr
    assert (folder.path / "figures" / "lengths-light.svg").exists(), "the default place"
    assert json.loads(start("lengths", folder.path, "--json", "-", "--last", "2").stdout)["steps"] == [1, 2]


@pytest.mark.parametrize("tool", ("lengths", "learning"))
def test_a_run_that_has_just_begun_has_no_figure(tmp_path: Path, tool: str) -> None:
    RunFolder(tmp_path / "run").create()
    done = start(tool, tmp_path / "run")
    assert done.returncode == 0 and "no figure" in done.stdout and not (tmp_path / "run" / "figures").exists()


def test_what_is_left_out_is_said(folder: RunFolder) -> None:
    folder.rollout_log(1, 1).write_bytes(b"no HDF5")
    done = start("lengths", folder.path)
    assert done.returncode == 0
    assert any(
        line.startswith("left out: ") and "step-000001/rank-0001.h5" in line for line in done.stdout.splitlines()
    )


@pytest.mark.parametrize("tool", ALL)
def test_a_wrong_folder_is_one_line(tmp_path: Path, tool: str) -> None:
    more = ["--check"] if tool == "inspect_run" else []
    runs = [tmp_path / "no", tmp_path / "none"] if tool == "compare_runs" else [tmp_path / "no"]
    done = start(tool, *runs, *more)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{tool}: ") and str(tmp_path / "no") in done.stderr


def test_other_mistakes_are_one_line_too(tmp_path: Path, folder: RunFolder) -> None:
    (tmp_path / "file").write_text("")
    for tool, *more in (
        ("timeline", "--step", "99"),
        ("timeline", "--out", tmp_path / "file" / "below"),
        ("compare_runs",),
        ("lengths", "--last", "0"),
        ("export_run", "--steps", "7:9"),
        ("export_run", "--steps", "a"),
        ("export_run", "--format", "parquet"),
    ):
        done = start(tool, folder.path, *more)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, (tool, more, done.stderr)
    assert "needs pyarrow" in done.stderr


def test_export(tmp_path: Path, folder: RunFolder) -> None:
    done = start("export_run", folder.path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr

    def table(name: str) -> list[dict[str, str]]:
        with (tmp_path / "out" / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    assert [row["training/global_step"] for row in table("steps")] == ["0.0", "1.0", "2.0"]
    responses = table("responses")
    assert len(responses) == 12 and [row["response_length"] for row in responses[:4]] == ["4", "4", "8", "5"]
    assert [(row["step"], row["rank"]) for row in responses[::2]] == [(s, r) for s in "012" for r in "01"]
    assert len(table("micro_steps")) == 6 and len(table("phases")) == 8 + 10 + 10
    rounds = table("rounds")
    assert [row["strategy"] for row in rounds[:3]] == ["prefill", "off", "drafter-4"] and len(rounds) == 18
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    few = start("export_run", folder.path, "--out", tmp_path / "few", "--steps", "1")
    assert "responses.csv (4 rows)" in few.stdout and "step 1;" in few.stdout


def test_inspect_checks_and_repairs(folder: RunFolder) -> None:
    assert start("inspect_run", folder.path).returncode == 0
    done = start("inspect_run", folder.path, "--check")
    assert done.returncode == 0 and "All of these are sound." in done.stdout
    whole = folder.metrics.read_bytes()
    folder.metrics.write_bytes(whole + b'{"torn')
    assert start("inspect_run", folder.path, "--check").returncode == 1
    done = start("inspect_run", folder.path, "--repair")
    assert (
        done.returncode == 0 and "taking off its last 6 bytes" in done.stdout and folder.metrics.read_bytes() == whole
    )
    path = folder.rollout_log(0, 0)
    path.write_bytes(path.read_bytes()[:-50])
    done = start("inspect_run", folder.path, "--check", "--repair")
    assert done.returncode == 1 and f"{path}: damaged rollout log" in done.stdout
    assert path.exists(), "a repair removes no log"


def test_a_step_under_way_is_no_fault(folder: RunFolder) -> None:
    write_step(folder.rollout_log(3, 0), small_record(3, 0))
    done = start("inspect_run", folder.path, "--check")
    assert done.returncode == 0 and "Not committed yet: step 3." in done.stdout
    assert start("timeline", folder.path).stdout.startswith("Step 2,"), "the last that has all its ranks"


def test_no_tool_hides_a_module_of_python() -> None:
    names = {path.stem for path in TOOLS.glob("*.py")}
    assert not names & set(sys.stdlib_module_names) and set(ALL) <= names


def test_help_needs_no_library_for_pictures() -> None:
    program = "import runpy, sys; sys.argv = [sys.argv[1], '--help']\n"
    program += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    program += "except SystemExit: sys.exit('matplotlib' in sys.modules)\n"
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(TOOLS)!r}\n{program}", TOOLS / "timeline.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0 and "--theme" in done.stdout, done.stderr


def test_parquet_has_what_csv_has(tmp_path: Path, folder: RunFolder) -> None:
    """In this environment, which has pyarrow; the one above, which has not, is told so."""
    for form in ("csv", "parquet"):
        command = [sys.executable, TOOLS / "export_run.py", folder.path, "--out", tmp_path / form, "--format", form]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 0, done.stderr
    names = sorted(path.stem for path in (tmp_path / "parquet").glob("*.parquet"))
    assert names == sorted(path.stem for path in (tmp_path / "csv").glob("*.csv")) and "responses" in names
    for name in names:
        columns = parquet.read_table(tmp_path / "parquet" / f"{name}.parquet").to_pydict()
        with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(columns) == list(rows[0]) and len(rows) == len(next(iter(columns.values()))), name
        for key, values in columns.items():
            for value, row in zip(values, rows, strict=True):
                same = str(value) == row[key] or (value is None and row[key] == "")
                assert same or float(value) == pytest.approx(float(row[key])), (name, key)


def test_a_log_that_was_made_up_is_one_for_every_tool(tmp_path: Path) -> None:
    def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:  # it writes a configuration: with pydantic
        command = [sys.executable, TOOLS / "make_log.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")

    made = make(tmp_path / "run", "--steps", "2", "--ranks", "2", "--responses", "8")
    assert made.returncode == 0 and "4 files" in made.stdout, made.stderr
    done = start("inspect_run", tmp_path / "run", "--check")
    assert done.returncode == 0 and "4 logs" in done.stdout and "All of these are sound." in done.stdout
    told = json.loads(start("acceptance", tmp_path / "run", "--json", "-").stdout)
    assert told["steps"] == [0, 1] and sum(map(sum, told["step_tokens"])) > 4 * 8 * 100 and told["problems"] == []
    again = make(tmp_path / "run")
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "is there already" in again.stderr
    odd = make(tmp_path / "odd", "--responses", "9")
    assert odd.returncode == 2 and odd.stderr.count("\n") == 1 and not (tmp_path / "odd").exists()
