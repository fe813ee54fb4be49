"""Job files, data, models, templates and reward functions with one thing wrong, for ``hostile.py``."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from damage import FOR_A_FILE, Case, commands_on

from tlt_hpc.config import Config
from tlt_hpc.models.folder import embedded

TRAIN, BOTH, NOBODY = frozenset({"train"}), frozenset({"train", "evaluate"}), frozenset[str]()
Tree = dict[str, dict[str, Any]]
Made = tuple[str, frozenset[str], tuple[str, ...]]
"""What is wrong with the job in the folder, the commands that must refuse it, and the overrides that follow it."""

_ESCAPE = "\x1b]0;title\x07\x1b[31m"
_DEEP = "[" * 100_000
TEXTS = ("[bold red]x[/nope]", _ESCAPE, "a\0b", "a\nb", "\u202ea", "%s{}$(x)`x`", "../" * 200, "")
NUMBERS = ("1e308", "-1e308", "1e-400", "nan", "inf", "-inf", "-1", str(2**63), str(2**64), "-" + "9" * 30)
OTHER_TYPES = {
    "integer": ('"4"', "true", "1.5", "[1]", "{a = 1}", "1979-05-27"),
    "number": ('"x"', "true", "[1.0]", "{a = 1}", "1979-05-27"),
    "string": ("3", "true", "{a = 1}", "nan"),
    "boolean": ("1", '"yes"', "[]", "{}"),
    "array": ("3", "true", "{a = 1}", "[[[]]]"),
    "object": ("3", "true", "[]", '"x"'),
}
"""TOML of another type than a key's."""
NOT_TOML = (
    b"\xff\xfe\x00", "[run]\nname = 'x'".encode("utf-16"), b'\xef\xbb\xbf[run]\nname = "x"',
    b"[run]\nname = 'a'\nname = 'b'", b"[run]\nname = 'a'\n[run]\nname = 'b'", b'[run]\nname = "\\ud800"',
    b"[run]\nname = 'a\x00b'", b"a = " + b"[" * 50_000, b"a = " + b"{a = " * 5_000, b"a." * 100_000 + b"a = 1",
    b"a = " + b"9" * 10_000, b"[run]\nseed = 0x" + b"f" * 100_000, b"[run]\nseed = 1e999999999", b"# " + b"x" * 2**21,
    b"".join(b"k%d = 1\n" % i for i in range(50_000)), b"x" * 100_000 + b" = 1", b'"' + b"\\u001b[31m" * 100 + b'" = 1',
    b"[run]\nname = 1979-05-27T07:32:00Z", b"[[run]]\nname = 'x'", b"run = 3", b"",
)  # fmt: skip
NAMES = ("rnu", "temprature", "x" * 100_000, "[red]x[/nope]", _ESCAPE, "\u202e", "")
OVERRIDES = (
    "no equals sign", "=", "a=b", "a.b.c=1", ".=1", "run.=1", ".name=1", "run.name", "run.name=\udcff", "\udcff.x=1",
    "run.seed=" + "9" * 5000, "run.seed=0x" + "f" * 5000, "run.seed=" + "[" * 5000, "x" * 100_000 + ".y=1",
    "\x1b[31m.x=1", "run.\x1b[31m=1", "run.name.x=1",
)  # fmt: skip
COMBINATIONS = (
    "rollout.group_size=1", "algorithm.updates_per_step=3", "optimizer.zero_stage=0 model.dtype=bfloat16",
    "optimizer.offload_parameters=true", "rollout.min_new_tokens=9", "rollout.max_new_tokens=2147483647",
    "data.max_prompt_tokens=2147483647", "rollout.prompts_per_step=2147483647 rollout.group_size=2147483647",
    "run.ranks=3", "run.ranks=1048576", "rollout.tensor_parallel=1048576", "optimizer.sequence_parallel=1024",
    "drafter.train=false drafter.schedule=falling", "drafter.form=eagle3 drafter.loss=feature",
    "evaluation.temperature=0", "reward.default=function", "reward.format_weight=0.5",
    "speculation.mode=full speculation.strategies=['drafter-9999']",
    "speculation.mode=full speculation.strategies=['ngram-4a99999999999999999999999999999999999999999999999999']",
    "speculation.mode=ngram speculation.strategies=['drafter-2']", "speculation.mode=full drafter.init=/dev/null",
    "algorithm.kl_estimator=k1 algorithm.kl_coefficient=0.1", "data.source=['embedded:gcd','embedded:gcd']",
    "data.source=reasoning-gym:../../etc/passwd",
)  # fmt: skip
GOOD_ROW = '{"prompt": "gcd(6,4)=", "answer": "2"}\n'
BROKEN_ROWS = (
    '{"prompt": "1=", "answer": "\\ud800"}', '{"prompt": "\\udfff", "answer": "1"}',
    '{"prompt": "1=", "answer": ' + "9" * 5000 + "}", '{"prompt": "1=", "answer": NaN}',
    '{"prompt": "1=", "answer": -Infinity}', '{"prompt": "1=", "answer": ' + "[" * 900 + "]" * 900 + "}",
    '{"prompt": "1=", "answer": ' + _DEEP, '{"prompt": "1=", "answer": "1", "data_source": "\\ud800"}',
    '{"prompt": "1=", "answer": "1", "extra_info": {"a": "\\ud800"}}',
    '{"prompt": [{"role": "user", "content": {"a": []}}], "answer": "1"}',
    '{"prompt": "' + "1" * 100_000 + '", "answer": "1"}', '{"prompt": "1=", "prompt": "2=", "answer": "1"}',
    '{"prompt": "\x1b[31m", "answer": null}', '["prompt", "answer"]', "\x00\x01\x02", "null",
)  # fmt: skip
ODD_ROWS = (
    '{"prompt": "1=", "answer": "1", "data_source": "[bold red]x[/nope]"}',
    '{"prompt": "1=", "answer": "\\u001b[31m", "data_source": "\\u001b]0;x\\u0007"}',
    '{"prompt": "1=", "answer": "a\\u0000b", "data_source": "a\\u0000/../b"}',
    '{"prompt": "1=", "answer": 1e308, "extra_info": {"difficulty": NaN}}',
    '{"prompt": "1=", "answer": {"a": [1, null]}, "data_source": {"a": 1}}',
)
SAVED_SETS = (
    "", "[]", _DEEP, '{"_data_files": [{"filename": 3}]}', '{"_data_files": 3}', '{"_data_files": [{}]}',
    '{"_data_files": [{"filename": "../../../../etc/passwd"}]}', '{"_data_files": [{"filename": "a\\u0000"}]}',
    '{"_data_files": []}',
)  # fmt: skip
MODEL_FILES: dict[str, tuple[bytes, ...]] = {
    "config.json": (
        b"", b"[]", b"{}", b"\xff", _DEEP.encode(), b'{"model_type": ' + b"9" * 5000 + b"}",
        b'{"model_type": ["qwen2"]}',
    ),
    "tokenizer.json": (
        b"", b"{}", _DEEP.encode(),
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    ),
    "model.safetensors": (
        b"", b"\0" * 8, struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 80) + b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    ',
        struct.pack("<Q", 100_000) + _DEEP.encode(),
    ),
    "generation_config.json": (
        b'{"eos_token_id": [1e308]}', b'{"eos_token_id": {"a": 1}}', b'{"eos_token_id": true}',
    ),
}  # fmt: skip
SHAPES: tuple[dict[str, Any], ...] = (
    {"hidden_size": 10**18}, {"num_hidden_layers": 10**12}, {"vocab_size": 10**30}, {"head_dim": 10**15},
    {"max_position_embeddings": 10**400}, {"hidden_size": "x"}, {"num_attention_heads": 1.5}, {"rms_norm_eps": "x"},
    {"rope_theta": "x"}, {"rope_theta": [1]}, {"rope_parameters": 3}, {"rope_scaling": {"rope_type": ["x"]}},
    {"layer_types": 3, "sliding_window": 4}, {"eos_token_id": "x"}, {"tie_word_embeddings": "no"},
    {"model_type": "\x1b[31m"}, {"intermediate_size": True},
)  # fmt: skip
INDICES: tuple[Any, ...] = ({"a": "../../../etc/passwd"}, {"a": 3}, [], {"a": "/dev/zero"}, {"a": "\0"})
TEMPLATES = (
    "{{ 'x' * 10**10 }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{" * 100_000, "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
    "{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}",
    "{{ messages[0]['content'].format(messages) }}{{ 1 / 0 }}",
)  # fmt: skip
REWARDS = (
    "def f(:", "def g(**_): return 1", "\0", "(" * 10_000, "# coding: nonsense\ndef f(): pass",
    "f = " + "-" * 90_000 + "1",
)  # fmt: skip


def make(number: int, folder: Path, base_run: Path, source: random.Random) -> Case:
    """A job and a copy of ``base_run`` with its configuration; ``number`` says what kind of thing is wrong with it."""
    job, run = folder / "job.toml", folder / "run"
    kind, must_fail, overrides = MAKERS[number % len(MAKERS)](folder, source)
    shutil.copytree(base_run, run, symlinks=True)
    (run / "config.toml").unlink(missing_ok=True)
    if job.is_file():
        shutil.copyfile(job, run / "config.toml")
    else:
        (run / "config.toml").symlink_to(job.absolute())
    return Case(kind, commands_on(job, overrides, run), must_fail)


def sound(folder: Path) -> Tree:
    """A small job without a mistake."""
    return {
        "run": {"name": "hostile", "folder": str(folder / "runs"), "num_steps": 1},
        "model": {"path": "embedded:tiny", "dtype": "float32", "device": "cpu"},
        "data": {"source": "embedded:gcd"},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8},
        "speculation": {"mode": "plain"},
    }


def write(folder: Path, tree: Tree, extra: str = "") -> None:
    """Write the job as TOML, with a last line in its last section."""
    sections = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for name, keys in tree.items()
    ]
    (folder / "job.toml").write_text("\n".join(sections) + extra, encoding="utf-8")


def with_path(folder: Path, which: str, path: Path) -> Tree:
    """The sound job with another path in one place."""
    tree, rows = sound(folder), folder / "good.jsonl"
    rows.write_text(GOOD_ROW * 4, encoding="utf-8")
    changes: dict[str, Tree] = {
        "model": {"model": {"path": str(path)}},
        "data": {"data": {"source": str(path)}},
        "template": {"data": {"source": str(rows), "chat_template": str(path), "text_prompts": "chat"}},
        "reward": {"reward": {"default": "function", "function": f"{path}:f"}},
        "evaluation": {"evaluation": {"sources": [str(path)], "every_steps": 1}},
    }
    return tree | {name: tree.get(name, {}) | keys for name, keys in changes[which].items()}


# -- keys -----------------------------------------------------------------------------------------------------------


def leaves() -> Iterator[tuple[str, str, str]]:
    """Section, key and JSON's type of every key."""
    definitions = Config.model_json_schema()["$defs"]
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        for key, node in definitions[field.annotation.__name__]["properties"].items():
            options = [option["type"] for option in node.get("anyOf", [node]) if option.get("type") != "null"]
            yield section, key, options[0]


def key_maker(
    kinds: tuple[str, ...], value_of: Callable[[str, random.Random], str], is_valid: Callable[[str], bool]
) -> Callable[[Path, random.Random], Made]:
    """A sound job with another value, as TOML, of one key of these types; ``is_valid``: values that may be accepted."""

    def make_key(folder: Path, source: random.Random) -> Made:
        section, key, kind = source.choice([leaf for leaf in leaves() if leaf[2] in kinds])
        value, tree = value_of(kind, source), sound(folder)
        own = tree.pop(section, {})
        own.pop(key, None)
        write(folder, {**tree, section: own}, f"{key} = {value}\n")
        return f"{section}.{key} = {value[:40]}", NOBODY if is_valid(value) else TRAIN, ()

    return make_key


def _text(kind: str, source: random.Random) -> str:
    if source.random() < 0.3:
        return json.dumps("x" * 900_000)
    text = source.choice(TEXTS)
    return source.choice((json.dumps(text), json.dumps([text])))


def _unknown_key(folder: Path, source: random.Random) -> Made:
    name, tree = source.choice(NAMES), sound(folder)
    section = source.choice((*Config.model_fields, json.dumps(name)))
    write(folder, tree | {section: {**tree.get(section, {}), json.dumps(name): 1}})
    return f"unknown key {name!r} in {section}"[:80], TRAIN, ()


def _override(folder: Path, source: random.Random) -> Made:
    form = source.choice(OVERRIDES)
    write(folder, sound(folder))
    return f"override {form[:40]!r}", TRAIN, (form,)


def _combination(folder: Path, source: random.Random) -> Made:
    overrides = source.choice(COMBINATIONS)
    write(folder, sound(folder))
    return f"together: {overrides}", TRAIN, tuple(overrides.split())


# -- files ----------------------------------------------------------------------------------------------------------


def _job(folder: Path, source: random.Random) -> Made:
    content = source.choice(NOT_TOML)
    (folder / "job.toml").write_bytes(content)
    return f"a job of {content[:24]!r}...", TRAIN, ()


def _path(folder: Path, source: random.Random) -> Made:
    which = source.choice(("job", "model", "data", "template", "reward", "evaluation"))
    name = {"data": "a.jsonl", "evaluation": "a.parquet", "reward": "a.py"}.get(which, "a")
    path = folder / ("job.toml" if which == "job" else name)
    if which != "job":
        write(folder, with_path(folder, which, path))
    kind = _special(path, source)
    return f"the path of the {which}: {kind}", BOTH if which == "job" else TRAIN, ()


def _special(path: Path, source: random.Random) -> str:
    path.touch()
    kind = source.choice(sorted(FOR_A_FILE))
    FOR_A_FILE[kind](path, source)
    return kind


def _broken_row(folder: Path, source: random.Random) -> Made:
    row, which, path = source.choice(BROKEN_ROWS), source.choice(("data", "evaluation")), folder / "rows.jsonl"
    path.write_text(f"{GOOD_ROW}{row}\n", encoding="utf-8")
    tree, skips = with_path(folder, which, path), which == "data" and source.random() < 0.5
    if skips:
        tree["data"] |= {"broken_rows": "skip", "overlong": "drop"}
    write(folder, tree)
    return f"{which}: a row {row[:40]!r}", NOBODY if skips else TRAIN, ()


def _odd_row(folder: Path, source: random.Random) -> Made:
    row, path = source.choice(ODD_ROWS), folder / "rows.jsonl"
    path.write_text(row + "\n", encoding="utf-8")
    write(folder, with_path(folder, source.choice(("data", "evaluation")), path))
    return f"a row {row[:60]!r}", NOBODY, ()


def _table(folder: Path, source: random.Random) -> Made:
    path = folder / f"rows{source.choice(('.parquet', '.arrow', '.jsonl', '.json', '.csv'))}"
    start = source.choice((b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"{", b""))
    noise = source.randbytes(source.choice((0, 8, 100, 5000)))
    path.write_bytes(start + noise + source.choice((b"PAR1", b"ARROW1", b"")))
    write(folder, with_path(folder, source.choice(("data", "evaluation")), path))
    return f"{path.name} of {start!r} and noise", TRAIN, ()


def _saved_set(folder: Path, source: random.Random) -> Made:
    place, state = folder / "saved", source.choice(SAVED_SETS)
    place.mkdir()
    (place / "state.json").write_text(state)
    write(folder, with_path(folder, "data", place))
    return f"a saved data set's state.json of {state[:40]!r}", TRAIN, ()


def _model(folder: Path, source: random.Random) -> Made:
    place, pick = folder / "model", source.choice(("special", "shape", "index", "content"))
    shutil.copytree(embedded("tiny"), place)
    write(folder, with_path(folder, "model", place))
    name, must_fail = source.choice(sorted(MODEL_FILES)), TRAIN
    if pick == "special":
        told = _special(place / name, source)
        must_fail = TRAIN if name != "generation_config.json" or told == "2 TiB of zeros" else NOBODY
    elif pick == "shape":
        name, shape = "config.json", source.choice(SHAPES)
        told = str(shape)
        old = json.loads((place / name).read_text(encoding="utf-8"))
        (place / name).write_text(json.dumps(old | shape), encoding="utf-8")
    elif pick == "index":
        (place / "model.safetensors").unlink()
        name, told = "model.safetensors.index.json", json.dumps({"weight_map": source.choice(INDICES)})
        (place / name).write_text(told, encoding="utf-8")
    else:
        content = source.choice(MODEL_FILES[name])
        told = repr(content[:40])
        (place / name).write_bytes(content)
    return f"the model's {name}: {told[:60]}", must_fail, ()


def text_maker(which: str, name: str, texts: tuple[str, ...]) -> Callable[[Path, random.Random], Made]:
    """A sound job with a template or reward function of one of these texts."""

    def make_text(folder: Path, source: random.Random) -> Made:
        text = source.choice(texts)
        (folder / name).write_text(text, encoding="utf-8")
        write(folder, with_path(folder, which, folder / name))
        return f"a {which} {text[:60]!r}", TRAIN, ()

    return make_text


MAKERS = (
    _job,
    key_maker(tuple(OTHER_TYPES), lambda kind, source: source.choice(OTHER_TYPES[kind]), lambda value: False),
    key_maker(("integer", "number"), lambda kind, source: source.choice(NUMBERS), lambda value: value == "1e-400"),  # 0
    key_maker(("string", "array"), _text, lambda value: len(value) < 1000),
    key_maker(("number",), lambda kind, source: "1e-308", lambda value: True),
    _unknown_key, _override, _combination, _path, _broken_row, _odd_row, _table, _saved_set, _model, _model,
    text_maker("template", "mine.jinja", TEMPLATES),
    text_maker("reward", "mine.py", REWARDS),
)  # fmt: skip
