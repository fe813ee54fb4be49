"""What a report says first: a few large figures with what they mean, and the same in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tlt_hpc.look.analysis.learning import change_of
from tlt_hpc.look.analysis.result import count, listed, seconds, share
from tlt_hpc.look.report.findings import Findings
from tlt_hpc.look.report.gain import Gain, other_settings


class Text(Enum):
    """Whether the other run's responses are the same, as far as both were read."""

    SAME = "same"
    DIFFERENT = "different"
    OTHER_JOB = "other job"
    """Settings differ that make other responses: nothing can be said."""
    UNKNOWN = "unknown"


_NOTICED = 0.03
"""Growth of an accept length from which it is spoken of."""


@dataclass(frozen=True)
class Card:
    """``tone``: good, plain or bad, for the page's colours; the words say it too."""

    label: str
    value: str
    words: str
    tone: str = "plain"


@dataclass(frozen=True)
class Answer:
    """A question that a reader has, and its answer."""

    question: str
    words: str


def cards(found: Findings, gain: Gain | None) -> list[Card]:
    """Those that can be told."""
    told = [_learned(found), _idle(found), _harvested(found), _gained(gain), _text(found)]
    return [card for card in told if card is not None]


def answers(found: Findings, gain: Gain | None, why_no_gain: str) -> list[Answer]:
    """In the order in which they are asked."""
    gained = "What did speculation gain?"
    if gain is not None and not gain.is_of_speculation:
        gained = f"How fast is it against {gain.against}?"
    told = [
        Answer("What was trained?", trained(found)),
        Answer("Did it learn?", found.learning.verdict),
        Answer(gained, gain.words if gain else why_no_gain),
        Answer("What did the harvested training bring?", brought(found)),
        Answer(_text_question(found), text_in_words(found)),
        Answer("Where did the time go?", found.throughput.verdict),
    ]
    return [answer for answer in told if answer.words]


def trained(found: Findings) -> str:
    """Model, data, algorithm, how many steps of what on how many ranks, and whether it has ended."""
    model, data = found.log.setting("model", "path"), found.log.setting("data", "source")
    algorithm = found.log.setting("algorithm", "name")
    what = f"{model} on {_shown(data)}" if model and data else "A policy"
    what += f" with {algorithm}" if algorithm else ""
    parts = [f"{what}: {_steps(found)}"]
    prompts, group = found.log.setting("rollout", "prompts_per_step"), found.log.setting("rollout", "group_size")
    if isinstance(prompts, int) and isinstance(group, int):
        parts[0] += f", {count(prompts, 'prompt')} with {count(group, 'response')} each"
    if found.num_ranks:
        parts[0] += f", on {found.ranks_in_words}"
    tokens, took = _sum(found, "perf/total_num_tokens"), _sum(found, "timing_s/step")
    if tokens:
        parts[0] += f"; {tokens:,.0f} response tokens"
    parts[0] += f", in {seconds(took)} of steps." if took else "."
    return " ".join(filter(None, [*parts, _clock(found), _logs(found), _state(found)]))


def brought(found: Findings) -> str:
    """What the drafter's own drafts came to over the run: as much of the training's part as one run can tell."""
    change = change_of(found.acceptance.own_accept_length)
    if found.harvested <= 0 or change is None:
        return ""
    grew = change.last / change.first - 1
    if abs(grew) < _NOTICED or not change.is_clear:
        how_much = "hardly anything in this run: the gain is that of the drafter it began with"
    else:
        how_much = f"{share(abs(grew), 1)} {'more' if grew > 0 else 'less'}"
    return (
        f"The draft model's own drafts (chain of 4) came to {change.first:.2f} tokens a pass in the first "
        f"{count(change.quarter, 'step')} and {change.last:.2f} in the last: {how_much}. The policy changed meanwhile, "
        "too; what training alone brings, tlt ablate tells."
    )


def text_of(found: Findings) -> Text:
    """Whether the tokens are those of the other run, as far as both were read."""
    if found.comparison is None or found.other is None or len(found.comparison.compared_steps) == 0:
        return Text.UNKNOWN
    if all(step is None for step in found.comparison.first_difference.values()):
        return Text.SAME
    return Text.OTHER_JOB if other_settings(found.other.config, found.log.config) else Text.DIFFERENT


def text_in_words(found: Findings) -> str:
    """Whether speculation changed a token, and how that is known."""
    text = text_of(found)
    if text in (Text.SAME, Text.DIFFERENT, Text.OTHER_JOB):
        return _compared(found, text)
    if not found.mode:
        return ""
    if found.mode == "plain":
        return "There was no speculation in this run."
    if found.is_guarded:
        return (
            "By construction, yes: the same noise decides every token, and near-ties were decided alike on all paths. "
            "To see it proved, give a run of the same seed without speculation: tlt report RUN --against PLAIN_RUN."
        )
    return (
        "Nearly: the same noise decides every token, but in this precision near-ties may fall either way. Every path "
        "is an exact sample of its own logits."
    )


def _compared(found: Findings, text: Text) -> str:
    assert found.comparison is not None and found.other is not None
    other, steps = found.comparison.runs[0].name, len(found.comparison.compared_steps)
    if text is Text.SAME:
        held = f"every token of {count(steps, 'step')} was held against {other}"
        return f"Yes: {held}, and all are the same{_same_policy(found)}."
    first = next(step for step in found.comparison.first_difference.values() if step is not None)
    if text is Text.OTHER_JOB:
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
    """How many there are, of how many."""
    num_steps, planned = len(found.learning.steps), found.log.setting("run", "num_steps")
    if found.num_lines_before:
        return f"the last {count(num_steps, 'step')} of {found.num_lines_before + num_steps} are looked at here"
    if isinstance(planned, int) and planned > num_steps:
        return f"{num_steps} of {planned} steps"
    return count(num_steps, "step")


def _clock(found: Findings) -> str:
    """By the clock, with what lies between steps and between starts."""
    starts = len(found.environments.starts)
    again = f", {count(starts, 'start')}" if starts > 1 else ""
    if found.is_set_back:
        return f"How long it took is not known: its clock was set back{again}."
    if found.clock_seconds is None:
        return f"It was started {starts} times." if starts > 1 else ""
    hours = found.clock_seconds * found.num_ranks / 3600
    return f"By the clock {seconds(found.clock_seconds)} from first to last ({hours:,.2f} rank-hours{again})."


def _logs(found: Findings) -> str:
    lines, logs = len(found.learning.steps), len(found.throughput.steps)
    if logs >= lines:
        return ""
    return f"Of {count(lines, 'step')} only {logs} have their logs here: what follows from logs is of those."


def _state(found: Findings) -> str:
    if found.final:
        return f"It has finished; the policy's digest is {found.final.policy_sha256[:12]}."
    if found.is_begun:
        return "It has not finished; this is how far it has come."
    return "Whether a step is committed is not known: metrics.jsonl has no line."


def _same_policy(found: Findings) -> str:
    """Also the weights, where both runs have ended at the same step."""
    own, other = found.final, found.other_final
    if own is not None and own == other:
        return "; the trained weights are equal to the last bit"
    return ""


def _learned(found: Findings) -> Card | None:
    change = change_of(found.learning.series["score"])
    if change is None:
        return None
    over = "step" if change.quarter == 1 else f"{change.quarter} steps"
    doubt = "" if change.is_clear else "; within what steps vary by" if change.error else "; too few steps to tell"
    tone = "plain" if not change.is_clear else "good" if change.last > change.first else "bad"
    value = f"{change.first:.2f} \u2192 {change.last:.2f}"
    return Card("Score", value, f"mean score, first and last {over}{doubt}", tone)


def _idle(found: Findings) -> Card | None:
    idle, whole = found.idle
    if found.num_ranks < 2 or whole <= 0:
        return None
    whole_steps = float(
        np.nansum((found.throughput.step_seconds * found.throughput.num_ranks)[found.throughput.is_whole])
    )
    of_all = f", {share(idle, whole_steps)} of whole steps" if whole_steps > 0 else ""
    words = (
        f"of the ranks' rollout time they had finished and waited for the last rank ({seconds(idle)} together{of_all})"
    )
    return Card("Idle", share(idle, whole), words)


def _harvested(found: Findings) -> Card | None:
    idle, _ = found.idle
    if found.num_ranks < 2 or found.mode != "full" or idle <= 0:
        return None
    updates = _sum(found, "drafter/steps")
    made = f": {count(updates, 'update')} of it" if updates else ""
    return Card("Harvested", share(found.harvested, idle), f"of that waiting trained the draft model{made}")


def _gained(gain: Gain | None) -> Card | None:
    if gain is None:
        return None
    steps = f"whole steps: {gain.step:.2f}\u00d7"
    if not gain.is_of_speculation:
        words = f"its seconds over this run's, in rollouts; {steps}; no measure of speculation, as said below"
        return Card(f"Against {gain.against}", f"{gain.rollout:.2f}\u00d7", words)
    tone = {True: "good", False: "bad", None: "plain"}[gain.pays]
    if gain.is_measured:
        uneven = "" if gain.is_even else ", on a machine that others used"
        known = f"measured in {count(gain.num_steps, 'step')}{uneven}"
        words = f"as fast as without speculation, on the same rollouts ({known}); {steps}"
        return Card("Gained", f"{gain.rollout:.2f}\u00d7", words, tone)
    error = f"\u00b1{share(gain.high / gain.rollout - 1, 1)}"
    words = f"as fast as without speculation (estimated, {error}); {steps}"
    return Card("Gained", f"about {gain.rollout:.1f}\u00d7", words, tone)


def _text(found: Findings) -> Card | None:
    text = text_of(found)
    if text is Text.SAME:
        assert found.comparison is not None and found.other is not None
        steps = count(len(found.comparison.compared_steps), "step")
        is_proof = found.mode != "plain" and found.other.setting("speculation", "mode") == "plain"
        what = "with and without speculation" if is_proof else f"as in {found.comparison.runs[0].name}"
        return Card("Text", "the same", f"token for token, {what} ({steps} compared)", "good")
    if text is Text.DIFFERENT:
        return Card("Text", "differs", "from that of the other run", "bad")
    if text is Text.OTHER_JOB or found.mode in ("plain", ""):
        return None
    if found.is_guarded:
        return Card("Text", "not compared", "the same by construction; --against a plain run proves it")
    return Card("Text", "exact samples", "near-ties may fall either way in this precision")


def _sum(found: Findings, metric: str) -> float:
    """Over the lines; 0 where none tells."""
    values = found.log.metric(metric)
    return float(values[np.isfinite(values)].sum())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:3])) + (", ..." if len(value) > 3 else "")
    return str(value)
