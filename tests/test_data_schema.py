"""What of a row becomes prompt, answer, source and extra: verl's schema, other columns, and rows that are broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sets import all_prompts, gcd_row, open_data, texts, verl_row, write_jsonl, write_parquet

from tlt_hpc.config import ConfigError
from tlt_hpc.data.rows import RowError


def broken(path: Path, *overrides: str) -> str:
    """What is said of the first row."""
    with pytest.raises(RowError) as caught:
        all_prompts(path, *overrides)
    assert "\n" not in str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_verls_schema(write: Any, tmp_path: Path) -> None:
    name = "a.jsonl" if write is write_jsonl else "a.parquet"
    (prompt,) = all_prompts(write(tmp_path / name, [verl_row(6, "openai/gsm8k", question="six?")]))
    assert (prompt.text, prompt.answer, prompt.source) == ("gcd(6,4)=", "6", "openai/gsm8k")
    assert json.loads(prompt.extra) == {
        "ability": "math",
        "extra_info": {"index": 6, "split": "train", "question": "six?"},
        "reward_model": {"ground_truth": "6", "style": "rule"},
    }


def test_columns_that_dictionaries_and_large_texts_encode(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["gcd(6,4)="] * 3, pa.large_string()),
            "answer": pa.array([2, 2, 2], pa.int64()),
            "data_source": pa.array(["a", "b", "a"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    prompts = all_prompts(tmp_path / "a.parquet")
    assert [(p.answer, p.source) for p in prompts] == [("2", "a"), ("2", "b"), ("2", "a")]
    assert {p.extra for p in prompts} == {""}


@pytest.mark.parametrize(
    ("answer", "text"),
    [("2", "2"), (2, "2"), (2.5, "2.5"), (True, "true"), (["1", 2], '["1", 2]'), ({"a": 1}, '{"a": 1}'), ("", "")],
)
def test_answers_that_are_no_texts(answer: object, text: str, tmp_path: Path) -> None:
    (prompt,) = all_prompts(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1=", "answer": answer}]))
    assert prompt.answer == text


def test_columns_by_name(tmp_path: Path) -> None:
    row = {"in": {"text": "1="}, "out": {"deep": {"final": 3}}, "prompt": "9=", "answer": "9"}
    keys = ["data.prompt_key=in.text", "data.answer_key=out.deep.final"]
    for path in (write_jsonl(tmp_path / "a.jsonl", [row]), write_parquet(tmp_path / "a.parquet", [row])):
        (prompt,) = all_prompts(path, *keys)
        assert (prompt.text, prompt.answer) == ("1=", "3")


@pytest.mark.parametrize("names", [("problem", "answer"), ("question", "ground_truth"), ("messages", "answer")])
def test_columns_that_are_found(names: tuple[str, str], tmp_path: Path) -> None:
    (prompt,) = all_prompts(write_parquet(tmp_path / "a.parquet", [{names[0]: "1=", names[1]: "3", "id": 1}]))
    assert (prompt.text, prompt.answer) == ("1=", "3")


def test_columns_that_are_missing(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"text": "1=", "answer": "3"}])
    start = f"data.source = {str(path)!r} has no"
    with pytest.raises(ConfigError) as caught:
        all_prompts(path)
    assert str(caught.value) == (
        f"{start} prompt among 'prompt', 'problem', 'question', 'messages'; it has answer, "
        "text: name the right one in data.prompt_key"
    )
    with pytest.raises(ConfigError) as caught:
        all_prompts(path, "data.prompt_key=text", "data.answer_key=anwser")
    assert str(caught.value) == f"{start} column 'anwser'; it has answer, text: name the right one in data.answer_key"


def test_one_of_several_files_without_the_column(tmp_path: Path) -> None:
    files = [
        write_parquet(tmp_path / "a.parquet", [gcd_row(1)]),
        write_parquet(tmp_path / "b.parquet", [{"prompt": "1="}]),
    ]
    with pytest.raises(ConfigError) as caught:
        all_prompts([str(file) for file in files])
    assert str(caught.value) == (
        f"data.source = '{files[0]}, {files[1]}' has no answer among 'reward_model.ground_truth', 'answer', "
        "'ground_truth'; it has prompt: name the right one in data.answer_key"
    )


ROLES = "system, user, assistant, tool, developer"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "'prompt' is empty; fix or remove the row"),
        ({"role": "user"}, "'prompt' is neither a text nor a list of messages but of type dict; fix the row"),
        (
            [{"role": "user", "content": "1="}, {"role": "assistant", "content": "1"}],
            "'prompt' ends with a message of the assistant, so with an answer; cut it off",
        ),
        (["hello"], "message 0 of 'prompt' is of type str; it needs 'role' and 'content'"),
        ([{"role": "user"}], "message 0 of 'prompt': 'content' is null; it needs to be a text"),
        ([{"from": "human", "value": "1="}], "message 0 of 'prompt': 'role' is null; it needs to be a text"),
        ([{"role": 3, "content": "1="}], "message 0 of 'prompt': 'role' is of type int; it needs to be a text"),
        (
            [{"role": "user", "content": ["1="]}],
            "message 0 of 'prompt': 'content' is of type list; it needs to be a text",
        ),
        ([{"role": "human", "content": "1="}], f"message 0 of 'prompt': role 'human' is none of {ROLES}; rename it"),
    ],
)
def test_prompts_that_are_no_chats(prompt: object, reason: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}])
    assert broken(path) == reason


def test_a_null_within_the_answers_column(tmp_path: Path) -> None:
    row = verl_row(6)
    row["reward_model"] = {"style": "rule", "ground_truth": None}
    path = write_parquet(tmp_path / "a.parquet", [verl_row(1), row])
    with pytest.raises(RowError) as caught:
        open_data(path)
    assert str(caught.value) == (
        f"{path} row 1: 'reward_model.ground_truth' is null; fix or remove the row, or set data.broken_rows = 'skip'"
    )


def test_broken_rows_are_skipped_and_counted_where_asked(tmp_path: Path) -> None:
    rows = [*(gcd_row(i) for i in range(1, 7)), "{", {"prompt": "1="}, {"prompt": "1=" * 9, "answer": "1"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(RowError, match=rf"^{path}:7: no JSON object .*, or set data.broken_rows = 'skip'$"):
        open_data(path, "data.overlong=drop")
    with pytest.raises(RowError, match=rf"^{path}:9: prompt of 18 tokens, data.max_prompt_tokens = 16; "):
        open_data(path, "data.broken_rows=skip")
    source = open_data(path, "data.broken_rows=skip", "data.overlong=drop", count=3)
    assert re.fullmatch(
        rf"data.source = '{path}': of 9 rows looked at 2 broken and skipped, the first {path}:7: no JSON object "
        rf"\(.*\); 1 too long and dropped, the first {path}:9: prompt of 18 tokens, data.max_prompt_tokens = 16",
        source.warning,
    )
    drawn = [text for step in range(2) for text in texts(source.batch(step))]
    assert sorted(drawn) == [f"gcd({i},{2 * i + 1})=" for i in range(1, 7)]


def test_no_row_is_left(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["{", '{"prompt": "1=", "answer": null}'])
    with pytest.raises(ConfigError) as caught:
        open_data(path, "data.broken_rows=skip", "data.answer_key=answer", "data.prompt_key=prompt").batch(0)
    assert str(caught.value) == f"data.source = {str(path)!r} has no usable row; `tlt data inspect` says why"
