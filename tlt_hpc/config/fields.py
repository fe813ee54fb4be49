"""Types and bounds of the keys of a configuration, and the base class of its sections.

Every number is bounded on both sides and every text in length, with room beyond what is known to be useful.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tlt_hpc.common.errors import UserError

REMEDY = "remedy"
"""The type of an error whose message is a remedy, in words for a user."""
MAX_COUNT = 2**31 - 1
"""Largest number of ranks, steps, prompts and tokens: MPI and the logs count them in 32 bits."""
MAX_ITEMS = 10_000
"""Longest list or table."""
MAX_SECONDS = 1e9
"""Thirty years: in effect no limit, and still within what the system's timers accept."""
MAX_WEIGHT = 1e6
"""Largest weight of a term of a loss or a reward: sums of a step's terms stay finite in float32."""
MIN_TEMPERATURE = 1e-3
"""Below it sampling takes the likeliest token, as 0 does, and logits divided by it leave the range of float32."""
MAX_PATH_BYTES = 4095
"""Linux's limit."""


@dataclass(frozen=True)
class Unit:
    """The unit of a key, as ``tlt keys`` and docs/configuration.md print it."""

    name: str


def check_path(path: str) -> str:
    """Return the path; refuse a NUL character, which no file name can have."""
    if "\0" in path:
        raise PydanticCustomError(REMEDY, "no file has a NUL character in its name; leave it out")
    return path


def zero_or_range_validator(least: float, most: float) -> AfterValidator:
    """Refuse a number between 0, which has a meaning of its own, and ``least``."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise PydanticCustomError(REMEDY, f"use 0, or a number from {least:g} to {most:g}")
        return value

    return AfterValidator(check)


PositiveInt = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
NumTokens = Annotated[PositiveInt, Unit("tokens")]
TokenCount = Annotated[Count, Unit("tokens")]
NumSteps = Annotated[PositiveInt, Unit("steps")]
StepCount = Annotated[Count, Unit("steps")]
NumBytes = Annotated[int, Field(ge=0, le=2**50), Unit("bytes")]
"""At most a pebibyte, more than a node has of memory or disk."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
NumRanks = Annotated[int, Field(ge=1, le=2**20), Unit("ranks")]
"""At most more ranks than any machine has."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0, le=MAX_WEIGHT)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0), zero_or_range_validator(MIN_TEMPERATURE, 100)]
LearningRate = Annotated[float, Field(ge=1e-15, le=1.0)]
"""A step of Adam changes a weight by about this much: below the range float32 keeps no change, above it no weight."""
Seconds = Annotated[float, Field(ge=0.0, le=MAX_SECONDS), Unit("s")]
PositiveSeconds = Annotated[float, Field(ge=1e-3, le=MAX_SECONDS), Unit("s")]

FilePath = Annotated[str, Field(max_length=MAX_PATH_BYTES), AfterValidator(check_path)]
SomePath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES), AfterValidator(check_path)]
ColumnName = Annotated[str, Field(max_length=1024)]
Text = Annotated[str, Field(max_length=100_000)]
"""A fixed part of a prompt."""


class ConfigError(UserError):
    """A user's mistake in the configuration; its text is one line with the remedy."""


def check_package(what: str, package: str) -> None:
    """Refuse to begin without a package that ``what`` needs; nothing is imported.

    Raises:
        ConfigError: with the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package!r}, which is not installed; pip install {package}")


class Section(BaseModel):
    """A section of the configuration: frozen, strict about unknown keys, without NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    def problems(self) -> Iterator[str]:
        """Values of the section that contradict each other, each as one line with the remedy."""
        return iter(())


def describe_schema_values(node: Mapping[str, Any]) -> str:
    """The values of a key in words, from its JSON schema; the upper bound that all counts share is left out."""
    if "anyOf" in node:
        return " or ".join(describe_schema_values(each) for each in node["anyOf"])
    if "enum" in node or "const" in node:
        return ", ".join(json.dumps(each) for each in node.get("enum", [node.get("const")]))
    match node.get("type"):
        case "boolean":
            return "true, false"
        case "string":
            return str(node.get("format", "text"))
        case "array":
            items, least = describe_schema_values(node["items"]), node.get("minItems")
            number = f"{least} " if least and least == node.get("maxItems") else ""
            return f"list of {number}" + items.replace("number", "numbers").replace("text", "texts")
        case "object":
            inner = node["additionalProperties"]
            is_told = {"enum", "anyOf"} & inner.keys() or inner.get("type") == "array"
            return f"table of {describe_schema_values(inner)}".replace("of list", "of lists") if is_told else "table"
        case _:
            names = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "to below"}
            bounds = [f"{word} {_format_number(node[name])}" for name, word in names.items() if name in node]
            kind = "whole number" if node["type"] == "integer" else "number"
            return " ".join([kind, *bounds]).removesuffix(f" to {MAX_COUNT}")


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"
