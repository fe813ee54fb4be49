"""Prompt, answer, source and extra of a row; rows that are broken; and the counts of ``tlt data inspect``."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from answers import TINY, refusal
from data_sets import (
    PLAIN,
    RAW,
    all_prompts,
    config_of,
    gcd_row,
    open_data,
    reader_of,
    texts,
    verl_row,
    write_jsonl,
    write_parquet,
)
from tiny import embedded_tokenizer
from tokenizers import Tokenizer, processors

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import load_config
from tlt_hpc.data.inspect import inspect_data_set
from tlt_hpc.data.prompts import open_prompts
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.plan.inputs import read_assets
from tlt_hpc.rewards.answer import Answer
from tlt_hpc.rewards.functions import call_function


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_verls_schema(write, tmp_path):
    path = (tmp_path / "a").with_suffix(write.__name__.replace("write_", "."))
    (prompt,) = all_prompts(write(path, [verl_row(6, "openai/gsm8k", question="six?")]))
    assert (prompt.text, prompt.answer, prompt.source) == ("gcd(6,4)=", "6", "openai/gsm8k")
    assert json.loads(prompt.extra) == {
        "ability": "math",
        "extra_info": {"index": 6, "split": "train", "question": "six?"},
        "reward_model": {"ground_truth": "6", "style": "rule"},
    }


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("2", "2"),
        (2, "2"),
        (2.5, "2.5"),
        (3.0, "3"),
        (True, "true"),
        (["1", 2, 3.0, 2.5, True], '["1", "2", "3", "2.5", "true"]'),
        ([1, 2], '["1", "2"]'),
        ("[1, 2]", "[1, 2]"),
        (["assert f(1) == 2"], '["assert f(1) == 2"]'),
        ([[1, 2], 3], "[[1, 2], 3]"),
        ([{"input": 1}], '[{"input": 1}]'),
        ({"a": 1}, '{"a": 1}'),
        (Decimal("4.5"), "4.5"),
        ([Decimal("4.5")], '["4.5"]'),
        ("", ""),
    ],
)
def test_answers_that_are_no_texts(answer, text, tmp_path):
    is_decimal = "Decimal" in repr(answer)
    path, write = (tmp_path / "a.parquet", write_parquet) if is_decimal else (tmp_path / "a.jsonl", write_jsonl)
    (prompt,) = all_prompts(write(path, [{"prompt": "1=", "answer": answer}]))
    assert prompt.answer == text


@pytest.mark.parametrize("truth", [[1, 2.0, "x"], [[1, 2], 3], {"a": [1]}])
def test_a_function_gets_the_list_of_the_row(truth, tmp_path):
    """Although it is written as several accepted answers."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1=", "reward_model": {"ground_truth": truth}}])
    (prompt,), given = all_prompts(path), []
    answer = Answer("a.py:f", prompt.source, "", prompt.answer, prompt.extra)
    call_function(lambda **each: given.append(each["ground_truth"]), answer)
    assert given == [truth]
    call_function(lambda **each: given.append(each["ground_truth"]), replace(answer, truth="of another column"))
    assert given[1:] == ["of another column"]


def test_columns_by_name(tmp_path):
    row = {"in": {"text": "1="}, "out": {"deep": {"final": 3}}, "prompt": "9=", "answer": "9"}
    keys = ["data.prompt_key=in.text", "data.answer_key=out.deep.final"]
    for path in (write_jsonl(tmp_path / "a.jsonl", [row]), write_parquet(tmp_path / "a.parquet", [row])):
        (prompt,) = all_prompts(path, *keys)
        assert (prompt.text, prompt.answer) == ("1=", "3")


@pytest.mark.parametrize("names", [("problem", "answer"), ("question", "ground_truth"), ("messages", "answer")])
def test_columns_that_are_found(names, tmp_path):
    (prompt,) = all_prompts(write_parquet(tmp_path / "a.parquet", [{names[0]: "1=", names[1]: "3", "id": 1}]))
    assert (prompt.text, prompt.answer) == ("1=", "3")


GOOD = '{"prompt": "gcd(6,4)=", "answer": 2}'


def chat(*messages: object) -> dict[str, object]:
    return {"prompt": list(messages), "answer": "1"}


LONG_ROWS = [
    {"row": "[" * 100_000, "reason": "no JSON object (it is nested too deep)"},
    {"row": '{"prompt": "1", "answer": ' + "9" * 5000 + "}", "reason": "no JSON object (Exceeds the limit"},
]
BROKEN = [json.loads(line) for line in Path(__file__).with_name("broken_rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", [*BROKEN, *LONG_ROWS], ids=lambda case: case["reason"][:40])
def test_a_broken_row_is_named_by_file_and_line(case, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, "", case["row"]])
    said = refusal(open_data, path)
    assert said.startswith(f"{path}:3: {case['reason']}")
    assert [str(error) for error in inspect_data_set(reader_of(path), 16).broken] == [said]


@pytest.mark.parametrize("tools", [None, [], "", "[]", {}])
def test_a_column_of_no_tools_is_none(tools, tmp_path):
    assert len(all_prompts(write_jsonl(tmp_path / "a.jsonl", [gcd_row(1, tools=tools)]))) == 1


def test_tools_in_a_file_of_columns_are_found(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [gcd_row(1, tools=[{"name": "f"}], other=1)])
    assert "row 0: has 'tools', and" in refusal(all_prompts, path)


@pytest.mark.parametrize("prompt", ["[1, 2]", '{"a": {"role": "x", "content": "1"}}', '[{"role": 1}]', '{x} "role": 1'])
def test_a_text_that_is_no_chat_is_fed_as_it_is(prompt, tmp_path):
    (found,) = all_prompts(write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "1"}]))
    assert found.text == prompt


def test_messages_as_json_text_are_messages(tmp_path):
    message = {"role": "user", "content": "1"}
    rows = [{"prompt": f" {json.dumps(each)}\n", "answer": "1"} for each in ([message], message)]
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        assert texts(all_prompts(path, chat=PLAIN)) == ["1="] * 2


def test_a_column_that_is_named_and_not_there(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [gcd_row(1)])
    assert refusal(all_prompts, path, "data.answer_key=anwser") == (
        f"{path} row 0: has no 'anwser', but prompt; fix or remove the row, or name its column in data.answer_key"
    )


def test_prompts_that_are_too_long_are_refused_or_dropped(tmp_path):
    rows = [*(gcd_row(i) for i in range(1, 7)), *[{"prompt": "1," * 9, "answer": "1"}] * 2]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert refusal(open_data, path).startswith(f"{path}:7: prompt of 18 tokens, data.max_prompt_tokens = 16; ")
    source = open_data(path, "data.overlong=drop", count=3)
    assert source.warning == (
        f"data.source = '{path}': 2 of 8 prompts are too long and dropped, the first {path}:7: prompt of 18 tokens, "
        "data.max_prompt_tokens = 16"
    )
    drawn = [text for step in range(2) for text in texts(source.draw_step_prompts(step))]
    assert sorted(drawn) == [f"gcd({i},{2 * i + 1})=" for i in range(1, 7)]
    assert open_data(path, "data.max_prompt_tokens=18").warning == ""
    said = refusal(lambda: open_data(path, "data.overlong=drop", "data.max_prompt_tokens=1").draw_step_prompts(0))
    assert said == f"data.source = {str(path)!r} has no usable row; raise data.max_prompt_tokens"


def test_lines_end_with_newlines_only_and_may_be_of_another_system(tmp_path):
    """U+2028 may stand within a JSON string, and must neither split a row nor shift the numbers of later ones."""
    row, path = GOOD.replace("2", '"2\u2028"'), tmp_path / "data.jsonl"
    path.write_bytes(f"\ufeff{row}\r\n\r\n{GOOD}".encode())
    assert texts(all_prompts(path)) == ["gcd(6,4)=", "gcd(6,4)="]


def test_without_a_tokenizer_nothing_is_rendered(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [verl_row(6)])
    prompt = PromptReader(load_config(TINY, [f"data.source={path}"]).data, None).read(0)
    assert len(prompt.tokens) == 0 and json.loads(prompt.text) == [{"role": "user", "content": "gcd(6,4)="}]


# --- tlt data inspect ---


Captured = pytest.CaptureFixture[str]


def test_counts(tmp_path):
    rows = [gcd_row(i, data_source="ab"[i % 2]) for i in (3, 4, 5, 6, 3)]
    rows += [gcd_row(7, data_source="a", answer=""), {"prompt": "1=" * 10, "answer": "1", "data_source": "a"}]
    found = inspect_data_set(reader_of(write_jsonl(tmp_path / "a.jsonl", [*rows, *["{"] * 25])), 16)
    a, b = found.sources
    assert (found.num_rows, len(found.broken)) == (32, 25)
    assert (a.source, a.lengths, a.num_overlong, a.num_unanswered) == ("a", [5, 6, 6, 20], 1, 1)
    assert (b.source, b.lengths, b.num_repeated, b.num_unanswered) == ("b", [5, 6, 5], 1, 0)


def test_a_table_and_status_0(tmp_path, capsys):
    path = str(write_jsonl(tmp_path / "a.jsonl", [gcd_row(i) for i in range(1, 8)]))
    assert main(["data", "inspect", path, "--model", "embedded:tiny", "max_prompt_tokens=5"]) == 0
    out = capsys.readouterr().out
    assert "7 rows, 0 broken" in " ".join(out.split())  # the title is broken where the path is long
    (line,) = (line for line in out.splitlines() if "│ jsonl" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["jsonl", "7", "5", "5", "6", "6", "3", "0", "0"]
    assert "prompts over data.max_prompt_tokens = 5: 3\n" in out


def test_prompts_that_the_tokenizer_does_not_know_are_counted_and_warned_of(tmp_path, capsys):
    rows = [gcd_row(1), gcd_row(2, prompt="Natalia sold 48 clips. gcd(2,5)="), gcd_row(3, prompt="gcd(3, 4)=")]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert main(["data", "inspect", str(path), "--model", "embedded:tiny"]) == 0
    assert "characters that the model's tokenizer does not know: 2; the model" in capsys.readouterr().out
    said = read_assets(config_of(path), 1).prompts.warning
    assert f"does not know some characters in 2 of 3 prompts, the first {path}:2, and" in said
    assert read_assets(config_of(write_jsonl(tmp_path / "b.jsonl", rows[:1])), 1).prompts.warning == ""


def test_prompts_without_the_token_that_begins_every_text_are_warned_of(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [gcd_row(1)])
    tokenizer = Tokenizer.from_str(embedded_tokenizer().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    raw = open_prompts(config_of(path), tokenizer)
    assert raw.warning.startswith(f"data.source = '{path}': prompts do not begin with '<eos>', which the model's ")
    chat = ChatFormat(f"<eos>{RAW.template}")
    assert open_prompts(config_of(path, "data.text_prompts=chat"), tokenizer, chat).warning == ""


def test_broken_rows_are_named_and_status_is_1(tmp_path, capsys):
    rows = [
        verl_row(1, "[red]set[/red]"),
        *({**verl_row(i), "reward_model": {"ground_truth": None}} for i in range(22)),
    ]
    path = str(write_parquet(tmp_path / "a.parquet", rows))
    assert main(["data", "inspect", path]) == 1
    out = capsys.readouterr().out
    assert "[red]set[/red]" in out and "no tokens counted: give --model FOLDER\n" in out
    assert f"{path} row 1: 'reward_model.ground_truth' is null; fix or remove the row\n" in out
    assert out.count("is null") == 20 and out.endswith("... and 2 more broken rows\n")


def test_tests_of_programs_are_read_before_a_run_and_by_the_inspection(tmp_path, capsys):
    answers = ["assert f(1) == 2", '["f(1)"]', '{"inputs": [1]}']
    path = write_jsonl(tmp_path / "a.jsonl", [gcd_row(i, answer=text) for i, text in enumerate(answers, 1)])
    assert main(["data", "inspect", str(path), "reward.default=code"]) == 1
    out, cause = capsys.readouterr().out, "reward kind 'code' cannot read the tests"
    assert f"{path}:2: {cause} '[\"f(1)\"]': 'f(1)' asserts nothing; fix or remove the row\n" in out
    assert out.count(cause) == 2
    assert f":2: {cause}" in refusal(read_assets, config_of(path, "reward.default=code"), 1)
    read_assets(config_of(path), 1)


def test_fewer_prompts_than_a_step_takes_are_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "few.jsonl", [gcd_row(1), gcd_row(2)])
    told = f"data.source = '{path}': 2 prompts, and a step takes rollout.prompts_per_step = 3, so that it has the same "
    assert open_data(path, count=3).warning == f"{told}prompt more than once"
    assert open_data(path, count=2).warning == ""
