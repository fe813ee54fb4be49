"""The configuration: what it refuses and in which words, what it reads back, and what the command does about it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tlt_hpc.cli.main import USER_ERROR, main
from tlt_hpc.config import (
    Config,
    ConfigError,
    apply_override,
    check_learns,
    check_model_limits,
    check_ranks,
    check_sequence_parallel,
    load_config,
    load_saved_config,
    parse_config,
    to_toml,
)
from tlt_hpc.config.keys import keys_of
from tlt_hpc.config.reading import toml_value
from tlt_hpc.config.removed import REMOVED
from tlt_hpc.config.whole import SECTIONS

MAX_KEYS = 110
PRESENT = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.model_fields}
TINY = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- one line that names the key, the value and the remedy ---


NAME = "use letters, digits, '_', '-' and '.', and none of the last two in front"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temprature=0.9", "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?"),
        ("algorithm.kl_coef=0.1", "unknown key 'algorithm.kl_coef'; did you mean 'algorithm.kl_coefficient'?"),
        (
            "speculation.depths=[2]",
            "unknown key 'speculation.depths'; it was removed: name strategies such as drafter-4 in "
            "speculation.strategies",
        ),
        ("rolout.temperature=0.9", "unknown key 'rolout'; did you mean 'rollout'?"),
        (
            "checkpoint.zzz=1",
            "unknown key 'checkpoint.zzz'; valid keys: checkpoint.every_steps, checkpoint.keep, "
            "checkpoint.replay, checkpoint.keep_responses_seconds",
        ),
        ("speculation.strategies=drafter-4", 'speculation.strategies = \'drafter-4\': give a list, such as ["a", "b"]'),
        ("speculation.strategies=[]", "speculation.strategies = []: give a list of one or more"),
        ("reward.by_source=math", "reward.by_source = 'math': give a table, such as {name = \"value\"}"),
        (
            "reward.by_source={'a' = 'gsm8k'}",
            "reward.by_source.a = 'gsm8k': input should be 'boxed', 'math', 'numeric', 'choice', 'format', 'code' or "
            "'function'",
        ),
        ("rollout.group_size=eight", "rollout.group_size = 'eight': input should be a valid integer"),
        ("rollout.group_size=8.0", "rollout.group_size = 8.0: input should be a valid integer"),
        ("rollout.group_size=0", "rollout.group_size = 0: input should be greater than or equal to 1"),
        ("rollout.group_size=true", "rollout.group_size = true: input should be a valid integer"),
        (
            "rollout.group_size=100000000000000000000",
            "override 'rollout.group_size=100000000000000000000': an integer of more than 64 bits; use a smaller one",
        ),
        ("run.seed=-1", "run.seed = -1: input should be greater than or equal to 0"),
        ("run.name=3", "run.name = 3: input should be a valid string"),
        ("run.name=../elsewhere", f"run.name = '../elsewhere': {NAME}"),
        ("run.name=", f"run.name = '': {NAME}"),
        ("rollout.top_p=0.0", "rollout.top_p = 0.0: input should be greater than 0"),
        ("rollout.temperature=nan", "rollout.temperature = nan: input should be a finite number"),
        ("optimizer.weight_decay=-1.0", "optimizer.weight_decay = -1.0: input should be greater than or equal to 0"),
        ("optimizer.learning_rate=1e-6x", "optimizer.learning_rate = '1e-6x': input should be a valid number"),
        ("optimizer.zero_stage=4", "optimizer.zero_stage = 4: input should be less than or equal to 3"),
        ("speculation.mode=fast", "speculation.mode = 'fast': input should be 'plain', 'ngram' or 'full'"),
        ("optimizer.gradient_checkpointing=yes", "optimizer.gradient_checkpointing = 'yes': use true, false or 'auto'"),
        ("model.dtype=float16", "model.dtype = 'float16': input should be 'float32' or 'bfloat16'"),
        ("tracking.wandb=true", "tracking.wandb = true: input should be 'off', 'offline' or 'online'"),
    ],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.group_size=1"],
            "rollout.group_size = 1 with algorithm.name = 'dapo', whose advantage needs a group; use "
            "rollout.group_size of 2 or more, or algorithm.name = 'reinforce++'",
        ),
        (
            ["algorithm.updates_per_step=3"],
            "algorithm.updates_per_step = 3 does not divide the step's 128 samples; use 1",
        ),
        (
            ["model.dtype=bfloat16", "optimizer.zero_stage=0"],
            "optimizer.zero_stage = 0 with model.dtype = 'bfloat16' has no fp32 master weights, so small updates are "
            "lost; use optimizer.zero_stage = 1",
        ),
        (
            ["optimizer.offload=true", "optimizer.zero_stage=0"],
            "optimizer.offload = true needs sharded state; use optimizer.zero_stage = 1, 2 or 3",
        ),
        (
            ["optimizer.offload_parameters=true", "optimizer.zero_stage=3"],
            "optimizer.offload_parameters = true with optimizer.zero_stage = 3 and optimizer.offload = false: "
            "parameters are shared out at stage 3 alone, and follow the optimiser's state; use optimizer.zero_stage = "
            "3 and optimizer.offload = true",
        ),
        (
            ["rollout.min_new_tokens=513"],
            "rollout.min_new_tokens = 513 exceeds rollout.max_new_tokens = 512; lower it",
        ),
    ],
)
def test_impossible_combinations_are_refused(overrides: list[str], message: str) -> None:
    assert refusal(*overrides) == message


def test_missing_key() -> None:
    tree = tomllib.loads(TINY.read_text())
    del tree["rollout"]["max_new_tokens"]
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert str(caught.value) == (
        "missing key 'rollout.max_new_tokens'; add it to the file or give rollout.max_new_tokens=VALUE"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return str(caught.value).replace(str(tmp_path), "HERE")

    remedy = "; give the path of a TOML file such as jobs/tiny.toml"
    assert said(tmp_path / "nowhere.toml") == "config file HERE/nowhere.toml: No such file or directory" + remedy
    assert said(tmp_path) == "config file HERE: Is a directory" + remedy
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    start = "config file HERE/broken.toml is not valid TOML: "
    assert said(broken) == start + "Expected ']' at the end of a table declaration (at line 1, column 5); fix it"
    broken.write_bytes(b"\xff\xfe")
    assert said(broken) == start + "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte; fix it"
    broken.write_text("run = 3\n")
    assert said(broken) == "run = 3: write it as a table, with keys of its own"
    broken.write_text("")
    assert said(broken) == "missing key 'run'; add it to the file or give run=VALUE"


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        ([], 3, "rollout.prompts_per_step = 16 is not divisible by 3 ranks; use 15 or another number of ranks"),
        ([], 32, "rollout.prompts_per_step = 16 is not divisible by 32 ranks; use 32 or another number of ranks"),
        (
            ["rollout.shard=sample"],
            3,
            "rollout.prompts_per_step x rollout.group_size = 128 is not divisible by 3 ranks; use 126 or another "
            "number of ranks",
        ),
        (
            ["rollout.tensor_parallel=6"],
            4,
            "rollout.tensor_parallel = 6 does not divide 4 ranks; use 2 or another number of ranks",
        ),
    ],
)
def test_ranks_that_do_not_divide(overrides: list[str], num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(load_config(TINY, overrides), num_ranks)
    assert str(caught.value) == message


def test_ranks_that_cannot_share_a_sequence() -> None:
    config = load_config(TINY, ["optimizer.sequence_parallel=4"])
    check_sequence_parallel(config, 4, 2, 8)
    with pytest.raises(ConfigError) as caught:
        check_sequence_parallel(config, 14, 2, 8)
    assert str(caught.value) == (
        "optimizer.sequence_parallel = 4 does not share out the model's 14 heads and 2 key-value heads evenly; use one "
        "of 1, 2"
    )
    with pytest.raises(ConfigError) as caught:
        check_sequence_parallel(config, 28, 4, 6)
    assert str(caught.value) == (
        "optimizer.sequence_parallel = 4 does not divide 6 ranks; use 2 or another number of ranks"
    )


def test_cap_over_the_models_positions() -> None:
    config = load_config(TINY)
    check_model_limits(config, 528)
    with pytest.raises(ConfigError) as caught:
        check_model_limits(config, 527)
    assert str(caught.value) == (
        "data.max_prompt_tokens + rollout.max_new_tokens = 528 exceeds the model's 527 positions; lower "
        "rollout.max_new_tokens to 511 or less"
    )
    with pytest.raises(ConfigError) as caught:
        check_model_limits(config, 16)
    assert str(caught.value) == (
        "data.max_prompt_tokens = 16 leaves no room for a response in the model's 16 positions; lower it"
    )


def test_responses_that_are_all_alike_teach_nothing() -> None:
    check_learns(load_config(TINY))
    check_learns(load_config(TINY, ["rollout.temperature=0", "algorithm.name=reinforce++"]))
    with pytest.raises(ConfigError) as caught:
        check_learns(load_config(TINY, ["rollout.temperature=0"]))
    assert str(caught.value) == (
        "rollout.temperature = 0.0 makes all responses of a group alike, and algorithm.name = 'dapo' learns from their "
        "differences; use a temperature above 0"
    )


# --- overrides ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.9", 0.9),
        ("3", 3),
        ("true", True),
        ("[2, 4]", [2, 4]),
        ('"0.9"', "0.9"),
        ("plain", "plain"),
        ("models/Qwen2.5-7B", "models/Qwen2.5-7B"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_an_override_is_toml_or_a_bare_string(text: str, value: Any) -> None:
    tree: dict[str, Any] = {"section": {"kept": 1}}
    apply_override(tree, f"section.key={text}")
    assert tree == {"section": {"kept": 1, "key": value}}
    assert type(tree["section"]["key"]) is type(value)


@pytest.mark.parametrize("override", ["rollout.temperature", "temperature=1", "a.b.c=1", ".b=1", "a.=1", "=1", ""])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({}, override)
    assert str(caught.value) == (
        f"override {override!r} is not of the form section.key=value, e.g. rollout.temperature=0.9"
    )


def test_an_override_of_a_key_that_is_no_section() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({"run": 3}, "run.seed=1")
    assert str(caught.value) == "override 'run.seed=1': 'run' is not a section in the file; write it as a [run] table"


@pytest.mark.parametrize(("dtype", "expected"), [("float32", True), ("bfloat16", False)])
def test_the_tie_guard_is_on_where_it_can_hold(dtype: str, expected: bool) -> None:
    assert load_config(TINY, [f"model.dtype={dtype}"]).tie_guard is expected


# --- round trip ---


def keys() -> Iterator[tuple[str, str, Any]]:
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        assert issubclass(field.annotation, BaseModel)
        for key, inner in field.annotation.model_fields.items():
            yield section, key, inner.annotation


def values_for(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a key's type, whether or not its bounds allow them."""
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(1, 2**63 - 1)
    if annotation is float:
        return st.floats(0, 1e300, allow_nan=False)
    if annotation is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    if get_origin(annotation) is dict:
        names = get_args(get_args(annotation)[1])  # none where it holds anything
        values = st.sampled_from(names) if names else st.booleans() | st.integers() | st.text(max_size=9)
        return st.dictionaries(st.text(max_size=9), values, max_size=3)
    if get_args(annotation) and isinstance(get_args(annotation)[0], str):
        return st.sampled_from(get_args(annotation))
    return st.lists(st.integers(1, 64), min_size=1, max_size=4)


KEYS = list(keys())


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, Any]:
    section, key, annotation = draw(st.sampled_from(KEYS))
    return section, key, draw(values_for(annotation))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a machine with other work
@given(st.lists(changes(), max_size=4))
def test_round_trip(changed: list[tuple[str, str, Any]]) -> None:
    """What passes validation reads back equal, and writes the same text again."""
    tree = tomllib.loads(TINY.read_text())
    for section, key, value in changed:
        tree.setdefault(section, {})[key] = value
    try:
        config = parse_config(tree)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    text = to_toml(config)
    again = parse_config(tomllib.loads(text))
    assert again == config
    assert to_toml(again) == text


def test_every_key_is_written() -> None:
    tree = tomllib.loads(to_toml(load_config(TINY)))
    assert {(section, key) for section, values in tree.items() for key in values} == {(s, k) for s, k, _ in KEYS}


# --- the command ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no launcher's variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.temprature=1"], "unknown key 'rollout.temprature'; did you mean 'rollout.temperature'?"),
        (
            ["run.ranks=3"],
            "rollout.prompts_per_step = 16 is not divisible by 3 ranks; use 15 or another number of ranks",
        ),
        (
            ["rollout.max_new_tokens=1009"],
            "data.max_prompt_tokens + rollout.max_new_tokens = 1025 exceeds the model's 1024 positions; lower "
            "rollout.max_new_tokens to 1008 or less",
        ),
        (
            ["model.path=models/none"],
            "model.path = 'models/none': no config.json in that folder; download the model there first (compute nodes "
            "have no internet) or use 'embedded:tiny'",
        ),
        (
            ["data.source=none.jsonl"],
            "data.source = 'none.jsonl' does not exist; give a .jsonl, .parquet or .arrow file, a folder or pattern of "
            "them, 'reasoning-gym:NAME' or 'embedded:gcd'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    overrides: list[str], message: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(TINY), *overrides]) == USER_ERROR == 2
    out, err = capfd.readouterr()
    assert out == f"checking {TINY}\n"
    assert err == f"tlt: {message}\n"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--stepz", "3"], "unknown option --stepz; see tlt train --help"),
        (["compare", "--steps", "0"], "--steps 0 compares nothing; use 1 or more"),
        (["compare", "--json", "none/a.json"], "--json none/a.json: its folder does not exist; make it first"),
    ],
)
def test_options_that_cannot_be(
    arguments: list[str], message: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([arguments[0], str(TINY), *arguments[1:]])
    assert caught.value.code == USER_ERROR
    assert capfd.readouterr().err.splitlines()[-1] == f"tlt: error: {message}"
    assert list(here.iterdir()) == []


def test_dry_run_prints_the_plan_and_writes_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(TINY), "run.num_steps=7", "--dry-run", "run.ranks=4"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    plan, _, toml = out.partition("\n\n")
    assert "7 steps on 4 ranks" in plan
    assert "qwen2, 8 layers of width 128" in plan
    assert "32 samples a rank" in plan
    assert parse_config(tomllib.loads(toml)) == load_config(TINY, ["run.num_steps=7", "run.ranks=4"])
    assert list(here.iterdir()) == []


# --- keys of earlier versions ---


@pytest.mark.parametrize("name", sorted(set(REMOVED) - PRESENT))
def test_a_saved_configuration_may_have_a_removed_key_at_its_default(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section, _, key = name.partition(".")
    config, removed, path = load_config(TINY), REMOVED[name], tmp_path / "config.toml"
    if removed.default is None:
        pytest.skip("removed before version 0.1")

    def save(value: str) -> None:
        path.write_text(to_toml(config).replace(f"[{section}]", f"[{section}]\n{key} = {value}"))

    save(toml_value(removed.default))
    assert load_saved_config(path) == config and not caplog.text
    with pytest.raises(ConfigError, match=f"unknown key '{name}'; it was removed: "):
        load_config(path)
    save('"another"')
    if removed.any_value:
        assert load_saved_config(path) == config
        assert f"{name} = 'another' is ignored: {removed.instead}" in caplog.text
        return
    with pytest.raises(ConfigError, match=f"{name} = 'another' is of an earlier version.* environment.jsonl names"):
        load_saved_config(path)
    if removed.default in (0, 1):  # equal values of another type are not the default
        save("false" if removed.default == 0 else "true" if removed.default is not True else "1")
        with pytest.raises(ConfigError, match="is of an earlier version"):
            load_saved_config(path)


def test_a_removed_default_may_follow_from_another_key() -> None:
    far = REMOVED["reward.wall_seconds"]
    assert far.is_kept(60.0, {"cpu_seconds": 1.0}) and not far.is_kept(300.0, {"cpu_seconds": 1.0})
    low = REMOVED["algorithm.rollout_correction_low"]
    assert low.is_kept(0.5, {"rollout_correction": "icepop"}) and low.is_kept(0.0, {"rollout_correction": "tis"})
    assert not low.is_kept(0.0, {"rollout_correction": "icepop"}) and not low.is_kept(0.1, {})
    high = REMOVED["algorithm.rollout_correction_high"]
    assert high.is_kept(2.0, {"rollout_correction": "mis"}) and not high.is_kept(0.0, {"rollout_correction": "mis"})


def test_a_saved_value_that_a_key_no_longer_takes_names_the_version(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load_config(TINY)).replace('schedule = "always"', 'schedule = "every"'))
    with pytest.raises(ConfigError, match=r"drafter\.schedule = 'every' is of an earlier version"):
        load_saved_config(path)


# --- tlt keys and docs/configuration.md ---


def test_the_page_of_the_keys_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """``tlt keys --markdown > docs/configuration.md`` writes it."""
    assert main(["keys", "--markdown"]) == 0
    assert capsys.readouterr().out == (TINY.parent.parent / "docs" / "configuration.md").read_text()


def test_every_key_has_a_meaning_and_there_are_few_enough() -> None:
    keys = [key for section in SECTIONS for key in keys_of(section)]
    assert all(key.meaning.endswith(".") and key.values for key in keys)
    assert len(keys) <= MAX_KEYS


def test_keys_of_one_section_are_printed_with_values_default_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "checkpoint"]) == 0
    out = capsys.readouterr().out
    assert "every_steps: whole number from 1, steps; default 10" in out and "learning_rate" not in out
    assert main(["keys", "checkpiont"]) == USER_ERROR
    assert capsys.readouterr().err == "tlt: unknown section 'checkpiont'; did you mean 'checkpoint'?\n"


# --- bounds ---

LONG = "string should have at most 128 characters"
NUL = "no file has a NUL character in its name; leave it out"
DEEP = "nested over 16 deep; flatten it"
PATH = "a name of 256 bytes in a path; the system takes 255"
NOT_UNICODE = "input should be a valid string, unable to parse raw data as a unicode string"
LARGE = "an integer of more than 64 bits; use a smaller one"
KINDS = "input should be 'boxed', 'math', 'numeric', 'choice', 'format', 'code' or 'function'"


def schema_leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number and text of the configuration, lists' items included, by its key, as JSON Schema has it."""
    definitions = Config.model_json_schema()["$defs"]
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    for name, inner in node.get("properties", {}).items():
        yield from schema_leaves(inner, f"{path}.{name}".lstrip("."))
    for inner in [*node.get("anyOf", []), *node.get("prefixItems", []), *([node["items"]] if "items" in node else [])]:
        yield from schema_leaves(inner, path)
    if isinstance(names := node.get("propertyNames"), dict):
        yield path, {"type": "string", **names}
    if node.get("type") in ("integer", "number", "string", "array") or (
        node.get("type") == "object" and path.count(".")
    ):
        yield path, node


LEAVES = [(path, node) for path, node in schema_leaves(Config.model_json_schema()) if not {"enum", "const"} & set(node)]
SIZES = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


@pytest.mark.parametrize(("path", "node"), LEAVES, ids=[f"{path}-{node['type']}" for path, node in LEAVES])
def test_every_number_is_bounded_on_both_sides_and_every_text_and_list_in_length(
    path: str, node: dict[str, Any]
) -> None:
    if node["type"] in SIZES:
        assert SIZES[node["type"]] in node or path == "data.task_args", f"{path} has no greatest length"
        return
    low, high = (node.get(name, node.get(f"exclusive{name.title()}")) for name in ("minimum", "maximum"))
    assert low is not None and high is not None, f"{path} is not bounded on both sides"
    assert -(2**63) <= low < high <= 2**63


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stall_factor=1e-300", "run.stall_factor = 1e-300: use 0, or a number from 0.01 to 100000"),
        ("optimizer.max_grad_norm=1e-300", "optimizer.max_grad_norm = 1e-300: use 0, or a number from 1e-06 to 1e+09"),
        ("run.stall_factor=1e308", "run.stall_factor = 1e+308: input should be less than or equal to 100000"),
        ("rollout.temperature=1e308", "rollout.temperature = 1e+308: input should be less than or equal to 100"),
        ("rollout.temperature=1e-308", "rollout.temperature = 1e-308: use 0, or a number from 0.001 to 100"),
        ("rollout.temperature=inf", "rollout.temperature = inf: input should be a finite number"),
        ("optimizer.learning_rate=1e308", "optimizer.learning_rate = 1e+308: input should be less than or equal to 1"),
        ("algorithm.clip_high=1e308", "algorithm.clip_high = 1e+308: use a number from 0 to 1e+06, or 'auto'"),
        ("run.name=" + "a" * 300, f"run.name = '{'a' * 199}... (302 characters): {LONG}"),
        ('run.name="a\\u001b[31m"', f"run.name = 'a\\x1b[31m': {NAME}"),
        ('run.name="a\\n"', f"run.name = 'a\\n': {NAME}"),
        ('run.folder="a\\u0000b"', f"run.folder = 'a\\x00b': {NUL}"),
        ('data.source=["a", "b\\u0000"]', f"data.source = ['a', 'b\\x00']: {NUL}"),
        (f"model.path={'a' * 256}", f"model.path = '{'a' * 199}... (258 characters): {PATH}"),
        ("run.folder=\udcff", f"run.folder = '\\udcff': {NOT_UNICODE}"),
        ('data.split="a\\u001b"', "data.split = 'a\\x1b': control characters cannot be shown; leave them out"),
        ('reward.by_source={"\\u001b" = "x"}', f"reward.by_source.'\\x1b' = 'x': {KINDS}"),
        ("run.seed=0x" + "f" * 5000, f"override 'run.seed=0x{'f' * 188}... (5013 characters): {LARGE}"),
        ("run.seed=" + "9" * 5000, f"override 'run.seed={'9' * 190}... (5011 characters): {LARGE}"),
        ("run.seed=" + "[" * 5000, f"override 'run.seed={'[' * 190}... (5011 characters): {DEEP}"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_with_what_can(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a." * 100_000 + b"a = 1", DEEP),
        (b'"a b".' * 100_000 + b"a = 1", DEEP),
        (b"'a b' . " * 100_000 + b"a = 1", DEEP),
        (b"a = " + b"[" * 100_000, DEEP),
        (b"a = " + b"9" * 5000, LARGE),
        (b"a = 0x" + b"f" * 500_000, LARGE),
        (b'a = "\xff"', "'utf-8' codec can't decode byte 0xff in position 5: invalid start byte"),
    ],
)
def test_a_file_of_hostile_toml(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"config file {path} is not valid TOML: {message}; fix it"


def test_a_file_that_cannot_be_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (2**21 + 1))
    remedy = "give the path of a TOML file such as jobs/tiny.toml"
    for path, reason in [
        (tmp_path / "pipe", "it is a FIFO, not a regular file"),
        (Path("/dev/zero"), "it is a device, not a regular file"),
        (tmp_path / "large", "it has 2,097,153 bytes, and such a file 2,097,152 at most"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"config file {path}: {reason}; {remedy}"


@pytest.mark.parametrize("override", ["model.path={}", "data.source={}/a.jsonl", "evaluation.sources=['{}/a.jsonl']"])
def test_a_folder_that_may_not_be_looked_into(override: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    closed = here / "closed"
    closed.mkdir(mode=0)
    every = f"evaluation.every_steps={int(override.startswith('evaluation'))}"
    assert main(["train", str(TINY), "evaluation.every_steps=1", "--dry-run"]) == 0  # imports all
    capfd.readouterr()
    own = os.geteuid()
    if own == 0:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        assert main(["train", str(TINY), override.format(closed), every, "--dry-run"]) == USER_ERROR
    finally:
        os.seteuid(own)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith("tlt: /")
    assert err.endswith(": Permission denied; make sure that you may read it, and the folders that it is in\n")
