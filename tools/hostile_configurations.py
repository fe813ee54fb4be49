"""Hostile configurations, data, models and reward functions, from a seed; ``hostile.py`` runs the commands on them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from hostile_case import Case

from tlt_hpc.config import Config

TRAIN = frozenset({"train"})
BOTH = frozenset({"train", "evaluate"})
Tree = dict[str, dict[str, Any]]

_ESCAPE = "\x1b]0;title\x07\x1b[31m"
_TEXTS = ("[bold red]x[/nope]", _ESCAPE, "a\0b", "a\nb", "\u202ea", "%s{}$(x)`x`", "../" * 200, "")
_NUMBERS = ("1e308", "-1e308", "1e-400", "nan", "inf", "-inf", "-1", str(2**63), str(2**64), "-" + "9" * 30)
_NOT_TOML = (
    b"\xff\xfe\x00",
    "[run]\nname = 'x'".encode("utf-16"),
    b'\xef\xbb\xbf[run]\nname = "x"',
    b"[run]\nname = 'a'\nname = 'b'",
    b"[run]\nname = 'a'\n[run]\nname = 'b'",
    b'[run]\nname = "\\ud800"',
    b"[run]\nname = 'a\x00b'",
    b"a = " + b"[" * 50_000,
    b"a = " + b"{a = " * 5_000,
    b"a." * 100_000 + b"a = 1",
    b"a = " + b"9" * 10_000,
    b"[run]\nseed = 0x" + b"f" * 100_000,
    b"[run]\nseed = 1e999999999",
    b"# " + b"x" * 2**21,
    b"".join(b"k%d = 1\n" % i for i in range(50_000)),
    b"x" * 100_000 + b" = 1",
    b'"' + b"\\u001b[31m" * 100 + b'" = 1',
    b"[run]\nname = 1979-05-27T07:32:00Z",
    b"[[run]]\nname = 'x'",
    b"run = 3",
    b"",
)
_ROWS = (
    '{"prompt": "1=", "answer": "\\ud800"}',
    '{"prompt": "\\udfff", "answer": "1"}',
    '{"prompt": "1=", "answer": ' + "9" * 5000 + "}",
    '{"prompt": "1=", "answer": NaN}',
    '{"prompt": "1=", "answer": -Infinity}',
    '{"prompt": "1=", "answer": ' + "[" * 900 + "]" * 900 + "}",
    '{"prompt": "1=", "answer": ' + "[" * 100_000,
    '{"prompt": "1=", "answer": "1", "data_source": "\\ud800"}',
    '{"prompt": "1=", "answer": "1", "extra_info": {"a": "\\ud800"}}',
    '{"prompt": [{"role": "user", "content": {"a": []}}], "answer": "1"}',
    '{"prompt": "' + "1" * 100_000 + '", "answer": "1"}',
    '{"prompt": "1=", "prompt": "2=", "answer": "1"}',
    '{"prompt": "\x1b[31m", "answer": null}',
    '["prompt", "answer"]',
    "\x00\x01\x02",
    "null",
)
_ODD_ROWS = (
    '{"prompt": "1=", "answer": "1", "data_source": "[bold red]x[/nope]"}',
    '{"prompt": "1=", "answer": "\\u001b[31m", "data_source": "\\u001b]0;x\\u0007"}',
    '{"prompt": "1=", "answer": "a\\u0000b", "data_source": "a\\u0000/../b"}',
    '{"prompt": "1=", "answer": 1e308, "extra_info": {"difficulty": NaN}}',
    '{"prompt": "1=", "answer": {"a": [1, null]}, "data_source": {"a": 1}}',
)
_MODELS: tuple[tuple[str, bytes], ...] = (
    *(
        ("config.json", content)
        for content in (
            b"",
            b"[]",
            b"{}",
            b"\xff",
            b"[" * 100_000,
            b'{"model_type": ' + b"9" * 5000 + b"}",
            b'{"model_type": ["qwen2"]}',
        )
    ),
    *(
        ("tokenizer.json", content)
        for content in (
            b"",
            b"{}",
            b"[" * 100_000,
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        )
    ),
    *(
        ("model.safetensors", content)
        for content in (
            b"",
            b"\0" * 8,
            struct.pack("<Q", 2**63) + b"{}",
            struct.pack("<Q", 2) + b"[]",
            struct.pack("<Q", 80)
            + b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    ',
            struct.pack("<Q", 100_000) + b"[" * 100_000,
        )
    ),
    ("generation_config.json", b'{"eos_token_id": [1e308]}'),
    ("generation_config.json", b'{"eos_token_id": {"a": 1}}'),
    ("generation_config.json", b'{"eos_token_id": true}'),
)
_SIZES = (
    {"hidden_size": 10**18},
    {"num_hidden_layers": 10**12},
    {"vocab_size": 10**30},
    {"max_position_embeddings": 10**400},
    {"head_dim": 10**15},
    {"hidden_size": "x"},
    {"num_attention_heads": 1.5},
    {"rms_norm_eps": "x"},
    {"rope_theta": "x"},
    {"rope_theta": [1]},
    {"rope_parameters": 3},
    {"rope_scaling": {"rope_type": ["x"]}},
    {"layer_types": 3, "sliding_window": 4},
    {"eos_token_id": "x"},
    {"tie_word_embeddings": "no"},
    {"model_type": "\x1b[31m"},
    {"intermediate_size": True},
)
_TEMPLATES = (
    "{{ 'x' * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{" * 100_000,
    "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[0]['content'].format(messages) }}{{ 1 / 0 }}",
)
_REWARDS = (
    "def f(:",
    "def g(**_): return 1",
    "\0",
    "(" * 10_000,
    "# coding: nonsense\ndef f(): pass",
    "f = " + "-" * 90_000 + "1",
)
_COMBINATIONS = (
    ("rollout.group_size=1",),
    ("algorithm.updates_per_step=3",),
    ("optimizer.zero_stage=0", "model.dtype=bfloat16"),
    ("optimizer.offload_parameters=true",),
    ("rollout.min_new_tokens=9",),
    ("rollout.max_new_tokens=2147483647",),
    ("data.max_prompt_tokens=2147483647",),
    ("rollout.prompts_per_step=2147483647", "rollout.group_size=2147483647"),
    ("run.ranks=3",),
    ("run.ranks=1048576",),
    ("rollout.tensor_parallel=1048576",),
    ("optimizer.sequence_parallel=1024",),
    ("drafter.train=false", "drafter.schedule=falling"),
    ("drafter.form=eagle3", "drafter.loss=feature"),
    ("evaluation.temperature=0",),
    ("reward.default=function",),
    ("reward.format_weight=0.5",),
    ("reward.default=format", "reward.format_pattern=((("),
    ("reward.default=format", "reward.format_pattern=a{99999999999}"),
    ("speculation.mode=full", "speculation.strategies=['drafter-9999']"),
    ("speculation.mode=full", "speculation.strategies=['ngram-4a99999999999999999999999999999999999999999999999999']"),
    ("speculation.mode=ngram", "speculation.strategies=['drafter-2']"),
    ("speculation.mode=full", "drafter.init=/dev/null"),
    ("algorithm.kl_estimator=k1", "algorithm.kl_coefficient=0.1"),
    ("data.source=['embedded:gcd', 'embedded:gcd']",),
    ("data.source=reasoning-gym:../../etc/passwd",),
)
_FORMS = (
    "no equals sign",
    "=",
    "a=b",
    "a.b.c=1",
    ".=1",
    "run.=1",
    ".name=1",
    "run.name",
    "run.name=\udcff",
    "\udcff.x=1",
    "run.seed=" + "9" * 5000,
    "run.seed=0x" + "f" * 5000,
    "run.seed=" + "[" * 5000,
    "x" * 100_000 + ".y=1",
    "\x1b[31m.x=1",
    "run.\x1b[31m=1",
    "run.name.x=1",
)


def make(number: int, folder: Path, base_run: Path, source: random.Random) -> Case:
    """Case ``number`` in an empty folder of its own; ``base_run``: a sound run's folder, which is left as it is.

    The number says which kind of hostility it is, ``source`` which of that kind. The run has the same configuration.
    """
    case = _PLAIN[number % len(_PLAIN)](folder, base_run, source)
    run = folder / "run"
    shutil.copytree(base_run, run, symlinks=True)
    (run / "config.toml").unlink(missing_ok=True)
    if case.config.is_file():
        shutil.copyfile(case.config, run / "config.toml")
    else:
        (run / "config.toml").symlink_to(case.config.absolute())
    return dataclasses.replace(case, run=run)


def base(folder: Path) -> Tree:
    """A job that is sound and small."""
    return {
        "run": {"name": "hostile", "folder": str(folder / "runs"), "num_steps": 1},
        "model": {"path": "embedded:tiny", "dtype": "float32", "device": "cpu"},
        "data": {"source": "embedded:gcd"},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8},
        "speculation": {"mode": "plain"},
    }


def leaves() -> Iterator[tuple[str, str, str]]:
    """Section, key and JSON's type of every key."""
    definitions = Config.model_json_schema()["$defs"]
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for key, node in definitions[field.annotation.__name__]["properties"].items():
            options = [option["type"] for option in node.get("anyOf", [node]) if option.get("type") != "null"]
            yield section, key, options[0]


_LEAVES = tuple(leaves())
_OTHERS = {
    "integer": ('"4"', "true", "1.5", "[1]", "{a = 1}", "1979-05-27"),
    "number": ('"x"', "true", "[1.0]", "{a = 1}", "1979-05-27"),
    "string": ("3", "true", "{a = 1}", "nan"),
    "boolean": ("1", '"yes"', "[]", "{}"),
    "array": ("3", "true", "{a = 1}", "[[[]]]"),
    "object": ("3", "true", "[]", '"x"'),
}
"""TOML of another type than a key's."""


def _write(folder: Path, tree: Tree, extra: str = "") -> Path:
    """The tree as TOML, with a last line in its last section."""
    path = folder / "job.toml"
    sections = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for name, keys in tree.items()
    ]
    path.write_text("\n".join(sections) + extra, encoding="utf-8")
    return path


def _key_case(kind: str, where: tuple[str, str], value: str, place: tuple[Path, Path], fails: frozenset[str]) -> Case:
    """A sound job but for one key, whose value is TOML."""
    folder, base_run = place
    (section, key), tree = where, base(folder)
    own = tree.pop(section, {})
    own.pop(key, None)
    path = _write(folder, {**tree, section: own}, f"{key} = {value}\n")
    return Case(f"{section}.{key}: {kind}", path, (), base_run, fails)


def _wrong_type(folder: Path, base_run: Path, source: random.Random) -> Case:
    section, key, kind = source.choice(_LEAVES)
    value = source.choice(_OTHERS[kind])
    return _key_case(f"{value}, no {kind}", (section, key), value, (folder, base_run), TRAIN)


def _wrong_number(folder: Path, base_run: Path, source: random.Random) -> Case:
    section, key, _ = source.choice([leaf for leaf in _LEAVES if leaf[2] in ("integer", "number")])
    value = source.choice(_NUMBERS)
    fails = frozenset() if value == "1e-400" else TRAIN  # which is 0
    return _key_case(value, (section, key), value, (folder, base_run), fails)


def _tiny_number(folder: Path, base_run: Path, source: random.Random) -> Case:
    section, key, _ = source.choice([leaf for leaf in _LEAVES if leaf[2] == "number"])
    return _key_case("1e-308", (section, key), "1e-308", (folder, base_run), frozenset())


def _wrong_text(folder: Path, base_run: Path, source: random.Random) -> Case:
    section, key, _ = source.choice([leaf for leaf in _LEAVES if leaf[2] in ("string", "array")])
    if source.random() < 0.3:
        return _key_case("a long text", (section, key), json.dumps("x" * 900_000), (folder, base_run), TRAIN)
    text = source.choice(_TEXTS)
    value = source.choice((json.dumps(text), json.dumps([text])))
    return _key_case(value[:40], (section, key), value, (folder, base_run), frozenset())


def _wrong_toml(folder: Path, base_run: Path, source: random.Random) -> Case:
    content, path = source.choice(_NOT_TOML), folder / "job.toml"
    path.write_bytes(content)
    return Case(f"a file of {content[:24]!r}...", path, (), base_run, TRAIN)


def _unknown_key(folder: Path, base_run: Path, source: random.Random) -> Case:
    name = source.choice(("rnu", "temprature", "x" * 100_000, "[red]x[/nope]", _ESCAPE, "\u202e", ""))
    section = source.choice((*Config.model_fields, name))
    where = (section, name)
    tree = {**base(folder), section: {**base(folder).get(section, {}), json.dumps(name): 1}}
    if section == name:
        tree[json.dumps(name)] = tree.pop(name)
    return Case(f"unknown key {where!r}"[:80], _write(folder, tree), (), base_run, TRAIN)


def _override(folder: Path, base_run: Path, source: random.Random) -> Case:
    form = source.choice(_FORMS)
    return Case(f"override {form[:40]!r}", _write(folder, base(folder)), (form,), base_run, TRAIN)


def _combination(folder: Path, base_run: Path, source: random.Random) -> Case:
    overrides = source.choice(_COMBINATIONS)
    return Case(f"together: {', '.join(overrides)}", _write(folder, base(folder)), overrides, base_run, TRAIN)


def _odd_file(path: Path, source: random.Random) -> tuple[str, Path]:
    """Something that is no regular file, or none that ends, at ``path``."""
    kind = source.choice(
        ("a FIFO", "a link to /dev/zero", "a link to itself", "a folder", "a dangling link", "a large file")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a large file":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        targets = {"a link to /dev/zero": Path("/dev/zero"), "a link to itself": path}
        path.symlink_to(targets.get(kind, path.parent / "none"))
    return kind, path


def _odd_path(folder: Path, base_run: Path, source: random.Random) -> Case:
    tree, which = (
        base(folder),
        source.choice(("config", "model", "data", "template", "reward", "evaluation")),
    )
    name = {"data": "a.jsonl", "evaluation": "a.parquet", "reward": "a.py"}.get(which, "a")
    kind, path = _odd_file(folder / name, source)
    if kind == "a folder" and which == "config":
        return Case("the job: a folder", path, (), base_run, BOTH)
    if which == "config":
        return Case(f"the job: {kind}", path, (), base_run, BOTH)
    _set_path(tree, which, path, _good_rows(folder))
    return Case(f"the path of the {which}: {kind}", _write(folder, tree), (), base_run, TRAIN)


def _set_path(tree: Tree, which: str, path: Path, rows: Path) -> None:
    if which == "model":
        tree["model"]["path"] = str(path)
    elif which == "data":
        tree["data"]["source"] = str(path)
    elif which == "template":
        tree["data"] |= {"source": str(rows), "chat_template": str(path), "text_prompts": "chat"}
    elif which == "reward":
        tree["reward"] = {"default": "function", "function": f"{path}:f"}
    else:
        tree["evaluation"] = {"sources": [str(path)], "every_steps": 1}


def _good_rows(folder: Path) -> Path:
    path = folder / "good.jsonl"
    path.write_text('{"prompt": "gcd(6,4)=", "answer": "2"}\n' * 4, encoding="utf-8")
    return path


def _broken_rows(folder: Path, base_run: Path, source: random.Random) -> Case:
    row, tree, path = source.choice(_ROWS), base(folder), folder / "rows.jsonl"
    path.write_text(f'{{"prompt": "gcd(6,4)=", "answer": "2"}}\n{row}\n', encoding="utf-8")
    which = source.choice(("data", "evaluation"))
    _set_path(tree, which, path, path)
    skips = which == "data" and source.random() < 0.5
    if skips:
        tree["data"] |= {"broken_rows": "skip", "overlong": "drop"}
    return Case(f"{which}: a row {row[:40]!r}", _write(folder, tree), (), base_run, frozenset() if skips else TRAIN)


def _odd_rows(folder: Path, base_run: Path, source: random.Random) -> Case:
    row, tree, path = source.choice(_ODD_ROWS), base(folder), folder / "rows.jsonl"
    path.write_text(row + "\n", encoding="utf-8")
    _set_path(tree, source.choice(("data", "evaluation")), path, path)
    return Case(f"a row {row[:60]!r}", _write(folder, tree), (), base_run, frozenset())


def _broken_table(folder: Path, base_run: Path, source: random.Random) -> Case:
    suffix = source.choice((".parquet", ".arrow", ".jsonl", ".json", ".csv"))
    path, tree = folder / f"rows{suffix}", base(folder)
    start = source.choice((b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"{", b""))
    path.write_bytes(
        start + source.randbytes(source.choice((0, 8, 100, 5000))) + source.choice((b"PAR1", b"ARROW1", b""))
    )
    _set_path(tree, source.choice(("data", "evaluation")), path, path)
    return Case(f"rows in a {suffix} file of {start!r} and noise", _write(folder, tree), (), base_run, TRAIN)


def _data_folder(folder: Path, base_run: Path, source: random.Random) -> Case:
    state = source.choice(
        (
            b"",
            b"[]",
            b"[" * 100_000,
            b'{"_data_files": [{"filename": 3}]}',
            b'{"_data_files": 3}',
            b'{"_data_files": [{"filename": "../../../../etc/passwd"}]}',
            b'{"_data_files": [{}]}',
            b'{"_data_files": [{"filename": "a\\u0000"}]}',
            b'{"_data_files": []}',
        )
    )
    place, tree = folder / "saved", base(folder)
    place.mkdir()
    (place / "state.json").write_bytes(state)
    tree["data"]["source"] = str(place)
    return Case(f"a saved data set's state.json of {state[:40]!r}", _write(folder, tree), (), base_run, TRAIN)


def _model(folder: Path, base_run: Path, source: random.Random) -> Case:
    place, tree = folder / "model", base(folder)
    shutil.copytree(Path(str(resources.files("tlt_hpc") / "models" / "assets" / "tiny")), place)
    tree["model"]["path"] = str(place)
    pick = source.random()
    if pick < 0.3:
        name = source.choice(("config.json", "tokenizer.json", "model.safetensors", "generation_config.json"))
        kind, _ = _odd_file(place / name, source)
        fails = TRAIN if name != "generation_config.json" or kind == "a large file" else frozenset()
        return Case(f"the model's {name}: {kind}", _write(folder, tree), (), base_run, fails)
    if pick < 0.6:
        changed = source.choice(_SIZES)
        old = json.loads((place / "config.json").read_text(encoding="utf-8"))
        (place / "config.json").write_text(json.dumps({**old, **changed}), encoding="utf-8")
        return Case(f"the model's config.json: {str(changed)[:60]}", _write(folder, tree), (), base_run, TRAIN)
    if pick < 0.75:
        (place / "model.safetensors").unlink()
        index: dict[str, Any] = source.choice(
            (
                {"weight_map": {"a": "../../../etc/passwd"}},
                {"weight_map": {"a": 3}},
                {"weight_map": []},
                {"weight_map": {"a": "/dev/zero"}},
                {"weight_map": {"a": "\0"}},
            )
        )
        (place / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return Case(f"the model's index: {index}", _write(folder, tree), (), base_run, TRAIN)
    name, content = source.choice(_MODELS)
    (place / name).write_bytes(content)
    return Case(f"the model's {name}: {content[:40]!r}", _write(folder, tree), (), base_run, TRAIN)


def _template(folder: Path, base_run: Path, source: random.Random) -> Case:
    text, tree, path = source.choice(_TEMPLATES), base(folder), folder / "mine.jinja"
    path.write_text(text, encoding="utf-8")
    _set_path(tree, "template", path, _good_rows(folder))
    return Case(f"a template {text[:60]!r}", _write(folder, tree), (), base_run, TRAIN)


def _reward(folder: Path, base_run: Path, source: random.Random) -> Case:
    text, tree, path = source.choice(_REWARDS), base(folder), folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    _set_path(tree, "reward", path, path)
    return Case(f"a reward function {text[:40]!r}", _write(folder, tree), (), base_run, TRAIN)


_Maker = Callable[[Path, Path, random.Random], Case]
_PLAIN: tuple[_Maker, ...] = (
    _wrong_toml,
    _wrong_type,
    _wrong_number,
    _wrong_text,
    _unknown_key,
    _tiny_number,
    _override,
    _combination,
    _odd_path,
    _broken_rows,
    _odd_rows,
    _broken_table,
    _data_folder,
    _model,
    _model,
    _template,
    _reward,
)
