"""What tests of pytest import, and how tests that nothing calls are called.

pytest itself is not in the sandbox: the tests that data sets have need only these names of it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tlt_hpc.extras.code_rewards.sandbox.syntax_of_tests import GIVEN

Function = Callable[..., Any]


class _Raised:
    value: Any = None


class raises(AbstractContextManager[_Raised]):  # noqa: N801
    """A block, or a call, that must raise such an exception."""

    def __init__(self, kind: Any, function: Function | None = None, *given: Any, match: str = "", **named: Any) -> None:
        self._kind, self._match, self._raised = kind, match, _Raised()
        if function is not None:
            with self:
                function(*given, **named)

    def __enter__(self) -> _Raised:
        return self._raised

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if kind is None:
            raise AssertionError(f"{self._kind} was not raised")
        if not issubclass(kind, self._kind):
            return False
        self._raised.value = error
        if self._match and not re.search(self._match, str(error)):
            raise AssertionError(f"{self._match!r} is not in {str(error)!r}")
        return True


class approx:  # noqa: N801
    """Equal to a number, or to the numbers in a collection, up to a tolerance."""

    __array_ufunc__ = None
    __array_priority__ = 100

    def __init__(self, wanted: Any, rel: float = 1e-6, abs: float = 1e-12, nan_ok: bool = False) -> None:
        self._wanted, self._rel, self._abs, self._nan_ok = wanted, rel, abs, nan_ok

    def __eq__(self, given: object) -> bool:
        return self._same(given, self._wanted)

    __hash__ = None  # type: ignore[assignment]

    def _same(self, given: Any, wanted: Any) -> bool:
        if isinstance(wanted, dict):
            return given.keys() == wanted.keys() and all(self._same(given[key], wanted[key]) for key in wanted)
        if isinstance(wanted, list | tuple) or hasattr(wanted, "tolist"):
            return len(given) == len(wanted) and all(map(self._same, given, wanted))
        if given == wanted or (self._nan_ok and given != given and wanted != wanted):
            return True
        return bool(abs(given - wanted) <= max(self._rel * abs(wanted), self._abs) < float("inf"))


class _Mark:
    """Marks of tests: that of parameters calls the test for each of them, others change nothing."""

    def __getattr__(self, name: str) -> Function:
        return lambda *given, **_: given[0] if len(given) == 1 and callable(given[0]) else lambda test: test

    def parametrize(self, names: Any, rows: Any, **_: Any) -> Function:
        is_one = isinstance(names, str) and "," not in names
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(test: Function) -> Function:
            def each(*own: Any, **given: Any) -> None:
                for row in rows:
                    values = row.values if isinstance(row, param) else (row,) if is_one else row
                    test(*own, **given, **dict(zip(split, values, strict=True)))

            functools.update_wrapper(each, test)
            open_ones = [one for one in inspect.signature(test).parameters.values() if one.name not in split]
            each.__signature__ = inspect.Signature(open_ones)  # type: ignore[attr-defined]
            return each

        return decorate


class param:  # noqa: N801
    """A row of parameters with a name."""

    def __init__(self, *values: Any, **_: Any) -> None:
        self.values = values


mark = _Mark()


def fixture(*given: Any, **_: Any) -> Any:
    """Marks a function that makes an argument of tests."""

    def decorate(function: Function) -> Function:
        function.makes_argument = True  # type: ignore[attr-defined]
        return function

    return decorate(given[0]) if given else decorate


def fail(reason: str = "", **_: Any) -> None:
    """Raise the failure of a test.

    Raises:
        AssertionError: always.
    """
    raise AssertionError(reason)


def main(*_: Any, **__: Any) -> None:
    """Do nothing: tests are called afterwards."""


def ignore_main() -> None:
    """Make ``unittest.main`` do nothing: its tests are called afterwards, and it would end the process."""
    import unittest  # 20 ms that most tests need not pay

    unittest.main = main  # type: ignore[assignment,misc]


def call_test(test: Any, names: Mapping[str, Any]) -> None:
    """Run a test function, or all tests of a class.

    Raises:
        Exception: one of them fails.
    """
    if not isinstance(test, type):
        _call(test, names)
    elif "unittest" in sys.modules and issubclass(test, sys.modules["unittest"].TestCase):
        _run_case(test)
    else:
        for name in [name for name in dir(test) if name.startswith("test")]:
            instance = test()
            for prepare in ("setup_class", "setup_method", "setup"):
                if hasattr(instance, prepare):
                    _call(getattr(instance, prepare), names)
            _call(getattr(instance, name), names)


def _call(function: Function, names: Mapping[str, Any]) -> Any:
    """Call a function with what makes its arguments, or with the program's function where nothing does."""
    needed = [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    given = [_call(names[name], names) if _is_fixture(names.get(name)) else names[GIVEN] for name in needed]
    made = function(**dict(zip(needed, given, strict=True)))
    return next(made) if inspect.isgenerator(made) else made


def _is_fixture(found: Any) -> bool:
    return inspect.isfunction(found) and hasattr(found, "makes_argument")


def _run_case(case: Any) -> None:
    import unittest

    errors = list[BaseException]()
    result: Any = unittest.TestResult()
    result.addError = result.addFailure = lambda _, error: errors.append(error[1])
    result.addSubTest = lambda _, __, error: errors.extend(error[1:2] if error else ())
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if errors:
        raise errors[0]
