"""What data.source may name: files, lists, patterns, folders of the hub and of datasets; and what it may not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_sets import (
    all_prompts,
    config_of,
    gcd_row,
    gcd_rows,
    texts,
    write_arrow,
    write_jsonl,
    write_parquet,
    write_saved,
)

from tlt_hpc.config import ConfigError, load_config

FIRST, SECOND = gcd_rows(4)[:2], gcd_rows(4)[2:]
ALL = [row["prompt"] for row in gcd_rows(4)]


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        all_prompts(source, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("write", "name"), [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet"), (write_arrow, "a.arrow")]
)
def test_the_same_rows_from_every_kind_of_file(write: Callable[..., Path], name: str, tmp_path: Path) -> None:
    prompts = all_prompts(write(tmp_path / name, gcd_rows(4)))
    assert texts(prompts) == ALL
    assert [p.answer for p in prompts] == ["1", "2", "3", "4"]
    assert {p.source for p in prompts} == {Path(name).suffix[1:]}


def test_an_arrow_file_in_the_file_format(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(gcd_rows(4))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    assert texts(all_prompts(tmp_path / "a.arrow")) == ALL


def test_files_of_a_list_follow_each_other_and_may_differ_in_kind(tmp_path: Path) -> None:
    files = [write_parquet(tmp_path / "z.parquet", FIRST), write_jsonl(tmp_path / "a.jsonl", SECOND)]
    assert texts(all_prompts([str(file) for file in files])) == ALL


def test_a_pattern_takes_its_files_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "part-2.parquet", SECOND)
    write_parquet(tmp_path / "part-1.parquet", FIRST)
    write_parquet(tmp_path / "other.parquet", FIRST)
    assert texts(all_prompts(tmp_path / "part-*.parquet")) == ALL
    monkeypatch.chdir(tmp_path)
    assert texts(all_prompts("part-?.parquet")) == ALL


def test_a_folder_of_splits_that_datasets_saved(tmp_path: Path) -> None:
    write_saved(tmp_path / "train", [FIRST])
    write_saved(tmp_path / "test", [SECOND])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts(all_prompts(tmp_path)) == ALL[:2]
    assert texts(all_prompts(tmp_path, "data.split=test")) == ALL[2:]
    assert refusal(tmp_path, "data.split=dev") == (
        f"data.source = {str(tmp_path)!r} has no split 'dev'; set data.split to one of test, train"
    )


@pytest.mark.parametrize("folder", ["", "data"])
def test_a_folder_of_shards_as_on_the_hub(folder: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / folder / "train-00000-of-00002.parquet", FIRST)
    write_parquet(tmp_path / folder / "train-00001-of-00002.parquet", SECOND)
    write_parquet(tmp_path / folder / "test-00000-of-00001.parquet", [gcd_row(9)])
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert texts(all_prompts(tmp_path)) == ALL
    assert texts(all_prompts(tmp_path, "data.split=test")) == ["gcd(9,19)="]
    assert refusal(tmp_path, "data.split=dev") == (
        f"data.source = {str(tmp_path)!r} has no split 'dev'; set data.split to one of test, train"
    )


def test_splits_by_the_end_of_a_name_and_by_folder(tmp_path: Path) -> None:
    write_arrow(tmp_path / "ends" / "gsm8k-train.arrow", FIRST)
    write_arrow(tmp_path / "ends" / "gsm8k-test.arrow", SECOND)
    write_parquet(tmp_path / "folders" / "train" / "0.parquet", FIRST)
    write_parquet(tmp_path / "folders" / "test" / "0.parquet", SECOND)
    assert texts(all_prompts(tmp_path / "ends")) == texts(all_prompts(tmp_path / "folders")) == ALL[:2]


# --- what is refused ---

CHOICE = "a .jsonl, .parquet or .arrow file, a folder or pattern of them, 'reasoning-gym:NAME' or 'embedded:gcd'"


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    gone = str(tmp_path / "none.jsonl")
    assert refusal(gone) == f"data.source = {gone!r} does not exist; give {CHOICE}"
    pattern = str(tmp_path / "*.parquet")
    assert refusal(pattern) == f"data.source = {pattern!r}: no file is named like that; fix the pattern"
    assert refusal(tmp_path) == f"data.source = {str(tmp_path)!r} has no data file; give {CHOICE}"
    for source in ("openai/gsm8k", "https://nowhere/train.parquet"):
        assert refusal(source) == f"data.source = {source!r} does not exist; give {CHOICE}"


def test_sources_that_cannot_be_read_together_or_at_all(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", FIRST)
    table, text = tmp_path / "a.csv", write_jsonl(tmp_path / "b.jsonl", ["prompt,answer", "1=,1"])
    table.touch()
    for source, said in (
        ([str(path), str(path)], f"names {path} twice; name it once"),
        ([str(path), "embedded:gcd"], "'embedded:gcd' cannot be in a list; give it alone"),
        ([str(path), "reasoning-gym:leg_counting"], "'reasoning-gym:leg_counting' cannot be in a list; give it alone"),
        (table, f"{table} is of an unknown kind; give {CHOICE}"),
        (text, f"{text}:1: no JSON object (Expecting value"),
    ):
        assert said in refusal(source)


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(2**36)
    assert refusal(path) == f"data.source: {path}:1: over 67108864 bytes; give one JSON object a line"


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", FIRST)

    opened = Path.open

    def refuse(file: Path, *how: Any, **more: Any) -> Any:
        if file == path:
            raise PermissionError(13, "Permission denied")
        return opened(file, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(path) == f"data.source: {path}: Permission denied; make sure that you may read it"


def test_a_folder_of_several_data_sets(tmp_path: Path) -> None:
    write_parquet(tmp_path / "main" / "train-00000-of-00001.parquet", FIRST)
    write_parquet(tmp_path / "socratic" / "train-00000-of-00001.parquet", SECOND)
    assert refusal(tmp_path) == (
        f"data.source = {str(tmp_path)!r} holds several data sets; give one of {tmp_path}/main, {tmp_path}/socratic"
    )


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "parquet"), ("a.arrow", "arrow")])
@pytest.mark.parametrize("content", [b"", b"no such thing at all", b"ARROW1\0\0PAR1"])
def test_a_file_that_is_not_what_its_name_says(name: str, kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    start, reason, end = re.split(r"[()]", refusal(path), maxsplit=2)  # the reason is pyarrow's
    assert start == f"data.source: {path} cannot be read as {kind} " and len(reason) > 9
    assert end.rpartition(")")[2] == "; write or download it again"


def test_files_without_rows(tmp_path: Path) -> None:
    empty = write_jsonl(tmp_path / "a.jsonl", ["", "  "])
    remedy = "has no rows; give a file with prompts and answers"
    assert refusal(empty) == f"data.source = {str(empty)!r} {remedy}"
    (tmp_path / "0.jsonl").touch()
    assert refusal(tmp_path / "0.jsonl") == f"data.source = '{tmp_path}/0.jsonl' {remedy}"
    none = tmp_path / "none.parquet"
    pa.parquet.write_table(pa.schema([("prompt", pa.string()), ("answer", pa.string())]).empty_table(), none)
    assert refusal(none) == f"data.source = {str(none)!r} {remedy}"


def test_a_column_twice(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"], ["c"]], names=["prompt", "answer", "prompt"])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    path = write_arrow(tmp_path / "a.arrow", FIRST)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert 'Field "prompt" exists 2 times in schema' in refusal(tmp_path / name)


def test_a_saved_folder_that_is_damaged(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "one", [FIRST, SECOND])
    (folder / "data-00001-of-00002.arrow").unlink()
    assert refusal(folder) == (
        f"data.source: {folder} lacks data-00001-of-00002.arrow, which its state.json names; copy it there too"
    )
    (folder / "state.json").write_text("{}")
    assert refusal(folder) == f"data.source: {folder}/state.json does not list data files; save the data set again"


@pytest.mark.parametrize("value", ["3", "[]", '["a", 3]', '[""]', '""'])
def test_a_source_of_another_type(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("a.jsonl", f"data.source={value}")
    shown = value.replace('"', "'")
    assert str(caught.value) == (
        f"data.source = {shown}: give a file, a folder, a pattern or a task, or a list of files"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.task_args={a = 1}",
            "data.task_args = {'a': 1} says nothing with data.source = 'embedded:gcd'; use data.source = "
            "'reasoning-gym:NAME' or leave data.task_args out",
        ),
        (
            "data.task_args={a = 2024-07-26}",
            "data.task_args = {'a': datetime.date(2024, 7, 26)}: give numbers, texts, booleans and lists alone",
        ),
        ("data.task_args={size = 0}", "data.task_args.size = 0: use a whole number from 1 to 100000000"),
        ("data.max_prompt_tokens=0", "data.max_prompt_tokens = 0: input should be greater than or equal to 1"),
        ("data.chat_template=", "data.chat_template = '': string should have at least 1 character"),
        ("data.overlong=cut", "data.overlong = 'cut': input should be 'error' or 'drop'"),
    ],
)
def test_settings_that_cannot_be(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Path(__file__).parents[1] / "jobs" / "tiny.toml", [override])
    assert str(caught.value) == message
