"""Programs with tests whose verdict is known by construction: problems, times forms of tests, times forms of responses.

They stand in ``program_cases.toml``. A right program is one function that gives what the tests want; the others each
differ from it in one way.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("program_cases.toml").read_text("utf-8"))
_JINJA = Environment(
    variable_start_string="«", variable_end_string="»", comment_start_string="«#", trim_blocks=True,
    keep_trailing_newline=True,
)  # fmt: skip


def _filled(form: str, **values: Any) -> str:
    return _JINJA.from_string(form).render(values)


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

    def call(self, arguments: tuple[Any, ...], function: str = "") -> str:
        return f"{function or self.name}({', '.join(map(repr, arguments))})"

    def asserts(self, function: str = "", indent: str = "", message: str = "") -> str:
        lines = (
            f"{indent}assert {self.call(given, function)} == {wanted!r}{message}\n" for given, wanted in self.calls
        )
        return "".join(lines)

    def tests(self, form: str) -> str:
        """Tests in a form of ``program_cases.toml``."""
        values = {"name": self.name, "calls": list(self.calls), "call": self.call, "asserts": self.asserts}
        values |= {"repr": repr, "json": json.dumps, "lines": self.asserts().splitlines()}
        parts = {name: _filled(part, **values) for name, part in _TABLES["parts"].items()}
        return _filled(form, **values, **parts)


PROBLEMS = tuple(Problem(**{**row, "calls": tuple(eval(row["calls"]))}) for row in _TABLES["problem"])


@dataclass(frozen=True)
class Case:
    """A response with the data's answer and other columns, and whether its program is right."""

    form: str
    response: str
    truth: str
    extra: str
    is_right: bool


# --- forms of tests that are values: the data's answer ---


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


VALUE_FORMS: dict[str, Callable[[Problem], Any]] = {
    "verl's values": verl_values,
    "results in a list": verl_wrapped,
    "verl's texts": verl_texts,
    "LiveCodeBench": lambda problem: _livecodebench(problem, {"func_name": problem.name}),
    "LiveCodeBench, metadata as text": lambda problem: _livecodebench(problem, json.dumps({"func_name": problem.name})),
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
        forms = [name for name in _TABLES["responses"] if not (is_script and name == "with an example")]
        wrap = draw.choice(forms if code.strip() else ["a fence"])
        truth = tree if isinstance(tree, str) else json.dumps(tree)
        named = {"entry_point": draw.choice((problem.name, f"Solution().{problem.name}"))}
        extra = json.dumps({"extra_info": named}) if draw.random() < 0.3 else ""
        response = _filled(_TABLES["responses"][wrap], code=code)
        return Case(f"{problem.name}, {form}, {wrap}", response, truth, extra, is_right)

    for problem in PROBLEMS:
        for as_method, table in ((False, "python_forms"), (True, "method_forms")):
            forms = {name: problem.tests(form) for name, form in _TABLES[table].items()}
            if problem.name != "unique":  # a function that gives a set gives no JSON
                forms |= {name: make(problem) for name, make in VALUE_FORMS.items()}
            write = problem.method if as_method else problem.program
            wrong = list(_wrong_programs(problem, as_method))
            for form, tests in forms.items():
                if problem.name == "sum" and "class" in form:
                    continue
                yield respond(form, write(problem.body), tests, True)
                for code in draw.sample(wrong, 2):
                    yield respond(form, code, tests, False)
        for form, tree in _stdin_forms(problem):
            yield respond(form, _stdin(problem, problem.body), tree, True, is_script=True)
            yield respond(form, _stdin(problem, problem.wrong), tree, False, is_script=True)
