"""Tasks of reasoning-gym: by name, from the run's seed, with arguments; and where there is no such package or task."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from data_sets import open_data, reader_of, texts

from tlt_hpc.config import ConfigError, UserError


class Sums:
    """What stands for a task: problems by seed and index."""

    def __init__(self, size: int, seed: int, largest: int = 9) -> None:
        assert largest > 0, "largest must be positive"
        self._seed, self._largest = seed, largest

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self._seed, index % self._largest
        return {"question": f"{a},{b}=", "answer": None if b == 5 else str(a + b), "metadata": {"pair": (a, b)}}


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with the task ``sums``; what it makes of wrong arguments is what the real one makes."""
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


def test_a_task_that_judges_by_its_entry_alone(gym: None) -> None:
    assert reader_of("reasoning-gym:sums", "data.task_args={size = 6}").read(5).answer == ""


def test_arguments_and_seed_make_other_problems(gym: None) -> None:
    def fingerprint(*given: str, seed: int = 0) -> str:
        return open_data(
            "reasoning-gym:sums", f"data.task_args={{{', '.join(['size = 20', *given])}}}", seed=seed
        ).fingerprints()["data.source"]

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(seed=1), fingerprint("largest = 2")}) == 3


def test_arguments_that_a_task_refuses(gym: None) -> None:
    start = "data.task_args = "
    for arguments, reason in [
        ("{largest = 0}", "{'largest': 0}: 'reasoning-gym:sums' refuses them (largest must be positive)"),
        (
            "{nix = 1}",
            "{'nix': 1}: 'reasoning-gym:sums' refuses them (Sums.__init__() got an unexpected keyword argument 'nix')",
        ),
        (
            "{largest = 'a'}",
            "{'largest': 'a'}: 'reasoning-gym:sums' refuses them ('>' not supported between instances of 'str' and "
            "'int')",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            open_data("reasoning-gym:sums", f"data.task_args={arguments}")
        assert str(caught.value) == start + reason + "; fix data.task_args"


def test_a_task_that_is_not_there(gym: None) -> None:
    for name, remedy in (("sum", "did you mean 'reasoning-gym:sums'?"), ("zzz", "it has e.g. sums")):
        with pytest.raises(ConfigError) as caught:
            open_data(f"reasoning-gym:{name}")
        assert str(caught.value) == (f"data.source = 'reasoning-gym:{name}': reasoning-gym has no such task; {remedy}")


def test_a_task_whose_questions_are_no_texts(gym: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "__getitem__", lambda *_: {"question": 3, "answer": "1"})
    with pytest.raises(UserError) as caught:
        open_data("reasoning-gym:sums", "data.task_args={size = 21}")
    assert str(caught.value) == (
        "reasoning-gym:sums problem 0: its question is no text; use another task, or set data.broken_rows = 'skip'"
    )


def test_the_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError) as caught:
        open_data("reasoning-gym:leg_counting")
    assert str(caught.value) == (
        "data.source = 'reasoning-gym:leg_counting' needs the package 'reasoning_gym'; pip install reasoning-gym"
    )


def test_the_package_itself() -> None:
    pytest.importorskip("reasoning_gym")
    settings = ("data.task_args={size = 8, min_animals = 2, max_animals = 3}",)
    reader = reader_of("reasoning-gym:leg_counting", *settings, "data.max_prompt_tokens=500")
    rows = [reader.rows[index] for index in range(8)]
    assert all("how many legs" in row["prompt"] and row["answer"].isdecimal() for row in rows)
    assert all(2 <= row["extra_info"]["metadata"]["num_animals"] <= 3 for row in rows)
    assert [row["prompt"] for row in rows] == [reader.rows[index]["prompt"] for index in range(8)]
    with pytest.raises(ConfigError, match="did you mean 'reasoning-gym:leg_counting'"):
        reader_of("reasoning-gym:leg_countin")
    with pytest.raises(ConfigError, match="max_animals must be >= min_animals"):
        reader_of("reasoning-gym:leg_counting", "data.task_args={max_animals = 1}")
