"""``tlt data prepare``: real schemas in, one question a line out; and the commands that errors about files name."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from answers import TINY, loaded_by, mistake, refusal
from data_sets import write_arrow, write_jsonl, write_parquet

from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config
from tlt_hpc.data.files import KNOWN, open_rows
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.extras.prepare_data.prepare import INSTRUCTION, gsm8k_answer, math_answer
from tlt_hpc.models.tokenizer import find_model

JOBS = TINY.parent
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dapo_row(question: str, answer: str | None, index: int = 0) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": BEFORE + question + AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{index}"},
    }


def gsm8k_row(question: str, answer: str) -> dict[str, Any]:
    return {"question": question, "answer": answer}


def prepare(*arguments: object) -> int:
    return main(["data", "prepare", *map(str, arguments)])


def written(path: str | Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def counts(out: str) -> list[int]:
    """Rows read, duplicates, conflicts, without answer, rows written."""
    names = ("rows read", "duplicates", "conflicts", "without answer", "rows written")
    lines = [line for name in names for line in out.splitlines() if line.startswith(name)]
    return [int(line[14:26].replace(",", "")) for line in lines]


# --- data sets ---


def test_dapo_math_without_its_instruction_and_its_repeats(capsys: Captured) -> None:
    rows = [dapo_row(f"What is ${n}+1$?", str(n + 1), n) for n in range(5)] * 100
    assert prepare("dapo-math", write_parquet(Path("dapo/data/x.parquet"), rows)) == 0
    out = capsys.readouterr().out
    assert written("data/dapo_math.jsonl") == [
        {"prompt": f"What is ${n}+1$?\n\n{INSTRUCTION}", "answer": str(n + 1), "data_source": "math_dapo"}
        for n in range(5)
    ]
    assert counts(out) == [500, 495, 0, 0, 5]
    assert out.startswith("reading dapo/data/x.parquet\n500 rows\n")
    reader = PromptReader(load_config(JOBS / "qwen7b.toml").data, None)
    assert (reader.read(0).text, reader.read(4).answer) == (f"What is $0+1$?\n\n{INSTRUCTION}", "5")


@pytest.mark.parametrize("write", [write_jsonl, write_arrow, write_parquet])
def test_gsm8k_from_every_kind_of_file(write: Any, capsys: Captured) -> None:
    """White space makes no other question, and the fingerprint is the one that a run keeps."""
    ending = write.__name__.removeprefix("write_")
    rows = [
        gsm8k_row("How  many\nclips?", "48/2 = <<48/2=24>>24 clips.\n48+24 = 72.\n#### 72"),
        gsm8k_row("¿Cuánto?", "She has $1,200,000.\n#### 1,200,000"),
        gsm8k_row(" How many clips? ", "#### 72"),
        gsm8k_row("How cold?", "#### 5 is not it\n#### -3"),
    ]
    out = "new/folder/out.jsonl"
    assert prepare("gsm8k", write(Path(f"train-00000-of-00001.{ending}"), rows), "--output", out) == 0
    told = capsys.readouterr().out
    assert counts(told) == [4, 1, 0, 0, 3]
    assert [row["answer"] for row in written(out)] == ["72", "1200000", "-3"]
    assert written(out)[0] == {
        "prompt": f"How  many\nclips?\n\n{INSTRUCTION}", "answer": "72", "data_source": "openai/gsm8k"
    }  # fmt: skip
    mark = hashlib.sha256(Path(out).read_bytes()).hexdigest()
    assert told.splitlines()[-2:] == [f"wrote {out}, sha256 {mark[:12]}", f"for the job: data.source={out}"]
    job = load_config(TINY, [f"data.source={out}"])
    assert open_rows(job.data, frozenset()).digest() == mark


SOLUTIONS = {
    r"so $x=\boxed{5}$.": "5",
    r"first \boxed{1}, then $\boxed{\frac{1}{\sqrt{2}}}$": r"\frac{1}{\sqrt{2}}",
    r"$\fbox{12}$": "12",
    r"\fbox{1} and \boxed{2}": "2",
    r"\boxed{1} and \fbox{2}": "2",
    r"so \boxed{\left\{x, 3\right.}": r"\left\{x, 3\right.",
    r"so \boxed{[0, 1\}}": r"[0, 1\}",
    r"\boxed {7}": "7",
    r"it is $\boxed 9$ in all": "9",
    **dict.fromkeys((r"\boxedtext{3}", r"\boxed{1}, \boxed{2", r"\boxed{ }", "none"), ""),
}


def test_the_last_box_is_the_answer_of_math_and_a_marked_number_that_of_gsm8k() -> None:
    assert {solution: math_answer(solution) for solution in SOLUTIONS} == SOLUTIONS
    assert gsm8k_answer("72") == gsm8k_answer(None) == gsm8k_answer("so ####  ") == ""


def test_math_from_the_folders_of_its_subjects_and_the_sets_to_evaluate_on() -> None:
    for name, answer in (("algebra/train", r"\text{(A)}"), ("geometry/train", r"\{1\}"), ("geometry/test", "3")):
        row = {"problem": f"{name}?", "level": "Level 5", "type": "x", "solution": rf"\boxed{{{answer}}}"}
        write_parquet(Path(f"math/{name}-00000-of-00001.parquet"), [row])
    assert prepare("math", "math/*/train-*.parquet") == 0  # the shell, or the command, finds the files
    assert [row["answer"] for row in written("data/math.jsonl")] == [r"\text{(A)}", r"\{1\}"]
    assert prepare("math", "math/algebra", "math/geometry", "--output", "folders.jsonl") == 0  # their split 'train'
    assert Path("folders.jsonl").read_bytes() == Path("data/math.jsonl").read_bytes()
    row = {"problem": "Q?", "solution": r"\boxed{1}", "answer": r"\frac{3}{4}", "unique_id": "test/1.json"}
    assert prepare("math-500", write_jsonl(Path("test.jsonl"), [row])) == 0
    assert [row["answer"] for row in written("data/math_500.jsonl")] == [r"\frac{3}{4}"]
    assert prepare("aime-2024", write_parquet(Path("aime-2024.parquet"), [dapo_row("Q?", "33")] * 32)) == 0
    assert [row["data_source"] for row in written("data/aime_2024.jsonl")] == ["aime2024"]


# --- what is left out ---


def test_questions_with_several_answers_or_none_are_left_out_and_the_first_named(capsys: Captured) -> None:
    rows = [dapo_row("A?", "1"), dapo_row("B?", "2"), dapo_row("A?", "1"), dapo_row("A?", "[b]3[/b]")]
    rows += [dapo_row(f"{n}?", answer) for n in range(7) for answer in "12"]
    rows += [
        dapo_row("C?", None),
        dapo_row("D?", " "),
        {**dapo_row("E?", "1"), "reward_model": None},
        dapo_row("", "1"),
    ]
    assert prepare("dapo-math", write_parquet(Path("x.parquet"), rows)) == 0
    out = capsys.readouterr().out
    assert [row["answer"] for row in written("data/dapo_math.jsonl")] == ["2"]
    assert counts(out) == [22, 0, 17, 4, 1]
    assert "conflicts               17 (rows of 8 questions with several answers)\n" in out
    assert "left out: x.parquet row 0 has the answer '1', x.parquet row 3 for the same question '[b]3[/b]'\n" in out
    assert out.count("left out: ") == 5 and "... and 3 more such questions\n" in out


# --- what is written ---


def test_an_existing_file_stays_unless_it_is_the_same(capsys: Captured) -> None:
    first, second = (write_jsonl(Path(f"{n}.jsonl"), [gsm8k_row("A?", f"#### {n}")]) for n in (1, 2))
    assert prepare("gsm8k", first) == 0
    before = Path("data/gsm8k.jsonl").stat()
    assert prepare("gsm8k", first) == 0
    assert "\nunchanged: data/gsm8k.jsonl, sha256 " in capsys.readouterr().out
    said = mistake(capsys, "data", "prepare", "gsm8k", second)
    assert said.startswith("tlt: data/gsm8k.jsonl exists and differs (sha256 ")
    after = Path("data/gsm8k.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert sorted(path.name for path in Path("data").iterdir()) == ["gsm8k.jsonl"]


# --- mistakes ---


def test_other_columns_are_named_with_those_that_are_expected(capsys: Captured) -> None:
    path = write_parquet(Path("x.parquet"), [{"question": "A?", "solution": "#### 1", "level": 1}])
    assert mistake(capsys, "data", "prepare", "gsm8k", path) == (
        "tlt: x.parquet row 0 has the columns level, question, solution, and 'gsm8k' has question, answer; give files "
        "of openai/gsm8k, or another NAME\n"
    )
    path = write_jsonl(Path("x.jsonl"), [dapo_row("A?", "1"), {**dapo_row("B?", "1"), "reward_model": {"style": "x"}}])
    assert "x.jsonl:2 has the columns" in mistake(capsys, "data", "prepare", "dapo-math", path)
    assert not Path("data").exists()


def test_mistakes_are_one_line_and_write_nothing(capsys: Captured) -> None:
    Path("broken.parquet").write_bytes(b"version https://git-lfs")
    Path("empty.jsonl").touch()
    write_jsonl(Path("bad.jsonl"), [gsm8k_row("A?", "#### 1"), "{"])
    write_jsonl(Path("half.jsonl"), [gsm8k_row("A\ud800?", "#### 1")])
    write_jsonl(Path("unanswered.jsonl"), [gsm8k_row("A?", "1")])
    write_jsonl(Path("good.jsonl"), [gsm8k_row("A?", "#### 1")])
    files = sorted(Path().iterdir())
    for words, message in (
        ([""], "FILE = '' names no file; on the login node: hf "),
        (["broken.parquet"], "FILE: broken.parquet cannot be read as parquet ("),
        (["empty.jsonl"], "FILE = 'empty.jsonl' has no rows; "),
        (["bad.jsonl"], "bad.jsonl:2: no JSON object ("),
        (["half.jsonl"], "half.jsonl:1: has half of a surrogate pair; fix the row\n"),
        (["unanswered.jsonl"], "no row is left, and data/gsm8k.jsonl was not written; "),
        (["good.jsonl", "--output", "good.jsonl/x.jsonl"], "cannot write good.jsonl: File exists; make room"),
    ):
        assert mistake(capsys, "data", "prepare", "gsm8k", *words).startswith(f"tlt: {message}")
    assert sorted(Path().iterdir()) == files


# --- the commands that errors name ---


def test_what_a_shipped_job_lacks_is_named_with_the_commands_that_make_it(tmp_path) -> None:
    (tmp_path / "jobs").symlink_to(JOBS)
    sources, models = set(), set()
    for job in sorted(JOBS.glob("*.toml")):
        config = load_config(job)
        data, path = config.data, config.model.path
        if path != "embedded:tiny":
            models.add(path)
            with pytest.raises(ValueError, match=rf"hf download [\w-]+/{Path(path).name} --local-dir {path}$"):
                find_model(path)
        if data.source_name.startswith("data/"):
            sources.add(data.source_name)
            makes = r"on the login node: hf download .* && tlt data prep|write it: python jobs/word_problems\.py$"
            assert re.search(f"exist; ({makes})", refusal(open_rows, data, frozenset()))
    assert sources == {str(KNOWN["dapo-math"].output), str(KNOWN["gsm8k"].output), "data/word_problems.jsonl"}
    assert len(models) > 4


def test_the_commands_write_the_file_that_is_missing() -> None:
    """And load neither torch nor MPI for it."""
    job = load_config(JOBS / "qwen0.5b.toml", ["data.source=my data/gsm8k.jsonl"])
    said = refusal(open_rows, job.data, frozenset())
    assert said == (
        "data.source = 'my data/gsm8k.jsonl' does not exist; on the login node: hf download openai/gsm8k --repo-type "
        "dataset --local-dir data/gsm8k && tlt data prepare gsm8k data/gsm8k/main/train-*.parquet --output "
        "'my data/gsm8k.jsonl'"
    )
    row = gsm8k_row("A?", "#### 1")
    write_parquet(Path("data/gsm8k/main/train-00000-of-00001.parquet"), [row])
    write_parquet(Path("data/gsm8k/main/test-00000-of-00001.parquet"), [row, gsm8k_row("B?", "#### 1")])
    code = "import sys; from tlt_hpc.cli.main import main; main(sys.argv[1:])"
    loaded = loaded_by(code, *shlex.split(said.rpartition(" && tlt ")[2]), cwd=Path.cwd())
    assert "pyarrow" in loaded and not {"torch", "mpi4py", "transformers", "huggingface_hub"} & loaded
    assert len(open_rows(job.data, frozenset())) == 1
