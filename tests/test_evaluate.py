"""tlt evaluate: the same responses with any speculation and ranks, resuming, refused settings, and results."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_sets import gcd_row, write_parquet
from fake_world import OneRank
from launch_ranks import run_on_ranks
from tiny import embedded_folder

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.cli.main import main, parse
from tlt_hpc.cluster.stopping import Stop
from tlt_hpc.common.records import FinishReason, Prompt, SamplingParams, Stream
from tlt_hpc.config import ConfigError, RewardSection, UserError, load_config, to_toml
from tlt_hpc.data.evaluation_sets import EvaluationSet
from tlt_hpc.evaluate import exam as exam_module
from tlt_hpc.evaluate.evaluate import EvaluationResult, run_evaluation_all_ranks
from tlt_hpc.evaluate.exam import Exam, replica_share_of_requests, requests_by_prompt
from tlt_hpc.evaluate.folder import EvaluationFolder
from tlt_hpc.evaluate.metrics import RIGHT
from tlt_hpc.evaluate.subject import evaluation_config, find_subject
from tlt_hpc.evaluate.tally import aggregate_responses, votes_by_answer
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.tokenizer import load_tokenizer, package_asset_folder
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.scorer import Judge, open_process_judge
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import JudgedResponse, read_responses

ROOT = Path(__file__).parent.parent
TINY = ROOT / "jobs" / "tiny.toml"
SMALL = ("evaluation.limit=10", "evaluation.samples=3", "rollout.max_new_tokens=160")
TOTAL = 40


class Killed(BaseException):
    """Stands for a kill: nothing catches it and nothing is saved."""


class Reporter:
    """Silent; raises ``Killed`` or asks to stop when there are ``at`` files of responses."""

    def __init__(self, at: int | None = None, world: World | None = None) -> None:
        self._at, self._world = at, world
        self.num_done = -1
        self.num_answering = 0
        self._folder = Path()

    def show_start(self, name, folder, num_responses, num_done, warning):
        self.num_done, self._folder = num_done, folder

    def show_progress(self, roster):
        self.num_answering += 1
        if self._at is not None and len(list(self._folder.glob("responses/*.h5"))) >= self._at:
            if self._world is None:
                raise Killed
            self._world.flag.request(Stop.ASKED, "test")


def start(
    folder: Path, *overrides: str, place: str = "embedded:tiny", reporter: Reporter | None = None, world=None, step=None
) -> EvaluationResult:
    subject = find_subject(place, step, folder / "evaluation")
    config = evaluation_config(load_config(TINY, [f"run.folder={folder}", *SMALL, *overrides]), subject)
    return run_evaluation_all_ranks(config, subject, world or World.connect(), reporter or Reporter())


def tokens_in(folder: Path) -> dict:
    responses = EvaluationFolder(folder / "evaluation").read_all_responses()
    return {tuple(vars(key).values()): (r.tokens.tolist(), r.reward) for key, r in responses.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, EvaluationResult]:
    """A small evaluation without speculation and without a break."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, start(folder, "speculation.mode=plain")


def test_it_answers_every_prompt_greedily_and_by_sampling(plain):
    folder, result = plain
    assert result.results is not None and result.num_generated == TOTAL
    figures = result.results.figures["gcd"]
    assert (figures.num_prompts, figures.num_samples, sorted(figures.pass_at)) == (10, 3, [2, 3])
    found = tokens_in(folder)
    rights: dict[int, list[float]] = {}
    for (*_, draw, sample), (_, reward) in found.items():
        if sample:
            rights.setdefault(draw, []).append(reward)
    assert figures.mean is not None
    assert figures.mean.value == pytest.approx(sum(map(sum, rights.values())) / 30)
    assert figures.pass_at[3].value == sum(any(each) for each in rights.values()) / 10
    assert result.results.accept_length == 1.0
    tree = json.loads((folder / "evaluation" / "results.json").read_text())
    assert tree["sets"]["gcd"]["mean"]["value"] == figures.mean.value
    assert tree["evaluation.temperature"] == 0.6


@pytest.mark.parametrize("mode", ["ngram", "full"])
def test_speculation_changes_no_token(plain, tmp_path, mode):
    result = start(tmp_path, f"speculation.mode={mode}", "rollout.max_live=7")
    # how often drafts are chosen depends on measured times
    assert result.results is not None and result.results.accept_length > 1.0
    assert tokens_in(tmp_path) == tokens_in(plain[0])


def on_a_rank(folder: str, *overrides: str) -> int:
    world = World.connect()
    result = start(Path(folder), *overrides, world=world)
    leave_process_group()
    return result.num_generated


@pytest.mark.mpi
@pytest.mark.parametrize("overrides", [[], pytest.param(["rollout.tensor_parallel=2"], marks=pytest.mark.ci)])
def test_neither_ranks_nor_replicas_change_a_token(plain, tmp_path, overrides):
    assert run_on_ranks(2, on_a_rank, str(tmp_path), *overrides) == [TOTAL, TOTAL]
    assert tokens_in(tmp_path) == tokens_in(plain[0])


def test_a_finished_one_generates_nothing_and_says_the_same(plain):
    folder, first = plain
    reporter = Reporter()
    again = start(folder, "speculation.mode=ngram", reporter=reporter)
    assert (again.num_generated, reporter.num_answering, again.results) == (0, 0, first.results)
    assert len((folder / "evaluations.jsonl").read_text().splitlines()) == 1


def test_a_killed_one_goes_on_where_it_was(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(exam_module, "PIECE_RESPONSES", 6)
    with pytest.raises(Killed):
        start(tmp_path, reporter=Reporter(at=2))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("evaluation/responses/*.h5")}
    there = len(EvaluationFolder(tmp_path / "evaluation").read_all_responses())
    assert 12 <= there < TOTAL and not (tmp_path / "evaluation" / "results.json").exists()
    result = start(tmp_path)
    assert result.num_generated == TOTAL - there
    assert result.results is not None and plain[1].results is not None
    assert result.results.figures == plain[1].results.figures
    assert tokens_in(tmp_path) == tokens_in(plain[0])
    files = list(tmp_path.glob("evaluation/responses/*.h5"))
    assert sum(len(read_responses(path)) for path in files) == TOTAL  # none was made twice
    assert before.items() <= {p: p.stat().st_mtime_ns for p in tmp_path.glob("evaluation/responses/*.h5")}.items()


def test_a_damaged_file_is_made_again(plain, tmp_path, caplog):
    shutil.copytree(plain[0] / "evaluation", tmp_path / "evaluation")
    path = next((tmp_path / "evaluation" / "responses").glob("*.h5"))
    path.write_bytes(path.read_bytes()[:-100])
    result = start(tmp_path, "speculation.mode=plain")
    assert result.num_generated == TOTAL and "damaged evaluation log" in caplog.text
    assert tokens_in(tmp_path) == tokens_in(plain[0])


def test_another_evaluation_in_the_folder_is_refused(plain):
    for override, what in (
        ("evaluation.max_new_tokens=50", "evaluation.max_new_tokens = 160, now 50"),
        ("reward.default=numeric", "reward.default = 'boxed', now 'numeric'"),
        ("data.answer_key=other", "data.answer_key = '', now 'other'"),
    ):
        with pytest.raises(UserError, match=re.escape(f"holds an evaluation with {what}; use what it was, or give")):
            start(plain[0], override)


def test_other_end_tokens_are_another_evaluation(tmp_path):
    """A user whose responses never ended, and who has corrected generation_config.json, gets no old results."""
    model = shutil.copytree(package_asset_folder("tiny"), tmp_path / "model")
    few = "evaluation.limit=1", "evaluation.samples=0", "evaluation.max_new_tokens=4"
    start(tmp_path, *few, place=str(model))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    with pytest.raises(UserError, match=re.escape("the model's end tokens = [1], now [1, 2]; use what it was, or")):
        start(tmp_path, *few, place=str(model))


def test_sets_and_the_sources_within_them(tmp_path):
    """Two sources in one file, and a file of mathematics."""
    rows = [gcd_row(n, data_source=f"part{n % 2}") for n in range(2, 8)]
    mixed = str(write_parquet(tmp_path / "mixed.parquet", rows))
    rows = [gcd_row(n, data_source="fractions") for n in (3, 4)]
    fractions = str(write_parquet(tmp_path / "fractions.parquet", rows))
    options = "evaluation.samples=2", "evaluation.limit=0", 'reward.by_source={"fractions"="math"}'
    result = start(tmp_path, f"evaluation.sources={json.dumps([mixed, fractions])}", *options)
    assert result.results is not None
    figures = result.results.figures
    assert {name: each.num_prompts for name, each in figures.items()} == {
        "mixed": 6, "mixed/part0": 3, "mixed/part1": 3, "fractions": 2,
    }  # fmt: skip
    assert figures["fractions"].majority is not None
    # a set alone has the same responses
    other = tmp_path / "alone"
    other.mkdir()
    start(other, f"evaluation.sources={json.dumps([fractions])}", *options)
    assert tokens_in(other).items() <= tokens_in(tmp_path).items() and len(tokens_in(other)) == 6


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run with a checkpoint of step 2: the embedded model's weights."""
    run = RunFolder(tmp_path / "tiny")
    run.make_missing_folders()
    run.config.write_text(to_toml(load_config(TINY, [f"run.folder={tmp_path}"])))
    weights = {f"{name}.master": tensor.float() for name, tensor in read_folder_weights(embedded_folder())}
    CheckpointStore(run.checkpoints, keep=2).save(2, OneRank(), {"policy": weights}, {})
    return run


def refused(tmp_path: Path, run: RunFolder, step: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        start(tmp_path, place=str(run.path), step=step)
    assert "\n" not in str(caught.value) and not list((tmp_path / "evaluation").glob("*"))
    return str(caught.value)


def test_checkpoints_that_are_not_there(run, tmp_path):
    said = f"no such checkpoint in {run.checkpoints}, which has step 2; use one that is there"
    assert refused(tmp_path, run, 0) == refused(tmp_path, run, 7) == said
    (damaged,) = run.checkpoints.glob("step-000002/*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert f"step-000002 is damaged ({damaged.name}: 100 bytes, of " in refused(tmp_path, run, 2)
    shutil.rmtree(run.checkpoints)
    assert refused(tmp_path, run) == f"{run.path} has no checkpoint yet; train on until it has saved one"
    with pytest.raises(UserError, match="or the folder of a run; give a folder of its own"):
        find_subject("embedded:tiny", None, run.path)


def test_a_checkpoint_of_another_model_than_the_folder_has(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(embedded_folder(), model)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 9, "layer_types": None}))
    run.config.write_text(run.config.read_text().replace("embedded:tiny", str(model)))
    message = refused(tmp_path, run)
    assert message.startswith(f"{run.path}, step 2 does not fit model.path = '{model}': ")
    assert "weights lack 'model.layers.8.input_layernorm.weight' and 11 more" in message


def test_the_dry_run_prints_the_plan(tmp_path, capsys):
    assert main(["evaluate", "embedded:tiny", str(TINY), f"run.folder={tmp_path}", *SMALL, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "data        gcd (10 prompts)" in said
    assert "answers     greedily and 3 times at temperature 0.6, top-p 0.95, at most 160 tokens" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ((), []),
        (("--step", "2"), []),
        (("evaluation.limit=3", "--step", "2", "run.seed=4"), ["evaluation.limit=3", "run.seed=4"]),
    ],
)
def test_a_run_is_evaluated_by_its_own_configuration_if_none_is_given(run, words, overrides):
    options = parse(["evaluate", str(run.path), *words])
    assert (options.config, options.overrides) == (str(run.config), overrides)
    other = parse(["evaluate", str(run.path), *words, "jobs/other=1.toml"])
    assert (other.config, other.overrides) == ("jobs/other=1.toml", overrides)
    assert main(["evaluate", str(run.path), *words, "--dry-run"]) == 0
    for mistyped in ("evaluation.samples", "samples=3"):
        assert parse(["evaluate", str(run.path), *words, mistyped]).overrides[-1] == mistyped


def test_a_stopped_one_keeps_what_it_has_and_more_samples_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(exam_module, "PIECE_RESPONSES", 6)
    world = World.connect()
    result = start(tmp_path, "evaluation.samples=1", reporter=Reporter(at=1, world=world), world=world)
    assert not result.finished and result.reason == "test"
    there = len(EvaluationFolder(tmp_path / "evaluation").read_all_responses())
    assert result.num_generated == there > 0 and result.num_left == 20 - there
    assert start(tmp_path, "evaluation.samples=2", "evaluation.limit=12").num_generated == 12 * 3 - there


def test_an_evaluation_of_other_facts_is_replaced(tmp_path, caplog):
    folder = EvaluationFolder(tmp_path / "step-000002")
    folder.path.mkdir()
    folder.check_and_save_settings({"evaluation.seed": 0})
    (folder.path / "results.json").touch()
    assert (
        folder.check_and_save_settings({"evaluation.seed": 1}, replaces=True) == set() and not folder.results.exists()
    )
    assert caplog.messages == [f"{folder.path} holds an evaluation with evaluation.seed = 0, now 1: evaluated again"]
    folder.facts.write_text("{")
    with pytest.raises(ConfigError, match=r"evaluation\.json is damaged; delete .*step-000002 to evaluate again"):
        folder.check_and_save_settings({})


def test_mathematics_votes_by_meaning():
    judge = open_process_judge(RewardSection(default="math"))
    assert judge.client is not None
    judge.client.wait_until_ready()
    same = [r"\boxed{\frac{1}{2}}", "so it is 0.5"], [r"$\frac{3}{4}$ then", r"\boxed{\dfrac{3}{4}}"]
    texts = [*same[0], *same[1], "who knows", r"\boxed{7}"]
    votes = votes_by_answer(judge, "math", texts, [False] * 5 + [True])
    assert votes is not None and votes[0] == votes[1] != votes[2] == votes[3] and None not in votes[:4]
    assert votes[4:] == [None, RIGHT]


def test_a_program_that_fails_is_a_wrong_answer_and_not_one_that_was_not_judged():
    section = RewardSection(default="own.py:f", by_source={"programs": "code"})
    prompts = tuple(Prompt(np.array([2], np.int32), "", "", source) for source in ("programs", "others"))
    sets = (EvaluationSet("a", (0, 1), prompts, ""),)
    exam = Exam(sets, requests_by_prompt(load_config(TINY, ["evaluation.samples=0"]), sets), Judge(section, None))
    keys = [request.key for each in exam.wanted for request in each.requests]
    failed = {key: JudgedResponse(key, np.array([2], np.int32), FinishReason.EOS, 1, 0.0, "cpu") for key in keys}
    results = aggregate_responses(exam, failed, load_tokenizer(package_asset_folder("tiny")), ())
    assert results.figures["a/programs"].greedy.value == 0.0 and results.failures == {"cpu": 1}


@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_the_replicas_share_what_is_missing_evenly(num_ranks):
    missing = list(range(957))
    shares = [replica_share_of_requests(missing, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(number for share in shares for number in share) == missing
    assert max(map(len, shares)) <= 1.3 * len(missing) / num_ranks
    neighbours = sum(b - a == 1 for share in shares for a, b in itertools.pairwise(share))
    assert neighbours >= len(missing) / 3 or num_ranks == 64


def test_what_is_asked_of_the_engine():
    changes = "evaluation.samples=2", "rollout.stop_strings=['x']", "rollout.top_k=5"
    prompt = Prompt(np.array([2], np.int32), "", "", "")
    (wanted,) = requests_by_prompt(load_config(TINY, changes), [EvaluationSet("a", (7,), (prompt,), "")])
    greedy = SamplingParams(512, temperature=0.0, stop_strings=("x",))
    sampled = SamplingParams(512, temperature=0.6, top_p=0.95, stop_strings=("x",))
    assert [request.params for request in wanted.requests] == [greedy, sampled, sampled]
    keys = [(key.seed, key.stream, key.draw, key.sample) for key in (request.key for request in wanted.requests)]
    assert keys == [(0, Stream.EVALUATION, 7, sample) for sample in range(3)]
