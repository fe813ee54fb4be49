"""Results of cases: a line of JSON for each, those that are wrong on the screen, and a table at the end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """What came of a case."""

    name: str
    row: str
    """Of the table."""
    outcome: str
    """The column of the table, if nothing is wrong."""
    wrong: list[str]
    """What must not be, a few words each."""
    details: dict[str, Any] = field(default_factory=dict)


class Results:
    """All results of a campaign; one that is started again with its folder has those of before."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._path = folder, folder / "cases.jsonl"
        self._path.touch()
        lines = map(json.loads, self._path.read_text().splitlines())
        self.found = {line["name"]: Result(**line) for line in lines}

    def add(self, result: Result) -> None:
        """Note a result; another one of the same name is replaced."""
        self.found[result.name] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        if result.wrong:
            print(result, flush=True)

    @property
    def num_wrong(self) -> int:
        return sum(bool(result.wrong) for result in self.found.values())

    def table(self) -> str:
        """In Markdown: a row for each kind of case, with how many ended in which way."""
        counts: dict[str, Counter[str]] = {}
        for result in self.found.values():
            counts.setdefault(result.row, Counter())["wrong" if result.wrong else result.outcome] += 1
        columns = sorted({"wrong"}.union(*counts.values()))
        rows = [["case", "number", *columns], ["---"] * (2 + len(columns))]
        rows += [[row, str(found.total()), *(str(found[name]) for name in columns)] for row, found in counts.items()]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)
