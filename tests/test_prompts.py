"""The prompts of a step: a function of seed and step alone, in whole epochs; and the embedded task that makes them."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import TINY, refusal
from data_sets import gcd_row, gcd_rows, open_data, texts, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tiny import embedded_tokenizer, response_text

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.records import Prompt
from tlt_hpc.config import load_config
from tlt_hpc.data.prompts import (
    MAX_DIVISOR,
    MAX_NUMBER,
    MAX_WORKING_TOKENS,
    Draws,
    FilePrompts,
    GcdProblem,
    GcdPrompts,
    PromptSource,
    SharedPrompts,
    Split,
    draw_from_split,
    draw_problem,
    num_working_tokens,
    open_prompts,
    shuffled_row_order,
)
from tlt_hpc.data.reader import PromptReader


def gcd_prompts(folder: Path, seed: int = 0, count: int = 8) -> GcdPrompts:
    return GcdPrompts(embedded_tokenizer(), seed, count)


def shuffled_prompts(folder: Path, seed: int = 0, count: int = 4) -> FilePrompts:
    return open_data(write_jsonl(folder / "ten.jsonl", gcd_rows(10)), seed=seed, count=count)


@pytest.mark.parametrize("make", [gcd_prompts, shuffled_prompts])
def test_a_batch_depends_on_seed_and_step_alone(make: Any, tmp_path: Path) -> None:
    """In any order, asked twice, from a new source: a resumed run draws what the first would have drawn."""
    forwards = [texts(make(tmp_path).draw_step_prompts(step)) for step in range(6)]
    source: PromptSource = make(tmp_path)
    backwards = [texts(source.draw_step_prompts(step)) for step in reversed(range(6))]
    assert backwards[::-1] == forwards
    assert len({tuple(batch) for batch in forwards}) == 6
    assert texts(make(tmp_path, seed=1).draw_step_prompts(0)) != forwards[0]


def test_prompts_of_the_embedded_task_are_known(tmp_path: Path) -> None:
    """Other prompts would be another run: the draw must not depend on a process, machine or version."""
    source = gcd_prompts(tmp_path, count=3)
    assert texts(source.draw_step_prompts(0)) == ["gcd(115,184)=", "gcd(48,324)=", "gcd(374,286)="]
    assert texts(source.draw_refill_prompts(0, 2)) == ["gcd(88,242)=", "gcd(60,160)="]
    assert [prompt.answer for prompt in source.draw_step_prompts(0)] == ["23", "12", "22"]
    for prompt in source.draw_step_prompts(1):
        assert prompt.tokens.dtype == np.int32 and embedded_tokenizer().decode(prompt.tokens.tolist()) == prompt.text


@pytest.mark.parametrize("count", [1, 3, 10, 25])
def test_every_epoch_covers_all_rows_once(count: int, tmp_path: Path) -> None:
    """Whether or not the batch divides the rows, and where one batch spans epochs."""
    source = shuffled_prompts(tmp_path, count=count)
    drawn = [text for step in range(60 // count + 1) for text in texts(source.draw_step_prompts(step))][:60]
    epochs = [drawn[start : start + 10] for start in range(0, 60, 10)]
    assert all(Counter(epoch) == Counter(set(epoch)) and len(epoch) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_one_rank_of_a_node_reads_for_all(tmp_path: Path) -> None:
    source, sent = shuffled_prompts(tmp_path), list[list[Prompt]]()
    first = SharedPrompts(source, lambda read: sent.append(read()) or sent[-1])
    other = SharedPrompts(None, lambda _: sent.pop(0))
    for call in (lambda prompts: prompts.draw_step_prompts(3), lambda prompts: prompts.draw_refill_prompts(3, 5)):
        assert texts(call(first)) == texts(call(source)) == texts(call(other))
    assert first.fingerprints() == source.fingerprints() and first.warning == source.warning


def test_where_prompts_are_dropped_the_first_draw_reads_all_rows_once(tmp_path: Path, monkeypatch: Any) -> None:
    reads, true_read = list[int](), PromptReader.read
    monkeypatch.setattr(PromptReader, "read", lambda self, row: reads.append(row) or true_read(self, row))
    monkeypatch.setattr("tlt_hpc.data.prompts.CHECKED_ROWS", 5)
    rows = [gcd_row(number) for number in range(3000)] + [{"prompt": "1=" * 9, "answer": "1"}]
    source = open_data(write_jsonl(tmp_path / "a.jsonl", rows), "data.overlong=drop", count=4)
    assert len(reads) == 5, "no more than without dropping, for the launcher opens the data, too"
    before = BEAT.progress
    assert source.warning and len(reads) == 5 + 3001 and BEAT.progress >= before + 3
    source.draw_step_prompts(0), source.draw_refill_prompts(0, 2)
    assert source.warning and len(reads) == 5 + 3001 + 4 + 2


def test_the_configuration_names_the_source(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", gcd_rows(2))
    config = load_config(TINY, [f"data.source={path}", "rollout.prompts_per_step=2"])
    assert sorted(texts(open_prompts(config, embedded_tokenizer()).draw_step_prompts(0))) == ["gcd(1,3)=", "gcd(2,5)="]
    assert isinstance(open_prompts(load_config(TINY), embedded_tokenizer()), GcdPrompts)
    said = refusal(open_prompts, load_config(TINY, ["data.max_prompt_tokens=8"]), embedded_tokenizer())
    assert "have up to 9 tokens; use data.max_prompt_tokens = 9 or more" in said


# --- the order of draws ---


def test_the_order_is_the_same_on_every_machine_and_version():
    """Known answers: with another order a resumed run would draw other prompts."""
    assert shuffled_row_order(10, 0, 0).tolist() == [1, 0, 9, 7, 5, 8, 3, 2, 6, 4]
    assert shuffled_row_order(10, 0, 1).tolist() == [2, 6, 0, 7, 3, 5, 4, 8, 9, 1]
    assert shuffled_row_order(10, 2**63 - 1, 0).tolist() == [0, 2, 9, 7, 8, 1, 6, 3, 5, 4]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 90), st.integers(0, 20))
def test_draws_are_all_epochs_one_after_another_without_dropped_rows(is_kept, start, count):
    if not any(is_kept):
        return
    found, epoch = list[int](), 0
    while len(found) < start + count:
        found += [int(row) for row in shuffled_row_order(len(is_kept), 0, epoch) if is_kept[row]]
        epoch += 1
    assert Draws(np.array(is_kept), 0).rows(start, start + count) == found[start : start + count]


def test_rows_behind_those_that_are_checked_first(tmp_path, monkeypatch):
    """A huge file is not read through: a fault there is found at its draw, alike on all ranks."""
    monkeypatch.setattr("tlt_hpc.data.prompts.CHECKED_ROWS", 4)
    rows: list[Any] = gcd_rows(12)
    last = int(shuffled_row_order(12, 0, 0)[11])
    rows[last] = "{"
    source = open_data(write_jsonl(tmp_path / "a.jsonl", rows), count=6)
    source.draw_step_prompts(0)
    assert f"a.jsonl:{last + 1}: no JSON object" in refusal(source.draw_step_prompts, 1)


# --- the embedded task ---

numbers = st.integers(1, MAX_NUMBER)
problems = st.builds(GcdProblem, numbers, numbers)
SPLITS: tuple[Split, ...] = ("supervised", "train", "evaluation")


@given(problems)
def test_subtractions_lead_to_the_answer(problem: GcdProblem) -> None:
    pairs = problem.subtractions()
    assert pairs[0] == (problem.a, problem.b)
    for (a, b), (c, d) in itertools.pairwise(pairs):
        assert a != b
        assert (c, d) == ((a - b, b) if a > b else (a, b - a))
    assert pairs[-1] == (math.gcd(problem.a, problem.b),) * 2
    assert problem.answer == str(pairs[-1][0])


@given(problems)
def test_lengths_are_counted_as_the_tokenizer_counts(problem: GcdProblem) -> None:
    pairs = problem.subtractions()
    response = embedded_tokenizer().encode(response_text(pairs, problem.answer))
    assert response.tokens[0] == "<think>"
    assert response.tokens.index("</think>") - 1 == num_working_tokens(pairs)
    assert embedded_tokenizer().decode(response.ids) == response_text(pairs, problem.answer)


@given(st.integers(0, 2**32))
def test_drawn_problems_keep_the_bounds(seed: int) -> None:
    problem = draw_problem(random.Random(seed))
    assert 1 <= min(problem.a, problem.b) < max(problem.a, problem.b) <= MAX_NUMBER
    assert 1 <= int(problem.answer) <= MAX_DIVISOR
    assert num_working_tokens(problem.subtractions()) <= MAX_WORKING_TOKENS


@pytest.mark.parametrize("split", SPLITS)
def test_draws_stay_in_their_split(split: Split) -> None:
    source = random.Random(1)
    drawn = [draw_from_split(source, split) for _ in range(200)]
    assert {problem.split for problem in drawn} == {split}
    assert len(set(drawn)) > 150


def test_the_split_is_of_the_text_alone() -> None:
    """Known answers: another hash would hand RL the problems that the shipped model was trained on."""
    problems = [(196, 364), (12, 18), (7, 5), (90, 45), (8, 6), (21, 14)]
    expected = ["supervised", "train", "train", "evaluation", "supervised", "evaluation"]
    assert [GcdProblem(a, b).split for a, b in problems] == expected
