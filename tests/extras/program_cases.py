"""Programs with tests whose verdict is known by construction: problems, times forms of tests, times forms of responses.

A right program is one function that gives what the tests want; the others each differ from it in one way.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A function with its body, a body that is wrong, and calls with what they give."""

    name: str
    arguments: str
    body: str
    wrong: str
    calls: tuple[tuple[tuple[Any, ...], Any], ...]

    def program(self, body: str) -> str:
        return f"def {self.name}({self.arguments}):\n    {body}\n"

    def method(self, body: str) -> str:
        return f"class Solution:\n    def {self.name}(self, {self.arguments}):\n        {body}\n"


BIG = 7**6000
PROBLEMS = (
    Problem("add", "a, b", "return a + b", "return a - b", (((1, 2), 3), ((-1, 0), -1), ((10**20, 1), 10**20 + 1))),
    Problem("gcd", "a, b", "return math.gcd(a, b)", "return a", (((12, 8), 4), ((7, 3), 1))),
    Problem("sort_all", "xs: List[int]", "return sorted(xs)", "return xs", ((([3, 1, 2],), [1, 2, 3]), (([],), []))),
    Problem("as_text", "n", "return str(n)", "return [n]", (((100,), "100"), ((0,), "0"))),
    Problem("word", "s", "return s[::-1]", "return s", ((("true x",), "x eurt"), (("é\n\"'",), "'\"\né"))),
    Problem("no_or_yes", "n", "return n % 2 == 0", "return n % 2 == 1", (((4,), True), ((5,), False))),
    Problem("half", "x: float", "return x / 2", "return x / 2.001", (((1,), 0.5), ((3,), 1.5), ((1e-3,), 0.0005))),
    Problem("first", "xs", "return xs[0] if xs else None", "return xs and xs[0]", ((([5],), 5), (([],), None))),
    Problem("pairs", "n", "return [(i, i * i) for i in range(n)]", "return [(i, i) for i in range(n)]",
            (((3,), [(0, 0), (1, 1), (2, 4)]), ((0,), []))),
    Problem("count", "s", "return dict(Counter(s))", "return dict.fromkeys(s, 1)", ((("aab",), {"a": 2, "b": 1}),)),
    Problem("squares", "n", "return {i: i * i for i in range(n)}", "return {i: i for i in range(n)}",
            (((3,), {0: 0, 1: 1, 2: 4}),)),
    Problem("unique", "xs", "return set(xs)", "return set(xs[1:])", ((([1, 2, 2, 3],), {1, 2, 3}),)),
    Problem("power", "n", "return 7**n", "return 7**n + 1", (((6000,), BIG), ((2,), 49))),
    Problem("largest", "xs", "return reduce(max, xs, -inf)", "return min(xs)", ((([3, 9, 4],), 9),)),
    Problem("place", "xs, x", "return bisect_left(xs, x)", "return len(xs)", ((([1, 3, 5], 3), 1), (([1, 3], 0), 0))),
    Problem("point", "p", "return (p[1], p[0])", "return (p[0], p[1])", ((((1, 2),), (2, 1)),)),
    Problem("grid", "n", "return [[0] * n for _ in range(n)]", "return [0] * n", (((2,), [[0, 0], [0, 0]]),)),
    Problem("sum", "a, b", "return a + b + 0", "return a", (((10, 15), 25), ((-1, 1), 0))),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A response with the data's answer and other columns, and whether its program is right."""

    form: str
    response: str
    truth: str
    extra: str
    is_right: bool

    @property
    def name(self) -> str:
        return f"{self.form}, {'right' if self.is_right else 'wrong'}: {self.response!r}"


def _call(problem: Problem, arguments: tuple[Any, ...], function: str = "") -> str:
    return f"{function or problem.name}({', '.join(map(repr, arguments))})"


def _asserts(problem: Problem, function: str = "", indent: str = "", message: str = "") -> str:
    return "".join(
        f"{indent}assert {_call(problem, given, function)} == {wanted!r}{message}\n" for given, wanted in problem.calls
    )


def _is_json(problem: Problem) -> bool:
    """Whether what is wanted is the same as JSON: a function that gives a set does not give a list."""
    return problem.name != "unique"


# --- forms of tests: the data's answer, and the row's other columns ---


def verl_values(problem: Problem) -> Any:
    return {
        "fn_name": problem.name,
        "inputs": [list(given) for given, _ in problem.calls],
        "outputs": [wanted for _, wanted in problem.calls],
    }


def verl_wrapped(problem: Problem) -> Any:
    return {**verl_values(problem), "outputs": [[wanted] for _, wanted in problem.calls]}


def verl_texts(problem: Problem) -> Any:
    inputs = ["\n".join(map(json.dumps, given)) for given, _ in problem.calls]
    return {"fn_name": problem.name, "inputs": inputs, "outputs": [json.dumps(wanted) for _, wanted in problem.calls]}


def _livecodebench(problem: Problem, metadata: Any) -> Any:
    texts = verl_texts(problem)
    return [{"input": given, "output": wanted, "testtype": "functional", "metadata": metadata}
            for given, wanted in zip(texts["inputs"], texts["outputs"], strict=True)]  # fmt: skip


FUNCTION_FORMS: dict[str, Callable[[Problem], Any]] = {
    "verl's values": verl_values,
    "results in a list": verl_wrapped,
    "verl's texts": verl_texts,
    "LiveCodeBench": lambda problem: _livecodebench(problem, {"func_name": problem.name}),
    "LiveCodeBench, metadata as text": lambda problem: _livecodebench(problem, json.dumps({"func_name": problem.name})),
}


def _check(problem: Problem) -> str:
    return "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n" + _asserts(problem, "candidate", "    ")


def _unittest(problem: Problem) -> str:
    lines = "".join(
        f"        self.assertEqual({_call(problem, given)}, {wanted!r})\n" for given, wanted in problem.calls
    )
    return f"import unittest\n\nclass AllTests(unittest.TestCase):\n    def test_all(self):\n{lines}"


def _parametrized(problem: Problem) -> str:
    rows = [(given, wanted) for given, wanted in problem.calls]
    return (
        f"import pytest\nfrom solution import {problem.name}\n\n@pytest.mark.parametrize('given, wanted', {rows!r})\n"
        f"def test_all(given, wanted):\n    assert {problem.name}(*given) == wanted\n"
    )


def _table(problem: Problem) -> str:
    return f"cases = {list(problem.calls)!r}\nfor given, wanted in cases:\n    assert {problem.name}(*given) == wanted, f'{{given}}'\n"


def _raising(problem: Problem) -> str:
    lines = "".join(
        f"if {_call(problem, given)} != {wanted!r}:\n    raise ValueError('no')\n" for given, wanted in problem.calls
    )
    return f"def main():\n    pass\n{lines}main()\n"


PYTHON_FORMS: dict[str, Callable[[Problem], Any]] = {
    "assertions": _asserts,
    "a list of assertions": lambda problem: _asserts(problem).rstrip("\n").replace("\nassert", "\0assert").split("\0"),
    "assertions with a message": lambda problem: _asserts(problem, message=", 'it differs'"),
    "a table": _table,
    "errors": _raising,
    "HumanEval": _check,
    "HumanEval, one builtin": lambda problem: _check(problem).replace("assert ", "assert len([candidate]) == 1 and "),
    "HumanEval, called": lambda problem: f"{_check(problem)}\ncheck({problem.name})\n",
    "HumanEval, main guard": lambda problem: (
        f"{_check(problem)}\nif __name__ == '__main__':\n    check({problem.name})\n"
    ),
    "a main guard": lambda problem: f"if __name__ == '__main__':\n{_asserts(problem, indent='    ')}",
    "a function of pytest": lambda problem: (
        f"from solution import *\ndef test_it():\n{_asserts(problem, indent='    ')}"
    ),
    "a class of pytest": lambda problem: (
        f"class TestIt:\n    def test_it(self):\n{_asserts(problem, indent='        ')}"
    ),
    "parameters of pytest": _parametrized,
    "unittest": _unittest,
    "unittest with main": lambda problem: f"{_unittest(problem)}\nif __name__ == '__main__':\n    unittest.main()\n",
    "an import": lambda problem: f"import solution\n{_asserts(problem, f'solution.{problem.name}')}",
    "another name": lambda problem: f"from solution import {problem.name} as tested\n{_asserts(problem, 'tested')}",
}
METHOD_FORMS: dict[str, Callable[[Problem], Any]] = {
    "a method": lambda problem: _asserts(problem, f"Solution().{problem.name}"),
    "a method called by name": _asserts,
    "an object": lambda problem: f"s = Solution()\n{_asserts(problem, f's.{problem.name}')}",
    "HumanEval": _check,
    "HumanEval, method called": lambda problem: f"{_check(problem)}\ncheck(Solution().{problem.name})\n",
    **FUNCTION_FORMS,
}

# --- forms of responses ---

DRAFT = "```python\ndef draft(): pass\n```\nThat is wrong. Better:\n"
RESPONSES: dict[str, Callable[[str], str]] = {
    "no fence": lambda code: code,
    "a fence": lambda code: f"It's simple.\n\n```python\n{code}```\nIt is O(n).",
    "no language": lambda code: f"```\n{code}\n```",
    "after a draft": lambda code: f"{DRAFT}```Python\n{code}```\nOutput:\n```text\n1\n```\n",
    "in a list": lambda code: (
        "1. Code:\n\n   ```py\n" + "".join(f"   {line}\n" for line in code.split("\n")) + "   ```\n2. Done."
    ),
    "beside a mark of a list": lambda code: (
        "- ```python\n" + "".join(f"  {line}\n" for line in code.split("\n")) + "  ```\n"
    ),
    "tildes": lambda code: f"~~~python\n{code}~~~\n",
    "a longer fence": lambda code: f"````python3\n{code}\n# ```\n````\n",
    "a docstring with a fence": lambda code: f'```python\n"""Use:\n```\nx\n```\n"""\n{code}```\n',
    "not closed": lambda code: f"So:\n```python\n{code}",
    "closed on the last line": lambda code: f"So:\n```python\n{code.rstrip()}```",
    "Windows' lines": lambda code: f"```python\n{code}```\n".replace("\n", "\r\n"),
    "a quotation": lambda code: "".join(f"> {line}\n" for line in f"```python\n{code}```".split("\n")),
    "with an example": lambda code: f"```python\n{code}\nif __name__ == '__main__':\n    assert False\n```",
}


def _wrong_programs(problem: Problem, as_method: bool) -> Iterator[str]:
    write = problem.method if as_method else problem.program
    yield write(problem.wrong)
    yield write("pass" if problem.name != "first" else "return 0")
    yield write("raise ValueError('no')")
    yield write("import sys; sys.exit()")
    yield write("import os; os._exit(0)")
    yield "class E:\n    __eq__ = __ne__ = __bool__ = __lt__ = __ge__ = lambda *_: True\n" + write("return E()")
    yield ""
    yield "print('passed')"
    yield "def other(): return 1"
    yield write(problem.body).replace(":", "", 1)


def _stdin(problem: Problem, body: str) -> str:
    return f"{problem.program(body)}import ast\nprint({problem.name}(*ast.literal_eval(input())))\n"


def _stdin_forms(problem: Problem) -> Iterator[tuple[str, Any]]:
    inputs, outputs = [repr(given) for given, _ in problem.calls], [str(wanted) for _, wanted in problem.calls]
    yield "standard input", {"inputs": inputs, "outputs": outputs}
    yield "an empty name", {"inputs": inputs, "outputs": [f"{each} \n\n" for each in outputs], "fn_name": ""}
    yield "lines", {"inputs": [[each] for each in inputs], "outputs": [each.split("\n") for each in outputs]}
    yield (
        "LiveCodeBench, standard input",
        [
            {"input": given, "output": wanted, "testtype": "stdin"}
            for given, wanted in zip(inputs, outputs, strict=True)
        ],
    )


def cases(seed: int) -> Iterator[Case]:
    """All problems in all forms, each with a right and two wrong programs, in responses that the seed chooses."""
    draw = random.Random(seed)

    def respond(form: str, code: str, tree: Any, is_right: bool, is_script: bool = False) -> Case:
        forms = [name for name in RESPONSES if not (is_script and name == "with an example")]
        wrap = draw.choice(forms if code.strip() else ["a fence"])
        truth = tree if isinstance(tree, str) else json.dumps(tree)
        named = {"entry_point": draw.choice((problem.name, f"Solution().{problem.name}"))}
        extra = json.dumps({"extra_info": named}) if draw.random() < 0.3 else ""
        return Case(f"{problem.name}, {form}, {wrap}", RESPONSES[wrap](code), truth, extra, is_right)

    for problem in PROBLEMS:
        for as_method, forms in ((False, {**PYTHON_FORMS, **FUNCTION_FORMS}), (True, METHOD_FORMS)):
            write = problem.method if as_method else problem.program
            wrong = list(_wrong_programs(problem, as_method))
            for form, make in forms.items():
                if (form in FUNCTION_FORMS and not _is_json(problem)) or (problem.name == "sum" and "class" in form):
                    continue
                yield respond(form, write(problem.body), make(problem), True)
                for code in draw.sample(wrong, 2):
                    yield respond(form, code, make(problem), False)
        for form, tree in _stdin_forms(problem):
            yield respond(form, _stdin(problem, problem.body), tree, True, is_script=True)
            yield respond(form, _stdin(problem, problem.wrong), tree, False, is_script=True)
