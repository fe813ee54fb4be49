"""Which prompts a step draws, and how a data file's mistakes are named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import embedded_tokenizer

from tlt_hpc.config import load_config
from tlt_hpc.data.gcd import GcdProblem
from tlt_hpc.data.prompts import GcdPrompts, PromptSource, ShuffledPrompts, make_prompt, open_prompts, read_jsonl
from tlt_hpc.records import Prompt

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "jobs" / "tiny.toml"


def gcd_prompts(seed: int = 0, count: int = 8) -> GcdPrompts:
    return GcdPrompts(embedded_tokenizer(), seed, count)


def shuffled_prompts(num_rows: int = 10, seed: int = 0, count: int = 4) -> ShuffledPrompts:
    rows = [make_prompt(embedded_tokenizer(), f"gcd({i + 1},{2 * i + 3})=", "1", "test") for i in range(num_rows)]
    return ShuffledPrompts(rows, seed, count)


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


@pytest.mark.parametrize("make", [gcd_prompts, shuffled_prompts])
def test_a_batch_depends_on_seed_and_step_alone(make: Any) -> None:
    """In any order, asked twice, from a new source: a resumed run draws what the first would have drawn."""
    forwards = [texts(make().batch(step)) for step in range(6)]
    source: PromptSource = make()
    backwards = [texts(source.batch(step)) for step in reversed(range(6))]
    assert backwards[::-1] == forwards
    assert len({tuple(batch) for batch in forwards}) == 6
    assert texts(make(seed=1).batch(0)) != forwards[0]


def test_a_batch_does_not_depend_on_the_process() -> None:
    """No hash of Python's, which differs from process to process."""
    code = (
        "from tlt_hpc.config import load_config; from tlt_hpc.plan import read_assets\n"
        f"print(*[p.text for p in read_assets(load_config({str(TINY)!r}), 1).prompts.batch(3)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == texts(gcd_prompts(count=16).batch(3))


def test_prompts_of_the_embedded_task() -> None:
    for prompt in gcd_prompts(count=50).batch(0):
        a, b = (int(part) for part in prompt.text[4:-2].split(","))
        assert GcdProblem(a, b).split == "train"
        assert prompt.answer == GcdProblem(a, b).answer
        assert prompt.tokens.dtype == np.int32
        assert embedded_tokenizer().decode(prompt.tokens.tolist()) == prompt.text


@pytest.mark.parametrize("count", [1, 3, 4, 10, 25])
def test_every_epoch_covers_all_rows_once(count: int) -> None:
    """Whether or not the batch divides the rows, and where one batch spans epochs."""
    source = shuffled_prompts(10, count=count)
    drawn = [text for step in range(60 // count + 1) for text in texts(source.batch(step))][:60]
    epochs = [drawn[start : start + 10] for start in range(0, 60, 10)]
    assert all(Counter(epoch) == Counter(set(epoch)) and len(epoch) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


# --- files ---


def rows_of(path: Path, *lines: str, limit: int = 16) -> list[Prompt]:
    path.write_text("\n".join(lines) + "\n")
    return read_jsonl(path, embedded_tokenizer(), limit)


def test_rows_are_read_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": "gcd(6,4)=", "answer": 2}, {"prompt": "gcd(9,3)=", "answer": "3", "data_source": "mine"}]
    prompts = rows_of(tmp_path / "data.jsonl", json.dumps(rows[0]), "", json.dumps(rows[1]))
    assert [(p.text, p.answer, p.source) for p in prompts] == [("gcd(6,4)=", "2", "jsonl"), ("gcd(9,3)=", "3", "mine")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "needs a text 'prompt' and an 'answer'"),
        ('{"prompt": "gcd(6,4)="}', "needs a text 'prompt' and an 'answer'"),
        ('{"prompt": 3, "answer": 2}', "needs a text 'prompt' and an 'answer'"),
        ('{"prompt": "", "answer": 2}', "prompt of 0 tokens"),
        ('{"prompt": "gcd(366,344)=gcd(366,344)=", "answer": 2}', "data.max_prompt_tokens = 16; raise the limit or"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(ValueError) as caught:
        rows_of(path, '{"prompt": "gcd(6,4)=", "answer": 2}', "", line)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.jsonl:1: needs a text 'prompt' and an 'answer'"):
        rows_of(tmp_path / "data.jsonl", '{"prompt": "gcd(6,4)=", "answer": null}')


def test_lines_end_with_newlines_only(tmp_path: Path) -> None:
    """U+2028 may stand within a JSON string, and must neither split a row nor shift the numbers of later ones."""
    path = tmp_path / "data.jsonl"
    row = json.dumps({"prompt": "gcd(6,4)=", "answer": "2\u2028"}, ensure_ascii=False)
    assert len(rows_of(path, row)) == 1


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl' does not exist; give a \.jsonl file or 'embedded:gcd'"):
        read_jsonl(tmp_path / "none.jsonl", embedded_tokenizer(), 16)
    with pytest.raises(ValueError, match=r"data\.jsonl' has no rows"):
        rows_of(tmp_path / "data.jsonl", "", "")


def test_the_configuration_names_the_source(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "gcd(6,4)=", "answer": 2}\n{"prompt": "gcd(9,3)=", "answer": 3}\n')
    config = load_config(TINY, [f"data.source={path}", "rollout.prompts_per_step=2"])
    assert sorted(texts(open_prompts(config, embedded_tokenizer()).batch(0))) == ["gcd(6,4)=", "gcd(9,3)="]
    assert isinstance(open_prompts(load_config(TINY), embedded_tokenizer()), GcdPrompts)
