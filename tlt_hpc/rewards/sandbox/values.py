"""Python values as text that two processes can exchange without trusting each other."""

from __future__ import annotations

import json
import math
from typing import Any

_MAX_DEPTH = 100


def encode(value: Any) -> str:
    """A value of exact builtin types as JSON; what a subclass has been taught to pretend is not asked.

    Raises:
        ValueError: it, or something in it, is of another type, or too deep.
    """
    return json.dumps(_pack(value, 0))


def decode(text: str) -> Any:
    """The value again, made of builtin types.

    Raises:
        ValueError: the text is none of ``encode``'s.
    """
    try:
        return _unpack(json.loads(text))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no value: {error}") from None


def _pack(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in (float, complex, bytes):
        return {kind.__name__: repr(value) if kind is not bytes else value.hex()}
    if kind is list:
        return [_pack(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_pack(k, depth + 1), _pack(v, depth + 1)] for k, v in dict.items(value)]}
    for base in (list, tuple, set, frozenset):
        if isinstance(value, base):
            return {base.__name__: [_pack(item, depth + 1) for item in base.__iter__(value)]}  # type: ignore[arg-type]
    if isinstance(value, int | float | str):
        return _pack(_plain(value), depth)
    raise ValueError(f"a {kind.__name__} cannot leave the sandbox")


def _plain(value: Any) -> Any:
    """A subclass's number or text as the builtin's."""
    for base in (int, float, str):
        if isinstance(value, base):
            return base.__add__(value, base())  # type: ignore[operator]
    raise AssertionError


_MAKERS = {"float": float, "complex": complex, "bytes": bytes.fromhex}
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _unpack(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_unpack(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, packed),) = tree.items()
    if kind in _MAKERS:
        return _MAKERS[kind](packed)  # type: ignore[operator]
    if kind == "dict":
        return {_unpack(k): _unpack(v) for k, v in packed}
    return _CONTAINERS[kind](_unpack(item) for item in packed)
