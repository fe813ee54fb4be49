"""docs/files.md against files that the program writes: every array, attribute, key and figure, both ways.

The format of checkpoints is in a docstring.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
from answers import python
from launch_ranks import ROOT, tlt
from small_run import small_record

from tlt_hpc.checkpoint import manifest as checkpoint_manifest
from tlt_hpc.storage.rollout_log import write_kept_responses, write_step

PAGE = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables' rows that begin with code."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented(title: str) -> dict[str, str]:
    """Name -> type of what the tables say of an HDF5 file: one type for all names of a row, or one each."""
    types: dict[str, str] = {}
    for cells in rows(section("Read responses with h5py alone")) + rows(section(title)):
        names, kinds = code(cells[0]), code(cells[1])
        types |= dict(zip(names, kinds * len(names) if len(kinds) == 1 else kinds, strict=len(kinds) > 1))
    return {name: plain(kind) for name, kind in types.items()}


def words_of(module: ModuleType) -> set[str]:
    return set(re.findall(r"\w+", module.__doc__ or ""))


def plain(kind: str) -> str:
    """``int32 [D, 2]`` as ``int32, 2 dimensions``."""
    dtype, _, shape = kind.partition(" [")
    return f"{dtype}, {shape.count(',') + 1 if shape else 0} dimensions"


def found_in(path: Path) -> dict[str, str]:
    """The same of a file: arrays as ``group/name``, attributes as ``group@name``, a step's figures together."""
    types: dict[str, str] = {}

    def told(dtype: np.dtype[Any], num_dimensions: int) -> str:
        return f"{'bytes' if dtype.kind == 'S' else dtype.name}, {num_dimensions} dimensions"

    def look(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            types[name] = told(node.dtype, node.ndim)
        for key, value in node.attrs.items():
            types[f"{name}@{'*' if name == 'metrics' else key}"] = told(np.asarray(value).dtype, np.ndim(value))

    with h5py.File(path) as file:
        look("", file)
        file.visititems(look)
    return types


# -- HDF5 -----------------------------------------------------------------------------------------------------------


def test_kept_responses_are_as_the_page_says(tmp_path: Path) -> None:
    write_kept_responses(tmp_path / "kept.h5", "a" * 32, small_record(1, 0).rollouts, durable=False)
    log = {name: kind for name, kind in documented("The rollout log").items() if name.startswith("rollouts/")}
    assert {"rewards", "advantages", "@origin"} <= set(code(section("Kept responses")))
    own = documented("Kept responses") | {"@origin": plain("bytes")}
    assert found_in(tmp_path / "kept.h5") == own | {
        name: kind for name, kind in log.items() if name not in ("rollouts/rewards", "rollouts/advantages")
    }


def test_the_example_reads_responses_with_h5py_alone(tmp_path: Path) -> None:
    example = re.search(r"^```python\n(.*?)^```$", section("Read responses with h5py alone"), re.DOTALL | re.MULTILINE)
    assert example
    assert set(re.findall(r"^(?:import|from) (\w+)", example[1], re.MULTILINE)) == {"sys", "h5py", "numpy"}
    path = tmp_path / "log.h5"
    write_step(path, small_record(1, 0))
    said = python("-c", example[1], path).stdout.splitlines()
    assert said == ["2 responses, mean reward 1.000", "longest: 4 tokens, reward 1, ids [100, 101, 102, 103] ..."]


# -- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of everything that leaves a figure or a file: evaluation, rewards by workers, a drafter."""
    folder = tmp_path_factory.mktemp("page")
    small = ["run.num_steps=1", "run.ranks=1", "rollout.prompts_per_step=2", "rollout.group_size=4"]
    small += ["rollout.max_new_tokens=64", "reward.default=math", "reward.weights={answer=1}"]
    small += ["evaluation.every_steps=1", "evaluation.limit=2", "evaluation.samples=2", f"run.folder={folder}"]
    tlt(1, "train", "jobs/tiny.toml", *small)
    return folder / "tiny"


def pattern(name: str) -> re.Pattern[str]:
    """A key with its placeholders: words in capitals, and N for a number."""
    parts = re.split(r"(@N|\b[A-Z]{2,}\b)", name)
    return re.compile("".join({"@N": r"@\d+"}.get(p, "[^/]+" if p.isupper() else re.escape(p)) for p in parts))


def figures() -> dict[str, list[str]]:
    """Every key that the page names -> the cells of its row."""
    return {name: cells for cells in rows(section("metrics.jsonl")) for name in code(cells[0])}


@pytest.mark.mpi
def test_every_figure_of_a_step_is_on_the_page_and_every_figure_on_the_page_is_in_a_step(run: Path) -> None:
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    patterns = {name: pattern(name) for name in figures()}
    assert not [key for key in line if not any(p.fullmatch(key) for p in patterns.values())]
    due = [patterns[name] for name, cells in figures().items() if "optional" not in cells[1]]
    assert not [p.pattern for p in due if not any(p.fullmatch(key) for key in line)]


@pytest.mark.mpi
def test_a_ranks_own_figures_are_those_that_the_page_says(run: Path) -> None:
    with h5py.File(run / "rollouts" / "step-000001" / "rank-0000.h5") as file:
        own = list(file["metrics"].attrs)
    said = {name: cells[1] for name, cells in figures().items() if "*" in cells[1]}
    assert not [key for key in own if not any(pattern(name).fullmatch(key) for name in said)]
    due = [pattern(name) for name, how in said.items() if "optional" not in how]
    assert not [p.pattern for p in due if not any(p.fullmatch(key) for key in own)]


@pytest.mark.mpi
def test_every_file_of_a_run_is_on_the_page(run: Path) -> None:
    named = {name.partition("/")[0] for cells in rows(section("The folder")) for name in code(cells[0])}
    assert not {path.name for path in run.iterdir()} - named
    log = found_in(run / "rollouts" / "step-000001" / "rank-0000.h5")
    assert documented("The rollout log") == log
    assert documented("The feature cache") == found_in(run / "cache" / "step-000001" / "rank-0000.h5")
    judged = found_in(run / "evaluation" / "step-000001" / "responses" / "000000.h5")
    names = {name.removeprefix("responses/") for name in judged if name.startswith("responses/")}
    assert names <= set(code(section("Evaluations")))
    assert all(log[f"rollouts/{name}"] == judged[f"responses/{name}"] for name in names - {"failures"})
    assert judged["responses/failures"] == plain("bytes [N]")


@pytest.mark.mpi
def test_what_is_json_in_a_run_has_the_keys_of_the_page(run: Path) -> None:
    manifest = json.loads((run / "checkpoints" / "step-000001" / "state.json").read_text())
    format_words = words_of(checkpoint_manifest)
    tensors = {name: each for part in manifest["tensors"].values() for name, each in part.items()}
    keys = [manifest, manifest["files"][0], next(iter(tensors.values())), manifest["state"]]
    endings = {name.rpartition(".")[2] for name in tensors}
    assert set().union(*keys) | endings <= format_words
    assert endings == {"master", "exp_avg", "exp_avg_sq", "weight", "trained", "num_steps", "num_averaged"}

    assert set(json.loads((run / "finished.json").read_text())) <= set(code(section("The folder")))
    results = json.loads((run / "evaluation" / "step-000001" / "results.json").read_text())
    facts = json.loads((run / "evaluation" / "step-000001" / "evaluation.json").read_text())
    assert set(results) - set(facts) <= set(code(section("Evaluations")))
    line = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert {key for key in line if not key.startswith("val-")} <= set(code(section("Evaluations")))


@pytest.mark.mpi
def test_what_a_start_says_of_its_machine_has_the_keys_of_the_page(run: Path) -> None:
    line = json.loads((run / "environment.jsonl").read_text().splitlines()[0])
    table = section("The rest").partition("`status/`")[0]
    assert set(line) == {name for cells in rows(table) for name in code(cells[0])}
    assert set(line["hosts"][0]) <= set(code(table))
