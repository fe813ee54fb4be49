"""A configuration from TOML and overrides, and back to TOML; every mistake ends as one line."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tlt_hpc import __version__
from tlt_hpc.common.files import TOML_BYTES, DamagedText, NotTomlError, parse_toml, read_bytes, toml_of
from tlt_hpc.config.base import ConfigError
from tlt_hpc.config.removed import REMOVED
from tlt_hpc.config.whole import SECTIONS, Config, check_combinations, find_combinations

logger = logging.getLogger(__name__)

_REMEDIES = {
    "too_short": "give a list of one or more",
    "tuple_type": 'give a list, such as ["a", "b"]',
    "dict_type": 'give a table, such as {name = "value"}',
    "model_type": "write it as a table, with keys of its own",
    "string_pattern_mismatch": "use letters, digits, '_', '-' and '.', and none of the last two in front",
}
"""Where pydantic speaks of Python's types or of patterns."""
_SHOWN_CHARACTERS = 200
"""Of a value in a message."""


def load_config(path: str | Path, overrides: Sequence[str] = (), content: bytes | None = None) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides, and validate.

    Args:
        content: of the file, where it has been read already.

    Raises:
        ConfigError: unreadable file, TOML that does not parse, unknown key, wrong type or impossible combination.
    """
    return parse_config(_read_tree(Path(path), _read_file(Path(path)) if content is None else content, overrides))


def find_problems(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config | None, list[ConfigError]]:
    """As ``load_config``, with all mistakes in keys and values, or where these are right in combinations, at once.

    Raises:
        ConfigError: unreadable file.
    """
    content = _read_file(Path(path))
    try:
        tree = _read_tree(Path(path), content, overrides)
    except ConfigError as error:
        return None, [error]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        return None, [ConfigError(_one_line(details)) for details in error.errors()]
    config = _resolved(config)
    found = find_combinations(config)
    return (None if found else config), found


def _read_file(path: Path) -> bytes:
    try:
        return read_bytes(path, TOML_BYTES)
    except OSError as error:
        raise ConfigError(
            f"config file {path}: {error.strerror}; give the path of a TOML file such as jobs/tiny.toml"
        ) from None


def _read_tree(path: Path, content: bytes, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        tree = parse_toml(content)
    except DamagedText as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}; fix it") from None
    for override in overrides:
        apply_override(tree, override)
    return tree


def load_saved_config(path: Path) -> Config:
    """Read what a run has saved of its configuration.

    Raises:
        ConfigError: as ``load_config``, of the run's file; or a key that was removed has a value that nothing acts on.
    """
    try:
        tree = _read_tree(path, _read_file(path), ())
        _drop_removed(tree)
        return parse_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}, which the run saved: {error} (in that file)") from None


def _drop_removed(tree: dict[str, Any]) -> None:
    """Take keys of earlier versions out of a saved configuration."""
    for name, removed in REMOVED.items():
        section, _, key = name.partition(".")
        values = tree.get(section)
        if not isinstance(values, dict) or key not in values:
            continue
        value = values[key]
        if key in SECTIONS[section].model_fields:  # a value that the key no longer takes
            if value != removed.default:
                continue
        elif removed.is_kept(value, values):
            del values[key]
            continue
        elif removed.any_value:
            logger.warning("%s = %s is ignored: %s", name, _shown(value), removed.instead)
            del values[key]
            continue
        raise ConfigError(
            f"{name} = {_shown(value)} is of an earlier version, and tlt_hpc {__version__} does not have it "
            f"({removed.instead}); open the run with the version that environment.jsonl names beside it"
        )


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a nested dict into a ``Config``.

    Raises:
        ConfigError: as ``load_config``.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error.errors()[0])) from None
    config = _resolved(config)
    check_combinations(config)
    return config


def _resolved(config: Config) -> Config:
    return config.model_copy(update={"algorithm": config.algorithm.resolved()})


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` in a TOML tree; the value is TOML, or a bare string where it does not parse as such."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) != 2 or not all(parts):
        raise ConfigError(
            f"override {_shown(override)} is not of the form section.key=value, e.g. rollout.temperature=0.9"
        )
    try:
        value = toml_of(f"value = {text}")["value"]
    except NotTomlError:
        value = text
    except DamagedText as error:
        raise ConfigError(f"override {_shown(override)}: {error}") from None
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(
            f"override {_shown(override)}: {parts[0]!r} is not a section in the file; write it as a [{parts[0]}] table"
        )
    section[parts[1]] = value


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``load_config`` reads back to an equal one."""
    lines: list[str] = []
    for section, values in config.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A key's value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, str):
        # a JSON string is a TOML basic string but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _one_line(first: ErrorDetails) -> str:
    location = [str(part)[:_SHOWN_CHARACTERS] for part in first["loc"]]
    key = ".".join(part if part.isprintable() else repr(part) for part in location)
    if first["type"] == "extra_forbidden":
        return f"unknown key {_shown('.'.join(location))}{closest(location)}"
    if first["type"] == "missing":
        return f"missing key {key!r}; add it to the file or give {key}=VALUE"
    message = first["msg"].removeprefix("Value error, ")
    remedy = _REMEDIES.get(first["type"]) or message[0].lower() + message[1:]
    return f"{key} = {_shown(first['input'])}: {remedy}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def closest(location: list[str]) -> str:
    """What to say of an unknown key: what replaces it, the closest one, or all that there are."""
    if (removed := REMOVED.get(".".join(location))) is not None:
        return f"; it was removed: {removed.instead}"
    if len(location) == 1:
        valid, prefix = list(SECTIONS), ""
    else:
        valid, prefix = list(SECTIONS[location[0]].model_fields), location[0] + "."
    near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.4)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; valid keys: {', '.join(prefix + name for name in valid)}"
