"""The prompts of a step: a function of seed and step alone, and whole epochs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import TINY, gcd_row, gcd_rows, open_data, texts, write_jsonl
from tiny import embedded_tokenizer

from tlt_hpc.cluster.watch.beat import BEAT
from tlt_hpc.common.records import Prompt
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.data import prompts as prompts_module
from tlt_hpc.data.prompts import FilePrompts, GcdProblem, GcdPrompts, PromptSource, SharedPrompts, open_prompts
from tlt_hpc.data.reader import PromptReader


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


def test_prompts_of_the_embedded_task_are_known(tmp_path: Path) -> None:
    """Other prompts would be another run: the draw must not depend on a process, machine or version."""
    source = gcd_prompts(tmp_path, count=3)
    assert texts(source.batch(0)) == ["gcd(115,184)=", "gcd(48,324)=", "gcd(374,286)="]
    assert texts(source.refill(0, 2)) == ["gcd(88,242)=", "gcd(60,160)="]


def test_prompts_of_the_embedded_task(tmp_path: Path) -> None:
    for prompt in gcd_prompts(tmp_path, count=50).batch(0):
        a, b = (int(part) for part in prompt.text[4:-2].split(","))
        assert GcdProblem(a, b).split == "train"
        assert prompt.answer == GcdProblem(a, b).answer
        assert prompt.tokens.dtype == np.int32
        assert embedded_tokenizer().decode(prompt.tokens.tolist()) == prompt.text


@pytest.mark.parametrize("count", [1, 3, 10, 25])
def test_every_epoch_covers_all_rows_once(count: int, tmp_path: Path) -> None:
    """Whether or not the batch divides the rows, and where one batch spans epochs."""
    source = shuffled_prompts(tmp_path, count=count)
    drawn = [text for step in range(60 // count + 1) for text in texts(source.batch(step))][:60]
    epochs = [drawn[start : start + 10] for start in range(0, 60, 10)]
    assert all(Counter(epoch) == Counter(set(epoch)) and len(epoch) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_one_rank_of_a_node_reads_for_all(tmp_path: Path) -> None:
    source, sent = shuffled_prompts(tmp_path), list[list[Prompt]]()
    first = SharedPrompts(source, lambda read: sent.append(read()) or sent[-1])
    other = SharedPrompts(None, lambda _: sent.pop(0))
    for call in (lambda prompts: prompts.batch(3), lambda prompts: prompts.refill(3, 5)):
        assert texts(call(first)) == texts(call(source)) == texts(call(other))
    assert first.fingerprints() == source.fingerprints() and first.warning == source.warning


def test_where_prompts_are_dropped_the_first_draw_reads_all_rows_once(tmp_path: Path, monkeypatch: Any) -> None:
    reads, true_read = list[int](), PromptReader.read
    monkeypatch.setattr(PromptReader, "read", lambda self, row: reads.append(row) or true_read(self, row))
    monkeypatch.setattr(prompts_module, "CHECKED_ROWS", 5)
    rows = [gcd_row(number) for number in range(3000)] + [{"prompt": "1=" * 9, "answer": "1"}]
    source = open_data(write_jsonl(tmp_path / "a.jsonl", rows), "data.overlong=drop", count=4)
    assert len(reads) == 5, "no more than without dropping, for the launcher opens the data, too"
    before = BEAT.progress
    assert source.warning and len(reads) == 5 + 3001 and BEAT.progress >= before + 3
    source.batch(0), source.refill(0, 2)
    assert source.warning and len(reads) == 5 + 3001 + 4 + 2


def test_the_configuration_names_the_source(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", gcd_rows(2))
    config = load_config(TINY, [f"data.source={path}", "rollout.prompts_per_step=2"])
    assert sorted(texts(open_prompts(config, embedded_tokenizer()).batch(0))) == ["gcd(1,3)=", "gcd(2,5)="]
    assert isinstance(open_prompts(load_config(TINY), embedded_tokenizer()), GcdPrompts)
    with pytest.raises(ConfigError, match=r"have up to 9 tokens; use data.max_prompt_tokens = 9 or more"):
        open_prompts(load_config(TINY, ["data.max_prompt_tokens=8"]), embedded_tokenizer())
