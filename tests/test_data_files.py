"""The files that data.source may name: files, lists, patterns, folders of the hub and of datasets."""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from answers import TINY, refusal
from data_sets import all_prompts, gcd_row, gcd_rows, texts, write_arrow, write_jsonl, write_parquet

from tlt_hpc.config import load_config
from tlt_hpc.data.evaluation_sets import open_reader

FIRST, SECOND = gcd_rows(4)[:2], gcd_rows(4)[2:]
ALL = [row["prompt"] for row in gcd_rows(4)]


@pytest.mark.parametrize(
    ("write", "name"), [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet"), (write_arrow, "a.arrow")]
)
def test_the_same_rows_from_every_kind_of_file(write: Callable[..., Path], name: str, tmp_path: Path) -> None:
    prompts = all_prompts(write(tmp_path / name, gcd_rows(4)))
    assert texts(prompts) == ALL
    assert [p.answer for p in prompts] == ["1", "2", "3", "4"]
    assert {p.source for p in prompts} == {Path(name).suffix[1:]}


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


TRAIN, TEST = ("train-00000-of-00002", "train-00001-of-00002"), "test-00000-of-00001"


@pytest.mark.parametrize(
    ("train", "test", "write"),
    [
        ([f"{name}.parquet" for name in TRAIN], f"{TEST}.parquet", write_parquet),
        ([f"data/{name}.parquet" for name in TRAIN], f"data/{TEST}.parquet", write_parquet),
        # as datasets saves a DatasetDict
        ([f"train/data-0000{i}-of-00002.arrow" for i in (0, 1)], "test/data-00000-of-00001.arrow", write_arrow),
        ([f"data-0000{i}-of-00002.arrow" for i in (0, 1)], "", write_arrow),
        (["gsm8k-train.arrow", "gsm8k.train-2.arrow"], "gsm8k-test.arrow", write_arrow),
    ],
    ids=["hub", "hub, data", "saved", "no splits", "names"],
)
def test_a_folder_of_splits(train: list[str], test: str, write: Callable[..., Path], tmp_path: Path) -> None:
    for name, rows in zip(train, (FIRST, SECOND), strict=True):
        write(tmp_path / name, rows)
        (tmp_path / name).with_name("state.json").write_text("{}")
        write(tmp_path / name.rpartition("/")[0] / "cache-1f.arrow", [gcd_row(99)])  # of a map of datasets
    if test:
        write(tmp_path / test, [gcd_row(9)])
    assert texts(all_prompts(tmp_path)) == ALL
    if not test:
        return
    for name in train:
        (tmp_path / name).unlink()
    start = f"data.source = {str(tmp_path)!r} has no split 'train'; give a pattern such as FOLDER/**/*validation* for "
    assert refusal(all_prompts, tmp_path).startswith(f"{start}the files of one of test, or give")


def test_an_evaluation_reads_the_split_called_test_and_tells_how_to_read_another(tmp_path: Path) -> None:
    folder = tmp_path / "aime; give one of data.source"  # no text of it is taken for the message's
    write_parquet(folder / "train.parquet", FIRST)
    write_parquet(folder / "validation.parquet", SECOND)
    config, no_check = load_config(TINY), lambda _: ""
    wanted = f"evaluation.sources = {str(folder)!r} has no split 'test'; give a pattern such as "
    remedy = "FOLDER/**/*validation* for the files of one of train, validation, or give one of its folders"
    assert refusal(open_reader, config, str(folder), None, None, no_check) == wanted + remedy
    write_parquet(tmp_path / "hub" / "data" / "validation-00000-of-00001.parquet", SECOND)
    for place in (folder, tmp_path / "hub"):
        pattern = open_reader(config, str(place / "**" / "*validation*"), None, None, no_check)
        assert len(pattern.rows) == len(SECOND)
    write_parquet(folder / "test.parquet", FIRST)
    assert len(open_reader(config, str(folder), None, None, no_check).rows) == len(FIRST)


# --- what is refused ---


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    kinds = "a .jsonl, .parquet or .arrow file, a folder or pattern of them, or 'embedded:gcd'"
    choice = f"{kinds} (docs/data.md)"
    assert refusal(all_prompts, tmp_path) == f"data.source = {str(tmp_path)!r} has no data file; give {choice}"
    for source in (str(tmp_path / "none.jsonl"), "openai/gsm8k", "https://nowhere/train.parquet"):
        assert refusal(all_prompts, source) == f"data.source = {source!r} does not exist; give {choice}"
    pattern = str(tmp_path / "*.parquet")
    assert refusal(all_prompts, pattern) == f"data.source = {pattern!r}: no file is named like that; fix the pattern"
    (tmp_path / "a.csv").touch()
    assert (
        refusal(all_prompts, tmp_path / "a.csv")
        == f"data.source: {tmp_path}/a.csv is of an unknown kind; give {choice}"
    )


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "parquet"), ("a.arrow", "arrow")])
@pytest.mark.parametrize("content", [b"", b"no such thing at all", b"ARROW1\0\0PAR1"])
def test_a_file_that_is_not_what_its_name_says(name: str, kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    start, reason, end = re.split(r"[()]", refusal(all_prompts, path), maxsplit=2)  # the reason is pyarrow's
    assert start == f"data.source: {path} cannot be read as {kind} " and len(reason) > 9
    assert end.rpartition(")")[2] == "; write or download it again"


def test_files_without_rows(tmp_path: Path) -> None:
    empty, none = write_jsonl(tmp_path / "a.jsonl", ["", "  "]), tmp_path / "none.parquet"
    pa.parquet.write_table(pa.schema([("prompt", pa.string()), ("answer", pa.string())]).empty_table(), none)
    for path in (empty, none):
        assert refusal(all_prompts, path) == f"data.source = {str(path)!r} has no rows; give a file that has some"


ROW = '{"prompt": "Größe 6 und 4", "answer": 2}\n'
COPIED = "convert it: iconv -t UTF-8 -f"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ROW.encode("utf-16"), f"UTF-16 text; {COPIED} UTF-16"),
        (codecs.BOM_UTF16_BE + ROW.encode("utf-16-be"), f"UTF-16 text; {COPIED} UTF-16"),
        (ROW.encode("utf-16-le"), f"UTF-16LE text; {COPIED} UTF-16LE"),
        (ROW.encode("utf-16-be"), f"UTF-16BE text; {COPIED} UTF-16BE"),
        (ROW.encode("utf-32"), f"UTF-32 text; {COPIED} UTF-32"),
        (ROW.encode("utf-32-be"), f"UTF-32BE text; {COPIED} UTF-32BE"),
        (gzip.compress(ROW.encode()), "compressed by gzip; decompress it with gunzip"),
        (b"PAR1" + bytes(40), "a parquet file; name it .parquet"),
    ],
    ids=["utf-16", "big", "le", "be", "utf-32", "32-be", "gzip", "parquet"],
)
def test_a_file_that_is_no_utf8_text_is_named_with_what_converts_it(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert refusal(all_prompts, path) == f"data.source: {path} is {words}"


def test_latin_1_is_named_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW.encode("latin-1"))
    words = f"byte 0xf6 at position 14 is not UTF-8; if the file is Latin-1, {COPIED} LATIN1"
    assert f"a.jsonl:1: no JSON object ({words})" in refusal(all_prompts, path)
