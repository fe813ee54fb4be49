"""``tlt reward``: what it reads of a file of responses, what it prints, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from answers import TINY, loaded_by, mistake
from data_sets import write_jsonl, write_parquet

from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config
from tlt_hpc.extras.judge_responses.responses import Given, GivenResponses

Captured = pytest.CaptureFixture[str]


def judge(path: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """The lines of ``--output``, after the exit status was checked."""
    output = path.with_name("verdicts.jsonl")
    assert main(["reward", str(TINY), str(path), "--output", str(output), *options]) == status
    return [json.loads(line) for line in output.read_text().splitlines()]


def words(verdicts: list[dict[str, Any]]) -> list[str]:
    return [verdict["verdict"] for verdict in verdicts]


def test_the_files_of_other_programs_can_be_read(tmp_path: Path) -> None:
    """verl's generations and dumps, TRL's completions, and rows of training data with a response."""
    box = "\\boxed{4}"
    reward_model = {"style": "rule", "ground_truth": "4"}
    generated = {"prompt": [{"role": "user", "content": "2+2"}], "responses": [box, "4"], "reward_model": reward_model}
    path = write_parquet(tmp_path / "verl.parquet", [{**generated, "data_source": "sums"}])
    found = judge(path)
    assert words(found) == ["right", "wrong"]
    assert [(each["row"], each["data_source"]) for each in found] == [
        (f"{path} row 0 (1)", "sums"),
        (f"{path} row 0 (2)", "sums"),
    ]
    dumped = {"input": "2+2", "output": box, "gts": "4", "score": 1.0}
    assert words(judge(write_jsonl(tmp_path / "dump.jsonl", [dumped]), "data.answer_key=gts")) == ["right"]
    for completion in (box, [{"role": "assistant", "content": box}]):
        row = {"completion": completion, "answer": "4", "reward": 1}
        assert words(judge(write_jsonl(tmp_path / "trl.jsonl", [row]))) == ["right"]
    row = {"a": {"b": box}, "answer": "4", "response": "5"}
    assert words(judge(write_jsonl(tmp_path / "own.jsonl", [row]), "--response", "a.b")) == ["right"]


def test_broken_rows_are_named_and_the_others_judged(tmp_path: Path, capsys: Captured) -> None:
    rows = [{"response": "\\boxed{4}", "answer": "4"}, "{", {"answer": "4"}, {"response": 4, "answer": "4"}]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"response": "4"}])
    assert words(judge(path, status=1)) == ["right"]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(path))]
    assert [line.removeprefix(str(path)).split(";")[0] for line in told] == [
        ":2: no JSON object (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ":3: has no 'response' or 'responses' or 'completion' or 'solution_str' or 'output', but answer",
        ":4: the response is no text and no list of texts but '4'",
        ":5: has no 'reward_model.ground_truth' or 'answer' or 'ground_truth', but response",
    ]


def test_the_first_verdict_that_was_not_expected_is_shown(tmp_path: Path, capsys: Captured) -> None:
    texts = {"\\boxed{4}": 1, "\\boxed{5}": False, "no:\n\\boxed{5}": True, "\\boxed{6}": None, "\\boxed{7}": 0.5}
    rows = [{"response": text, "answer": "4", "expected": expected} for text, expected in texts.items()]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    judge(path, status=1)
    out = capsys.readouterr().out
    assert f"2 of 4 verdicts differ from the expected one; the first is {path}:3:\n  expected  true\n" in out
    assert "\n  found     wrong, reward 0 (not '4')\n" in out and "\n  response  no:\n            \\boxed{5}\n" in out
    judge(write_jsonl(tmp_path / "a.jsonl", rows[:2]))
    assert "2 verdicts as expected" in capsys.readouterr().out


def test_the_column_of_expectations_and_those_that_are_none(tmp_path: Path, capsys: Captured) -> None:
    named = [{"response": "\\boxed{4}", "answer": "4", "label": "4", "human": 0}]
    path = write_jsonl(tmp_path / "a.jsonl", named)
    judge(path)
    judge(path, "--expected", "human", status=1)
    judge(path, "--expected", "label", status=1)
    assert "'label' is '4', not a number or true or false; fix it" in capsys.readouterr().out
    rows = [{"response": "\\boxed{4}", "answer": "4", "expected": each} for each in (None, 1, "right", "wrong")]
    assert words(judge(write_jsonl(path, rows))) == ["right"] * 4
    out = capsys.readouterr().out
    ignored = f"2 rows expect nothing that can be compared ({path}:3: 'expected' is 'right', not a number or true or "
    assert ignored + "false)\n" in out and "1 verdict as expected" in out


OWN = """
def score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info == {"index": 3}
    return float(solution_str == ground_truth)

def brevity(solution_str, **given):
    return 1 / len(solution_str)
"""


def test_an_own_function_and_the_parts_of_a_reward(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "judge.py").write_text(OWN)
    rows = [
        {"response": text, "answer": "abcd", "extra_info": {"index": 3}, "expected": number}
        for text, number in (("abcd", 1), ("ab", 1), ("", 0))
    ]
    path, file = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "judge.py"
    weights = f'reward.weights={{"{file}:brevity" = 2}}'
    found = judge(path, f"reward.default={file}:score", weights)
    assert [(each["reward"], each["parts"]) for each in found] == [
        (1.5, {"answer": 1.0, "brevity": 0.25}), (1.0, {"answer": 0.0, "brevity": 0.5}), (0.0, {}),
    ]  # fmt: skip
    assert all(each["seconds"] > 0 for each in found)
    assert words(found) == ["right", "wrong", "not judged"]
    assert found[2]["why"] == "error: ZeroDivisionError: division by zero (judge.py, line 7)"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(line for line in lines if line[:2] == ["kind", "data_source"])
    assert header[2:] == ["rows", "right", "wrong", "not", "judged", "disputed", "reward", "answer", "brevity",
                          "median", "s", "max", "s"]  # fmt: skip
    (sums,) = (line for line in lines if line[:2] == ["score", "jsonl"])
    assert sums[2:10] == ["3", "1", "1", "1", "0", "0.833", "0.500", "0.375"]


def test_rows_are_shown_as_asked_and_lines_fit(tmp_path: Path, capsys: Captured) -> None:
    rows = [{"response": f"\\boxed{{{i % 2}}}", "answer": "0 " * 1000 if i == 3 else "0"} for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    def shown(*options: str) -> list[str]:
        assert main(["reward", str(TINY), str(path), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 120
        return [line.split()[0] for line in lines if "wrong  " in line[:14] or "right  " in line[:14]]

    assert shown() == [str(i) for i in range(1, 21)]
    assert shown("--rows", "3", "--wrong") == ["2", "4", "6"]
    assert shown("--rows", "0") == []


def test_what_cannot_be_judged_at_all_is_status_1(tmp_path: Path, capsys: Captured) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"response": "3", "answer": "three"}])
    assert words(judge(path, "reward.default=numeric", status=1)) == ["not judged"]
    assert f"not judged: 1, their data's answers cannot be read (for example: {path}:1: " in capsys.readouterr().out


def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["{", {"response": "3", "answer": "3"}])
    (tmp_path / "a.csv").touch()
    monkeypatch.chdir(tmp_path)
    kinds = "give a .jsonl, .parquet or .arrow file, a folder or pattern of them\n"
    for words, message in (
        (["a.csv"], f"a.csv is of an unknown kind; {kinds}"),
        (["a.jsonl", "--output", "."], "cannot write .: it is a folder; give another place with --output"),
        (["a.jsonl", "--output", "a.jsonl/b"], "cannot write a.jsonl: File exists; give another"),
        (["a.jsonl", "--output", "./a.jsonl"], "--output a.jsonl is the file of the responses; give another"),
        (["a.jsonl", "reward.weights={'no.py:f'=1}"], "reward.weights: 'no.py:f': no.py: No such file"),
        (["a.jsonl", "--response", "nope"], "--response 'nope': no row has that column; give one that a row has"),
        (["a.jsonl", "--expected", "response.nope"], "--expected 'response.nope': no row has that column; give one"),
    ):
        assert message in mistake(capsys, "reward", TINY, *words)


def test_a_prompt_that_is_text_and_a_response_that_was_cut_are_judged_as_in_training(tmp_path: Path) -> None:
    tags = ["reward.default=format", "reward.format_tags=['think']"]
    rows = [{"prompt": prompt, "response": "a</think>", "answer": ""} for prompt in ("1+1 <think>\n", "1+1", [])]
    assert words(judge(write_jsonl(tmp_path / "a.jsonl", rows), *tags)) == ["right", "wrong", "wrong"]


def columns(text: str) -> list[list[str]]:
    """The first words of lines with figures: rows without what was read and why, sums without seconds."""
    lines = [line.replace("not judged", "not-judged").split() for line in text.splitlines()]
    return [line[:3] if line[0].isdigit() else line[:8] for line in lines if len(line) > 2 and line[2].isdigit()]


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    page = (TINY.parent.parent / "docs" / "rewards.md").read_text().partition("## Judge given responses")[2]
    rows, said = re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[:2]
    command, _, wanted = said.partition("\n")
    monkeypatch.chdir(tmp_path)
    Path("responses.jsonl").write_text(rows)
    Path("jobs").symlink_to(TINY.parent)
    assert main(command.split()[2:]) == 1
    printed = capsys.readouterr().out
    assert len(columns(wanted)) == 4
    assert columns(wanted) == [line for line in columns(printed) if line[0].isdigit()]  # the page leaves out the sums
    wanted, printed = (re.findall("^.* differ from .*$", text, re.MULTILINE) for text in (wanted, printed))
    assert len(wanted) == 1 and wanted == printed


def test_a_response_that_was_cut_and_one_that_is_no_utf8_are_read(tmp_path: Path) -> None:
    rows = [{"response": "4", "answer": "4", "finish_reason": reason} for reason in ("stop", "length", None)]
    given = GivenResponses(load_config(TINY), str(write_jsonl(tmp_path / "a.jsonl", rows)), "", "")
    assert [each.is_finished for each in given if isinstance(each, Given)] == [True, False, True]
    (tmp_path / "judge.py").write_text(
        "def score(solution_str, **given): return solution_str  # quoted in the reason\n"
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"response": "\ud800", "answer": "4"}])
    (found,) = judge(path, f"reward.default={tmp_path / 'judge.py'}:score", status=1)
    assert found["verdict"] == "not judged" and "the function returned" in found["why"]


def test_neither_torch_nor_mpi_nor_the_model_is_loaded(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"response": "\\boxed{2/4}", "answer": "1/2"}])
    words = ["reward", str(TINY), str(path), "reward.default=math", "model.path=nowhere"]
    loaded = loaded_by(f"from tlt_hpc.cli.main import main\nassert main({words}) == 0")
    assert loaded and not {"torch", "mpi4py", "transformers", "sympy", "h5py"} & loaded
