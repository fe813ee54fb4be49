"""A real model with a real vocabulary: the decoder against transformers, and the job that trains it."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from launch_ranks import tlt
from smollm2 import TEXTS, smollm2_decoder, smollm2_folder
from tiny import decode_in_pieces
from transformers import LlamaForCausalLM

from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config
from tlt_hpc.models.tokenizer import load_tokenizer

NUM_TOKENS = 96


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(smollm2_folder())
    return torch.tensor([tokenizer.encode(text).ids[:NUM_TOKENS] for text in TEXTS])


PIECES = {"prefill": [NUM_TOKENS], "steps": [32, *[1] * 24, *[4] * 10]}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_logits_equal_transformers_in_fp32(prompts, pieces):
    """Products of packed weights sum in an order of their own, and cost a bit of the last digits."""
    decoder = smollm2_decoder()
    found = decoder.logits(decode_in_pieces(decoder, prompts, pieces))
    difference = (found - logits_of_transformers(prompts, torch.float32)).abs()
    assert difference.max() < 2.5e-4  # transformers itself is 0.9e-4 off its own float64 (logits to 36)
    assert difference.pow(2).mean().sqrt() < 3e-5
    assert (difference > 1e-4).float().mean() < 3e-3  # 0.0017 with the products of an AMD EPYC


@torch.no_grad()
def logits_of_transformers(prompts, dtype):
    return LlamaForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype)(prompts).logits


def test_the_float64_pass_equals_transformers_in_float64(prompts):
    """transformers rounds its rotary angles to fp32 even there."""
    exact = smollm2_decoder().reference_logits(prompts[0], NUM_TOKENS)
    assert (exact - logits_of_transformers(prompts[:1], torch.float64)[0]).abs().max() < 5e-5


# -- jobs/smollm2.toml ----------------------------------------------------------------------------------------------

JOBS = Path(__file__).parents[1] / "jobs"
ASKS = {
    "+": ("gets", "buys", "in another"),
    "-": ("gives away", "are sold", "took out"),
    "*": ("boxes with", "bags of", "Each of"),
}
"""What an operation's problems say, and the ones above it may say too."""


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["word_problems.py", "--folder", str(folder)])
        runpy.run_path(str(JOBS / "word_problems.py"), run_name="__main__")
    return folder


def kind_of(row: dict[str, str]) -> tuple[int, str, int]:
    """The numbers of a problem and what its words ask for, after a check of its answer."""
    question = row["prompt"].split("Question: ")[-1]
    operation = [sign for sign, words in ASKS.items() if any(word in question for word in words)][-1]
    a, b = map(int, re.findall(r"\d+", question))
    assert int(row["answer"]) == {"+": a + b, "-": a - b, "*": a * b}[operation] > 0, row
    return a, operation, b


def test_answers_of_the_problems_are_right_and_those_held_out_have_numbers_of_their_own(problems):
    names = ("word_problems.jsonl", "word_problems_test.jsonl")
    trained, held_out = ([json.loads(line) for line in (problems / name).read_text().splitlines()] for name in names)
    assert len({row["prompt"] for row in trained}) == len(trained) > 1000
    assert len({row["prompt"] for row in held_out}) == len(held_out) > 80
    kinds = {kind_of(row) for row in held_out}
    assert not kinds & {kind_of(row) for row in trained}
    assert {operation for _, operation, _ in kinds} == set(ASKS), "each is measured"


def test_the_job_names_the_files_that_are_written_and_has_room_for_each_prompt(problems):
    config, tokenizer = load_config(JOBS / "smollm2.toml"), load_tokenizer(smollm2_folder())
    written = [config.data.source, *config.evaluation.sources]
    assert written == ["data/word_problems.jsonl", "data/word_problems_test.jsonl"]
    for path in written:
        prompts = [json.loads(line)["prompt"] for line in (problems / Path(path).name).read_text().splitlines()]
        assert max(len(tokenizer.encode(prompt).ids) for prompt in prompts) <= config.data.max_prompt_tokens


def test_the_job_judges_the_answer_alone(problems, tmp_path, capsys):
    right = (" 8 - 3 = 5\n", " 5\n", " Of 8, he keeps 8 - 3 = 5 cards.\n")
    wrong = (" 8 + 3 = 11\n", " 8 - 3 = 5. He has 15\n", "\n")
    rows = [{"response": text, "answer": "5", "expected": float(text in right)} for text in right + wrong]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.source={problems / 'word_problems.jsonl'}"
    assert main(["reward", str(JOBS / "smollm2.toml"), str(tmp_path / "rows.jsonl"), data]) == 0, capsys.readouterr()


JUDGE = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 5 / 5\n"
"""Responses to one prompt differ in it, however few there are."""


@pytest.mark.mpi
@pytest.mark.ci
@pytest.mark.timeout(600)  # half a minute a start on two cores of their own, several on busy ones
def test_the_job_starts_trains_and_resumes_with_a_reward_of_ones_own(problems, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    settings = [
        str(JOBS / "smollm2.toml"), f"model.path={smollm2_folder()}", f"run.folder={tmp_path}",
        f"data.source={problems / 'word_problems.jsonl'}", f"reward.default={tmp_path / 'judge.py'}:score",
        "evaluation.every_steps=0", "checkpoint.every_steps=1", "rollout.prompts_per_step=2", "rollout.max_live=4",
        "optimizer.micro_batch_tokens=128",
    ]  # fmt: skip
    for num_steps in (1, 2):
        tlt(2, "train", *settings, f"run.num_steps={num_steps}")
    steps = [json.loads(line) for line in (tmp_path / "smollm2" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["response_length/mean"] < 24 for step in steps), "responses end with the line"
