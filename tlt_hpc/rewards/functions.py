"""The user's own reward function: found in a file, called as verl calls its."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from tlt_hpc.common.answers import answer_text
from tlt_hpc.common.files import read_bytes
from tlt_hpc.rewards.answer import Answer, Failure, Verdict

RewardFunction = Callable[..., Any]
MODULE = "tlt_reward_function"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's, by name."""
MAX_REWARD = 1e6
"""Either way: the sums and squares of a step's rewards stay finite in float32."""


def check_function(spec: str) -> None:
    """Look for the function of ``path.py:name`` in the file, without running it.

    Raises:
        ValueError: no such file, or it does not mention the name.
    """
    path, _, name = spec.rpartition(":")
    try:
        source = read_bytes(Path(path))
    except OSError as error:
        raise ValueError(f"reward.function = {spec!r}: {path}: {error.strerror}; give a file that is there") from None
    if name.encode() not in source:
        raise ValueError(f"reward.function = {spec!r}: {path} has no {name!r}; name a function that it has")


def load_function(spec: str) -> RewardFunction:
    """Run the file and take the function from it; the file's folder can be imported from.

    Raises:
        Exception: whatever the file raises; TypeError, if the function does not take verl's arguments.
    """
    path, _, name = spec.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    found = importlib.util.spec_from_file_location(MODULE, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[MODULE] = module
    try:
        found.loader.exec_module(module)
    except SystemExit as error:
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from None
    if not callable(function := vars(module).get(name)):
        raise TypeError(f"{path} has no function {name!r} at its top level")
    try:
        inspect.signature(function, follow_wrapped=False).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise TypeError(f"{name} is called with {', '.join(ARGUMENTS)}: {error}") from None
    except ValueError:  # a compiled function may have no signature
        pass
    return function  # type: ignore[no-any-return]


def place_of(error: BaseException) -> str:
    """The line of the user's file that an error passed through last, in words; empty if there is none."""
    frames = [found for found in traceback.walk_tb(error.__traceback__) if found[0].f_globals.get("__name__") == MODULE]
    return f" ({Path(frames[-1][0].f_code.co_filename).name}, line {frames[-1][1]})" if frames else ""


def call_function(function: RewardFunction, answer: Answer) -> Verdict:
    """What the function says of an answer.

    Raises:
        Exception: whatever the function raises.
    """
    columns = json.loads(answer.extra) if answer.extra else {}
    given = answer.source, answer.text, _truth(answer, columns), columns.get("extra_info")
    result = function(**dict(zip(ARGUMENTS, given, strict=True)))
    score: Any = result.get("score") if isinstance(result, dict) else result
    if getattr(score, "shape", None) == ():  # numpy's truth values and torch's numbers are no Real
        score = score.item()
    if not isinstance(score, Real) or not abs(float(score)) <= MAX_REWARD:
        lacks = isinstance(result, dict) and "score" not in result
        what = "a dict without 'score'" if lacks else f"not a number between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        detail = f"the function returned {str(result)[:80]!r}, which is {what}"
        return Verdict(0.0, Failure.ERROR, detail)
    return Verdict(float(score))


def _truth(answer: Answer, columns: Mapping[str, Any]) -> Any:
    """The answer's text, or the table or list in verl's column that it was written from."""
    found = columns["reward_model"].get("ground_truth") if isinstance(columns.get("reward_model"), dict) else None
    return found if isinstance(found, dict | list) and answer_text(found) == answer.truth else answer.truth
