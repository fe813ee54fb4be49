"""The files and tasks that data.source may name: files, lists, patterns, folders; problems of reasoning-gym."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from data_sets import (
    RAW,
    all_prompts,
    config_of,
    gcd_row,
    gcd_rows,
    open_data,
    reader_of,
    texts,
    write_arrow,
    write_jsonl,
    write_parquet,
)
from tiny import embedded_tokenizer

from tlt_hpc.config import ConfigError, UserError, load_config
from tlt_hpc.data.evaluation_sets import open_reader, open_sets

TINY = Path(__file__).parent.parent / "jobs" / "tiny.toml"
FIRST, SECOND = gcd_rows(4)[:2], gcd_rows(4)[2:]
ALL = [row["prompt"] for row in gcd_rows(4)]


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
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
        (["gsm8k-train.arrow", "gsm8k.train-2.arrow"], "gsm8k-test.arrow", write_arrow),
    ],
    ids=["hub", "hub, data", "saved", "names"],
)
def test_a_folder_of_splits(train: list[str], test: str, write: Callable[..., Path], tmp_path: Path) -> None:
    for name, rows in zip(train, (FIRST, SECOND), strict=True):
        write(tmp_path / name, rows)
        (tmp_path / name).with_name("state.json").write_text("{}")
        write(tmp_path / name.rpartition("/")[0] / "cache-1f.arrow", [gcd_row(99)])  # of a map of datasets
    write(tmp_path / test, [gcd_row(9)])
    assert texts(all_prompts(tmp_path)) == ALL
    for name in train:
        (tmp_path / name).unlink()
    start = f"data.source = {str(tmp_path)!r} has no split 'train'; give a pattern such as FOLDER/**/*validation* for "
    assert refusal(tmp_path).startswith(f"{start}the files of one of test, or give")


def test_an_evaluation_reads_the_split_called_test_and_tells_how_to_read_another(tmp_path: Path) -> None:
    folder = tmp_path / "aime; give one of data.source"  # no text of it is taken for the message's
    write_parquet(folder / "train.parquet", FIRST)
    write_parquet(folder / "validation.parquet", SECOND)
    config, no_check = load_config(TINY), lambda _: ""
    with pytest.raises(ConfigError) as caught:
        open_reader(config, str(folder), None, None, no_check)
    wanted = f"evaluation.sources = {str(folder)!r} has no split 'test'; give a pattern such as "
    remedy = "FOLDER/**/*validation* for the files of one of train, validation, or give one of its folders"
    assert str(caught.value) == wanted + remedy
    write_parquet(tmp_path / "hub" / "data" / "validation-00000-of-00001.parquet", SECOND)
    for place in (folder, tmp_path / "hub"):
        pattern = open_reader(config, str(place / "**" / "*validation*"), None, None, no_check)
        assert len(pattern.rows) == len(SECOND)
    write_parquet(folder / "test.parquet", FIRST)
    assert len(open_reader(config, str(folder), None, None, no_check).rows) == len(FIRST)


def test_a_folder_without_splits(tmp_path: Path) -> None:
    write_arrow(tmp_path / "data-00000-of-00002.arrow", FIRST)
    write_arrow(tmp_path / "data-00001-of-00002.arrow", SECOND)
    (tmp_path / "state.json").write_text("{}")
    assert texts(all_prompts(tmp_path)) == ALL


# --- what is refused ---


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    kinds = "a .jsonl, .parquet or .arrow file, a folder or pattern of them, 'reasoning-gym:NAME' or 'embedded:gcd'"
    choice = f"{kinds} (docs/data.md)"
    assert refusal(tmp_path) == f"data.source = {str(tmp_path)!r} has no data file; give {choice}"
    for source in (str(tmp_path / "none.jsonl"), "openai/gsm8k", "https://nowhere/train.parquet"):
        assert refusal(source) == f"data.source = {source!r} does not exist; give {choice}"
    pattern = str(tmp_path / "*.parquet")
    assert refusal(pattern) == f"data.source = {pattern!r}: no file is named like that; fix the pattern"
    (tmp_path / "a.csv").touch()
    assert refusal(tmp_path / "a.csv") == f"data.source: {tmp_path}/a.csv is of an unknown kind; give {choice}"


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "parquet"), ("a.arrow", "arrow")])
@pytest.mark.parametrize("content", [b"", b"no such thing at all", b"ARROW1\0\0PAR1"])
def test_a_file_that_is_not_what_its_name_says(name: str, kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    start, reason, end = re.split(r"[()]", refusal(path), maxsplit=2)  # the reason is pyarrow's
    assert start == f"data.source: {path} cannot be read as {kind} " and len(reason) > 9
    assert end.rpartition(")")[2] == "; write or download it again"


def test_files_without_rows(tmp_path: Path) -> None:
    empty, none = write_jsonl(tmp_path / "a.jsonl", ["", "  "]), tmp_path / "none.parquet"
    pa.parquet.write_table(pa.schema([("prompt", pa.string()), ("answer", pa.string())]).empty_table(), none)
    for path in (empty, none):
        assert refusal(path) == f"data.source = {str(path)!r} has no rows; give a file that has some"


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
    assert refusal(path) == f"data.source: {path} is {words}"


def test_a_byte_order_mark_of_utf8_is_no_fault_and_latin_1_is_named_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + ROW.encode() * 2)
    assert texts(all_prompts(path)) == ["Größe 6 und 4"] * 2
    path.write_bytes(ROW.encode("latin-1"))
    words = f"byte 0xf6 at position 14 is not UTF-8; if the file is Latin-1, {COPIED} LATIN1"
    assert f"a.jsonl:1: no JSON object ({words})" in refusal(path)


# --- tasks of reasoning-gym ---


class Sums:
    """A task: problems by seed and index."""

    def __init__(self, size: int, seed: int, largest: int = 9) -> None:
        assert largest > 0, "largest must be positive"
        self._seed, self._largest = seed, largest

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self._seed, index % self._largest
        return {"question": f"{a},{b}=", "answer": None if b == 5 else str(a + b), "metadata": {"pair": (a, b)}}


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with the task ``sums``."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    vars(factory)["DATASETS"] = {"sums": Sums}
    vars(package)["create_dataset"] = lambda name, **arguments: Sums(**arguments)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_problems_of_a_task(gym: None) -> None:
    source = open_data("reasoning-gym:sums", "data.task_args={size = 20}", seed=3, count=10)
    drawn = [*source.batch(0), *source.batch(1)]
    assert sorted(texts(drawn)) == sorted(f"3,{i % 9}=" for i in range(20))
    first = next(prompt for prompt in drawn if prompt.text == "3,4=")
    assert (first.answer, first.source) == ("7", "reasoning-gym:sums")
    entry = {"question": "3,4=", "answer": "7", "metadata": {"pair": [3, 4]}}
    assert json.loads(first.extra) == {"extra_info": entry}
    assert {prompt.answer for prompt in drawn if prompt.text == "3,5="} == {""}, "judged by its entry alone"
    assert len(reader_of("reasoning-gym:sums")) == 10_000


def test_arguments_and_seed_make_other_problems(gym: None) -> None:
    def fingerprint(*given: str, seed: int = 0) -> str:
        return open_data(
            "reasoning-gym:sums", f"data.task_args={{{', '.join(['size = 20', *given])}}}", seed=seed
        ).fingerprints()["data.source"]

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(seed=1), fingerprint("largest = 2")}) == 3


def test_an_evaluation_has_other_problems_than_any_run(gym: None) -> None:
    """Problem n is made from seed + n: runs with seeds from 0 on share most problems with an evaluation with seed 0."""
    task = "reasoning-gym:sums"
    config = config_of(task, "data.task_args={size = 3}", f"evaluation.sources=['{task}']")
    (found,) = open_sets(config, embedded_tokenizer(), RAW)
    assert texts(found.prompts) == [f"{2**31},{b}=" for b in range(3)]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sums", "{largest = 0}", "data.task_args = {'largest': 0}: 'reasoning-gym:sums' refuses them (largest must "),
        ("sums", "{nix = 1}", "data.task_args = {'nix': 1}: 'reasoning-gym:sums' refuses them (Sums.__init__() got "),
        ("sums", "{largest = 'a'}", "data.task_args = {'largest': 'a'}: 'reasoning-gym:sums' refuses them ('>' not "),
        ("sums", "{seed = 3}", "data.task_args = {'seed': 3}: 'reasoning-gym:sums' refuses them ("),  # run.seed is it
        ("sum", "{}", "data.source = 'reasoning-gym:sum': reasoning-gym has no such task; its gallery lists the names"),
    ],
)
def test_tasks_that_cannot_be_made(gym: None, name: str, arguments: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_data(f"reasoning-gym:{name}", f"data.task_args={arguments}")
    assert str(caught.value).startswith(message)


def test_a_task_whose_questions_are_no_texts(gym: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "__getitem__", lambda *_: {"question": 3, "answer": "1"})
    with pytest.raises(UserError, match="reasoning-gym:sums problem 0: its question is no text; use another task"):
        open_data("reasoning-gym:sums", "data.task_args={size = 21}")


def test_the_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs the package 'reasoning_gym'; pip install reasoning-gym"):
        open_data("reasoning-gym:leg_counting")
