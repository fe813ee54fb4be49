"""A run continues with the data that it began with, or not at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from answers import refusal
from data_sets import PLAIN, RAW, config_of, gcd_rows, open_data, write_jsonl
from fake_world import OneRank, ThreadWorld, on_threads

from tlt_hpc.checkpoint.claim import check_and_write_fingerprints, claim_run_folder_all_ranks
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.data.prompts import FilePrompts
from tlt_hpc.storage.folder import RunFolder


def claim(run: Path, source: Path, *overrides: str, chat: ChatFormat = RAW) -> FilePrompts:
    """What a start of the run in folder ``run`` does before anything is generated."""
    config = config_of(source, f"run.folder={run}", *overrides)
    prompts = open_data(source, f"run.folder={run}", *overrides, chat=chat)
    claim_run_folder_all_ranks(RunFolder(config.folder), config, OneRank(), prompts)
    return prompts


def test_a_run_resumes_with_the_same_data_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5))
    first = [prompt.text for step in range(4) for prompt in claim(tmp_path, path).draw_step_prompts(step)]
    path.touch()  # a copy is younger than the original
    again = claim(tmp_path, path)
    assert [prompt.text for step in (2, 3) for prompt in again.draw_step_prompts(step)] == first[8:]
    kept = json.loads((tmp_path / "tiny" / "data.json").read_text())
    assert set(kept) == {"data.source", "chat template", "data.overlong"}
    write_jsonl(path, gcd_rows(6))
    assert re.sub(r"\w{12} ", "DIGEST ", refusal(claim, tmp_path, path)) == (
        f"{tmp_path}/tiny holds a run whose data.source was another (DIGEST then, DIGEST now); restore it or give "
        "another run.name"
    )
    assert json.loads((tmp_path / "tiny" / "data.json").read_text()) == kept
    write_jsonl(path, gcd_rows(5))
    assert "whose chat template was another" in refusal(claim, tmp_path, path, chat=PLAIN)  # the model's may move
    claim(tmp_path, path, "data.overlong=drop")
    assert "was another (drop then, error now); prompts that it left out would" in refusal(claim, tmp_path, path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_reference_of_a_divergence_stays_the_model_that_the_run_began_with(tmp_path: Path, name: str) -> None:
    """``model.path`` may change on a resume, for the checkpoint has the policy; it does not have the reference."""
    path, model, moved = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5)), tmp_path / "model", tmp_path / "moved"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / name).write_bytes(bytes(1000))
    shutil.copytree(model, moved)
    given = ("algorithm.kl_coefficient=0.01",)
    claim(tmp_path, path, f"model.path={model}", *given)
    claim(tmp_path, path, f"model.path={moved}", *given)
    (moved / name).write_bytes(bytes(999) + b"1")
    assert "began with other files of its model" in refusal(claim, tmp_path, path, f"model.path={moved}", *given)


def test_files_that_differ_between_nodes_are_refused(tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / f"{count}.jsonl", gcd_rows(count)) for count in (5, 6)]
    config = config_of(sources[0], f"run.folder={tmp_path}")

    def claim_own(world: ThreadWorld) -> None:
        claim_run_folder_all_ranks(RunFolder(config.folder), config, world, open_data(sources[world.rank]))

    said = "data.source: rank 1 on node1 draws other prompts than rank 0 on node0; give all nodes the same files"
    assert [str(each) for each in on_threads(2, claim_own)] == [said] * 2


def test_fingerprints_of_an_earlier_version_and_damaged_ones(tmp_path: Path) -> None:
    check_and_write_fingerprints(tmp_path, {"data.source": "a", "data.broken_rows": "skip"})
    check_and_write_fingerprints(tmp_path, {"data.source": "a", "chat template": "b"})
    assert "chat template was another" in refusal(
        check_and_write_fingerprints, tmp_path, {"data.source": "a", "chat template": "c"}
    )
    (tmp_path / "data.json").write_text("{")
    said = refusal(check_and_write_fingerprints, tmp_path, {})
    assert "data.json is damaged (" in said and "; remove it to resume with the data as it is now" in said
