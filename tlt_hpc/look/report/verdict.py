"""The top of a report: a few key figures, and answers to the main questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_hpc.common.words import count
from tlt_hpc.look.analysis.learning import change_of
from tlt_hpc.look.report.findings import RunFindings
from tlt_hpc.look.report.gain import RunGain, other_settings
from tlt_hpc.look.words import listed, seconds, share

_NOTICED = 0.03
"""Smallest change of an accept length that is reported."""


@dataclass(frozen=True)
class KeyFigure:
    """A figure with a label and an explanation. ``tone``: good, plain or bad, for the page's colours."""

    label: str
    value: str
    words: str
    tone: str = "plain"


def cards(found: RunFindings, gain: RunGain | None) -> list[KeyFigure]:
    """The key figures that are known."""
    known = [_learned(found), _idle(found), _harvested(found), _gained(gain), text_of(found)[0]]
    return [card for card in known if card is not None]


def answers(found: RunFindings, gain: RunGain | None, why_no_gain: str) -> dict[str, str]:
    """Question -> answer, in the order of the page."""
    gained = "What did speculation gain?"
    if gain is not None and not gain.is_of_speculation:
        gained = f"How fast is it against {gain.against}?"
    same = "the same as without speculation" if found.comparison is None else f"that of {found.comparison.runs[0].name}"
    told = {
        "What was trained?": trained(found),
        "Did it learn?": found.learning.verdict,
        gained: gain.words if gain else why_no_gain,
        "What did the harvested training bring?": brought(found),
        f"Is the text {same}?": text_of(found)[1],
        "Where did the time go?": found.throughput.verdict,
    }
    return {question: words for question, words in told.items() if words}


def trained(found: RunFindings) -> str:
    """Model, data, algorithm, steps, ranks, tokens, time, and whether the run has ended."""
    log, setting = found.log, found.log.setting
    model, data, algorithm = setting("model", "path"), setting("data", "source"), setting("algorithm", "name")
    data = ", ".join(map(str, data)) if isinstance(data, list) else data
    num_steps, planned = len(found.learning.steps), setting("run", "num_steps")
    steps = count(num_steps, "step")
    if log.num_lines_before:
        steps = f"the last {steps} of {log.num_lines_before + num_steps} are shown here"
    elif isinstance(planned, int) and planned > num_steps:
        steps = f"{num_steps} of {planned} steps"
    prompts, group = setting("rollout", "prompts_per_step"), setting("rollout", "group_size")
    is_known = isinstance(prompts, int) and isinstance(group, int)
    tokens, took = log.total("perf/total_num_tokens"), log.total("timing_s/step")
    parts = [
        (f"{model} on {data}" if model and data else "A policy") + (f" with {algorithm}" if algorithm else "") + ":",
        steps + (f", {count(prompts, 'prompt')} with {count(group, 'response')} each" if is_known else ""),
        f"on {found.throughput.ranks_in_words};" if found.num_ranks else "",
        f"{tokens:,.0f} response tokens," if tokens else "",
        f"{seconds(took)} of steps." if took else "no step is timed.",
        _clock(found),
    ]
    lines, logs = num_steps, len(found.throughput.steps)
    if logs < lines:
        parts.append(f"Of {count(lines, 'step')} only {logs} have their logs here: what needs logs covers only those.")
    if log.finished:
        parts.append(f"It has finished; the policy's digest is {log.finished.policy_sha256[:12]}.")
    else:
        parts.append("It has not finished; this is its state so far." if found.is_begun else "No step is committed.")
    return " ".join(filter(None, parts))


def _clock(found: RunFindings) -> str:
    """Wall-clock time, including the time between steps and between starts."""
    began, ended, starts = found.throughput.began, found.throughput.ended, len(found.log.starts)
    again = f", {count(starts, 'start')}" if starts > 1 else ""
    if not (np.all(ended >= began) and np.all(began[1:] >= began[:-1])):
        return f"How long it took is unknown: its clock was set back{again}."
    steps, logged = found.learning.steps, found.throughput.steps
    if not len(steps) or not len(logged) or (steps[0], steps[-1]) != (logged[0], logged[-1]):
        return ""
    whole = float(ended[-1] - began[0])
    hours = whole * found.num_ranks / 3600
    return f"By the clock {seconds(whole)} from first to last ({hours:,.2f} rank-hours{again})."


def brought(found: RunFindings) -> str:
    """How the accept length of the drafter's own drafts changed: what one run can say about harvested training."""
    change = change_of(found.acceptance.own_accept_length)
    if found.throughput.harvested <= 0 or change is None:
        return ""
    grew = change.last / change.first - 1
    if abs(grew) < _NOTICED or not change.is_clear:
        how_much = "no clear change in this run: the gain is that of the drafter it began with"
    else:
        how_much = f"{share(abs(grew), 1)} {'more' if grew > 0 else 'less'}"
    return (
        f"The draft model's own drafts (chain of 4) came to {change.first:.2f} tokens a pass in the first "
        f"{count(change.quarter, 'step')} and {change.last:.2f} in the last: {how_much}. The policy changed "
        "meanwhile, too; tlt ablate measures what training alone brings."
    )


def text_of(found: RunFindings) -> tuple[KeyFigure | None, str]:
    """Whether speculation changed any token, and how that is known: as a key figure and in words."""
    if found.comparison is not None and found.other is not None and len(found.comparison.compared_steps):
        name, steps = found.comparison.runs[0].name, count(len(found.comparison.compared_steps), "step")
        first = next((step for step in found.comparison.first_difference.values() if step is not None), None)
        changed = other_settings(found.other.config, found.log.config)
        if first is None:
            is_proof = found.mode != "plain" and found.other.setting("speculation", "mode") == "plain"
            what = "with and without speculation" if is_proof else f"as in {name}"
            is_equal = found.log.finished is not None and found.log.finished == found.other.finished
            weights = "; the trained weights are equal to the last bit" if is_equal else ""
            card = KeyFigure("Text", "the same", f"token for token, {what} ({steps} compared)", "good")
            return card, f"Yes: every token of {steps} is the same as in {name}{weights}."
        if changed:
            return None, f"Not comparable: {name} is another job ({listed(changed[:4])} differ), and so are its tokens."
        why = "" if found.is_guarded else ": in this precision near-ties may be decided either way"
        card = KeyFigure("Text", "differs", "from that of the other run", "bad")
        return card, f"No: against {name} the tokens differ from step {first} on{why}."
    if found.mode in ("plain", ""):
        return None, "There was no speculation in this run." if found.mode else ""
    if found.is_guarded:
        return KeyFigure("Text", "not compared", "the same by construction; --against a plain run proves it"), (
            "By construction, yes: the same noise decides every token, and near-ties are decided alike on all paths. "
            "To verify it, compare with a run of the same seed without speculation: tlt report RUN --against PLAIN_RUN."
        )
    return KeyFigure("Text", "exact samples", "near-ties may be decided either way in this precision"), (
        "Nearly: the same noise decides every token, but in this precision near-ties may be decided either way. Every "
        "path is an exact sample of its own logits."
    )


def _learned(found: RunFindings) -> KeyFigure | None:
    change = change_of(found.learning.series["score"])
    if change is None:
        return None
    over = "step" if change.quarter == 1 else f"{change.quarter} steps"
    doubt = "" if change.is_clear else "; within what steps vary by" if change.error else "; too few steps to tell"
    tone = "plain" if not change.is_clear else "good" if change.last > change.first else "bad"
    value = f"{change.first:.2f} \u2192 {change.last:.2f}"
    return KeyFigure("Score", value, f"mean score, first and last {over}{doubt}", tone)


def _idle(found: RunFindings) -> KeyFigure | None:
    idle, whole = found.throughput.idle, found.throughput.rollout
    if found.num_ranks < 2 or whole <= 0:
        return None
    words = f"of the ranks' rollout time they had finished and waited for the last rank ({seconds(idle)} together)"
    return KeyFigure("Idle", share(idle, whole), words)


def _harvested(found: RunFindings) -> KeyFigure | None:
    idle = found.throughput.idle
    if found.num_ranks < 2 or found.mode != "full" or idle <= 0:
        return None
    updates = found.log.total("drafter/steps")
    words = "of that waiting trained the draft model" + (f": {count(updates, 'update')} of it" if updates else "")
    return KeyFigure("Harvested", share(found.throughput.harvested, idle), words)


def _gained(gain: RunGain | None) -> KeyFigure | None:
    if gain is None:
        return None
    steps = f"whole steps: {gain.step:.2f}\u00d7"
    if not gain.is_of_speculation:
        words = f"its seconds over this run's, in rollouts; {steps}; no measure of speculation, as said below"
        return KeyFigure(f"Against {gain.against}", f"{gain.rollout:.2f}\u00d7", words)
    tone = {True: "good", False: "bad", None: "plain"}[gain.pays]
    known = f"measured in {count(gain.num_steps, 'step')}" + ("" if gain.is_even else ", on a machine that others used")
    value = f"{gain.rollout:.2f}\u00d7"
    return KeyFigure("Gained", value, f"as fast as without speculation, on the same rollouts ({known}); {steps}", tone)
