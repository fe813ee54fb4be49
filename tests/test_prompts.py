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


GOOD = '{"prompt": "gcd(6,4)=", "answer": 2}'
FIX = "; fix or remove the row"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON object (Expecting property name"),
        ("[1]", "no JSON object (it is no object)"),
        ('{"prompt": "gcd(6,4)="}', "has no 'answer'" + FIX),
        ('{"answer": 2}', "has no 'prompt'" + FIX),
        ('{"prompt": "gcd(6,4)=", "answer": null}', "'answer' is null" + FIX),
        ('{"prompt": 3, "answer": 2}', "'prompt' is neither a text nor a list of messages but of type int"),
        ('{"prompt": "", "answer": 2}', "'prompt' is empty" + FIX),
        ('{"prompt": "1\\ud800", "answer": 2}', "has half of a surrogate pair"),
        ('{"prompt": "1", "answer": "1\\ud800"}', "has half of a surrogate pair"),
        ('{"prompt": "1", "answer": 1, "data_source": "\\udc00"}', "has half of a surrogate pair"),
        ('{"prompt": "1", "answer": 1, "extra_info": {"\\udc00": 1}}', "has half of a surrogate pair"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": 1}', "has half of a surrogate pair"),
        ('{"prompt": "1", "answer": ' + "9" * 5000 + "}", "no JSON object (Exceeds the limit"),
        ('{"prompt": "1", "answer": NaN}', "'answer' is nan" + FIX),
        ('{"prompt": "1", "answer": 1e999}', "'answer' is inf" + FIX),
        ("[" * 100_000, "no JSON object (it is nested too deep)"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(line: str, reason: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, "", line])
    with pytest.raises(RowError) as caught:
        open_data(path)
    assert str(caught.value).startswith(f"{path}:3: {reason}")
    assert str(caught.value).endswith(", or set data.broken_rows = 'skip'")
    assert [prompt.answer for prompt in open_data(path, "data.broken_rows=skip", count=1).batch(0)] == ["2"]
    (error,) = inspect(reader_of(path), 16).broken
    assert str(error).startswith(f"{path}:3: {reason}")


def test_lines_end_with_newlines_only(tmp_path: Path) -> None:
    """U+2028 may stand within a JSON string, and must neither split a row nor shift the numbers of later ones."""
    row = json.dumps({"prompt": "gcd(6,4)=", "answer": "2\u2028"}, ensure_ascii=False)
    assert len(all_prompts(write_jsonl(tmp_path / "data.jsonl", [row]))) == 1


def test_line_endings_and_marks_of_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{GOOD}".encode())
    assert texts(all_prompts(path)) == ["gcd(6,4)=", "gcd(6,4)="]


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
