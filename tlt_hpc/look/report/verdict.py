"""The top of a report: a few key figures, and answers to the main questions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.learning import change_of
from tlt_hpc.look.report.findings import Findings
from tlt_hpc.look.report.gain import RunGain, other_settings
from tlt_hpc.look.words import listed, seconds, share


class TextMatch(Enum):
    """Whether the other run's responses are the same, as far as both were read."""

    SAME = "same"
    DIFFERENT = "different"
    OTHER_JOB = "other job"
    """Settings that change the responses differ, so that nothing follows."""
    UNKNOWN = "unknown"


_NOTICED = 0.03
"""Smallest change of an accept length that is reported."""


@dataclass(frozen=True)
class KeyFigure:
    """A figure with a label and an explanation. ``tone``: good, plain or bad, for the page's colours."""

    label: str
    value: str
    words: str
    tone: str = "plain"


@dataclass(frozen=True)
class QuestionAnswer:
    """A question and its answer."""

    question: str
    words: str


def cards(found: Findings, gain: RunGain | None) -> list[KeyFigure]:
    """The key figures that are known."""
    told = [_learned(found), _idle(found), _harvested(found), _gained(gain), _text(found)]
    return [card for card in told if card is not None]


def answers(found: Findings, gain: RunGain | None, why_no_gain: str) -> list[QuestionAnswer]:
    """The questions and answers of the page, in order."""
    gained = "What did speculation gain?"
    if gain is not None and not gain.is_of_speculation:
        gained = f"How fast is it against {gain.against}?"
    told = [
        QuestionAnswer("What was trained?", trained(found)),
        QuestionAnswer("Did it learn?", found.learning.verdict),
        QuestionAnswer(gained, gain.words if gain else why_no_gain),
        QuestionAnswer("What did the harvested training bring?", brought(found)),
        QuestionAnswer(_text_question(found), text_in_words(found)),
        QuestionAnswer("Where did the time go?", found.throughput.verdict),
    ]
    return [answer for answer in told if answer.words]


def trained(found: Findings) -> str:
    """Model, data, algorithm, steps, ranks, tokens, time, and whether the run has ended."""
    model, data = found.log.setting("model", "path"), found.log.setting("data", "source")
    algorithm = found.log.setting("algorithm", "name")
    what = f"{model} on {_shown(data)}" if model and data else "A policy"
    what += f" with {algorithm}" if algorithm else ""
    parts = [f"{what}: {_steps(found)}"]
    prompts, group = found.log.setting("rollout", "prompts_per_step"), found.log.setting("rollout", "group_size")
    if isinstance(prompts, int) and isinstance(group, int):
        parts[0] += f", {count(prompts, 'prompt')} with {count(group, 'response')} each"
    if found.num_ranks:
        parts[0] += f", on {found.throughput.ranks_in_words}"
    tokens, took = found.log.total("perf/total_num_tokens"), found.log.total("timing_s/step")
    if tokens:
        parts[0] += f"; {tokens:,.0f} response tokens"
    parts[0] += f", in {seconds(took)} of steps." if took else "."
    return " ".join(filter(None, [*parts, _clock(found), _logs(found), _state(found)]))


def brought(found: Findings) -> str:
    """How the accept length of the drafter's own drafts changed: what one run can say about harvested training."""
    change = change_of(found.acceptance.own_accept_length)
    if found.throughput.whole_harvested <= 0 or change is None:
        return ""
    grew = change.last / change.first - 1
    if abs(grew) < _NOTICED or not change.is_clear:
        how_much = "hardly anything in this run: the gain is that of the drafter it began with"
    else:
        how_much = f"{share(abs(grew), 1)} {'more' if grew > 0 else 'less'}"
    return (
        f"The draft model's own drafts (chain of 4) came to {change.first:.2f} tokens a pass in the first "
        f"{count(change.quarter, 'step')} and {change.last:.2f} in the last: {how_much}. The policy changed "
        "meanwhile, too; tlt ablate measures what training alone brings."
    )


def text_of(found: Findings) -> TextMatch:
    """Whether the tokens equal those of the other run."""
    if found.comparison is None or found.other is None or len(found.comparison.compared_steps) == 0:
        return TextMatch.UNKNOWN
    if all(step is None for step in found.comparison.first_difference.values()):
        return TextMatch.SAME
    return TextMatch.OTHER_JOB if other_settings(found.other.config, found.log.config) else TextMatch.DIFFERENT


def text_in_words(found: Findings) -> str:
    """Whether speculation changed any token, and how that is known."""
    text = text_of(found)
    if text in (TextMatch.SAME, TextMatch.DIFFERENT, TextMatch.OTHER_JOB):
        return _compared(found, text)
    if not found.mode:
        return ""
    if found.mode == "plain":
        return "There was no speculation in this run."
    if found.is_guarded:
        return (
            "By construction, yes: the same noise decides every token, and near-ties were decided alike on all paths. "
            "To verify it, compare with a run of the same seed without speculation: tlt report RUN --against PLAIN_RUN."
        )
    return (
        "Nearly: the same noise decides every token, but in this precision near-ties may fall either way. Every path "
        "is an exact sample of its own logits."
    )


def _compared(found: Findings, text: TextMatch) -> str:
    assert found.comparison is not None and found.other is not None
    other, steps = found.comparison.runs[0].name, len(found.comparison.compared_steps)
    if text is TextMatch.SAME:
        return f"Yes: every token of {count(steps, 'step')} is the same as in {other}{_same_policy(found)}."
    first = next(step for step in found.comparison.first_difference.values() if step is not None)
    if text is TextMatch.OTHER_JOB:
        changed = other_settings(found.other.config, found.log.config)
        return f"Not comparable: {other} is another job ({listed(changed[:4])} differ), and so are its tokens."
    why = "" if found.is_guarded else (
        ": in this precision near-ties may fall either way (docs/how_it_works.md, The tie guard, and its limits)"
    )  # fmt: skip
    return f"No: against {other} the tokens differ from step {first} on{why}."


def _text_question(found: Findings) -> str:
    return f"Is the text that of {found.comparison.runs[0].name}?" if found.comparison else (
        "Is the text the same as without it?"
    )  # fmt: skip


def _steps(found: Findings) -> str:
    """Number of steps, and of how many."""
    num_steps, planned = len(found.learning.steps), found.log.setting("run", "num_steps")
    if found.num_lines_before:
        return f"the last {count(num_steps, 'step')} of {found.num_lines_before + num_steps} are shown here"
    if isinstance(planned, int) and planned > num_steps:
        return f"{num_steps} of {planned} steps"
    return count(num_steps, "step")


def _clock(found: Findings) -> str:
    """Wall-clock time, including the time between steps and between starts."""
    starts = len(found.environments.starts)
    again = f", {count(starts, 'start')}" if starts > 1 else ""
    if found.is_set_back:
        return f"How long it took is unknown: its clock was set back{again}."
    if found.clock_seconds is None:
        return f"It was started {starts} times." if starts > 1 else ""
    hours = found.clock_seconds * found.num_ranks / 3600
    return f"By the clock {seconds(found.clock_seconds)} from first to last ({hours:,.2f} rank-hours{again})."


def _logs(found: Findings) -> str:
    lines, logs = len(found.learning.steps), len(found.throughput.steps)
    if logs >= lines:
        return ""
    return f"Of {count(lines, 'step')} only {logs} have their logs here: what needs logs covers only those."


def _state(found: Findings) -> str:
    if found.log.finished:
        return f"It has finished; the policy's digest is {found.log.finished.policy_sha256[:12]}."
    if found.is_begun:
        return "It has not finished; this is its state so far."
    return "It is unknown whether a step is committed: metrics.jsonl has no line."


def _same_policy(found: Findings) -> str:
    """Whether the final weights are equal, if both runs have finished at the same step."""
    own = found.log.finished
    if found.other is not None and own is not None and own == found.other.finished:
        return "; the trained weights are equal to the last bit"
    return ""


def _learned(found: Findings) -> KeyFigure | None:
    change = change_of(found.learning.series["score"])
    if change is None:
        return None
    over = "step" if change.quarter == 1 else f"{change.quarter} steps"
    doubt = "" if change.is_clear else "; within what steps vary by" if change.error else "; too few steps to tell"
    tone = "plain" if not change.is_clear else "good" if change.last > change.first else "bad"
    value = f"{change.first:.2f} \u2192 {change.last:.2f}"
    return KeyFigure("Score", value, f"mean score, first and last {over}{doubt}", tone)


def _idle(found: Findings) -> KeyFigure | None:
    idle, whole = found.throughput.whole_idle, found.throughput.whole_rollout
    if found.num_ranks < 2 or whole <= 0:
        return None
    whole_steps = float(
        np.nansum((found.throughput.step_seconds * found.throughput.num_ranks)[found.throughput.is_whole])
    )
    of_all = f", {share(idle, whole_steps)} of whole steps" if whole_steps > 0 else ""
    words = (
        f"of the ranks' rollout time they had finished and waited for the last rank ({seconds(idle)} together{of_all})"
    )
    return KeyFigure("Idle", share(idle, whole), words)


def _harvested(found: Findings) -> KeyFigure | None:
    idle = found.throughput.whole_idle
    if found.num_ranks < 2 or found.mode != "full" or idle <= 0:
        return None
    updates = found.log.total("drafter/steps")
    made = f": {count(updates, 'update')} of it" if updates else ""
    return KeyFigure(
        "Harvested", share(found.throughput.whole_harvested, idle), f"of that waiting trained the draft model{made}"
    )


def _gained(gain: RunGain | None) -> KeyFigure | None:
    if gain is None:
        return None
    steps = f"whole steps: {gain.step:.2f}\u00d7"
    if not gain.is_of_speculation:
        words = f"its seconds over this run's, in rollouts; {steps}; no measure of speculation, as said below"
        return KeyFigure(f"Against {gain.against}", f"{gain.rollout:.2f}\u00d7", words)
    tone = {True: "good", False: "bad", None: "plain"}[gain.pays]
    uneven = "" if gain.is_even else ", on a machine that others used"
    known = f"measured in {count(gain.num_steps, 'step')}{uneven}"
    words = f"as fast as without speculation, on the same rollouts ({known}); {steps}"
    return KeyFigure("Gained", f"{gain.rollout:.2f}\u00d7", words, tone)


def _text(found: Findings) -> KeyFigure | None:
    text = text_of(found)
    if text is TextMatch.SAME:
        assert found.comparison is not None and found.other is not None
        steps = count(len(found.comparison.compared_steps), "step")
        is_proof = found.mode != "plain" and found.other.setting("speculation", "mode") == "plain"
        what = "with and without speculation" if is_proof else f"as in {found.comparison.runs[0].name}"
        return KeyFigure("Text", "the same", f"token for token, {what} ({steps} compared)", "good")
    if text is TextMatch.DIFFERENT:
        return KeyFigure("Text", "differs", "from that of the other run", "bad")
    if text is TextMatch.OTHER_JOB or found.mode in ("plain", ""):
        return None
    if found.is_guarded:
        return KeyFigure("Text", "not compared", "the same by construction; --against a plain run proves it")
    return KeyFigure("Text", "exact samples", "near-ties may fall either way in this precision")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:3])) + (", ..." if len(value) > 3 else "")
    return str(value)
