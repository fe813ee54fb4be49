"""Describes every key from the sections' own definitions: values, default, unit and meaning."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic_core import PydanticUndefined

from tlt_hpc.config.base import MAX_COUNT, ConfigError, Section, Unit
from tlt_hpc.config.reading import closest, toml_value
from tlt_hpc.config.resume import FREE_ON_RESUME
from tlt_hpc.config.whole import SECTIONS


@dataclass(frozen=True)
class Key:
    """One key of the configuration. ``default`` is TOML, or empty if the key is required."""

    section: str
    name: str
    values: str
    default: str
    unit: str
    meaning: str
    is_free: bool
    """Whether it may change when a run is resumed."""


def describe_section(section: str) -> str:
    """What a section is about, in one sentence or two.

    Raises:
        ConfigError: there is no such section.
    """
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r}{closest([section])}")
    return " ".join(inspect.getdoc(SECTIONS[section]).split())  # type: ignore[union-attr]


def keys_of(section: str) -> Iterator[Key]:
    """The keys of a section, in the order of their definition."""
    kind = SECTIONS[section]
    properties, meanings = kind.model_json_schema()["properties"], _meanings(kind)
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield Key(
            section,
            name,
            values=_values(properties[name]),
            default="" if default is PydanticUndefined else toml_value(default),
            unit="".join(each.name for each in field.metadata if isinstance(each, Unit)),
            meaning=meanings[name],
            is_free=f"{section}.{name}" in FREE_ON_RESUME,
        )


def _meanings(kind: type[Section]) -> dict[str, str]:
    """The docstrings below the fields of a section."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def _values(node: Mapping[str, Any]) -> str:
    """What a key may hold, from its JSON schema; the bound that all counts share is left out."""
    if "anyOf" in node:
        return " or ".join(_values(each) for each in node["anyOf"])
    if "enum" in node or "const" in node:
        return ", ".join(json.dumps(each) for each in node.get("enum", [node.get("const")]))
    match node.get("type"):
        case "boolean":
            return "true, false"
        case "string":
            return "text"
        case "array":
            items = _values(node["items"])
            return "list of " + {"text": "texts"}.get(items, items)
        case "object":
            inner = node.get("additionalProperties")
            return "table of " + _values(inner) if isinstance(inner, dict) else "table"
        case _:
            return range_in(node).removesuffix(f" to {MAX_COUNT}")


def range_in(node: Mapping[str, Any]) -> str:
    """The range of a number, from its JSON schema, in words."""
    low, high = (node.get(name) for name in ("minimum", "maximum"))
    kind = "whole number" if node["type"] == "integer" else "number"
    above = f"from {low:.15g}" if low is not None else f"above {node['exclusiveMinimum']:.15g}"
    below = f"to {_number(high)}" if high is not None else f"to below {node['exclusiveMaximum']:.15g}"
    return f"{kind} {above} {below}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"
