"""A run continues with the data that it began with, or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data_sets import PLAIN, RAW, config_of, gcd_rows, open_data, verl_row, write_jsonl, write_saved
from fake_world import OneRank

from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import ConfigError
from tlt_hpc.data.claim import claim_data
from tlt_hpc.data.prompts import FilePrompts
from tlt_hpc.session import claim_folder
from tlt_hpc.storage.folder import RunFolder


def claim(run: Path, source: Path, *overrides: str, chat: ChatFormat = RAW) -> FilePrompts:
    """What a start of the run in folder ``run`` does before anything is generated."""
    config = config_of(source, f"run.folder={run}", *overrides)
    prompts = open_data(source, f"run.folder={run}", *overrides, chat=chat)
    claim_folder(RunFolder(config.folder), config, OneRank(), prompts)
    return prompts


def refusal(*given: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        claim(*given, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_goes_on_with_the_same_data(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5))
    first = [prompt.text for step in range(4) for prompt in claim(tmp_path, path).batch(step)]
    path.touch()  # a copy is younger than what it is a copy of
    again = claim(tmp_path, path)
    assert [prompt.text for step in (2, 3) for prompt in again.batch(step)] == first[8:]
    kept = json.loads((tmp_path / "tiny" / "data.json").read_text())
    assert set(kept) == {"data.source", "chat template", "data.overlong", "data.broken_rows"}


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5))
    claim(tmp_path, path)
    write_jsonl(path, gcd_rows(6))
    assert re.sub(r"\w{12} ", "DIGEST ", refusal(tmp_path, path)) == (
        f"{tmp_path}/tiny holds a run whose data.source was another (DIGEST then, DIGEST now); give it back as it was "
        "or give another run.name"
    )
    write_jsonl(path, gcd_rows(5))
    claim(tmp_path, path)


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved", [gcd_rows(3), gcd_rows(4)])
    claim(tmp_path, folder)
    write_saved(folder, [gcd_rows(3), gcd_rows(5)])
    assert "whose data.source was another" in refusal(tmp_path, folder)


def test_a_changed_chat_template_is_refused(tmp_path: Path) -> None:
    """The model's folder may move, so what it renders is held against what it did."""
    path = write_jsonl(tmp_path / "a.jsonl", [verl_row(6)])
    claim(tmp_path, path, chat=RAW)
    assert "whose chat template was another" in refusal(tmp_path, path, chat=PLAIN)


def test_rows_may_come_to_be_left_out_and_not_back(tmp_path: Path) -> None:
    """Where a row was in the way, a run must be able to continue without it; its draws before had none of them."""
    path = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5))
    claim(tmp_path, path)
    claim(tmp_path, path, "data.overlong=drop")
    claim(tmp_path, path, "data.overlong=drop", "data.broken_rows=skip")
    assert refusal(tmp_path, path, "data.overlong=drop") == (
        f"{tmp_path}/tiny holds a run with data.broken_rows = 'skip', now 'error'; rows that it left out would be "
        "missed: resume with the old value or give another run.name"
    )


def test_other_settings_of_the_data_are_the_configurations_to_refuse(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5))
    claim(tmp_path, path)
    assert refusal(tmp_path, path, "data.system_prompt='1'", "data.text_prompts=chat") == (
        f"{tmp_path}/tiny/config.toml holds a run with data.system_prompt = '', now '1'; "
        "data.text_prompts = 'raw', now 'chat': resume with the old values or give another run.name (what may change: "
        'docs/resume.md, "Changing settings on resume")'
    )


class OnTwoNodes(OneRank):
    """What the second of two ranks sees, whose files are others than the first one's."""

    rank, size, hostname = 1, 2, "there"

    def __init__(self, first: Any) -> None:
        self._first = first

    def allgather(self, item: Any) -> list[Any]:
        return [("here", item[1], self._first), item]

    def once(self, work: Any) -> Any:
        return next(Path().glob("*")).name, "here"


def test_files_that_differ_between_nodes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    (tmp_path / "tiny" / "probe").touch()
    path = write_jsonl(tmp_path / "a.jsonl", gcd_rows(5))
    config = config_of(path, f"run.folder={tmp_path}")
    with pytest.raises(ConfigError) as caught:
        claim_folder(RunFolder(config.folder), config, OnTwoNodes(b"another"), open_data(path))
    assert str(caught.value) == (
        "data.source: rank 1 on there draws other prompts than rank 0 on here; give all nodes the same files"
    )


def test_a_run_from_before_is_given_its_fingerprints(tmp_path: Path) -> None:
    claim_data(tmp_path, {"data.source": "a"})
    claim_data(tmp_path, {"data.source": "a", "chat template": "b"})
    with pytest.raises(ConfigError, match="whose chat template was another"):
        claim_data(tmp_path, {"data.source": "a", "chat template": "c"})


def test_damaged_fingerprints(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        claim_data(tmp_path, {})
    assert str(caught.value) == f"{tmp_path}/data.json is damaged; remove it to resume with the data as it is now"
