"""Which prompts a step draws, and how the mistakes of a .jsonl file are named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import TINY, all_prompts, gcd_rows, open_data, reader_of, texts, write_jsonl
from tiny import embedded_tokenizer

from tlt_hpc.config import load_config
from tlt_hpc.data.gcd import GcdProblem
from tlt_hpc.data.inspect import inspect
from tlt_hpc.data.prompts import FilePrompts, GcdPrompts, PromptSource, open_prompts
from tlt_hpc.data.rows import RowError

ROOT = TINY.parent.parent


def gcd_prompts(folder: Path, seed: int = 0, count: int = 8) -> GcdPrompts:
    return GcdPrompts(embedded_tokenizer(), seed, count)


def shuffled_prompts(folder: Path, seed: int = 0, count: int = 4) -> FilePrompts:
    return open_data(write_jsonl(folder / "ten.jsonl", gcd_rows(10)), seed=seed, count=count)


@pytest.mark.parametrize("make", [gcd_prompts, shuffled_prompts])
def test_a_batch_depends_on_seed_and_step_alone(make: Any, tmp_path: Path) -> None:
    """In any order, asked twice, from a new source: a resumed run draws what the first would have drawn."""
    forwards = [texts(make(tmp_path).batch(step)) for step in range(6)]
    source: PromptSource = make(tmp_path)
    backwards = [texts(source.batch(step)) for step in reversed(range(6))]
    assert backwards[::-1] == forwards
    assert len({tuple(batch) for batch in forwards}) == 6
    assert texts(make(tmp_path, seed=1).batch(0)) != forwards[0]


def test_a_batch_does_not_depend_on_the_process(tmp_path: Path) -> None:
    """No hash of Python's, which differs from process to process."""
    code = (
        "from tlt_hpc.config import load_config; from tlt_hpc.plan.inputs import read_assets\n"
        f"print(*[p.text for p in read_assets(load_config({str(TINY)!r}), 1).prompts.batch(3)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == texts(gcd_prompts(tmp_path, count=16).batch(3))


def test_a_batch_handed_out_is_the_callers(tmp_path: Path) -> None:
    source = shuffled_prompts(tmp_path)
    source.batch(0).clear()
    assert len(source.batch(0)) == 4


def test_prompts_of_the_embedded_task(tmp_path: Path) -> None:
    for prompt in gcd_prompts(tmp_path, count=50).batch(0):
        a, b = (int(part) for part in prompt.text[4:-2].split(","))
        assert GcdProblem(a, b).split == "train"
        assert prompt.answer == GcdProblem(a, b).answer
        assert prompt.tokens.dtype == np.int32
        assert embedded_tokenizer().decode(prompt.tokens.tolist()) == prompt.text


@pytest.mark.parametrize("count", [1, 3, 4, 10, 25])
def test_every_epoch_covers_all_rows_once(count: int, tmp_path: Path) -> None:
    """Whether or not the batch divides the rows, and where one batch spans epochs."""
    source = shuffled_prompts(tmp_path, count=count)
    drawn = [text for step in range(60 // count + 1) for text in texts(source.batch(step))][:60]
    epochs = [drawn[start : start + 10] for start in range(0, 60, 10)]
    assert all(Counter(epoch) == Counter(set(epoch)) and len(epoch) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


# --- .jsonl ---


def test_rows_are_read_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": "gcd(6,4)=", "answer": 2}, {"prompt": "gcd(9,3)=", "answer": "3", "data_source": "mine"}]
    prompts = all_prompts(write_jsonl(tmp_path / "data.jsonl", [rows[0], "", "  \t", rows[1]]))
    assert [(p.text, p.answer, p.source) for p in prompts] == [("gcd(6,4)=", "2", "jsonl"), ("gcd(9,3)=", "3", "mine")]


GOOD = '{"prompt": "gcd(6,4)=", "answer": 2}'
HALF = "has half of a surrogate pair; mend the row"
MEND = "; mend or remove the row"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON (Expecting property name enclosed in double quotes); each line must be one JSON object"),
        ("[1]", "JSON but no object (b'[1]'); each line must be one JSON object"),
        ('{"prompt": "gcd(6,4)="}', "has no 'answer'" + MEND),
        ('{"answer": 2}', "has no 'prompt'" + MEND),
        ('{"prompt": "gcd(6,4)=", "answer": null}', "'answer' is null" + MEND),
        ('{"prompt": null, "answer": 2}', "'prompt' is null" + MEND),
        ('{"prompt": 3, "answer": 2}', "'prompt' is neither a text nor a list of messages but a number; mend the row"),
        ('{"prompt": "", "answer": 2}', "'prompt' is an empty text" + MEND),
        ('{"prompt": "a", "prompt": "b", "answer": 2}', "has the key 'prompt' twice; keep one of them"),
        ('{"prompt": "1\\ud800", "answer": 2}', "the prompt has half of a surrogate pair; mend the row"),
        ('{"prompt": "1", "answer": "1\\ud800"}', "the answer has half of a surrogate pair; mend the row"),
        ('{"prompt": "1", "answer": 1, "data_source": "\\udc00"}', f"the data_source {HALF}"),
        ('{"prompt": "1", "answer": 1, "extra_info": {"\\udc00": 1}}', f"the rest {HALF}"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": 1}', f"the prompt {HALF}"),
        ('{"prompt": "1", "answer": ' + "9" * 5000 + "}", "has an integer of too many digits; make it a text"),
        ('{"prompt": "1", "answer": NaN}', "'answer' is NaN" + MEND),
        ('{"prompt": "1", "answer": 1e999}', "'answer' is infinite" + MEND),
        (
            '{"prompt": "1", "answer": ' + "[" * 500 + "]" * 500 + "}",
            "nested over 64 deep; flatten it or remove the row",
        ),
        ("[" * 100_000, "JSON nested too deep; each line must be one JSON object"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(line: str, reason: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, "", line])
    with pytest.raises(RowError) as caught:
        open_data(path)
    assert str(caught.value) == f"{path}:3: {reason}, or set data.broken_rows = 'skip'"
    assert [prompt.answer for prompt in open_data(path, "data.broken_rows=skip", count=1).batch(0)] == ["2"]
    assert [str(error) for error in inspect(reader_of(path), 16).broken] == [f"{path}:3: {reason}"]


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff", "answer": 2}\n')
    with pytest.raises(RowError, match=r"data\.jsonl:2: not UTF-8 \(byte 12\); save the file as UTF-8"):
        open_data(path)


def test_an_overlong_prompt_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, {"prompt": "gcd(366,344)=gcd(366,344)=", "answer": 2}])
    with pytest.raises(RowError) as caught:
        open_data(path)
    assert str(caught.value) == (
        f"{path}:2: prompt of 18 tokens, data.max_prompt_tokens = 16; raise the limit, remove the row or set "
        "data.overlong = 'drop'"
    )


def test_lines_end_with_newlines_only(tmp_path: Path) -> None:
    """U+2028 may stand within a JSON string, and must neither split a row nor shift the numbers of later ones."""
    row = json.dumps({"prompt": "gcd(6,4)=", "answer": "2\u2028"}, ensure_ascii=False)
    assert len(all_prompts(write_jsonl(tmp_path / "data.jsonl", [row]))) == 1


def test_line_endings_and_marks_of_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{GOOD}".encode())
    assert texts(all_prompts(path)) == ["gcd(6,4)=", "gcd(6,4)="]


def test_lines_across_the_chunks_of_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_hpc.data.jsonl._CHUNK_BYTES", 7)
    assert [p.answer for p in all_prompts(write_jsonl(tmp_path / "data.jsonl", gcd_rows(30)))] == [
        str(number) for number in range(1, 31)
    ]


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", gcd_rows(2))
    assert set(texts(open_data(path).batch(0))) == {"gcd(1,3)=", "gcd(2,5)="}
    write_jsonl(path, gcd_rows(1))
    assert set(texts(open_data(path).batch(0))) == {"gcd(1,3)="}


def test_the_configuration_names_the_source(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, {"prompt": "gcd(9,3)=", "answer": 3}])
    config = load_config(TINY, [f"data.source={path}", "rollout.prompts_per_step=2"])
    assert sorted(texts(open_prompts(config, embedded_tokenizer()).batch(0))) == ["gcd(6,4)=", "gcd(9,3)="]
    assert isinstance(open_prompts(load_config(TINY), embedded_tokenizer()), GcdPrompts)
