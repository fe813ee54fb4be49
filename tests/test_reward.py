"""The kind that judges a response, the text that is judged, the parts of a reward, and the rewards of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from logged import make_rollout
from smollm2 import smollm2_folder
from tiny import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from tlt_hpc.common.records import Prompt, Rollout, SampleKey
from tlt_hpc.config import ConfigError, RewardSection, load_config
from tlt_hpc.plan.inputs import read_assets
from tlt_hpc.rewards.answer import Answer, Failure, Verdict
from tlt_hpc.rewards.judge import find_prompt_problem, judge, kind_for
from tlt_hpc.rewards.scorer import Judge, Scorer, Unjudged, join_unjudged, open_process_judge, without_reward_parts
from tlt_hpc.rewards.text import format_tags_reward
from tlt_hpc.run.session import decode_response_text

TINY = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"
BOXED = RewardSection()


def reward(kind: str, text: str, truth: str, settings: RewardSection = BOXED) -> float:
    return judge(Answer(kind, "a", text, truth), settings).reward


# --- parts ---


def test_the_form_is_mixed_into_every_other_kind() -> None:
    settings = RewardSection(format_tags=("think",), weights={"answer": 0.75, "format": 0.25})
    right, wrong = "<think>\\boxed{3}</think>", "<think>\\boxed{4}</think>"
    assert reward("numeric", right, "3", settings) == 1.0
    assert reward("numeric", wrong, "3", settings) == 0.25
    assert reward("numeric", "\\boxed{3}", "3", settings) == 0.75
    unread = judge(Answer("numeric", "a", right, "three"), settings)
    assert unread == Verdict(0.0, Failure.UNREADABLE, "answer 'three' has no number"), "a form earns nothing then"


@pytest.mark.parametrize(
    ("kind", "truth", "failure", "wanted"),
    [
        ("code", "assert f(1) == 1", Failure.CPU, -0.25),
        ("code", "assert f(1) == 1", Failure.UNREADABLE, -0.25),
        ("code", "f(1)", Failure.UNREADABLE, 0.0),
        ("math", "1", Failure.CPU, -0.25),
        ("math", "1", Failure.SIZE, -0.25),
        ("math", "1", Failure.UNREADABLE, 0.0),
        ("math", "1", Failure.WALL, 0.0),
        ("a.py:f", "1", Failure.CPU, 0.0),
    ],
)
def test_a_response_that_fails_has_the_other_parts_of_a_wrong_answer(
    kind: str, truth: str, failure: Failure, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could have more than one that is wrong, where a part is negative; it is still said to have failed."""
    monkeypatch.setattr("tlt_hpc.rewards.judge._judge_answer_alone", lambda *_: Verdict(0.0, failure))
    settings = RewardSection(default="code", format_tags=("think",), weights={"format": -0.25})
    found = judge(Answer(kind, "a", "<think></think>", truth), settings)
    assert (found.reward, found.failure) == (wanted, failure)


def test_an_evaluation_measures_the_answer_alone() -> None:
    section = RewardSection(format_tags=("think",), weights={"answer": 0.5, "format": 1, "a.py:f": 1})
    assert (
        without_reward_parts(section).functions == ()
        and reward("boxed", "\\boxed{3}", "3", without_reward_parts(section)) == 1.0
    )


def test_a_form_may_begin_in_the_prompt() -> None:
    """Some chat templates end with the tag of the reasoning; what is judged otherwise is what was generated."""
    response = "a</think><answer>b</answer>"
    bench = Judge(RewardSection(default="format", format_tags=("think", "answer")), None)
    for prompt, wanted in (("<user>1<assistant><think>\n", 1.0), ("<think> is how to begin", 0.0)):
        answer = bench.make_answer(Prompt(np.zeros(1, np.int32), prompt, "", "a"), response)
        assert judge(answer, bench.settings).reward == wanted and answer.text == response, prompt


# --- which kind ---


def test_a_source_has_its_own_kind_else_the_first_pattern_else_the_default() -> None:
    table = {"openai/*": "numeric", "openai/humaneval": "code", "*/mmlu_[ab]": "choice", "*": "math"}
    assert kind_for("openai/gsm8k", "boxed", table) == "numeric"
    assert kind_for("openai/humaneval", "boxed", table) == "code", "a name as it stands goes first"
    assert kind_for("cais/mmlu_a", "boxed", table) == "choice"
    assert kind_for("cais/mmlu_c", "boxed", table) == "math"
    assert kind_for("gcd", "boxed", {}) == "boxed"


def test_a_function_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    none, other = tmp_path / "none.py", tmp_path / "other.py"
    other.write_text("def g(): pass")
    for spec, reason in (
        (f"{none}:f", f"{none}: No such file or directory; give a file that is there"),
        (f"{other}:grade", f"{other} has no 'grade'; name a function that it has"),
    ):
        for key, override in (("default =", f"default={spec}"), ("weights:", f"weights={{'{spec}'=1}}")):
            with pytest.raises(ConfigError) as caught:
                read_assets(load_config(TINY, [f"reward.{override}"]), 1)
            assert str(caught.value) == f"reward.{key} '{spec}': {reason}"


# --- the scorer ---


def prompts(source: str = "a") -> list[Prompt]:
    return [Prompt(np.zeros(1, np.int32), "", "1", source)]


def rollouts(num: int) -> list[Rollout]:
    return [make_rollout(SampleKey(0, 0, 0, i, 0), [0], [0], finished_seconds=float(i)) for i in range(num)]


def test_rewards_scored_ahead_are_those_scored_after() -> None:
    asked: list[int] = []

    def text_of(rollout: Rollout) -> str:
        asked.append(rollout.key.draw)
        return f"\\boxed{{{rollout.key.draw % 3}}}"

    bench = open_process_judge(RewardSection())
    after = Scorer(bench, lambda _: prompts()[0], text_of).judge_and_wait_for_rewards(rollouts(9))
    assert after.dtype == np.float32 and after.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0]
    asked.clear()
    scorer, answers = Scorer(bench, lambda _: prompts()[0], text_of), iter([False, False, True])
    assert scorer.has_unscored(rollouts(9))
    scorer.score_while_waiting(rollouts(9), lambda: next(answers))
    assert asked == [0, 1], "the release came after the second answer: none is begun after it"
    assert scorer.num_ahead == 2 and scorer.seconds_before_limit > 0 and scorer.has_unscored(rollouts(9))
    in_another_order = rollouts(9)[::-1]
    assert scorer.judge_and_wait_for_rewards(in_another_order).tobytes() == after[::-1].tobytes()
    assert sorted(asked) == list(range(9)), "nothing is scored twice"
    assert not scorer.has_unscored(rollouts(9)) and scorer.num_ahead == 2


class SlowServer:
    """A client whose verdicts come when they are released; it refuses to be waited for before that is allowed."""

    def __init__(self) -> None:
        self.submitted: list[Answer] = []
        self.verdicts: dict[int, Verdict] = {}
        self.may_wait = False
        self.num_forgotten = 0

    @property
    def num_judged(self) -> int:
        return len(self.verdicts)

    def submit(self, answer: Answer) -> int:
        self.submitted.append(answer)
        return len(self.submitted)

    def send_and_receive(self) -> None:
        pass

    def drop_all_answers(self) -> None:
        self.num_forgotten += 1

    def wait_for_verdicts(self, numbers: Sequence[int]) -> dict[int, Verdict]:
        assert self.may_wait
        return {number: self.verdicts.get(number, Verdict(float(number))) for number in numbers}


def test_what_needs_a_worker_goes_out_as_it_ends_and_the_rest_stays_here() -> None:
    server, section = SlowServer(), RewardSection(by_source={"m": "math"})
    bench = Judge(section, server)  # type: ignore[arg-type]
    all_prompts = [*prompts("m"), *prompts("a"), *prompts("m")]
    scorer = Scorer(bench, lambda rollout: all_prompts[rollout.key.draw], lambda rollout: "\\boxed{1}")
    ended = rollouts(3)
    scorer.submit_and_poll(ended[:1])
    scorer.submit_and_poll(ended[:1])
    assert len(server.submitted) == 1 and not scorer.has_unscored(ended[:1])
    assert scorer.has_unscored(ended[:2]), "the second is judged here"
    scorer.score_while_waiting(ended[:2], lambda: False)
    assert scorer.num_ahead == 1 and not scorer.has_unscored(ended[:2])
    server.may_wait, server.verdicts = True, {1: Verdict(0.0, Failure.CPU)}
    assert scorer.judge_and_wait_for_rewards(ended).tolist() == [0.0, 1.0, 2.0]
    assert [answer.source for answer in server.submitted] == ["m", "m"]
    metrics = scorer.metrics()
    assert metrics["reward/failed/cpu"] == 1 and metrics["reward/failed/memory"] == 0
    assert metrics["rollout/rewards_in_tail"] == 2, "one here, one there"
    assert set(metrics) >= {f"reward/failed/{failure.value}" for failure in Failure}
    assert server.num_forgotten == 1


def test_parts_and_disputes_are_counted_over_what_was_judged() -> None:
    server = SlowServer()
    server.may_wait, server.verdicts = True, {
        1: Verdict(0.5, parts={"answer": 1.0, "f": -0.5}),
        2: Verdict(0.0, parts={"answer": 0.0, "f": 0.25}, is_disputed=True),
        3: Verdict(0.0, Failure.ERROR),
    }  # fmt: skip
    section = RewardSection(weights={"a.py:f": 1})
    scorer = Scorer(Judge(section, server), lambda _: prompts()[0], lambda _: "")  # type: ignore[arg-type]
    names = set(scorer.metrics())
    assert scorer.judge_and_wait_for_rewards(rollouts(3)).tolist() == [0.5, 0.0, 0.0], (
        "a function is called in a worker"
    )
    figures = scorer.metrics()
    assert set(figures) == names, "on a rank without responses, too"
    told = {name: figures[name] for name in figures if "part" in name or "disputed" in name}
    assert told == {
        "reward/part/answer/mean": 0.5, "reward/part/f/mean": -0.125, "reward/with_parts": 2.0, "reward/disputed": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("failure", list(Failure))
def test_a_program_that_fails_is_judged_and_all_else_that_fails_is_not(failure: Failure) -> None:
    server = SlowServer()
    server.may_wait, server.verdicts = True, dict.fromkeys(range(1, 4), Verdict(0.0, failure))
    own = [prompt for kind in ("a.py:f", "math", "code") for prompt in prompts(kind)]
    by_source = {kind: kind for kind in ("a.py:f", "math", "code")}
    scorer = Scorer(Judge(RewardSection(by_source=by_source), server), lambda r: own[r.key.draw], lambda _: "")  # type: ignore[arg-type]
    assert scorer.judge_and_wait_for_rewards(rollouts(3)).tolist() == [0.0] * 3
    found = join_unjudged([scorer.find_unjudged(rollouts(3)), Unjudged(2, ((Failure.ERROR, "boom"),))])
    of_a_program = failure in ("cpu", "memory", "asleep", "output", "crash")
    assert (found.total, found.num_responses) == (3 if of_a_program else 4, 5)
    assert f"(for example: {failure}); " in found.explain()
    if failure != "error":
        told = found.explain()
        assert told.startswith(f"({found.total - 1}) ") and "; (1) a reward function failed" in told


@pytest.mark.parametrize(
    ("kind", "text", "truth"), [("math", "It is 5.", "5"), ("numeric", "It is 5.", "5"), ("choice", "Answer: C", "C")]
)
def test_a_response_that_was_cut_off_gives_no_answer_outside_a_box(kind: str, text: str, truth: str) -> None:
    rewards = [
        judge(Answer(kind, "a", text, truth, is_finished=each), RewardSection()).reward for each in (True, False)
    ]
    assert rewards == [1.0, 0.0]


# --- the data's answers, before a start ---


def problem(kind: str, truth: str, **settings: object) -> str:
    section = RewardSection.model_validate({"by_source": {"a": kind}, **settings})
    return find_prompt_problem(section, Prompt(np.zeros(1, np.int32), "", truth, "a"))


@pytest.mark.parametrize(
    ("kind", "truth", "wrong"), [("numeric", "forty", "forty"), ("numeric", '["1", "two"]', "two"), ("boxed", "{", "{")]
)
def test_an_answer_that_no_response_can_match_is_named(kind: str, truth: str, wrong: str) -> None:
    found = problem(kind, truth)
    assert found.startswith(f"reward kind {kind!r}: ") and repr(wrong) in found and "\n" not in found
    assert problem(kind, truth, format_tags=["think"], weights={"format": 0.5}) == found, "the form makes none right"


def test_only_answers_that_are_compared_and_tests_are_checked() -> None:
    assert problem("a.py:f", "anything") == problem("format", "", format_tags=["a"]) == ""
    assert problem("code", "assert f(1) == 2") == ""
    with pytest.raises(ValueError, match=r"^reward kind 'code' cannot read the tests '\[\]': "):
        problem("code", "[]")


# --- the text of a response ---


TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TEXT = "<think>a é</think>\n<answer>42</answer>"


def read(tokenizer: Tokenizer, text: str) -> str:
    return decode_response_text(tokenizer, np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32))


@pytest.mark.parametrize("is_special", [False, True])
def test_tags_stay_and_control_tokens_do_not(is_special: bool) -> None:
    tokenizer = byte_tokenizer([TEXT], 300, ["<|im_end|>", "<s>", "</s>", "<end_of_turn>", "<eos>"])
    tokenizer.add_tokens([AddedToken(tag, special=is_special) for tag in TAGS])
    found = read(tokenizer, f"<s>{TEXT}<end_of_turn><|im_end|></s><eos>")
    assert found == TEXT and format_tags_reward(found, ["think", "answer"]) == 1.0


def test_spaces_are_those_of_the_whole_text() -> None:
    """Decoders of this kind strip a text's first space, so tags must not cut the text into several."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<think>", "</think>", "</s>")])
    assert decode_response_text(tokenizer, np.array([0, 3, 1, 4, 1, 5])) == "a<think> b</think> b"


def test_tokens_that_the_tokenizer_lacks_are_left_out() -> None:
    """Models may have more rows than their tokenizer has tokens."""
    tokenizer = byte_tokenizer([TEXT], 300, ["<|im_end|>"])
    assert decode_response_text(tokenizer, np.array([60000, *tokenizer.encode("a").ids, 2**31 - 1], np.int32)) == "a"
    assert decode_response_text(tokenizer, np.array([], np.int32)) == ""


def test_real_tokenizers_text_is_what_it_was() -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>assistant\nGrößer 数学 🙂 <think>\\boxed{1}</think><|im_end|>\n<file_sep>").ids
    assert decode_response_text(tokenizer, np.array(ids)) == tokenizer.decode(ids, skip_special_tokens=True)
