"""Responses that a file has, each with what it is judged by and the reward that the file says it should have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt_hpc.common.records import Prompt
from tlt_hpc.config import Config, UserError
from tlt_hpc.data.files import ARGUMENT, data_files, open_rows
from tlt_hpc.data.reader import answer_of_row, split_row, wanted_columns
from tlt_hpc.data.rows import Row, RowError, Rows

_RESPONSES = ("response", "responses", "completion", "solution_str", "output")
"""Columns that have a response, as verl's and TRL's files name them, too; the first that a row has."""
_EXPECTED = ("expected", "reward", "score", "label")
_PROMPTS = ("prompt", "input")
"""Columns that may have the prompt as the model was fed it."""
_FINISH = "finish_reason"


@dataclass(frozen=True)
class Given:
    """A response, the place of its row, and its prompt, with the text that the model was fed if the row has it."""

    where: str
    prompt: Prompt
    text: str
    is_finished: bool
    expected: float | bool | None
    """None: the row expects nothing."""


class GivenResponses:
    """The responses of a file, or of several, as ``data.source`` names them.

    ``response`` and ``expected`` name columns; empty: usual names are tried.

    Raises:
        UserError: no such file, or it cannot be read; no row has a column that the user named.
    """

    def __init__(self, config: Config, file: str, response: str, expected: str) -> None:
        self.not_compared: list[str] = []
        """Rows so far whose ``expected`` is nothing that a reward can be compared with, each in words."""
        self._data = config.data.model_copy(update={"source": file})
        self._responses = (response,) if response else _RESPONSES
        self._expected = expected
        self._prompts = (config.data.prompt_key,) if config.data.prompt_key else _PROMPTS
        names = (*self._responses, *self._prompts, *((expected,) if expected else _EXPECTED), _FINISH)
        wanted = wanted_columns(self._data) | {name.partition(".")[0] for name in names}
        self.files = data_files(self._data, ARGUMENT)
        if not self.files:
            raise UserError(f"FILE = {file!r} is a task, which has no responses; give a file")
        self.rows: Rows = open_rows(self._data, wanted, ARGUMENT)
        for option, name in (("--response", response), ("--expected", expected)):
            if name and self._is_missing(name):
                raise UserError(f"{option} {name!r}: no row has that column; give one that a row has")

    def __iter__(self) -> Iterator[Given | RowError]:
        """Every response in order; for a row that cannot be used, what is wrong with it."""
        for index in range(len(self.rows)):
            try:
                yield from self._parse_row(self.rows[index], self.rows.row_location(index))
            except RowError as error:
                yield error

    def _is_missing(self, path: str) -> bool:
        """Return True if there are rows that can be read and none has a column."""
        has_rows = False
        for index in range(len(self.rows)):
            with suppress(RowError):
                if _has(self.rows[index], path):
                    return False
                has_rows = True
        return has_rows

    def _parse_row(self, row: Row, where: str) -> list[Given]:
        data = self._data.model_copy(update={"prompt_key": "prompt"})
        shown = next((text for name in self._prompts if isinstance(text := value_at(row, name), str)), "")
        answer_of_row(row, self._data, where)  # before the row has a prompt, which a message would say that it has
        parts = split_row({**row, "prompt": "-"}, data, self.rows.kind, where)
        prompt = Prompt(np.empty(0, np.int32), shown, parts.answer, parts.source, parts.extra)
        texts, expected = self._texts(row, where), self._expectation(row, where)
        wanted = expected if isinstance(expected, list) else [expected] * len(texts)
        if len(wanted) != len(texts):
            raise RowError(where, f"{len(texts)} responses, and {len(wanted)} expected rewards; give as many")
        places = [where] if len(texts) == 1 else [f"{where} ({number})" for number in range(1, len(texts) + 1)]
        is_finished = row.get(_FINISH) != "length"
        return [
            Given(place, prompt, text, is_finished, each)
            for place, text, each in zip(places, texts, wanted, strict=True)
        ]

    def _texts(self, row: Row, where: str) -> list[str]:
        """A row's response, or several, as verl writes them; or the last of its messages, as TRL does."""
        value = next((found for name in self._responses if (found := value_at(row, name)) is not None), None)
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):
            value = value[-1].get("content")
        texts: list[Any] = value if isinstance(value, list) else [value]
        if value is None:
            raise RowError(
                where,
                f"has no {' or '.join(map(repr, self._responses))}, but {', '.join(sorted(row)) or 'nothing'}; "
                "name the column of the response in --response",
            )
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RowError(where, f"the response is no text and no list of texts but {str(value)[:40]!r}; fix the row")
        return texts

    def _expectation(self, row: Row, where: str) -> Any:
        """The reward or verdict that a row says its response should have, or a list of them; None: nothing."""
        if not self._expected:
            usual = next((found for name in _EXPECTED if _is_expectation(found := row.get(name))), None)
            own = value_at(row, _EXPECTED[0])
            if usual is None and own is not None:
                self.not_compared.append(
                    f"{where}: {_EXPECTED[0]!r} is {str(own)[:40]!r}, not a number or true or false"
                )
            return usual
        found = value_at(row, self._expected)
        if found is not None and not _is_expectation(found):
            raise RowError(where, f"{self._expected!r} is {str(found)[:40]!r}, not a number or true or false; fix it")
        return found


def value_at(row: Row, path: str) -> Any:
    """The value at a dotted path; None if there is none, or it is NaN, as pandas writes it."""
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if isinstance(found, float) and math.isnan(found) else found


def _has(row: Row, path: str) -> bool:
    """Return True if a row has a value, null included, at a dotted path."""
    parents, _, name = path.rpartition(".")
    parent = value_at(row, parents) if parents else row
    return isinstance(parent, Mapping) and name in parent


def _is_expectation(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_expectation(each) for each in value)
    return isinstance(value, bool | int | float) and math.isfinite(value)
