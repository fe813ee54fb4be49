"""Faults of data and model that are one line before a start, in every command that looks: inspect, preflight, submit,
train and evaluate, for training and evaluation data alike."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from data_sets import gcd_row, write_jsonl
from launch_ranks import ROOT
from preflight_place import Place
from shell_slurm import TINY
from tokenizers import AddedToken, Tokenizer

from tlt_hpc.cli.main import main

ENDS = "{% for m in messages %}{{ m['content'] }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"

Captured = pytest.CaptureFixture[str]
Said = Callable[[str, str], str]


@pytest.fixture
def place(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Data to train on and the embedded model, whose tokenizer has an end of turns, and one token that it lacks."""
    path = str(place.model / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<|im_end|>", "[21]", "[22]", "[23]", "<e>")])
    tokenizer.save(path)
    monkeypatch.chdir(tmp_path)
    return place


@pytest.fixture
def said(place: Place, capsys: Captured) -> Said:
    """What a command says of the job with these keys, and its status."""

    def run(command: str, keys: str) -> str:
        job = [TINY, *place.base(), *keys.split()]
        capsys.readouterr()
        if command == "submit":
            status = runpy.run_path(str(ROOT / "jobs" / "submit.py"))["main"]([*job, "--dry-run", "--no-preflight"])
        elif command == "evaluate":
            status = main(["evaluate", str(place.model), *job, "--dry-run"])
        else:
            status = main([*command.split(), *job, *["--dry-run"] * (command == "train")])
        out, err = capsys.readouterr()
        assert err.count("\n") <= 1
        return f"{status} {out}{err}"

    return run


def sources(path: Path, kind: str) -> str:
    """Keys that name a file as what is trained on or evaluated on."""
    return f"data.source={path}" if kind == "data" else f'evaluation.sources=["{path}"] evaluation.every_steps=10'


NUMERIC = " reward.by_source={n='numeric'}"
CASES = [
    ("train", "data"), ("train", "evaluation"), ("evaluate", "evaluation"), ("preflight", "data"),
    ("preflight", "evaluation"), ("submit", "data"), ("submit", "evaluation"), ("data inspect", "data"),
    ("data inspect", "evaluation"),
]  # fmt: skip


FAULTS = {
    "tokens that the model lacks": (
        [gcd_row(1), gcd_row(2, prompt="<e>gcd(48,36)=")], "",
        "rows.jsonl:2: the tokenizer makes a token 24 of it, and the model has",
    ),
    "tests that cannot be read": (
        [gcd_row(1, answer="assert f(1) == 2", data_source="c"), gcd_row(2, answer="f(1)", data_source="c")],
        " reward.by_source={c='code'}", "rows.jsonl:2: reward kind 'code' cannot read the tests 'f(1)'",
    ),
    "answers that no response can match": (
        [gcd_row(n, answer="forty", data_source="n") for n in (2, 3)],
        NUMERIC, "rows.jsonl:1: reward kind 'numeric': answer 'forty' ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("command", "kind"), CASES)
def test_a_fault_of_the_rows_is_named(command: str, kind: str, fault: str, said: Said, tmp_path: Path) -> None:
    rows, keys, line = FAULTS[fault]
    found = said(command, sources(write_jsonl(tmp_path / "rows.jsonl", rows), kind) + keys)
    assert found[0] != "0" and found.count(line) == 1


def test_some_answers_that_no_response_can_match_are_a_warning(said: Said, tmp_path: Path) -> None:
    rows = [gcd_row(1, data_source="n"), *(gcd_row(n, answer="forty", data_source="n") for n in (2, 3))]
    found = said("train", sources(write_jsonl(tmp_path / "some.jsonl", rows), "data") + NUMERIC)
    assert found[0] == "0" and found.count("for 2 of 3 rows, the first ") == 1


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_a_turn_that_ends_with_no_end_token(command: str, kind: str, said: Said, place: Place, tmp_path: Path) -> None:
    (place.model / "chat_template.jinja").write_text(ENDS)
    chats = [gcd_row(n, prompt=[{"role": "user", "content": f"gcd({n},4)="}]) for n in (1, 2)]
    keys = sources(write_jsonl(tmp_path / "chats.jsonl", chats), kind)
    line = "the chat template ends a turn with '<|im_end|>', which is no end token of the model, so that responses run "
    found = said(command, keys)
    assert found[0] == "0" and found.count(line) == (command != "submit")
    assert line not in said(command, f'{keys} rollout.stop_strings=["<|im_end|>"]')
    (place.model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 20]}))
    assert line not in said(command, keys)


def test_what_a_job_is_evaluated_on_has_a_table_of_its_own(said: Said, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "held.jsonl", [gcd_row(n, data_source="held") for n in (1, 2)])
    found = said("data inspect", f'evaluation.sources=["{path}","embedded:gcd"]')
    titles = "".join(found.split())  # a line wraps where the length of its path has it
    assert found[0] == "0" and ":40rows" in titles and ":2rows" in titles and "│ held" in found
    assert "│ held" in said("data inspect", f'data.source=embedded:gcd evaluation.sources=["{path}"]')
    missing = said("data inspect", 'evaluation.sources=["no.jsonl"]')
    assert missing[0] == "2" and "tlt: evaluation.sources = 'no.jsonl' does not exist" in missing
