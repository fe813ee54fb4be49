"""``tlt data inspect``: its counts, its exit status, its lines, and that it loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_sets import RAW, config_of, gcd_row, open_data, reader_of, verl_row, write_jsonl, write_parquet
from tiny import embedded_tokenizer
from tokenizers import Tokenizer, processors

from tlt_hpc.cli.main import main
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.data.inspect import inspect
from tlt_hpc.data.prompts import open_prompts
from tlt_hpc.data.rows import RowError
from tlt_hpc.plan.inputs import read_assets

Captured = pytest.CaptureFixture[str]


def test_counts(tmp_path):
    rows = [gcd_row(i, data_source="ab"[i % 2]) for i in (3, 4, 5, 6, 3)]
    rows += [gcd_row(7, data_source="a", answer=""), {"prompt": "1=" * 10, "answer": "1", "data_source": "a"}]
    found = inspect(reader_of(write_jsonl(tmp_path / "a.jsonl", [*rows, *["{"] * 25])), 16)
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
    with pytest.raises(RowError, match=f":2: {cause}"):
        read_assets(config_of(path, "reward.default=code"), 1)
    read_assets(config_of(path), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "data.source = 'none.jsonl' does not exist; give "),
        (["a.jsonl", "data.prompt_kye=text"], "unknown key 'data.prompt_kye'; did you mean 'data.prompt_key'?"),
        (["a.jsonl", "--model", "none"], "model.path = 'none' does not exist; "),
        (["embedded:gcd"], "'embedded:gcd' makes its problems again at every step; give a file, folder or task"),
        (["chat.jsonl", "--model", "embedded:tiny"], "chat.jsonl:1: the prompt is a list of messages, and the model "),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [gcd_row(1)])
    write_jsonl(tmp_path / "chat.jsonl", [verl_row(1)])
    assert main(["data", "inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"tlt: {message}") and err.count("\n") == 1


def test_fewer_prompts_than_a_step_takes_are_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "few.jsonl", [gcd_row(1), gcd_row(2)])
    told = f"data.source = '{path}': 2 prompts, and a step takes rollout.prompts_per_step = 3, so that it has the same "
    assert open_data(path, count=3).warning == f"{told}prompt more than once"
    assert open_data(path, count=2).warning == ""
