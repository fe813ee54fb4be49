"""Tasks of reasoning-gym: by name, from the run's seed, with arguments; and a missing package or task."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from data_sets import RAW, config_of, open_data, reader_of, texts
from tiny import embedded_tokenizer

from tlt_hpc.config import UserError
from tlt_hpc.data.evaluation_sets import open_sets


class Sums:
    """A task: problems by seed and index."""

    def __init__(self, size: int, seed: int, largest: int = 9) -> None:
        assert largest > 0, "largest must be positive"
        self._seed, self._largest = seed, largest

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self._seed, index % self._largest
        return {"question": f"{a},{b}=", "answer": None if b == 5 else str(a + b), "metadata": {"pair": (a, b)}}


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with the task ``sums``."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    vars(factory)["DATASETS"] = {"sums": Sums}
    vars(package)["create_dataset"] = lambda name, **arguments: Sums(**arguments)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_problems_of_a_task(gym: None) -> None:
    source = open_data("reasoning-gym:sums", "data.task_args={size = 20}", seed=3, count=10)
    drawn = [*source.batch(0), *source.batch(1)]
    assert sorted(texts(drawn)) == sorted(f"3,{i % 9}=" for i in range(20))
    first = next(prompt for prompt in drawn if prompt.text == "3,4=")
    assert (first.answer, first.source) == ("7", "reasoning-gym:sums")
    entry = {"question": "3,4=", "answer": "7", "metadata": {"pair": [3, 4]}}
    assert json.loads(first.extra) == {"extra_info": entry}
    assert {prompt.answer for prompt in drawn if prompt.text == "3,5="} == {""}, "judged by its entry alone"
    assert len(reader_of("reasoning-gym:sums")) == 10_000


def test_arguments_and_seed_make_other_problems(gym: None) -> None:
    def fingerprint(*given: str, seed: int = 0) -> str:
        return open_data(
            "reasoning-gym:sums", f"data.task_args={{{', '.join(['size = 20', *given])}}}", seed=seed
        ).fingerprints()["data.source"]

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(seed=1), fingerprint("largest = 2")}) == 3


def test_an_evaluation_has_other_problems_than_any_run(gym: None) -> None:
    """Problem n is made from seed + n: runs with seeds from 0 on share most problems with an evaluation with seed 0."""
    task = "reasoning-gym:sums"
    config = config_of(task, "data.task_args={size = 3}", f"evaluation.sources=['{task}']")
    (found,) = open_sets(config, embedded_tokenizer(), RAW)
    assert texts(found.prompts) == [f"{2**31},{b}=" for b in range(3)]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sums", "{largest = 0}", "data.task_args = {'largest': 0}: 'reasoning-gym:sums' refuses them (largest must "),
        ("sums", "{nix = 1}", "data.task_args = {'nix': 1}: 'reasoning-gym:sums' refuses them (Sums.__init__() got "),
        ("sums", "{largest = 'a'}", "data.task_args = {'largest': 'a'}: 'reasoning-gym:sums' refuses them ('>' not "),
        ("sums", "{seed = 3}", "data.task_args = {'seed': 3}: 'reasoning-gym:sums' refuses them ("),  # run.seed is it
        ("sum", "{}", "data.source = 'reasoning-gym:sum': reasoning-gym has no such task; its gallery lists the names"),
    ],
)
def test_tasks_that_cannot_be_made(gym: None, name: str, arguments: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_data(f"reasoning-gym:{name}", f"data.task_args={arguments}")
    assert str(caught.value).startswith(message)


def test_a_task_whose_questions_are_no_texts(gym: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "__getitem__", lambda *_: {"question": 3, "answer": "1"})
    with pytest.raises(UserError, match="reasoning-gym:sums problem 0: its question is no text; use another task"):
        open_data("reasoning-gym:sums", "data.task_args={size = 21}")


def test_the_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs the package 'reasoning_gym'; pip install reasoning-gym"):
        open_data("reasoning-gym:leg_counting")
