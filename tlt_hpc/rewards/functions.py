"""The user's own reward functions: found in files, called as verl calls its."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from tlt_hpc.common.files import read_bytes
from tlt_hpc.common.records import answer_text
from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Answer, Failure, Verdict

RewardFunction = Callable[..., Any]
MODULE = "tlt_reward_function"
"""Begins the names of the modules that the user's files become."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's, by name."""
MAX_REWARD = 1e6
"""Either way: the sums and squares of a step's rewards stay finite in float32."""


def config_key_of_function(spec: str, settings: RewardSection) -> str:
    """The key of a function in the configuration, for messages."""
    if spec == settings.default:
        return "reward.default ="
    return "reward.by_source:" if spec in settings.by_source.values() else "reward.weights:"


def check_functions(settings: RewardSection) -> None:
    """Look for each function in its file, without running it.

    Raises:
        ValueError: no such file, or it does not mention the name.
    """
    for spec in settings.functions:
        path, _, name = spec.rpartition(":")
        told = f"{config_key_of_function(spec, settings)} {spec!r}"
        try:
            source = read_bytes(Path(path)).decode("utf-8", "replace")
        except OSError as error:
            raise ValueError(f"{told}: {path}: {error.strerror}; give a file that is there") from None
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise ValueError(f"{told}: {path} has no {name!r}; name a function that it has")


def load_functions(specs: Iterable[str]) -> dict[str, RewardFunction]:
    """Run each file once and take the functions from it, by ``path.py:name``; its folder can be imported from.

    Raises:
        Exception: whatever a file raises; TypeError, if a function does not take verl's arguments.
    """
    modules: dict[str, ModuleType] = {}
    return {spec: _load_function(spec, modules) for spec in specs}


def _load_function(spec: str, modules: dict[str, ModuleType]) -> RewardFunction:
    path, _, name = spec.rpartition(":")
    if path not in modules:
        modules[path] = _execute_file(path, f"{MODULE}_{len(modules)}")
    if not callable(function := vars(modules[path]).get(name)):
        raise TypeError(f"{path} has no function {name!r} at its top level")
    try:
        inspect.signature(function, follow_wrapped=False).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise TypeError(f"{name} is called with {', '.join(ARGUMENTS)}: {error}") from None
    except ValueError:  # a compiled function may have no signature
        pass
    return function  # type: ignore[no-any-return]


def _execute_file(path: str, name: str) -> ModuleType:
    sys.path.insert(0, str(Path(path).resolve().parent))
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except SystemExit as error:
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from None
    return module


def find_function_being_loaded(error: BaseException) -> str:
    """The function that was being loaded when an error was raised; empty if none was."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is _load_function.__code__)
    return next((str(frame.f_locals["spec"]) for frame in frames), "")


def raised_in_user_function(error: BaseException) -> bool:
    """True if an error was raised while a user's function was called."""
    return any(frame.f_code is call_function.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def format_error_location(error: BaseException) -> str:
    """The line of the user's file that an error passed through last, in words; empty if there is none."""
    walked = traceback.walk_tb(error.__traceback__)
    frames = [found for found in walked if str(found[0].f_globals.get("__name__")).startswith(MODULE)]
    return f" ({Path(frames[-1][0].f_code.co_filename).name}, line {frames[-1][1]})" if frames else ""


def call_function(function: RewardFunction, answer: Answer) -> Verdict:
    """The verdict of a function on an answer.

    Raises:
        Exception: whatever the function raises.
    """
    columns = json.loads(answer.extra) if answer.extra else {}
    given = answer.source, answer.text, _ground_truth_of(answer, columns), columns.get("extra_info")
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


def _ground_truth_of(answer: Answer, columns: Mapping[str, Any]) -> Any:
    """The answer's text, or the table or list in verl's column that it was written from."""
    found = columns["reward_model"].get("ground_truth") if isinstance(columns.get("reward_model"), dict) else None
    return found if isinstance(found, dict | list) and answer_text(found) == answer.truth else answer.truth
