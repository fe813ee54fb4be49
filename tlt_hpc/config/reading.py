"""A configuration from TOML and overrides, and back to TOML; which keys may change on resume. Mistakes are one line."""

from __future__ import annotations

import difflib
import errno
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tlt_hpc.common.files import (
    LINES_BYTES,
    DamagedText,
    NotTomlError,
    os_error_text,
    parse_json_object,
    parse_toml,
    parse_toml_text,
    read_bytes,
    read_toml,
)
from tlt_hpc.config.checks import find_contradictions
from tlt_hpc.config.data_sections import RewardSection, is_function
from tlt_hpc.config.fields import REMEDY, ConfigError, describe_schema_values
from tlt_hpc.config.rollout_sections import WarmupSection
from tlt_hpc.config.sections import SECTIONS, Config, EvaluationSection

_SHOWN_CHARACTERS = 200
"""Longest part of a value that a message shows."""


def load_config(path: str | Path, overrides: Sequence[str] = (), content: bytes | None = None) -> Config:
    """Read a TOML file, apply ``section.key=value`` overrides, and validate.

    Args:
        content: of the file, if it has been read already.

    Raises:
        ConfigError: unreadable file, invalid TOML, unknown key, wrong type or contradicting values, or another user's
            file that names a function to run.
    """
    config = parse_config(_read_tree(Path(path), overrides, content))
    refuse_foreign_function(Path(path), overrides, config.reward)
    return config


def refuse_foreign_function(path: Path, overrides: Sequence[str], reward: RewardSection) -> None:
    """Run functions that another user's file names only if the command names them, too.

    Raises:
        ConfigError: with the words to add to the command.
    """
    named = {override.partition("=")[0] for override in overrides}
    code = {
        "reward.default": reward.default if is_function(reward.default) else "",
        "reward.by_source": toml_value(reward.by_source) if any(map(is_function, reward.by_source.values())) else "",
        "reward.weights": toml_value(reward.weights) if reward.added_functions else "",
    }
    words = [shlex.quote(f"{key}={value}") for key, value in code.items() if value and key not in named]
    if words and path.stat().st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"{path} belongs to another user and names code to run; if you trust it, add {' '.join(words)} to the "
            "command"
        )


def load_config_or_problems(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config | None, list[ConfigError]]:
    """The configuration, or None and all mistakes in its keys and values.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    config, problems = _validate(_read_tree(Path(path), overrides))
    if config is not None:
        refuse_foreign_function(Path(path), overrides, config.reward)
    return config, problems


def load_saved_config(path: Path) -> Config:
    """Read the configuration that a run has saved.

    Raises:
        ConfigError: as ``load_config``.
    """
    try:
        return parse_config(_read_tree(path, ()))
    except ConfigError as error:
        raise ConfigError(
            f"{path}, which the run saved: {error} (in that file; if another version wrote it, open the run with its "
            f"commit{_read_saved_commit(path)})"
        ) from None


def _drop_removed_keys(tree: dict[str, Any]) -> None:
    """Take removed keys out of a saved tree whose values are constant now, or put them where they are read now."""
    for key, constant in _CONSTANT_NOW.items():
        section, name = key.split(".")
        saved = tree.get(section)
        is_removed = name not in SECTIONS[section].model_fields
        if is_removed and isinstance(saved, dict) and name in saved and constant in (_ANY, saved[name]):
            del saved[name]
    algorithm = tree.get("algorithm")
    if isinstance(algorithm, dict) and {"clip_low", "clip_high"} <= algorithm.keys():
        algorithm["clip"] = [algorithm.pop("clip_low"), algorithm.pop("clip_high")]


def _read_saved_commit(path: Path) -> str:
    """ ", COMMIT" of the last start of the run that saved a configuration at ``path``; empty if that is not known."""
    try:
        last = read_bytes(path.with_name("environment.jsonl"), LINES_BYTES).splitlines()[-1]
        commit = parse_json_object(last).get("commit")
    except (OSError, DamagedText, IndexError):
        commit = ""
    return f", {commit}" if commit else ""


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a nested dict into a ``Config``.

    Raises:
        ConfigError: as ``load_config``.
    """
    config, problems = _validate(tree)
    if config is None:
        raise problems[0]
    return config


def _read_tree(path: Path, overrides: Sequence[str], content: bytes | None = None) -> dict[str, Any]:
    try:
        tree = read_toml(path) if content is None else parse_toml(content)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP):
            raise ConfigError(f"config file {os_error_text(error)}") from None
        near = difflib.get_close_matches(path.stem, {each.stem: each for each in _find_job_files()}, n=1)
        raise ConfigError(
            f"config file {path}: {error.strerror}; "
            + (
                f"did you mean {_find_job_files(near[0])[0]}?"
                if near
                else "give the path of a TOML file such as jobs/tiny.toml"
            )
        ) from None
    except DamagedText as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}; fix it") from None
    if path.name == "config.toml":  # as a run saves it; a command may read a run's configuration as a job
        _drop_removed_keys(tree)
    for override in overrides:
        apply_override(tree, override)
    return tree


def _find_job_files(stem: str = "*") -> list[Path]:
    return [*Path().glob(f"{stem}.toml"), *Path("jobs").glob(f"{stem}.toml")]


def _validate(tree: dict[str, Any]) -> tuple[Config | None, list[ConfigError]]:
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # an unknown section before the one that is then missing, a removed key before what it leaves
        found = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        by_key: dict[tuple[int | str, ...], ErrorDetails] = {}
        for details in found:  # a key of several types has an error for each of them
            if details["loc"][:2] not in by_key or details["type"] == REMEDY:
                by_key[details["loc"][:2]] = details
        return None, [ConfigError(_format_validation_error(details, tree)) for details in by_key.values()]
    config = config.model_copy(update={"algorithm": config.algorithm.with_resolved_defaults()})
    problems = list(map(ConfigError, find_contradictions(config)))
    return (None if problems else config), problems


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` in a TOML tree; the value is TOML, or a bare string where it does not parse as such."""
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if len(parts) == 2 and all(parts) and not separator:
        raise ConfigError(f"override {_format_shortened(override)} has no value; write {key}=VALUE, without blanks")
    sections = [name for name, section in SECTIONS.items() if parts[0] in section.model_fields]
    if separator and len(parts) == 1 and sections:
        meant = " or ".join(f"{section}.{override}" for section in sections)
        raise ConfigError(f"override {_format_shortened(override)} names no section; did you mean {meant}?")
    if not separator or len(parts) != 2 or not all(parts):
        raise ConfigError(
            f"override {_format_shortened(override)} is not of the form section.key=value, e.g. rollout.temperature=0.9"
        )
    try:
        value = parse_toml_text(f"value = {text}")["value"]
    except NotTomlError:
        value = text
    except DamagedText as error:
        raise ConfigError(f"override {_format_shortened(override)}: {error}") from None
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        what = f"override {_format_shortened(override)}: {parts[0]!r}"
        raise ConfigError(f"{what} is not a section in the file; write it as a [{parts[0]}] table")
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


def _format_validation_error(details: ErrorDetails, tree: dict[str, Any]) -> str:
    location = [str(part)[:_SHOWN_CHARACTERS] for part in details["loc"]]
    value, kind = details["input"], details["type"]
    key = ".".join(part if part.isprintable() else repr(part) for part in location)
    if kind == "extra_forbidden":
        what = "section" if len(location) == 1 else "key"
        return f"unknown {what} {_format_shortened('.'.join(location))}{unknown_key_hint(location)}"
    if kind == "missing" and len(location) == 1:
        return f"missing section [{key}]; add it to the file (`tlt keys {key}`)"
    if kind == "missing":
        return f"missing key {key!r}; add it to the file or give {key}=VALUE"
    message = details["msg"]
    if len(location) == 1:
        return f"{key} = {_format_shortened(value)}: write it as a table, with keys of its own"
    section, name, *inner = location
    schema = SECTIONS[section].model_json_schema()["properties"][name]
    if "anyOf" in schema or "anyOf" in schema.get("additionalProperties", ()):  # pydantic then names its own types
        key, value, inner = f"{section}.{name}", tree[section][name], []
    if kind == "string_pattern_mismatch" and key == "run.name":
        message = "use letters, digits, '_', '-' and '.', and none of the last two in front"
    elif not inner and kind not in (REMEDY, "string_too_short", "string_too_long"):
        values = describe_schema_values(schema).replace(
            "list of", "list of one or more" if value in ([], ()) else "list of"
        )
        message = "use " + ("" if values.startswith(("true", '"')) else "a ") + values
    return f"{key} = {_format_shortened(value)}: {message[0].lower()}{message[1:]}"


def _format_shortened(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


_REMOVED = {
    "algorithm.clip_high": "use algorithm.clip = [LOW, HIGH], the bounds below and above a ratio of 1",
    "algorithm.clip_low": "use algorithm.clip = [LOW, HIGH], the bounds below and above a ratio of 1",
    "algorithm.correction_bounds": "use algorithm.rollout_correction = {icepop = [0.25, 8.0]}",
    "algorithm.overlong_buffer": "it is called algorithm.overlong",
    "checkpoint.keep_responses_seconds": "finished responses are written every 300 s; leave it out",
    "checkpoint.replay": "logged steps are always repeated; remove a step's folder in rollouts/ to generate it again",
    "data.split": "training reads the split 'train' of a folder; give another's folder in data.source, or a pattern",
    "data.task_args": "write the task's problems to a file (docs/data.md), and leave it out",
    "drafter.average_merges": "it is always 5 now; leave it out",
    "drafter.loss": "it follows from drafter.form now; leave it out",
    "drafter.micro_step_seconds": "it is always 0.3 now; for shorter micro-steps lower drafter.micro_step_tokens",
    "drafter.min_idle": "it is always 1 now; leave it out",
    "drafter.train": "leave it out; use speculation.mode = 'frozen' for train = false",
    "evaluation.names": "a set is named after its file; leave it out",
    "evaluation.pass_k": "use evaluation.samples",
    "evaluation.split": "evaluation reads the split 'test'; give other files by a pattern in evaluation.sources",
    "lora.targets": "all linear layers have adapters (of a mixture of experts those of attention); leave it out",
    "optimizer.freeze_router": "train adapters (lora.rank), which leave the routers as they are, or leave it out",
    "optimizer.offload_parameters": "use optimizer.offload = 'parameters'",
    "reward.format_weight": "use reward.weights = {answer = 1 - w, format = w} for format_weight = w",
    "reward.function": "leave it out, and name a function itself in reward.default or reward.by_source",
    "reward.memory_mb": "it is always 1024 now; leave it out",
    "reward.tolerance": "it is always 1e-6 now; leave it out, or use a function of your own",
    "rollout.min_new_tokens": "a response ends where the policy ends it; leave it out",
    "rollout.min_p": "leave it out, or use rollout.top_p, which truncates as well",
    "rollout.page_size": "a page holds 128 tokens; leave it out",
    "rollout.tie_guard": "it is on for model.dtype = 'float32'; leave it out",
    "speculation.profile_seconds": "costs are learned during rollouts; leave it out",
    "warmup.init": "a warm-up starts from drafter.init; leave it out, or set that",
    "warmup.learning_rate": "a warm-up uses drafter.learning_rate; leave it out, or set that",
    "warmup.validate_every": "it is a twentieth of warmup.updates, at most 100; leave it out",
    "warmup.validation_prompts": "it is always 64 now; leave it out",
    "tracking": "use run.trackers = ['tensorboard', 'wandb-offline'], or one of them",
}
"""Keys and sections that jobs and saved runs of earlier commits have, and what to do instead."""

_ANY = object()
_CONSTANT_NOW = {
    "checkpoint.keep_responses_seconds": _ANY,
    "checkpoint.replay": _ANY,
    "data.split": "train",
    "data.task_args": {},
    "drafter.micro_step_seconds": _ANY,
    "drafter.train": True,
    "lora.targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "optimizer.freeze_router": False,
    "reward.memory_mb": 1024,
    "rollout.min_new_tokens": 0,
    "rollout.min_p": 0.0,
    "warmup.init": _ANY,
    "warmup.learning_rate": _ANY,
    "warmup.validate_every": _ANY,
    "warmup.validation_prompts": _ANY,
}
"""Removed keys of saved runs, and the value with which such a run continues as before: ``_ANY`` changes no token."""


def unknown_key_hint(location: list[str]) -> str:
    """The hint for an unknown key: what replaces it, the closest key, or all keys."""
    *section, name = location
    if instead := _REMOVED.get(".".join(location)):
        return f", which was removed: {instead}"
    valid = list(SECTIONS[section[0]].model_fields if section else SECTIONS)
    prefix = "".join(f"{part}." for part in section)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    kind = "valid keys" if section else "sections"
    return f"; did you mean {prefix + near[0]!r}?" if near else f"; {kind}: {', '.join(prefix + v for v in valid)}"


# What may differ when a run is resumed: how long it continues, where it runs, how often it saves, what it may occupy.
# None of it changes a token; the rank count and the ZeRO stage change the order of gradient sums, hence last bits.
_FREE = {
    "run": ("num_steps", "ranks", "folder", "stall_factor", "trackers"),
    "model": ("path", "device"),
    "data": ("overlong",),  # checkpoint/claim.py restricts it
    "reward": ("workers",),
    "rollout": ("max_live", "kv_bytes", "tensor_parallel"),
    "speculation": ("strategies",),
    "drafter": ("learning_rate", "micro_step_tokens", "cache_bytes", "cache_folder"),
    "optimizer": (
        *("zero_stage", "offload", "micro_batch_tokens"),
        *("gradient_checkpointing", "sequence_parallel"),
    ),
    "checkpoint": ("every_steps", "keep"),
    "warmup": tuple(WarmupSection.model_fields),  # a warm-up and an evaluation check their own keys
    "evaluation": tuple(EvaluationSection.model_fields),
}
FREE_ON_RESUME = frozenset(f"{section}.{name}" for section, names in _FREE.items() for name in names)


def check_resumable(saved: Path, config: Config) -> None:
    """Refuse changes to the ``saved`` configuration that would make it another run.

    Raises:
        ConfigError: names all such keys with both values.
    """
    if not os.path.lexists(saved):
        return
    now, before = config.model_dump(), load_saved_config(saved)
    # a learning rate that falls to the end of the run depends on where that is
    free = FREE_ON_RESUME - ({"run.num_steps"} if before.optimizer.schedule != "constant" else set())
    changed = {
        f"{section}.{name}": (value, now[section][name])
        for section, values in before.model_dump().items()
        for name, value in values.items()
        if value != now[section][name] and f"{section}.{name}" not in free
    }
    if changed:
        told = "; ".join(f"{key} = {old!r}, now {new!r}" for key, (old, new) in changed.items())
        values = "value" if len(changed) == 1 else "values"
        raise ConfigError(
            f"{saved} holds a run with {told}: resume with the old {values} or give another run.name (what may change: "
            'docs/resume.md, "Changing settings on resume")'
        )
