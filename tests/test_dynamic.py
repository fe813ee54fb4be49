"""Dynamic sampling: which groups are informative, what replaces the others, and that runs with refills resume."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from data_sets import gcd_rows, open_data, texts, write_jsonl
from launch_ranks import ROOT, tlt
from test_run import records, tokens_of
from tiny import embedded_tokenizer

from tlt_hpc.checkpoint.store import CheckpointStore
from tlt_hpc.common.records import Prompt, Stream
from tlt_hpc.config import load_config
from tlt_hpc.data.prompts import open_prompts, shuffled_row_order
from tlt_hpc.rl.draws import StepDraws, groups_to_train_on, informative_groups, refill_size
from tlt_hpc.run.replay import ReplayError, describe_missing_responses
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.step_lines import drop_lines, read_lines

TINY = ROOT / "jobs" / "tiny.toml"


# -- which groups -----------------------------------------------------------------------------------------------------


def test_a_group_teaches_where_its_scores_differ() -> None:
    scores = np.array([1, 1, 0, 0, 0, 1, 0.5, 0.5, 0.25, 0.5], np.float32)
    assert informative_groups(scores, 2).tolist() == [False, False, True, False, True]
    assert informative_groups(scores[:5], 5).tolist() == [True]


@pytest.mark.parametrize(
    ("num_informative", "num_drawn", "wanted", "size"),
    [
        (18, 24, 16, 0),
        (8, 16, 16, 16),  # half of them are informative: 8 / 0.5
        (12, 16, 16, 6),  # 4 / 0.75, rounded up
        (0, 16, 16, 16),  # no larger than the step's own rollout
        (15, 160, 16, 8),  # the share is taken to be an eighth at least
    ],
)
def test_a_refill_draws_what_should_do(num_informative: int, num_drawn: int, wanted: int, size: int) -> None:
    assert refill_size(np.arange(num_drawn) < num_informative, wanted) == size


@pytest.mark.parametrize(
    ("is_informative", "wanted", "kept"),
    [
        ([1, 0, 1, 1], 3, [0, 2, 3]),
        ([0, 1, 1, 1, 1], 3, [1, 2, 3]),  # drawn first, chosen first
        ([0, 1, 0, 0, 1], 3, [0, 1, 4]),  # too few: the first of the others fill up
    ],
)
def test_what_is_trained_on(is_informative: list[int], wanted: int, kept: list[int]) -> None:
    assert groups_to_train_on(np.array(is_informative, bool), wanted).tolist() == kept


# -- which rows -------------------------------------------------------------------------------------------------------


SEED = 1


def answers(prompts: Sequence[Prompt]) -> list[int]:
    return [int(prompt.answer) for prompt in prompts]


def test_a_files_refills_are_in_an_order_of_their_own(tmp_path: Path) -> None:
    source = open_data(write_jsonl(tmp_path / "a.jsonl", gcd_rows(40)), seed=SEED)
    for step in (0, 7):  # 16 places a step, so step 7 begins 8 places before the end of the third epoch
        own = answers(source.draw_step_prompts(step))
        places = [divmod(place, 40) for place in range(16 * step, 16 * step + 16)]
        drawn = [int(shuffled_row_order(40, SEED, epoch, "refill")[place]) + 1 for epoch, place in places]
        assert set(drawn[:10]) & set(own), "or nothing shows that they are left out"
        assert (
            answers(source.draw_refill_prompts(step, 10))
            == [row for row in dict.fromkeys(drawn) if row not in own][:10]
        )


def test_dropped_prompts_come_in_no_refill(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "b.jsonl", [*gcd_rows(6), *[{"prompt": "1," * 20, "answer": "7"}] * 6])
    assert set(answers(open_data(rows, "data.overlong=drop").draw_refill_prompts(0, 20))) == set(range(1, 7))


def test_the_embedded_tasks_refills_are_of_their_step_and_seed() -> None:
    first, other = (open_prompts(load_config(TINY, [f"run.seed={seed}"]), embedded_tokenizer()) for seed in (0, 1))
    drawn = [
        texts(prompts)
        for prompts in (
            first.draw_refill_prompts(0, 8),
            first.draw_refill_prompts(1, 8),
            other.draw_refill_prompts(0, 8),
            first.draw_step_prompts(0),
        )
    ]
    assert all(not set(one) & set(two) for one, two in itertools.combinations(drawn, 2))
    assert texts(first.draw_refill_prompts(0, 3)) == drawn[0][:3]


# -- a step's draws ---------------------------------------------------------------------------------------------------


def make_prompt(number: int) -> Prompt:
    return Prompt(np.array([number], np.int32), str(number), "", "test")


def make_draws(*overrides: str) -> StepDraws:
    """Four prompts of two responses, and refills."""
    own = ["rollout.prompts_per_step=4", "rollout.group_size=2", "algorithm.updates_per_step=1", *overrides]
    prompts: Any = SimpleNamespace(
        draw_step_prompts=lambda step: [make_prompt(1000 * step + number) for number in range(4)],
        draw_refill_prompts=lambda step, count: [make_prompt(1000 * step + 100 + number) for number in range(count)],
    )
    return StepDraws(load_config(TINY, own), prompts, 7)


def test_refills_have_keys_of_their_own_and_end() -> None:
    draws = make_draws("algorithm.max_refills=2", "run.seed=5")
    requests = draws.first_requests()
    assert [(r.key.stream, r.key.draw, r.key.sample) for r in requests[:3]] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    more = draws.draw_refill_requests(np.array([0, 1, 0, 1, 1, 1, 0, 0], np.float32))  # 2 of 4 teach: 2 / 0.5
    assert [(r.key.stream, r.key.step, r.key.draw, r.key.sample) for r in more] == [
        (Stream.REFILL, 7, draw, sample) for draw in range(4) for sample in range(2)
    ]
    assert [int(r.prompt_tokens[0]) for r in more[::2]] == [7100, 7101, 7102, 7103]
    scores = np.array([0, 1, 0, 1, 1, 1, 0, 0] + [0, 0] * 3 + [0, 1], np.float32)  # 3 of 8: one is missing, 1 / 0.375
    last = draws.draw_refill_requests(scores)
    assert [int(r.prompt_tokens[0]) for r in last[::2]] == [7104, 7105, 7106]
    assert not draws.allows_refill()
    assert {r.key.seed for r in [*last, *more, *requests]} == {5} and requests[0].prompt_tokens[0] == 7000
    assert sorted(r.key for r in [*last, *more, *requests]) == [r.key for r in [*requests, *more, *last]]
    for request in (requests[5], last[2]):
        rollout: Any = SimpleNamespace(key=request.key)
        assert draws.prompt_of(rollout).tokens.tolist() == request.prompt_tokens.tolist()


def test_enough_groups_need_no_refill_and_none_is_allowed_by_default() -> None:
    draws = make_draws("algorithm.max_refills=1")
    assert draws.draw_refill_requests(np.array([0, 1] * 4, np.float32)) == [] and draws.num_refills == 0
    assert not make_draws().allows_refill()


def logged(requests: Sequence[Any]) -> list[Any]:
    tokens = np.array([7], np.int32)
    return [SimpleNamespace(**vars(r), response_tokens=tokens, weight_version=7) for r in requests]


def test_a_log_that_lacks_own_responses_is_not_made_up_for_by_refills() -> None:
    draws = make_draws("algorithm.max_refills=1")
    own, more = draws.first_requests(), draws.draw_refill_requests(np.zeros(8, np.float32))

    def lacking(responses: Any) -> str:
        scores, again = np.zeros(len(responses), np.float32), StepDraws(draws.config, draws.source, 7)
        return describe_missing_responses(responses, scores, again, (), RunFolder(Path("run")))

    whole = logged([*own, *more])
    lacks = "run/rollouts lacks {} responses of step 8"
    assert lacking(whole) == ""
    assert lacking(whole[:4] + whole[8:12]) == lacks.format("4 of the 8")
    assert lacking(whole[:13]) == lacks.format("3 of the 16")
    whole[-1].prompt_tokens = whole[0].prompt_tokens
    with pytest.raises(ReplayError, match="another prompt"):
        lacking(whole)


# -- whole runs -------------------------------------------------------------------------------------------------------

STEPS, GROUPS, SIZE = 3, 8, 2
OVERRIDES = [
    f"run.num_steps={STEPS}", f"rollout.prompts_per_step={GROUPS}", f"rollout.group_size={SIZE}",
    "rollout.max_new_tokens=96", "rollout.kv_bytes=60000000",
    "algorithm.max_refills=2", "algorithm.updates_per_step=1", "checkpoint.every_steps=1", "checkpoint.keep=9",
]  # fmt: skip


def train(folder: Path) -> str:
    done = tlt(2, "train", str(TINY), *OVERRIDES, f"run.folder={folder}", "run.ranks=2")
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


@pytest.mark.mpi
@pytest.mark.ci
def test_a_run_trains_on_groups_that_teach(straight: Path) -> None:
    lines = read_lines(straight / "tiny" / "metrics.jsonl")
    assert sum(line["rollout/refills"] for line in lines.values()) > 0
    for step in range(STEPS):
        parts, line = records(straight / "tiny", step), lines[step]
        unordered = [row for part in parts for row in zip(part.rollouts, part.rewards, part.advantages, strict=True)]
        rows = sorted(unordered, key=lambda row: row[0].key)
        scores = np.array([reward for _, reward, _ in rows], np.float32)
        trained = ~np.isnan([advantage for _, _, advantage in rows])
        is_informative = informative_groups(scores, SIZE)
        assert trained.sum() == GROUPS * SIZE == line["rollout/trained_samples"]
        assert (trained.reshape(-1, SIZE).all(1) == trained.reshape(-1, SIZE).any(1)).all(), "groups stay whole"
        assert (trained.reshape(-1, SIZE)[:, 0] & is_informative).sum() == min(GROUPS, is_informative.sum())
        assert line["rollout/samples"] == len(rows) and len(rows) % SIZE == 0
        assert line["actor/num_tokens"] == sum(
            len(rollout.response_tokens) for (rollout, _, _), counts in zip(rows, trained, strict=True) if counts
        )
        assert all(len(part.refills) == line["rollout/refills"] for part in parts)
        assert any(rollout.key.stream == Stream.REFILL for rollout, _, _ in rows) == (line["rollout/refills"] > 0)


@pytest.mark.mpi
@pytest.mark.ci
def test_a_run_with_refills_resumes(straight: Path, tmp_path: Path) -> None:
    """After a kill in step 2: no checkpoint of step 1, and nothing of step 2; both have refills."""
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "tiny" / "checkpoints" / f"step-{step:06d}")
    drop_lines(tmp_path / "tiny" / "metrics.jsonl", 2)
    for path in RunFolder(tmp_path / "tiny").rollout_logs(2):
        path.unlink()
    shown = train(tmp_path)
    assert "step 2: its update repeated" in shown and "resuming from step 2" in shown
    assert all(read_lines(straight / "tiny" / "metrics.jsonl")[step]["rollout/refills"] for step in (1, 2))
    for step in range(STEPS):
        assert tokens_of(tmp_path / "tiny", step) == tokens_of(straight / "tiny", step)
    ends = [
        CheckpointStore(folder / "tiny" / "checkpoints", keep=9).open_step(STEPS) for folder in (straight, tmp_path)
    ]
    for name in ends[0].tensor_names("policy"):
        assert (ends[0].read_tensor("policy", name) == ends[1].read_tensor("policy", name)).all(), name
