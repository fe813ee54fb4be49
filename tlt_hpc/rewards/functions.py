"""The user's own reward function: found in a file, called as verl calls its."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

from tlt_hpc.common.files import read_bytes
from tlt_hpc.rewards.answer import Answer, Failure, Verdict

RewardFunction = Callable[..., Any]
MODULE = "tlt_reward_function"
MAX_REWARD = 1e6
"""Either way: the sums and squares of a step's rewards stay finite in float32."""
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's."""


def check_function(spec: str) -> None:
    """Compare ``path.py:name`` with the file, without running it.

    Raises:
        ValueError: no such file, it does not parse, or it has no such function.
    """
    path, _, name = spec.rpartition(":")
    try:
        tree = ast.parse(read_bytes(Path(path)))
    except OSError as error:
        raise ValueError(f"reward.function = {spec!r}: {path}: {error.strerror}; give a file that is there") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"reward.function = {spec!r}: {path} is not Python: {error}; fix it") from None
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {(node.asname or node.name).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if name not in names:
        raise ValueError(f"reward.function = {spec!r}: {path} has no {name!r} at its top level; name one that it has")


def load_function(spec: str) -> RewardFunction:
    """Run the file and take the function from it; the file's folder can be imported from.

    Raises:
        Exception: whatever the file raises.
    """
    path, _, name = spec.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    found = importlib.util.spec_from_file_location(MODULE, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[MODULE] = module
    try:
        found.loader.exec_module(module)
    except SystemExit as error:
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from None
    if name not in vars(module):
        raise AttributeError(f"{path} has no {name!r} at its top level")
    function = vars(module)[name]
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__} and cannot be called")
    _check_arguments(name, function)
    return function  # type: ignore[no-any-return]


def _check_arguments(name: str, function: RewardFunction) -> None:
    """Refuse at the start what would fail on every response."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise TypeError(f"{name} cannot be called with {', '.join(_ARGUMENTS)} by name: {error}") from None
    except ValueError:  # some built in functions do not tell
        return


def call_function(function: RewardFunction, answer: Answer) -> Verdict:
    """What the function says of an answer.

    Raises:
        Exception: whatever the function raises.
    """
    result = function(
        data_source=answer.source,
        solution_str=answer.text,
        ground_truth=answer.truth,
        extra_info=json.loads(answer.extra).get("extra_info") if answer.extra else None,
    )
    score = result.get("score") if isinstance(result, dict) else result
    if not isinstance(score, Real) or not math.isfinite(score):
        return Verdict.failed(Failure.ERROR, f"the function returned {str(result)[:80]!r}, which is no number")
    if abs(float(score)) > MAX_REWARD:
        return Verdict.failed(
            Failure.ERROR, f"the function returned {float(score):g}, which is not within {MAX_REWARD:g} of 0"
        )
    return Verdict(float(score))
