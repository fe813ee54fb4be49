"""The configuration: refused values, the round trip, saved configurations, and the command's answers."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tlt_hpc.cli.main import main
from tlt_hpc.config import (
    Config,
    ConfigError,
    apply_override,
    check_learns,
    check_model_limits,
    check_ranks,
    check_sequence_parallel,
    find_problems,
    load_config,
    load_saved_config,
    parse_config,
    to_toml,
)
from tlt_hpc.config.keys import keys_of
from tlt_hpc.config.resume import check_resumable
from tlt_hpc.config.sections import SECTIONS

MAX_KEYS = 100
ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "jobs" / "tiny.toml"


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def refusal(*overrides: str) -> str:
    return refused(lambda: load_config(TINY, overrides))


# --- one line that names the key, the value and the remedy ---


NAME = "use letters, digits, '_', '-' and '.', and none of the last two in front"
STEPS = "run.num_steps=9 algorithm.updates_per_step=2"
KINDS = '"boxed", "math", "numeric", "choice", "format", "code" or path.py:name'
LEAVE = "leave it out"
NUL = "no file has a NUL character in its name; leave it out"
LARGE = "an integer of thousands of digits; use a smaller one"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.task_size=3", "unknown key 'data.task_size'; did you mean 'data.task_args'?"),
        ("lora.zzz=1", "unknown key 'lora.zzz'; valid keys: lora.rank, lora.alpha"),
        (
            "rollout.min_new_tokens=0",
            "unknown key 'rollout.min_new_tokens', which was removed: a response ends where the policy ends it; "
            f"{LEAVE}",
        ),
        ("drafter.min_idle=1", f"unknown key 'drafter.min_idle', which was removed: it is always 1 now; {LEAVE}"),
        (
            "tracking.wandb=offline",
            "unknown section 'tracking', which was removed: use run.trackers = ['tensorboard', 'wandb-offline'], or "
            "one of them",
        ),
        (
            'run.trackers=["wandb", "wandb-offline"]',
            "run.trackers = ['wandb', 'wandb-offline'] names a tracker twice; name each once",
        ),
        ("reward.by_source=math", f"reward.by_source = 'math': use a table of {KINDS}"),
        ("rollout.group_size=eight", "rollout.group_size = 'eight': use a whole number from 1 to 1024"),
        ('run.folder="a\\u0000b"', f"run.folder = 'a\\x00b': {NUL}"),
        (
            "data.split=dev",
            "unknown key 'data.split', which was removed: training reads the split 'train' of a folder; give another's "
            "folder in data.source, or a pattern",
        ),
        ("rollout.temperature=1e-308", "rollout.temperature = 1e-308: use 0, or a number from 0.001 to 100"),
        (
            "optimizer.gradient_checkpointing=yes",
            "optimizer.gradient_checkpointing = 'yes': use true, false or \"auto\"",
        ),
        ("optimizer.offload=all", "optimizer.offload = 'all': use true, false or \"parameters\""),
        ("algorithm.clip=0.2", 'algorithm.clip = 0.2: use a list of 2 numbers from 0 to 1000000 or "auto"'),
        ("algorithm.overlong=-1", 'algorithm.overlong = -1: use a whole number from 0 or "mask"'),
        (
            "algorithm.rollout_correction={mis=[1]}",
            'algorithm.rollout_correction = {\'mis\': [1]}: use "none", "tis", "mis", "icepop" or table of lists of 2 '
            "numbers from 0 to 1000000",
        ),
        ('data.source=["a\\u0000"]', f"data.source = ['a\\x00']: {NUL}"),
        ("data.source=[]", "data.source = []: use a text or list of one or more texts"),
        ('rollout.stop_strings=[""]', "rollout.stop_strings.0 = '': string should have at least 1 character"),
        (
            "reward.by_source={a='b'}",
            f"reward.by_source = {{'a': 'b'}}: use a table of {KINDS}",
        ),
        ("run.seed=" + "9" * 5000, f"override 'run.seed={'9' * 190}... (5011 characters): {LARGE}"),
    ],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    assert refusal(override) == message


@pytest.mark.parametrize(
    ("overrides", "start", "remedy"),
    [
        ("rollout.group_size=1", "rollout.group_size = 1", "use rollout.group_size of 2 or more, or "),
        ("rollout.group_size=1 algorithm.name=rloo", "rollout.group_size = 1 with algorithm.name = 'rloo'", "of 2 or "),
        ("algorithm.updates_per_step=3", "algorithm.updates_per_step = 3 does not divide the step's 128", "use 1"),
        ("algorithm.updates_per_step=48", "algorithm.updates_per_step = 48 does not divide the step's 128", "use 16"),
        ("optimizer.zero_stage=0 model.dtype=bfloat16", "optimizer.zero_stage = 0", "use optimizer.zero_stage = 1"),
        ("optimizer.offload=true optimizer.zero_stage=0", "optimizer.offload = true", "use optimizer.zero_stage = 1, "),
        (
            "optimizer.offload=parameters",
            "optimizer.offload = 'parameters'",
            "zero_stage = 3, or optimizer.offload = true",
        ),
        ("optimizer.offload=parameters optimizer.zero_stage=0", "optimizer.offload = 'parameters'", "zero_stage = 3, "),
        (f"optimizer.schedule=cosine optimizer.warmup_steps=18 {STEPS}", "optimizer.warmup_steps = 18", "lower it"),
        ("algorithm.overlong=513", "algorithm.overlong = 513 exceeds rollout.max_new_tokens = 512", "lower it"),
        ("evaluation.max_new_tokens=513 evaluation.every_steps=1", "evaluation.max_new_tokens = 513 ex", "lower it"),
        ("evaluation.temperature=0", "evaluation.temperature = 0", "use evaluation.samples = 0"),
        ("evaluation.every_steps=1 data.source=a.jsonl", "evaluation.every_steps = 1", "name files in evaluation.so"),
        ("algorithm.clip=[1.5,0.2]", "algorithm.clip = [1.5, 0.2]", "use at most 1.0 as the first"),
        ("algorithm.clip_dual=1.2", "algorithm.clip_dual = 1.2 is within", "use a larger ratio, such as 3.0, or 0"),
        ("algorithm.clip_dual=3 algorithm.name=cispo", "algorithm.clip_dual = 3", "leave it out"),
        ("algorithm.rollout_correction={mis=[3,2]}", "algorithm.rollout_correction has the bounds [3", "the "),
        ("algorithm.rollout_correction={mis=[0,0]}", "algorithm.rollout_correction has the bounds [0", "the "),
        ("algorithm.kl_estimator=k1 algorithm.kl_coefficient=0.1", "algorithm.kl_estimator = 'k1'", "'k3', or another"),
        ("algorithm.max_refills=1 algorithm.name=reinforce++", "algorithm.max_refills = 1", "use another algorithm"),
        ("algorithm.max_refills=1 rollout.temperature=0", "algorithm.max_refills = 1", "a temperature above 0"),
        ("data.task_args={a=1}", "data.task_args = {'a': 1} has no effect", "use data.source = 'reasoning-gym:NAME'"),
        (
            "data.template_args={tools=[]}",
            "data.template_args has 'tools', which every prompt is rendered with",
            "leave",
        ),
        (
            "data.template_args={continue_final_message='yes'}",
            "data.template_args.continue_final_message = 'yes'",
            "give true or false",
        ),
        ("data.task_args={a=2024-07-26}", "data.task_args.a = datetime.date(2024, 7, 26)", "valid JSON value"),
        (
            "reward.function=a.py:f",
            "unknown key 'reward.function', which was removed",
            "name a function itself in",
        ),
        ("reward.default=function", "reward.default = 'function'", '"code" or path.py:name'),
        ("reward.default=rewards.f", "reward.default = 'rewards.f'", '"code" or path.py:name'),
        ("reward.default=format", "reward.format_tags = []", "set format_tags"),
        ("reward.weights={format=0.1}", "reward.format_tags = []", "set format_tags"),
        ("reward.format_weight=0.1", "unknown key 'reward.format_weight', which was removed", "use reward.weights = {"),
        ("reward.format_tags=['a']", "reward.format_tags = ['a']", "'format' in reward.weights or as a kind"),
        ("reward.weights={answer=0,'a.py:f'=0}", "reward.weights = {'answer': 0.0, 'a.py:f': 0.0} makes", "another"),
        ("reward.weights={'rewards.f'=1}", "reward.weights names 'rewards.f'", "as 'path.py:name'"),
        ("reward.weights={'a.py:f'=1,'b.py:f'=1}", "reward.weights names 'b.py:f', and another part", "rename"),
        ("reward.weights={'a.py:answer'=1}", "reward.weights names 'a.py:answer', and another part", "rename"),
        ("run.folder=~/runs", "run.folder = '~/runs'", "give the path itself"),
        ("run.folder=/a/${USER}/runs", "run.folder = '/a/${USER}/runs'", "give the path itself"),
        ("model.path=~/models/Qwen", "model.path = '~/models/Qwen'", "give the path itself"),
        ("reward.format_tags=['a','a'] reward.default=format", "reward.format_tags = ['a', 'a'] names a", "once"),
    ],
)
def test_contradicting_values_are_refused_with_a_remedy(overrides: str, start: str, remedy: str) -> None:
    message = refusal(*overrides.split())
    assert message.startswith(start) and remedy in message[len(start) :], message


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
        "algorithm.kl_estimator=k1 algorithm.kl_coefficient=0.1 algorithm.name=dr-grpo",
        "algorithm.clip=[1.0,0.2] algorithm.updates_per_step=128",
        "reward.format_tags=['a'] reward.weights={'format'=0.1}",
        "reward.weights={'answer'=0,'a.py:f'=-1,'a.py:g'=0}",
        "reward.by_source={'a?'='math','a*'='code','*]'='math','x[ab]'='code','ab'='code'}",
        "reward.by_source={'a*'='math','ab*'='numeric'}",
    ],
)
def test_values_at_the_bounds_of_the_checks_are_accepted(overrides: str) -> None:
    config = load_config(TINY, overrides.split()).model_dump(mode="json")
    for override in overrides.split():
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        is_bare = value[0].isalpha() and value != "true"
        assert config[section][name] == (value if is_bare else tomllib.loads(f"_ = {value}")["_"])


def test_all_problems_are_found_at_once() -> None:
    config, problems = find_problems(TINY, ["rollout.top_p=0.0", "run.seed=-1"])
    assert config is None and [str(problem).partition(" ")[0] for problem in problems] == ["run.seed", "rollout.top_p"]
    config, problems = find_problems(TINY, ["rollout.group_size=1", "algorithm.updates_per_step=3"])
    assert config is None and len(problems) == 2
    assert find_problems(TINY) == (load_config(TINY), [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run\n", "is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 5); fix it"),
        (b"run = 3\n", "run = 3: write it as a table, with keys of its own"),
        (b"", "missing section [run]; add it to the file (`tlt keys run`)"),
    ],
)
def test_files_that_are_no_job(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    assert message in refused(lambda: load_config(tmp_path / "a.toml"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "nowhere", "No such file or directory"), (tmp_path, "Is a directory")):
        assert refused(lambda path=path: load_config(path)) == (
            f"config file {path}: {reason}; give the path of a TOML file such as jobs/tiny.toml"
        )


# --- the model and the ranks ---


@pytest.mark.parametrize(
    ("override", "num_ranks", "problem", "remedy"),
    [
        ("run.seed=0", 3, "rollout.prompts_per_step = 16 is not divisible by 3 ranks", 15),
        ("run.seed=0", 32, "rollout.prompts_per_step = 16 is not divisible by 32 ranks", 32),
        ("rollout.shard=sample", 3, "rollout.prompts_per_step x rollout.group_size = 128 is not divisible by 3", 126),
        ("rollout.tensor_parallel=6", 4, "rollout.tensor_parallel = 6 does not divide 4 ranks", 2),
    ],
)
def test_ranks_that_do_not_divide(override: str, num_ranks: int, problem: str, remedy: int) -> None:
    message = refused(lambda: check_ranks(load_config(TINY, [override]), num_ranks))
    assert message.startswith(problem) and message.endswith(
        f"ranks; set it to {remedy}, or use another number of ranks"
    )


def test_ranks_that_cannot_share_a_sequence() -> None:
    config = load_config(TINY, ["optimizer.sequence_parallel=4"])
    check_sequence_parallel(config.optimizer, 4, 2, 8)
    check_sequence_parallel(config.optimizer, 28, 8, 8)
    for shape in ((14, 2, 8), (28, 4, 6)):
        message = refused(lambda shape=shape: check_sequence_parallel(config.optimizer, *shape))
        assert message.startswith("optimizer.sequence_parallel = 4") and message.endswith("use one of 1, 2")


def test_prompts_and_responses_over_the_models_positions() -> None:
    config = load_config(TINY)
    check_model_limits(config, 528)
    start = "data.max_prompt_tokens + rollout.max_new_tokens = 528 exceeds the model's"
    for positions, remedy in ((527, "rollout.max_new_tokens to 511 or less"), (16, "both")):
        message = refused(lambda positions=positions: check_model_limits(config, positions))
        assert message == f"{start} {positions} positions; lower {remedy}"
    config = load_config(TINY, ["data.max_prompt_tokens=1024", "rollout.max_new_tokens=256"])
    message = refused(lambda: check_model_limits(config, 1024))
    assert message.endswith("lower data.max_prompt_tokens to 768 or less"), "the default with a small model"


def test_responses_that_are_all_alike_teach_nothing() -> None:
    check_learns(load_config(TINY))
    check_learns(load_config(TINY, ["rollout.temperature=0", "algorithm.name=reinforce++"]))
    message = refused(lambda: check_learns(load_config(TINY, ["rollout.temperature=0"])))
    assert message.startswith("rollout.temperature = 0.0") and message.endswith("use a temperature above 0")


# --- overrides ---


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.9", 0.9), ("3", 3), ("true", True), ("[2, 4]", [2, 4]), ('"0.9"', "0.9"), ("a/B-2.5", "a/B-2.5"), ("", "")],
)
def test_an_override_is_toml_or_a_bare_string(text: str, value: Any) -> None:
    tree: dict[str, Any] = {"section": {"kept": 1}}
    apply_override(tree, f"section.key={text}")
    assert tree == {"section": {"kept": 1, "key": value}}
    assert type(tree["section"]["key"]) is type(value)


@pytest.mark.parametrize("override", ["temperature", "a.b.c=1", ".b=1", "a.=1", "=1", ""])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    assert refused(lambda: apply_override({}, override)) == (
        f"override {override!r} is not of the form section.key=value, e.g. rollout.temperature=0.9"
    )


def test_the_text_is_promised_unless_libraries_round_it() -> None:
    half, free = "model.dtype=bfloat16", "model.batch_invariant=false"
    assert all(load_config(TINY, given).is_exact for given in ([], [half], [free], [half, free, "model.device=cpu"]))
    assert not load_config(TINY, [half, free]).is_exact


# --- round trip ---


def keys() -> Iterator[tuple[str, str, Any]]:
    for section, field in Config.model_fields.items():
        assert field.annotation is not None
        assert issubclass(field.annotation, BaseModel)
        for key, inner in field.annotation.model_fields.items():
            yield section, key, inner.annotation


def values_for(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a key's type, whether or not its bounds allow them."""
    simple = {
        bool: st.booleans(),
        int: st.integers(1, 2**63 - 1),
        float: st.floats(0, 1e300, allow_nan=False),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    }
    if annotation in simple:
        return simple[annotation]
    if get_origin(annotation) is dict:
        names = [name for name in get_args(get_args(annotation)[1]) if isinstance(name, str)]
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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may have other work
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
    path.write_text(to_toml(load_config(TINY)).replace("[data]", "[data]\ntask_size = 3"))
    message = refused(lambda: load_saved_config(path))
    assert message.startswith(f"{path}, which the run saved: unknown key 'data.task_size'; did you mean")
    assert message.endswith("open the run with its commit)")
    (tmp_path / "environment.jsonl").write_text('{"commit": "12"}\n{"commit": "e26e4e3"}\n')
    assert refused(lambda: load_saved_config(path)).endswith("open the run with its commit, e26e4e3)")


def test_a_saved_run_resumes_with_removed_keys_at_the_values_that_are_constant_now(tmp_path: Path) -> None:
    path, now = tmp_path / "config.toml", load_config(TINY)
    path.write_text(to_toml(now).replace("[optimizer]", "[optimizer]\nweight_decay = 0.0"))
    assert load_saved_config(path) == now
    path.write_text(to_toml(now).replace("[rollout]", "[rollout]\nmin_p = 0.0\nmin_new_tokens = 0"))
    assert load_saved_config(path) == now
    path.write_text(to_toml(now).replace("[optimizer]", "[optimizer]\nweight_decay = 0.1"))
    assert "unknown key 'optimizer.weight_decay', which was removed" in refused(lambda: load_saved_config(path))


def test_a_resumed_run_may_change_what_decides_no_token(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load_config(TINY)))
    check_resumable(path, load_config(TINY, ["run.num_steps=99", "rollout.max_live=2"]))
    with pytest.raises(ConfigError, match=r"a run with run.seed = 0, now 1: resume with the old value or"):
        check_resumable(path, load_config(TINY, ["run.seed=1"]))
    with pytest.raises(ConfigError, match=r"temperature = 1.0, now 0.5: resume with the old values or"):
        check_resumable(path, load_config(TINY, ["run.seed=1", "rollout.temperature=0.5"]))


def test_a_run_whose_learning_rate_falls_to_its_end_keeps_its_length(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load_config(TINY, ["optimizer.schedule=linear", "run.num_steps=50"])))
    check_resumable(path, load_config(TINY, ["optimizer.schedule=linear", "run.num_steps=50", "rollout.max_live=2"]))
    with pytest.raises(ConfigError, match=r"a run with run.num_steps = 50, now 60: resume with the old value or"):
        check_resumable(path, load_config(TINY, ["optimizer.schedule=linear", "run.num_steps=60"]))


# --- tlt keys, docs/configuration.md and bounds ---


def test_the_page_of_the_keys_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """``tlt keys --markdown > docs/configuration.md`` writes it."""
    assert main(["keys", "--markdown"]) == 0
    assert capsys.readouterr().out == (TINY.parent.parent / "docs" / "configuration.md").read_text()


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
    with pytest.raises(ConfigError, match=said):
        load_config(path)
    with pytest.raises(ConfigError, match=said):
        find_problems(path)
    assert load_config(path, named).reward.default == load_saved_config(path).reward.default
    path.write_text(to_toml(load_config(path, ["reward.default=boxed"])))
    load_config(path)
    further = 'reward.weights={"a.py:f" = 0.5}'
    path.write_text(to_toml(load_config(path, [*named, further])))
    with pytest.raises(ConfigError, match=said + " the command$"):
        load_config(path, [further])
    with pytest.raises(ConfigError, match=r"""add 'reward.weights=\{"a.py:f" = 0.5\}' to the command$"""):
        load_config(path, named)
    assert load_config(path, [*named, further]).reward.functions == ("judge me.py:score", "a.py:f")
