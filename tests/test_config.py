"""The configuration: accepted values, the round trip, saved configurations, and the command's answers."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import TINY, refusal
from hypothesis import example, given
from hypothesis import strategies as st

from tlt_hpc.cli.main import main
from tlt_hpc.config import (
    Config,
    check_model_limits,
    check_run_can_learn,
    check_sequence_parallel,
    load_config,
    load_config_or_problems,
    load_saved_config,
    parse_config,
    to_toml,
)
from tlt_hpc.config.keys import keys_of
from tlt_hpc.config.reading import _ANY, _CONSTANT_NOW, check_resumable, toml_value
from tlt_hpc.config.sections import SECTIONS

MAX_KEYS = 85


# --- values: tests/mistakes.txt has those that are refused ---


STEPS = "run.num_steps=9 algorithm.updates_per_step=2"


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.overlong=512 evaluation.max_new_tokens=512",
        "rollout.group_size=1 algorithm.name=reinforce++",
        "optimizer.zero_stage=3 optimizer.offload=parameters",
        f"optimizer.schedule=linear optimizer.warmup_steps=17 {STEPS}",
        "algorithm.overlong=mask algorithm.clip_dual=1.3",
        "algorithm.rollout_correction={icepop=[0.25,8.0]}",
        "evaluation.max_new_tokens=513",
        "evaluation.temperature=0 evaluation.samples=0",
        "rollout.temperature=0 algorithm.name=reinforce++",
        "algorithm.kl_estimator=k1 algorithm.kl_coefficient=0.1 algorithm.name=dr-grpo",
        "algorithm.clip=[1.0,0.2] algorithm.updates_per_step=128",
        "reward.format_tags=['a'] reward.weights={'format'=0.1}",
        "reward.weights={'answer'=0,'a.py:f'=-1,'a.py:g'=0}",
        "reward.by_source={'a?'='math','a*'='code','*]'='math','x[ab]'='code','ab'='code'}",
        "reward.by_source={'a*'='math','ab*'='numeric'}",
    ],
)
def test_values_at_the_bounds_of_the_checks_are_accepted(overrides: str) -> None:
    loaded = load_config(TINY, overrides.split())
    check_run_can_learn(loaded)
    check_model_limits(loaded, loaded.data.max_prompt_tokens + loaded.rollout.max_new_tokens)
    assert parse_config(tomllib.loads(to_toml(loaded))) == loaded
    config = loaded.model_dump(mode="json")
    for override in overrides.split():
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        is_bare = value[0].isalpha() and value != "true"
        assert config[section][name] == (value if is_bare else tomllib.loads(f"_ = {value}")["_"])


def test_a_message_shows_the_beginning_of_a_long_value() -> None:
    message = refusal(load_config, TINY, ["run.seed=" + "9" * 5000])
    assert message.startswith(f"override 'run.seed={'9' * 190}... (5011 characters): an integer of thousands of digits")


def test_all_problems_are_found_at_once() -> None:
    config, problems = load_config_or_problems(TINY, ["rollout.top_p=0.0", "run.seed=-1"])
    assert config is None and [str(problem).partition(" ")[0] for problem in problems] == ["run.seed", "rollout.top_p"]
    config, problems = load_config_or_problems(TINY, ["rollout.group_size=1", "algorithm.updates_per_step=3"])
    assert config is None and len(problems) == 2
    assert load_config_or_problems(TINY) == (load_config(TINY), [])


def test_ranks_that_cannot_share_a_sequence() -> None:
    config = load_config(TINY, ["optimizer.sequence_parallel=4"])
    check_sequence_parallel(config.optimizer, 4, 2, 8)
    check_sequence_parallel(config.optimizer, 28, 8, 8)
    for shape in ((14, 2, 8), (28, 4, 6)):
        message = refusal(check_sequence_parallel, config.optimizer, *shape)
        assert message.startswith("optimizer.sequence_parallel = 4") and message.endswith("use one of 1, 2")


def test_the_text_is_promised_unless_libraries_round_it() -> None:
    half, free = "model.dtype=bfloat16", "model.batch_invariant=false"
    assert all(load_config(TINY, given).is_exact for given in ([], [half], [free], [half, free, "model.device=cpu"]))
    assert not load_config(TINY, [half, free]).is_exact


# --- round trip ---


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES)
@example("\x7f")
def test_values_read_back_as_they_were_written(value: Any) -> None:
    assert tomllib.loads(f"_ = {toml_value(value)}")["_"] == value


# --- the command ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no launcher's variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_dry_run_prints_the_plan_and_writes_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(TINY), "run.num_steps=7", "--dry-run", "run.ranks=4"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    plan, _, toml = out.partition("\n\n")
    assert "7 steps on 4 ranks" in plan and "qwen2, 8 layers of width 128" in plan and "32 samples a rank" in plan
    assert parse_config(tomllib.loads(toml)) == load_config(TINY, ["run.num_steps=7", "run.ranks=4"])
    assert list(here.iterdir()) == []


# --- saved configurations ---


def test_a_configuration_that_another_version_saved_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load_config(TINY)).replace("[data]", "[data]\nprompt_kye = 3"))
    message = refusal(load_saved_config, path)
    assert message.startswith(f"{path}, which the run saved: unknown key 'data.prompt_kye'; did you mean")
    assert message.endswith("open the run with its commit)")
    (tmp_path / "environment.jsonl").write_text('{"commit": "12"}\n{"commit": "e26e4e3"}\n')
    assert refusal(load_saved_config, path).endswith("open the run with its commit, e26e4e3)")


def test_a_saved_run_resumes_with_removed_keys_at_the_values_that_are_constant_now(tmp_path: Path) -> None:
    path, now = tmp_path / "config.toml", load_config(TINY)
    tree = tomllib.loads(to_toml(now))
    for key, value in _CONSTANT_NOW.items():
        section, _, name = key.partition(".")
        tree[section][name] = 0.5 if value is _ANY else value
    lines = [
        f"[{section}]\n" + "".join(f"{k} = {toml_value(v)}\n" for k, v in keys.items())
        for section, keys in tree.items()
    ]
    path.write_text("\n".join(lines))
    assert load_saved_config(path) == load_config(path) == now
    path.write_text(to_toml(now).replace("[optimizer]", "[optimizer]\nfreeze_router = true"))
    assert "unknown key 'optimizer.freeze_router', which was removed" in refusal(load_saved_config, path)


def test_a_resumed_run_may_change_what_decides_no_token(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load_config(TINY)))
    check_resumable(path, load_config(TINY, ["run.num_steps=99", "rollout.max_live=2"]))
    said = refusal(check_resumable, path, load_config(TINY, ["run.seed=1"]))
    assert "a run with run.seed = 0, now 1: resume with the old value or" in said
    said = refusal(check_resumable, path, load_config(TINY, ["run.seed=1", "rollout.temperature=0.5"]))
    assert "temperature = 1.0, now 0.5: resume with the old values or" in said
    # a learning rate that falls to the run's end depends on its length
    path.write_text(to_toml(load_config(TINY, ["optimizer.schedule=linear", "run.num_steps=50"])))
    said = refusal(check_resumable, path, load_config(TINY, ["optimizer.schedule=linear", "run.num_steps=60"]))
    assert "a run with run.num_steps = 50, now 60: resume with the old value or" in said


# --- tlt keys, docs/configuration.md and bounds ---


def test_the_page_of_the_keys_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """``tlt keys --markdown > docs/configuration.md`` writes it."""
    assert main(["keys", "--markdown"]) == 0
    assert capsys.readouterr().out == (TINY.parents[1] / "docs" / "configuration.md").read_text()


def test_every_key_has_a_meaning_and_there_are_few_enough() -> None:
    keys = [key for section in SECTIONS for key in keys_of(section)]
    assert all(key.meaning.endswith(".") and key.values for key in keys)
    assert len(keys) <= MAX_KEYS


SCHEMA = Config.model_json_schema()


def schema_leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number, text, list and table of the configuration by its key, as JSON Schema has it."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    for name, inner in node.get("properties", {}).items():
        yield from schema_leaves(inner, f"{path}.{name}".lstrip("."))
    for inner in [*node.get("anyOf", []), *([node["items"]] if "items" in node else [])]:
        yield from schema_leaves(inner, path)
    if node.get("type") in ("integer", "number", "string", "array") and not {"enum", "const"} & set(node):
        yield path, node


def test_every_number_is_bounded_on_both_sides_and_every_text_and_list_in_length() -> None:
    for path, node in schema_leaves(SCHEMA):
        if node["type"] in ("string", "array"):
            assert "maxLength" in node or "maxItems" in node, path
            continue
        low, high = (node.get(name, node.get(f"exclusive{name.title()}")) for name in ("minimum", "maximum"))
        assert low is not None and high is not None and -(2**63) <= low < high <= 2**63, path


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: needs root")
def test_a_function_that_another_users_file_names_is_run_only_if_the_command_names_it(tmp_path: Path) -> None:
    """The folder can be viewed and evaluated as any other."""
    path = tmp_path / "job.toml"
    path.write_text(TINY.read_text())
    named = ["reward.default=judge me.py:score"]
    path.write_text(to_toml(load_config(path, named)))
    assert load_config(path).reward.default == "judge me.py:score"
    os.chown(path, 12345, -1)
    said = "belongs to another user and names code to run; if you trust it, add 'reward.default=judge me.py:score' to"
    assert all(said in refusal(read, path) for read in (load_config, load_config_or_problems))
    assert load_config(path, named).reward.default == load_saved_config(path).reward.default
    path.write_text(to_toml(load_config(path, ["reward.default=boxed"])))
    load_config(path)
    further = 'reward.weights={"a.py:f" = 0.5}'
    path.write_text(to_toml(load_config(path, [*named, further])))
    assert refusal(load_config, path, [further]).endswith(said + " the command")
    assert refusal(load_config, path, named).endswith("""add 'reward.weights={"a.py:f" = 0.5}' to the command""")
    assert load_config(path, [*named, further]).reward.functions == ("judge me.py:score", "a.py:f")
