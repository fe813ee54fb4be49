"""Descriptions of all keys, from the definitions of the sections: values, default, unit and meaning."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pydantic_core import PydanticUndefined

from tlt_hpc.config.fields import ConfigError, Section, Unit, describe_schema_values
from tlt_hpc.config.reading import FREE_ON_RESUME, toml_value, unknown_key_hint
from tlt_hpc.config.sections import SECTIONS


@dataclass(frozen=True)
class Key:
    """One key of the configuration. ``default`` is TOML, or empty if the key is required."""

    name: str
    values: str
    default: str
    unit: str
    meaning: str
    is_free: bool
    """True if it may change when a run is resumed."""


def describe_section(section: str) -> str:
    """The docstring of a section.

    Raises:
        ConfigError: there is no such section.
    """
    if section not in SECTIONS:
        raise ConfigError(f"unknown section {section!r}{unknown_key_hint([section])}")
    return " ".join(inspect.getdoc(SECTIONS[section]).split())  # type: ignore[union-attr]


def keys_of(section: str) -> Iterator[Key]:
    """The keys of a section, in the order of their definition."""
    kind = SECTIONS[section]
    properties, meanings = kind.model_json_schema()["properties"], _field_docstrings(kind)
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield Key(
            name,
            values=describe_schema_values(properties[name]),
            default="" if default is PydanticUndefined else toml_value(default),
            unit="".join(each.name for each in field.metadata if isinstance(each, Unit)),
            meaning=meanings[name],
            is_free=f"{section}.{name}" in FREE_ON_RESUME,
        )


def _field_docstrings(kind: type[Section]) -> dict[str, str]:
    """The docstrings below the fields of a section."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
